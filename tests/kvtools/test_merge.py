"""Merged tables against dictionaries in plain Python."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.schema import VariableSchema
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, OutputError, UnknownTableError, UsageError
from kvtools.merge import merge, merge_tables
from kvtools.migrate import write_tables
from kvtools.string_hash import string_keys

SLOTS = ("m", "v")


def make(
    rows: int,
    seed: int,
    *,
    key_dtype: str = "int64",
    value_dtype: Any = np.float32,
    parts: int = 1,
    keys: Any = None,
    **more: Any,
) -> ArrayTable:
    rng = np.random.default_rng(seed)
    limits = np.iinfo(key_dtype)
    edge = np.array([limits.min, limits.max, limits.max - 1, 0, 1], key_dtype)
    if keys is None:  # extreme ones, ones that others have too, and some twice
        keys = np.concatenate([edge, rng.integers(0, max(2 * rows, 1), max(rows - 5, 0)).astype(key_dtype)])[:rows]
    keys = np.asarray(keys, key_dtype)
    n = len(keys)
    bounds = np.linspace(0, n, parts + 1).astype(int)
    options: dict[str, Any] = {
        "slots": {slot: rng.normal(size=(n, 3)).astype(value_dtype) for slot in SLOTS},
        "freqs": rng.integers(0, 2**32, n).astype(np.uint32),
        "versions": rng.integers(0, 4, n).astype(np.uint32),
        "version_unit": "steps",
        "part_rows": tuple(np.diff(bounds).tolist()),
    }
    return ArrayTable("emb", keys, rng.normal(size=(n, 3)).astype(value_dtype), **{**options, **more})


def rows_of(table: TableReader, rows: int = 7) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for chunk in table.chunks(rows=rows):
        for i, key in enumerate(chunk.keys):
            found[int(key)] = {
                "values": chunk.values[i],
                **{name: slot[i] for name, slot in chunk.slots.items()},
                "freq": None if chunk.freqs is None else int(chunk.freqs[i]),
                "version": None if chunk.versions is None else int(chunk.versions[i]),
            }
    return found


def reference(tables: list[TableReader], on_conflict: str) -> dict[int, dict[str, Any]]:
    per_key: dict[int, list[dict[str, Any]]] = {}
    for table in tables:
        deleted = table.extra("deleted_keys").tolist() if table.schema.extras else []
        for key in deleted:
            per_key.pop(key, None)
        for key, row in rows_of(table).items():  # the last row of a key within a table
            per_key.setdefault(key, []).append(row)
    result = {}
    for key, rows in per_key.items():
        if on_conflict in ("last", "first"):
            result[key] = rows[-1 if on_conflict == "last" else 0]
        elif on_conflict == "newest":
            result[key] = max(enumerate(rows), key=lambda row: (row[1]["version"], row[0]))[1]
        else:
            wide = {name: sum(row[name].astype(np.float64) for row in rows[::-1]) for name in ("values", *SLOTS)}
            dtype = rows[0]["values"].dtype
            divisor = len(rows) if on_conflict == "mean" else 1
            result[key] = {
                **{name: (total / divisor).astype(dtype) for name, total in wide.items()},
                "freq": min(sum(row["freq"] for row in rows), 2**32 - 1),
                "version": max(row["version"] for row in rows),
            }
    return result


def assert_same(found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        for name, value in row.items():
            assert np.array_equal(found[key][name], value), (key, name)


@pytest.mark.parametrize("on_conflict", ["last", "first", "newest", "sum", "mean"])
@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("memory", [1 << 14, 1 << 30], ids=["spilling", "in memory"])
def test_each_key_once(on_conflict: Any, key_dtype: str, memory: int) -> None:
    tables = [
        make(rows, seed, key_dtype=key_dtype, parts=seed) for seed, rows in ((1, 500), (2, 600), (3, 0), (4, 450))
    ]
    merged, account = merge_tables("emb", tables, list("abcd"), on_conflict=on_conflict, memory=memory)
    expected = reference(list(tables), on_conflict)
    assert_same(rows_of(merged), expected)
    assert account.rows == merged.rows == len(expected)
    assert account.rows_read == 1550
    assert account.repeated == sum(table.rows - len(rows_of(table)) for table in tables)
    several = [len(rows_of(table).keys() & expected.keys()) for table in tables]
    assert sum(several) > account.conflicts > 0
    numbers = np.random.default_rng(0).permutation(merged.rows)[:50]
    keys = merged.all_keys()
    taken = pickle.loads(pickle.dumps(merged)).take(numbers, ALL_COLUMNS)
    assert np.array_equal(taken.keys, keys[numbers])
    for i, key in enumerate(taken.keys):
        assert np.array_equal(taken.values[i], expected[int(key)]["values"])
        assert int(taken.freqs[i]) == expected[int(key)]["freq"]


@pytest.mark.parametrize("value_dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_means_are_rounded_once(value_dtype: Any) -> None:
    tables = [make(90, seed, value_dtype=value_dtype) for seed in range(3)]
    merged, _ = merge_tables("emb", tables, list("abc"), on_conflict="mean")
    found, expected = rows_of(merged), reference(list(tables), "mean")
    for key, row in expected.items():
        np.testing.assert_allclose(found[key]["values"].astype(np.float64), row["values"].astype(np.float64), rtol=0.01)
    assert merged.value_dtype == np.dtype(value_dtype)


def test_an_increment_deletes_keys_of_what_is_before_it() -> None:
    base = make(0, 1, keys=[1, 2, 3, 4, 5])
    first = make(0, 2, keys=[2, 6], extras={"deleted_keys": np.array([2, 3, 9])})
    second = make(0, 3, keys=[3], extras={"deleted_keys": np.array([6, 5])})
    tables: list[TableReader] = [base, first, second]
    for memory in (64, 1 << 30):
        merged, account = merge_tables("emb", tables, list("abc"), memory=memory)
        assert sorted(rows_of(merged)) == [1, 2, 3, 4]
        assert_same(rows_of(merged), reference(tables, "last"))
        assert account.deleted == 4 and account.conflicts == 0
        assert account.gone == 2  # 5 and 6: of 2 and 3 there are later rows
        assert merged.schema.extras == ()  # it is no increment any more
    # Two increments make an increment, which deletes what either does.
    merged, _ = merge_tables("emb", tables[1:], list("bc"))
    assert sorted(merged.extra("deleted_keys").tolist()) == [2, 3, 5, 6, 9]
    assert merged.schema.extras[0].shape == (5,)
    base_and_both, _ = merge_tables("emb", [base, merged], list("ab"))
    assert sorted(rows_of(base_and_both)) == [1, 2, 3, 4]


def test_filtered_keys_stay_in_step_with_their_counters() -> None:
    one = make(0, 1, keys=[1], extras={"filtered_keys": np.array([7, 8]), "filtered_freqs": np.array([1, 2])})
    two = make(0, 2, keys=[2], extras={"filtered_keys": np.array([9])})
    merged, _ = merge_tables("emb", [two, one], list("ba"))
    assert merged.extra("filtered_keys").tolist() == [7, 8, 9]
    assert merged.extra("filtered_freqs").tolist() == [1, 2, 0]
    assert {extra.name: extra.shape for extra in merged.schema.extras} == {
        "filtered_keys": (3,),
        "filtered_freqs": (3,),
    }


def test_common_slots() -> None:
    one = make(9, 1)
    two = make(9, 2, slots={"v": np.ones((9, 3), np.float32), "x": np.ones((9, 1), np.float32)}, freqs=None)
    with pytest.raises(BadInputError, match=r"the slots are m \[3\].*in a and v \[3\].*in b; add --slots common"):
        merge_tables("emb", [one, two], ["a", "b"])
    merged, _ = merge_tables("emb", [one, two], ["a", "b"], common=True, on_conflict="sum")
    assert merged.slots == ("v",) and not merged.schema.has_freqs
    assert all(list(chunk.slots) == ["v"] and chunk.freqs is None for chunk in merged.chunks())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"value_dtype": np.float16}, "the values' type is float32 in a and float16 in b; cast"),
        ({"key_dtype": "int32"}, "the keys' type is int64 in a and int32 in b; cast"),
        ({"version_unit": "days"}, "the unit of versions is steps in a and days in b"),
        ({"versions": None}, "versions are there in a and missing in b; add --slots common"),
        ({"freqs": None}, "frequencies are there in a and missing in b; add --slots common"),
    ],
)
def test_tables_that_do_not_agree(other: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        merge_tables("emb", [make(9, 1), make(9, 2, **other)], ["a", "b"])


def test_other_refusals() -> None:
    one, two = make(9, 1), make(9, 2)
    with pytest.raises(BadInputError, match="key -9223372036854775808 is in a and in b; choose what"):
        merge_tables("emb", [one, two], ["a", "b"], on_conflict="error")
    none = make(9, 2, versions=None)
    with pytest.raises(BadInputError, match="not all of its sources have versions"):
        merge_tables("emb", [one, none], ["a", "b"], on_conflict="newest", common=True)
    wide = ArrayTable("emb", np.arange(3), np.ones((3, 5), np.float32))
    with pytest.raises(BadInputError, match="dim is 3 in a and 5 in b"):
        merge_tables("emb", [one, wide], ["a", "b"])
    whole = ArrayTable("emb", np.arange(3), np.ones((3, 5), np.int8))
    with pytest.raises(UsageError, match="whole numbers"):
        merge_tables("emb", [whole, whole], ["a", "b"], on_conflict="mean")


def test_error_lets_disjoint_tables_pass() -> None:
    one, two = make(0, 1, keys=[1, 2]), make(0, 2, keys=[3, 3])
    merged, account = merge_tables("emb", [one, two], ["a", "b"], on_conflict="error")
    assert sorted(rows_of(merged)) == [1, 2, 3] and account.repeated == 1


def test_checkpoints(sample_path: Path, tmp_path: Path) -> None:
    source = open_checkpoint(sample_path)
    other = Checkpoint(
        tmp_path,
        "tfplugin",
        {
            "user_emb": ArrayTable("user_emb", np.array([0, 77], np.int32), np.ones((2, 8), ml_dtypes.bfloat16)),
            "new": ArrayTable("new", np.array([1]), np.ones((1, 2), np.float32)),
        },
    )
    account, merged = merge([source, other], tmp_path / "b", common=True, parts=2)
    after = open_checkpoint(tmp_path / "b")
    assert {name: (table.rows, table.parts) for name, table in after.tables.items()} == {
        "ads/emb": (11, 3),
        "empty_emb": (0, 1),
        "new": (1, 1),
        "user_emb": (6, 2),
    }
    assert [one.table for one in merged] == ["user_emb"] and merged[0].conflicts == 1
    assert merged[0].sources == (str(source.path), str(tmp_path))
    assert {table.name: table.losses for table in account.tables if table.losses} == {
        "user_emb": (
            "frequencies: not in all of the merged tables",
            "versions: not in all of the merged tables",
        )
    }
    user = after.table("user_emb").schema
    assert (user.slots, user.has_freqs, user.has_versions) == ((), False, False)
    assert not account.lossless
    assert rows_of(after.table("user_emb"))[0]["values"].astype(float).tolist() == [1.0] * 8
    assert [variable.name for variable in after.variables] == ["dense/kernel", "global_step"]
    assert account.variables == 2
    merge([source, other], tmp_path / "b", common=True, on_conflict="first", options=WriteOptions(force=True))
    assert rows_of(open_checkpoint(tmp_path / "b").table("user_emb"))[0]["values"][0] == 3
    with pytest.raises(OutputError, match="exists"):
        merge([source, other], tmp_path / "b", common=True)
    with pytest.raises(UnknownTableError, match="no such table"):
        merge([source, other], tmp_path / "c", tables=["nothing"])
    with pytest.raises(UsageError, match="got one checkpoint, expected several"):
        merge([source], tmp_path / "c")
    # A table that is not merged is the last checkpoint's.
    merge([source, other], tmp_path / "c", tables=["ads/emb"])
    assert open_checkpoint(tmp_path / "c").table("user_emb").rows == 2


def with_variables(path: Path, key: int, **variables: Any) -> Checkpoint:
    arrays = {name: np.asarray(array) for name, array in variables.items()}
    return Checkpoint(
        path,
        "tfplugin",
        {name: ArrayTable(name, np.array([key]), np.ones((1, 2), np.float32)) for name in ("emb", "other")},
        tuple(
            VariableSchema(name, "string" if array.dtype == object else array.dtype.name, array.shape, array.nbytes)
            for name, array in arrays.items()
        ),
        lambda name: iter([arrays[name]]),
    )


def test_dense_variables_that_differ_are_told(tmp_path: Path) -> None:
    a = with_variables(tmp_path / "a", 1, step=np.int64(1), w=np.ones(3), same=np.zeros(2), alone=np.ones(1))
    b = with_variables(tmp_path / "b", 2, step=np.int64(2), w=np.ones(4), same=np.zeros(2))
    account, _ = merge([a, b], tmp_path / "last")
    assert account.losses == (
        f"what '{tmp_path}/a' has of 2 dense variables, 'step', 'w': that of '{tmp_path}/b' differs, and was taken",
    )
    assert not account.lossless and open_checkpoint(tmp_path / "last").variables[3].shape == (4,)
    account, _ = merge([a, b], tmp_path / "first", on_conflict="first")
    assert account.losses[0].startswith(f"what '{tmp_path}/b' has of 2 dense variables")
    account, _ = merge([a, dataclasses.replace(b, variables=a.variables[2:3])], tmp_path / "same")
    assert account.lossless


def test_a_table_that_is_not_merged_is_told(tmp_path: Path) -> None:
    account, _ = merge(
        [with_variables(tmp_path / "a", 1), with_variables(tmp_path / "b", 2)], tmp_path / "c", tables=["emb"]
    )
    assert {table.name: table.losses for table in account.tables} == {
        "emb": (),
        "other": (f"the rows of '{tmp_path}/a': the table is not merged, that of '{tmp_path}/b' was taken",),
    }


def test_tables_of_models_of_one_make_have_one_place_and_one_of_them_keeps_it(tmp_path: Path) -> None:
    for row, name in enumerate(["ads", "users"]):
        place = {"object_path": "model/_operations/1/table"}
        table = ArrayTable(name, np.array([5]), np.float32([[row]]), metadata=place)
        table.schema = dataclasses.replace(table.schema, dialect="tfplugin")
        write_tables([table], tmp_path / name, "tfplugin")
    account, _ = merge([open_checkpoint(tmp_path / name) for name in ("ads", "users")], tmp_path / "both")
    both = open_checkpoint(tmp_path / "both").tables
    assert [both[name].take(np.array([0])).values.tolist() for name in ("ads", "users")] == [[[0]], [[1]]]
    assert [name for name in both if "object_path" in both[name].schema.metadata] == ["users"]
    told = {table.name: table.changes for table in account.tables}
    assert "a Saver restores it by its name" in told["ads"][0] and not told["users"]


def test_strings_of_hashed_keys_are_joined_and_those_of_no_hashes_are_not(tmp_path: Path) -> None:
    words = [[b"red", b"wine"], [b"wine", b"white"]]
    a, b = (
        with_variables(
            tmp_path / name,
            at,
            **{"names-keys": string_keys(words[at]), "names-values": np.array(words[at], object)},
            **{"ids-keys": np.arange(2), "ids-values": np.array(words[at], object)},
        )
        for at, name in enumerate("ab")
    )
    account, _ = merge([a, b], tmp_path / "c")
    assert account.losses == (
        f"what '{tmp_path}/a' has of the dense variable 'ids-values': that of '{tmp_path}/b' differs, and was taken",
    )
    whole = open_checkpoint(tmp_path / "c")
    read = {variable.name: next(whole.read_variable(variable.name)) for variable in whole.variables}
    assert read["ids-values"].tolist() == words[1]
    assert dict(zip(read["names-keys"].tolist(), read["names-values"].tolist(), strict=True)) == {
        int(string_keys([word])[0]): word for word in (b"red", b"wine", b"white")
    }


def test_tables_of_one_checkpoint_into_one(tmp_path: Path) -> None:
    old, new = make(0, 1, keys=[1, 2]), make(0, 2, keys=[2, 3])
    old.schema = dataclasses.replace(old.schema, name="old")
    new.schema = dataclasses.replace(new.schema, name="new")
    source = Checkpoint(tmp_path, "tfplugin", {"old": old, "new": new, "other": make(5, 3)})
    source.tables["other"].schema = dataclasses.replace(source.tables["other"].schema, name="other")
    _, (merged,) = merge([source], tmp_path / "b", into="emb", tables=["old", "new"])
    assert merged.sources == (f"{tmp_path} ('old')", f"{tmp_path} ('new')")
    after = open_checkpoint(tmp_path / "b")
    assert {name: table.rows for name, table in after.tables.items()} == {"emb": 3, "other": 5}
    assert np.array_equal(rows_of(after.table("emb"))[2]["values"], rows_of(new)[2]["values"])
    with pytest.raises(UsageError, match="there is a table of that name that is not merged"):
        merge([source], tmp_path / "c", into="other", tables=["old", "new"])
    merge([source], tmp_path / "c", into="new", tables=["new", "old"])
    assert np.array_equal(rows_of(open_checkpoint(tmp_path / "c").table("new"))[2]["values"], rows_of(old)[2]["values"])


@pytest.mark.parametrize("on_conflict", ["sum", "mean"])
def test_rows_that_are_only_added_to_others_are_checked_too(
    sample_path: Path, tmp_path: Path, on_conflict: Any
) -> None:
    other = open_checkpoint(sample_path)
    write_tables(other.select(["user_emb"]), tmp_path / "damaged", "tfplugin")
    bundle = Bundle(tmp_path / "damaged")
    entry = bundle.entries["user_emb-values"]
    data = bytearray(bundle.data_path(0).read_bytes())
    data[entry.offset] ^= 1
    bundle.data_path(0).write_bytes(bytes(data))
    with pytest.raises(CorruptFileError, match="checksum mismatch"):
        merge([open_checkpoint(tmp_path / "damaged"), other], tmp_path / "b", on_conflict=on_conflict)
    assert not (tmp_path / "b.index").exists()


@pytest.mark.parametrize(
    ("dtype", "numbers", "column"),
    [
        (np.float16, (60000, 60000), "values"),
        (np.float16, (-60000, -60000), "slot m"),
        (ml_dtypes.bfloat16, (3e38, 3e38), "values"),
        (np.float32, (3e38, 3e38), "values"),
        (np.float64, (1.7e308, 1.7e308), "values"),
        (np.int8, (100, 100), "values"),
        (np.int8, (-100, -100), "slot m"),
        (np.int32, (2**31 - 1, 1), "values"),
        (np.int64, (-(2**63), -1), "values"),
        (np.int64, (2**62, 2**62), "slot m"),
    ],
)
def test_a_sum_that_its_type_does_not_hold_is_an_error(dtype: Any, numbers: tuple[Any, Any], column: str) -> None:
    def table(number: Any) -> ArrayTable:
        large, small = np.array([[1, 1], [1, number]]).astype(dtype), np.ones((2, 2), dtype)
        of_values = column == "values"
        slots = {"m": small if of_values else large}
        return ArrayTable("emb", np.array([7, -5]), large if of_values else small, slots=slots)

    merged, _ = merge_tables("emb", [table(numbers[0]), table(numbers[1])], ["a", "b"], on_conflict="sum")
    message = rf"table 'emb': the {column} of key -5 add up to a number that {np.dtype(dtype).name} does not hold; cast"
    with pytest.raises(BadInputError, match=message):
        list(merged.chunks())
    with pytest.raises(BadInputError, match=message):
        merged.take(np.arange(2), ALL_COLUMNS)


def test_a_sum_of_numbers_that_were_infinite_is_infinite() -> None:
    one = ArrayTable("emb", np.arange(3), np.float16([[np.inf], [-np.inf], [np.nan]]))
    two = ArrayTable("emb", np.arange(3), np.float16([[1], [np.inf], [1]]))
    merged, _ = merge_tables("emb", [one, two], ["a", "b"], on_conflict="sum")
    (chunk,) = merged.chunks()
    assert chunk.values.ravel().tolist()[0] == np.inf and np.isnan(chunk.values[1:]).all()


@pytest.mark.parametrize("dry_run", [False, True])
def test_frequencies_that_are_cut_are_counted(tmp_path: Path, dry_run: bool) -> None:
    largest = 2**32 - 1
    counts = [[largest, 1, largest - 1, 7], [1, 2, 1, largest], [5, 3, 0, largest]]
    tables = [
        ArrayTable("emb", np.array([4, 1, 2, 9]), np.ones((4, 1), np.float32), freqs=np.array(freqs, np.uint32))
        for freqs in counts
    ]
    sources = [Checkpoint(tmp_path / str(number), "tfplugin", {"emb": one}) for number, one in enumerate(tables)]
    total = np.sum(counts, axis=0)
    for on_conflict in ("sum", "mean", "last"):
        options = WriteOptions(dry_run=dry_run)
        account, _ = merge(sources, tmp_path / on_conflict, on_conflict=on_conflict, parts=2, options=options)  # type: ignore[arg-type]
        cut = int((total > largest).sum()) if on_conflict != "last" else 0
        told = ("2 frequencies add up to more than uint32 holds: the largest that it has was written",)
        assert cut in (0, 2) and account.lossless == (not cut)
        assert account.tables[0].losses == (told if cut else ())
        if cut and not dry_run:
            rows = rows_of(open_checkpoint(tmp_path / on_conflict).table("emb"))
            expected = dict(zip([4, 1, 2, 9], np.minimum(total, largest).tolist(), strict=True))
            assert {key: row["freq"] for key, row in rows.items()} == expected


def waiting(keys: Any, counts: dict[int, tuple[int, int]], dtype: Any = np.uint32) -> ArrayTable:
    """A table of these keys, and of keys that wait with a count and a version each."""
    extras = {
        "filtered_keys": np.array(list(counts), np.int64),
        "filtered_freqs": np.array([count for count, _ in counts.values()], dtype),
        "filtered_versions": np.array([version for _, version in counts.values()], np.int64),
    }
    return make(0, 1, keys=keys, extras=extras)


@pytest.mark.parametrize("memory", [1 << 10, 1 << 30], ids=["spilling", "in memory"])
@pytest.mark.parametrize("on_conflict", ["last", "first", "newest", "sum", "mean"])
def test_keys_wait_once_by_the_rule_and_not_where_they_have_a_row(on_conflict: Any, memory: int) -> None:
    rng = np.random.default_rng(5)
    tables, told = [], []
    for _ in range(3):
        keys = rng.permutation(3000)
        rows, others = keys[:900], keys[900:1500].tolist()
        counts = {key: (int(rng.integers(1, 9)), int(rng.integers(0, 4))) for key in others}
        tables.append(waiting(rows, counts))
        told.append((set(rows.tolist()), counts))
    merged, _ = merge_tables("emb", tables, list("abc"), on_conflict=on_conflict, memory=memory)
    expected: dict[int, list[tuple[int, int]]] = {}
    for _, counts in told:
        for key, count in counts.items():
            expected.setdefault(key, []).append(count)
    choose = {
        "last": lambda found: found[-1],
        "first": lambda found: found[0],
        "newest": lambda found: max(enumerate(found), key=lambda one: (one[1][1], one[0]))[1],
    }
    added = lambda found: (sum(count for count, _ in found), max(version for _, version in found))  # noqa: E731
    with_rows = set.union(*(rows for rows, _ in told))
    whole = {key: choose.get(on_conflict, added)(found) for key, found in expected.items() if key not in with_rows}
    names = ("filtered_keys", "filtered_freqs", "filtered_versions")
    keys, freqs, versions = (merged.extra(name).tolist() for name in names)
    assert len(keys) == len(whole) > 100
    assert dict(zip(keys, zip(freqs, versions, strict=True), strict=True)) == whole
    assert {extra.name: extra.shape for extra in merged.schema.extras} == dict.fromkeys(names, (len(whole),))


def test_waiting_keys_at_the_edges() -> None:
    largest = 2**32 - 1
    one, two = waiting([1], {7: (largest - 1, 0), 8: (largest, 0)}), waiting([2], {7: (1, 0), 8: (2, 0)})
    merged, _ = merge_tables("emb", [one, two], ["a", "b"], on_conflict="sum")
    assert merged.extra("filtered_freqs").tolist() == [largest, largest]
    with pytest.raises(BadInputError, match="key 7 waits for admission in a and waits for admission in b; choose"):
        merge_tables("emb", [one, two], ["a", "b"], on_conflict="error")
    with pytest.raises(BadInputError, match="key 2 has a row in a and waits for admission in b; choose"):
        merge_tables("emb", [make(0, 1, keys=[2]), waiting([3], {2: (1, 0)})], ["a", "b"], on_conflict="error")
    merged, _ = merge_tables(
        "emb", [waiting([1], {2: (1, 0)}), waiting([3], {4: (1, 0)})], ["a", "b"], on_conflict="error"
    )
    assert merged.extra("filtered_keys").tolist() == [2, 4]
    # A key that a later increment deletes waits no more; one that waits in the increment itself does.
    increment = waiting([5], {4: (2, 0)})
    deleted = make(0, 1, keys=[5], extras={**increment._extras, "deleted_keys": np.array([4, 7])})
    merged, _ = merge_tables("emb", [one, deleted], ["a", "b"])
    assert merged.extra("filtered_keys").tolist() == [4, 8]


def described(path: Path, dialect: str = "tfplugin", **metadata: Any) -> Checkpoint:
    keys = [sum(path.name.encode())]
    return Checkpoint(path, dialect, {"emb": make(0, 1, keys=keys, metadata=metadata)})


def test_what_sources_record_differently_is_told(tmp_path: Path) -> None:
    """Of new rows and policies the last source's are taken, with "first" the first's, as dense variables are."""
    half, uniform = {"kind": "constant", "a": 0.5, "seed": 1}, {"kind": "uniform", "a": -1.0, "b": 1.0, "seed": 9}
    top = {"policy": "keep_top", "rows": 10, "by": "frequency"}
    admission = [{"kind": "count", "enter_threshold": n, "below": "initial"} for n in (3, 9)]
    slots = [{"m": {"init": "constant", "constant": number}} for number in (0.0, 0.1)]
    a = described(
        tmp_path / "a", initializer=half, policies={"admission": admission[0], "expiry": [top]}, slots=slots[0]
    )
    b = described(
        tmp_path / "b", initializer=uniform, policies={"admission": admission[1], "padding_key": 0, "expiry": [top]},
        slots=slots[1],
    )  # fmt: skip
    for on_conflict, taken, source in (("last", 1, "b"), ("sum", 1, "b"), ("first", 0, "a")):
        account, _ = merge([a, b], tmp_path / on_conflict, on_conflict=on_conflict)  # type: ignore[arg-type]
        (losses,) = (one.losses for one in account.tables)
        end = f"that of '{tmp_path / source}' was taken"
        assert not account.lossless and len(losses) == 4 and all(loss.endswith(end) for loss in losses)
        found = "; ".join(losses).replace(str(tmp_path), "")
        assert "the initializer of new rows: {" in found and "\"seed\": 9} in '/b'" in found
        assert "what slot m of new rows begins as: 0.0 in '/a', 0.1 in '/b'" in found
        assert '"enter_threshold": 3, "kind": "count"} in \'/a\', {' in found
        assert "the policy padding_key: none in '/a', 0 in '/b'" in found
        metadata = open_checkpoint(tmp_path / on_conflict).table("emb").schema.metadata
        assert metadata["initializer"] == (half, uniform)[taken]
        assert metadata["policies"]["admission"] == admission[taken]
        assert metadata["policies"]["expiry"] == [top]  # of the one part that both have
        assert metadata["policies"].get("padding_key") == (None, 0)[taken]
        assert metadata["slots"]["m"]["constant"] == (0.0, 0.1)[taken]
    same, _ = merge([a, described(tmp_path / "c", **a.tables["emb"].schema.metadata)], tmp_path / "same")
    assert same.lossless
    # What a source does not record does not differ.
    other, _ = merge([described(tmp_path / "d"), a], tmp_path / "other")
    assert other.lossless
    record = open_checkpoint(tmp_path / "other").table("emb").schema.metadata
    assert record["initializer"] == half and record["policies"]["admission"] == admission[0]


def test_initial_values_go_with_the_initializer(tmp_path: Path) -> None:
    def table(name: str, number: float) -> Checkpoint:
        values = np.full((4, 3), number, np.float32)
        rows = make(
            0, 1, keys=[1], metadata={"initializer": {"kind": "rows", "seed": 1}}, extras={"initial_values": values}
        )
        return Checkpoint(tmp_path / name, "tfplugin", {"emb": rows})

    for on_conflict, number in (("last", 2), ("first", 1)):
        account, _ = merge([table("a", 1), table("b", 2)], tmp_path / on_conflict, on_conflict=on_conflict)  # type: ignore[arg-type]
        assert (open_checkpoint(tmp_path / on_conflict).table("emb").extra("initial_values") == number).all()
        (loss,) = account.tables[0].losses
        assert loss.startswith("initial values of new rows: they differ in") and "those of" in loss
    assert merge([table("a", 1), table("b", 1)], tmp_path / "same")[0].lossless
