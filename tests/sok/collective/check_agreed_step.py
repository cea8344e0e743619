"""What an optimizer makes of all gradients together, norms and whether they are finite, is the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
import tfplugin.sok as sok

KEYS = [-3, 0, 1, 2, 4, 5, 2**40]
SHAPES = {"dynamic": (len(KEYS), 2), "static": (5, 3), "localized": (4, 2), "dense": (3,)}
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def _sok_started() -> None:
    sok.init()


def _initial(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).normal(size=SHAPES[name]).astype(np.float32)


def _gradients(step: int, bad: str | None = None) -> dict[str, np.ndarray]:
    """Of the whole. `bad` has an infinity in its last row in the second step."""
    rng = np.random.default_rng(step)
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    if bad is not None and step == 1:
        made[bad][-1] = np.inf
    return made


class _Model:
    """A variable of each kind, of which this rank has its rows."""

    def __init__(self, rank: int, size: int) -> None:
        self.held = {
            "dynamic": np.array([place for place, key in enumerate(KEYS) if key % size == rank], int),
            "static": np.arange(rank, SHAPES["static"][0], size),
            "localized": np.arange(SHAPES["localized"][0] if rank == size - 1 else 0),
            "dense": np.arange(SHAPES["dense"][0]),
        }
        self.dynamic = sok.DynamicVariable(2, "zeros")
        self.keys = np.array(KEYS, np.int64)[self.held["dynamic"]]
        sok.assign(self.dynamic, self.keys, _initial("dynamic")[self.held["dynamic"]])
        self.variables = {
            "dynamic": self.dynamic,
            "static": sok.Variable(_initial("static")),
            "localized": sok.Variable(_initial("localized"), mode=f"localized:{size - 1}"),
            "dense": tf.Variable(_initial("dense")),
        }

    def pairs(self, gradients: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Of this rank's rows."""
        found: list[tuple[Any, Any]] = []
        for name, variable in self.variables.items():
            rows = tf.gather(gradients[name], self.held[name])
            if name != "dense":
                numbers = self.keys if name == "dynamic" else np.arange(len(self.held[name]))
                shape = None if name == "dynamic" else tf.constant(variable.shape.as_list())
                rows = tf.IndexedSlices(rows, tf.constant(numbers, tf.int64), shape)
            found.append((rows, variable))
        return found

    def check(self, expected: dict[str, tf.Variable]) -> None:
        for name, variable in self.variables.items():
            mine = self.dynamic.sparse_read(self.keys, training=False) if name == "dynamic" else variable
            np.testing.assert_allclose(mine, expected[name].numpy()[self.held[name]], 1e-5, 1e-6, err_msg=name)


def _reference(make: Callable[[], Any], scaled: float, bad: str | None) -> tuple[dict[str, tf.Variable], Any]:
    variables, optimizer = {name: tf.Variable(_initial(name)) for name in SHAPES}, make()
    for step in range(STEPS):
        gradients = _gradients(step, bad)
        optimizer.apply_gradients([(tf.constant(gradients[name] * scaled), variables[name]) for name in SHAPES])
    return variables, optimizer


def _train(
    make: Callable[[], Any],
    rank: int,
    size: int,
    *,
    wrapper: Any = sok.OptimizerWrapper,
    scaled: float = 1.0,
    bad: str | None = None,
    traced: bool = False,
    leave_out: Sequence[str] = (),
) -> tuple[_Model, Any]:
    model, optimizer = _Model(rank, size), wrapper(make())
    for name in leave_out:
        del model.variables[name]

    def step(gradients: dict[str, tf.Tensor]) -> None:
        optimizer.apply_gradients(model.pairs(gradients))

    run = tf.function(step) if traced else step
    for number in range(STEPS):
        run({name: tf.constant(one * scaled) for name, one in _gradients(number, bad).items()})
    return model, optimizer.optimizer


KERAS = {"Keras 3": tf.keras.optimizers, "tf_keras": tf_keras.optimizers, "legacy": tf_keras.optimizers.legacy}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.parametrize("keras", KERAS)
def test_gradients_are_clipped_as_on_one_rank(
    keras: str, clip: str, traced: bool, rank: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        return KERAS[keras].SGD(0.1, **{clip: 0.5})

    _train(make, rank, size, traced=traced)[0].check(_reference(make, 1.0, None)[0])
    assert "AutoGraph" not in caplog.text


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm"])
def test_the_sum_of_several_steps_is_clipped(clip: str, rank: int, size: int) -> None:
    def make() -> Any:
        return tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, **{clip: 0.5})

    _train(make, rank, size, traced=True)[0].check(_reference(make, 1.0, None)[0])


OF_ALL_ROWS: dict[str, Callable[[], Any]] = {
    "average": lambda: tf.keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "average, tf_keras": lambda: tf_keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "sum": lambda: tf.keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "Ftrl": lambda: tf.keras.optimizers.Ftrl(0.1),
    "Lion": lambda: tf.keras.optimizers.Lion(0.1),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("tables", [True, False], ids=["with tables", "without"])
@pytest.mark.parametrize("kind", OF_ALL_ROWS)
def test_a_rank_without_rows_of_a_variable_trains_the_others(
    kind: str, tables: bool, traced: bool, rank: int, size: int
) -> None:
    expected = _reference(OF_ALL_ROWS[kind], 1.0, None)[0]
    model, _ = _train(OF_ALL_ROWS[kind], rank, size, traced=traced, leave_out=() if tables else ("dynamic",))
    model.check(expected)


def test_the_wrapper_of_tables_that_are_not_spread_clips_spread_ones_alike(rank: int, size: int) -> None:
    def make() -> Any:
        return tf.keras.optimizers.Adagrad(0.1, global_clipnorm=0.5)

    model, _ = _train(make, rank, size, wrapper=tfplugin.OptimizerWrapper)
    model.check(_reference(make, 1.0, None)[0])


def test_a_rank_without_a_gradient_agrees_with_the_others(rank: int, size: int) -> None:
    dense, table = tf.Variable([3.0]), sok.DynamicVariable(1, "ones")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    rows = tf.IndexedSlices(tf.fill([1, 1], 4.0), tf.constant([size - 1], tf.int64)) if rank == size - 1 else None
    optimizer.apply_gradients([(rows, table), (tf.constant([3.0]), dense)])
    np.testing.assert_allclose(dense, [3 - 3 / 5])
    if rank == size - 1:
        np.testing.assert_allclose(table.values, [[1 - 4 / 5]])


def test_a_norm_that_is_no_number_leaves_none(rank: int, size: int, gather: Any) -> None:
    dense, table = tf.Variable([3.0]), sok.DynamicVariable(1, "ones")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    rows = tf.IndexedSlices(tf.fill([1, 1], np.nan if rank == 0 else 1.0), tf.constant([rank], tf.int64))
    optimizer.apply_gradients([(rows, table), (tf.constant([3.0]), dense)])
    assert np.isnan(dense.numpy()).all()  # as TensorFlow has it, and on every rank


SCALED = {
    "Keras 3": lambda: tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), initial_scale=16.0),
    "tf_keras": lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1), initial_scale=16.0),
    "legacy": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.legacy.SGD(0.1), initial_scale=16.0
    ),
    "clips": lambda: tf.keras.optimizers.LossScaleOptimizer(
        tf.keras.optimizers.SGD(0.1, global_clipnorm=0.5), initial_scale=16.0
    ),
}


def _scale(optimizer: Any) -> float:
    return float(np.asarray(getattr(optimizer, "loss_scale", None) or optimizer.dynamic_scale))


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("bad", ["dynamic", "static", "localized", None])
@pytest.mark.parametrize("kind", SCALED)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    kind: str, bad: str | None, traced: bool, rank: int, size: int
) -> None:
    scaled = 1.0 if kind in ("tf_keras", "legacy") else 16.0  # which take unscaled ones
    model, optimizer = _train(SCALED[kind], rank, size, scaled=scaled, bad=bad, traced=traced)
    expected, reference = _reference(SCALED[kind], scaled, bad)
    assert _scale(optimizer) == _scale(reference) == (16.0 if bad is None else 8.0)
    model.check(expected)


def test_a_session_skips_the_step_on_all(rank: int, size: int) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        inner = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        scaling = tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer(inner, "dynamic")
        optimizer = sok.OptimizerWrapper(scaling)
        table = sok.DynamicVariable(1, "ones", name="session")
        dense = tf.compat.v1.get_variable("dense", initializer=1.0)
        value = tf.compat.v1.placeholder(tf.float32)
        rows = tf.IndexedSlices(tf.fill([1, 1], value), tf.constant([rank], tf.int64))
        train = optimizer.apply_gradients([(rows, table), (tf.constant(1.0), dense)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train, {value: np.inf if rank == 0 else 1.0})
        assert session.run([dense, tf.shape(table.export()[0])[0]]) == [1.0, 0]
        session.run(train, {value: 1.0})
        assert session.run([dense, table.export()[1]]) == [0.0, [[0.0]]]


def test_a_transformer_of_gradients_is_refused_on_several_ranks(rank: int, size: int) -> None:
    optimizer = sok.OptimizerWrapper(tf_keras.optimizers.legacy.SGD(1.0, gradient_transformers=[lambda pairs: pairs]))
    table = sok.DynamicVariable(1, "ones", name="transformed")
    pairs = [(tf.IndexedSlices(tf.ones([1, 1]), tf.constant([rank], tf.int64)), table)]
    if size == 1:
        optimizer.apply_gradients(pairs)
        assert table.values.numpy().tolist() == [[0]]
        return
    with pytest.raises(ValueError, match=r"rows of this rank only of 'transformed:0', .* over \d ranks\. Clip with"):
        optimizer.apply_gradients(pairs)


@pytest.mark.parametrize("name", ["Adafactor", "Lamb"])
def test_norms_over_the_rows_of_a_variable_are_those_of_its_owner_or_refused(name: str, rank: int, size: int) -> None:
    def make() -> Any:
        return getattr(tf.keras.optimizers, name)(0.1)

    model, _ = _train(make, rank, size, leave_out=("dynamic", "static"))
    model.check(_reference(make, 1.0, None)[0])
    if size > 1:
        with pytest.raises(ValueError, match=rf"{name} takes norms or factors .* mode='localized:0'"):
            _train(make, rank, size, leave_out=("dynamic",))


@pytest.mark.parametrize("keras", ["Keras 3", "legacy"])
def test_slots_of_a_rank_that_got_no_rows_are_empty(keras: str, rank: int, size: int) -> None:
    table = sok.DynamicVariable(2, "ones", name="slots")
    optimizer = sok.OptimizerWrapper(KERAS[keras].Adam(0.1))
    keys = [0, size] if rank == 0 else []
    optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([len(keys), 2]), tf.constant(keys, tf.int64)), table)])
    found, rows = sok.export(optimizer.get_slot(table, "m"))
    assert sorted(found.numpy().tolist()) == keys and rows.shape == (len(keys), 2)
    np.testing.assert_allclose(rows, np.full([len(keys), 2], 0.1), 1e-6)
    assert optimizer.get_slot(table, "v").read(tf.constant([0], tf.int64)).shape == (1, 2)
