from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.migrate import write_tables

pytestmark = pytest.mark.usefixtures("tf")
Capture = pytest.CaptureFixture[str]


def test_text_and_json(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "out")
    assert main(["export", "--savedmodel", out, str(sample_path), "--clip-l2", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["ads/emb", "ads_emb", "9", "2", "216", "B", "48", "B", "4.55%"]
    assert lines[-1] == f"wrote {out}"
    again = ["export", "--savedmodel", out, str(sample_path), "--table", "user_emb", "--json"]
    assert main(again) == 1
    assert "exists already" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["path", "savedmodel", "tables", "left_out"]
    assert report["tables"][0]["rows"] == 5


@pytest.mark.thorough
def test_nothing_but_the_result_is_printed(sample_path: Path, tmp_path: Path) -> None:
    """TensorFlow's own log lines included."""
    command = [sys.executable, "-m", "kvtools.cli.main", "export", "--savedmodel", "out", str(sample_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 10


def test_warnings(save_plain, make_sample, table_tensors, tmp_path: Path, capsys: Capture) -> None:  # type: ignore[no-untyped-def]
    sample = make_sample("emb", rows=20)
    sample.values[4, 1] = np.nan
    sample.keys[15] = sample.keys[3]
    path = save_plain(tmp_path / "a", table_tensors(sample))
    assert main(["export", "--savedmodel", str(tmp_path / "out"), str(path), "--clip-abs", "100", "--json"]) == 0
    captured = capsys.readouterr()
    assert "table 'emb': 1 rows with NaN or infinity were kept" in captured.err
    assert "table 'emb': 1 rows were left out because their key is there again later" in captured.err
    assert json.loads(captured.out)["tables"][0]["cut"] == 18


def test_exported_model_is_inspected(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["export", "--savedmodel", str(tmp_path / "out"), str(sample_path)]) == 0
    capsys.readouterr()
    assert main(["inspect", "--json", str(tmp_path / "out"), "--keys", "-7"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dialect"] == "savedmodel" and report["variables"] == []
    assert [row["value"] for row in report["rows"]] == [[2, 2.125, 2.25, 2.375]]


def test_without_tensorflow(sample_path: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['tensorflow'] = sys.modules['google.protobuf'] = None\n"
        "from kvtools.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "export", "--savedmodel", "out", str(sample_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "saved_model.pb").is_file()


def test_a_snapshot(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "out.kvsnap")
    assert main(["export", "--snapshot", out, str(sample_path), "--clip-l2", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["ads/emb", "ads_emb", "9", "2", "288", "B", "64", "B", "4.55%"]
    assert lines[-1] == f"wrote {out}"
    again = ["export", "--snapshot", out, str(sample_path), "--dtype", "int8", "--json"]
    assert main(again) == 1
    assert "exists" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["path", "snapshot", "tables", "left_out"]
    assert [table["value_dtype"] for table in report["tables"]] == ["int8"] * len(report["tables"])
    capsys.readouterr()
    assert main(["get", out, "-7", "--table", "ads/emb", "--json"]) == 0
    assert "2.375" in capsys.readouterr().out
    assert main(["verify", out]) == 0


@pytest.mark.parametrize("kind", ["savedmodel", "snapshot"])
def test_what_is_left_out_is_named(sample_path: Path, tmp_path: Path, capsys: Capture, kind: str) -> None:
    slots = "optimizer slots Adam.m, Adam.v: the dialect has none"
    counters = ["frequencies: the dialect has none", "versions: the dialect has none"]
    initializer = "the initializer of new rows: the dialect does not record it"
    others = [*counters, initializer] if kind == "savedmodel" else []
    variables = "2 dense variables, 32 bytes: only tables are exported"
    assert main(["export", f"--{kind}", str(tmp_path / "a"), str(sample_path)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert said == [
        f"left out: {variables}",
        f"left out: ads/emb: {slots}",
        *(f"left out: all tables: {x}" for x in others),
    ]
    assert main(["export", f"--{kind}", str(tmp_path / "b"), str(sample_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["left_out"] == [variables]
    assert [table["left_out"] for table in report["tables"]] == [[slots, *others], others, others]
    assert main(["export", f"--{kind}", str(tmp_path / "c"), str(sample_path), "--table", "user_emb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say --savedmodel OUT or --snapshot OUT"),
        (["--savedmodel", "a", "--snapshot", "b"], "one of them"),
        (["--savedmodel", "a", "--dtype", "int2"], "got --dtype int2, expected float32"),
        (["--snapshot", "a", "--dtype", "int2"], "got --dtype int2, expected float32"),
    ],
)
def test_options_that_make_no_sense(sample_path: Path, capsys: Capture, options: list[str], message: str) -> None:
    assert main(["export", *options, str(sample_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["--savedmodel", "--snapshot"])
def test_a_threshold_that_leaves_no_row_is_a_warning(
    sample_path: Path, tmp_path: Path, capsys: Capture, kind: str
) -> None:
    out = str(tmp_path / "out.kvsnap")
    asked = ["export", kind, out, str(sample_path), "--clip-l2", "1e9", "--table", "user_emb"]
    for more in ["--dry-run"], []:
        assert main([*asked, *more]) == 0
        assert capsys.readouterr().err.count("table 'user_emb': the thresholds leave none of its 5 rows") == 1


def test_a_dry_run_needs_no_output(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["export", str(sample_path), "--clip-l2", "5", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert main(["export", str(sample_path), "--dry-run", "--keep", "2"]) == 2
    assert main(["export", str(sample_path), "--savedmodel", "--dry-run"]) == 2
    assert "got --dry-run as the output: the option before it needs a value" in capsys.readouterr().err


def test_what_is_exported_is_never_written_over(tmp_path: Path, capsys: Capture) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(__file__).parents[1] / "data" / "tfra" / "savedmodel", model)
    before = sorted(path.relative_to(model) for path in model.rglob("*"))
    for output, why in ((model, "what is exported itself"), (model / "sub", f"where '{model}' is")):
        for more in ([], ["--table", next(iter(open_checkpoint(model).tables))]):
            assert main(["export", "--savedmodel", str(output), str(model), "--force", *more]) == 1
            assert why in capsys.readouterr().err
    assert sorted(path.relative_to(model) for path in model.rglob("*")) == before


@pytest.mark.parametrize("kind", ["--savedmodel", "--snapshot"])
def test_a_dry_run_says_what_the_export_then_does(
    sample_path: Path, tmp_path: Path, capsys: Capture, kind: str
) -> None:
    out = tmp_path / "out"
    asked = ["export", kind, str(out), str(sample_path), "--budget", "200B", "--clip-abs", "4", "--json"]
    assert main([*asked, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["dry_run"] and not out.exists()
    assert main(asked) == 0
    done = json.loads(capsys.readouterr().out)
    for before, after in zip(planned["tables"], done["tables"], strict=True):
        for name in ("bytes", "failed", "lookups", "lookups_missed", "cut"):
            assert before[name] == after[name]
        assert before["kept"] == after["rows"]
    assert sum(table["bytes"] for table in done["tables"]) <= 200
    assert sum(table["failed"].get("budget", 0) for table in done["tables"]) > 0
    assert [table.rows for table in open_checkpoint(out).tables.values()] == [t["rows"] for t in done["tables"]]


@pytest.mark.parametrize("kind", ["--savedmodel", "--snapshot"])
def test_rows_of_zeros_are_left_out_unless_asked_for(
    save_plain: Any, make_sample: Any, table_tensors: Any, tmp_path: Path, capsys: Capture, kind: str
) -> None:
    sample = make_sample("emb", rows=20)
    sample.values[[3, 7]] = 0
    path = save_plain(tmp_path / "a", table_tensors(sample))
    for more, rows in ([], 18), (["--keep-zeros"], 20):
        out = tmp_path / f"out{rows}"
        assert main(["export", kind, str(out), str(path), *more]) == 0
        assert ("cut: emb: 2 fail zeros" in capsys.readouterr().out) == (rows == 18)
        kept = {int(key) for key in open_checkpoint(out).table("emb").all_keys()}
        assert kept == {int(key) for at, key in enumerate(sample.keys) if rows == 20 or at not in (3, 7)}


def save_tables(path: Path, **freqs: list[int] | None) -> Path:
    """A snapshot of a table by each name, with these frequencies or none."""
    keys, values = np.array([1, 2, 3]), np.float32([[1, 2], [3, 4], [5, 6]])
    counts = {name: None if of is None else np.array(of) for name, of in freqs.items()}
    tables = [ArrayTable(name, keys, values, freqs=of) for name, of in counts.items()]
    write_tables(tables, path, "snapshot")
    return path


@pytest.mark.parametrize("command", ["clip", "export --snapshot", "export --savedmodel"])
@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["real", "dry run"])
def test_a_budget_says_by_what_it_compares(tmp_path: Path, capsys: Capture, command: str, dry_run: list[str]) -> None:
    mixed = str(save_tables(tmp_path / "mixed.kvsnap", user=[3, 1, 2], bias=None, city=None))
    counted = str(save_tables(tmp_path / "counted.kvsnap", user=[3, 1, 2]))
    name, *kind = command.split()
    out = tmp_path / "out.kvsnap"

    def asked(source: str, *more: str) -> str:
        target = [*kind, str(out), source] if kind else [source, str(out)]
        assert main([name, *target, "--budget", "60B", *dry_run, "--force", *more]) == 0
        return capsys.readouterr().out

    without = "as there are no frequencies in bias, city; --by and --table choose otherwise"
    assert f"budget: rows were compared by l2, {without}\n" in asked(mixed)
    assert "budget: rows were compared by freq, per byte\n" in asked(counted)
    assert "budget: rows were compared by freq, per byte\n" in asked(mixed, "--table", "user")
    assert "budget: rows were compared by abs\n" in asked(mixed, "--by", "abs")
    told = json.loads(asked(mixed, "--json"))
    assert told["budget"] == {"bytes": 60, "by": "l2", "without_frequencies": ["bias", "city"]}


def test_many_tables_without_frequencies_are_counted(tmp_path: Path, capsys: Capture) -> None:
    source = save_tables(tmp_path / "a.kvsnap", user=[1, 2, 3], **{f"t{number}": None for number in range(8)})
    assert main(["clip", str(source), "--budget", "9B", "--dry-run"]) == 0
    assert "no frequencies in t0, t1, t2, t3, t4, 3 more; --by" in capsys.readouterr().out


@pytest.mark.parametrize("constant", [0.5, 0.0])
def test_rows_cut_from_a_table_with_a_default_row_are_a_warning(
    tmp_path: Path, capsys: Capture, constant: float
) -> None:
    told = {"initializer": {"kind": "constant", "a": constant}}
    table = ArrayTable("emb", np.array([1, 2]), np.float32([[0.25, 0.25], [1, 2]]), metadata=told)
    write_tables([table], tmp_path / "a.kvsnap", "snapshot")
    out = str(tmp_path / "out.kvsnap")
    asked = ["export", "--snapshot", out, str(tmp_path / "a.kvsnap"), "--force"]
    warning = "table 'emb': 1 rows were cut, and its default row is not zeros: their keys answer with it"
    for more in ["--dry-run"], []:
        assert main([*asked, "--clip-abs", "0.3", *more]) == 0
        assert (warning in capsys.readouterr().err) == (constant == 0.5)
        assert main([*asked, *more]) == 0
        assert capsys.readouterr().err == ""


def test_the_index_is_chosen(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    for index in ("hash", "perfect"):
        out = str(tmp_path / index)
        assert main(["export", "--savedmodel", out, str(sample_path), "--index", index]) == 0
        manifest = json.loads((tmp_path / index / "assets.extra" / "kvtools.json").read_text())
        assert all(("slots" in table) == (index == "perfect") for table in manifest["tables"])
    capsys.readouterr()
    assert main(["export", "--savedmodel", str(tmp_path / "out"), str(sample_path), "--index", "tree"]) == 2
    assert "got index 'tree', expected one of hash, perfect" in capsys.readouterr().err
    assert main(["export", "--snapshot", str(tmp_path / "out"), str(sample_path), "--index", "hash"]) == 2
    assert "got --index hash, which is for --savedmodel" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["--savedmodel", "--snapshot"])
def test_a_dry_run_finds_a_number_that_does_not_fit(to: str, tmp_path: Path, capsys: Capture) -> None:
    table = ArrayTable("emb", np.arange(3), np.float32([[1, 2], [7e4, 1], [0, 1]]))
    write_tables([table], str(tmp_path / "a"), "tfplugin")
    asked = ["export", str(tmp_path / "a"), to, str(tmp_path / "out"), "--dtype", "float16"]
    said = []
    for more in (["--dry-run"], []):
        assert main([*asked, *more]) == 1
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and "the row of key 1 has 70000, which would become infinite" in said[0]
    assert main([*asked, "--dry-run", "--drop-keys", _keys(tmp_path, 1)]) == 0, "it is not written"


def _keys(folder: Path, *keys: int) -> str:
    (folder / "keys.txt").write_text("".join(f"{key}\n" for key in keys))
    return str(folder / "keys.txt")
