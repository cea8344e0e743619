"""Runs that are killed, or that the disk refuses: what stood there before is as it was, and nothing is left over."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.writing import WriteOptions
from kvtools.reshard import reshard

PROGRAM = """
import os, resource, signal, sys
from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.writing import WriteOptions
from kvtools.clip import Clip, Criteria, write_chosen
from kvtools.clip_policy import Policy, choose_all
from kvtools.merge import merge
from kvtools.reshard import reshard

command, source, output, kill_at = sys.argv[1:]
checkpoint = open_checkpoint(source)
options = WriteOptions(force=True)

def progress(table, done, total):
    if done >= int(kill_at) and not table.startswith("keys of"):
        os.kill(os.getpid(), signal.SIGKILL)

if command == "reshard":
    reshard(checkpoint, output, 5, options=options, workers=1, progress=progress)
elif command == "clip":
    choices = choose_all(checkpoint, Policy.of(Criteria(norms=(Clip("abs", 0),))))
    write_chosen(checkpoint, choices, output, options=options, workers=1, progress=progress)
elif command == "merge":
    merge([checkpoint, checkpoint], output, options=options, workers=1, progress=progress)
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    sys.exit(main(["reshard", source, output, "--parts", "5", "--force"]))
"""


def run(command: str, source: Path, output: Path, kill_at: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, command, str(source), str(output), str(kill_at)],
        capture_output=True,
        text=True,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("command", ["reshard", "clip", "merge"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "elsewhere"])
def test_a_killed_run_changes_nothing_and_the_next_one_tidies_up(
    sample_path: Path, tmp_path: Path, command: str, in_place: bool
) -> None:
    source = sample_path / "model.ckpt-7"
    output = source if in_place else tmp_path / "out" / "b.ckpt"
    output.parent.mkdir(exist_ok=True)
    if not in_place:
        reshard(open_checkpoint(source), output, 2)
    before = contents(output.parent)
    killed = run(command, source, output, kill_at=5)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert contents(output.parent) == before
    leftovers = [path for path in output.parent.iterdir() if path.is_dir()]
    assert [path.name.startswith(f".{output.name}.kvtools-") for path in leftovers] == [True]
    assert open_checkpoint(output).table("ads/emb").rows == 11
    reshard(open_checkpoint(source), output, 3, options=WriteOptions(force=True))
    assert [path for path in output.parent.iterdir() if path.is_dir()] == []
    assert open_checkpoint(output).table("user_emb").parts == 3


def test_a_full_disk_is_said_and_changes_nothing(sample_path: Path) -> None:
    source = sample_path / "model.ckpt-7"
    before = contents(sample_path)
    limited = run("limited", source, source)
    assert (limited.returncode, limited.stdout) == (1, "")
    assert limited.stderr == (
        f"kvtools: writing '{source}': File too large; nothing was changed there, make room or name another place\n"
    )
    assert contents(sample_path) == before
    assert [path for path in sample_path.iterdir() if path.is_dir()] == []


def test_a_small_file_system(sample_path: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a file system is not allowed here; the limit on file sizes is tested above")
    try:
        run_kvtools = [sys.executable, "-P", "-m", "kvtools.cli.main"]
        done = subprocess.run(
            [*run_kvtools, "reshard", str(sample_path), str(small / "b.ckpt"), "--parts", "30"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert "make room or name another place" in done.stderr and len(done.stderr.splitlines()) == 1
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_what_is_written_opens_in_tensorflow(sample_path: Path, tmp_path: Path, tf: object) -> None:
    import tensorflow

    reshard(open_checkpoint(sample_path), tmp_path / "b.ckpt", 2)
    reader = tensorflow.train.load_checkpoint(str(tmp_path / "b.ckpt"))
    source = open_checkpoint(sample_path).table("ads/emb")
    keys = [*reader.get_tensor("ads/emb/part_0-keys"), *reader.get_tensor("ads/emb/part_1-keys")]
    assert sorted(keys) == sorted(source.all_keys())
    assert reader.get_tensor("ads/emb/part_0-slot-Adam.m").shape == (len(reader.get_tensor("ads/emb/part_0-keys")), 4)
    assert reader.get_tensor("global_step") == 7
