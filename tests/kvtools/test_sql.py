"""Queries against the same ones in NumPy, over every dialect; what is read for them; and what they may not do."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow
import pyarrow.compute as compute
import pytest

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.dialects.chunk import KEYS, Array, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.errors import BadInputError, CorruptFileError, OutputError, UnknownTableError, UsageError
from kvtools.sql import connection
from kvtools.sql.columns import query_columns, slot_names, unique_names, written
from kvtools.sql.pushdown import Necessary
from kvtools.sql.query import query

DATA = Path(__file__).parents[1] / "data"
PATHS = [
    "sample",
    "deeprec/model.ckpt-1200",
    "tfplus/model.ckpt-1200",
    "sok",
    "tfra/v1_adam",
    "tfra/object/ckpt",
    "tfra/savedmodel",
    "formats/sample.parquet",
    "formats/sample.arrow",
    "formats/sample_arrow",
    "formats/sample_parquet",
    "formats/sample.h5",
    "formats/int8_with_scale.kvsnap",
]


class Counted(ArrayTable):
    """A table that notes what is read of it: the columns asked for, rows streamed, rows taken."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.asked: list[Columns] = []
        self.streamed: dict[int, int] = {}
        self.taken = 0

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        self.asked.append(columns)
        for chunk in super().read_part(part, columns, rows, verify):
            self.streamed[part] = self.streamed.get(part, 0) + len(chunk)
            yield chunk

    def take(self, rows: Array, columns: Columns = KEYS) -> Chunk:
        self.asked.append(columns)
        self.taken += len(rows)
        return super().take(rows, columns)


ROWS, DIM = 4000, 4


def a_table(kind: type[ArrayTable] = ArrayTable, name: str = "emb", seed: int = 0, **others: Any) -> Any:
    rng = np.random.default_rng(seed)
    given: dict[str, Any] = {
        "slots": {
            "Adam.m": rng.normal(size=(ROWS, DIM)).astype(np.float32),
            "Adam.v": rng.normal(size=(ROWS, DIM)).astype(np.float32),
        },
        "freqs": rng.integers(0, 50, ROWS, dtype=np.uint32),
        "versions": rng.integers(0, 999, ROWS),
        "part_rows": (ROWS - 1500, 1500),
    }
    return kind(
        name, rng.permutation(ROWS) - 100, rng.normal(size=(ROWS, DIM)).astype(np.float32), **{**given, **others}
    )


def checkpoint(*tables: TableReader) -> Checkpoint:
    return Checkpoint("memory", "memory", {table.schema.name: table for table in tables})


def ask(text: str, *tables: TableReader) -> list[tuple[Any, ...]]:
    return query(checkpoint(*tables or [a_table()]), text).rows()


def norms(values: Array) -> Array:
    return np.sqrt((values.astype(np.float64) ** 2).sum(axis=1))


@pytest.mark.parametrize("path", PATHS)
def test_every_dialect_is_asked_as_numpy_is(path: str) -> None:
    opened = kvtools.open(DATA / path)
    for name, table in opened.tables.items():
        rows = table.to_numpy()
        values = rows.values.astype(np.float64)
        part = np.repeat(np.arange(table.parts), table.schema.part_rows)
        source = written(name)
        got = opened.sql(f"select * from {source}").to_arrow()
        assert got.column_names == [column.name for column in query_columns(table.schema)]
        order, mine = np.argsort(rows.keys, kind="stable"), np.argsort(got["key"].to_numpy(), kind="stable")
        assert (got["key"].to_numpy()[mine] == rows.keys[order]).all()
        whole = {"value": values, "part": part[:, None], "norm": norms(values)[:, None]}
        slots = dict(zip(slot_names(table.slots), table.slots, strict=True))
        whole |= {column: rows.slots[slot].astype(np.float64) for column, slot in slots.items()}
        whole |= {} if rows.freqs is None else {"freq": rows.freqs[:, None]}
        whole |= {} if rows.versions is None else {"version": rows.versions[:, None]}
        for column, expected in whole.items():
            flat = got[column].combine_chunks()
            flat = flat.flatten() if expected.shape[1] > 1 or column in ("value", *slots) else flat
            numbers = np.asarray(flat.to_numpy(zero_copy_only=False), np.float64).reshape(expected.shape)
            np.testing.assert_allclose(numbers[mine], expected[order], rtol=2e-7, err_msg=column)
        finite = norms(values)[np.isfinite(norms(values))]
        middle = float(np.median(finite)) * (1 + 1e-9) if len(finite) else 0.0  # equal to none
        count, total = opened.sql(f"select count(*), sum(value[1]::double) from {source} where norm < {middle}").rows()[
            0
        ]
        below = norms(values) < middle
        assert count == below.sum()
        assert (total or 0) == pytest.approx(values[below, 0].sum())
        keys = rows.keys[:3].tolist()
        if keys:
            few = opened.sql(f"select key from {source} where key in ({', '.join(map(str, keys))}, 12345)").rows()
            assert sorted(key for (key,) in few) == sorted(keys)


REFERENCES: dict[str, Callable[[Any, Array, Array], list[tuple[Any, ...]]]] = {
    "select key from emb where freq >= 48 and norm < 1.5 order by key": lambda rows, norm, part: [
        (key,) for key in sorted(rows.keys[(rows.freqs >= 48) & (norm < 1.5)].tolist())
    ],
    "select key, freq from emb order by freq desc, key limit 7": lambda rows, norm, part: [
        (int(rows.keys[at]), int(rows.freqs[at])) for at in np.lexsort((rows.keys, -rows.freqs.astype(np.int64)))[:7]
    ],
    "select part, count(*), max(version) from emb group by part order by part": lambda rows, norm, part: [
        (p, int((part == p).sum()), int(rows.versions[part == p].max())) for p in (0, 1)
    ],
    "select count(*) from emb where part = 1 or freq = 3": lambda rows, norm, part: [
        (int(((part == 1) | (rows.freqs == 3)).sum()),)
    ],
    "select count(*) from emb where not (part = 1) and key not in (1, 2, 3)": lambda rows, norm, part: [
        (int(((part != 1) & ~np.isin(rows.keys, [1, 2, 3])).sum()),)
    ],
    "select count(distinct freq) from emb where key between -5 and 1000": lambda rows, norm, part: [
        (len(np.unique(rows.freqs[(rows.keys >= -5) & (rows.keys <= 1000)])),)
    ],
    "select key from emb where value[2] > 2.5 and part = 0 order by key": lambda rows, norm, part: [
        (key,) for key in sorted(rows.keys[(rows.values[:, 1] > 2.5) & (part == 0)].tolist())
    ],
    'select count(*) from emb where "Adam.m"[1] > 0 and freq < 2': lambda rows, norm, part: [
        (int(((rows.slots["Adam.m"][:, 0] > 0) & (rows.freqs < 2)).sum()),)
    ],
    "with hot as (select key, freq from emb where freq > 45) select count(*) from emb join hot using (key)": (
        lambda rows, norm, part: [(int((rows.freqs > 45).sum()),)]
    ),
    "select key from emb where freq = (select max(freq) from emb) order by 1": lambda rows, norm, part: [
        (key,) for key in sorted(rows.keys[rows.freqs == rows.freqs.max()].tolist())
    ],
    "select key from (select key, row_number() over (order by norm desc, key) as place from emb) where place = 3": (
        lambda rows, norm, part: [(int(rows.keys[np.lexsort((rows.keys, -norm))[2]]),)]
    ),
    "select key from emb where freq > 48 intersect select key from emb where part = 1 order by 1": (
        lambda rows, norm, part: [(key,) for key in sorted(rows.keys[(rows.freqs > 48) & (part == 1)].tolist())]
    ),
    "select key from emb order by array_inner_product(value, [1, 0, 0, 0]::float[4]) desc limit 1": (
        lambda rows, norm, part: [(int(rows.keys[rows.values[:, 0].argmax()]),)]
    ),
    "select freq, count(*) from emb group by all having count(*) > 90 order by freq": lambda rows, norm, part: [
        (int(freq), int(n)) for freq, n in zip(*np.unique(rows.freqs, return_counts=True), strict=True) if n > 90
    ],
    "from emb select min(version) where norm > 4": lambda rows, norm, part: [(int(rows.versions[norm > 4].min()),)],
    "select count(*) from emb where freq > 100": lambda rows, norm, part: [(0,)],
    "select key from emb where freq > 100": lambda rows, norm, part: [],
}


@pytest.mark.parametrize("text", REFERENCES)
def test_every_kind_of_query_is_that_of_numpy(text: str) -> None:
    table = a_table()
    rows = table.to_numpy()
    part = np.repeat([0, 1], table.schema.part_rows)
    assert ask(text, table) == REFERENCES[text](rows, norms(rows.values), part)


def test_checkpoints_are_joined_by_name() -> None:
    old, new = a_table(seed=1, name="a/b"), a_table(seed=2, name="a/b")
    got = query(
        {"old": checkpoint(old), "New one": checkpoint(new)},
        'select key, n.freq::int - o.freq::int from old."a/b" o join "New one"."a/b" n using (key) order by key',
    ).rows()
    before = dict(zip(old.to_numpy().keys.tolist(), old.to_numpy().freqs.tolist(), strict=True))
    after = dict(zip(new.to_numpy().keys.tolist(), new.to_numpy().freqs.tolist(), strict=True))
    assert got == [(key, after[key] - before[key]) for key in sorted(before)]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64", "uint32"])
def test_extreme_keys(dtype: str) -> None:
    limits = np.iinfo(dtype)
    keys = np.array([limits.min, limits.max, 5], dtype)
    table = ArrayTable("emb", keys, np.zeros((3, 2), np.float32))
    assert sorted(ask("select key from emb", table)) == sorted((int(key),) for key in keys)
    assert ask(f"select key from emb where key = {limits.max}", table) == [(limits.max,)]
    assert ask("select max(key) from emb", table) == [(limits.max,)]
    assert int(ask("select sum(key) from emb", table)[0][0]) == sum(map(int, keys))


@pytest.mark.parametrize("dtype", ["float64", "float16", ml_dtypes.bfloat16, "int8", "int32", "int64", "bool"], ids=str)
def test_values_of_every_type(dtype: Any) -> None:
    values = (np.arange(12).reshape(6, 2) % 5).astype(dtype)
    table = ArrayTable("emb", np.arange(6), values, slots={"m": values[:, :1].copy()})
    expected = [(key, row.tolist()) for key, row in enumerate(values.astype(dtype if dtype != "float16" else "f4"))]
    if dtype not in ("bool", "int8", "int32", "int64"):
        expected = [(key, [float(number) for number in row]) for key, row in expected]
    assert ask("select key, value from emb", table) == expected
    assert ask("select norm from emb where key = 2", table)[0][0] == pytest.approx(float(norms(values)[2]))
    assert ask("select m[1] from emb where key = 1", table) == [(expected[1][1][0],)]


def test_rows_wider_than_an_array_of_duckdb_are_lists() -> None:
    values = np.arange(200_002, dtype=np.float32).reshape(2, 100_001)
    table = ArrayTable("emb", np.arange(2), values)
    assert ask("select value[100001], len(value) from emb order by key", table) == [
        (1e5, 100_001),
        (200_001.0, 100_001),
    ]


def test_nan_and_infinity() -> None:
    values = np.float32([[np.nan], [np.inf], [-np.inf], [1]])
    table = ArrayTable("emb", np.arange(4), values)
    assert ask("select key from emb where isnan(norm)", table) == [(0,)]
    assert ask("select key from emb where norm > 5 order by key", table) == [(0,), (1,), (2,)]  # NaN is the largest
    assert ask("select key from emb where value[1] < 0", table) == [(2,)]
    assert ask("select key from emb where norm <> 1 order by 1", table) == [(0,), (1,), (2,)]


def test_only_the_columns_of_a_query_are_read() -> None:
    for text, expected in {
        "select key from emb": Columns(),
        "select count(*) from emb": Columns(),
        "select max(freq) from emb": Columns(freqs=True),
        "select version from emb order by version limit 1": Columns(versions=True),
        "select avg(norm) from emb": Columns(values=True),
        'select "Adam.v" from emb': Columns(slots=frozenset({"Adam.v"})),
        'select "Adam.v", "Adam.m", value from emb': Columns(values=True, slots=frozenset({"Adam.m", "Adam.v"})),
        "select count(*) from emb where part = 0": Columns(),
    }.items():
        table = a_table(Counted)
        query(checkpoint(table), text).to_arrow()
        assert set(table.asked) == {expected}, text


def test_only_the_parts_of_a_query_are_read() -> None:
    for text, parts in {
        "select value from emb where part = 1": {1},
        "select value from emb where part < 1 and norm > 1": {0},
        "select value from emb where part in (1, 7)": {1},
        "select value from emb where part = 7": set(),
        "select value from emb where part = 1 or part = 0": {0, 1},
        "select value from emb where part = 1 and freq > 45": {1},
        "select value from emb where part = 1 or freq > 45": {0, 1},
        "select value from emb where (part = 1 and freq > 45) or (part = 1 and key = 7)": {1},
        "select value from emb where part <> 1": {0},
    }.items():
        table = a_table(Counted)
        query(checkpoint(table), text).to_arrow()
        assert set(table.streamed) == parts, text


def test_of_rows_that_a_filter_rules_out_no_values_are_read() -> None:
    table = a_table(Counted)
    rows = table.to_numpy()
    table.asked, table.streamed = [], {}
    got = ask("select key, value, norm from emb where freq = 7 and norm < 2.5", table)
    seven = rows.freqs == 7
    assert sorted(key for key, _, _ in got) == sorted(rows.keys[seven & (norms(rows.values) < 2.5)].tolist())
    assert table.taken == seven.sum()
    assert set(table.asked) == {Columns(freqs=True), Columns(freqs=True, values=True)}
    assert sum(table.streamed.values()) == ROWS
    assert {p: part for key, p, part in ask("select key, part, part from emb where freq = 7", table)} == {0: 0, 1: 1}


def test_where_most_rows_are_left_they_are_read_in_order() -> None:
    table = a_table(Counted)
    assert len(ask("select value from emb where freq < 49", table)) == (table.to_numpy().freqs < 49).sum()
    assert table.taken == 0


def test_a_limit_ends_the_reading() -> None:
    rows = 1_000_000
    table = Counted("emb", np.arange(rows), np.zeros((rows, 1), np.float32))
    assert ask("select key, value from emb limit 2", table) == [(0, [0.0]), (1, [0.0])]
    assert sum(table.streamed.values()) < rows / 2


def test_rows_come_in_the_order_of_a_table_of_one_part() -> None:
    rows = 300_000
    keys = np.random.default_rng(0).permutation(rows)
    table = ArrayTable("emb", keys, np.zeros((rows, 1), np.float32))
    for text in ("select key from emb", "select key from emb where key % 2 = 0"):
        got = query(checkpoint(table), text).to_arrow()["key"].to_numpy()
        np.testing.assert_array_equal(got, keys if "where" not in text else keys[keys % 2 == 0])


def test_tables_of_many_parts_come_in_the_same_order_each_time() -> None:
    table = a_table(part_rows=(1000, 0, 2000, 1, 999, 0))
    first = ask("select key, part from emb", table)
    assert sorted(first) == sorted(
        zip(table.to_numpy().keys.tolist(), np.repeat([0, 2, 3, 4], [1000, 2000, 1, 999]).tolist(), strict=True)
    )
    assert ask("select key, part from emb", table) == first


def test_what_does_not_fit_in_memory_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = 600_000
    keys = np.random.default_rng(0).permutation(rows)
    table = ArrayTable("emb", keys, np.zeros((rows, 32), np.float32))
    result = query(checkpoint(table), "select key, value from emb order by key desc", memory=96 << 20)
    at = rows
    for batch in result.batches():
        got = batch.column(0).to_numpy()
        assert (got == np.arange(at - 1, at - 1 - len(got), -1)).all()
        at -= len(got)
    assert at == 0
    assert not list(tmp_path.iterdir())


def test_what_cannot_spill_says_how_to_give_it_more() -> None:
    with pytest.raises(BadInputError, match="not enough for this query; give it more with --memory"):
        query(checkpoint(a_table()), "select list(i) from range(100000000) t(i)", memory=40 << 20).rows()


def test_a_full_disk_below_what_spills_is_no_want_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def connect(*arguments: Any, **options: Any) -> Any:
        connection = plain(*arguments, **options)
        connection.execute("set max_temp_directory_size = '1MiB'")  # by itself DuckDB takes what the disk has
        return connection

    plain = connection.connect
    monkeypatch.setattr("kvtools.sql.query.connect", connect)
    values = np.random.default_rng(0).random((100_000, 64), np.float32)
    table = ArrayTable("emb", np.arange(len(values)), values)
    with pytest.raises(OutputError, match=f"in '{tmp_path}': No space left .* by TMPDIR"):
        query(checkpoint(table), "select * from emb order by norm", memory=20 << 20).rows()


HOSTILE = {
    "drop table emb": "another statement than SELECT",
    "create table x as select 1": "another statement than SELECT",
    "insert into emb values (1)": "another statement than SELECT",
    "copy (select 1) to '{out}'": "another statement than SELECT",
    "copy emb from '{out}'": "another statement than SELECT",
    "export database '{out}'": "another statement than SELECT",
    "attach '{out}' as x": "another statement than SELECT",
    "install httpfs": "another statement than SELECT",
    "load httpfs": "another statement than SELECT",
    "set memory_limit = '1TB'": "another statement than SELECT",
    "set enable_external_access = true": "another statement than SELECT",
    "reset lock_configuration": "another statement than SELECT",
    "pragma enable_profiling": "another statement than SELECT|Parser",
    "call enable_logging()": "another statement than SELECT",
    "prepare p as select 1": "another statement than SELECT",
    "explain analyze select 1": "another statement than SELECT",
    "begin": "another statement than SELECT",
    "select 1; drop table emb": "statements|another statement",
    "select 1; select 2": "2 statements",
    "": "0 statements",
    "-- only a comment": "0 statements",
    "select * from read_text('/etc/passwd')": "read_text.* as a table",
    "select * from read_csv('/etc/passwd')": "read_csv.* as a table",
    "select * from READ_BLOB('/etc/passwd')": "as a table",
    "select * from '/etc/passwd'": "no table '/etc/passwd'",
    "select * from '/etc/hosts.csv'": "no table|disabled",
    "select * from 'https://example.com/a.parquet'": "no table|disabled|Catalog|Missing",
    "select * from glob('/etc/*')": "as a table",
    "select (select content from read_text('/etc/passwd'))": "as a table",
    "select 1 where exists (from read_text('/etc/passwd'))": "as a table",
    "with x as (from read_text('/etc/passwd')) from x": "as a table",
    "select * from query('from read_text(''/etc/passwd'')')": "as a table",
    "select * from query_table('emb')": "as a table",
    "select * from arrow_scan(1, 2, 3)": "as a table",
    "select * from pandas_scan(1)": "as a table",
    "select * from json_execute_serialized_sql('x')": "as a table",
    "select * from duckdb_settings()": "as a table",
    "select * from parquet_metadata('/etc/passwd')": "as a table",
    "select * from enable_logging(storage='file', storage_path='{out}')": "as a table",
    "select table_reader from emb": "no column",
    "select * from table_reader": "no table",
    "select ?": "parameter",
    "select * from emb where key = $1": "parameter",
    "select '\0'": "NUL",
    "select '\udcff'": "asking tables",
    "select repeat('x', 1000000000000)": "asking tables",
    "select " + "(" * 5000 + "1" + ")" * 5000: "asking tables",
    "select error('boom')": "boom",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_query_reads_the_tables_and_does_nothing_else(text: str, tmp_path: Path) -> None:
    table_reader = a_table()  # a name that a query must not find among the variables of whoever calls
    with pytest.raises((UsageError, BadInputError), match=HOSTILE[text]):
        query(checkpoint(table_reader), text.replace("{out}", str(tmp_path / "out"))).rows()
    assert not list(tmp_path.iterdir())


EVIL = [
    'x"; drop table y; --',
    "a'b",
    "select",
    "ads/emb",
    "kvtools 0",
    "Ünïcode 表",
    "a.b",
    '""',
    "a\nb",
    "a\0b",
    ";--",
    "\udcff",
    "",
]


def test_names_of_tables_and_slots_are_names_whatever_is_in_them() -> None:
    slots = {name: np.full((2, 1), number, np.float32) for number, name in enumerate(EVIL)}
    tables = [
        ArrayTable(name, np.array([number, number + 100]), np.zeros((2, 1), np.float32), slots=slots)
        for number, name in enumerate(EVIL)
    ]
    whole = checkpoint(*tables)
    for number, name in enumerate(unique_names(EVIL)):
        assert query(whole, f"select key from {written(name)} order by key").rows() == [(number,), (number + 100,)]
    columns = [column for column in query_columns(tables[0].schema) if column.kind == "slot"]
    for number, column in enumerate(columns):
        assert query(whole, f'select {written(column.name)}[1] from "a.b"').rows() == [(float(number),)] * 2
        attached = query({column.name: whole}, f'select count(*) from {written(column.name)}."ads/emb"')
        assert attached.rows() == [(2,)]


def test_names_that_differ_in_case_alone() -> None:
    tables = [ArrayTable(name, np.array([n]), np.zeros((1, 1), np.float32)) for n, name in enumerate(["user", "User"])]
    assert ask("select u.key, v.key from USER u, user_2 v", *tables) == [(0, 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "select frq from emb": "no column 'frq'; did you mean freq?",
        "select e.frq from emb e": "no column 'frq'; did you mean freq?",
        "select key from em": "no table 'em'; did you mean emb?",
        "select key from nothing_like_it": "no table 'nothing_like_it'; there is emb",
        "select Adam.m from emb": 'a column whose name has dots needs quotes: "Adam.m"',
        "select e.Adam.m from emb e": 'a column whose name has dots needs quotes: "Adam.m"',
        "select adam.M[1] from emb": "needs quotes",
        "select key from": r"syntax error.*\(at its end\)|syntax error at or near",
        "select nofunction(key) from emb": "nofunction does not exist",
        "select key from emb where key = 'x'": "Could not convert string 'x'",
        "select key * 9223372036854775807 from emb": "cast it: key::hugeint",
        "select key from old.emb": "no table 'old.emb'; did you mean emb",
    }.items(),
)
def test_names_that_there_are_not(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ask(text)


def test_names_of_checkpoints() -> None:
    whole = checkpoint(a_table())
    for name in ("main", "Temp", "pg_catalog", "a\0"):
        with pytest.raises(UsageError, match="that name is taken"):
            query({name: whole}, "select 1")
    with pytest.raises(UsageError, match="that name is taken"):
        query({"a": whole, "A": whole}, "select 1")
    with pytest.raises(UsageError, match=r"no table .emb.; did you mean old\.emb\?"):
        query({"old": whole}, "select * from emb")


@pytest.mark.parametrize(
    ("text", "meant"),
    {
        "select count(*) from ads/emb": '"ads/emb"',
        "select count(*) from ads-emb e": '"ads-emb"',
        "from a.b": '"a.b"',
        "from old.ads/emb": 'old."ads/emb"',
    }.items(),
)
def test_a_table_whose_name_needs_quotes_and_has_none(text: str, meant: str) -> None:
    tables = {name: a_table(name=name) for name in ("ads/emb", "ads-emb", "a.b", "emb")}
    with pytest.raises(UsageError) as told:
        query({"old" if "old" in text else "": Checkpoint("", "memory", tables)}, text)
    assert str(told.value).endswith(f"; did you mean {meant}?")


def test_a_list_of_tables_is_that_of_the_checkpoint() -> None:
    tables = Checkpoint("", "memory", {name: a_table(name=name) for name in ("kvtools 0", "ads/emb")})
    sources = {"": tables, 'it\'s "old".x': tables}
    for text in ("show tables", "select * from (show tables)"):
        assert query(sources, text).rows() == [("ads/emb",), ("kvtools 0",)]
    everything = {(row[1], row[2]) for row in query(sources, "show all tables").rows()}
    assert everything == {(schema, name) for schema in ("main", 'it\'s "old".x') for name in tables.tables}


def test_what_is_no_checkpoint_is_told() -> None:
    with pytest.raises(
        UsageError, match=r"attaching 'other': got 'model.ckpt', expected a checkpoint, as kvtools\.open"
    ):
        checkpoint(a_table()).sql("select 1", other="model.ckpt")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="got -1 threads, expected 1 or more"):
        checkpoint(a_table()).sql("select 1", threads=-1)
    with pytest.raises(UsageError, match="got NoneType, expected the text of a SELECT"):
        checkpoint(a_table()).sql(None)  # type: ignore[arg-type]


class Damaged(ArrayTable):
    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        yield from super().read_part(part, columns, 10, verify)
        raise CorruptFileError("reading 'x': checksum mismatch")


def test_a_damaged_file_is_told_as_what_it_is() -> None:
    with pytest.raises(CorruptFileError, match="checksum mismatch"):
        ask("select sum(freq) from emb", a_table(Damaged))


def test_tables_that_cannot_be_opened_hinder_only_who_asks_for_them() -> None:
    whole = Checkpoint("m", "memory", {"emb": a_table()}, broken={"bad": CorruptFileError("reading 'bad': cut off")})
    assert query(whole, "select count(*) from emb").rows() == [(ROWS,)]
    with pytest.raises(CorruptFileError, match="cut off"):
        query(whole, "select * from bad")


def test_tables_that_are_not_asked_for_are_not_looked_at() -> None:
    class Unwilling(ArrayTable):
        @property
        def key_dtype(self) -> Any:
            raise UnknownTableError("strings")

    whole = checkpoint(a_table(), a_table(Unwilling, "other"))
    assert query(whole, "select count(*) from emb").rows() == [(ROWS,)]
    with pytest.raises(UnknownTableError):
        query(whole, "select count(*) from other")
    assert [name for (name,) in query(checkpoint(a_table()), "show tables").rows() if "kvtools" not in name] == ["emb"]


class Endless(ArrayTable):
    """A table whose rows never end, as far as a query sees."""

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        while True:
            yield from super().read_part(part, columns, rows, verify)


@pytest.mark.parametrize("kind", [Endless, ArrayTable])
def test_an_interrupt_ends_a_query_at_once(kind: type[ArrayTable]) -> None:
    text = (
        "select sum(freq) from emb"
        if kind is Endless
        else "select count(*) from range(1000000000000) t(i) where sin(i) > 2"
    )
    result = query(checkpoint(a_table(kind)), text)
    threading.Timer(0.1, result.close).start()
    begun = time.monotonic()
    with pytest.raises(UsageError, match="ended"):
        result.to_arrow()
    result.close()
    assert time.monotonic() - begun < 30
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("kvtools-sql", "kvtools-scan"))]


def test_progress_is_told_of_all_rows() -> None:
    seen: dict[str, tuple[int, int]] = {}

    def told(table: str, done: int, total: int) -> None:
        seen[table] = done, total

    for text in (
        "select sum(freq) from emb",
        "select value from emb where freq = 3",
        "select key from emb where part = 1",
    ):
        seen.clear()
        query(checkpoint(a_table()), text, progress=told).to_arrow()
        assert seen == {"emb": (ROWS, ROWS)}


def test_what_a_filter_needs_is_never_more_than_the_filter() -> None:
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(-3, 9, 200) for name in ("c0", "c1", "c2")}
    table = pyarrow.table(columns)
    c0, c1, c2 = (pyarrow.compute.field(name) for name in columns)
    told = {
        "and": (c0 < 3) & (c1 >= 2),
        "or": (c0 == 3) | (c1 != 2),
        "part of it": (c0 < 3) & (c2 < c1),
        "either, one unknown": (c0 < 3) | (c2 < c1),
        "in": c0.isin([1, 2, -3]) & (c1 > -1),
        "in many": c0.isin(list(range(-3, 60, 2))),
        "not": ~(c0 < 3),
        "null": compute.if_else(c0.is_valid(), c0.isin([4, 5]), pyarrow.scalar(None, pyarrow.bool_())),
        "floats": (c0 < 2.5) & (c1 > 1),
        "strings": (c0 < 3) & (compute.field("c1").cast(pyarrow.string()) == "c0 == 7"),
        "beyond": c0.isin(pyarrow.array([2**63 - 1, 4])),
    }
    for name, expression in told.items():
        necessary = Necessary(expression, ["c0", "c1"])
        holds = np.zeros(200, np.bool_)
        numbered = table.append_column("n", pyarrow.array(np.arange(200)))
        holds[numbered.filter(expression)["n"].to_numpy()] = True
        for known in (["c0", "c1"], ["c0"], ["c1"], []):
            mask = necessary.mask({name: columns[name] for name in known})
            assert mask is None or (mask | ~holds).all(), (name, known)
        if necessary.exact:
            np.testing.assert_array_equal(necessary.mask(columns), holds, err_msg=name)
        assert necessary.mentioned <= set(columns)
    assert Necessary(told["and"], ["c0", "c1"]).exact and Necessary(told["null"], ["c0"]).exact
    assert not Necessary(told["part of it"], ["c0"]).exact
    assert Necessary(told["either, one unknown"], ["c0", "c1"]).names == frozenset()


def test_an_answer_that_nobody_wants_any_more_ends() -> None:
    result = query(checkpoint(a_table(Endless)), "select key from emb")
    assert next(result.batches()).num_rows
    del result
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("kvtools-sql", "kvtools-scan"))]


def test_an_answer_is_taken_by_every_library_that_takes_arrow() -> None:
    whole = checkpoint(a_table())
    text = "select key, value, freq from emb where freq > 40 order by key"
    expected = query(whole, text).to_arrow()
    assert pyarrow.table(query(whole, text)).equals(expected)
    frame = query(whole, text).to_pandas()
    assert frame["key"].tolist() == expected["key"].to_pylist()
    np.testing.assert_array_equal(frame["value"][0], expected["value"][0].as_py())
    polars = query(whole, text).to_polars()
    assert polars["value"].to_list() == expected["value"].to_pylist()
    duckdb = pytest.importorskip("duckdb")
    answer = query(whole, text)  # noqa: F841  DuckDB finds it by its name
    assert duckdb.sql("select sum(freq), count(*) from answer").fetchall() == [
        (sum(expected["freq"].to_pylist()), len(expected))
    ]
    assert len(query(whole, text)) == len(expected)


def test_an_answer_is_read_once_unless_it_is_kept() -> None:
    result = query(checkpoint(a_table()), "select key from emb order by key")
    assert repr(result).splitlines()[:3] == ["key", "-100", "-99"]
    assert repr(result).endswith("...")
    assert "<td>-100</td>" in result._repr_html_()
    assert sum(len(batch) for batch in result.batches()) == ROWS  # what was shown is not lost
    assert "read already" in repr(result)
    with pytest.raises(UsageError, match="it was read already"):
        list(result.batches())
    result = query(checkpoint(a_table()), "select key from emb")
    assert result.to_arrow().num_rows == len(result.rows()) == sum(map(len, result.batches())) == ROWS
    with query(checkpoint(a_table()), "select '<b>' as x, null as y, [1.5, 'nan'::float] as z") as result:
        assert repr(result).splitlines()[1].split() == ["<b>", "NULL", "1.5", "nan"]
        assert "&lt;b&gt;" in result._repr_html_()
