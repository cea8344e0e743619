// The ops that follow a table's changes, and those that take what it is at one moment and write it later.
//
// A mark is int64 [2], of which nobody needs to know more: a moment of one table of this process. [-1, -1] is no
// mark: of a table that does not track its changes; and in `since`, that all rows are wanted.

#include "shape_functions.h"

namespace kvtools {

// Begins to note what changes, with at most max_removed keys that went. A table that does goes on. One that a
// restore, an initializer or a copy puts in its place does not.
REGISTER_OP("KvTableTrackChanges")
    .Attr("max_removed: int >= 0")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

// Why the changes since a mark are not known, as a sentence; empty where they are.
REGISTER_OP("KvTableChangesKnown")
    .Input("handle: resource")
    .Input("since: int64")
    .Output("why: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle since;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &since));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

// Has the table keep its rows as they are now, or those that changed since a mark, under the number `cut`, until
// they are saved or dropped. `at` is the mark of now. A table in a GPU's memory gives all rows, and each as it is
// when its turn comes.
REGISTER_OP("KvTableCut")
    .Input("handle: resource")
    .Input("since: int64")
    .Output("cut: int64")
    .Output("at: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle since;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &since));
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Vector(2));
      return absl::OkStatus();
    });

// Writes cuts as one shard of a TensorFlow bundle, and gives them up, also where it fails. Gives for each table the
// rows in it, the keys that went, and how many of the rows were born since.
REGISTER_OP("KvTableSaveCut")
    .Attr("N: int >= 1")
    .Attr("tensor_prefixes: list(string)")
    .Attr("names: list(string)")
    .Attr("part: list(int)")
    .Attr("parts: list(int)")
    .Input("prefix: string")
    .Input("handles: N * resource")
    .Input("cuts: int64")
    .Output("rows: int64")
    .Output("removed: int64")
    .Output("born: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int tables;
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &tables));
      TF_RETURN_IF_ERROR(CheckList<std::string>(c, "tensor_prefixes", tables));
      TF_RETURN_IF_ERROR(CheckList<std::string>(c, "names", tables));
      TF_RETURN_IF_ERROR(CheckList<int64_t>(c, "part", tables));
      TF_RETURN_IF_ERROR(CheckList<int64_t>(c, "parts", tables));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &shape));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 1, &shape));
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(tables));
      return absl::OkStatus();
    });

// Gives up a cut. One that was saved, or dropped already, is none.
REGISTER_OP("KvTableDropCut")
    .Input("handle: resource")
    .Input("cut: int64")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

// Forgets what changed up to a mark. One that is not of the table which is there forgets nothing.
REGISTER_OP("KvTableForgetChanges")
    .Input("handle: resource")
    .Input("upto: int64")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

}  // namespace kvtools
