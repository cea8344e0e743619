"""OUT of the commands that write checkpoints: named by one of its files or as a folder, as PATH may be."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.dialects.detect import open_checkpoint

SAMPLE = Path(__file__).parent.parent / "data" / "sample"
COMMANDS = {
    "migrate": ["--to", "tfplugin"],
    "clip": ["--min-freq", "1"],
    "cast": ["--to-value-dtype", "float32"],
    "reshard": ["--parts", "1"],
    "merge": [],
    "rename": ["--table", "user_emb=user"],
    "repair": ["--to", "tfplugin"],
}
FILES = (".index", ".data-00000-of-00001")


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    shutil.copytree(SAMPLE, tmp_path / "w")
    (index,) = (tmp_path / "w").glob("*.index")
    return index.with_suffix("")


def arguments(command: str, sample: Path, out: str) -> list[str]:
    sources = [str(sample)] * (1 + (command == "merge"))
    return [command, *sources, out, *COMMANDS[command]]


@pytest.mark.parametrize("suffix", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_a_checkpoint_names_the_checkpoint(
    command: str, suffix: str, sample: Path, tmp_path: Path, command_line: Callable[..., Any]
) -> None:
    names = sorted(file.name for file in sample.parent.iterdir())
    ran = command_line([*arguments(command, sample, f"{tmp_path}/new/m{suffix}"), "--json"])
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)["output"] == f"{tmp_path}/new/m"
    assert [file.name for file in sorted((tmp_path / "new").iterdir())] == [f"m{FILES[1]}", f"m{FILES[0]}"]
    ran = command_line(arguments(command, sample, f"{sample}{suffix}"))
    assert (ran.status, "exists" in ran.err) == (1, True), "not without --force"
    ran = command_line([*arguments(command, sample, f"{sample}{suffix}"), "--force"])
    assert ran.status == 0, ran.err
    assert sorted(file.name for file in sample.parent.iterdir()) == names
    for at in (sample, tmp_path / "new" / "m"):
        tables = open_checkpoint(at).tables
        assert len(tables) == len(open_checkpoint(SAMPLE).tables)
        before = np.concatenate(
            [chunk.keys for table in open_checkpoint(SAMPLE).tables.values() for chunk in table.chunks()]
        )
        after = np.concatenate([chunk.keys for table in tables.values() for chunk in table.chunks()])
        np.testing.assert_array_equal(np.sort(after), np.sort(before))


@pytest.mark.parametrize("to", ["tfplugin", "npz"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_is_no_prefix(
    command: str, to: str, sample: Path, tmp_path: Path, command_line: Callable[..., Any]
) -> None:
    line = arguments(command, sample, f"{tmp_path}/sub/")
    ran = command_line([*line[:3], "--to", to] if "--to" in line else [*line, "--to", to])
    assert ran.status == 2
    assert f"'{tmp_path}/sub/NAME'" in ran.err.replace("\n", " ").replace("  ", " ")
    assert not (tmp_path / "sub").exists()
    assert [*tmp_path.iterdir()] == [sample.parent]


@pytest.mark.parametrize("line", ["migrate {} {}.index --to npz --force", "report {} --html {}.index --force"])
def test_no_other_file_replaces_one_of_a_checkpoint(line: str, sample: Path, command_line: Callable[..., Any]) -> None:
    before = {file: file.read_bytes() for file in sample.parent.iterdir()}
    ran = command_line([part.format(sample) for part in line.split()])
    assert ran.status != 0
    assert "checkpoint" in ran.err
    assert {file: file.read_bytes() for file in sample.parent.iterdir()} == before


@pytest.mark.parametrize(
    "line",
    [
        "explore {0} --output {0}",
        "report {0} --html {0}",
        "advise {0} --output {0}",
        "simulate p.toml {0} --csv p.toml",
    ],
)
def test_force_replaces_nothing_that_a_page_or_a_policy_is_made_of(
    line: str, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = Path("p.toml")
    policy.write_text('[[tables]]\nname = "*"\nmax-capacity = 9\n')
    assert command_line(["migrate", str(sample), "tables.npz"]).status == 0
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for read in ("tables.npz", str(sample)):
        ran = command_line([*line.format(read).split(), "--force"])
        assert (ran.status, "that is what is read, which would be lost; name another place" in ran.err) == (1, True)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    "line",
    [
        "get {0} 5 --output {1}",
        "get {0} --where key>0 --output {1}",
        "scan {0} --output {1}",
        "top {0} --by norm --output {1}",
        "sql {0} 'from user_emb' --output {1}",
        "sql --attach a={0} 'from a.user_emb' --output {1}",
    ],
)
@pytest.mark.parametrize("options", ["--force", "--force --dry-run"])
def test_some_rows_never_replace_the_tables_that_they_are_of(
    line: str,
    options: str,
    sample: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command_line: Callable[..., Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in ("folder", "one.parquet"):
        made = command_line(["migrate", str(sample), out, "--to", "parquet", "--table", "user_emb"])
        assert made.status == 0, made.err
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    (inside,) = (file for file in before if file.parent.name == "user_emb")
    for read, written in (
        ("one.parquet", "one.parquet"),
        ("folder", inside),
        ("folder", "folder/new.parquet"),
        ("one.parquet", "./folder/../one.parquet"),
    ):
        ran = command_line([*shlex.split(line.format(read, written)), *options.split()])
        assert (ran.status, "which is read" in ran.err or "that is what is read" in ran.err) == (1, True), ran.err
    if not line.startswith("sql"):
        to = "--output-dialect" if line.startswith("scan") else "--to"
        for read, written, dialect in (
            (sample, sample, "tfplugin"),
            (sample, f"{sample}.index", "tfplugin"),
            (inside, "folder", "parquet"),
        ):
            ran = command_line([*shlex.split(line.format(read, written)), *options.split(), to, dialect])
            assert (ran.status, "read; name" in ran.err or "what is read" in ran.err) == (1, True), ran.err
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_rows_never_replace_what_says_which_they_are(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("keys.csv").write_text("5\n")
    Path("query.csv").write_text("from user_emb")
    for line in ("get {} --keys-file keys.csv --output keys.csv", "sql {} --file query.csv --output query.csv"):
        ran = command_line([*line.format(sample).split(), "--force"])
        assert (ran.status, "that is what is read, which would be lost" in ran.err) == (1, True), ran.err
    assert Path("keys.csv").read_text() == "5\n"


@pytest.mark.parametrize("option", ["--force", "--dry-run"])
@pytest.mark.parametrize(
    "line", ["get {} 5", "scan {}", "top {}", "sql {} 'select 1'", "advise {}", "diff {} {}", "simulate p.toml {}"]
)
def test_options_of_an_output_that_is_not_asked_for(
    line: str, option: str, sample: Path, command_line: Callable[..., Any]
) -> None:
    ran = command_line([*shlex.split(line.format(sample, sample)), option])
    assert (ran.status, f"got {option} without --" in ran.err) == (2, True), ran.err
    assert "nothing is written" in ran.err


def test_a_dry_run_of_clip_tells_what_its_output_would_lack(
    sample: Path, tmp_path: Path, command_line: Callable[..., Any]
) -> None:
    line = ["clip", str(sample), f"{tmp_path}/out", "--min-freq", "3", "--to", "tfra"]
    planned = command_line([*line, "--dry-run"])
    assert planned.status == 0, planned.err
    assert not (tmp_path / "out").exists()
    told = json.loads(command_line([*line, "--dry-run", "--json"]).out)
    assert told["dry_run"]
    done = json.loads(command_line([*line, "--json"]).out)
    same = ("output", "dialect", "losses", "variables", "clipped")
    assert {name: told[name] for name in same} == {name: done[name] for name in same}
    assert [table["losses"] for table in told["tables"]] == [table["losses"] for table in done["tables"]]
    assert any(table["losses"] for table in told["tables"])
    assert all(loss in " ".join(planned.out.split()) for table in told["tables"] for loss in table["losses"])


def test_an_empty_list_of_keys_to_keep_is_an_error(
    sample: Path, tmp_path: Path, command_line: Callable[..., Any]
) -> None:
    (tmp_path / "none.txt").write_text("# nobody\n")
    (tmp_path / "p.toml").write_text('[[tables]]\nname = "*"\nkeep-keys = "none.txt"\n')
    before = {file: file.read_bytes() for file in sample.parent.iterdir()}
    for option in (["--keys-file", f"{tmp_path}/none.txt"], ["--policy", f"{tmp_path}/p.toml"]):
        ran = command_line(["clip", str(sample), str(sample), *option, "--force"])
        assert ran.status == 1
        assert "every row would be cut" in " ".join(ran.err.split())
        assert {file: file.read_bytes() for file in sample.parent.iterdir()} == before
    ran = command_line(["clip", str(sample), f"{tmp_path}/all", "--drop-keys-file", f"{tmp_path}/none.txt"])
    assert ran.status == 0, "nothing to cut"
    ran = command_line(["clip", str(sample), f"{tmp_path}/empty", "--top-k", "0", "--by", "l2"])
    assert ran.status == 0, "the way out"
    assert sum(table.rows for table in open_checkpoint(tmp_path / "empty").tables.values()) == 0


@pytest.mark.parametrize(
    "line",
    [
        "migrate folder folder/new.npz --to npz",
        "clip folder folder/new --to parquet --l2 0.1",
        "reshard folder folder/new.parquet_folder --parts 2",
        "merge folder folder folder/new --to tfplugin",
        "cast folder folder/new --dtype float16",
    ],
)
def test_no_table_is_written_into_a_folder_of_tables_that_is_read(
    line: str, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = command_line(["migrate", str(sample), "folder", "--to", "parquet", "--table", "user_emb"])
    assert made.status == 0, made.err
    ran = command_line(shlex.split(line))
    assert (ran.status, "that is in 'folder', which is read; name another place" in ran.err) == (1, True), ran.err
    assert command_line(["verify", "folder"]).status == 0
