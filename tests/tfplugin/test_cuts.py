"""The ops that follow a table's changes, take what it is at one moment and write it later, and restore increments.

The reference is the table itself, written whole at the same moments.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfplugin.ops import raw

DIM = 3
ALL = [-1, -1]
SLOTS = '[{"name": "m", "width": 3, "init": "constant", "constant": 0.5}]'
CONSTANT = '{"kind": "constant", "a": 0.0}'
HOW = {"tensor_prefix": "t", "part_infix": "/part_", "initializer": CONSTANT}


def ids(*keys):
    return np.array(keys, np.int64)


def make_table(**kwargs):
    return raw.kv_table_handle(
        variable="emb", key_dtype=tf.int64, dtype=tf.float32, shape=[DIM], dim=DIM, anonymous=True,
        **{"initial": CONSTANT, **kwargs},
    )  # fmt: skip


def restored(prefixes, part=0, parts=1, **kwargs):
    table = make_table(**kwargs)
    raw.kv_table_restore(table, tf.constant([str(prefix) for prefix in prefixes]), part=part, parts=parts, **HOW)
    return table


def contents(*tables, slots=()):
    """Rows of tables by key: value, slots, frequency and version."""
    rows = {}
    for table in tables:
        for column in ("", *slots):
            keys, values, freqs, versions = raw.kv_table_export(
                table, Tkeys=tf.int64, dtype=tf.float32, column=column, width=DIM
            )
            for key, *row in zip(keys.numpy(), values.numpy(), freqs.numpy(), versions.numpy(), strict=True):
                rows.setdefault(int(key), []).append((row[0].tobytes(), int(row[1]), int(row[2])))
    return rows


def save_cuts(prefix, tables, cuts, names=None):
    n = len(tables)
    names = names or (["t"] if n == 1 else [f"t/part_{i}" for i in range(n)])
    counts = raw.kv_table_save_cut(
        str(prefix), tables, cuts, tensor_prefixes=names, names=["t"] * n, part=list(range(n)), parts=[n] * n
    )
    return [tuple(int(count[i]) for count in counts) for i in range(n)]


def change(table, rng, part, parts):
    """Births, updates with slots, removals, rebirths, and rows that are only stamped."""
    for _ in range(6):
        keys = rng.integers(0, 200, size=rng.integers(1, 80)) * parts + part  # what belongs to the part
        rows = rng.normal(size=(len(keys), DIM)).astype(np.float32)
        kind = rng.integers(4)
        if kind == 0:
            raw.kv_table_upsert(table, keys, rows)
        elif kind == 1:
            raw.kv_table_remove(table, keys)
        elif kind == 2:
            raw.kv_table_import(
                table, keys, rows, rng.integers(9, size=len(keys)).astype(np.uint32),
                rng.integers(9, size=len(keys)).astype(np.uint32),
            )  # fmt: skip
        else:
            count = rng.integers(9, size=len(keys)).astype(np.uint32)
            raw.kv_table_import_columns(table, keys, count, [rows, rows + 1], slots=SLOTS)


@pytest.mark.parametrize("kwargs", [{}, {"max_capacity": 150, "eviction": "lfu"}], ids=["free", "bounded"])
def test_increments_restore_into_any_number_of_parts_as_the_table_was(tmp_path, kwargs):
    rng = np.random.default_rng(1)
    tables = [make_table(**kwargs) for _ in range(2)]
    marks, members = [ALL, ALL], []
    for part, table in enumerate(tables):
        change(table, rng, part, 2)
        raw.kv_table_import_columns(table, ids(part), [1], [np.ones([1, DIM], np.float32)] * 2, slots=SLOTS)
        raw.kv_table_track_changes(table, max_removed=10000)
    for number in range(4):
        cuts = [raw.kv_table_cut(table, mark) for table, mark in zip(tables, marks, strict=True)]
        whole = contents(*tables, slots=("m",))
        for part, table in enumerate(tables):  # not in this member
            change(table, rng, part, 2)
        members.append(tmp_path / f"ckpt-{number}")
        counts = save_cuts(members[-1], tables, tf.stack([cut.cut for cut in cuts]))
        marks = [cut.at for cut in cuts]
        for table, mark in zip(tables, marks, strict=True):
            raw.kv_table_forget_changes(table, mark)
        if number == 0:
            assert [(removed, born) for _, removed, born in counts] == [(0, 0)] * 2
        for parts in (2, 1, 3):
            kept = {**kwargs, "max_capacity": 400} if kwargs else {}
            got = contents(*[restored(members, part, parts, **kept) for part in range(parts)], slots=("m",))
            assert got == whole, (number, parts)


def write_two(tmp_path):
    table = make_table()
    raw.kv_table_track_changes(table, max_removed=10)
    raw.kv_table_upsert(table, ids(1, 2, 3), np.ones([3, DIM], np.float32))
    cut, mark = raw.kv_table_cut(table, ALL)
    save_cuts(tmp_path / "full", [table], [cut])
    raw.kv_table_upsert(table, ids(3, 4), np.full([2, DIM], 2, np.float32))
    raw.kv_table_remove(table, ids(1))
    cut = raw.kv_table_cut(table, mark).cut
    assert save_cuts(tmp_path / "delta", [table], [cut]) == [(2, 1, 1)]
    return table, mark


def test_an_increment_alone_is_refused_by_name_of_what_restores_it(tmp_path):
    write_two(tmp_path)
    with pytest.raises(tf.errors.FailedPreconditionError, match="delta' is an increment") as error:
        restored([tmp_path / "delta"])
    assert "tfplugin.CheckpointManager" in str(error.value) and "`kvtools merge`" in str(error.value)
    with pytest.raises(tf.errors.FailedPreconditionError, match="full' is no increment"):
        restored([tmp_path / "full", tmp_path / "full"])
    with pytest.raises(tf.errors.InvalidArgumentError, match="wants a prefix"):
        raw.kv_table_restore(make_table(), tf.constant([], tf.string), part=0, parts=1, **HOW)


def test_a_damaged_increment_leaves_the_table_as_it_was(tmp_path):
    write_two(tmp_path)
    data = next(tmp_path.glob("delta.data*"))
    table = make_table()
    raw.kv_table_upsert(table, ids(77), np.ones([1, DIM], np.float32))
    members = tf.constant([str(tmp_path / "full"), str(tmp_path / "delta")])
    whole = data.read_bytes()
    for at in range(0, len(whole), 7):
        data.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(tf.errors.DataLossError):
            raw.kv_table_restore(table, members, part=0, parts=1, **HOW)
        assert list(contents(table)) == [77]
    data.write_bytes(whole)
    raw.kv_table_restore(table, members, part=0, parts=1, **HOW)
    assert sorted(contents(table)) == [2, 3, 4]


def test_an_increment_of_other_slots_is_refused(tmp_path):
    table, _ = write_two(tmp_path)
    raw.kv_table_import_columns(table, ids(5), [1], [np.ones([1, DIM], np.float32)] * 2, slots=SLOTS)
    mark = raw.kv_table_cut(table, ALL).at
    raw.kv_table_upsert(table, ids(6), np.ones([1, DIM], np.float32))
    save_cuts(tmp_path / "other", [table], [raw.kv_table_cut(table, mark).cut])
    with pytest.raises(tf.errors.FailedPreconditionError, match=r'has slots.*"m".*belongs to another checkpoint'):
        restored([tmp_path / "full", tmp_path / "other"])


def test_a_cut_is_saved_or_dropped_once(tmp_path):
    table, mark = write_two(tmp_path)
    cut = raw.kv_table_cut(table, mark).cut
    raw.kv_table_drop_cut(table, cut)
    raw.kv_table_drop_cut(table, cut)
    with pytest.raises(tf.errors.FailedPreconditionError, match=f"has no cut {int(cut)}"):
        save_cuts(tmp_path / "again", [table], [cut])
    # One that cannot be had gives up the other.
    good = raw.kv_table_cut(table, ALL).cut
    with pytest.raises(tf.errors.FailedPreconditionError, match="has no cut"):
        save_cuts(tmp_path / "again", [table, table], tf.stack([cut, good]))
    with pytest.raises(tf.errors.FailedPreconditionError, match="has no cut"):
        save_cuts(tmp_path / "again", [table], [good])
    assert not list(tmp_path.glob("again*"))


def test_it_is_said_why_changes_are_not_known():
    table = make_table()
    why = lambda since: raw.kv_table_changes_known(table, since).numpy().decode()  # noqa: E731
    assert "were not tracked" in why(ALL) and "not tracked" in why([0, 1])
    assert list(raw.kv_table_cut(table, ALL).at) == ALL
    raw.kv_table_track_changes(table, max_removed=1)
    mark = raw.kv_table_cut(table, ALL).at
    assert why(mark) == ""
    raw.kv_table_upsert(table, ids(1, 2), np.ones([2, DIM], np.float32))
    before = raw.kv_table_cut(table, mark).at
    raw.kv_table_remove(table, ids(1, 2))
    assert "more than 1 rows were removed" in why(before)
    with pytest.raises(tf.errors.FailedPreconditionError, match="more than 1 rows were removed"):
        raw.kv_table_cut(table, before)
    mark = raw.kv_table_cut(table, ALL).at
    raw.kv_table_forget_changes(table, mark)
    assert why(mark) == "" and "told to forget" in why(before)
    raw.kv_table_initialize(table, np.zeros([0, DIM], np.float32), initializer=CONSTANT)
    assert "not tracked" in why(mark)
    raw.kv_table_track_changes(table, max_removed=1)
    assert "another table has taken its place" in why(mark)
    with pytest.raises(tf.errors.InvalidArgumentError, match="A mark has 2 numbers"):
        raw.kv_table_cut(table, [1])
