"""How ``fit`` and ``train_on_batch`` of models of Keras 3 and tf_keras train the tables that their layers hold.

An optimizer of ``compile`` never sees a table by itself: Keras knows weights of its own kind only. So while a
``train_step`` runs, the tables that a layer holds, and that nothing else trains, are among the ``trainable_weights``
of the model and its layers. The step takes their gradients along with those of the weights, scales, clips and
accumulates them along with those, and hands them to the optimizer, whose ``apply_gradients`` then goes the way of an
`OptimizerWrapper`. So a ``train_step`` of a user's own trains them, too. One that updates a table itself is found out
before: by a trace of it that nobody runs, in which no table is among the weights. Where a step cannot be traced, or not
without them, all are left to Keras.

A loop by hand, which asks a model or a layer for its trainable weights, is given the tables, too; Keras itself, which
counts, saves and builds by those, is not.

What would go unnoticed is an error:

- an optimizer that cannot update a table, at ``compile`` if the table is there, else before the first step;
- a step that looks a table up to train it, and updates it in no way: the table is in no layer, or the ``train_step``
  gives the optimizer other weights;
- a step that updates a table among its weights, and by itself once more;
- a step that updates a table in its backward pass, while its optimizer scales the loss.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph

from tfplugin import placement, scaled_loss, step_record
from tfplugin.embedding_layers.penalties import each_row_once
from tfplugin.keras_hooks import KerasHooks
from tfplugin.keras_models import INFERENCE, is_trained, note_looked_up, quoted, table_holders, table_name
from tfplugin.kv_variable import KvVariable
from tfplugin.optimizers import fused, row_averages
from tfplugin.optimizers.inner_optimizer import innermost
from tfplugin.optimizers.wrapper import OptimizerWrapper, check_supported, warn_of_missing, wrapper_of
from tfplugin.wrapped_method import defining_class, wrap_method, wrap_property

#: What trains: in these, and in what they call, ``train_step`` is looked at.
_TRAINING = ("fit", "train_on_batch")

#: What is wrong with the latest training step of a model.
_failed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

#: Of models with a ``train_step`` of their own: of these parts of tables, by their ids, those it leaves to Keras.
_decided: weakref.WeakKeyDictionary[Any, dict[frozenset[int], frozenset[int]]] = weakref.WeakKeyDictionary()

#: What optimizers of Keras 3 were built on by hand, where tables are among it.
_built_on: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

#: Models that leave it to Keras whether XLA compiles them.
_auto: weakref.WeakSet[Any] = weakref.WeakSet()

_now = threading.local()

#: Whose code that asks for trainable weights wants those of Keras, and no tables.
_LIBRARIES = ("keras", "tf_keras", "keras_tuner", "tensorflow", "tfplugin")

#: What stands between who asks and Keras.
_WRAPPERS = (__name__, "tfplugin.wrapped_method", "tfplugin.modules", "tfplugin.sok.keras_layers")


# ---- Which tables a step trains --------------------------------------------------------------------------------------


class TrainedTables:
    """The tables that the step of a model trains by an optimizer of Keras.

    Attributes:
      parts: their parts, by id.
      optimizers: by the id of a part, the optimizer that its layer was given; others have the model's.
      updates: of each part, how often the step has updated it among its weights.
    """

    def __init__(self) -> None:
        self.parts: dict[int, Any] = {}
        self.optimizers: dict[int, Any] = {}
        self.updates: collections.Counter[int] = collections.Counter()

    @staticmethod
    def of_model(model: Any) -> TrainedTables:
        """Those of a model, or of a layer."""
        trained = TrainedTables()
        for part, table, layer in table_holders(model):
            if is_trained(part, layer) and _is_left_to_keras(part, table):
                trained._add(part, own_optimizer(layer, table))
        return trained

    @staticmethod
    def of_pairs(pairs: list[tuple[Any, Any]]) -> TrainedTables:
        """Those that a loop by hand has given gradients of."""
        trained = TrainedTables()
        for _, variable in pairs:
            if isinstance(variable, KvVariable) and _is_left_to_keras(variable, variable):
                trained._add(variable, variable._optimizer_of_layer)
        return trained

    def _add(self, part: Any, own_optimizer: Any) -> None:
        self.parts[id(part)] = part
        part._optimizer_of_layer = own_optimizer
        if own_optimizer is not None:
            self.optimizers[id(part)] = own_optimizer

    def keep(self, parts: Any) -> None:
        """Leaves out those that are not among `parts`, ids."""
        self.parts = {key: part for key, part in self.parts.items() if key in parts}


def _is_left_to_keras(part: Any, table: Any) -> bool:
    """Whether an optimizer of Keras can train it, and no backward pass does. Tables of other APIs have their own."""
    return getattr(table, "_trained_by_keras", False) and part._in_backward is None


def own_optimizer(layer: Any, table: Any) -> Any:
    """The optimizer that a layer was given for its table; None: that of the model."""
    if hasattr(layer, "table_optimizer"):
        given = layer.table_optimizer(table)
    else:
        given = None if hasattr(layer, "fit") else getattr(layer, "optimizer", None)
    return given if hasattr(given, "apply_gradients") else None


@contextlib.contextmanager
def _among_the_weights(trained: TrainedTables | None) -> Iterator[None]:
    """Has the tables be among the trainable weights of layers that hold them, on the calling thread."""
    before = getattr(_now, "trained", None)
    _now.trained = trained
    try:
        yield
    finally:
        _now.trained = before


def _with_tables(getter: Callable[[Any], list[Any]], layer: Any) -> list[Any]:
    """``trainable_weights`` and ``trainable_variables``: with tables, within a step that trains them, and by hand."""
    weights = getter(layer)
    trained = getattr(_now, "trained", None)
    if trained is None and layer.trainable and not asked_by_a_library():
        trained = TrainedTables.of_model(layer)
    if trained is None or not trained.parts or not layer.trainable:
        return weights
    held = {id(part): part for part, _, owner in table_holders(layer) if owner.trainable and id(part) in trained.parts}
    return [*(weight for weight in weights if id(weight) not in held), *held.values()] if held else weights


def asked_by_a_library() -> bool:
    """Whether what asks for weights is no code of the user's: the first frame beyond these wrappers tells."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _WRAPPERS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


def _losses(getter: Callable[[Any], list[Any]], layer: Any) -> list[Any]:
    """``losses``, which Keras 3 makes of trainable weights and their regularizers: lookups have those of tables, and
    layers that share a table have one.
    """
    with _among_the_weights(None):
        return each_row_once(getter(layer))


# ---- The step --------------------------------------------------------------------------------------------------------


def _train(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a method of a model that may run or trace ``train_step``, in which its tables are trained."""
    step, own = model.train_step, vars(model).get("train_step")
    if hasattr(own, "_is_recorded"):  # within another of these methods
        return original(model, *args, **kwargs)
    if getattr(model, "train_function", None) is None:
        check(model)
    compiled = compiles_by_xla(model)

    @functools.wraps(step)
    def train_step(*step_args: Any, **step_kwargs: Any) -> Any:
        trained = check(model)
        if trained.parts and not _is_of_keras(model, own):
            decided = _decided.setdefault(model, {})
            every = frozenset(trained.parts)
            if not tf.executing_eagerly() or every not in decided:
                decided[every] = every - _updated_by(functools.partial(step, *step_args, **step_kwargs))
            trained.keep(decided[every])
        with _among_the_weights(trained), _in_clusters(compiled), step_record.recording() as found:
            outputs = step(*step_args, **step_kwargs)
        note_looked_up(model, found)
        wrong = _not_updated(model, found) or _updated_by_scaled_gradients(model, found)
        wrong = wrong or _updated_twice(model, found, trained)
        if wrong is None and _is_of_keras(model, own):  # others may have functions of losses, too
            wrong = _not_penalized(model, found)
        if wrong is not None:
            _failed[model] = wrong
        return outputs

    train_step._is_recorded = True  # type: ignore[attr-defined]
    # Past what Keras makes of attributes: it is no part of the model.
    object.__setattr__(model, "train_step", train_step)
    try:
        with lookups_outside_of_xla(model):
            return original(model, *args, **kwargs)
    finally:
        if own is None:
            object.__delattr__(model, "train_step")
        else:
            object.__setattr__(model, "train_step", own)


def _is_of_keras(model: Any, own: Any) -> bool:
    """Whether ``train_step`` is what Keras has, which trains the trainable weights and nothing else."""
    owner = defining_class(type(model), "train_step")
    return own is None and owner is not None and owner.__module__.partition(".")[0] in ("keras", "tf_keras")


def _updated_by(step: Callable[[], Any]) -> frozenset[int]:
    """The parts of tables that a step updates by itself, as it says in a graph that nobody runs."""
    with (
        func_graph.FuncGraph("look").as_default(),
        step_record.recording() as found,
        contextlib.suppress(Exception),  # of values and weights that are not there; others come again as the step runs
        _among_the_weights(TrainedTables()),
    ):
        step()
    return frozenset(found.updates())


def _make_train_function(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Has the function that a model trains by raise ValueError for a table that it does not update.

    It does so after its first step: variables that Keras makes in a trace are not there after one that failed.
    """
    returned = _train(original, model, *args, **kwargs)
    function = model.train_function
    if not hasattr(function, "_is_checked"):

        def train_function(*batch: Any) -> Any:
            _failed.pop(model, None)
            outputs = function(*batch)
            wrong = _failed.pop(model, None)
            if wrong is not None:
                model.train_function = None  # to be traced again, and looked at
                raise ValueError(wrong)
            return outputs

        train_function._is_checked = True  # type: ignore[attr-defined]
        model.train_function = train_function
    return None if returned is None else model.train_function


def _not_updated(model: Any, step: step_record.StepRecord) -> str | None:
    """What is wrong with a step that has looked a table up to train it and does not update it; None if all is well."""
    left_out = [
        (part, table)
        for part, table in step.left_out()
        # A gradient may have been traced before, in a function that the model calls. Keras takes none without weights.
        if getattr(part, "_in_backward", None) is None or not model.trainable_weights
    ]
    if not left_out:
        return None
    held = {id(part) for part, _, _ in table_holders(model)}
    trained = {id(part) for part, _, layer in table_holders(model) if is_trained(part, layer)}
    frozen = held - trained
    left_out = [(part, table) for part, table in left_out if id(part) not in frozen]
    if not left_out:
        return None
    optimizer = type(getattr(model, "optimizer", None)).__name__
    if any(id(part) in trained for part, _ in left_out):
        why = "a layer holds it, and its train_step gives no optimizer the model.trainable_weights that have it"
    else:
        why = f"{optimizer} is given weights, and the tables that layers hold"
    return (
        f"The training step of model '{model.name}' looks up key-value variable "
        f"{quoted(table_name(part, table) for part, table in left_out)}, and nothing updates it: {why}. Its rows would "
        f"stay as they are. {left_out[0][1]._how_to_train}"
    )


def _updated_twice(model: Any, step: step_record.StepRecord, trained: TrainedTables) -> str | None:
    """What is wrong with a step that updates a table among its weights and by itself, too; None if all is well."""
    updates = step.updates()
    twice = [trained.parts[key] for key, among in trained.updates.items() if updates[key] > among]
    if not twice:
        return None
    return (
        f"The training step of model '{model.name}' updates key-value variable "
        f"{quoted(table_name(part, part) for part in twice)} twice: among the trainable_weights, and by an optimizer "
        "that it gives the table itself. Leave it to the first; or give the layer that holds it an optimizer of its "
        "own (optimizer=)."
    )


def _updated_by_scaled_gradients(model: Any, step: step_record.StepRecord) -> str | None:
    """What is wrong with a step that scales its loss and has gradients update tables at once; None if all is well."""
    scaled = step.scaled()
    if not scaled:
        return None
    return (
        f"The training step of model '{model.name}' scales its loss, by {type(step.loss_scaler).__name__}, and "
        f"key-value variable {quoted(table_name(part, table) for part, table in scaled)} is updated in the backward "
        "pass, by gradients that nothing has scaled back. Take the policy mixed_bfloat16, which scales no loss; or "
        "call undo() of what tfplugin.apply_in_backward returned: the optimizer of the model then trains the table "
        "that a layer holds, and scales its gradients back."
    )


def _not_penalized(model: Any, step: step_record.StepRecord) -> str | None:
    """What is wrong with a step whose loss lacks what a regularizer says of a table; None if all is well.

    A layer that is called within a function gives Keras no losses, and none again where that has been traced before.
    """
    for layer in model._flatten_layers():
        for table in getattr(layer, "regularized_tables", ()) if layer.trainable else ():
            parts = {id(part) for part in table._kv_parts}
            if parts & step.looked_up.keys() and not parts & step.penalized:
                return (
                    f"The loss of model '{model.name}' lacks what the regularizer of layer '{layer.name}' says: the "
                    f"training step looks up key-value variable '{table_name(table._kv_parts[0], table)}' in a "
                    "tf.function that calls the layer, or past the layer, and losses do not come out of functions. "
                    "Call the layer outside of that tf.function: Keras compiles the step in any case."
                )
    return None


def _scale_loss(original: Callable[..., Any], optimizer: Any, loss: Any) -> Any:
    """``scale_loss`` of an optimizer of Keras 3, ``get_scaled_loss`` of one of tf_keras."""
    scaled = original(optimizer, loss)
    if scaled is loss:  # as those give it back that do not scale
        return loss
    step_record.note_scaled_loss(optimizer)
    return scaled_loss.mark(scaled, optimizer)


# ---- The update ------------------------------------------------------------------------------------------------------


@tf.autograph.experimental.do_not_convert
def _apply_gradients(original: Callable[..., Any], optimizer: Any, pairs: Any, *args: Any, **kwargs: Any) -> Any:
    """``apply_gradients`` of an optimizer, which takes tables within a step that trains them, and by hand."""
    trained = getattr(_now, "trained", None)
    pairs = list(pairs)
    if trained is None:
        trained = TrainedTables.of_pairs(pairs)
    elif not pairs and not trained.parts:  # of tables that a look leaves out
        return None
    with _counted(trained):
        return _apply_to_tables(original, optimizer, trained, pairs, *args, **kwargs)


@contextlib.contextmanager
def _counted(trained: TrainedTables) -> Iterator[None]:
    """Counts the updates of tables among the weights."""
    step = step_record.current()
    if step is None:
        yield
        return
    before = step.updates()
    yield
    trained.updates.update({key: count for key, count in (step.updates() - before).items() if key in trained.parts})


def _apply_to_tables(
    original: Callable[..., Any], optimizer: Any, trained: TrainedTables, pairs: list[Any], *args: Any, **kwargs: Any
) -> Any:
    if not any(id(variable) in trained.parts for _, variable in pairs):
        with row_averages.apart(innermost(optimizer)):
            return original(optimizer, pairs, *args, **kwargs)
    warn_of_missing(pairs)
    optimizers = {key: one for key, one in trained.optimizers.items() if not _same(one, optimizer)}
    others = [(gradient, v) for gradient, v in pairs if id(v) not in optimizers]
    own = [(gradient, v) for gradient, v in pairs if id(v) in optimizers]
    if own:
        _apply_own(optimizer, optimizers, pairs, own)
    if own and all(gradient is None for gradient, _ in others):
        core = innermost(optimizer)
        # Under accumulation Keras 3 divides what it counts.
        counter = core._iterations if getattr(core, "gradient_accumulation_steps", None) else core.iterations
        return counter.assign_add(1)
    wrapper = wrapper_of(optimizer)
    return wrapper._apply(functools.partial(original, optimizer), others, *args, sum_before_clipping=False, **kwargs)


@tf.autograph.experimental.do_not_convert
def _apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """``apply`` of an optimizer of Keras 3, which without variables takes those that it was built on."""
    if trainable_variables is None:
        trainable_variables = _built_on.get(optimizer)
    if trainable_variables is None:
        return original(optimizer, grads)
    variables = list(trainable_variables)

    def apply(_: Any, pairs: Any) -> Any:
        pairs = list(pairs)
        return original(optimizer, [gradient for gradient, _ in pairs], [variable for _, variable in pairs])

    return _apply_gradients(apply, optimizer, zip(grads, variables, strict=True))


def _apply_own(
    optimizer: Any, optimizers: Mapping[int, Any], pairs: list[tuple[Any, Any]], own: list[tuple[Any, Any]]
) -> None:
    """Applies gradients by the optimizers that layers have: scaled back, and not where the model's skips its step.

    Raises:
      ValueError: one of them would scale them back again.
    """
    for _, variable in own:
        scaling = _scaling(optimizers[id(variable)])
        if scaling is not None:
            raise ValueError(f"Key-value variable '{table_name(variable, variable)}': {scaling}")
    scale, skips = _scale_of(optimizer)
    scaled = [(None if g is None else _divided(g, scale), v) for g, v in own]

    def update() -> tf.Tensor:
        done = []
        for one in {id(o): o for o in optimizers.values()}.values():
            mine = [(g, v) for g, v in scaled if optimizers[id(v)] is one and g is not None]
            if mine:
                with _among_the_weights(None):
                    whole = isinstance(one, OptimizerWrapper)
                    done.append(
                        wrapper_of(one)._apply(_unwrapped(one).apply_gradients, mine, sum_before_clipping=whole)
                    )
        ops = [op for op in done if isinstance(op, (tf.Operation, tf.Tensor))] if not tf.executing_eagerly() else []
        with tf.control_dependencies(ops):
            return tf.constant(True)

    if not skips:
        update()
        return
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g, _ in pairs if g is not None]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
    tf.cond(finite, update, lambda: tf.constant(False))


def _scale_of(optimizer: Any) -> tuple[Any, bool]:
    """What the gradients that an optimizer is given are to be divided by, and whether it skips those not finite."""
    if hasattr(optimizer, "dynamic_scale"):  # Keras 3, built by now
        return tf.convert_to_tensor(optimizer.dynamic_scale), True
    if hasattr(optimizer, "get_unscaled_gradients"):  # tf_keras, whose gradients come scaled back
        return None, True
    if hasattr(optimizer, "initial_scale"):  # Keras 3, in whose first step the loss was scaled by that
        return tf.constant(optimizer.initial_scale, tf.float32), True
    return getattr(optimizer, "loss_scale_factor", None), False


def _unwrapped(optimizer: Any) -> Any:
    """What a user has put into an `OptimizerWrapper`, or the optimizer itself."""
    return optimizer.optimizer if isinstance(optimizer, OptimizerWrapper) else optimizer


def _same(own_optimizer: Any, optimizer: Any) -> bool:
    """Whether the optimizer of a layer is the one that is given gradients, or that of the model."""
    return innermost(_unwrapped(own_optimizer)) is innermost(_unwrapped(optimizer))


def _scaling(own_optimizer: Any) -> str | None:
    """What is wrong with the optimizer of a layer where it divides gradients by a scale; None if it does not.

    Nobody has it scale a loss. One of tf_keras, whose ``apply_gradients`` takes gradients scaled back, does no harm.
    """
    given = _unwrapped(own_optimizer)
    if hasattr(given, "get_unscaled_gradients"):
        return None
    core, way_out = innermost(given), None
    if hasattr(given, "initial_scale"):
        way_out = f"Give the layer the {type(core).__name__} that is in it."
    elif getattr(given, "loss_scale_factor", None):
        way_out = f"Leave out loss_scale_factor={given.loss_scale_factor!r} of the layer's."
    if way_out is None:
        return None
    return (
        f"the optimizer of its layer, {type(given).__name__}, divides gradients by the scale of a loss that it is "
        "never given: the model's optimizer scales the loss, and the gradients that come to the layer's are scaled "
        f"back. {way_out}"
    )


def _divided(gradient: Any, scale: Any) -> Any:
    if scale is None:
        return gradient
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient / tf.cast(scale, gradient.dtype)
    values = gradient.values / tf.cast(scale, gradient.values.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _build(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """``build`` of an optimizer: has ``apply`` know of tables that were given."""
    for variables in (*args, *kwargs.values()):
        if isinstance(variables, (list, tuple)) and any(isinstance(variable, KvVariable) for variable in variables):
            _built_on[optimizer] = list(variables)
    return _given_weights(original, optimizer, *args, **kwargs)


@tf.autograph.experimental.do_not_convert
def _given_weights(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """``build`` of an optimizer, and what else a loop by hand gives its weights to: has nothing to do with tables."""

    def weights(given: Any) -> Any:
        if not isinstance(given, (list, tuple)):
            return given
        return [variable for variable in given if not isinstance(variable, KvVariable)]

    return original(optimizer, *map(weights, args), **{name: weights(given) for name, given in kwargs.items()})


def _exclude_from_weight_decay(
    original: Callable[..., Any], optimizer: Any, var_list: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """``exclude_from_weight_decay`` of an optimizer: of a partitioned variable, of its parts."""
    variables = None if var_list is None else [part for v in var_list for part in getattr(v, "_kv_parts", (v,))]
    return original(optimizer, variables, *args, **kwargs)


@tf.autograph.experimental.do_not_convert
def _finalize(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """``finalize_variable_values`` of an optimizer, by which ``fit`` ends: weights become their moving averages."""
    returned = _given_weights(original, optimizer, *args, **kwargs)
    row_averages.overwrite(optimizer)
    return returned


# ---- XLA -------------------------------------------------------------------------------------------------------------


def compiles_by_xla(model: Any) -> bool:
    """Whether the user has said ``jit_compile=True``, and not left it to Keras."""
    return bool(getattr(model, "jit_compile", False)) and model not in _auto


@contextlib.contextmanager
def lookups_outside_of_xla(model: Any) -> Iterator[None]:
    """Has Keras make functions that XLA does not compile as a whole: it knows no lookups of tables."""
    if not getattr(model, "jit_compile", False) or next(table_holders(model), None) is None:
        yield
        return
    # Past the property: of tf_keras it would make all functions anew.
    object.__setattr__(model, "_jit_compile", False)
    try:
        yield
    finally:
        object.__setattr__(model, "_jit_compile", True)


@contextlib.contextmanager
def _in_clusters(compiled: bool) -> Iterator[None]:
    """Has XLA compile what it knows of a step: the dense part, and not lookups and updates of tables."""
    if not compiled or tf.executing_eagerly():
        yield
        return
    with tf.xla.experimental.jit_scope():
        yield


def _make_function(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """``make_test_function`` and ``make_predict_function``."""
    with lookups_outside_of_xla(model):
        return original(model, *args, **kwargs)


# ---- What cannot be --------------------------------------------------------------------------------------------------


def _compile(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Says at once what an optimizer cannot do with the tables that the model has by now."""
    if not hasattr(model, "_flatten_layers"):
        return original(model, *args, **kwargs)
    asked = inspect.signature(original).bind(model, *args, **kwargs).arguments.get("jit_compile", "auto")
    (_auto.add if asked == "auto" else _auto.discard)(model)
    _decided.pop(model, None)
    with _supported(model) if asked is True else contextlib.nullcontext():
        returned = original(model, *args, **kwargs)
    check(model)
    return returned


@contextlib.contextmanager
def _supported(model: Any) -> Iterator[None]:
    """Has Keras 3 compile a model by XLA although layers that look tables up say that XLA cannot compile them."""
    layers = [
        layer for layer in {id(layer): layer for _, _, layer in table_holders(model)}.values() if layer is not model
    ]
    layers = [layer for layer in layers if getattr(layer, "supports_jit", True) is False]
    for layer in layers:
        layer.supports_jit = True
    try:
        yield
    finally:
        for layer in layers:
            layer.supports_jit = False


def _is_made(strategy: Any) -> bool:
    """Whether it is a strategy of `tf.distribute` that somebody made; TensorFlow's default stands for none."""
    return strategy is not None and not type(strategy).__name__.startswith("_Default")


@tf.autograph.experimental.do_not_convert
def check(model: Any) -> TrainedTables:
    """The tables that the model's steps are to train.

    Raises:
      ValueError: an optimizer cannot.
    """
    trained = TrainedTables.of_model(model)
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, (list, tuple)):  # WideDeepModel of tf_keras, whose step knows which has which weights
        optimizer = None
    # Keras 3, tf_keras; None without a strategy.
    strategy = getattr(model, "_distribute_strategy", None) or getattr(model, "_distribution_strategy", None)
    for key, part in trained.parts.items():
        if strategy is not None:
            placement.refuse_copies(table_name(part, part), strategy)
        one = trained.optimizers.get(key, optimizer)
        if one is None:
            continue
        made_under = getattr(innermost(one), "_distribution_strategy", None)  # Keras 3
        if strategy is None and _is_made(made_under):
            # TensorFlow ends such a step in an AssertionError that says nothing.
            placement.refuse_copies(table_name(part, part), made_under, "updated by an optimizer that was made")
        core = one._core if isinstance(one, OptimizerWrapper) else innermost(one)
        try:
            check_supported(core, {part: fused.plan(core, part)})
        except ValueError as error:
            raise ValueError(f"Model '{model.name}', key-value variable '{table_name(part, part)}': {error}") from None
        if _same(one, optimizer):
            continue
        if getattr(core, "use_ema", False):
            raise ValueError(
                f"Model '{model.name}', key-value variable '{table_name(part, part)}': the optimizer of its layer has "
                "moving averages (use_ema), which the end of fit puts in place for the model's optimizer only."
            )
        scaling = _scaling(one)
        if scaling is not None:
            raise ValueError(f"Model '{model.name}', key-value variable '{table_name(part, part)}': {scaling}")
    return trained


# ---- Installing ------------------------------------------------------------------------------------------------------


def _changes(keras: Any) -> Iterator[Callable[[], None]]:
    """Wraps what a Keras has."""
    methods: list[tuple[str, Callable[..., Any]]] = [(method, _train) for method in _TRAINING]
    methods += [("make_train_function", _make_train_function), ("compile", _compile)]
    methods += [(method, _make_function) for method in ("make_test_function", "make_predict_function", *INFERENCE)]
    for method, replacement in methods:
        owner = defining_class(keras.Model, method)
        if owner is not None:
            yield wrap_method(owner, method, replacement)
    layers = [cls for cls in keras.Model.__mro__ if cls.__module__.partition(".")[0] == keras.__name__]
    for cls in layers:
        for name in ("trainable_weights", "trainable_variables"):
            if isinstance(vars(cls).get(name), property):
                yield wrap_property(cls, name, _with_tables)
        if isinstance(vars(cls).get("losses"), property):
            yield wrap_property(cls, "losses", _losses)
        if "stateless_call" in vars(cls):
            yield wrap_method(cls, "stateless_call", _given_weights)
    for optimizer in _optimizers(keras):
        for method in ("scale_loss", "get_scaled_loss"):
            if method in vars(optimizer):
                yield wrap_method(optimizer, method, _scale_loss)
        if "apply_gradients" in vars(optimizer):
            yield wrap_method(optimizer, "apply_gradients", _apply_gradients)
        if "finalize_variable_values" in vars(optimizer):
            yield wrap_method(optimizer, "finalize_variable_values", _finalize)
        if "apply" in vars(optimizer):
            yield wrap_method(optimizer, "apply", _apply)
        if "exclude_from_weight_decay" in vars(optimizer):
            yield wrap_method(optimizer, "exclude_from_weight_decay", _exclude_from_weight_decay)
    named = [cls for cls in vars(keras.optimizers).values() if isinstance(cls, type)]
    for optimizer in dict.fromkeys([*named, *_optimizers(keras)]):
        if "build" in vars(optimizer):
            yield wrap_method(optimizer, "build", _build)


def _optimizers(keras: Any) -> list[type]:
    """The classes of Keras's own that apply gradients or scale losses."""
    scaler = keras.mixed_precision.LossScaleOptimizer
    legacy = getattr(getattr(keras.optimizers, "legacy", None), "Optimizer", None)
    classes = [*keras.optimizers.Optimizer.__mro__, scaler, *scaler.__subclasses__()]
    classes += [] if legacy is None else legacy.__mro__
    classes += [cls] if (cls := getattr(keras.optimizers, "MultiOptimizer", None)) else []
    return [cls for cls in dict.fromkeys(classes) if cls.__module__.partition(".")[0] == keras.__name__]


_hooks = KerasHooks(_changes)
install, uninstall = _hooks.install, _hooks.uninstall
