"""Admission and padding keys of the engine's own tables, as Python gives them."""

import numpy as np
import pytest

from kvtools._kvtable import Table


def look_up(table, *keys):
    return table.gather_or_insert(np.array(keys, table.key_dtype))[:, 0].tolist()


def test_a_key_gets_its_row_with_the_nth_lookup_and_updates_leave_out_the_others():
    table = Table("int64", "float32", 1, initializer=2.0, admission={"kind": "count", "enter_threshold": 2})
    assert look_up(table, 5, 6) == [2.0, 2.0] and (len(table), table.waiting_keys) == (0, 2)
    table.apply("sgd", np.array([5, 6]), np.ones((2, 1), np.float32), {"learning_rate": 1.0})
    assert len(table) == 0 and table.admission_bytes > 0
    assert look_up(table, 5) == [2.0] and (len(table), table.waiting_keys) == (1, 1)
    assert table.gather_stamps(np.array([5]))[0].tolist() == [2]


def test_keys_below_the_threshold_may_give_zeros_and_chance_goes_by_the_seed():
    zeros = Table("int32", "float32", 1, initializer=2.0, admission={"kind": "probability", "p": 0.0, "below": "zeros"})
    assert look_up(zeros, 1, -1) == [0.0, 0.0] and len(zeros) == 0
    halves = Table("int64", "float32", 1, admission={"kind": "probability", "p": 0.5})
    halves.gather_or_insert(np.arange(1000), seed=3)
    assert 400 < len(halves) < 600 and halves.waiting_keys == halves.admission_bytes == 0


@pytest.mark.parametrize(("dtype", "key"), [("int64", -1), ("int32", -(2**31)), ("uint64", 2**64 - 1)])
def test_a_padding_key_never_has_a_row(dtype, key):
    table = Table(dtype, "float32", 1, initializer=2.0, padding_key=key)
    assert look_up(table, key, 7) == [0.0, 2.0] and len(table) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admission": 3}, "expected a dict"),
        ({"admission": {"kind": "counts"}}, "kind 'counts'; expected 'count', 'bloom' or 'probability'"),
        ({"admission": {"kind": "count", "p": 0.5}}, "has an entry 'p', which it knows nothing of"),
        ({"admission": {"kind": "probability", "p": 1.5}}, "expected 0.0 to 1.0"),
        ({"admission": {"kind": "bloom", "enter_threshold": 2}}, "filter for 0 keys"),
        ({"admission": {"kind": "count", "enter_threshold": 2, "below": "none"}}, "expected 'initial' or 'zeros'"),
        ({"padding_key": 2**63}, "which is no key of the table"),
    ],
)
def test_what_cannot_be_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        Table("int64", "float32", 1, **options)
