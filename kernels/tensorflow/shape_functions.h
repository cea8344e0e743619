// What shape functions share. They are called with whatever stands in a GraphDef: nothing in it is taken for
// granted, since TensorFlow checks the number of inputs and outputs, and not that of the entries of a list.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace kvtools {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::NoOutputs;
using tensorflow::shape_inference::ScalarShape;
using tensorflow::shape_inference::ShapeHandle;

// Attribute `name`, which must be a list of `wanted` entries: one for each table, say.
template <class Entry>
absl::Status GetList(InferenceContext* c, const char* name, int wanted, std::vector<Entry>* list) {
  list->clear();  // TensorFlow appends
  TF_RETURN_IF_ERROR(c->GetAttr(name, list));
  if (list->size() == static_cast<size_t>(wanted)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("attribute ", name, " has ", list->size(), " entries, expected ", wanted));
}

// The same for one whose entries nobody needs.
template <class Entry>
absl::Status CheckList(InferenceContext* c, const char* name, int wanted) {
  std::vector<Entry> list;
  return GetList(c, name, wanted, &list);
}

// The same for numbers of 1 or more: widths of rows, numbers of parts.
absl::Status GetCounts(InferenceContext* c, const char* name, int wanted, std::vector<int64_t>* list);

// The attributes T and H of an op over several tables, and how many parts and what width each has: H parts in
// all.
struct TableAttrs {
  int tables = 0;
  int handles = 0;
  std::vector<int64_t> parts;
  std::vector<int64_t> dims;

  absl::Status Get(InferenceContext* c);
};

// Attribute `in_backward` of an op over several tables: empty, or an entry for each of H.
absl::Status CheckInBackward(InferenceContext* c, int handles);

// Outputs 0 and on: each table's keys (n) of each part; then for all of them the rows (n, dim).
void SetPartsShapes(InferenceContext* c, const TableAttrs& tables);

// The lists of a pooled lookup over `tables` tables: combiners, outer, weighted and, where the op has them,
// positive and filled; and that S, W and F are as many inputs as these ask for.
absl::Status CheckPooledLists(InferenceContext* c, int tables, bool with_fillers,
                              std::vector<int64_t>* outer);

// Outputs 0 and on, the pooled rows of each table: as many as row splits or the shape of sparse ids tell.
// Inputs from `first_segments` on are the segments of each table and then `shapes`.
absl::Status SetPooledShapes(InferenceContext* c, int first_segments, const std::vector<int64_t>& dims,
                             const std::vector<int64_t>& outer);

// keys.shape + [attribute `width`], with the keys in input 1.
absl::Status RowsShape(InferenceContext* c, const char* width);

// Shape functions: outputs that have the shape of the keys in input 1.
absl::Status ShapesOfKeys(InferenceContext* c);

}  // namespace kvtools
