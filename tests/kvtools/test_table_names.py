"""Names that tables have, patterns that some match, and names that none has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import UnknownTableError
from kvtools.migrate import write_tables
from kvtools.table_names import matching, near

Capture = pytest.CaptureFixture[str]
NAMES = ("deep/user", "deep/item", "wide", "a[1]", "a1")


def tables(names: Any = NAMES, first: int = 0) -> list[ArrayTable]:
    rng = np.random.default_rng(0)
    return [
        ArrayTable(
            name, np.arange(4) + first, rng.normal(size=(4, 2)).astype(np.float32), freqs=np.arange(4, dtype=np.uint32)
        )
        for name in names
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("names") / "a.npz")
    write_tables(tables(), path, "npz")
    return path


@pytest.mark.parametrize(
    ("patterns", "found", "unmatched"),
    [
        (["deep/*"], ["deep/user", "deep/item"], []),
        (["*/item", "deep/*", "wide"], ["deep/item", "deep/user", "wide"], []),
        (["*"], list(NAMES), []),
        (["a[1]"], ["a[1]"], []),
        (["a?"], ["a1"], []),
        (["[ad]*"], ["deep/user", "deep/item", "a[1]", "a1"], []),
        (["[!ad]*"], ["wide"], []),
        (["wide", "wide"], ["wide"], []),
        (["DEEP/*", "gone", ""], [], ["DEEP/*", "gone", ""]),
        ([], [], []),
    ],
)
def test_names_and_patterns(patterns: list[str], found: list[str], unmatched: list[str]) -> None:
    assert matching(patterns, NAMES) == (found, unmatched)


def test_what_is_nearly_right() -> None:
    assert near("deep/usr", NAMES) == "; did you mean 'deep/user'?"
    assert near("Wide", NAMES) == "; did you mean 'wide'?"
    assert near("item", NAMES) == "; did you mean 'deep/item'?"
    assert near("tower/item", NAMES) == "; did you mean 'deep/item'?"
    assert near("zzz", NAMES) == near("zzz", []) == ""


def test_a_checkpoint_says_what_it_has() -> None:
    checkpoint = Checkpoint("x", "npz", {table.schema.name: table for table in tables()})
    assert [table.schema.name for table in checkpoint.select(["deep/*", "a1"])] == ["deep/user", "deep/item", "a1"]
    with pytest.raises(UnknownTableError, match=r"no such table; it has 'deep/user', .*; did you mean 'deep/user'\?"):
        checkpoint.select(["deep/usr"])
    with pytest.raises(
        UnknownTableError, match=r"opening table 'flat/\*' of 'x': no table matches; it has 'deep/user'"
    ):
        checkpoint.select(["wide", "flat/*"])


@pytest.mark.parametrize(
    "command",
    [
        "get {} 1 --csv --table 'deep/u*'",
        "inspect {} --table 'deep/*'",
        "stats {} --table 'deep/*'",
        "verify {} --table 'deep/*'",
        "report {} --html {out}/report.html --table 'deep/*'",
        "migrate {} {out}/b.npz --table 'deep/*'",
        "clip {} {out}/b.npz --min-freq 1 --table 'deep/*'",
        "cast {} {out}/b.npz --dtype float16 --table 'deep/*'",
        "reshard {} {out}/b.npz --parts 1 --table 'deep/*'",
        "split {} {out}/pieces --by table --table 'deep/*'",
        "merge {} {} {out}/b.npz --table 'deep/*'",
        "diff {} {} --table 'deep/*'",
        "export {} --savedmodel {out}/model --table 'deep/*'",
    ],
)
def test_every_command_takes_patterns(path: str, tmp_path: Path, capsys: Capture, command: str) -> None:
    words = [word.strip("'") for word in command.replace("{out}", str(tmp_path)).replace("{}", path).split()]
    assert main(words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    if words[0] in ("inspect", "stats", "verify"):
        assert "deep/user" in said and "deep/item" in said and "wide" not in said
    words[words.index("--table") + 1] = "deep/usr*"
    assert main([*words, *(["--force"] if "b.npz" in command else [])]) == 1
    said = capsys.readouterr().err
    assert "'deep/usr*'" in said and "no table matches; it has 'a1', " in said and said.count("\n") == 1


def test_migrate_takes_only_what_matches(path: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["migrate", path, str(tmp_path / "b.npz"), "--table", "deep/*", "--table", "a[1]"]) == 0
    assert list(open_checkpoint(tmp_path / "b.npz").tables) == ["a[1]", "deep/item", "deep/user"]


def test_diff_of_a_pattern_is_of_the_tables_of_both(path: str, tmp_path: Path, capsys: Capture) -> None:
    write_tables(tables(["deep/item", "flat"]), tmp_path / "b.npz", "npz")
    assert main(["diff", path, str(tmp_path / "b.npz"), "--table", "deep/*", "--json", "--exit-zero"]) == 0
    assert [table["name_b"] for table in json.loads(capsys.readouterr().out)["tables"]] == ["deep/item"]
    assert main(["diff", path, str(tmp_path / "b.npz"), "--table", "*d*r", "--json"]) == 1
    assert "*d*r" in capsys.readouterr().err


def test_near_names_of_slots_and_columns(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "out")
    for command, meant in (
        (["get", str(sample_path), "5", "--columns", "adam.m"], "Adam.m"),
        (["rename", str(sample_path), out, "--slot", "Adam.w=x"], "Adam.v"),
        (["rename", str(sample_path), out, "--table", "user_em=x"], "user_emb"),
        (["rename", str(sample_path), out, "--split-slot", "Adam.mm=a,b"], "Adam.m"),
        (["inspect", str(sample_path), "--table", "User_Emb"], "user_emb"),
    ):
        assert main(command) == (2 if "--columns" in command else 1)
        assert f"; did you mean '{meant}'" in capsys.readouterr().err
