// The ops of a table as a whole: its handle, what it starts from, how large it is, what slots it has.
//
// `slots` and `initializer` attributes, here and in other files, are JSON, in the form
// docs/checkpoint-layout.md gives for `kvmeta`. What the ops do stands in the kernel files.

#include "shape_functions.h"

namespace kvtools {

// A table with a max_capacity evicts; see kvtable/eviction.h. Lookups of a read-only table never insert,
// whatever their mode. `max_hbm` is of a table on a GPU: the bytes of its memory that rows may take; -1: any
// number. `max_memory` and `spill` are of a table on a CPU: the bytes of memory that its rows may take, and the folder of
// the file that has the others; 0 and nothing: all are in memory. `parts_beside`: how many parts of the same variable are on
// the device, the table included; they share out the locks of one. `policies` says which keys get a row and which rows go, as `policies` of kvmeta does
// (docs/checkpoint-layout.md; see table_policies.h). `dtype` and `shape` are what TensorFlow
// reads from a variable's handle op when it imports a MetaGraph. With `initial`, an initializer as in
// KvTableInitialize and its rows as bytes, the table is there, empty, as soon as its resource is. The handle says that it
// is of no rows, of `dim` values each: what TensorFlow takes for its gradient where nothing of the table is looked up,
// as in a branch that is not taken (tfplugin/table_handle.py does the same in eager code).
REGISTER_OP("KvTableHandle")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("anonymous: bool = false")
    .Attr("variable: string")
    .Attr("key_dtype: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("shape: shape")
    .Attr("dim: int >= 1")
    .Attr("capacity_hint: int = 0")
    .Attr("max_capacity: int >= 0 = 0")
    .Attr("eviction: {'lru', 'lfu', 'custom', 'epoch_lru', 'epoch_lfu'} = 'lru'")
    .Attr("max_hbm: int >= -1 = -1")
    .Attr("max_memory: int >= 0 = 0")
    .Attr("spill: string = ''")
    .Attr("parts_beside: int >= 1 = 1")
    .Attr("policies: string = ''")
    .Attr("read_only: bool = false")
    .Attr("initial: string = ''")
    .Attr("initial_rows: string = ''")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::DataType dtype;
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dtype", &dtype));
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output_handle_shapes_and_types(
          0, std::vector<tensorflow::shape_inference::ShapeAndType>{{c->Matrix(0, dim), dtype}});
      return ScalarShape(c);
    });

// `rows` is (M, dim) for an initializer of kind `rows`, and empty otherwise.
REGISTER_OP("KvTableInitialize")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("initializer: string")
    .Input("handle: resource")
    .Input("rows: dtype")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

REGISTER_OP("KvTableIsInitialized")
    .Input("handle: resource")
    .Output("initialized: bool")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

REGISTER_OP("KvTableSize")
    .Input("handle: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

// [rows, row bytes, index bytes, column bytes, slack bytes, rows in the file, bytes of the file]. What counts keys that
// wait for a row is among the column bytes; row bytes are those in memory.
REGISTER_OP("KvTableMemory")
    .Input("handle: resource")
    .Output("bytes: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(7));
      return absl::OkStatus();
    });

// How many rows an optimizer's penalty has zeroed, and how many row updates were left out because of
// gradients that are not finite; how many rows were evicted to keep the capacity, and how many went by age, norm, frequency
// or rank.
REGISTER_OP("KvTableUpdateCounts")
    .Input("handle: resource")
    .Output("zeroed_rows: int64")
    .Output("skipped_updates: int64")
    .Output("evicted_rows: int64")
    .Output("expired_rows: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 4; ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("KvTableClear").Input("handle: resource").SetIsStateful().SetShapeFn(NoOutputs);

// The slots a table has now, as JSON.
REGISTER_OP("KvTableSlots")
    .Input("handle: resource")
    .Output("slots: string")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

}  // namespace kvtools
