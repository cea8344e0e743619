// The ops that look up keys in one table.

#include "shape_functions.h"

namespace kvtools {

// mode: "train" inserts missing keys with their initial value; "zeros" and "initial" are read-only and give
// that for a missing key. Rows of 16 bits may come as float32, and so do their gradients then. With `remember`
// positions say where each key's row lies (-1: nowhere), for an update to begin at; else they are empty. A missing
// key is inserted with the probability `admission`; one that is not gives zeros. `in_backward`, here and below,
// names the update that the gradient makes at once, one for each handle; see tfplugin.apply_in_backward.
REGISTER_OP("KvTableGather")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("dim: int >= 1")
    .Attr("mode: {'train', 'zeros', 'initial'} = 'train'")
    .Attr("remember: bool = false")
    .Attr("in_backward: string = ''")
    .Attr("admission: float = 1.0")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("rows: dtype")
    .Output("positions: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      bool remember;
      TF_RETURN_IF_ERROR(c->GetAttr("remember", &remember));
      c->set_output(1, remember ? c->input(1) : c->Vector(0));
      return RowsShape(c, "dim");
    });

// The same in mode "train"; and what the batch evicts: keys, lowest score first, and their rows.
REGISTER_OP("KvTableGatherEvict")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("dim: int >= 1")
    .Attr("remember: bool = false")
    .Attr("in_backward: string = ''")
    .Attr("admission: float = 1.0")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("rows: dtype")
    .Output("positions: int64")
    .Output("evicted_keys: Tkeys")
    .Output("evicted_rows: dtype")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      bool remember;
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("remember", &remember));
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output(1, remember ? c->input(1) : c->Vector(0));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(2, c->Vector(n));
      c->set_output(3, c->Matrix(n, dim));
      return RowsShape(c, "dim");
    });

// Rows that were looked up for keys, wherever they came from, as a function of `handle`: their gradient goes
// to it, one slice for each key. `positions` are those of a lookup, or empty.
REGISTER_OP("KvTableTrainable")
    .Attr("Tkeys: {int64, int32, uint64, string}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("positions: int64")
    .Input("looked_up: dtype")
    .Output("rows: dtype")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(3));
      return absl::OkStatus();
    });

REGISTER_OP("KvTableContains")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("found: bool")
    .SetIsStateful()
    .SetShapeFn(ShapesOfKeys);

// Whether an optimizer's penalty has zeroed the row of each key.
REGISTER_OP("KvTableZeroed")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("zeroed: bool")
    .SetIsStateful()
    .SetShapeFn(ShapesOfKeys);

REGISTER_OP("KvTableStamps")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("freqs: uint32")
    .Output("versions: uint32")
    .SetIsStateful()
    .SetShapeFn(ShapesOfKeys);

// What eviction goes by; 0 for keys that are missing, and in tables without a capacity.
REGISTER_OP("KvTableScores")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("scores: uint64")
    .SetIsStateful()
    .SetShapeFn(ShapesOfKeys);

}  // namespace kvtools
