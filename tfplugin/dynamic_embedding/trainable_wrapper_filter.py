"""`trainable_wrapper_filter`: what lookups train, apart from other variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tfplugin.dynamic_embedding.trainable import TrainableWrapper


def trainable_wrapper_filter(
    iterable_object_in: Iterable[Any], test_unaggregated_function: Callable[[Any], bool] | None = None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Splits variables into those that are not trainable wrappers, and those that are.

    Args:
      iterable_object_in: variables, or what `test_unaggregated_function` knows.
      test_unaggregated_function: what tells the second kind; default: whether it is a `TrainableWrapper`.

    Returns:
      Two tuples, in the order of the input.
    """
    test = test_unaggregated_function or (lambda item: isinstance(item, TrainableWrapper))
    items = [(item, bool(test(item))) for item in iterable_object_in]
    return tuple(item for item, ours in items if not ours), tuple(item for item, ours in items if ours)
