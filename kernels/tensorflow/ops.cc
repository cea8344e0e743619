// The ops: names, signatures and shapes. What they do stands in the kernel files.
//
// `slots` and `initializer` attributes are JSON, in the form docs/checkpoint-layout.md gives for `kvmeta`.

#include <algorithm>
#include <vector>

#include "pooled_shapes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using kvtools::PooledShapes;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// keys.shape + [width of `attr`]
absl::Status RowsShape(InferenceContext* c, const char* attr) {
  int64_t width;
  TF_RETURN_IF_ERROR(c->GetAttr(attr, &width));
  ShapeHandle out;
  TF_RETURN_IF_ERROR(c->Concatenate(c->input(1), c->Vector(width), &out));
  c->set_output(0, out);
  return absl::OkStatus();
}

// Outputs `first` and on of an op over several tables: the shape of each table's rows.
absl::Status ManyRowsShapes(InferenceContext* c, int first_keys, int first_output) {
  std::vector<int64_t> dims;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  for (size_t t = 0; t < dims.size(); ++t) {
    ShapeHandle out;
    TF_RETURN_IF_ERROR(c->Concatenate(c->input(first_keys + static_cast<int>(t)), c->Vector(dims[t]), &out));
    c->set_output(first_output + static_cast<int>(t), out);
  }
  return absl::OkStatus();
}

// Per part of each table: keys (n), then for all of them rows (n, dim).
absl::Status PartsShapes(InferenceContext* c) {
  std::vector<int64_t> dims, parts;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(c->GetAttr("parts", &parts));
  int handles;
  TF_RETURN_IF_ERROR(c->GetAttr("H", &handles));
  int h = 0;
  for (size_t t = 0; t < std::min(dims.size(), parts.size()); ++t) {
    for (int64_t p = 0; p < parts[t] && h < handles; ++p, ++h) {
      const DimensionHandle n = c->UnknownDim();
      c->set_output(h, c->Vector(n));
      c->set_output(handles + h, c->Matrix(n, dims[t]));
    }
  }
  return absl::OkStatus();
}

}  // namespace

// ---- The resource ----

// A table with a max_capacity evicts; see kvtable/eviction.h. Lookups of a read-only table never insert,
// whatever their mode. `max_hbm` is of a table on a GPU: the bytes of its memory that rows may take; -1: any
// number. `dtype` and `shape` are what TensorFlow
// reads from a variable's handle op when it imports a MetaGraph. With `initial`, an initializer as in
// KvTableInitialize and its rows as bytes, the table is there, empty, as soon as its resource is.
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
    .Attr("eviction: {'lru', 'lfu', 'custom'} = 'lru'")
    .Attr("max_hbm: int >= -1 = -1")
    .Attr("read_only: bool = false")
    .Attr("initial: string = ''")
    .Attr("initial_rows: string = ''")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// `rows` is (M, dim) for an initializer of kind `rows`, and empty otherwise.
REGISTER_OP("KvTableInitialize")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("initializer: string")
    .Input("handle: resource")
    .Input("rows: dtype")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("KvTableIsInitialized")
    .Input("handle: resource")
    .Output("initialized: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("KvTableSize")
    .Input("handle: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// [rows, row bytes, index bytes, column bytes, slack bytes]
REGISTER_OP("KvTableMemory")
    .Input("handle: resource")
    .Output("bytes: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(5));
      return absl::OkStatus();
    });

REGISTER_OP("KvTableClear")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// The slots a table has now, as JSON.
REGISTER_OP("KvTableSlots")
    .Input("handle: resource")
    .Output("slots: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// ---- Lookups ----

// mode: "train" inserts missing keys with their initial value; "zeros" and "initial" are read-only and give
// that for a missing key. With `remember` positions say where each key's row lies (-1: nowhere), for an
// update to begin at; else they are empty. A missing key is inserted with the probability `admission`; one
// that is not gives zeros. `in_backward`, here and below, names the update that the gradient makes at once,
// one for each handle; see tfplugin.apply_in_backward.
REGISTER_OP("KvTableGather")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("dim: int >= 1")
    .Attr("mode: {'train', 'zeros', 'initial'} = 'train'")
    .Attr("remember: bool = false")
    .Attr("in_backward: string = ''")
    .Attr("admission: float = 1.0")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("rows: dtype")
    .Output("positions: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      bool remember;
      TF_RETURN_IF_ERROR(c->GetAttr("remember", &remember));
      c->set_output(1, remember ? c->input(1) : c->Vector(0));
      return RowsShape(c, "dim");
    });

// The same in mode "train"; and what the batch evicts: keys, lowest score first, and their rows.
REGISTER_OP("KvTableGatherEvict")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("dim: int >= 1")
    .Attr("remember: bool = false")
    .Attr("in_backward: string = ''")
    .Attr("admission: float = 1.0")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("rows: dtype")
    .Output("positions: int64")
    .Output("evicted_keys: Tkeys")
    .Output("evicted_rows: dtype")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      bool remember;
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("remember", &remember));
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output(1, remember ? c->input(1) : c->Vector(0));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(2, c->Vector(n));
      c->set_output(3, c->Matrix(n, dim));
      return RowsShape(c, "dim");
    });

// Several lookups in one. Table t has parts[t] handles, the parts that own its keys by floor-mod, and rows of
// dims[t] elements.
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
      int handles, tables;
      bool remember;
      TF_RETURN_IF_ERROR(c->GetAttr("H", &handles));
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("remember", &remember));
      for (int t = 0; t < tables; ++t) {
        c->set_output(tables + t, remember ? c->input(handles + t) : c->Vector(0));
      }
      return ManyRowsShapes(c, handles, 0);
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
      int handles;
      TF_RETURN_IF_ERROR(c->GetAttr("H", &handles));
      for (int h = 0; h < handles; ++h) c->set_output(2 * handles + h, c->Vector(c->UnknownDim()));
      return PartsShapes(c);
    });

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
      int handles, tables;
      TF_RETURN_IF_ERROR(c->GetAttr("H", &handles));
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      return PooledShapes(c, handles + tables);
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
    .SetShapeFn(PartsShapes);

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
      int handles, tables, sparse, weights;
      TF_RETURN_IF_ERROR(c->GetAttr("H", &handles));
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("S", &sparse));
      TF_RETURN_IF_ERROR(c->GetAttr("W", &weights));
      for (int w = 0; w < weights; ++w) c->set_output(w, c->input(handles + 4 * tables + sparse + w));
      return absl::OkStatus();
    });

// Rows that were looked up for keys, wherever they came from, as a function of `handle`: their gradient goes
// to it, one slice for each key. `positions` are those of a lookup, or empty.
REGISTER_OP("KvTableTrainable")
    .Attr("Tkeys: {int64, int32, uint64, string}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("positions: int64")
    .Input("looked_up: dtype")
    .Output("rows: dtype")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(3));
      return absl::OkStatus();
    });

REGISTER_OP("KvTableContains")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("found: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

REGISTER_OP("KvTableStamps")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("freqs: uint32")
    .Output("versions: uint32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    });

// What eviction goes by; 0 for keys that are missing, and in tables without a capacity.
REGISTER_OP("KvTableScores")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("scores: uint64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

// ---- Writes ----

REGISTER_OP("KvTableUpsert")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("rows: dtype")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("KvTableAccumulate")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("deltas: dtype")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("KvTableRemove")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("removed: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// ---- Training steps ----

// One step of `optimizer`, a rule of the table engine: sums the gradients of equal keys and updates the row
// of each key once, value and slots, inserting keys that are not there. `positions` are what a lookup
// remembered, or empty. The elements of `hyperparameters`, one after the other, have the names in `names`;
// what is not named has its usual value. `slots` are the rule's in its order; for the other attributes see
// KvTableReadRows.
REGISTER_OP("KvTableApply")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Thyper: list({float, double, int32, int64}) >= 1")
    .Attr("optimizer: string")
    .Attr("names: list(string)")
    .Attr("slots: string")
    .Attr("all_slots: string")
    .Attr("generation: int >= 1")
    .Attr("skip_nonfinite: bool = false")
    .Attr("stochastic_rounding: bool = false")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("positions: int64")
    .Input("gradients: dtype")
    .Input("hyperparameters: Thyper")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// The same step on an ordinary variable and its slots, `variables`. `sparse`: row indices[i] by gradient row
// i, rows of equal index summed first; otherwise by the whole gradient, and `indices` are not looked at.
// `whole`: rules that look at a row as one see the whole variable as one, unless `sparse`.
REGISTER_OP("KvApplyDense")
    .Attr("dtype: {float, half, bfloat16, double}")
    .Attr("Tindices: {int32, int64}")
    .Attr("Thyper: list({float, double, int32, int64}) >= 1")
    .Attr("N: int >= 1")
    .Attr("variable: string")
    .Attr("optimizer: string")
    .Attr("names: list(string)")
    .Attr("sparse: bool")
    .Attr("whole: bool = false")
    .Attr("skip_nonfinite: bool = false")
    .Attr("stochastic_rounding: bool = false")
    .Input("variables: N * resource")
    .Input("indices: Tindices")
    .Input("gradients: dtype")
    .Input("hyperparameters: Thyper")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Whether an optimizer's penalty has zeroed the row of each key.
REGISTER_OP("KvTableZeroed")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("zeroed: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

// How many rows an optimizer's penalty has zeroed, and how many row updates were left out because of
// gradients that are not finite; and how many rows were evicted.
REGISTER_OP("KvTableUpdateCounts")
    .Input("handle: resource")
    .Output("zeroed_rows: int64")
    .Output("skipped_updates: int64")
    .Output("evicted_rows: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    });

// ---- Rows with their slots, for optimizers that run as TensorFlow ops ----

// Sees to it that the table has `slots`, then reads value and slots of keys, (n) each: `columns` are the
// value and one tensor per slot. Missing keys give initial values and are not inserted. `all_slots` adds the
// slots of the variable's other optimizers, and `generation` counts such sets; see
// TableResource::AttachSlots.
REGISTER_OP("KvTableReadRows")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("slots: string")
    .Attr("all_slots: string")
    .Attr("generation: int >= 1")
    .Attr("widths: list(int) >= 1")
    .Attr("N: int >= 1")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("columns: N * dtype")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> widths;
      TF_RETURN_IF_ERROR(c->GetAttr("widths", &widths));
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      for (size_t i = 0; i < widths.size(); ++i) {
        c->set_output(static_cast<int>(i), c->Matrix(c->Dim(keys, 0), widths[i]));
      }
      return absl::OkStatus();
    });

// Writes what KvTableReadRows read, and counts one update for each key. Keys are unique.
REGISTER_OP("KvTableWriteRows")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("slots: string")
    .Attr("N: int >= 1")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("columns: N * dtype")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// A resource variable that holds `value` and lives as long as its handle: one step.
REGISTER_OP("KvTableStepVariable")
    .Attr("dtype: type")
    .Input("value: dtype")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::DataType dtype;
      TF_RETURN_IF_ERROR(c->GetAttr("dtype", &dtype));
      c->set_output(0, c->Scalar());
      c->set_output_handle_shapes_and_types(
          0, std::vector<tensorflow::shape_inference::ShapeAndType>{{c->input(0), dtype}});
      return absl::OkStatus();
    });

// AssignVariableOp for the above: TensorFlow's own finds variables by name, and these have none.
REGISTER_OP("KvTableAssignStepVariable")
    .Attr("dtype: type")
    .Input("handle: resource")
    .Input("value: dtype")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// ---- Export, import, partition ----

// All rows. `column` names a slot, or is empty for the value.
REGISTER_OP("KvTableExport")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("column: string = ''")
    .Attr("width: int >= 1")
    .Input("handle: resource")
    .Output("keys: Tkeys")
    .Output("rows: dtype")
    .Output("freqs: uint32")
    .Output("versions: uint32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t width;
      TF_RETURN_IF_ERROR(c->GetAttr("width", &width));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Matrix(n, width));
      c->set_output(2, c->Vector(n));
      c->set_output(3, c->Vector(n));
      return absl::OkStatus();
    });

// The keys alone, for those who read the rows in pieces.
REGISTER_OP("KvTableKeys")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Input("handle: resource")
    .Output("keys: Tkeys")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

// One column, the value or a slot, of keys. Inserts nothing.
REGISTER_OP("KvTableReadColumn")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("column: string = ''")
    .Attr("width: int >= 1")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Output("rows: dtype")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t width;
      TF_RETURN_IF_ERROR(c->GetAttr("width", &width));
      c->set_output(0, c->Matrix(c->Dim(c->input(1), 0), width));
      return absl::OkStatus();
    });

// The rows touched at `since` or later, in microseconds since 1970. A table that evicts by LRU knows the time
// of the last touch, one by LFU its second; others that of the last write, their version.
REGISTER_OP("KvTableExportSince")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("dim: int >= 1")
    .Input("handle: resource")
    .Input("since: int64")
    .Output("keys: Tkeys")
    .Output("rows: dtype")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      ShapeHandle since;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &since));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Matrix(n, dim));
      return absl::OkStatus();
    });

// Sets the scores of keys that are there, in a table that evicts by custom scores. How many there are.
REGISTER_OP("KvTableSetScores")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("Tscores: {int64, uint64}")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("scores: Tscores")
    .Output("found: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

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
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// The part that owns each key: key floor-mod parts.
REGISTER_OP("KvTablePartition")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("parts: int >= 1")
    .Input("keys: Tkeys")
    .Output("owner: int32")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

// ---- Checkpoints ----

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
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Replaces a table's contents by the rows of a checkpoint that belong to this part, whatever number of parts
// wrote it. Where the checkpoint has no initializer, the table keeps its own; `initializer` is that one for a
// table that has not been initialized.
REGISTER_OP("KvTableRestore")
    .Attr("tensor_prefix: string")
    .Attr("part_infix: string")
    .Attr("part: int >= 0")
    .Attr("parts: int >= 1")
    .Attr("initializer: string = ''")
    .Input("handle: resource")
    .Input("prefix: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);
