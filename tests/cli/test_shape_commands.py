"""clip, cast, reshard, merge, split and rename from the command line."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.schema import row_bytes

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: Capture, *arguments: object) -> Any:
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, ""), err
    return json.loads(out)


def test_clip(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    status, out, err = run(capsys, "clip", sample_path, tmp_path / "b", "--max-abs", 5, "--min-freq", 8)
    assert (status, err) == (0, "")
    assert out.splitlines()[:6] == [
        "table      rows  cut  kept  bytes kept  bytes saved  lookups missed",
        "ads/emb      11    7     4       256 B        448 B          42.42%",
        "empty_emb     0    0     0         0 B          0 B",
        "user_emb      5    5     0         0 B        140 B         100.00%",
        "3 tables, 16 rows, 12 cut, 588 B saved",
        "cut: ads/emb: 4 fail max-abs, 7 fail min-freq; a row may fail several",
    ]
    assert out.endswith(f"wrote {tmp_path / 'b'} (tfplugin)\n") and "nothing left out" not in out
    assert sorted(open_checkpoint(tmp_path / "b").table("ads/emb").all_keys()) == [5, 42, 2**40, 2**63 - 1]


def test_clip_dry_run_needs_no_output(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    before = sorted(path.name for path in sample_path.iterdir())
    report = run_json(capsys, "clip", sample_path, "--top-k", 3, "--by", "l2", "--dry-run")
    assert report["dry_run"] and [table["kept"] for table in report["clipped"]] == [3, 0, 3]
    assert report["clipped"][0]["failed"] == {"top-k": 8} and report["clipped"][0]["bytes_saved"] == 512
    status, out, _ = run(capsys, "clip", sample_path, "--l2", 1, "--dry-run")
    assert status == 0 and out.endswith("nothing was written\n")
    assert sorted(path.name for path in sample_path.iterdir()) == before


def test_clip_by_a_policy_within_a_budget(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[[tables]]\nname = "ads/*"\nmin-freq = 8\n[[tables]]\nname = "itm_*"\nmin-freq = 1\n')
    status, out, err = run(capsys, "clip", sample_path, tmp_path / "b", "--policy", policy, "--budget", "300B")
    assert status == 0 and "4 fail budget" in out
    assert err == f"kvtools: warning: 'itm_*' in '{policy}' matches no table; see `kvtools inspect`\n"
    written = open_checkpoint(tmp_path / "b")
    assert sum(table.rows * row_bytes(table.schema) for table in written.tables.values()) <= 300
    assert [table.rows for table in written.tables.values()] == [4, 0, 1]

    status, _, err = run(capsys, "clip", sample_path, "--policy", policy, "--min-freq", 3, "--dry-run")
    assert status == 2 and "got --policy and thresholds beside it" in err
    policy.write_text("budget = 5")
    status, _, err = run(capsys, "clip", sample_path, "--policy", policy, "--budget", 7, "--dry-run")
    assert status == 2 and "expected one of them" in err
    status, _, err = run(capsys, "clip", sample_path, "--budget", "lots", "--dry-run")
    assert status == 2 and "got --budget 'lots'" in err


def test_clip_by_age_and_keys(
    sample_path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rows of ads/emb were written 1,700,000,000 to 010 seconds after 1970: 2023-11-14T22:13:20 and some.
    at = "2023-11-14T22:13:26"
    report = run_json(capsys, "clip", sample_path, "--table", "ads/emb", "--older-than", "0s", "--now", at, "--dry-run")
    assert report["clipped"][0]["failed"] == {"older-than": 6}
    report = run_json(capsys, "clip", sample_path, "--older-than", "3s", "--now", 1_700_000_006, "--dry-run")
    assert [table["cut"] for table in report["clipped"]] == [3, 0, 0]
    assert report["clipped"][2]["undated"] == 5
    steps = ["--older-than", 4, "--version-unit", "steps", "--table", "ads/emb"]
    assert run_json(capsys, "clip", sample_path, *steps, "--dry-run")["clipped"][0]["kept"] == 5
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"-1\n5\n")))
    run_json(capsys, "clip", sample_path, tmp_path / "b", "--drop-keys-file", "-")
    assert open_checkpoint(tmp_path / "b").table("ads/emb").rows == 9
    np.save(tmp_path / "keys.npy", np.array([0, 9]))
    run_json(capsys, "clip", sample_path, tmp_path / "b", "--keys-file", tmp_path / "keys.npy", "--force")
    assert open_checkpoint(tmp_path / "b").table("user_emb").all_keys().tolist() == [0, 9]


def test_cast(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    status, out, _ = run(capsys, "cast", sample_path, tmp_path / "b", "--to-value-dtype", "float16")
    assert status == 0
    assert "ads/emb   Adam.v  float32 to float16               0                0            0\n" in out
    report = run_json(
        capsys, "cast", sample_path, tmp_path / "b", "--to-key-dtype", "int64", "--table", "user_emb", "--force"
    )
    assert report["casts"] == {"user_emb": []}
    assert open_checkpoint(tmp_path / "b").table("user_emb").schema.key_dtype == "int64"


def test_reshard(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    status, out, _ = run(capsys, "reshard", sample_path, tmp_path / "b", "--parts", 2, "--table", "ads/emb")
    assert status == 0
    assert out.splitlines()[:2] == ["table    largest/mean  rows per part", "ads/emb         1.091  5 6"]
    report = run_json(capsys, "reshard", sample_path, tmp_path / "b", "--parts", 5, "--force")
    assert report["tables"][0]["part_rows"] == [2, 2, 5, 1, 1] and report["balance"]["ads/emb"] == 2.2727


def test_merge_and_split(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    report = run_json(capsys, "split", sample_path, tmp_path / "{}.ckpt", "--by", "mod:2")
    assert [Path(one["output"]).name for one in report["outputs"]] == ["mod-0-of-2.ckpt", "mod-1-of-2.ckpt"]
    assert (report["variables_left_out"], report["lossless"]) == (2, False)
    pieces = [one["output"] for one in report["outputs"]]
    report = run_json(capsys, "merge", *pieces, tmp_path / "whole", "--on-conflict", "error")
    assert [(one["table"], one["rows"], one["conflicts"]) for one in report["merged"]] == [
        ("ads/emb", 11, 0),
        ("empty_emb", 0, 0),
        ("user_emb", 5, 0),
    ]
    status, out, _ = run(capsys, "merge", sample_path, sample_path, tmp_path / "twice", "--on-conflict", "sum")
    assert status == 0
    assert "ads/emb             2         22    11               11         0             0          0\n" in out
    (tmp_path / "keys").write_text("42\n")
    status, out, _ = run(capsys, "split", sample_path, tmp_path / "by", "--keys-file", tmp_path / "keys")
    assert status == 0 and out.endswith("left out: 2 dense variables; no piece has dense variables\n")
    assert open_checkpoint(tmp_path / "by" / "listed").table("ads/emb").all_keys().tolist() == [42]


def test_rename(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    status, out, _ = run(
        capsys, "rename", sample_path, tmp_path / "b", "--table", "ads/emb=a=b", "--slot", "Adam.m=m", "--regex",
        "--variable", r"dense/(.*)=top/\1",
    )  # fmt: skip
    assert status == 0
    assert out.splitlines()[:3] == [
        "table ads/emb -> a=b",
        "slot Adam.m -> m",
        "variable dense/kernel -> top/kernel",
    ]
    report = run_json(capsys, "rename", tmp_path / "b", tmp_path / "b", "--table", "a=b=ads/emb", "--force")
    assert report["renamed"] == {"table a=b": "ads/emb"}


@pytest.mark.parametrize("command", ["clip", "cast", "reshard", "merge", "rename"])
def test_the_target_dialect_can_be_chosen(sample_path: Path, tmp_path: Path, capsys: Capture, command: str) -> None:
    more = {
        "clip": ["--l2", 1],
        "cast": ["--to-value-dtype", "float32"],
        "reshard": ["--parts", 1],
        "merge": [],
        "rename": ["--add-prefix", "x/"],
    }[command]
    sources = [sample_path] * (2 if command == "merge" else 1)
    status, _, err = run(capsys, command, *sources, tmp_path / "b", *more, "--to", "tensorflow")
    assert status == 2 and "does not write it; choose --to from" in err
    report = run_json(capsys, command, *sources, tmp_path / "b.h5", *more, "--to", "hdf5", "--memory", "64MiB")
    assert report["dialect"] == "hdf5"
    assert open_checkpoint(tmp_path / "b.h5").dialect == "hdf5"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("clip SRC OUT", 2, "nothing says what to cut"),
        ("clip SRC --l2 1", 2, "nothing says where to write"),
        ("clip SRC OUT --l2 -1", 2, "expected a finite number"),
        ("clip SRC OUT --top-k 5", 2, "--top-k K and --by"),
        ("clip SRC OUT --top-k 5 --by size", 2, "expected freq, l2, abs or version"),
        ("clip SRC OUT --older-than 30x", 2, "got --older-than '30x'"),
        ("clip SRC OUT --older-than 30", 2, "its versions count seconds"),
        ("clip SRC OUT --older-than 3d --now soon", 2, "got --now 'soon', expected a date"),
        ("clip SRC OUT --now 3 --l2 1", 2, "--now without --older-than"),
        ("clip SRC OUT --older-than 3 --version-unit weeks", 2, "got --version-unit 'weeks'"),
        ("clip SRC OUT --keys-file - --drop-keys-file -", 2, "expected one of them"),
        ("clip SRC OUT --keys-file none", 1, "reading keys from 'none': No such file"),
        ("clip SRC SRC --l2 1", 1, "exists"),
        ("cast SRC OUT", 2, "nothing says to which type"),
        ("cast SRC OUT --to-key-dtype int32", 1, "does not fit int32"),
        ("reshard SRC OUT", 2, "--parts"),
        ("reshard SRC OUT --parts 0", 2, "expected 1 or more"),
        ("merge SRC", 2, "expected the checkpoints and then OUT"),
        ("merge SRC OUT", 2, "got one checkpoint"),
        ("merge SRC SRC OUT --on-conflict best", 2, "got --on-conflict 'best'"),
        ("merge SRC SRC OUT --slots all", 2, "got --slots 'all'"),
        ("merge SRC OUT --into x", 1, "such tables cannot be merged"),
        ("split SRC OUT", 2, "got 0 of --by, --rows, --keys-file and --where, expected one"),
        ("split SRC OUT --by half", 2, "expected table, part or mod:N"),
        ("split SRC OUT --by mod:0", 2, "expected 1 or more"),
        ("rename SRC OUT", 2, "no name would change"),
        ("rename SRC OUT --table x", 2, "expected OLD=NEW"),
        ("rename SRC OUT --table x=y", 1, "no table is called 'x'"),
    ],
)
def test_refused(sample_path: Path, tmp_path: Path, capsys: Capture, arguments: str, status: int, message: str) -> None:
    prefix = sample_path / "model.ckpt-7"
    words = [{"SRC": str(prefix), "OUT": str(tmp_path / "out" / "b")}.get(word, word) for word in arguments.split()]
    (tmp_path / "out").mkdir()
    code, out, err = run(capsys, *words)
    assert (code, out) == (status, "") or "rows" in out
    assert code == status and message in err and len(err.splitlines()) == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_the_rule_by_which_parts_own_keys_can_be_chosen(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = [
        "reshard",
        str(sample_path),
        str(tmp_path / "out"),
        "--parts",
        "3",
        "--table",
        "ads/emb",
        "--to",
        "tfra",
    ]
    assert main([*arguments, "--partition", "low_31_bits"]) == 0
    assert open_checkpoint(tmp_path / "out").table("ads/emb").schema.partition == "low_31_bits"
    assert main([*arguments, "--partition", "mod_7"]) == 2
    assert "no partition rule 'mod_7'; expected one of floor_mod" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["clip", "{}", "{}", "--max-abs", "0"],
        ["cast", "{}", "{}", "--to-value-dtype", "float64", "--table", "ads/emb"],
        ["reshard", "{}", "{}", "--parts", "2"],
        ["rename", "{}", "{}", "--table", "user_emb=users"],
        ["merge", "{}", "{}", "{}"],
    ],
    ids=lambda command: command[0],
)
def test_a_folder_of_bundles_is_its_latest_when_it_is_written_in_place(
    sample_path: Path, capsys: Capture, command: list[str]
) -> None:
    arguments = [word.format(sample_path) for word in command]
    files = sorted(file.name for file in sample_path.iterdir())
    status, _, err = run(capsys, *arguments)
    assert (status, "exists; name another place, or add --force" in err) == (1, True), err
    status, out, err = run(capsys, *arguments, "--force")
    assert (status, err) == (0, "")
    assert out.endswith(f"wrote {sample_path / 'model.ckpt-7'} (tfplugin)\n")
    assert sorted(file.name for file in sample_path.iterdir()) == files
    assert open_checkpoint(sample_path).table("ads/emb").rows == 11


def test_another_folder_of_bundles_is_left_alone(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "other"
    shutil.copytree(sample_path, other)
    status, _, err = run(capsys, "clip", sample_path, other, "--max-abs", "0", "--force")
    assert status == 1 and "is a folder, expected a new file" in err
