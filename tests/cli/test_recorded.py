"""What each command prints, recorded: on terminals of 60 and 100 columns, in a pipe, and with colours.

A file of `recorded/` is one command line of `LINES`, run in a folder with the files of `sample_folder.py`. To record
anew, after a look at what changed:

    KVTOOLS_RECORD=1 .venv/bin/python -m pytest tests/cli/test_recorded.py; git diff tests/cli/recorded
"""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path

import pytest
from sample_folder import lay_out

from kvtools.cli.main import COMMANDS

RECORDED = Path(__file__).resolve().parent / "recorded"

LINES = {
    "explore": "explore model.ckpt-100",
    "sql": "sql model.ckpt-100 'select key, freq, norm, value from user_emb order by freq desc limit 3'",
    "sql-string-keys": "sql model.ckpt-100 'select key, freq from user_emb limit 2' --json-lines --string-keys",
    "verify-damaged": "verify damaged.ckpt-100",
    "advise": "advise model.ckpt-100 --max-loss 0.05",
    "advise-details": "advise model.ckpt-100 --table item_emb --details",
    "advise-log": "advise model.ckpt-100 --for training --budget 4KiB --log ids.parquet --output out.toml",
    "apply": "apply monday.ckpt tuesday.delta whole.ckpt",
    "cast": "cast model.ckpt-100 half.ckpt --to-value-dtype float16",
    "cast-int8": "cast model.ckpt-100 small.kvsnap --dtype int8 --to snapshot",
    "clip": "clip model.ckpt-100 small.ckpt --max-abs 0.05 --min-freq 100 --older-than 5d --now 2025-10-09",
    "clip-dry-run": "clip model.ckpt-100 --budget 1KiB --dry-run",
    "dialects": "dialects",
    "dialects-from": "dialects --from tfra",
    "diff": "diff model.ckpt-100 model.ckpt-200 --top 2",
    "diff-delta": "diff monday.ckpt tuesday.ckpt --output delta out.delta",
    "export-savedmodel": "export --savedmodel out model.ckpt-100 --clip-l2 0.2",
    "export-snapshot": "export --snapshot out.kvsnap model.ckpt-100 --dtype int8",
    "get": "get model.ckpt-100 17 -3 99",
    "get-csv": "get model.ckpt-100 17 --table item_emb --csv",
    "get-string-keys": "get model.ckpt-100 17 99 --table item_emb --columns value,freq --json --string-keys",
    "inspect": "inspect model.ckpt-100",
    "inspect-chain": "inspect train",
    "inspect-keys": "inspect model.ckpt-100 --keys 17 -3 99 --slots",
    "inspect-parts": "inspect model.ckpt-100 --tables --parts --slots",
    "log": "log train --keys 2 --until 6",
    "log-key": "log train --key 17",
    "merge": "merge train whole.ckpt",
    "migrate": "migrate model.ckpt-100 moved --to tfra --verify",
    "rename": "rename model.ckpt-100 new.ckpt --table user_emb=towers/users/embedding",
    "repair": "repair bad.ckpt-100 mended.ckpt --nan user_emb=zero",
    "repair-salvage": "repair damaged.ckpt-100 rescued.ckpt --salvage",
    "report": "report model.ckpt-100 --html report.html",
    "reshard": "reshard model.ckpt-100 out.ckpt --parts 3",
    "neighbours": "neighbours model.ckpt-100 17 99 -k 3",
    "scan": "scan model.ckpt-100 --from -2 --to 2 --columns value,freq,norm",
    "simulate": "simulate policy.toml ids.parquet --batch-size 20",
    "split": "split model.ckpt-100 pieces --by mod:2",
    "sql-names": "sql model.ckpt-100 'select key from user_em'",
    "stats": "stats model.ckpt-100",
    "top": "top model.ckpt-100 -n 3",
    "verify": "verify model.ckpt-100",
    "verify-bad": "verify bad.ckpt-100",
}
"""Command lines, by the names of their files; a new command adds its own."""

ELSEWHERE = {
    "completion": "tests/cli/test_completion.py",
    "doctor": "tests/cli/test_doctor.py",
    "follow": "tests/kvtools/test_follow_redis.py",
    "hash": "tests/cli/test_hash.py",
    "man": "tests/cli/test_man.py",
    "serve": "tests/cli/test_serve.py",
    "setup-horovod": "tests/cli/test_setup_horovod.py",
}
"""Commands that print no tables, look at the machine or run until they are ended, and where they are tested."""

WAYS = {
    "a terminal of 60 columns": (60, False),
    "a terminal of 100 columns": (100, False),
    "a pipe": (None, False),
    "a terminal of 100 columns with colours": (100, True),
}


@pytest.mark.parametrize("name", LINES)
def test_a_command_prints_what_is_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    line = LINES[name]
    lay_out(tmp_path, line)
    made = {file.name for file in tmp_path.iterdir()}
    said = [f"$ kvtools {line}"]
    for way, (columns, color) in WAYS.items():
        for file in tmp_path.iterdir():
            if file.name not in made:
                import shutil

                shutil.rmtree(file) if file.is_dir() else file.unlink()
        monkeypatch.chdir(tmp_path)
        ran = command_line(shlex.split(line), columns, color=color)
        status = [f"(exit status {ran.status})"] if ran.status else []
        said += ["", f"=== {way}", *ran.out.splitlines(), *(f"[stderr] {one}" for one in ran.err.splitlines()), *status]
        if columns == 60 and not line.endswith("--csv") and "--json" not in line:
            assert all(len(one) <= 60 for one in _unbroken(ran.out)), ran.out
    text = "\n".join(one.rstrip() for one in said) + "\n"
    file = RECORDED / f"{name}.txt"
    if os.environ.get("KVTOOLS_RECORD"):
        file.write_text(text)
    assert file.is_file(), f"{file.name} is not recorded; see the top of {Path(__file__).name}"
    assert text == file.read_text(), f"see the top of {Path(__file__).name}"


def _unbroken(text: str) -> list[str]:
    """Lines without those that nobody breaks: commands to copy, and paths that are too long for a line of their own."""
    return [line for line in text.splitlines() if not re.fullmatch(r"\s*\S+|kvtools .*", line)]


def test_every_command_and_no_other_file_is_recorded() -> None:
    commands = {line.split()[0] for line in LINES.values()}
    assert commands | set(ELSEWHERE) == set(COMMANDS) and not commands & set(ELSEWHERE)
    assert {file.stem for file in RECORDED.iterdir()} == set(LINES)
    root = Path(__file__).resolve().parents[2]
    for test in ELSEWHERE.values():
        assert (root / test).is_file(), test
