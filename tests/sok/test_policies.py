"""Which keys of a `sok.DynamicVariable` get a row."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfplugin.sok as sok
from kvtools.errors import BadInputError
from tfplugin.policies import ProbabilityAdmission


def test_lookups_of_both_kinds_count(tmp_path):
    sok.init("single")
    v = sok.DynamicVariable(2, "ones", enter_threshold=2, padding_key=0)
    ids = tf.SparseTensor([[0, 0], [1, 0]], tf.constant([5, 0], tf.int64), [2, 1])
    np.testing.assert_array_equal(sok.lookup_sparse(v, ids, combiners="sum"), [[1.0, 1.0], [0.0, 0.0]])
    assert int(v.size[0]) == 0 and v.get_counting([5]).numpy() == [1]
    tf.nn.embedding_lookup(v, tf.constant([5], tf.int64))
    assert v.indices.numpy().tolist() == [5]


def test_options_out_of_range():
    sok.init("single")
    with pytest.raises(ValueError, match="enter_threshold must be a number of lookups, 0 or more; got -3"):
        sok.DynamicVariable(2, enter_threshold=-3)
    with pytest.raises(ValueError, match="both say which keys get a row"):
        sok.DynamicVariable(2, enter_threshold=3, admission=ProbabilityAdmission(0.5))


def test_a_bound_of_a_table_that_grows_is_refused():
    sok.init("single")
    with pytest.raises(
        ValueError, match=r"max_capacity=10 bounds a table of var_type=.hybrid., and one of .hbm. grows as it needs"
    ):
        sok.DynamicVariable(2, max_capacity=10)
    assert sok.DynamicVariable(2, var_type="hybrid", max_capacity=10).max_capacity == 10


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_what_says_which_rows_go_needs_a_bound(var_type):
    sok.init("single")
    with pytest.raises(ValueError, match=r"evict_strategy='kLfu' says which rows go, and nothing says how many stay"):
        sok.DynamicVariable(2, var_type=var_type, evict_strategy="kLfu")
    bounded = sok.DynamicVariable(2, var_type="hybrid", max_capacity=10, evict_strategy="kLfu")
    assert (bounded.max_capacity, bounded.eviction) == (10, "lfu")
    assert sok.DynamicVariable(2, var_type="hybrid", max_capacity=10).eviction == "lru"


@pytest.mark.parametrize("path", ["missing/model", "."])
def test_a_checkpoint_that_is_not_there_is_one_error(tmp_path, path):
    sok.init("single")
    checkpoint = sok.Checkpoint(v=sok.DynamicVariable(2, "ones"))
    for restore in (checkpoint.restore, checkpoint.read):
        with pytest.raises(BadInputError, match=r"\.index': no such file; name a checkpoint prefix"):
            restore(str(tmp_path / path))
    saved = checkpoint.save(str(tmp_path / "model"))
    checkpoint.restore(saved).assert_consumed()
