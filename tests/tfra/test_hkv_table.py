"""`HkvHashTableCreator`: tables of bounded size, and which rows go first."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from tfplugin import dynamic_embedding as de

LRU, LFU, EPOCHLRU, EPOCHLFU, CUSTOMIZED = de.HkvEvictStrategy


def bounded(strategy, capacity=3, devices=("/CPU:0",), **kwargs):
    config = de.HkvHashTableConfig(max_capacity=capacity, evict_strategy=strategy, **kwargs)
    return de.Variable(dim=2, name="v", devices=list(devices), kv_creator=de.HkvHashTableCreator(config))


def upsert(mode, v, *keys):
    mode(v.upsert, np.array(keys), np.ones([len(keys), 2], np.float32))


def keys_of(mode, v):
    return sorted(mode(v.export)[0].tolist())


@pytest.mark.parametrize("strategy", [LRU, EPOCHLRU])
def test_the_rows_that_were_written_longest_ago_go(mode, strategy):
    v = bounded(strategy)
    upsert(mode, v, 1, 2, 3)
    upsert(mode, v, 1)
    upsert(mode, v, 4)
    upsert(mode, v, 5)
    assert keys_of(mode, v) == [1, 4, 5]
    assert mode(v.size) == 3


def test_the_rows_that_were_written_least_often_go(mode):
    v = bounded(LFU)
    upsert(mode, v, 1, 2, 3)
    upsert(mode, v, 1)
    upsert(mode, v, 2)
    upsert(mode, v, 3)
    upsert(mode, v, 1)
    upsert(mode, v, 3)
    upsert(mode, v, 4)
    assert keys_of(mode, v) == [1, 3, 4]
    upsert(mode, v, 5)
    assert keys_of(mode, v) == [1, 3, 5]


def test_lookups_count_for_nothing(mode):
    v = bounded(LFU)
    upsert(mode, v, 1, 2, 3)
    upsert(mode, v, 1, 2)
    for _ in range(3):
        mode(v.lookup, np.array([3, 9]))
    upsert(mode, v, 4)
    assert keys_of(mode, v) == [1, 2, 4]


def test_rows_of_earlier_epochs_go_first(mode):
    v = bounded(EPOCHLFU, step_per_epoch=3)
    for _ in range(3):
        upsert(mode, v, 1)  # epoch 0
    upsert(mode, v, 2)  # epoch 1
    upsert(mode, v, 3, 2)
    upsert(mode, v, 4)
    assert keys_of(mode, v) == [2, 3, 4]
    upsert(mode, v, 5)  # epoch 2
    assert keys_of(mode, v) == [2, 4, 5]


def test_the_rows_of_the_lowest_score_go(mode):
    v = bounded(CUSTOMIZED, gen_scores_fn=lambda keys: 100 - keys)
    upsert(mode, v, 1, 2, 3)
    upsert(mode, v, 0)
    assert keys_of(mode, v) == [0, 1, 2]
    mode(v.accum, np.array([7]), *[np.ones([1, 2], np.float32)] * 2, np.array([False]))
    assert keys_of(mode, v) == [0, 1, 7]
    upsert(mode, v, 5)
    assert keys_of(mode, v) == [0, 1, 5]


@pytest.mark.parametrize("strategy", [LFU, CUSTOMIZED, LRU])
def test_training_inserts_evicts_and_counts(strategy, devices):
    v = bounded(strategy, 3, devices, gen_scores_fn=lambda keys: keys)
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(0.1))
    shadow = v.get_trainable_by_name("x")
    n = len(devices)

    def step(*keys):
        ids = tf.constant([key * n for key in keys], tf.int64)
        optimizer.minimize(lambda: tf.reduce_sum(de.embedding_lookup(v, ids, name="x")), var_list=[shadow])

    for keys in ((1, 2, 3), (3, 2), (2,), (1,), (1,), (1,), (2,), (4,), (5,)):
        step(*keys)
    kept = sorted(key // n for key in v.export()[0].numpy())
    assert kept == {LFU: [1, 2, 5], CUSTOMIZED: [3, 4, 5], LRU: [2, 4, 5]}[strategy]
    assert {slot.size().numpy() for slot in v.get_slot_variables(optimizer)} == {3}


def test_each_table_has_the_capacity(mode, devices):
    v = bounded(LRU, 4, devices)
    upsert(mode, v, *range(60))
    assert mode(lambda: [v.size(i) for i in range(len(devices))]) == [4] * len(devices)


def test_a_checkpoint_keeps_the_scores(tmp_path):
    v = bounded(LFU)
    for keys in ((1, 2, 3), (1,), (3,)):
        v.upsert(tf.constant(keys, tf.int64), tf.ones([len(keys), 2]))
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    w = bounded(LFU)
    tf.train.Checkpoint(v=w).restore(path)
    w.upsert(tf.constant([4], tf.int64), tf.ones([1, 2]))
    assert sorted(w.export()[0].numpy()) == [1, 3, 4]


def test_arguments_are_checked():
    config = de.HkvHashTableConfig()
    assert (config.init_capacity, config.max_capacity, config.max_hbm_for_values) == (2**20, 2**20, 2**30)
    assert (config.evict_strategy, config.step_per_epoch, config.reserved_key_start_bit) == (LRU, 0, 0)
    assert [int(s) for s in de.HkvEvictStrategy] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="max_capacity must be a number of 1 or more, got 0"):
        de.HkvHashTableConfig(max_capacity=0)
    with pytest.raises(ValueError, match="evict_strategy must be an HkvEvictStrategy, got 7"):
        de.HkvHashTableConfig(evict_strategy=7)
    with pytest.raises(ValueError, match="CUSTOMIZED goes by gen_scores_fn: give one"):
        de.HkvHashTableConfig(evict_strategy=CUSTOMIZED)
    with pytest.raises(TypeError, match="config must be an HkvHashTableConfig, got 5"):
        de.HkvHashTableCreator(5)
    with pytest.raises(TypeError, match="bounded tables hold numbers, got strings"):
        de.Variable(tf.string, dim=2, name="v", kv_creator=de.HkvHashTableCreator())


def scores_of(mode, v):
    keys, scores = mode(lambda: v.export_keys_and_scores(1))
    assert scores.dtype == np.int64
    return dict(zip(keys.tolist(), scores.tolist(), strict=True))


def test_scores_are_exported(mode, devices):
    v = bounded(LFU, 8, devices)
    assert scores_of(mode, v) == {}
    upsert(mode, v, 0, 1, 2, 3)
    assert scores_of(mode, v) == {0: 1, 1: 1, 2: 1, 3: 1}
    upsert(mode, v, 0, 1, 4)
    assert scores_of(mode, v) == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1}
    v = bounded(CUSTOMIZED, 8, devices, gen_scores_fn=lambda keys: keys * 2)
    upsert(mode, v, 0, 1, 7)
    assert scores_of(mode, v) == {0: 0, 1: 2, 7: 14}
    v = bounded(EPOCHLFU, 8, step_per_epoch=2)
    for _ in range(3):
        upsert(mode, v, 1)
    upsert(mode, v, 2)
    assert scores_of(mode, v) == {1: (1 << 32) + 3, 2: (1 << 32) + 1}


@pytest.mark.parametrize("strategy", [LRU, EPOCHLRU])
def test_scores_by_time_are_microseconds(mode, strategy):
    before = time.time() * 1e6
    v = bounded(strategy)
    upsert(mode, v, 1)
    upsert(mode, v, 2)
    scores = scores_of(mode, v)
    assert before - 1 <= scores[1] < scores[2] <= time.time() * 1e6 + 1


def test_scores_come_with_rows(mode):
    v = bounded(LFU)
    mode(v.upsert, np.array([1, 2]), np.array([[1, 2], [3, 4]], np.float32))
    keys, rows, scores = mode(lambda: v.tables[0].export_with_scores(10))
    assert dict(zip(keys.tolist(), rows.tolist(), strict=True)) == {1: [1, 2], 2: [3, 4]}
    assert scores.tolist() == [1, 1]


def test_scores_are_of_bounded_tables():
    with pytest.raises(TypeError, match="has no scores: give it kv_creator=HkvHashTableCreator"):
        de.Variable(dim=2, name="v").export_keys_and_scores(1)
    for size in (0, True, 1.5):
        with pytest.raises(ValueError, match="split_size must be a number of 1 or more"):
            bounded(LFU).export_keys_and_scores(size)


def test_a_bound_in_bytes_is_told_not_to_be_one(caplog):
    de.HkvHashTableConfig(max_capacity=9)
    assert not caplog.text
    de.HkvHashTableConfig(max_capacity=9, max_hbm_for_values=1000)
    assert "max_hbm_for_values=1000 is not used: max_capacity=9 alone bounds a table" in caplog.text
