"""Every dialect that kvtools writes reads back what it was given, as far as it says that it holds it; and so does
every pair of them. The dialects are asked for, not listed: a new one is tested from its first day."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ports import free_ports

import kvtools
from kvtools.dialects.chunk import ALL_COLUMNS, KEYS, Chunk, Columns
from kvtools.dialects.detect import dialects, open_checkpoint
from kvtools.dialects.dialect import Dialect
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import TableSchema, numpy_dtype
from kvtools.diff import compare_tables
from kvtools.errors import BadInputError, UsageError
from kvtools.fit import Fit, FittedTable, fit
from kvtools.lossless import move
from kvtools.migrate import write_tables
from kvtools.partition import owners

WRITABLE = {name: dialect for name, dialect in dialects().items() if dialect.write is not None}
PLAIN_SLOTS = ("Adam.m", "Adam.v")
"""Where they are as wide as the value, slots of every dialect that has any; others may be told by name or width."""
NAMES = ["emb", "scope/user_emb", "a.b-c", "emb/part_0", "x-keys", "größe/名前", "with space", "UPPER", "..", "a//b"]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    """A Redis server of this test's own, or None where there is none installed."""
    binary = shutil.which("redis-server")
    if binary is None or "redis" not in WRITABLE:
        yield None
        return
    [port] = free_ports(1)
    folder = tmp_path_factory.mktemp("redis")
    arguments = ["--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    server = subprocess.Popen([binary, *arguments], stdout=subprocess.DEVNULL)
    try:
        last = time.monotonic() + 60
        while True:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None and time.monotonic() < last, "redis-server does not answer"
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def place(redis_url: str | None, tmp_path: Path) -> Any:
    """Gives a new place to write to in a dialect."""
    numbers = itertools.count()

    def make(dialect: Dialect) -> str:
        if dialect.output == "url":
            if redis_url is None:
                pytest.skip("redis-server is not installed")
            import redis

            redis.Redis.from_url(redis_url).flushall()
            return f"{redis_url}/0" + ("?model_tag=test" if dialect.name == "tfra_redis" else "")
        suffix = dialect.suffixes[0] if dialect.suffixes and dialect.output == "file" else ""
        return str(tmp_path / f"{next(numbers)}{suffix}")

    return make


def rows_of(table: TableReader, like: TableSchema) -> dict[int, tuple[bytes, ...]]:
    """Every row as bytes, by key, in the columns that `like` has."""
    rows: dict[int, tuple[bytes, ...]] = {}
    for chunk in table.chunks(rows=17):
        assert chunk.values is not None
        columns = [chunk.values, *(chunk.slots[slot.name] for slot in like.slots)]
        columns += [chunk.freqs] if like.has_freqs and chunk.freqs is not None else []
        columns += [chunk.versions] if like.has_versions and chunk.versions is not None else []
        for i, key in enumerate(chunk.keys.tolist()):
            assert key not in rows
            rows[key] = tuple(column[i].tobytes() for column in columns)
    return rows


def check(got: TableReader, source: TableReader, fitted: Fit, dialect: Dialect) -> None:
    """Check that a table holds the rows of `source`, as `fitted` says."""
    want: TableSchema = fitted.schema
    have = got.schema
    assert have.name.replace("/", "_") == want.name.replace("/", "_")
    assert (have.key_dtype, have.value_dtype, have.dim, have.rows) == (
        *(want.key_dtype, want.value_dtype),
        *(want.dim, want.rows),
    )
    assert have.parts == want.parts or have.rows == 0  # some layouts tell parts by their rows
    found = {slot.name: slot for slot in have.slots}
    plain = [slot for slot in want.slots if slot.name in PLAIN_SLOTS and slot.width == want.dim]
    assert all(found[slot.name] == slot for slot in want.slots if slot.name in found or slot in plain)
    want = dataclasses.replace(want, slots=tuple(found[slot.name] for slot in want.slots if slot.name in found))
    # A layout may have counters always: they are zeros then.
    assert want.freq_dtype is None or have.freq_dtype == want.freq_dtype
    assert want.version_dtype is None or have.version_dtype == want.version_dtype
    if want.has_versions:
        units = dialect.holds.version_units
        assert have.version_unit == want.version_unit or (units is not None and len(units) > 1)
    assert {extra.name: extra for extra in have.extras} == {extra.name: extra for extra in want.extras}
    for extra in want.extras:
        assert np.array_equal(got.extra(extra.name), fitted.extra(extra.name, source))
    for name, value in want.metadata.items():
        assert have.metadata.get(name) == value
    expected = FittedTable(source, fitted)
    assert rows_of(got, like=want) == rows_of(expected, like=want)
    check_reading(got, have.partition if dialect.holds.partition else None)


def check_reading(table: TableReader, partition: str | None) -> None:
    """Check that parts, single columns and single rows are what the whole stream says."""
    keys = table.all_keys()
    per_part = [list(table.chunks(KEYS, part=part)) for part in range(table.parts)]
    assert [sum(map(len, chunks)) for chunks in per_part] == list(table.schema.part_rows)
    if partition:
        for part, chunks in enumerate(per_part):
            for chunk in chunks:
                assert (owners(chunk.keys, table.parts, partition) == part).all()
    rows = np.arange(len(keys))[::-2]
    whole = list(table.chunks(rows=1 << 20))
    taken = table.take(rows, ALL_COLUMNS)
    assert np.array_equal(taken.keys, keys[rows])
    if len(keys):
        merged = np.concatenate([chunk.values for chunk in whole if chunk.values is not None])
        assert taken.values is not None and taken.values.tobytes() == merged[rows].tobytes()
    only: list[Chunk] = list(table.chunks(Columns(slots=True)))
    assert all(chunk.values is None and chunk.freqs is None and chunk.versions is None for chunk in only)


@st.composite
def tables(draw: st.DrawFn) -> TableReader:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.sampled_from([0, 1, 2, 5, 40, 150]))
    dim = draw(st.sampled_from([1, 2, 3, 4, 7, 16, 64, 130]))
    key_dtype = draw(st.sampled_from(["int64", "int32", "uint64", "uint32"]))
    value_dtype = draw(st.sampled_from(["float32", "float16", "bfloat16", "float64", "int8"]))
    limits = np.iinfo(key_dtype)
    keys = np.unique(
        np.concatenate(
            [
                np.array([limits.min, limits.max, 0, limits.max - 1], key_dtype),
                np.arange(10).astype(key_dtype),
                rng.integers(limits.min, limits.max, n, key_dtype, endpoint=True),
            ]
        )
    )
    if limits.min < 0:
        keys = np.append(keys, keys.dtype.type(-1)) if -1 not in keys else keys
    keys = rng.permutation(keys)[:n]

    def numbers(width: int, dtype: str) -> np.ndarray:
        raw = (rng.normal(size=(n, width)) * 3).astype(numpy_dtype(dtype))
        if n and dtype != "int8":
            raw[0, 0], raw[-1, -1] = np.nan, -np.inf
        return raw

    slots = {
        slot: numbers(width, value_dtype)
        for slot, width in draw(
            st.dictionaries(
                st.sampled_from(["Adam.m", "Adam.v", "accum", "Ftrl.linear", "mü"]),
                st.sampled_from([dim, dim, 1, 3]),
                max_size=3,
            )
        ).items()
    }

    def counters(dtypes: list[str | None]) -> np.ndarray | None:
        dtype = draw(st.sampled_from(dtypes))
        if dtype is None:
            return None
        return rng.integers(0, np.iinfo(dtype).max, n, dtype, endpoint=True) >> draw(st.sampled_from([0, 33, 60]))

    freqs = counters([None, "uint32", "int64"])
    versions = counters([None, "uint32", "int64", "int32"])
    return kvtools.table_from_arrays(
        draw(st.sampled_from(NAMES)),
        keys,
        numbers(dim, value_dtype),
        slots=slots,
        freqs=freqs,
        versions=versions,
        version_unit=draw(st.sampled_from(["seconds", "days", "steps", "unknown"])),
        parts=draw(st.integers(1, 7)),
        extras=draw(st.sampled_from([{}, {"initial_values": np.ones((5, dim), numpy_dtype(value_dtype))}])),
        metadata=draw(st.sampled_from([{}, {"initializer": {"kind": "uniform", "a": -1.0, "b": 1.0, "seed": 7}}])),
    )


def reopened(output: str, table: TableReader, dialect: Dialect) -> TableReader:
    """The table of its name at `output`; what files do not record is told."""
    schema = fit(table.schema, dialect).schema
    dim = None if schema.rows or dialect.holds.empty_dim else schema.dim
    options = OpenOptions(dialect.name, schema.key_dtype, schema.value_dtype, dim, lenient=True)
    tables = open_checkpoint(output, options).tables
    (name,) = [name for name in tables if name.replace("/", "_") == schema.name.replace("/", "_")]
    return tables[name]


def holds(table: TableReader, dialect: Dialect) -> bool:
    """Whether a dialect takes a table at all; if not, it says why."""
    try:
        fit(table.schema, dialect)
    except BadInputError as error:
        assert table.schema.name in str(error) and dialect.name in str(error)
        return False
    return True


@pytest.mark.parametrize("dialect", WRITABLE.values(), ids=WRITABLE)
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(table=tables(), parts=st.sampled_from([None, None, 1, 2, 5]))
def test_what_is_written_reads_back(dialect: Dialect, place: Any, table: TableReader, parts: int | None) -> None:
    assume(holds(table, dialect))
    output = place(dialect)
    fitted = fit(table.schema, dialect, parts=parts)
    try:
        account = write_tables([table], output, dialect, parts=parts, workers=1)
    except (BadInputError, UsageError) as error:
        # A number that the target's type has not, types that only go together, or a name that cannot stand there.
        assert "does not fit" in str(error) or "cast it first" in str(error) or "rename it" in str(error)
        assert not Path(output).exists() and not Path(f"{output}.index").exists()
        return
    assert account.tables[0].rows_written == table.rows
    check(reopened(output, table, dialect), table, fitted, dialect)


def sample(dialect: Dialect, *, small_numbers: bool = True) -> TableReader:
    """A table in types that a dialect prefers, with everything that it holds, and all its numbers small."""
    holds = dialect.holds
    rng = np.random.default_rng(3)
    n, dim = 60, 8
    keys = rng.permutation(np.arange(1, 4 * n, 4)).astype(holds.key_dtypes[0])[:n]
    value = numpy_dtype("float32" if "float32" in holds.value_dtypes else holds.value_dtypes[0])
    return kvtools.table_from_arrays(
        "emb",
        keys,
        rng.normal(size=(n, dim)).astype(value),
        slots={"Adam.m": rng.normal(size=(n, dim)).astype(value), "Adam.v": rng.normal(size=(n, dim)).astype(value)}
        if holds.slots
        else {},
        freqs=rng.integers(1, 100, n).astype(holds.freq_dtypes[0]) if holds.freq_dtypes else None,
        versions=rng.integers(1, 100, n).astype(holds.version_dtypes[0]) if holds.version_dtypes else None,
        version_unit=holds.version_units[0] if holds.version_units else "seconds",
        parts=3,
    )


@pytest.mark.parametrize("second", WRITABLE.values(), ids=WRITABLE)
@pytest.mark.parametrize("first", WRITABLE.values(), ids=WRITABLE)
def test_there_and_back(first: Dialect, second: Dialect, place: Any) -> None:
    if first.output == second.output == "url":
        pytest.skip("one server at a time")
    source = sample(first)
    write_tables([source], there := place(first), first, workers=1)
    one = reopened(there, source, first)
    out = write_tables([one], copy := place(second), second, workers=1, verify=True)
    if first is not second:
        assert out.lossless or not move(first, second).lossless
    two = reopened(copy, one, second)
    again = f"{there}?prefix=again" if first.output == "url" else place(first)
    back = write_tables([two], again, first, workers=1, verify=True)
    three = reopened(again, two, first)
    if out.lossless and back.lossless:
        # On the one server there is, the third table took the place of the first.
        difference = compare_tables(two if first.output == "url" else one, three)
        assert difference.same, difference
    else:
        keys = np.sort(two.all_keys())
        assert np.array_equal(np.sort(three.all_keys()), keys)
