// The ops that tell how a table does.

#include "shape_functions.h"

namespace kvtools {

// How often training lookups asked: [keys, rows born, keys held back by admission]; -1 where nobody counts (a
// table in a GPU's memory).
REGISTER_OP("KvTableLookupCounts")
    .Input("handle: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(3));
      return absl::OkStatus();
    });

// Reads all rows once. `limits` are the upper ends of a histogram's buckets, in ascending order; another bucket
// has what is above. Norms are L2, of values that are finite.
REGISTER_OP("KvTableSurvey")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("most_hot: int >= 0")  // keys of the highest frequencies
    .Attr("most_nan: int >= 0")  // keys of rows with a value that is no number, or infinite
    .Input("handle: resource")
    .Input("limits: float64")   // (B)
    .Output("hot_keys: Tkeys")  // (H), the most frequent first
    .Output("hot_freqs: uint32")
    .Output("buckets: int64")    // (B + 1)
    .Output("moments: float64")  // sum, sum of squares, least, greatest
    .Output("nan_rows: int64")
    .Output("nan_keys: Tkeys")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle limits;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &limits));
      DimensionHandle buckets;
      TF_RETURN_IF_ERROR(c->Add(c->Dim(limits, 0), 1, &buckets));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(2, c->Vector(buckets));
      c->set_output(3, c->Vector(4));
      c->set_output(4, c->Scalar());
      c->set_output(5, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

// From now on, or no longer, training steps measure the gradients that they are given.
REGISTER_OP("KvTableWatchGradients")
    .Attr("on: bool")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

// Of the steps since the last call: [steps, sum and greatest of the norms of a step's gradients (L2 over all
// rows), greatest norm of a row (before equal keys are summed), rows that are not finite].
REGISTER_OP("KvTableGradientNorms")
    .Input("handle: resource")
    .Output("norms: float64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(5));
      return absl::OkStatus();
    });

}  // namespace kvtools
