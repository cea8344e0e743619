"""Standard output and error that close or are full, and signals: what is written is there, or nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtools.cli.main import main

KVTOOLS = f"{sys.executable} -P -m kvtools.cli.main"
CLIP = f"{KVTOOLS} clip sample out/b.ckpt --max-abs 0"

BLOCKED = """
import os, signal, sys, threading
from kvtools.dialects.column_table import ColumnTable
read_part, lock = ColumnTable.read_part, threading.Lock()
def once(*arguments):
    for chunk in read_part(*arguments):
        if lock.acquire(blocking=False):
            os.kill(os.getpid(), int(sys.argv[1]))
        yield chunk
ColumnTable.read_part = once
from kvtools.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""A run that sends itself a signal at the first rows that it reads: how busy the machine is does not matter."""


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "out").mkdir(exist_ok=True)
    return subprocess.run(["bash", "-c", command], cwd=cwd, capture_output=True, text=True, check=False)


def test_a_reader_that_goes_away_does_not_stop_what_is_written(tmp_path: Path, sample_path: Path) -> None:
    # Unbuffered, each line that is printed would meet the closed pipe; it is closed before anything is printed.
    command = f"set -o pipefail; PYTHONUNBUFFERED=1 {CLIP} | true"
    done = shell(command, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["b.ckpt.data-00000-of-00001", "b.ckpt.index"]


@pytest.mark.parametrize("buffering", [1, -1], ids=["each line at once", "all at the end"])
@pytest.mark.parametrize(
    "arguments",
    [
        "dialects",
        "stats sample",
        "inspect sample",
        "get sample 5",
        "get sample 5 --output rows.npz",
        "verify sample",
        "diff sample sample",
        "clip sample --max-abs 0 --dry-run",
        "--help",
        "stats --help",
        "--version",
    ],
)
def test_a_reader_that_has_gone_is_no_failure(
    sample_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: str,
    buffering: int,
) -> None:
    monkeypatch.chdir(sample_path.parent)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=buffering) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(arguments.split()) == 0
    assert capfd.readouterr().err == ""


def test_a_full_output_is_named_and_does_not_stop_what_is_written(tmp_path: Path, sample_path: Path) -> None:
    done = shell(f"{CLIP} > /dev/full; {KVTOOLS} inspect sample > /dev/full", tmp_path)
    full = "kvtools: writing to standard output: No space left on device"
    stands = "only this report is lost: what the command was to write is whole, in its place"
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"{full}; {stands}", full]
    assert (tmp_path / "out" / "b.ckpt.index").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "migrate sample - --to tfplugin",
        "clip sample - --max-abs 0",
        "cast sample - --to-value-dtype float16",
        "reshard sample - --parts 2",
        "merge sample sample -",
        "split sample - --by table",
        "rename sample - --table user_emb=u",
        "get sample 5 --to npz --output -",
        "get sample 5 --to npz --output=-",
        "export sample --savedmodel -",
        "report sample --html -",
    ],
)
def test_a_dash_is_no_file(
    sample_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    monkeypatch.chdir(sample_path.parent)
    assert main(arguments.split()) == 2
    message = "writing: got - as the output, expected a file, folder or URL; ./- is a file of that name"
    assert capsys.readouterr().err == f"kvtools: {message}\n"
    assert [file.name for file in sample_path.parent.iterdir()] == ["sample"]


def test_no_output_at_all_goes_nowhere_and_into_no_file(tmp_path: Path, sample_path: Path) -> None:
    done = shell(f"{CLIP} >&- && {KVTOOLS} verify out/b.ckpt", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failure_is_told_to_whoever_reads_errors_alone(tmp_path: Path, sample_path: Path) -> None:
    data = sample_path / "model.ckpt-7.data-00000-of-00001"
    data.write_bytes(bytes(data.stat().st_size))
    done = shell(f"set -o pipefail; {KVTOOLS} verify sample | true", tmp_path)
    assert done.returncode == 3 and done.stderr.startswith("kvtools: verifying ") and done.stderr.count("\n") == 1


def test_errors_that_nobody_takes_change_no_status_and_stop_no_work(tmp_path: Path, sample_path: Path) -> None:
    some = f"{KVTOOLS} get sample 999999 5 --csv --table ads/emb 2> /dev/full; echo $?"
    missed = f"{KVTOOLS} get sample 999999 2>&1 | true; echo ${{PIPESTATUS[0]}}"
    done = shell(f"{some}; {missed}; {KVTOOLS} bogus 2> /dev/full; echo $?", tmp_path)
    assert done.stdout.startswith("key,") and done.stdout.splitlines()[2:] == ["0", "3", "2"]


def test_a_working_folder_that_is_gone_is_named(
    tmp_path: Path, sample_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    statuses = [main(["clip", str(sample_path), "out", "--max-abs", "0"]), main(["sql", str(sample_path), "select 1"])]
    assert statuses == [1, 1]
    assert capsys.readouterr().err == "kvtools: the working folder was removed; change to one that is there\n" * 2
    assert main(["verify", str(sample_path)]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_leaves_nothing(tmp_path: Path, sample_path: Path, number: signal.Signals, workers: str) -> None:
    arguments = ["migrate", "sample", "out", "--to", "tfplugin", "--workers", workers]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(int(number)), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # which a job in the background may be without
    )
    said = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}[number]
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"kvtools: {said}\n")
    assert [file.name for file in tmp_path.iterdir()] == ["sample"]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path, sample_path: Path) -> None:
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{BLOCKED}"
    arguments = ["migrate", "sample", "out", "--to", "tfplugin"]
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(signal.SIGHUP)), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "command",
    [
        "inspect tables.h5",
        "inspect tables.h5 --dialect hdf5",
        "verify tables.h5",
        "stats tables.h5",
        "diff sample tables.h5",
        "migrate tables.h5 out.h5",
    ],
)
def test_a_pipe_in_place_of_a_checkpoint_is_an_error_and_no_wait(
    tmp_path: Path, sample_path: Path, command: str
) -> None:
    os.mkfifo(tmp_path / "tables.h5")
    words = [*KVTOOLS.split(), *command.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == (3 if "verify" in command else 1), done.stderr
    assert "'tables.h5': it is a pipe, expected a file or folder" in done.stdout + done.stderr


@pytest.mark.parametrize("encoding", ["ascii:surrogateescape", "utf-8:strict"])
def test_what_the_encoding_has_not_is_escaped(tmp_path: Path, sample_path: Path, encoding: str) -> None:
    name = tmp_path / os.fsdecode(b"caf\xe9" if encoding == "utf-8:strict" else "café".encode())
    name.symlink_to(sample_path.parent)
    command = [*KVTOOLS.split(), "inspect", name / sample_path.name]
    env = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    escaped = r"caf\udce9" if encoding == "utf-8:strict" else r"caf\xe9"
    assert (done.returncode, done.stderr) == (0, "") and escaped in done.stdout.splitlines()[0]


def test_bars_are_digits_where_the_encoding_has_none(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('[[tables]]\nname = "user"\nmax-capacity = 3\n')
    (tmp_path / "ids.csv").write_text("user\n1\n2\n1\n3\n")
    done = shell(f"PYTHONIOENCODING=ascii {KVTOOLS} simulate policy.toml ids.csv --batch-size 2", tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "user: rows      68  up to 3\n" in done.stdout


def test_a_file_that_cannot_have_its_name_is_named(tmp_path: Path, sample_path: Path) -> None:
    # pyarrow takes names in UTF-8 alone
    done = shell(f"{KVTOOLS} migrate sample $'out/caf\\xe9.arrow' --to arrow --table ads/emb", tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("kvtools: working on '"), done.stderr
    assert done.stderr.endswith("the name is no utf-8; choose another, or set LC_ALL=C.UTF-8 if it should be\n")
    assert not list((tmp_path / "out").iterdir())
