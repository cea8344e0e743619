// The ops of rows that go, and of the step and the epoch that they go by.

#include "shape_functions.h"

namespace kvtools {

// Removes the rows that `policy` names, one of those in table_policies.h. `search`, of KvTableSearchRanks at its
// end, says which rows of a part go where so many of all parts are kept; otherwise it is empty.
REGISTER_OP("KvTableEvict")
    .Attr("policy: string")
    .Input("handle: resource")
    .Input("search: int64")
    .Output("evicted: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

// How many rows of a table have each value of the next digit of a search. A search is [digits found, the ranks'
// measure and key so far, rows to be kept among those with these digits; 0 at the end].
REGISTER_OP("KvTableCountRanks")
    .Attr("by: {'frequency', 'version', 'norm'}")
    .Input("handle: resource")
    .Input("search: int64")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

// The search with one more digit. `counts` are of all tables; empty where the search was at its end.
REGISTER_OP("KvTableSearchRanks")
    .Attr("by: {'frequency', 'version', 'norm'}")
    .Input("search: int64")
    .Input("counts: int64")
    .Output("found: int64")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(4));
      return absl::OkStatus();
    });

// The step by which rows age. -1 asks; any other number sets it first.
REGISTER_OP("KvTableStep")
    .Input("handle: resource")
    .Input("step: int64")
    .Output("now: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

// The epoch of the touches to come, of a table that evicts by epochs.
REGISTER_OP("KvTableSetEpoch")
    .Input("handle: resource")
    .Input("epoch: int64")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

}  // namespace kvtools
