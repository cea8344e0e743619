// The ops of training steps: in one pass, or on rows with their slots as variables.

#include "shape_functions.h"

namespace kvtools {

// One step of `optimizer`, a rule of the table engine: sums the gradients of equal keys and updates the row
// of each key once, value and slots, inserting keys that are not there. Gradients of rows of 16 bits may be
// float32. `positions` are what a lookup remembered, or empty. With P = 1 the gradient of each key is the row of
// `gradients` that `places` names. The elements of `hyperparameters`, one after the other, have the names in `names`;
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
    .Attr("P: int >= 0 = 0")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("positions: int64")
    .Input("gradients: dtype")
    .Input("hyperparameters: Thyper")
    .Input("places: P * uint32")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

// The same step on an ordinary variable and its slots, `variables`. `sparse`: row indices[i] by gradient row
// i, rows of equal index summed first; otherwise by the whole gradient, and `indices` are not looked at. Of stochastic
// rounding, one of the hyperparameters is "seed": another number in each step.
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
    .SetShapeFn(NoOutputs);

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
      TF_RETURN_IF_ERROR(GetCounts(c, "widths", c->num_outputs(), &widths));
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      for (size_t i = 0; i < widths.size(); ++i) {
        c->set_output(static_cast<int>(i), c->Matrix(c->Dim(keys, 0), widths[i]));
      }
      return absl::OkStatus();
    });

// Writes what KvTableReadRows read, and counts one update for each key. Keys are unique. With `rewrites` it counts none, and
// leaves keys without a row out: rows keep their frequencies, versions and ranks.
REGISTER_OP("KvTableWriteRows")
    .Attr("rewrites: bool = false")
    .Attr("Tkeys: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16, double, int8, int32, int64, bool}")
    .Attr("slots: string")
    .Attr("N: int >= 1")
    .Input("handle: resource")
    .Input("keys: Tkeys")
    .Input("columns: N * dtype")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

// Takes all slots out of the rows: the next step of each optimizer gives them fresh ones.
REGISTER_OP("KvTableDropSlots").Input("handle: resource").SetIsStateful().SetShapeFn(NoOutputs);

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
    .SetShapeFn(NoOutputs);

// Waits until no other update of the table is between its KvTableReadRows and its KvTableWriteRows.
REGISTER_OP("KvTableAcquireUpdateLock")
    .Input("handle: resource")
    .Output("lock: resource")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

// Lets the next one go on. It is done by itself, too, when nobody has `lock` any more.
REGISTER_OP("KvTableReleaseUpdateLock").Input("lock: resource").SetIsStateful().SetShapeFn(NoOutputs);

}  // namespace kvtools
