#include "shape_functions.h"

#include <algorithm>

namespace kvtools {

namespace {

absl::Status CheckInputs(InferenceContext* c, const char* number, const char* list, int64_t asked) {
  int there;
  TF_RETURN_IF_ERROR(c->GetAttr(number, &there));
  if (there == asked) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("attribute ", list, " asks for ", asked, " inputs, ", number, " is ", there));
}

}  // namespace

absl::Status GetCounts(InferenceContext* c, const char* name, int wanted, std::vector<int64_t>* list) {
  TF_RETURN_IF_ERROR(GetList(c, name, wanted, list));
  for (int64_t entry : *list) {
    if (entry < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("attribute ", name, " has an entry of ", entry, ", expected 1 or more"));
    }
  }
  return absl::OkStatus();
}

absl::Status TableAttrs::Get(InferenceContext* c) {
  TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
  TF_RETURN_IF_ERROR(c->GetAttr("H", &handles));
  TF_RETURN_IF_ERROR(GetCounts(c, "parts", tables, &parts));
  TF_RETURN_IF_ERROR(GetCounts(c, "dims", tables, &dims));
  int64_t left = handles;
  for (int64_t count : parts) left = count > left ? -1 : left - count;
  if (left == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("attribute parts has entries that are not ", handles, " in all, as H is"));
}

absl::Status CheckInBackward(InferenceContext* c, int handles) {
  std::vector<std::string> tokens;
  TF_RETURN_IF_ERROR(c->GetAttr("in_backward", &tokens));
  if (tokens.empty()) return absl::OkStatus();
  return CheckList<std::string>(c, "in_backward", handles);
}

void SetPartsShapes(InferenceContext* c, const TableAttrs& tables) {
  int h = 0;
  for (size_t t = 0; t < tables.dims.size(); ++t) {
    for (int64_t p = 0; p < tables.parts[t]; ++p, ++h) {
      const DimensionHandle n = c->UnknownDim();
      c->set_output(h, c->Vector(n));
      c->set_output(tables.handles + h, c->Matrix(n, tables.dims[t]));
    }
  }
}

absl::Status CheckPooledLists(InferenceContext* c, int tables, bool with_fillers,
                              std::vector<int64_t>* outer) {
  std::vector<bool> asks;
  TF_RETURN_IF_ERROR(CheckList<std::string>(c, "combiners", tables));
  TF_RETURN_IF_ERROR(GetList(c, "outer", tables, outer));
  TF_RETURN_IF_ERROR(CheckInputs(
      c, "S", "outer", std::count_if(outer->begin(), outer->end(), [](int64_t n) { return n >= 0; })));
  TF_RETURN_IF_ERROR(GetList(c, "weighted", tables, &asks));
  TF_RETURN_IF_ERROR(CheckInputs(c, "W", "weighted", std::count(asks.begin(), asks.end(), true)));
  if (!with_fillers) return absl::OkStatus();
  TF_RETURN_IF_ERROR(CheckList<bool>(c, "positive", tables));
  TF_RETURN_IF_ERROR(GetList(c, "filled", tables, &asks));
  return CheckInputs(c, "F", "filled", std::count(asks.begin(), asks.end(), true));
}

absl::Status SetPooledShapes(InferenceContext* c, int first_segments, const std::vector<int64_t>& dims,
                             const std::vector<int64_t>& outer) {
  int shape_input = first_segments + static_cast<int>(dims.size());
  for (size_t t = 0; t < dims.size(); ++t) {
    DimensionHandle rows = c->UnknownDim();
    if (outer[t] < 0) {
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

absl::Status RowsShape(InferenceContext* c, const char* width) {
  int64_t elements;
  TF_RETURN_IF_ERROR(c->GetAttr(width, &elements));
  ShapeHandle out;
  TF_RETURN_IF_ERROR(c->Concatenate(c->input(1), c->Vector(elements), &out));
  c->set_output(0, out);
  return absl::OkStatus();
}

absl::Status ShapesOfKeys(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(1));
  return absl::OkStatus();
}

}  // namespace kvtools
