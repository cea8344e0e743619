"""Spark, DuckDB and Polars read the Parquet folders that kvtools writes, and kvtools reads what they write back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtools
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.migrate import write_tables

ROWS, DIM = 300, 4
KEYS = np.concatenate([[-(2**63), 2**63 - 1], np.arange(ROWS - 2) * 2**40 - 2**45]).astype(np.int64)
FREQS = np.concatenate([[2**32 - 1, 0], np.arange(ROWS - 2)]).astype(np.uint32)


@pytest.fixture(scope="module")
def table() -> TableReader:
    rng = np.random.default_rng(0)
    return kvtools.table_from_arrays(
        "ads/emb",
        KEYS,
        rng.normal(size=(ROWS, DIM)).astype(np.float32),
        slots={
            "Adam.m": rng.normal(size=(ROWS, DIM)).astype(np.float32),
            "beta": rng.normal(size=(ROWS, 1)).astype(np.float32),
        },
        freqs=FREQS,
        versions=np.arange(ROWS) + 2**40,
        version_unit="steps",
        parts=3,
        extras={"initial_values": np.ones((5, DIM), np.float32)},
    )


@pytest.fixture(scope="module")
def folder(table: TableReader, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pyarrow")
    path = tmp_path_factory.mktemp("parquet") / "tables"
    write_tables([table], path, "parquet")
    assert len(list((path / "ads%2Femb").glob("part-*.parquet"))) == 3
    return path / "ads%2Femb"


def by_key(table: TableReader) -> dict[int, tuple[Any, ...]]:
    """All rows, as another program would have them: plain numbers and lists, by key."""
    rows = table.to_numpy()
    columns = [rows.values, *rows.slots.values(), rows.freqs, rows.versions]
    return dict(zip(rows.keys.tolist(), zip(*(column.tolist() for column in columns), strict=True), strict=True))


COLUMNS = ["key", "value", "slot_Adam.m", "slot_beta", "freq", "version"]


def check_back(path: Path, table: TableReader, wanted: set[int]) -> None:
    """Check that a folder that another program wrote has these rows, told by the names of its columns."""
    checkpoint = open_checkpoint(path)
    assert checkpoint.dialect == "parquet"
    (back,) = checkpoint.tables.values()
    assert (back.slots, back.dim) == (("Adam.m", "beta"), DIM)
    expected = by_key(table)
    assert by_key(back) == {key: row for key, row in expected.items() if key in wanted}


def test_duckdb(folder: Path, table: TableReader, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        columns = ", ".join(f'"{column}"' for column in COLUMNS)
        found = connection.sql(f"SELECT {columns} FROM '{folder}/*.parquet'").fetchall()
        assert {key: tuple(map(_plain, row)) for key, *row in found} == by_key(table)
        (norm,) = connection.sql(
            f"SELECT max(sqrt(list_inner_product(value, value))) FROM '{folder}/*.parquet' WHERE freq > 100"
        ).fetchall()[0]
        rows = table.to_numpy()
        assert norm == pytest.approx(np.linalg.norm(rows.values[rows.freqs > 100], axis=1).max())
        out = tmp_path / "out"
        connection.sql(
            f"COPY (SELECT *, key % 3 AS day FROM '{folder}/*.parquet' WHERE freq > 100)"
            f" TO '{out}' (FORMAT parquet, PARTITION_BY (day))"
        )
    assert len(list(out.glob("day=*"))) > 1
    check_back(out, table, set(KEYS[FREQS > 100].tolist()))


def test_polars(folder: Path, table: TableReader, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.scan_parquet(f"{folder}/*.parquet").select(COLUMNS)
    found = frame.collect().rows()
    assert {key: tuple(map(_plain, row)) for key, *row in found} == by_key(table)
    (tmp_path / "out").mkdir()
    frame.filter(polars.col("freq") > 100).collect().write_parquet(tmp_path / "out" / "part-0.parquet")
    check_back(tmp_path / "out", table, set(KEYS[FREQS > 100].tolist()))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """A Spark of this process alone; `make spark` installs it."""
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed: `make spark` installs it")
    if not shutil.which("java") and not os.environ.get("JAVA_HOME"):
        pytest.skip("Spark needs Java, and there is none: install a JDK 17 or later")
    builder = sql.SparkSession.builder.master("local[1]").appName("kvtools")
    for option, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(option, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.mark.thorough
class TestSpark:
    """Spark, on this machine."""

    def test_reads_keys_values_slots_and_counters(self, spark: Any, folder: Path, table: TableReader) -> None:
        frame = spark.read.parquet(str(folder))
        assert {field.name: field.dataType.simpleString() for field in frame.schema.fields} == {
            "key": "bigint",
            "value": "array<float>",
            "slot_Adam.m": "array<float>",
            "slot_beta": "array<float>",
            "freq": "bigint",
            "version": "bigint",
        }
        found = {row["key"]: tuple(row[column] for column in COLUMNS[1:]) for row in frame.collect()}
        assert found == by_key(table)
        assert frame.filter("freq > 100").count() == int((FREQS > 100).sum())
        assert frame.filter(f"key = {KEYS[5]}").select("`slot_Adam.m`").count() == 1

    def test_what_it_writes_is_read(self, spark: Any, folder: Path, table: TableReader, tmp_path: Path) -> None:
        frame = spark.read.parquet(str(folder)).filter("freq > 100")
        frame.repartition(3).write.parquet(str(tmp_path / "plain"))
        assert (tmp_path / "plain" / "_SUCCESS").is_file()
        wanted = set(KEYS[FREQS > 100].tolist())
        check_back(tmp_path / "plain", table, wanted)
        frame.selectExpr("*", "pmod(key, 3) AS day").write.partitionBy("day").parquet(str(tmp_path / "by_day"))
        assert len(list((tmp_path / "by_day").glob("day=*"))) == 3
        check_back(tmp_path / "by_day", table, wanted)

    def test_a_whole_checkpoint_below_one_folder(self, spark: Any, folder: Path, table: TableReader) -> None:
        frame = (
            spark.read.option("recursiveFileLookup", "true")
            .option("pathGlobFilter", "part-*")
            .parquet(str(folder.parent))
        )
        assert frame.count() == table.rows
