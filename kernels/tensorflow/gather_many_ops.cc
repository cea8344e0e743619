// The ops of lookups of several tables, or of the parts of one, and of what has to do with parts.

#include "shape_functions.h"

namespace kvtools {
namespace {

absl::Status GatherManyShapes(InferenceContext* c, const TableAttrs& all) {
  bool remember;
  TF_RETURN_IF_ERROR(CheckInBackward(c, all.handles));
  TF_RETURN_IF_ERROR(c->GetAttr("remember", &remember));
  for (int t = 0; t < all.tables; ++t) {
    const ShapeHandle keys = c->input(all.handles + t);
    ShapeHandle rows;
    TF_RETURN_IF_ERROR(c->Concatenate(keys, c->Vector(all.dims[static_cast<size_t>(t)]), &rows));
    c->set_output(t, rows);
    c->set_output(all.tables + t, remember ? keys : c->Vector(0));
  }
  return absl::OkStatus();
}

}  // namespace

// Several lookups in one. Table t has parts[t] handles, the parts that own its keys by floor-mod, and rows of
// dims[t] elements. Rows of 16 bits may come as float32, as in KvTableGather.
REGISTER_OP("KvTableGatherMany")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("H: int >= 1")
    .Attr("T: int >= 1")
    .Attr("parts: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("mode: {'train', 'zeros', 'initial'} = 'train'")
    .Attr("remember: bool = false")
    .Attr("in_backward: list(string) = []")
    .Input("handles: H * resource")
    .Input("keys: T * Tkeys")
    .Output("rows: T * dtype")
    .Output("positions: T * int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TableAttrs all;
      TF_RETURN_IF_ERROR(all.Get(c));
      return GatherManyShapes(c, all);
    });

// The same for other ranks, which wait for the rows: where it fails the op does not, and `error` is what
// KvExchangeTell sends to them; empty where there is none.
REGISTER_OP("KvExchangeLookUp")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("H: int >= 1")
    .Attr("T: int >= 1")
    .Attr("parts: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("mode: {'train', 'zeros', 'initial'} = 'train'")
    .Attr("remember: bool = false")
    .Attr("in_backward: list(string) = []")
    .Input("handles: H * resource")
    .Input("keys: T * Tkeys")
    .Output("rows: T * dtype")
    .Output("positions: T * int64")
    .Output("error: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TableAttrs all;
      TF_RETURN_IF_ERROR(all.Get(c));
      c->set_output(2 * all.tables, c->Scalar());
      return GatherManyShapes(c, all);
    });

// The gradient of the above: keys, rows and positions of each part, in the order of the batch.
REGISTER_OP("KvTableSplitGradients")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("H: int >= 1")
    .Attr("T: int >= 1")
    .Attr("parts: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .Input("keys: T * Tkeys")
    .Input("gradients: T * dtype")
    .Input("positions: T * int64")
    .Output("part_keys: H * Tkeys")
    .Output("part_rows: H * dtype")
    .Output("part_positions: H * int64")
    .SetShapeFn([](InferenceContext* c) {
      TableAttrs all;
      TF_RETURN_IF_ERROR(all.Get(c));
      SetPartsShapes(c, all);
      for (int h = 0; h < all.handles; ++h) c->set_output(2 * all.handles + h, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

// The same of one table, where the updates of its parts take the gradients from where they are: keys and positions of
// each part, and the rows of the gradients that are theirs.
REGISTER_OP("KvTableSplitKeys")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("parts: int >= 1")
    .Input("keys: Tkeys")
    .Input("positions: int64")
    .Output("part_keys: parts * Tkeys")
    .Output("part_positions: parts * int64")
    .Output("places: parts * uint32")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

// The part that owns each key: key floor-mod parts.
REGISTER_OP("KvTablePartition")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("parts: int >= 1")
    .Input("keys: Tkeys")
    .Output("owner: int32")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

}  // namespace kvtools
