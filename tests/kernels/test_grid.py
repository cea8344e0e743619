"""Every operation over every key type, value type and a range of widths."""

import numpy as np
import pytest

from kvtools._kvtable import Table

N = 3000


def rows_of(n: int, dim: int, dtype: np.dtype, start: int = 0) -> np.ndarray:
    """Small integers, which every value type holds exactly."""
    return ((np.arange(n * dim).reshape(n, dim) + start) % 61 - 30).astype(dtype)


@pytest.fixture
def table(key_dtype, value_dtype, dim):
    return Table(key_dtype, value_dtype, dim, initializer=1.5, slots=[("m", dim), ("v", 3, "constant", 0.25)])


def test_upsert_then_gather_gives_the_rows_back(table, make_keys, value_dtype, dim):
    keys, rows = make_keys(N), rows_of(N, dim, value_dtype)
    table.upsert(keys, rows)
    found = np.zeros(N, bool)
    got = table.gather(keys, found=found)
    assert got.dtype == value_dtype
    assert found.all()
    np.testing.assert_array_equal(got, rows)
    assert len(table) == N


def test_gather_of_absent_keys_gives_what_was_asked_for(table, make_keys, value_dtype, dim):
    keys = make_keys(50)
    defaults = rows_of(3, dim, value_dtype)
    assert (table.gather(keys) == 0).all()
    assert (table.gather(keys, "initial") == 1.5).all()
    np.testing.assert_array_equal(table.gather(keys, defaults), defaults[np.arange(50) % 3])
    np.testing.assert_array_equal(table.gather(keys, defaults[1]), np.broadcast_to(defaults[1], (50, dim)))
    assert len(table) == 0


def test_gather_or_insert_inserts_initial_values(table, make_keys):
    keys = make_keys(N)
    inserted = np.zeros(N, bool)
    assert (table.gather_or_insert(keys, inserted=inserted) == 1.5).all()
    assert inserted.all()
    assert table.contains(keys).all()
    table.gather_or_insert(keys, inserted=inserted)
    assert not inserted.any()


def test_accumulate_adds_in_float32_and_rounds_once_per_step(table, make_keys, value_dtype, dim):
    keys, rows = make_keys(N), rows_of(N, dim, value_dtype)
    table.accumulate(keys, rows)
    wide = np.float64 if value_dtype == np.float64 else np.float32
    expected = (rows.astype(wide) + wide(1.5)).astype(value_dtype)
    np.testing.assert_array_equal(table.gather(keys), expected)
    third = np.full((N, dim), 1 / 3, value_dtype)
    table.accumulate(keys, third)
    expected = (expected.astype(wide) + third.astype(wide)).astype(value_dtype)
    np.testing.assert_array_equal(table.gather(keys), expected)


def test_columns_and_slots_keep_apart(table, make_keys, value_dtype, dim):
    keys, rows, slot = make_keys(N), rows_of(N, dim, value_dtype), rows_of(N, 3, value_dtype, 7)
    table.upsert_columns(keys, {"v": slot})
    table.upsert(keys, rows)
    value, m, v = table.gather_columns(keys)
    np.testing.assert_array_equal(value, rows)
    assert (m == 0).all()
    np.testing.assert_array_equal(v, slot)
    absent = np.setdiff1d(make_keys(N + 100), keys)
    value, m, v = table.gather_columns(absent)
    assert (value == 1.5).all() and (m == 0).all() and (v == 0.25).all()


def test_remove_and_reuse(table, make_keys, value_dtype, dim):
    keys, rows = make_keys(N), rows_of(N, dim, value_dtype)
    table.upsert(keys, rows)
    assert table.remove(keys[: N // 2]) == N // 2
    assert table.remove(keys[: N // 2]) == 0
    assert not table.contains(keys[: N // 2]).any()
    np.testing.assert_array_equal(table.gather(keys[N // 2 :]), rows[N // 2 :])
    before = table.memory()["column_bytes"]
    table.gather_or_insert(keys[: N // 2])
    assert (table.gather(keys[: N // 2]) == 1.5).all()
    assert (table.gather_columns(keys[: N // 2], ["v"])[0] == 0.25).all()
    assert table.memory()["column_bytes"] <= before
    assert len(table) == N


def test_export_and_import_make_an_equal_table(table, make_keys, key_dtype, value_dtype, dim):
    keys, rows = make_keys(N), rows_of(N, dim, value_dtype)
    table.upsert(keys, rows, frequency=2, version=9)
    other = Table(key_dtype, value_dtype, dim, slots=table.slots, shards=2)
    for k, freqs, versions, columns in table.export(chunk=700):
        assert k.dtype == key_dtype and 0 < len(k) <= 700
        other.import_rows(k, columns, frequencies=freqs, versions=versions)
    assert len(other) == N
    for mine, theirs in zip(table.gather_columns(keys), other.gather_columns(keys), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    freqs, versions = other.gather_stamps(keys)
    assert (freqs == 2).all() and (versions == 9).all()


def test_ensure_slots_keeps_values_and_surviving_slots(table, make_keys, value_dtype, dim):
    keys, rows, slot = make_keys(N), rows_of(N, dim, value_dtype), rows_of(N, 3, value_dtype, 7)
    table.upsert(keys, rows)
    table.upsert_columns(keys, {"v": slot})
    generation = table.generation
    assert table.ensure_slots([("copy", dim, "copy_value"), ("v", 3), ("w", 5, "constant", 2.0)]) > generation
    value, copy, v, w = table.gather_columns(keys)
    np.testing.assert_array_equal(value, rows)
    np.testing.assert_array_equal(copy, rows)
    np.testing.assert_array_equal(v, slot)
    assert (w == 2.0).all()
    generation = table.generation
    assert table.ensure_slots(table.slots) == generation


def test_empty_batches_do_nothing(table, key_dtype, value_dtype, dim):
    keys, rows = np.zeros(0, key_dtype), np.zeros((0, dim), value_dtype)
    assert table.gather(keys).shape == (0, dim)
    assert table.gather_or_insert(keys).shape == (0, dim)
    table.upsert(keys, rows)
    table.accumulate(keys, rows)
    assert table.remove(keys) == 0
    assert table.contains(keys).shape == (0,)
    assert list(table.export()) == []
    assert len(table) == 0


def test_keys_of_any_shape(table, make_keys, dim):
    keys = make_keys(24)
    flat = table.gather_or_insert(keys)
    assert table.gather(keys.reshape(2, 3, 4)).shape == (2, 3, 4, dim)
    np.testing.assert_array_equal(table.gather(keys.reshape(4, 6)).reshape(24, dim), flat)
    assert table.gather(keys[:1].reshape(())).shape == (dim,)
