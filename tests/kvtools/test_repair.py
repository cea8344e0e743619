"""What `kvtools verify` finds wrong with rows is mended, and all else stays, compared with plain NumPy."""

from __future__ import annotations

import io
import json
import re
import runpy
import shlex
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable, table_from_arrays
from kvtools.cli.main import main
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.snapshot import NAME as SNAPSHOT
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.migrate import write_tables
from kvtools.repair import Repairs, repair
from kvtools.verify import verify

from .chain_files import ChainWriter, row, table_of

DATA = Path(__file__).parent.parent / "data"
CASES = runpy.run_path(str(DATA / "make_broken.py"))["CASES"]
KEYS = np.array([5, 7, -3, 5, 2**40, 9, 7, 0, 11, 5])
NOT_FINITE = ((3, "values"), (9, "values"), (5, "slot"))
"""Rows with a NaN or an infinity: two of the three rows of key 5, and key 9 in its slot."""
OUTPUTS = {
    "tfplugin": "t.ckpt",
    "tfra": "t.ckpt",
    "tfplus": "t.ckpt",
    "deeprec": "t.ckpt",
    "hdf5": "t.h5",
    "npz": "t.npz",
    "safetensors": "t.safetensors",
    "parquet": "t",
    "arrow": "t",
    "sok": "t",
}


def bad_table(parts: int = 1, **others: Any) -> ArrayTable:
    rng = np.random.default_rng(3)
    values, slot = rng.normal(size=(2, len(KEYS), 4)).astype(np.float32)
    for number, (at, column) in enumerate(NOT_FINITE):
        (values if column == "values" else slot)[at, number] = [np.nan, np.inf, -np.inf][number]
    freqs = np.arange(1, len(KEYS) + 1)
    order = np.argsort(KEYS % parts, kind="stable")
    for name in {"versions"} & others.keys():
        others[name] = others[name][order]
    part_rows = np.bincount(KEYS % parts, minlength=parts).tolist()
    others |= {"partition": "floor_mod"} if parts > 1 else {}
    slots = {"Adam.m": slot[order]}
    return ArrayTable("emb", KEYS[order], values[order], slots=slots, freqs=freqs[order], part_rows=part_rows, **others)


def columns_of(chunk: Chunk) -> dict[str, Array]:
    assert chunk.values is not None
    found = {"values": chunk.values, **chunk.slots}
    counters = {"freqs": chunk.freqs, "versions": chunk.versions}
    return found | {name: column for name, column in counters.items() if column is not None}


def reference(chunk: Chunk, nan: str, duplicates: str) -> dict[int, dict[str, Array]]:
    """The rows of a table after a repair, by key: one after the other, in plain NumPy."""
    columns = columns_of(chunk)
    rows: dict[int, dict[str, Array]] = {}
    for at, key in enumerate(chunk.keys.tolist()):
        here = {name: column[at].copy() for name, column in columns.items()}
        wide = [name for name, number in here.items() if number.ndim and not np.isfinite(number).all()]
        if wide and nan == "drop":
            continue
        for name in wide:
            here[name][:] = 0.25 if nan == "default" and name == "values" else 0
        if key not in rows or duplicates == "last":
            rows[key] = here
        elif duplicates == "sum":
            was = rows[key]
            rows[key] = {
                name: (was[name].astype(np.float64) + column).astype(column.dtype)
                if column.ndim
                else (max if name == "versions" else sum)((was[name], column))
                for name, column in here.items()
            }
    return rows


def same_rows(chunk: Chunk, expected: dict[int, dict[str, Array]]) -> None:
    assert sorted(chunk.keys.tolist()) == sorted(expected)
    for name, column in columns_of(chunk).items():
        for at, key in enumerate(chunk.keys.tolist()):
            assert np.asarray(column[at]).tobytes() == np.asarray(expected[key][name], column.dtype).tobytes(), name


@pytest.mark.parametrize("dialect", OUTPUTS)
@pytest.mark.parametrize(("nan", "duplicates"), [("drop", "last"), ("zero", "first")])
def test_every_dialect_is_mended(dialect: str, nan: Any, duplicates: Any, tmp_path: Path) -> None:
    path, out = tmp_path / OUTPUTS[dialect], tmp_path / f"out-{OUTPUTS[dialect]}"
    write_tables([bad_table()], path, dialect)
    checkpoint = open_checkpoint(path)
    (table,) = checkpoint.tables.values()
    before = table.to_numpy()
    expected = reference(before, nan, duplicates)
    done = repair(checkpoint, out, Repairs(nan=nan, duplicates=duplicates))
    (said,) = done.tables
    bad = 3 if table.slots else 2
    assert (said.rows, said.kept, said.lost_rows) == (10, len(expected), 0)
    assert (said.dropped, said.replaced) == ((bad, 0) if nan == "drop" else (0, bad))
    assert said.non_finite["values"] == 2 and said.duplicates == 10 - said.dropped - len(expected)
    (mended,) = open_checkpoint(out).tables.values()
    same_rows(mended.to_numpy(), expected)
    assert verify(str(out)).count("error") == 0
    again = repair(open_checkpoint(out), tmp_path / f"again-{OUTPUTS[dialect]}")
    assert [one.sound for one in again.tables] == [True]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("memory", [1 << 30, 100])
@pytest.mark.parametrize("nan", ["drop", "zero", "default"])
@pytest.mark.parametrize("duplicates", ["last", "first", "sum"])
def test_every_rule(nan: Any, duplicates: Any, memory: int, parts: int, tmp_path: Path) -> None:
    metadata = {"initializer": {"kind": "constant", "a": 0.25}}
    versions = np.arange(len(KEYS))
    table = bad_table(metadata=metadata, parts=parts, versions=versions, version_unit="steps")
    expected = reference(table.to_numpy(), nan, duplicates)
    checkpoint = Checkpoint(tmp_path / "a", "tfplugin", {"emb": table})
    done = repair(
        checkpoint, tmp_path / "b", Repairs(nan=nan, duplicates=duplicates), options=WriteOptions(memory=memory)
    )
    mended = open_checkpoint(tmp_path / "b").table("emb")
    same_rows(mended.to_numpy(), expected)
    assert done.tables[0].kept == mended.rows == len(expected) and mended.parts == parts
    assert verify(str(tmp_path / "b")).count("error") == 0


def test_a_slot_begins_as_its_description_says(tmp_path: Path) -> None:
    values = np.float32([[1, 2], [np.nan, 4], [5, 6]])
    accum, ema = np.float32([[[np.inf, 0], [1, 1], [2, 2]], [[1, 1], [np.nan, 2], [3, 3]]])
    slots = {"Adagrad.accum": accum, "ema": ema}
    described = {
        "Adagrad.accum": {"name": "Adagrad.accum", "init": "constant", "constant": 0.5},
        "ema": {"name": "ema", "init": "copy_value"},
    }
    metadata = {"initializer": {"kind": "constant", "a": 0.125}, "slots": described}
    table = table_from_arrays("emb", np.array([1, 2, 3]), values, slots=slots, metadata=metadata)
    repair(Checkpoint(tmp_path / "a", "tfplugin", {"emb": table}), tmp_path / "b", Repairs(nan="default"))
    mended = open_checkpoint(tmp_path / "b").table("emb").to_numpy()
    assert mended.values is not None
    np.testing.assert_array_equal(mended.values, np.float32([[1, 2], [0.125, 0.125], [5, 6]]))
    np.testing.assert_array_equal(mended.slots["Adagrad.accum"], np.float32([[0.5, 0.5], [1, 1], [2, 2]]))
    np.testing.assert_array_equal(mended.slots["ema"], np.float32([[1, 1], [0.125, 0.125], [3, 3]]))


def test_default_needs_a_row_that_keys_begin_with(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "a", "npz", {"emb": bad_table()})
    with pytest.raises(BadInputError, match=r"no row that new keys begin with.*say --nan zero or --nan drop"):
        repair(checkpoint, tmp_path / "b.npz", Repairs(nan="default"))
    assert not (tmp_path / "b.npz").exists()


def test_a_rule_of_a_table_and_kinds(tmp_path: Path) -> None:
    values = bad_table().to_numpy().values
    assert values is not None
    named = {name: ArrayTable(name, KEYS, values) for name in ("ads/a", "ads/b", "user")}
    checkpoint = Checkpoint(tmp_path / "a", "npz", named)
    done = repair(checkpoint, tmp_path / "b.npz", Repairs(nan_of=(("ads/*", "zero"),), only=frozenset({"nan"})))
    assert [(one.dropped, one.replaced, one.duplicates) for one in done.tables] == [(0, 2, 0), (0, 2, 0), (2, 0, 0)]
    done = repair(checkpoint, tmp_path / "c.npz", Repairs(only=frozenset({"duplicates"})), tables=["user"])
    assert [(one.table, one.dropped, one.duplicates) for one in done.tables] == [("user", 0, 3)]
    mended = open_checkpoint(tmp_path / "c.npz")
    same_bits(mended.table("ads/a").to_numpy(), named["ads/a"].to_numpy())


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("usr", r"--nan usr=zero: no such table.*; they are 'ads/a', 'user'; did you mean 'user'\?"),
        ("adz/*", r"--nan adz/\*=zero: no table matches; they are 'ads/a', 'user'"),
    ],
)
def test_a_rule_of_no_table_is_an_error(name: str, message: str, dry: bool, tmp_path: Path) -> None:
    values = bad_table().to_numpy().values
    assert values is not None
    named = [ArrayTable(table, KEYS, values) for table in ("ads/a", "user")]
    write_tables(named, tmp_path / "a.npz", "npz")
    line = ["repair", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--nan", f"{name}=zero"]
    status, out, err = run(*line, *(["--dry-run"] if dry else []))
    assert (status, out) == (1, "") and re.search(message, err)
    assert not (tmp_path / "b.npz").exists()
    # A table that is not to be mended is none that a rule could be of.
    status, _, err = run(*line[:3], "--table", "user", "--nan", "ads/a=zero")
    assert status == 1 and "--nan ads/a=zero: no such table among those to mend; they are 'user'" in err
    checkpoint = Checkpoint(tmp_path / "a", "npz", {"a[1]": ArrayTable("a[1]", KEYS, values)})
    (one,) = repair(checkpoint, tmp_path / "c.npz", Repairs(nan_of=(("a[1]", "zero"),))).tables
    assert (one.dropped, one.replaced) == (0, 2)


def same_bits(got: Chunk, expected: Chunk) -> None:
    np.testing.assert_array_equal(got.keys, expected.keys)
    for name, column in columns_of(expected).items():
        assert columns_of(got)[name].tobytes() == column.tobytes(), name


def test_a_key_that_stands_twice_may_be_an_error(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "a", "npz", {"emb": bad_table()})
    with pytest.raises(BadInputError, match="key 7 stands in more than one row; nothing was written"):
        repair(checkpoint, tmp_path / "b.npz", Repairs(duplicates="error"))  # of key 5 one row is finite
    assert not (tmp_path / "b.npz").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nan": "mend"}, "got --nan mend, expected drop, zero, default"),
        ({"nan_of": (("a", "x"),)}, "got --nan x"),
        ({"duplicates": "all"}, "got --duplicates all, expected last, first, sum, error"),
        ({"only": frozenset({"nans"})}, "got --only nans, expected nan, duplicates, orphans"),
    ],
)
def test_rules_that_there_are_none_of(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Repairs(**given)


def test_what_is_sound_stays_bit_for_bit(sample_path: Path, tmp_path: Path) -> None:
    """Every column, dense variables, and what the checkpoint records of its parts."""
    done = repair(open_checkpoint(sample_path), tmp_path / "b")
    assert all(one.sound for one in done.tables) and done.account.lossless
    before, after = open_checkpoint(sample_path), open_checkpoint(tmp_path / "b")
    for name, table in before.tables.items():
        same_bits(after.table(name).to_numpy(), table.to_numpy())
        assert after.table(name).schema.metadata == table.schema.metadata
        assert after.table(name).schema.part_rows == table.schema.part_rows
    assert after.variables == before.variables
    for variable in before.variables:
        for got, expected in zip(after.read_variable(variable.name), before.read_variable(variable.name), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_scores_of_the_rows_that_stay_are_kept(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path)
    rows = {key: row(float("nan") if key == 3 else key, score=10 + key) for key in range(6)}
    writer.full({"emb": table_of(rows, parts=2, pending={70: 2})})
    path = next(tmp_path.glob("*.index")).with_suffix("")
    done = repair(open_checkpoint(path), tmp_path / "mended")
    mended = open_checkpoint(tmp_path / "mended").table("emb")
    assert done.tables[0].dropped == 1 and done.account.lossless
    assert [mended.extra(f"eviction_scores_{part}").tolist() for part in range(2)] == [[10, 12, 14], [11, 15]]
    assert [mended.extra(f"eviction_orders_{part}").tolist() for part in range(2)] == [[110, 112, 114], [111, 115]]
    assert mended.extra("filtered_keys").tolist() == [70]


def test_other_tables_keep_their_scores(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path)
    rows = {key: row(key, score=10 + key) for key in range(6)}
    bad = {0: row(float("nan"), score=7), 1: row(1.0, score=8)}
    writer.full({"emb": table_of(rows, parts=2, pending={70: 2}), "bad": table_of(bad, parts=1, name="bad")})
    path = next(tmp_path.glob("*.index")).with_suffix("")
    for tables in (["bad"], []):
        done = repair(open_checkpoint(path), tmp_path / f"mended{len(tables)}", tables=tables)
        assert done.account.lossless
        before, after = (open_checkpoint(at).table("emb") for at in (path, tmp_path / f"mended{len(tables)}"))
        assert {extra.name for extra in after.schema.extras} == {extra.name for extra in before.schema.extras}
        for extra in before.schema.extras:
            np.testing.assert_array_equal(after.extra(extra.name), before.extra(extra.name))
        assert open_checkpoint(tmp_path / f"mended{len(tables)}").table("bad").extra("eviction_scores_0").tolist() == [
            8
        ]


def test_sums_of_duplicates_fit_their_types_or_are_told(tmp_path: Path) -> None:
    keys = np.array([5, 7, 5])
    values = np.array([[60000], [1], [60000]], np.float16)
    write_tables([ArrayTable("emb", keys, values)], str(tmp_path / "a.npz"), "npz")
    with pytest.raises(BadInputError, match=r"table 'emb'.*key 5"):
        repair(open_checkpoint(tmp_path / "a.npz"), tmp_path / "b.npz", Repairs(duplicates="sum"))
    assert not (tmp_path / "b.npz").exists()
    freqs = np.array([2**32 - 2, 1, 3], np.uint32)
    write_tables([ArrayTable("emb", keys, values / 4, freqs=freqs)], str(tmp_path / "c.npz"), "npz")
    done = repair(open_checkpoint(tmp_path / "c.npz"), tmp_path / "d.npz", Repairs(duplicates="sum"))
    (chunk,) = open_checkpoint(tmp_path / "d.npz").table("emb").chunks()
    assert dict(zip(chunk.keys.tolist(), chunk.freqs.tolist(), strict=True)) == {5: 2**32 - 1, 7: 1}
    told = "1 frequency adds up to more than uint32 holds: the largest that it has was written"
    assert done.account.tables[0].losses == (told,) and not done.account.lossless


def test_rows_go_to_the_part_that_owns_their_key(tmp_path: Path) -> None:
    """In our own layout, whose writer sees to it, and in Parquet, which records a rule and has no writer that does."""
    keys = np.arange(12)
    values = keys[:, None].astype(np.float32)
    table = ArrayTable("emb", keys, values, part_rows=[6, 6], partition="floor_mod")
    for dialect in ("parquet", "arrow"):
        path, out = tmp_path / f"{dialect}-a", tmp_path / f"{dialect}-b"
        write_tables([table], path, dialect)
        assert "misplaced-keys" in {finding.check for finding in verify(str(path)).findings}
        done = repair(open_checkpoint(path), out)
        assert done.tables[0].misplaced == 6
        mended = open_checkpoint(out).table("emb")
        parts = [np.concatenate([c.keys for c in mended.chunks(part=part)]).tolist() for part in range(2)]
        assert parts == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
        assert verify(str(out)).count("error") == 0
        picked = mended.take(np.array([7, 0]))
        assert picked.keys.tolist() == [3, 0] and picked.values is not None and picked.values.tolist() == [[3], [0]]


def test_an_increment_is_not_mended(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path)
    writer.full({"emb": table_of({1: row(1)})})
    writer.delta({"emb": table_of({1: row(2)})})
    delta = next(tmp_path.glob("*.delta.index")).with_suffix("")
    with pytest.raises(BadInputError, match="is an increment"):
        repair(open_checkpoint(delta, OpenOptions(increments=True)), tmp_path / "b")


# --- The command that a finding names


def commands(findings: Any) -> list[list[str]]:
    """The commands of findings, OUT not filled in."""
    found = [re.search(r"`(kvtools repair [^`]*)`", finding.message) for finding in findings]
    return [shlex.split(one[1])[1:] for one in found if one]


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(list(arguments))
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.status == 3])
def test_the_command_of_a_finding_mends_it(name: str, tmp_path: Path) -> None:
    """Each broken checkpoint: where a finding names a command, it runs, and what it writes is sound."""
    where = tmp_path / "a folder"
    shutil.copytree(DATA / "broken" / name, where)
    result = verify(str(where / CASES[name].path))
    named = commands(result.findings)
    for number, command in enumerate(named):
        out = tmp_path / f"out-{number}"
        status, said, err = run(*[str(out) if word == "OUT" else word for word in command])
        if status == 1:  # it has to be salvaged as well: so another finding says
            assert any("--salvage" in other for other in named), (said, err)
            continue
        assert status == 0, err
        again = verify(str(out))
        assert again.count("error") == 0, again.findings
    told = {finding.check for finding in result.findings if "kvtools repair" in finding.message}
    must = {"non-finite", "duplicate-keys", "misplaced-keys", "slot-keys", "damaged", "partition-offset"}
    assert told >= {f.check for f in result.findings if f.table and f.severity == "error" and f.check in must}


def test_an_account_is_printed_and_told_as_json(tmp_path: Path) -> None:
    write_tables([bad_table()], tmp_path / "a.npz", "npz")
    status, out, err = run("repair", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--nan", "emb=zero")
    assert (status, err) == (0, "")
    assert out.splitlines()[:6] == [
        "table  rows  kept  not finite  duplicates  other part  lost",
        "emb      10     7           3           3           0     0",
        "repaired: emb: 3 rows with NaN or infinity filled (2 in values, 1 in slot Adam.m)",
        "repaired: emb: 3 rows of a key that stands in another row: each key is there once now",
        "",
        "table  rows read  rows written  parts  bytes",
    ]
    line = ["repair", str(tmp_path / "b.npz"), str(tmp_path / "c.npz"), "--only", "nan, duplicates"]
    assert "nothing to repair" in run(*line)[1]
    told = json.loads(run("repair", str(tmp_path / "a.npz"), str(tmp_path / "d.npz"), "--json", "--dry-run")[1])
    assert told["dry_run"] is True and not (tmp_path / "d.npz").exists()
    (one,) = told["repaired"]
    assert (one["rows"], one["kept"], one["dropped"], one["duplicates"]) == (10, 6, 3, 1)
    assert one["non_finite"] == {"value": 2, "Adam.m": 1} and told["lost"] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--only", "duplicates", "--nan", "zero"], "--nan says what becomes of nan, and --only duplicates leaves"),
        (["--only", "nan", "--duplicates", "last"], "--duplicates says what becomes of duplicates, and --only nan"),
    ],
)
def test_a_rule_of_what_is_not_mended_is_refused(tmp_path: Path, line: list[str], said: str) -> None:
    write_tables([bad_table()], tmp_path / "a.npz", "npz")
    status, _, err = run("repair", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), *line)
    assert status == 2 and said in " ".join(err.split()) and not (tmp_path / "b.npz").exists()


def test_in_place_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_tables([bad_table()], path, "npz")
    before = path.read_bytes()
    status, _, err = run("repair", str(path), str(path))
    assert status == 1 and "add --force to replace it" in err and path.read_bytes() == before
    assert run("repair", str(path), str(path), "--force")[0] == 0
    assert verify(str(path)).count("error") == 0


# --- What is damaged


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_of_a_damaged_table_the_good_parts_are_kept(tmp_path: Path, make_table: Callable[..., Any]) -> None:
    """The checksum of a column of one part goes wrong: that part is lost, and named."""
    table = make_table(rows=60, parts=3, partition=None)
    write_tables([table], tmp_path / "a", "tfplugin")
    checkpoint = open_checkpoint(tmp_path / "a")
    sound = [[c for c in checkpoint.tables["scope/emb"].chunks(part=part)] for part in range(3)]
    data = tmp_path / "a.data-00000-of-00001"
    flip(data, data.read_bytes().index(sound[1][0].values[0].tobytes()))  # type: ignore[index]
    with pytest.raises(CorruptFileError, match="checksum mismatch"):
        repair(open_checkpoint(tmp_path / "a"), tmp_path / "b")
    status, _, err = run("repair", str(tmp_path / "a"), str(tmp_path / "b"), "--salvage")
    lost = len(sound[1][0])
    status, told, _ = run("repair", str(tmp_path / "a"), str(tmp_path / "c"), "--salvage", "--json")
    shown = json.loads(told)
    assert not shown["lossless"] and len(shown["lost"]) == 1 and shown["tables"][0]["losses"]
    assert status == 0 and f"lost: table 'scope/emb': part 1: {lost} of {lost} rows: reading tensor" in err
    mended = open_checkpoint(tmp_path / "b").table("scope/emb")
    assert mended.schema.part_rows == (len(sound[0][0]), 0, len(sound[2][0]))
    for part in (0, 2):
        (chunk,) = mended.chunks(part=part)
        same_bits(chunk, sound[part][0])
    assert verify(str(tmp_path / "b")).count("error") == 0


def test_of_a_cut_file_what_lies_before_is_kept(tmp_path: Path, make_table: Callable[..., Any]) -> None:
    names = ("a", "b", "c")
    tables = [make_table(name, rows=40, seed=number) for number, name in enumerate(names)]
    write_tables(tables, tmp_path / "a", "tfplugin")
    data = tmp_path / "a.data-00000-of-00001"
    whole = data.read_bytes()
    data.write_bytes(whole[: whole.index(tables[1].values.tobytes()) + 9])
    status, _, err = run("repair", str(tmp_path / "a"), str(tmp_path / "b"))
    assert status == 1 and "is truncated" in err
    status, _, err = run("repair", str(tmp_path / "a"), str(tmp_path / "b"), "--salvage")
    assert status == 0, err
    mended = open_checkpoint(tmp_path / "b")
    same_bits(mended.table("a").to_numpy(), tables[0].to_numpy())
    lost = {name for name in ("b", "c") if f"lost: table '{name}'" in err}
    assert lost == {"b", "c"} and verify(str(tmp_path / "b")).count("error") == 0
    assert all(name not in mended.tables or not mended.table(name).rows for name in lost)


def test_of_a_damaged_snapshot_rows_of_good_blocks_are_kept(tmp_path: Path) -> None:
    """A snapshot has a checksum for each mebibyte: only rows that touch the bad one go."""
    keys = np.arange(60_000)
    values = np.random.default_rng(0).normal(size=(len(keys), 16)).astype(np.float32)
    write_tables([table_from_arrays("emb", keys, values)], tmp_path / "a.kvsnap", SNAPSHOT)
    at = (tmp_path / "a.kvsnap").read_bytes().index(values[31_000].tobytes())
    flip(tmp_path / "a.kvsnap", at)
    done = repair(open_checkpoint(tmp_path / "a.kvsnap"), tmp_path / "b.kvsnap", Repairs(salvage=True))
    (said,) = done.tables
    assert 0 < said.lost_rows <= (1 << 20) // 64 + 2 and len(said.lost) == 1
    (account,) = done.account.tables
    assert not done.account.lossless
    assert account.losses == (f"{said.lost_rows:,} of {said.rows:,} rows, which are not proven good",)
    assert account.checks[0] == "as many rows read and written as are kept of the source"
    mended = open_checkpoint(tmp_path / "b.kvsnap").table("emb").to_numpy()
    assert mended.values is not None and len(mended) == said.kept == len(keys) - said.lost_rows
    assert mended.values.tobytes() == values[mended.keys].tobytes() and 31_000 not in mended.keys
    assert verify(str(tmp_path / "b.kvsnap")).count("error") == 0


def test_where_nothing_is_proven_that_is_said(tmp_path: Path) -> None:
    write_tables([ArrayTable("emb", KEYS, np.ones((len(KEYS), 2), np.float32))], tmp_path / "t", "sok")
    status, out, _ = run("repair", str(tmp_path / "t"), str(tmp_path / "b"), "--salvage")
    assert status == 0
    assert "note: emb: its format has no checksums: nothing proves that the rows that were read" in out


def test_a_table_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    source = DATA / "broken" / "entry-is-string" / "model.ckpt"
    status, _, err = run("repair", str(source), str(tmp_path / "b"))
    assert status == 1 and "table 'emb' cannot be opened" in err and "--salvage" in err
