"""`kvtools sql`: where a query comes from, the forms of its answer, and what is no query."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.migrate import write_tables

Capture = pytest.CaptureFixture[str]
TOP = 'select key, freq from "ads/emb" order by freq desc limit 2'


def said(capsys: Capture, *arguments: object, status: int = 0) -> str:
    assert main(["sql", *map(str, arguments)]) == status
    printed = capsys.readouterr()
    assert bool(printed.err) == bool(status)
    return printed.err if status else printed.out


def test_text(sample_path: Path, capsys: Capture) -> None:
    text = said(capsys, sample_path, "select key, value, freq, null as x from user_emb order by key limit 2")
    assert text == (
        "        key  value                                    freq  x\n"
        "-2147483648  1 1.125 1.25 1.375 1.5 1.625 1.75 1.875     1  NULL\n"
        "         -5  2 2.125 2.25 2.375 2.5 2.625 2.75 2.875     1  NULL\n"
    )
    assert said(capsys, sample_path, "select key from user_emb where key = 77") == "key\n"
    lines = said(capsys, sample_path, "select i, 'x' as t from range(25000) t(i)").splitlines()
    assert lines.count("    i  t") + lines.count("i  t") >= 1 and lines[-1].split() == ["24999", "x"]
    assert sum(line.split()[0].isdecimal() for line in lines) == 25000


def test_json(sample_path: Path, capsys: Capture) -> None:
    answer = json.loads(said(capsys, sample_path, TOP, "--json"))
    assert answer["rows"] == [{"key": 9223372036854775807, "freq": 11}, {"key": 1099511627776, "freq": 10}]
    assert [column["name"] for column in answer["columns"]] == ["key", "freq"]
    assert json.loads(said(capsys, sample_path, "select 1 as a where false", "--json"))["rows"] == []
    lines = said(capsys, sample_path, TOP, "--json-lines", "--string-keys").splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["9223372036854775807", "1099511627776"]
    odd = "select 'nan'::float a, [1, 'inf'::float] b, sum(key)::hugeint c, true d, date '2025-01-02' e, key, key"
    odd += " from user_emb group by all"
    first = json.loads(said(capsys, sample_path, f"{odd} order by key limit 1", "--json-lines"))
    assert first == {
        "a": "NaN", "b": [1, "Infinity"], "c": -2147483648, "d": True, "e": "2025-01-02",
        "key": -2147483648, "key_2": -2147483648,
    }  # fmt: skip


def test_csv(sample_path: Path, capsys: Capture) -> None:
    text = said(capsys, sample_path, "select key, value from user_emb order by key limit 1", "--csv")
    assert text.splitlines() == [
        "key," + ",".join(f"value.{number}" for number in range(8)),
        "-2147483648,1.0,1.125,1.25,1.375,1.5,1.625,1.75,1.875",
    ]
    odd = "select 'a,\"b' as t, null as n, 0.1::float as f, '-inf'::double as i, true as b, [1, 2] as l,"
    odd += " case when true then null else [1, 2]::int[2] end as v"
    rows = list(csv.reader(io.StringIO(said(capsys, sample_path, odd, "--csv"))))
    assert rows == [
        ["t", "n", "f", "i", "b", "l", "v.0", "v.1"],
        ['a,"b', "", "0.1", "-Infinity", "true", "[1, 2]", "", ""],
    ]


def test_files(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    query = 'select key, value, "Adam.m", norm from "ads/emb" order by key'
    for name in ("a.parquet", "a.csv", "a.jsonl", "a.ndjson"):
        out = tmp_path / "new" / name
        assert said(capsys, sample_path, query, "--output", out) == f"wrote 11 rows to {out}\n"
    table = pyarrow.parquet.read_table(tmp_path / "new" / "a.parquet")
    assert table.column_names == ["key", "value", "Adam.m", "norm"]
    assert table["value"].type.list_size == 4
    rows = [json.loads(line) for line in (tmp_path / "new" / "a.jsonl").read_text().splitlines()]
    assert rows == table.to_pylist()
    cells = list(csv.DictReader((tmp_path / "new" / "a.csv").open()))
    assert [float(cell["Adam.m.3"]) for cell in cells] == [row["Adam.m"][3] for row in rows]
    assert "exists; name another place" in said(capsys, sample_path, query, "--output", out, status=1)
    before = out.read_bytes()
    assert said(capsys, sample_path, "select 1 as a", "--output", out, "--force", "--dry-run").startswith(
        "would write 1"
    )
    assert out.read_bytes() == before
    assert said(capsys, sample_path, "select 1 as a", "--output", out, "--force")
    assert out.read_text() == '{"a": 1}\n'


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl"])
def test_a_query_that_fails_leaves_no_file(sample_path: Path, tmp_path: Path, capsys: Capture, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    failing = "select case when i > 300000 then error('late')::int else i::int end as x from range(400000) t(i)"
    assert "late" in said(capsys, sample_path, failing, "--output", out / name, status=2)
    assert not list(out.iterdir())


def test_several_checkpoints(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "other.ckpt"
    write_tables([ArrayTable("more", np.array([0, 1]), np.float32([[1], [2]]))], other, "tfplugin")
    assert said(capsys, sample_path, other, "select count(*) as n from user_emb join more using (key)") == "n\n1\n"
    attached = ["--attach", f"old={sample_path}", "--attach", f"new={other}"]
    assert said(capsys, *attached, "select count(*) as n from old.user_emb join new.more using (key)") == "n\n1\n"
    assert "both" in said(capsys, sample_path, sample_path, "select 1", status=2)
    for wrong in ("old", "=x", "old="):
        assert "expected NAME=PATH" in said(capsys, sample_path, "--attach", wrong, "select 1", status=2)
    assert "twice" in said(capsys, *attached, "--attach", f"old={other}", "select 1", status=2)
    assert "taken" in said(capsys, sample_path, "--attach", f"main={other}", "select 1", status=2)


def test_a_query_from_a_file(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "query.sql"
    file.write_text("\ufeff-- how many\nselect count(*) as n\nfrom user_emb;\n", encoding="utf-8")
    assert said(capsys, sample_path, "--file", file) == "n\n5\n"
    assert "No such file" in said(capsys, sample_path, "--file", tmp_path / "none.sql", status=2)
    file.write_bytes(b"select '\xff'")
    assert "no UTF-8" in said(capsys, sample_path, "--file", file, status=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got nothing, expected a PATH and a query"),
        (["{sample}"], "alone, expected a PATH and a query"),
        (["{sample}", "select key from usr_emb"], "did you mean user_emb?"),
        (["{sample}", "select Adam.m from \"ads/emb\""], 'needs quotes: "Adam.m"'),
        (["{sample}", "select 1", "--json", "--csv"], "expected one"),
        (["{sample}", "select 1", "--output", "a.txt"], "its name does not tell the format"),
        (["{sample}", "select 1", "--output", "-"], "expected a file"),
        (["{sample}", "select 1", "--threads", "0"], "expected 1 or more"),
        (["{sample}", "select 1", "--dry-run"], "nothing is written"),
        (["{sample}", "copy (select 1) to 'x'"], "nothing else is run"),
    ],
)  # fmt: skip
def test_what_is_no_query(sample_path: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    told = said(capsys, *[word.replace("{sample}", str(sample_path)) for word in arguments], status=2)
    assert message in told and len(told.splitlines()) == 1


def test_a_damaged_table_is_told_of_when_it_is_asked_for(sample_path: Path, capsys: Capture) -> None:
    data = next(sample_path.glob("*.data-*"))
    bytes_of = np.float32([9, 9.125, 9.25, 9.375]).tobytes()
    assert data.read_bytes().count(bytes_of) == 1
    data.write_bytes(data.read_bytes().replace(bytes_of, bytes_of[::-1]))
    assert said(capsys, sample_path, 'select count(*) as n from "ads/emb"').split() == ["n", "11"]
    assert said(capsys, sample_path, "select count(*) as n from user_emb where norm > 0").split() == ["n", "5"]
    assert "checksum mismatch" in said(capsys, sample_path, 'select sum(value[1]) from "ads/emb"', status=1)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once(sample_path: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out.csv"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtools.cli.main", "sql", str(sample_path), "--output", str(out),
         "select i from range(1000000000000) t(i) where sin(i) > 2"],
        stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    while not list(tmp_path.glob(".out.csv.kvtools-*")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)  # the query itself would take an hour
    assert process.returncode == 128 + number
    assert error.strip() in ("kvtools: interrupted", "kvtools: terminated")
    assert [path.name for path in tmp_path.iterdir()] == ["sample"]


def test_string_keys_makes_strings_of_all_integers_that_javascript_rounds(
    sample_path: Path, tmp_path: Path, capsys: Capture
) -> None:
    large = 9223372036854775807
    text = (
        "select key as k, max(key) m, sum(key) s, [key, null] l, {'a': key} st, map {key: key} mp, null::bigint n,"
        " 3::int i, 0.5 d, 'x' t, any_value(part) part, 2::uhugeint u"
        f' from "ads/emb" where key = {large} group by key'
    )
    wanted = {
        "k": str(large), "m": str(large), "s": str(large), "l": [str(large), None], "st": {"a": str(large)},
        "mp": [[str(large), str(large)]], "n": None, "i": 3, "d": 0.5, "t": "x", "part": 0, "u": "2",
    }  # fmt: skip
    line = json.loads(said(capsys, sample_path, text, "--json-lines", "--string-keys"))
    assert line == {**wanted, "part": line["part"]} and isinstance(line["part"], int)
    assert json.loads(said(capsys, sample_path, text, "--json", "--string-keys"))["rows"] == [line]
    said(capsys, sample_path, text, "--output", tmp_path / "o.jsonl", "--string-keys")
    assert json.loads((tmp_path / "o.jsonl").read_text()) == line
    assert json.loads(said(capsys, sample_path, text, "--json-lines"))["k"] == large


def test_a_table_named_without_its_quotes(sample_path: Path, capsys: Capture) -> None:
    error = said(capsys, sample_path, "select count(*) from ads/emb", status=2)
    assert error.endswith('did you mean "ads/emb"?\n')
