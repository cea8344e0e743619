"""What is refused, and that the message says what came and what was expected."""

import resource
from pathlib import Path

import numpy as np
import pytest

from kvtools._kvtable import Table


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(dim=0), "dim 0"),
        (dict(dim=-3), "dim -3"),
        (dict(shards=3), "3 shards"),
        (dict(shards=128), "128 shards"),
        (dict(capacity_hint=-1), "-1"),
        (dict(key_dtype="float32"), "key_dtype is float32"),
        (dict(value_dtype="int32"), "value_dtype is int32"),
        (dict(slots=[("m", 0)]), "width 0"),
        (dict(slots=[("m", 3, "copy_value")]), "copies the value"),
        (dict(slots=[("m", 3), ("m", 2)]), "named 'm'"),
        (dict(slots=[("m", 3, "ones")]), "'ones'"),
        (dict(initializer={"kind": "glorot"}), "'glorot'"),
        (dict(initializer={"kind": "uniform", "low": 2.0, "high": 1.0}), "uniform from 2"),
        (dict(initializer={"kind": "normal", "stddev": -1.0}), "standard deviation -1"),
        (dict(initializer={"kind": "normal", "sttdev": 1.0}), "'sttdev'"),
        (dict(initializer={"kind": "rows", "rows": np.zeros((2, 3), np.float32)}), r"\(2, 3\)"),
        (dict(initializer={"kind": "rows", "rows": np.zeros((0, 2), np.float32)}), "at least one row"),
    ],
)
def test_impossible_tables(arguments, match):
    with pytest.raises(ValueError, match=match):
        Table(**{"key_dtype": "int64", "value_dtype": "float32", "dim": 2, **arguments})


def test_a_wrong_dtype_is_a_type_error(small_table):
    with pytest.raises(TypeError, match="keys has dtype int32; expected int64"):
        small_table.gather(np.zeros(3, np.int32))
    with pytest.raises(TypeError, match="values has dtype float64; expected float32"):
        small_table.upsert(np.zeros(3, np.int64), np.zeros((3, 2)))
    with pytest.raises(TypeError, match="keys is a list"):
        small_table.gather([1, 2])


def test_a_wrong_shape_is_a_value_error(small_table):
    keys = np.zeros(3, np.int64)
    with pytest.raises(ValueError, match=r"values has shape \(3, 3\); expected \(3, 2\)"):
        small_table.upsert(keys, np.zeros((3, 3), np.float32))
    with pytest.raises(ValueError, match=r"out has shape \(2, 2\); expected \(3, 2\)"):
        small_table.gather(keys, out=np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="missing has shape"):
        small_table.gather(keys, np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="missing is 'ones'"):
        small_table.gather(keys, "ones")


def test_arrays_must_be_contiguous_and_outputs_writable(small_table):
    with pytest.raises(ValueError, match="C-contiguous"):
        small_table.gather(np.zeros(6, np.int64)[::2])
    out = np.zeros((3, 2), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        small_table.gather(np.zeros(3, np.int64), out=out)


def test_read_only_inputs_are_fine(small_table):
    keys = np.arange(3)
    keys.flags.writeable = False
    assert small_table.gather_or_insert(keys).shape == (3, 2)


def test_columns_that_are_not_there(small_table):
    keys = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="no column 'm'; it has 'value'"):
        small_table.gather_columns(keys, ["m"])
    with pytest.raises(ValueError, match="no column 1"):
        small_table.upsert_columns(keys, {1: np.zeros((1, 2), np.float32)})


def test_a_slot_that_went_away_under_an_export_is_an_error():
    table = Table("int64", "float32", 2, slots=[("m", 3)])
    table.gather_or_insert(np.arange(100))
    export = table.export(["m"], chunk=10)
    next(export)
    table.ensure_slots([])
    with pytest.raises(RuntimeError, match="since column 1 was looked up"):
        next(export)


def test_memory_that_is_refused_is_a_memory_error(small_table):
    with pytest.raises(MemoryError, match="partition"):
        small_table.reserve(2**50)
    wide = Table("int64", "float64", 2**22, shards=1)
    row = np.zeros((1, 2**22))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**24, before[1]))  # half of a row
    try:
        with pytest.raises(MemoryError, match="bytes for a table's rows"):
            wide.upsert(np.zeros(1, np.int64), row)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert len(wide) == 0
    assert not wide.contains(np.zeros(1, np.int64)).any()
