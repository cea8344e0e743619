"""`--dry-run`, for every command that writes: the account of what would be, and nothing on disk changes."""

from __future__ import annotations

import hashlib
import json
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import typer

from kvtools import table_from_arrays, write_tables
from kvtools.cli.main import COMMANDS, HELD_BACK, build_app, main
from kvtools.dialects.interface import TableReader

from ..kvtools.chain_files import ChainWriter, row, table_of

RUNS: Mapping[str, str] = {
    "verify": "verify sample --write-checksums",
    "diff": "diff sample sample --output delta out.delta",
    "get": "get sample 5 --table ads/emb --output out.npz",
    "scan": "scan sample --from 0 --output out.npz",
    "top": "top sample --output out.npz",
    "sql": "sql sample 'from user_emb' --output out.csv",
    "explore": "explore sample --output out.html",
    "report": "report sample --html out.html",
    "advise": "advise sample --output out.toml",
    "man": "man --output out",
    "simulate": "simulate policy.toml ids.npy --dim 4 --csv out.csv",
    "migrate": "migrate sample out.h5",
    "clip": "clip sample out --min-freq 3",
    "cast": "cast sample out --to-value-dtype float16",
    "reshard": "reshard sample out --parts 2",
    "merge": "merge sample sample out",
    "apply": "apply train/ckpt-1 train/ckpt-2.delta out",
    "split": "split sample out --by table",
    "rename": "rename sample out --table user_emb=user",
    "export": "export sample --savedmodel out",
    "repair": "repair sample out",
}
"""For every command that writes a command line that does, where a checkpoint `sample` and a chain `train` are."""

OTHERS = {
    "cast": "cast sample out --dtype int8 --to savedmodel",
    "clip": "clip sample --min-freq 3 out --to npz",
    "export": "export sample --snapshot out.kvsnap --dtype int4",
    "merge": "merge train out",
    "migrate": "migrate sample out.npz --force --verify",
    "split": "split sample out --rows 2 --to hdf5",
}
"""Other ways through the same commands."""

SERVICES = frozenset({"serve", "follow", "setup-horovod"})
"""Commands that go on, or build a package: there is no account of what they would write."""


def options_of(command: str) -> dict[str, str | None]:
    """The options of a command, and what stands for their value, its arguments among them by their metavar."""
    group = typer.main.get_command(build_app(command))
    params = group.commands[command].params  # type: ignore[attr-defined]
    return {option: param.metavar for param in params for option in (*param.opts, param.metavar or "")}


def writes(command: str) -> bool:
    """Whether it looks like a command that writes: by its options, its arguments, or that it goes on to its end."""
    options = options_of(command)
    out = any(metavar and "OUT" in metavar for metavar in options.values())
    out |= bool({"--output", "--csv", "--html"} & {o for o, m in options.items() if m})
    return out or "--force" in options or command in HELD_BACK or any(name.startswith("--write") for name in options)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - SERVICES))
def test_every_command_that_writes_has_a_dry_run(command: str) -> None:
    assert ("--dry-run" in options_of(command)) == writes(command), "take `DryRun` or `Output` of kvtools.cli.options"
    assert (command in RUNS) == writes(command), "add a command line that writes to RUNS"


def listing(folder: Path) -> dict[str, tuple[int, int, str]]:
    """All that is below a folder: names, times and contents."""
    found = {}
    for path in sorted(folder.rglob("*")):
        there = path.stat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (there.st_size, there.st_mtime_ns, content) if content else (0, 0, "")
    return found


@pytest.fixture
def here(sample_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train").mkdir()
    writer = ChainWriter(tmp_path / "train")
    writer.full({"emb": table_of({1: row(1), 2: row(2)})})
    writer.delta({"emb": table_of({1: row(1), 2: row(3)})})
    (tmp_path / "temporary").mkdir()
    (tmp_path / "policy.toml").write_text('[[tables]]\nname = "ids"\nmax-capacity = 50\n')
    np.save(tmp_path / "ids.npy", np.arange(20) % 7)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "line", [pytest.param(line, id=line.replace(" ", "_")) for line in [*RUNS.values(), *OTHERS.values()]]
)
def test_a_dry_run_changes_nothing_on_disk(line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if line.startswith("report"):
        pytest.importorskip("matplotlib")
    before = listing(here)
    assert main([*shlex.split(line), "--dry-run"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert listing(here) == before
    assert "would" in said or "nothing was written" in said
    assert "wrote" not in said
    if "--json" in options_of(shlex.split(line)[0]):
        assert main([*shlex.split(line), "--dry-run", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["dry_run"] is True
    assert main(shlex.split(line)) == 0, "and without it there is something to read"
    assert listing(here) != before
    done = capsys.readouterr().out
    assert "would" not in done and "nothing was written" not in done


@pytest.mark.parametrize("line", RUNS.values(), ids=RUNS)
def test_a_dry_run_says_what_is_in_the_way(line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output that is there is an error of the real run, and so of the dry one."""
    if "--force" not in options_of(shlex.split(line)[0]):
        pytest.skip("it writes files beside what is there")
    assert main(shlex.split(line)) == 0
    capsys.readouterr()
    assert main([*shlex.split(line), "--dry-run"]) == 1, capsys.readouterr().out
    assert "name another place, or add --force" in capsys.readouterr().err
    before = listing(here)
    assert main([*shlex.split(line), "--dry-run", "--force"]) == 0
    assert listing(here) == before


def test_a_dry_run_reads_every_byte(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = next((here / "sample").glob("*.data-*"))
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    assert main(["reshard", "sample", "out", "--parts", "2", "--dry-run"]) == 1
    assert "checksum mismatch" in capsys.readouterr().err


def test_a_dry_run_gives_the_account_of_the_real_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["cast", "sample", "out", "--to-value-dtype", "float16", "--json"]
    assert main([*line, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(line) == 0
    done = json.loads(capsys.readouterr().out)
    assert planned.pop("dry_run") is True
    for table in [*planned["tables"], *done["tables"]]:
        table["checks"] = [check.replace(" and written", "") for check in table["checks"]]
    assert planned == done


ROW = np.ones((1, 2), np.float32)
UNFIT: Mapping[str, tuple[TableReader, str, str]] = {
    "frequencies": (
        table_from_arrays("u", keys=[1, 2], values=np.repeat(ROW, 2, axis=0), freqs=[2**40, 1]),
        "tfplus tfplugin tfra",
        "1 frequencies outside",
    ),
    "name": (table_from_arrays("a/u", keys=[1], values=ROW), "sok-legacy", "its name has a '/'"),
    "keys": (
        table_from_arrays("u", keys=np.uint64([2**63]), values=ROW),
        "deeprec tfra tfra_files",
        "key 9223372036854775808 does not fit int64",
    ),
    "versions": (
        table_from_arrays("u", keys=[1], values=ROW, versions=[2**33], version_unit="steps"),
        "tfplugin",
        "version 8589934592 does not fit uint32",
    ),
}
"""Tables, dialects that cannot hold all of them, and what is said of it."""


@pytest.mark.parametrize("case", UNFIT)
def test_a_dry_run_of_migrate_says_what_the_real_one_does(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, dialects, why = UNFIT[case]
    write_tables([table], tmp_path / "in.h5", "hdf5")
    for dialect in dialects.split():
        line = ["migrate", f"{tmp_path}/in.h5", f"{tmp_path}/{dialect}", "--to", dialect]
        statuses = []
        for more in ([], ["--json"]):
            planned = main([*line, *more, "--dry-run"]), capsys.readouterr()
            assert why in "".join(planned[1]) and "nothing left out" not in planned[1].out
            assert '"lossless": true' not in planned[1].out
            statuses.append(planned[0])
        assert not (tmp_path / dialect).exists()
        done = main(line), capsys.readouterr()
        assert statuses == [done[0]] * 2 and why in "".join(done[1])
