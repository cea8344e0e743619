"""`kvtools advise` and `simulate` as they are called: what they write, their JSON, and bad usage."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from sample_folder import lay_out

from kvtools.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lay_out(tmp_path, "model.ckpt-100 policy.toml ids.parquet ids.npy rank:score")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: Capture, line: str, status: int = 0) -> dict:
    assert main([*line.split(), "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("budget", ["", " --budget 700B"])
def test_what_advice_tells_is_what_its_command_does(folder: Path, capsys: Capture, budget: str) -> None:
    advice = told(capsys, f"advise model.ckpt-100 --max-loss 0.03 --output advised.toml{budget}")
    assert advice["over_budget"] == bool(budget) and advice["bytes_saved"] > 0
    command = advice["command"].replace("OUT", "out")
    assert command.startswith("kvtools export --savedmodel out model.ckpt-100 --policy advised.toml")
    exported = {table["name"]: table for table in told(capsys, command.removeprefix("kvtools "))["tables"]}
    for table in advice["tables"]:
        export = exported[table["table"]]
        assert (table["kept"], table["bytes_after"], table["bytes_saved"]) == (
            export["rows"],
            export["bytes"],
            export["bytes_saved"],
        )
        assert table["lookups_missed"] == export["lookups_missed"]
        assert {measure["of"] for measure in table["measures"]} == {"rows", "types", "training"}
    advice = told(capsys, f"advise model.ckpt-100 --for training --output advised.toml --force{budget}")
    clipped = told(capsys, advice["command"].removeprefix("kvtools ").replace("OUT", "out.ckpt"))["clipped"]
    assert {table["table"]: table["bytes_after"] for table in advice["tables"]} == {
        table["table"]: table["bytes"] for table in clipped
    }


def test_advice_on_a_whole_model_is_what_its_export_does(capsys: Capture) -> None:
    model = Path(__file__).parents[1] / "data" / "tfra" / "savedmodel"
    advice = told(capsys, f"advise {model} --output advised.toml --max-error 0.001")
    assert advice["whole_model"] and advice["left_out"] == []
    (export,) = told(capsys, f"export --savedmodel out {model} --policy advised.toml")["tables"]
    (table,) = advice["tables"]
    assert (table["kept"], table["bytes_after"], table["dtype"]) == (export["rows"], export["bytes"], "float16")


def test_auc_of_a_function_of_the_working_folder(capsys: Capture) -> None:
    advice = told(capsys, "advise model.ckpt-100 --log ids.parquet --labels clicked --scorer rank:score")
    assert 0.3 < advice["auc"]["before"] < 0.7 and 0.3 < advice["auc"]["after"] < 0.7


def test_a_course_as_csv_and_json(folder: Path, capsys: Capture) -> None:
    line = "simulate policy.toml ids.parquet --batch-size 10 --dim 4 --slots 1 --csv course.csv"
    (table,) = told(capsys, line)["tables"]
    with (folder / "course.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(table["moments"]) == 50
    assert sum(int(row["lookups"]) for row in rows) == table["lookups"] == 500
    assert [int(row["rows"]) for row in rows] == [moment["rows"] for moment in table["moments"]]
    assert int(rows[-1]["memory_bytes"]) == table["memory_bytes"] > table["rows"] * 32
    assert main(line.split()) == 1
    assert "course.csv' exists" in capsys.readouterr().err
    assert main([*line.split(), "--force"]) == 0


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("advise model.ckpt-100 --for fun", 2, "got --for fun, expected serving or training"),
        ("advise model.ckpt-100 --labels clicked", 2, "--labels and --scorer go together"),
        ("advise model.ckpt-100 --column a=b", 2, "give it with --log"),
        ("advise model.ckpt-100 --scorer dots --labels x --log ids.parquet", 2, "expected dot or module:function"),
        ("advise model.ckpt-100 --log gone.parquet", 1, "there is no such file"),
        ("advise model.ckpt-100 --budget much", 2, "got --budget 'much'"),
        ("advise model.ckpt-100 --output policy.toml", 1, "policy.toml' exists"),
        ("simulate gone.toml ids.npy", 1, "reading the policy 'gone.toml'"),
        ("simulate policy.toml ids.npy --dim 0", 2, "got --dim 0"),
        ("simulate policy.toml ids.npy --dim 4 --like model.ckpt-100", 2, "got --like and --dim"),
        ("simulate policy.toml ids.npy --time-column when", 2, "it has no column 'when' of times"),
        ("simulate policy.toml ids.parquet --column clicked=user_emb", 2, "column 'clicked' holds bool"),
        ("simulate policy.toml floats.npy", 2, "column 'ids' holds floats"),
    ],
)
def test_bad_usage_is_told(folder: Path, capsys: Capture, line: str, status: int, message: str) -> None:
    np.save(folder / "floats.npy", np.ones(3))
    assert main(line.split()) == status
    assert message in capsys.readouterr().err


def test_a_name_of_a_policy_that_no_table_has_is_warned_of(folder: Path, capsys: Capture) -> None:
    text = (folder / "policy.toml").read_text()
    (folder / "both.toml").write_text(text + '\n[[tables]]\nname = "usr_emb"\nmax-capacity = 5\n')
    assert main(["simulate", "both.toml", "ids.parquet", "--like", "model.ckpt-100"]) == 0
    out, err = capsys.readouterr()
    assert "'usr_emb' in 'both.toml' matches no table" in err
    assert out.splitlines()[0].split()[-1] == "memory"


def test_a_policy_of_nothing_to_cut_is_one_that_clip_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = Path(__file__).parent.parent / "data" / "sample"
    (tmp_path / "mine.toml").write_text('[[tables]]\nname = "user_emb"\nadmission = { count = 3 }\ndtype = "int8"\n')
    policy = tmp_path / "p.toml"
    for more in ([], ["--table", "empty_emb"]):  # admission at most; nothing at all
        line = [
            "advise",
            str(sample),
            "--for",
            "training",
            "--max-loss",
            "0",
            "--output",
            str(policy),
            "--force",
            *more,
        ]
        assert main(line) == 0
        for number, file in enumerate((policy, tmp_path / "mine.toml")):
            assert main(["clip", str(sample), str(tmp_path / str(number)), "--policy", str(file), "--force"]) == 0
            told = capsys.readouterr().out
            assert f"note: '{file}' says of nothing that it is to be cut" in " ".join(told.split())
            assert main(["diff", str(sample), str(tmp_path / str(number))]) == 0
            capsys.readouterr()
    assert policy.read_text().endswith("\ntables = []\n")
