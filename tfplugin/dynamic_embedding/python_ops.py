"""Ops that call Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Ops that are made inside run on the task of the session that runs them."""
    with tf_ops.colocate_with(None, ignore_existing=True), tf_ops.device(None):
        yield


def python_op(function: Callable[..., Any], inputs: Sequence[Any], result: Any) -> Any:
    """The op that calls a function of arrays. It is local: no other task knows the function.

    Args:
      function: takes an array for each of `inputs`.
      inputs: tensors.
      result: dtypes of what it returns, as of `tf.numpy_function`.
    """
    with local():
        return tf.numpy_function(function, inputs, result)
