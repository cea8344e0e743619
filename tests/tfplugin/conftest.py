"""What the tests of key-value variables share: graph mode and eager mode in one process, and dense references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin


@pytest.fixture
def session() -> Iterator[tf.compat.v1.Session]:
    """A graph of its own, and a session on it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session


@pytest.fixture(params=[None, 3], ids=["single", "partitioned"])
def partitioner(request: pytest.FixtureRequest) -> Any:
    return request.param and tf.compat.v1.fixed_size_partitioner(request.param)


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes variables named after the test."""

    def make(dim: int = 4, name: str = "v", **kwargs: Any) -> Any:
        return tfplugin.get_kv_variable(name, embedding_dim=dim, **kwargs)

    return make


@pytest.fixture
def rows_of() -> Callable[..., np.ndarray]:
    """The rows that eager variables hold for keys; a row of NaN where there is none."""

    def rows_of(variable: Any, keys: Any, slot: str | None = None) -> np.ndarray:
        held, rows = variable.export(slot)
        by_key = dict(zip(held.numpy().tolist(), np.asarray(tf.cast(rows, tf.float64)), strict=True))
        absent = np.full(rows.shape[1], np.nan)
        return np.stack([by_key.get(int(key), absent) for key in np.ravel(keys)])

    return rows_of
