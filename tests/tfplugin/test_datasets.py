"""Lookups in functions of `tf.data`: no gradient leaves a dataset, so they read, or say that they insert."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

IDS = np.array([3, -1, 3, 2**40])


def _rows(lookup: Any) -> list[list[float]]:
    return [rows.numpy().tolist() for rows in tf.data.Dataset.from_tensor_slices(IDS).map(lookup)]


@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize("how", ["map", "filter", "traced before", "map_fn"])
def test_a_lookup_that_trains_is_an_error(make: Any, how: str, parts: int | None) -> None:
    table = make(name="ads", partitioner=parts and tf.compat.v1.fixed_size_partitioner(parts))

    def lookup(ids: tf.Tensor) -> tf.Tensor:
        return tf.nn.embedding_lookup(table, ids)

    if how == "traced before":
        lookup = tf.function(lookup, input_signature=[tf.TensorSpec([], tf.int64)])
        lookup(tf.constant(7, tf.int64))
    begun = int(table.size())
    dataset = tf.data.Dataset.from_tensor_slices(IDS)
    with pytest.raises(
        ValueError, match=r"Dataset\.(map|filter)\(\) looks up key-value variable 'ads(:0)?': .*inference_mode"
    ):
        if how == "filter":
            dataset.filter(lambda ids: tf.reduce_all(lookup(ids) > 0))
        elif how == "map_fn":
            dataset.batch(2).map(lambda ids: tf.map_fn(lookup, ids, fn_output_signature=tf.float32))
        else:
            dataset.map(lookup)
    assert int(table.size()) == begun


def test_a_loop_over_a_dataset_in_a_function_that_trains_nothing_in_it_names_the_way_out(make: Any) -> None:
    table, dataset = make(dim=1, initializer=1.0), tf.data.Dataset.from_tensor_slices(IDS)

    def gradient(batches: Any) -> Any:
        with tf.GradientTape() as tape:
            total = 0.0
            for ids in batches:
                total += tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        return tape.gradient(total, table)

    with pytest.raises(ValueError, match=r"Of a loop over a dataset in a tf\.function: .* loop over iter\(dataset\)"):
        tf.function(lambda: gradient(dataset))()
    slices = tf.function(lambda: gradient(iter(dataset)))()
    assert sorted(slices.indices.numpy()) == sorted(IDS) and slices.values.numpy().tolist() == [[1.0]] * 4


def test_a_lookup_that_reads_or_says_that_it_inserts_is_none(make: Any) -> None:
    table = make(dim=1, initializer=1.0)
    table.upsert([3], [[5.0]])
    traced = tf.function(lambda ids: table.sparse_read(ids, training=False))
    traced(tf.constant(7, tf.int64))
    read = [[5.0], [0.0], [5.0], [0.0]]
    assert _rows(traced) == _rows(lambda ids: table.sparse_read(ids, training=False)) == read
    with tfplugin.inference_mode():
        assert _rows(lambda ids: tf.nn.embedding_lookup(table, ids)) == read
    assert int(table.size()) == 1
    assert _rows(lambda ids: table.sparse_read(ids, training=True)) == [[5.0], [1.0], [5.0], [1.0]]
    assert int(table.size()) == 3


def test_a_table_that_nothing_trains_gives_its_keys_their_rows(make: Any) -> None:
    table = make(dim=1, initializer=1.0, trainable=False)
    assert _rows(lambda ids: tf.nn.embedding_lookup(table, ids)) == [[1.0]] * 4
    assert int(table.size()) == 3


def test_an_update_in_the_backward_pass_is_one_within_a_dataset_too(make: Any) -> None:
    table = make(dim=1, initializer=1.0)
    tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(1.0))

    def train(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        tape.gradient(loss, table)
        return loss

    assert _rows(train) == [1.0, 1.0, 0.0, 1.0]


def test_string_keys_are_those_of_a_layer(make: Any) -> None:
    words = tf.ragged.constant([["red", "wine"], [], ["", "red"]])
    keys = tf.data.Dataset.from_tensor_slices(words).map(tfplugin.string_keys).ragged_batch(3)
    assert next(iter(keys)).to_list() == tfplugin.string_keys(words).to_list()
