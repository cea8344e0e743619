// The ops of pooled lookups: the rows of several ids become one.

#include "shape_functions.h"

namespace kvtools {

// Pooled lookups, several in one: tables as in KvTableGatherMany, ids keys[t] (n).
//
// outer[t] says which ids make a row: -1 for the row splits of a RaggedTensor; else segments[t] are the
// indices (n, rank) of a SparseTensor, `shapes` has its shape, and the first outer[t] columns are the row (0:
// all but the last). `weights`, `fill_keys` and `shapes` have an input for each table whose entry in
// weighted, filled and outer asks for it. With positive[t] ids whose weight is not positive are left out. A
// fill key is the one id of a row without any.
REGISTER_OP("KvTablePool")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Tweights: {float, double} = DT_FLOAT")
    .Attr("H: int >= 1")
    .Attr("T: int >= 1")
    .Attr("S: int >= 0")
    .Attr("W: int >= 0")
    .Attr("F: int >= 0")
    .Attr("parts: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("combiners: list(string) >= 1")
    .Attr("outer: list(int) >= 1")
    .Attr("weighted: list(bool) >= 1")
    .Attr("positive: list(bool) >= 1")
    .Attr("filled: list(bool) >= 1")
    .Attr("mode: {'train', 'zeros', 'initial'} = 'train'")
    .Attr("in_backward: list(string) = []")
    .Input("handles: H * resource")
    .Input("keys: T * Tkeys")
    .Input("segments: T * int64")
    .Input("shapes: S * int64")
    .Input("weights: W * Tweights")
    .Input("fill_keys: F * Tkeys")
    .Output("rows: T * dtype")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TableAttrs all;
      std::vector<int64_t> outer;
      TF_RETURN_IF_ERROR(all.Get(c));
      TF_RETURN_IF_ERROR(CheckInBackward(c, all.handles));
      TF_RETURN_IF_ERROR(CheckPooledLists(c, all.tables, true, &outer));
      return SetPooledShapes(c, all.handles + all.tables, all.dims, outer);
    });

// Its gradient with respect to the tables: each part's keys once, and their sums.
REGISTER_OP("KvTablePoolGradient")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Tweights: {float, double} = DT_FLOAT")
    .Attr("H: int >= 1")
    .Attr("T: int >= 1")
    .Attr("S: int >= 0")
    .Attr("W: int >= 0")
    .Attr("F: int >= 0")
    .Attr("parts: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("combiners: list(string) >= 1")
    .Attr("outer: list(int) >= 1")
    .Attr("weighted: list(bool) >= 1")
    .Attr("positive: list(bool) >= 1")
    .Attr("filled: list(bool) >= 1")
    .Input("gradients: T * dtype")
    .Input("keys: T * Tkeys")
    .Input("segments: T * int64")
    .Input("shapes: S * int64")
    .Input("weights: W * Tweights")
    .Input("fill_keys: F * Tkeys")
    .Output("part_keys: H * Tkeys")
    .Output("part_rows: H * dtype")
    .SetShapeFn([](InferenceContext* c) {
      TableAttrs all;
      std::vector<int64_t> outer;
      TF_RETURN_IF_ERROR(all.Get(c));
      TF_RETURN_IF_ERROR(CheckPooledLists(c, all.tables, true, &outer));
      SetPartsShapes(c, all);
      return absl::OkStatus();
    });

// Its gradient with respect to the weights, from the rows that the tables hold now.
REGISTER_OP("KvTablePoolWeightsGradient")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Tweights: {float, double} = DT_FLOAT")
    .Attr("H: int >= 1")
    .Attr("T: int >= 1")
    .Attr("S: int >= 0")
    .Attr("W: int >= 1")
    .Attr("F: int >= 0")
    .Attr("parts: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("combiners: list(string) >= 1")
    .Attr("outer: list(int) >= 1")
    .Attr("weighted: list(bool) >= 1")
    .Attr("positive: list(bool) >= 1")
    .Attr("filled: list(bool) >= 1")
    .Attr("mode: {'train', 'zeros', 'initial'} = 'train'")
    .Input("handles: H * resource")
    .Input("rows: T * dtype")
    .Input("gradients: T * dtype")
    .Input("keys: T * Tkeys")
    .Input("segments: T * int64")
    .Input("shapes: S * int64")
    .Input("weights: W * Tweights")
    .Input("fill_keys: F * Tkeys")
    .Output("weight_gradients: W * Tweights")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TableAttrs all;
      std::vector<int64_t> outer;
      int sparse, weights;
      TF_RETURN_IF_ERROR(all.Get(c));
      TF_RETURN_IF_ERROR(CheckPooledLists(c, all.tables, true, &outer));
      TF_RETURN_IF_ERROR(c->GetAttr("S", &sparse));
      TF_RETURN_IF_ERROR(c->GetAttr("W", &weights));
      for (int w = 0; w < weights; ++w) {
        c->set_output(w, c->input(all.handles + 4 * all.tables + sparse + w));
      }
      return absl::OkStatus();
    });

}  // namespace kvtools
