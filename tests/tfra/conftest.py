"""What the tests of `dynamic_embedding` share: the same calls eagerly, in `tf.function` and in a graph's session."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfplugin import dynamic_embedding as de

_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """A name that no other test uses: eager variables of one name are one."""
    return f"v{next(_numbers)}"


@pytest.fixture(params=[1, 3], ids=["1_device", "3_devices"])
def devices(request: pytest.FixtureRequest) -> list[str]:
    return ["/CPU:0"] * request.param


@pytest.fixture
def session() -> Iterator[tf.compat.v1.Session]:
    """A graph of its own, and a session on it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session


class Mode:
    """Runs calls in one of the three modes. In a graph each is built and run at once, as eager code does."""

    def __init__(self, name: str, session: tf.compat.v1.Session | None = None) -> None:
        self.name = name
        self.session = session

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        """What `call` gives for arrays, as arrays; None for an operation."""
        if self.session is not None:
            result = call(*[tf.constant(a) for a in args])
            ran = self.session.run([] if result is None else result)
            return None if ran is None or result is None else ran
        tensors = [tf.constant(a) for a in args]
        if self.name == "function":
            results: list[Any] = []

            def traced(*tensors: Any) -> Any:
                result = call(*tensors)
                nothing = result is None or isinstance(result, tf.Operation)
                results.append(nothing)
                return tf.zeros([]) if nothing else result

            value = tf.function(traced, autograph=False)(*tensors)
            return None if results[0] else tf.nest.map_structure(_array, value)
        result = call(*tensors)
        return None if result is None else tf.nest.map_structure(_array, result)


def _array(value: Any) -> np.ndarray:
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


@pytest.fixture(params=["eager", "function", "graph"])
def mode(request: pytest.FixtureRequest) -> Iterator[Mode]:
    if request.param == "graph":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            yield Mode("graph", session)
    else:
        yield Mode(request.param)


@pytest.fixture(autouse=True)
def train_mode() -> Iterator[None]:
    yield
    de.enable_train_mode()


@pytest.fixture
def rows_of() -> Callable[..., dict[Any, list[float]]]:
    """What a variable exports, as a dictionary."""

    def rows_of(mode: Mode, variable: Any) -> dict[Any, list[float]]:
        keys, rows = mode(lambda: variable.export())
        assert len(set(keys.tolist())) == len(keys)
        return dict(zip(keys.tolist(), rows.tolist(), strict=True))

    return rows_of


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Redis server."""
    from redis_processes import Server  # skips where there is no redis-py

    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def client(running: Any) -> Any:
    """A client of that server, which is empty."""
    client = running.client()
    client.flushall()
    return client
