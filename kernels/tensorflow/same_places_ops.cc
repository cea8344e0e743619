// The op that sees to it that weights lie where ids do.

#include "shape_functions.h"

namespace kvtools {

// Gives `weights` if each of `of_weights`, indices or row splits, is the same as that of `of_ids`; `message` is the
// error otherwise.
REGISTER_OP("KvSamePlaces")
    .Attr("T: type")
    .Attr("N: int >= 1")
    .Attr("message: string")
    .Input("weights: T")
    .Input("of_ids: N * int64")
    .Input("of_weights: N * int64")
    .Output("checked: T")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

}  // namespace kvtools
