"""All that importing tfplugin changes in TensorFlow, and how to undo it.

- The attribute ``get_kv_variable`` on ``tensorflow`` and its two ``compat`` modules.
- Dispatch registrations (TensorFlow's own extension point): of lookups for our two classes, of `tf.add_n` for slices.
- Wrappers around 49 functions for which TensorFlow has no extension point: ``Optimizer.apply_gradients`` (v1),
  ``_VariableStore._get_single_variable`` and ``_get_partitioned_variable``,
  ``BaseSaverBuilder._AddSaveOps`` and ``_AddRestoreOps``, ``Saver.restore``,
  ``validate_and_slice_inputs`` and ``saver_from_object_based_checkpoint``, of `tf.train.Checkpoint`
  ``MultiDeviceSaver.restore``, ``CheckpointPosition.bind_object``, ``TrackableSaver.restore`` (folders of chains), what
  it restores by name
  (``_NameBasedRestoreCoordinator.eager_restore``), ``init_from_checkpoint``, ``save`` and what saves
  asynchronously (``AsyncCheckpointHelper.save``, ``_write``, ``_copy_to_cpu`` and ``sync``), what says that values of a
  checkpoint are left (``CheckpointLoadStatus.assert_consumed``, ``_CheckpointRestoreCoordinatorDeleter.__del__``),
  ``BaseResourceVariable.from_proto``, by which graphs are imported, ``_lift_unlifted_variables`` and
  ``restore_captures``, by which `tf.saved_model.load` takes models, in the gradients of TensorFlow 1's control flow
  ``ZerosLikeV1WhileLoop``, ``WhileContext.AddBackpropIndexedSlicesAccumulator`` and that of Switch, and in TensorFlow
  2's what `loop_gradients`, `cond_gradients` and `table_handle` say; what calls functions of `tf.custom_gradient`; what
  takes gradients (``imperative_grad``, ``_GradientsHelper``, ``GradientTape.watch``, ``jacobian``, ``batch_jacobian``,
  ``ForwardAccumulator._watch`` and ``_build_functions_for_outputs``), ``Module.trainable_variables``, and what freezes
  graphs; what traces functions of `tf.data`; and of `tf.function` ``make_function_context``, which tells its
  traces apart, and ``ConcreteFunction.__call__``. Each passes everything that is not a key-value variable, or stands
  for one, through untouched.
- In Keras what `keras_models`, `keras_inputs`, `keras_training`, `keras_averages`, `keras_builds`, `keras_files`,
  `keras_weights` and `keras_servers` say: the optimizer of a model trains the tables of its layers, models are looked
  at where they train and predict, and tables are part of what is written, read, counted and shown of them.
- In Horovod what `horovod_hooks` says, which stays.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.function.capture import restore_captures
from tensorflow.python.checkpoint import async_checkpoint_helper, functional_saver
from tensorflow.python.checkpoint import checkpoint as checkpoint_lib
from tensorflow.python.checkpoint import restore as restore_lib
from tensorflow.python.data.ops import structured_function
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager import backprop_util, imperative_grad, wrap_function
from tensorflow.python.eager.polymorphic_function import concrete_function, function_context
from tensorflow.python.framework import convert_to_constants, func_graph
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import (
    cond_v2,
    control_flow_ops,
    control_flow_state,
    custom_gradient,
    gradients_util,
    resource_variable_ops,
    variable_scope,
    while_v2,
)
from tensorflow.python.training import checkpoint_utils
from tensorflow.python.training import optimizer as optimizer_lib
from tensorflow.python.training import saver as saver_lib
from tensorflow.python.training.saving import saveable_object_util

from tfplugin import (
    async_save,
    checkpoint,
    checkpoint_initializers,
    cond_gradients,
    custom_gradients,
    dataset_functions,
    frozen_graphs,
    graph_import,
    graph_restore,
    horovod_hooks,
    keras_averages,
    keras_builds,
    keras_files,
    keras_inputs,
    keras_models,
    keras_servers,
    keras_training,
    keras_weights,
    loaded_functions,
    lookup,
    loop_gradients,
    modules,
    named_restore,
    not_dense,
    restore_scope,
    slices_of_rows,
    table_handle,
    tapes,
    training_mode,
    unconnected_gradients,
    unrestored_tables,
)
from tfplugin.get_kv_variable import get_kv_variable, refuse_name_of_table
from tfplugin.optimizers import restored_objects, v1
from tfplugin.wrapped_method import wrap_method, wrap_property

_undo: list[Callable[[], None]] = []
#: Changes of parts of the plugin that are imported by themselves: what makes them, and what takes them back.
_more: list[tuple[Callable[[], None], Callable[[], None]]] = []


def _public_modules() -> list[Any]:
    # `tf.compat.v1` is one module, and what `import tensorflow.compat.v1` gives, and puts in its place, another.
    modules = [tf, tf.compat.v1, tf.compat.v2]
    modules += [importlib.import_module(f"tensorflow.compat.{version}") for version in ("v1", "v2")]
    return list({id(module): module for module in modules}.values())


def install() -> None:
    """Makes the changes. ``import tfplugin`` does it; a second call does nothing."""
    if _undo:
        return
    for module in _public_modules():
        module.get_kv_variable = get_kv_variable
        _undo.append(functools.partial(delattr, module, "get_kv_variable"))
    lookup.register()
    _undo.append(lookup.unregister)
    slices_of_rows.register()
    _undo.append(slices_of_rows.unregister)
    for owner, method, replacement in (
        (optimizer_lib.Optimizer, "apply_gradients", v1.apply_gradients),
        (variable_scope._VariableStore, "_get_single_variable", refuse_name_of_table),
        (variable_scope._VariableStore, "_get_partitioned_variable", refuse_name_of_table),
        (saver_lib.BaseSaverBuilder, "_AddSaveOps", checkpoint.add_save_ops),
        (saver_lib.BaseSaverBuilder, "_AddRestoreOps", checkpoint.add_restore_ops),
        (functional_saver.MultiDeviceSaver, "restore", graph_restore.restore),
        (restore_lib.CheckpointPosition, "bind_object", restored_objects.bind_object),
        (checkpoint_lib.TrackableSaver, "save", async_save.write),
        (checkpoint_lib.TrackableSaver, "restore", checkpoint.restore_of_chain),
        (saver_lib.Saver, "restore", restore_scope.restore),
        (saver_lib, "saver_from_object_based_checkpoint", checkpoint.saver_of_objects),
        (saveable_object_util, "validate_and_slice_inputs", checkpoint.slices_of_savers),
        (checkpoint_lib._NameBasedRestoreCoordinator, "eager_restore", named_restore.eager_restore),
        (checkpoint_lib.CheckpointLoadStatus, "assert_consumed", unrestored_tables.assert_consumed),
        (checkpoint_lib._CheckpointRestoreCoordinatorDeleter, "__del__", unrestored_tables.deleted),
        (checkpoint_utils, "_init_from_checkpoint", checkpoint_initializers.init_from_checkpoint),
        (async_checkpoint_helper.AsyncCheckpointHelper, "save", async_save.begin),
        (async_checkpoint_helper.AsyncCheckpointHelper, "_write", async_save.begin),
        (async_checkpoint_helper.AsyncCheckpointHelper, "_copy_to_cpu", async_save.copy_to_cpu),
        (async_checkpoint_helper.AsyncCheckpointHelper, "sync", async_save.sync),
        (wrap_function, "_lift_unlifted_variables", graph_import.lift_variables),
        (resource_variable_ops.BaseResourceVariable, "from_proto", graph_import.variable_from_proto),
        (restore_captures, "restore_captures", loaded_functions.restore_captures),
        (control_flow_state._ControlFlowState, "ZerosLikeV1WhileLoop", cond_gradients.zeros_in_loop),
        (backprop_util, "AggregateIndexedSlicesGradients", table_handle.aggregate),
        (control_flow_state, "ZerosLike", loop_gradients.zeros_like_output),
        (control_flow_ops.WhileContext, "AddBackpropIndexedSlicesAccumulator", loop_gradients.slices_of_v1_loop),
        (while_v2, "_zeros_like", loop_gradients.zeros_like),
        (while_v2, "_create_grad_func", loop_gradients.create_grad_func),
        (while_v2, "_get_structured_grad_output", loop_gradients.structured_output),
        (func_graph.FuncGraph, "capture", loop_gradients.capture),
        (cond_v2, "_make_output_composite_tensors_match", cond_gradients.make_outputs_match),
        (cond_v2, "_make_indexed_slices_indices_types_match", cond_gradients.make_indices_match),
        (custom_gradient, "_eager_mode_decorator", custom_gradients.refuse_tables),
        (custom_gradient, "_graph_mode_decorator", custom_gradients.refuse_tables),
        (distribute_lib.ReplicaContextBase, "all_reduce", custom_gradients.all_reduce),
        (imperative_grad, "imperative_grad", unconnected_gradients.of_tape),
        (tf.GradientTape, "watch", tapes.watch),
        (tf.GradientTape, "jacobian", not_dense.refuse_jacobian),
        (tf.GradientTape, "batch_jacobian", not_dense.refuse_jacobian),
        (tf.autodiff.ForwardAccumulator, "_watch", tapes.refuse_tangents),
        (concrete_function._TapeGradientFunctions, "_build_functions_for_outputs", tapes.refuse_tables),
        (gradients_util, "_GradientsHelper", unconnected_gradients.of_graph),
        (convert_to_constants._ConverterData, "__init__", frozen_graphs.refuse_tables_of_graph),
        (convert_to_constants._FunctionConverterData, "__init__", frozen_graphs.refuse_tables_of_function),
        (structured_function.StructuredFunctionWrapper, "__init__", dataset_functions.refuse_lookups_that_train),
        (function_context, "make_function_context", training_mode.make_function_context),
        (concrete_function.ConcreteFunction, "__call__", training_mode.call_concrete_function),
    ):
        _undo.append(wrap_method(owner, method, replacement))
    _undo.append(wrap_property(tf.Module, "trainable_variables", modules.trainable_variables))
    _undo.append(wrap_gradient("Switch", cond_gradients.switch_gradient))
    for hooks in (
        keras_inputs,
        keras_models,
        keras_training,
        keras_averages,
        keras_builds,
        keras_files,
        keras_weights,
        keras_servers,
    ):
        hooks.install()
        _undo.append(hooks.uninstall)
    horovod_hooks.install()

    for make, take_back in _more:
        make()
        _undo.append(take_back)


def wrap_gradient(op_type: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Has the gradient of an op be ``replacement(original, op, *grads)``. Returns what puts the original back."""
    registered = tf_ops.gradient_registry._registry
    entry = registered[op_type]
    original = entry["type"]

    @functools.wraps(original)
    def gradient(*args: Any) -> Any:
        return replacement(original, *args)

    registered[op_type] = {**entry, "type": gradient}
    return functools.partial(registered.__setitem__, op_type, entry)


def add(make: Callable[[], None], take_back: Callable[[], None]) -> None:
    """Has `install` make changes also by `make`, at once if it was called, and `uninstall` take them back."""
    _more.append((make, take_back))
    if _undo:
        make()
        _undo.append(take_back)


def uninstall() -> None:
    """Leaves TensorFlow as it was. Key-value variables that exist keep their data and methods."""
    while _undo:
        _undo.pop()()
