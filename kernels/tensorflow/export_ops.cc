// The ops that read a table whole, or in pieces.

#include "shape_functions.h"

namespace kvtools {

// All rows. `column` names a slot, or is empty for the value.
REGISTER_OP("KvTableExport")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("column: string = ''")
    .Attr("width: int >= 1")
    .Input("handle: resource")
    .Output("keys: Tkeys")
    .Output("rows: dtype")
    .Output("freqs: uint32")
    .Output("versions: uint32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t width;
      TF_RETURN_IF_ERROR(c->GetAttr("width", &width));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Matrix(n, width));
      c->set_output(2, c->Vector(n));
      c->set_output(3, c->Vector(n));
      return absl::OkStatus();
    });

// The keys alone, for those who read the rows in pieces.
REGISTER_OP("KvTableKeys")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Output("keys: Tkeys")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

// One column, the value or a slot, of keys. Inserts nothing.
REGISTER_OP("KvTableReadColumn")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("column: string = ''")
    .Attr("width: int >= 1")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("rows: dtype")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t width;
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(c->GetAttr("width", &width));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      c->set_output(0, c->Matrix(c->Dim(keys, 0), width));
      return absl::OkStatus();
    });

// Several columns of keys, each row whole, and which keys are there. Inserts nothing.
REGISTER_OP("KvTableReadColumns")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("N: int >= 1")
    .Attr("columns: list(string)")
    .Attr("widths: list(int)")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("rows: N * dtype")
    .Output("found: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      std::vector<int64_t> widths;
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(CheckList<std::string>(c, "columns", n));
      TF_RETURN_IF_ERROR(GetCounts(c, "widths", n, &widths));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      for (int i = 0; i < n; ++i) {
        c->set_output(i, c->Matrix(c->Dim(keys, 0), widths[static_cast<size_t>(i)]));
      }
      c->set_output(n, keys);
      return absl::OkStatus();
    });

// The rows touched at `since` or later, in microseconds since 1970. A table that evicts by LRU knows the time
// of the last touch, one by LFU its second; others that of the last write, their version.
REGISTER_OP("KvTableExportSince")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("dim: int >= 1")
    .Input("handle: resource")
    .Input("since: int64")
    .Output("keys: Tkeys")
    .Output("rows: dtype")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      ShapeHandle since;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &since));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Matrix(n, dim));
      return absl::OkStatus();
    });

}  // namespace kvtools
