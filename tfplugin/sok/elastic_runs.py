"""What an elastic run of Horovod, in which ranks end and begin, has to know of lookups over the ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfplugin import ranks
from tfplugin.sok import horovod_refusals
from tfplugin.wrapped_method import wrap_method

#: What Horovod says in every exchange under way when a rank has ended.
_RANK_HAS_ENDED = "Horovod has been shut down"


def install() -> None:
    """Has ``hvd.elastic.run`` know the ends of lookups, and these the new ranks. Outside of such runs nothing."""
    if not ranks.is_elastic():
        return
    try:
        from horovod.tensorflow import elastic
    except ImportError:  # of which sok.init() tells
        return
    wrap_method(elastic, "_reset", _reset)
    wrap_method(elastic, "run", _run)
    of_keras = sys.modules.get("horovod.tensorflow.keras.elastic")
    if of_keras is not None:  # it has taken the function already
        of_keras.run = elastic.run


def _reset(reset: Callable[[], None]) -> None:
    reset()
    ranks.start_anew()
    horovod_refusals.install()


def _run(run: Callable[..., Any], function: Callable[..., Any]) -> Any:
    from horovod.common.exceptions import HorovodInternalError

    @functools.wraps(function)
    def tells_errors(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except tf.errors.UnknownError as error:
            # Horovod looks for names of its own ops, not of exchanges, and takes any other such error for the end of
            # the training: in silence.
            if _RANK_HAS_ENDED in error.message:
                raise HorovodInternalError(error) from error
            raise RuntimeError(error.message) from error

    return run(tells_errors)
