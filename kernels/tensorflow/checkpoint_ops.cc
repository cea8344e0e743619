// The ops that write and read TensorFlow bundles, and the one that copies a table to be written later.

#include "shape_functions.h"

namespace kvtools {

// Writes tables as one shard of a TensorFlow bundle, in chunks.
REGISTER_OP("KvTableSave")
    .Attr("N: int >= 1")
    .Attr("tensor_prefixes: list(string)")
    .Attr("names: list(string)")
    .Attr("part: list(int)")
    .Attr("parts: list(int)")
    .Input("prefix: string")
    .Input("handles: N * resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int tables;
      ShapeHandle prefix;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &tables));
      TF_RETURN_IF_ERROR(CheckList<std::string>(c, "tensor_prefixes", tables));
      TF_RETURN_IF_ERROR(CheckList<std::string>(c, "names", tables));
      TF_RETURN_IF_ERROR(CheckList<int64_t>(c, "part", tables));
      TF_RETURN_IF_ERROR(CheckList<int64_t>(c, "parts", tables));
      return c->WithRank(c->input(0), 0, &prefix);
    });

// Replaces a table's contents by the rows of a checkpoint that belong to this part, whatever number of parts
// wrote it. Where the checkpoint has no initializer, the table keeps its own; `initializer` is that one for a
// table that has not been initialized. `prefix` may be of a whole checkpoint and of the increments after it, [k].
// `left_out` says which rows of them the table does not take, "" if it has all. With `log` the log says it, too: for
// those who do not read it, as in a session.
REGISTER_OP("KvTableRestore")
    .Attr("tensor_prefix: string")
    .Attr("part_infix: string")
    .Attr("part: int >= 0")
    .Attr("parts: int >= 1")
    .Attr("initializer: string = ''")
    .Attr("log: bool = true")
    .Input("handle: resource")
    .Input("prefix: string")
    .Output("left_out: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle prefix;
      TF_RETURN_IF_ERROR(c->WithRankAtMost(c->input(1), 1, &prefix));
      return ScalarShape(c);
    });

}  // namespace kvtools
