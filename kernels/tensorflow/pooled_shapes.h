// Shapes of pooled lookups.
#pragma once

#include <vector>

#include "tensorflow/core/framework/shape_inference.h"

namespace kvtools {

// The number of rows of a pooled lookup, as far as it is known: from the splits of ragged ids, or the shape
// of sparse ones. Inputs from `first_segments` on are the segments of each table and then `shapes`;
// attributes `dims` and `outer` are as KvTablePool has them.
inline absl::Status PooledShapes(tensorflow::shape_inference::InferenceContext* c, int first_segments) {
  using tensorflow::shape_inference::DimensionHandle;
  using tensorflow::shape_inference::ShapeHandle;
  std::vector<int64_t> dims, outer;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(c->GetAttr("outer", &outer));
  int shape_input = first_segments + static_cast<int>(dims.size());
  for (size_t t = 0; t < dims.size(); ++t) {
    DimensionHandle rows = c->UnknownDim();
    if (t < outer.size() && outer[t] < 0) {
      ShapeHandle splits;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(first_segments + static_cast<int>(t)), 1, &splits));
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &rows));
    } else {
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(shape_input++, &shape));
      const bool first_only = outer[t] == 1 || (c->RankKnown(shape) && c->Rank(shape) == 2);
      if (first_only && c->RankKnown(shape) && c->Rank(shape) >= 1) rows = c->Dim(shape, 0);
    }
    c->set_output(static_cast<int>(t), c->Matrix(rows, dims[t]));
  }
  return absl::OkStatus();
}

}  // namespace kvtools
