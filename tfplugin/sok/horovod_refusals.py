"""Errors where Horovod would take the rows of a rank for a copy of what all ranks have.

Horovod makes variables equal on all ranks, or their gradients. Of a variable of sok each rank has other rows, under the
same local numbers: they would be written over, or trained by gradients of others, without a word.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensorflow.python.training import optimizer as v1_optimizer

from tfplugin import ranks
from tfplugin.horovod_hooks import wrap_broadcasts
from tfplugin.keras_hooks import KerasHooks
from tfplugin.sok.variables import is_model_parallel
from tfplugin.wrapped_method import defining_class, wrap_method

_installed = False


def install() -> None:
    """Has Horovod's broadcasts of variables, and averages of gradients, look at the variables first."""
    global _installed
    horovod = sys.modules.get("horovod.tensorflow")
    if _installed or horovod is None or ranks.size() == 1:
        return
    _installed = True
    wrap_broadcasts(horovod.functions, _refuse_broadcast)
    wrap_method(horovod, "_make_cached_allreduce_grads_fn", _checking_gradients)
    wrap_method(horovod._DistributedGradientTape, "__init__", _note_op)
    wrap_method(horovod._DistributedGradientTape, "register_local_source", _checking_local_source)
    for method in ("_zeros_slot", "_get_or_make_slot", "_get_or_make_slot_with_initializer"):
        wrap_method(v1_optimizer.Optimizer, method, _note_slot)
    KerasHooks(_keras_changes).install()


def _note_slot(make: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Has broadcasts know what an optimizer, any optimizer, keeps for this rank's rows."""
    slot = make(optimizer, *args, **kwargs)
    for variable in (*args, *kwargs.values()):
        if is_model_parallel(variable):
            held = getattr(slot, "_value", slot)  # of Keras 3
            held._slot_of_ranks_rows = variable.name
    return slot


def _keras_changes(keras: Any) -> Iterator[Callable[[], None]]:
    optimizers = keras.optimizers
    for cls, method in (
        (optimizers.Optimizer, "add_variable_from_reference"),
        (getattr(getattr(optimizers, "legacy", None), "Optimizer", None), "add_slot"),
    ):
        if (owner := cls and defining_class(cls, method)) is not None:
            yield wrap_method(owner, method, _note_slot)


def _refuse_broadcast(variables: Iterable[Any]) -> None:
    for variable in variables:
        of = variable.name if is_model_parallel(variable) else getattr(variable, "_slot_of_ranks_rows", None)
        if of is not None:
            what = f"Variable '{of}'" if of == variable.name else f"'{variable.name}', of an optimizer for '{of}',"
            raise ValueError(
                f"{what} has other rows on each rank, and a broadcast would write those of one rank over the others'. "
                "Broadcast dense variables only: hvd.broadcast_variables(sok.filter_variables("
                "model.trainable_variables)[1], 0), in a graph those of tf.compat.v1.trainable_variables(). In "
                "place of what is restored on rank 0 and broadcast, sok.Checkpoint restores on all ranks."
            )


def _checking_gradients(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    reduce_gradients = make(*args, **kwargs)

    def checked(gradients: Any, variables: Any = None, *args: Any, **kwargs: Any) -> Any:
        for variable in variables or ():
            if is_model_parallel(variable):
                raise ValueError(
                    f"Variable '{variable.name}' has other rows on each rank, and Horovod would add up the gradients "
                    "of rows that have nothing to do with each other. Tell it so: an hvd.DistributedGradientTape by "
                    "tape.register_local_source(variable), an hvd.DistributedOptimizer by "
                    "optimizer.register_local_var(variable)."
                )
        return reduce_gradients(gradients, variables, *args, **kwargs)

    return checked


def _note_op(init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(init).bind(*args, **kwargs).arguments
    init(*args, **kwargs)
    given["self"]._sums = given["op"] == sys.modules["horovod.tensorflow"].Sum


def _checking_local_source(register: Callable[..., None], tape: Any, source: Any) -> None:
    if is_model_parallel(source) and getattr(tape, "_sums", False) and tape.scale_local_gradients:
        raise ValueError(
            f"Variable '{source.name}' would be trained by the mean over the ranks, and dense variables by the sum: "
            "with op=hvd.Sum, too, Horovod divides the gradients of local sources by the number of ranks. Take "
            "hvd.DistributedGradientTape(tape, op=hvd.Sum, scale_local_gradients=False)."
        )
    register(tape, source)
