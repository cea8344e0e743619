from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from kvtools.errors import OutputError
from kvtools.replace_output import check_free, check_replaceable, is_being_written, replace_files, replace_folder


def write(target: Path, text: str, *, force: bool = False) -> None:
    with replace_folder(target, mark="mark", force=force) as folder:
        (folder / "mark").write_text(text)
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_new_and_replaced(tmp_path: Path) -> None:
    write(tmp_path / "out", "one")
    assert content(tmp_path / "out") == {"mark": "one", "deep/file": "one"}
    write(tmp_path / "out", "two", force=True)
    assert content(tmp_path / "out") == {"mark": "two", "deep/file": "two"}
    assert names(tmp_path) == ["out"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    write(tmp_path / "out", "one")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_existing_output_is_refused_without_force(tmp_path: Path) -> None:
    write(tmp_path / "out", "one")
    with pytest.raises(OutputError, match="exists already"):
        write(tmp_path / "out", "two")
    assert content(tmp_path / "out") == {"mark": "one", "deep/file": "one"}


@pytest.mark.parametrize("kind", ["file", "link", "dangling", "other folder"])
def test_force_replaces_nothing_of_another_kind(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    if kind == "file":
        out.write_text("x")
    elif kind == "link":
        out.symlink_to(tmp_path / "elsewhere")
    elif kind == "dangling":
        out.symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / "elsewhere").rename(out)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(OutputError):
        write(out, "two", force=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 30)], ids=["name", "path"])
def test_a_name_that_is_too_long_is_told(tmp_path: Path, name: str, dry_run: bool) -> None:
    for place in (
        replace_folder(tmp_path / name, mark="mark", dry_run=dry_run),
        replace_files(tmp_path / name, dry_run=dry_run),
    ):
        with pytest.raises(OutputError, match=r"^writing '.*[xy]': File name too long; name another place$"), place:
            pass
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = rf"^writing '{tmp_path}/new/a': nothing can be written in '{tmp_path}'; name another place$"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may do everything
    with pytest.raises(OutputError, match=refused):
        check_free(tmp_path / "new" / "a", force=True)
    with pytest.raises(OutputError, match=refused):
        check_replaceable(tmp_path / "new" / "a", mark="a.txt", force=True)


def test_force_may_replace_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "one", force=True)
    assert content(tmp_path / "out")["mark"] == "one"


def test_folders_above_are_made_and_go_again_if_nothing_is_written(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "out", "one")
    assert content(tmp_path / "a" / "b" / "out")["mark"] == "one"
    with replace_files(tmp_path / "c" / "d" / "file") as staging:
        staging.write_text("hello")
    assert (tmp_path / "c" / "d" / "file").read_text() == "hello"
    for replace in (replace_files, partial(replace_folder, mark="mark")):
        with pytest.raises(RuntimeError), replace(tmp_path / "a" / "x" / "y" / "out"):
            raise RuntimeError
        assert names(tmp_path / "a") == ["b"]
        with pytest.raises(OutputError, match=r"'.*file' is no folder"), replace(tmp_path / "c" / "d" / "file" / "out"):
            pass
    check_replaceable(tmp_path / "z" / "out", mark="mark", force=False)
    assert names(tmp_path) == ["a", "c"], "asking makes nothing"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_leaves_the_old_one_and_no_trace(tmp_path: Path, error: type[BaseException]) -> None:
    write(tmp_path / "out", "one")
    with pytest.raises(error), replace_folder(tmp_path / "out", mark="mark", force=True) as folder:
        (folder / "mark").write_text("two")
        raise error
    assert content(tmp_path / "out")["mark"] == "one"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("replace", [replace_files, partial(replace_folder, mark="mark")])
def test_a_signal_as_the_work_folder_is_made_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: Callable[..., AbstractContextManager[Path]]
) -> None:
    made = os.mkdir

    def interrupted(path: str | Path, *rest: int) -> None:
        made(path, *rest)
        if ".out.kvtools-" in str(path):
            raise KeyboardInterrupt  # as a handler does, which runs once the system call is over

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), replace(tmp_path / "a" / "out"):
        pass
    assert names(tmp_path) == []


def test_full_disk(tmp_path: Path) -> None:
    write(tmp_path / "out", "one")
    with (
        pytest.raises(OutputError, match="No space left on device; nothing was changed"),
        replace_folder(tmp_path / "out", mark="mark", force=True),
        open("/dev/full", "w") as full,  # noqa: PTH123
    ):
        full.write("x" * 100_000)
    assert content(tmp_path / "out")["mark"] == "one"


def test_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="exists already"),
        replace_folder(tmp_path / "out", mark="mark") as folder,
    ):
        (folder / "mark").write_text("mine")
        write(tmp_path / "out", "theirs")
    assert content(tmp_path / "out")["mark"] == "theirs"


def test_killed_run_leaves_the_old_one_and_the_next_cleans_up(tmp_path: Path) -> None:
    write(tmp_path / "out", "one")
    program = (
        "import sys, time; from pathlib import Path; from kvtools.replace_output import replace_folder\n"
        f"with replace_folder(Path({str(tmp_path / 'out')!r}), mark='mark', force=True) as folder:\n"
        "    (folder / 'mark').write_text('half'); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        write(tmp_path / "out", "two", force=True)  # a run that is still writing is left alone
        assert len(names(tmp_path)) == 2
        process.send_signal(signal.SIGKILL)
    assert content(tmp_path / "out")["mark"] == "two"
    assert len(names(tmp_path)) == 2
    write(tmp_path / "out", "three", force=True)
    assert content(tmp_path / "out")["mark"] == "three"
    assert names(tmp_path) == ["out"]


def make_special(file: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(os.path.relpath(file))  # a socket's path is short
    elif kind == "device":
        try:
            os.mknod(file, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # a null device of our own
        except PermissionError:
            pytest.skip("making a device is not allowed here")
    else:
        file.mkdir()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["out", "out.index", "out.data-00000-of-00001"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, kind: str, name: str, force: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    make_special(tmp_path / "elsewhere" / "it", kind)
    (tmp_path / "link").mkdir()
    make_special(tmp_path / name, kind)
    (tmp_path / "link" / name).symlink_to(tmp_path / "elsewhere" / "it")
    for folder in (tmp_path, tmp_path / "link"):
        with pytest.raises(OutputError, match=f"is a {kind}, expected a new file"):  # noqa: SIM117
            with replace_files(folder / "out", force=force) as staging:
                staging.write_text("x")
        there = (folder / name).lstat().st_mode
        assert stat.S_ISLNK(there) if folder.name == "link" else not stat.S_ISREG(there)
        assert not any(".kvtools-" in path.name for path in folder.iterdir())


def test_a_pipe_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="is a pipe"),
        replace_files(tmp_path / "out", force=True) as staging,
    ):
        staging.write_text("mine")
        os.mkfifo(tmp_path / "out")
    assert stat.S_ISFIFO((tmp_path / "out").stat().st_mode) and names(tmp_path) == ["out"]


def test_force_replaces_a_link_to_a_file_and_not_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "out").symlink_to("file")
    with pytest.raises(OutputError, match="exists"), replace_files(tmp_path / "out"):
        pass
    with replace_files(tmp_path / "out", force=True) as staging:
        staging.write_text("new")
    assert (tmp_path / "out").read_text() == "new" and (tmp_path / "file").read_text() == "old"


def test_files_of_two_runs_take_their_places_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the index of one would stand beside the data of the other."""
    held = []
    moved = Path.rename

    def rename(path: Path, target: Path) -> Path:
        held.append(is_being_written(tmp_path / ".out.kvtools-turn"))
        return moved(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with replace_files(tmp_path / "out") as staging:
        for file in ("out.index", "out.data-00000-of-00001"):
            staging.with_name(file).write_text("x")
    assert held == [True, True]
    assert names(tmp_path) == ["out.data-00000-of-00001", "out.index"]
