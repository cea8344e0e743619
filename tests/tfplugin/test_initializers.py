"""What a row starts from: every key its own, drawn as the initializer says."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tfplugin import KvVariable
from tfplugin.initializers import resolve

v1 = tf.compat.v1
DIM = 16
KEYS = np.arange(5000)

#: Scaled by the number of inputs and outputs, both of which are DIM for a row: (initializer, scale, distribution).
SCALED = {
    "Glorot": (tf.keras.initializers.GlorotUniform(), 1.0, "uniform"),
    "Glorot by name": ("glorot_normal", 1.0, "truncated_normal"),
    "He": (tf.keras.initializers.HeNormal(), 2.0, "truncated_normal"),
    "He of tf_keras": (tf_keras.initializers.HeUniform, 2.0, "uniform"),
    "LeCun": (tf.keras.initializers.LecunUniform(), 1.0, "uniform"),
    "LeCun of v1": (v1.initializers.lecun_normal(), 1.0, "truncated_normal"),
    "Glorot of v1": (v1.glorot_uniform_initializer(), 1.0, "uniform"),
    "normal": (tf.keras.initializers.VarianceScaling(4.0, "fan_out", "untruncated_normal"), 4.0, "normal"),
    "v1": (v1.variance_scaling_initializer(3.0, "fan_avg", "uniform"), 3.0, "uniform"),
    "tf_keras": (tf_keras.initializers.VarianceScaling(3.0, "fan_avg", "truncated_normal"), 3.0, "truncated_normal"),
}


@pytest.mark.parametrize("name", SCALED)
def test_initializers_that_scale_draw_a_row_for_each_key(make, name):
    initializer, scale, distribution = SCALED[name]
    rows = make(dim=DIM, initializer=initializer).sparse_read(KEYS).numpy()
    assert len(np.unique(rows, axis=0)) == len(KEYS)
    deviation = np.sqrt(scale / DIM)
    assert rows.std() == pytest.approx(deviation, rel=0.02)
    assert rows.mean() == pytest.approx(0, abs=0.01 * np.sqrt(scale))
    # How far out the largest of 80,000 lies tells the three apart.
    bound = {"uniform": np.sqrt(3), "truncated_normal": 2 / 0.87962566, "normal": 6.5}[distribution] * deviation
    assert 0.6 * bound < np.abs(rows).max() <= bound * 1.000001
    if distribution != "normal":
        assert np.abs(rows).max() > 0.99 * bound


def test_the_scale_is_that_of_tensorflow_for_the_shape_of_a_row(make):
    for initializer in (v1.glorot_normal_initializer(), tf_keras.initializers.HeUniform()):
        draw = initializer if isinstance(initializer, v1.glorot_normal_initializer) else type(initializer)
        stock = np.stack([draw([DIM]) if draw is initializer else draw()([DIM]) for _ in range(300)])
        rows = make(dim=DIM, initializer=initializer).sparse_read(KEYS).numpy()
        assert rows.std() == pytest.approx(stock.std(), rel=0.05)
        assert np.abs(stock).max() <= np.abs(rows).max() * 1.01


def test_one_seed_in_every_process():
    """Keras 3 draws a seed for an initializer that is given none: two of them are as two processes have them."""
    made = [tf.keras.initializers.GlorotUniform() for _ in range(2)] + [tf.keras.initializers.RandomNormal()] * 2
    seeds = [resolve(initializer, "v", DIM, tf.float32).seed for initializer in made]
    assert len(set(seeds)) == 1
    assert resolve(tf.keras.initializers.GlorotUniform(seed=3), "v", DIM, tf.float32).seed != seeds[0]


@pytest.mark.parametrize(
    "initializer",
    [
        "orthogonal",
        tf.keras.initializers.Orthogonal(),
        tf_keras.initializers.Orthogonal,
        v1.orthogonal_initializer(),
        tf.keras.initializers.Identity(),
        v1.initializers.identity(),
    ],
    ids=lambda given: given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__),
)
def test_what_draws_a_matrix_as_a_whole_is_refused(make, initializer):
    with pytest.raises(ValueError, match=r"\('v'\): (Orthogonal|Identity).* draws each row by itself.*GlorotNormal"):
        make(initializer=initializer)


@pytest.mark.parametrize("rows", [2, 1024])  # 1024 rows are what functions are asked for
@pytest.mark.parametrize(
    "constant", [tf.keras.initializers.Constant, tf_keras.initializers.Constant, v1.constant_initializer]
)
def test_a_constant_matrix_is_refused_and_a_constant_row_is_that_of_all_keys(make, constant, rows):
    with pytest.raises(ValueError, match=rf"\('v'\): \w+ of shape \({rows}, 4\) has row number i for id i.*upsert"):
        make(initializer=constant(np.ones((rows, 4), np.float32)))
    table = make(initializer=constant(np.array([1.0, 2.0, 3.0, 4.0], np.float32)))
    assert table.sparse_read([7, 1 << 60]).numpy().tolist() == [[1, 2, 3, 4]] * 2


def test_a_class_that_draws_in_its_own_way_is_sampled(make):
    class Halves(tf.keras.initializers.VarianceScaling):
        def __call__(self, shape, dtype=None):
            return tf.fill(shape, tf.cast(0.5, dtype))

    assert (make(initializer=Halves()).sparse_read([1, 2]) == 0.5).numpy().all()


@pytest.mark.parametrize("dtype", [tf.int64, tf.int32, tf.int8, tf.bool], ids=lambda d: d.name)
def test_integers_and_bools_start_from_zero_where_nobody_says_from_what(dtype):
    table = KvVariable("v", 2, value_dtype=dtype)
    assert table.sparse_read([1, 2]).numpy().tolist() == [[0, 0], [0, 0]]
    assert resolve(None, "v", 2, dtype) == resolve(0.0, "v", 2, dtype)
