// The ops that write rows, or what eviction goes by.

#include "shape_functions.h"

namespace kvtools {

REGISTER_OP("KvTableUpsert")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("rows: dtype")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

REGISTER_OP("KvTableAccumulate")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("deltas: dtype")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

// Multiplies rows by others, divides them, or takes the smaller or larger elements.
REGISTER_OP("KvTableCombine")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("op: {'mul', 'div', 'min', 'max'}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("operands: dtype")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

REGISTER_OP("KvTableRemove")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("removed: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

// Sets the scores of keys that are there, in a table that evicts by custom scores. How many there are.
REGISTER_OP("KvTableSetScores")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("Tscores: {int64, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("scores: Tscores")
    .Output("found: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

// Writes rows with their stamps, as KvTableExport gave them.
REGISTER_OP("KvTableImport")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("rows: dtype")
    .Input("freqs: uint32")
    .Input("versions: uint32")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

// Writes rows with their slots and counts, as another table had them; their time is now. The table gets the
// slots that it has not.
REGISTER_OP("KvTableImportColumns")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("N: int >= 1")
    .Attr("slots: string")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("freqs: uint32")
    .Input("columns: N * dtype")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

}  // namespace kvtools
