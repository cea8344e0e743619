from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvtools.cli.main import main

Capture = pytest.CaptureFixture[str]


def damage(sample_path: Path) -> None:
    data = next(sample_path.glob("*.data-*"))
    data.write_bytes(data.read_bytes().replace(b"\x07", b"\x08", 1))


def test_sound(sample_path: Path, capsys: Capture) -> None:
    assert main(["verify", str(sample_path)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.splitlines()[-1] == "3 tables, 16 rows, 2 dense variables, 49 checks, 0 errors, 0 warnings"


def test_damaged(sample_path: Path, capsys: Capture) -> None:
    damage(sample_path)
    assert main(["verify", str(sample_path)]) == 3
    output = capsys.readouterr()
    assert "checksum mismatch" in output.out and "[damaged]" in output.out
    assert output.err.startswith(f"kvtools: verifying '{sample_path}/model.ckpt-7': found 1 error, expected none;")


def test_json(sample_path: Path, capsys: Capture) -> None:
    assert main(["verify", "--json", "--table", "user_emb", str(sample_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["errors"] == 0 and [table["name"] for table in report["tables"]] == ["user_emb"]
    damage(sample_path)
    assert main(["verify", "--json", str(sample_path)]) == 3
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and report["errors"] == 1
    assert list(report["findings"][0]) == ["severity", "check", "table", "message"]


def test_warnings_fail_only_if_strict(save_plain, tmp_path: Path, capsys: Capture) -> None:  # type: ignore[no-untyped-def]
    import numpy as np

    prefix = str(save_plain(tmp_path / "model", {"w": np.array([np.nan])}))
    assert main(["verify", prefix]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("0 errors, 1 warning")
    assert main(["verify", "--strict", prefix]) == 3


def test_nothing_there(tmp_path: Path, capsys: Capture) -> None:
    assert main(["verify", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().out == ""


def test_unknown_table_and_bad_options(sample_path: Path, capsys: Capture) -> None:
    assert main(["verify", str(sample_path), "--table", "nope"]) == 1
    assert main(["verify", str(sample_path), "--memory", "much"]) == 2
    assert main(["verify", str(sample_path), "--engine", "moon"]) == 2
    assert main(["verify", str(sample_path), "--workers", "0"]) == 2


@pytest.mark.parametrize("command", ["verify", "merge"])
def test_no_room_for_temporary_files_is_no_finding(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "many.npz", tmp_path / "out.npz"
    np.savez(source, keys=np.arange(70_000), values=np.zeros((70_000, 1), np.float32))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    paths = [str(source)] if command == "verify" else [str(source), str(source), str(output)]
    assert main(["--quiet", command, *paths, "--memory", "1MiB"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and f"writing temporary files in '{tmp_path}/missing': No such file" in told.err
    assert not output.exists()
