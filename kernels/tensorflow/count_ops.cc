// The ops of how often keys came, and of rows that go by when they were written.

#include "shape_functions.h"

namespace kvtools {

// How often each key came: the frequency of its row; of a key that waits to be admitted, its count.
REGISTER_OP("KvTableCounts")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("counts: uint32")
    .SetIsStateful()
    .SetShapeFn(ShapesOfKeys);

// How many keys there are, those that wait included, and the sum of what KvTableCounts gives for them.
REGISTER_OP("KvTableTotals")
    .Input("handle: resource")
    .Output("keys: int64")
    .Output("frequencies: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 2; ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    });

// Adds to the frequencies of rows, and to the counts of keys that wait to be admitted.
REGISTER_OP("KvTableIncreaseCounts")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("counts: int64")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

// Removes rows that were last written before `before`, in what their versions count. How many there were.
REGISTER_OP("KvTableRemoveOlder")
    .Input("handle: resource")
    .Input("before: int64")
    .Output("removed: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle before;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &before));
      return ScalarShape(c);
    });

}  // namespace kvtools
