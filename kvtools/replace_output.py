"""Write a folder, or files that share a name, as a whole or not at all: beside their place, synced, then renamed.

A run that fails removes what it wrote. One that is killed leaves a hidden folder `.<name>.kvtools-...`
beside the output, which the next run to the same place removes: a running one holds a lock on its own.

Folders above the output that are not there are made, and go again if nothing is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtools.errors import OutputError, ScratchError, UsageError
from kvtools.file_kind import file_kind
from kvtools.remote.unfinished import UNFINISHED

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNCED_AT_ONCE = 16
_INDEX = ".index"
_HIDDEN = ".kvtools-"
CHECKSUMS = ".kvtools-checksums"
"""How what `kvtools.checksum_file` writes beside an output is called: it goes when that is replaced."""
_BUNDLE_FILE = re.compile(r"(\.index|\.data-\d{5,}-of-\d{5,})$")


@contextlib.contextmanager
def replace_folder(target: Path, *, mark: str, force: bool = False, dry_run: bool = False) -> Iterator[Path]:
    """Give a folder to write to that becomes `target` when the block ends without an error.

    Args:
        target: where the folder is to be.
        mark: a file that a folder of this kind has; `force` replaces no folder without it.
        force: replace an existing folder.
        dry_run: write to a temporary folder, which is dropped; `target` is looked at and stays as it is.

    Raises:
        OutputError: `target` exists and may not be replaced, or the disk refuses to take it.

    Example:
        >>> target = Path(tempfile.mkdtemp()) / "out"
        >>> with replace_folder(target, mark="a.txt") as folder:
        ...     _ = (folder / "a.txt").write_text("hello")
        >>> [file.name for file in target.iterdir()]
        ['a.txt']
    """
    target = target.absolute()
    check_replaceable(target, mark=mark, force=force)
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="kvtools-dry-run-") as nowhere:
            yield Path(nowhere)
        return
    with work_folder(target) as work:
        yield work
        work.chmod(0o777 & ~_umask())
        sync_tree(work)
        if _is_in_store(target):
            importlib.import_module("kvtools.remote.upload").put_folder(work, target, mark=mark, force=force)
            return
        check_replaceable(target, mark=mark, force=force)
        _move_into_place(work, target)


@contextlib.contextmanager
def replace_files(target: Path, *, force: bool = False, dry_run: bool = False) -> Iterator[Path]:
    """Give a path to write files to, all of which start with its name, that take their places when the block ends.

    Args:
        target: a file, or the prefix of several, `model.ckpt` for `model.ckpt.index` and `model.ckpt.data-...`.
        force: replace files that are there. An index goes last, so that what is there is never an index without its
            data.
        dry_run: write to a temporary folder, which is dropped; `target` is looked at and stays as it is.

    Raises:
        OutputError: such files exist and may not be replaced, or the disk refuses to take them.

    Example:
        >>> target = Path(tempfile.mkdtemp()) / "a.npz"
        >>> with replace_files(target) as staging:
        ...     _ = staging.write_text("hello")
        >>> [file.name for file in target.parent.iterdir()]
        ['a.npz']
    """
    target = target.absolute()
    check_free(target, force=force)
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="kvtools-dry-run-") as nowhere:
            yield Path(nowhere) / target.name
        return
    with work_folder(target) as work:
        yield work / target.name
        sync_tree(work)
        new = sorted(work.iterdir(), key=_index_last)
        if _is_in_store(target):
            there = [file.name for file in check_free(target, force=force)]
            importlib.import_module("kvtools.remote.upload").put_files(new, target, old=there, force=force)
            return
        with _in_turn(target):
            _put_files(new, target, check_free(target, force=force))


def _put_files(new: list[Path], target: Path, old: list[Path]) -> None:
    """Have files take their places, the index last, instead of the `old` ones."""
    stale = [file for file in old if file.name.endswith(_INDEX)]
    # Without its index there is no checkpoint: a reader between these renames finds none, not a mixed one.
    for file in stale if len(new) > 1 else []:
        file.unlink()
    for file in new:
        file.rename(target.parent / file.name)
    names = {file.name for file in new}
    for file in old:
        if file.name not in names:
            file.unlink(missing_ok=True)
    target.with_name(target.name + CHECKSUMS).unlink(missing_ok=True)
    sync(target.parent)


@contextlib.contextmanager
def _in_turn(target: Path) -> Iterator[None]:
    """Wait until no other run begins to write to `target`, or moves files there: of two that did so at once one would
    leave its index beside the other's data. What they wait for is a hidden folder, which goes again."""
    turn = target.with_name(f".{target.name}{_HIDDEN}turn")
    lock = _locked(turn)
    try:
        yield
    finally:
        _remove_empty([turn])
        os.close(lock)


def _locked(folder: Path) -> int:
    """Make a folder, or wait for whoever has it, and return a descriptor that holds it."""
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            pass
        except BaseException:  # a signal, as it was made
            _remove_empty([folder])
            raise
        with contextlib.suppress(FileNotFoundError):  # whoever had it is through, and it is gone
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_same(lock, folder):
                return lock
            os.close(lock)


def _is_same(lock: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), folder.stat())
    except FileNotFoundError:
        return False


def check_free(target: Path, *, force: bool, read: Iterable[str | os.PathLike[str]] = ()) -> list[Path]:
    """Return the files of `target` that exist; raise `OutputError` where `force` may not replace them, or is not set.

    `force` replaces files and links to files: no device, pipe, socket or folder, whoever asks; and nothing of `read`,
    what a page or a policy is made of and does not hold.
    """
    check_reachable(target)
    if any(Path(source).resolve() == target.resolve() for source in read):
        raise OutputError(f"writing '{target}': that is what is read, which would be lost; name another place")
    _check_parent(target)
    if target.is_dir():
        raise OutputError(f"writing '{target}': it is a folder, expected a new file; name another place")
    of_bundle = _BUNDLE_FILE.search(target.name)
    if of_bundle and of_bundle.start() > 0 and target.exists():
        raise OutputError(
            f"writing '{target}': it is a file of the checkpoint '{target.name[: of_bundle.start()]}', which would"
            " be lost; name another place"
        )
    _is_in_store(target)
    there = _files_of(target)
    for file in there:
        _refuse_special(target, file)
    if there and not force:
        raise OutputError(f"writing '{target}': '{there[0]}' exists; name another place, or add --force to replace it")
    return there


def check_not_read(target: Path, read: Iterable[str | os.PathLike[str]]) -> None:
    """Raise `OutputError` where `target` is one of `read`, in one that is a folder, or a folder around one: some rows
    of a table do not stand for it, and who writes these over what they are read from loses the others."""
    written = target.resolve()
    for source in read:
        there = Path(source).resolve()
        if written == there:
            raise OutputError(f"writing '{target}': that is what is read, which would be lost; name another place")
        if written in there.parents:
            raise OutputError(f"writing '{target}': that is around '{source}', which is read; name another place")
        check_not_in(target, source)


def check_not_in(target: Path, read: str | os.PathLike[str]) -> None:
    """Raise `OutputError` where `target` is in a folder that is read: another file there becomes part of the tables."""
    if Path(read).resolve() in target.resolve().parents:
        raise OutputError(f"writing '{target}': that is in '{read}', which is read; name another place")


def _is_in_store(target: Path) -> bool:
    """Tell whether a target stands for a place in a store; raises `OutputError` where nothing can be written there,
    and `UsageError` for a URL that was made a path."""
    first = target.relative_to(Path.cwd()).parts[:1] if target.is_relative_to(Path.cwd()) else ()
    if first and re.fullmatch(r"[a-z][a-z0-9+.]+:", first[0]) and not Path(first[0]).exists():
        raise UsageError(f"writing to '{first[0]}/...': got a URL as a path, which has lost a slash; give it as text")
    mirror = sys.modules.get("kvtools.remote.mirror")  # nothing stands for a URL before it is imported
    return bool(mirror is not None and mirror.is_writable_place(target))


def folder_above(target: Path) -> Path:
    """Return the nearest folder above `target` that exists: what is written there is on its disk."""
    return next(parent for parent in target.absolute().parents if os.path.lexists(parent))


def check_reachable(target: Path) -> None:
    """Raise `OutputError` where nobody can tell whether `target` exists: its name is too long, say."""
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OutputError(f"writing '{target}': {error.strerror or error}; name another place") from error


def _check_parent(target: Path) -> None:
    above = folder_above(target)
    if not above.is_dir():
        raise OutputError(f"writing '{target}': '{above}' is no folder; name another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise OutputError(f"writing '{target}': nothing can be written in '{above}'; name another place")


def _files_of(target: Path) -> list[Path]:
    """Return what exists by the names of a prefix: the file itself, and a bundle's index and data files."""
    if not target.parent.exists():
        return []
    prefix = f"{target.name}."
    # By name: the folder may have thousands of others, and a path of each takes longer than to list them all.
    beside = [name for name in os.listdir(target.parent) if name.startswith(prefix)]  # noqa: PTH208
    bundle = [target.parent / name for name in beside if _BUNDLE_FILE.fullmatch(name.removeprefix(target.name))]
    return [file for file in (target, *bundle) if os.path.lexists(file)]


def bundle_files(target: Path) -> list[Path]:
    """Return the files of a prefix: the file itself, a bundle's index and data files, and the graph beside them."""
    graph = target.with_name(f"{target.name}.meta")
    return [*_files_of(target), *([graph] if graph.exists() else [])]


def _refuse_special(target: Path, file: Path) -> None:
    """Raise `OutputError` where `file` is, or is a link to, what is no file: renaming over it would end it."""
    kind = file_kind(file)
    if kind is not None:
        raise OutputError(f"writing '{target}': '{file}' is {kind}, expected a new file; name another place")


def _index_last(file: Path) -> tuple[bool, str]:
    return file.name.endswith(_INDEX), file.name


@contextlib.contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """Give a hidden folder beside `target` that is gone when the block ends, or at the next run if this one is killed.

    Raises:
        OutputError: the disk refuses it, or what is written there.
    """
    missing = [parent for parent in target.parents if not os.path.lexists(parent)]
    # Named before it is there: a signal that comes as it is made, before anyone holds its name, would leave it behind.
    work = target.parent / f".{target.name}{_HIDDEN}{secrets.token_urlsafe(6)}"
    lock: int | None = None
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _in_turn(target):
                _remove_leftovers(target)
                work.mkdir(0o700)
                lock = os.open(work, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise OutputError(f"writing '{target}': {error.strerror or error}; name another place") from error
        yield work
    except ScratchError:
        raise
    except OSError as error:
        raise OutputError(
            f"writing '{target}': {error.strerror or error}; nothing was changed there, make room or name another place"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        if not os.path.lexists(target):
            _remove_empty(missing)


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, the deepest one first, as far as there is nothing in them."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def check_replaceable(target: Path, *, mark: str, force: bool) -> None:
    """Raise `OutputError` unless `target` is free, or a folder of the right kind that `force` may replace."""
    _is_in_store(target)
    check_reachable(target)
    if not os.path.lexists(target):
        _check_parent(target)
        return
    if not force:
        raise OutputError(f"writing '{target}': it exists already; name another place, or add --force to replace it")
    if target.is_symlink() or not target.is_dir():
        raise OutputError(f"writing '{target}': it is no folder, expected one to replace; name another place")
    if any(target.iterdir()) and not (target / mark).exists() and not (target / UNFINISHED).exists():
        raise OutputError(
            f"writing '{target}': the folder there has no '{mark}', so --force does not replace it; name another place"
        )
    _check_parent(target)


def check_apart(source: str | os.PathLike[str], target: Path) -> None:
    """Raise `OutputError` where writing `target` would replace, or change, what is being read."""
    read, written = Path(source).resolve(), target.resolve()
    within = read in written.parents and (read / "saved_model.pb").exists()
    around = written in read.parents and (written / "saved_model.pb").exists()
    if read == written or within or around:
        where = "what is exported itself" if read == written else f"where '{source}' is"
        raise OutputError(f"writing '{target}': that is {where}, which would be lost or changed; name another place")


def _move_into_place(work: Path, target: Path) -> None:
    if not target.exists():
        work.rename(target)
    elif not _exchange(work, target):
        # A kernel or file system without an atomic exchange: for a moment neither is there, and both are
        # kept.
        old = work.with_name(work.name + "-old")
        target.rename(old)
        work.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    sync(target.parent)


def _exchange(a: Path, b: Path) -> bool:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done = rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_RENAME_EXCHANGE))
    return bool(done == 0)


def is_being_written(work: Path) -> bool:
    """Tell whether a hidden folder beside an output is that of a run that goes on, and not one that was killed."""
    try:
        lock = os.open(work, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _remove_leftovers(target: Path) -> None:
    prefix = f".{target.name}{_HIDDEN}"
    for name in os.listdir(target.parent):  # noqa: PTH208
        if name.startswith(prefix) and not name.endswith("-old"):
            folder = target.parent / name
            if not is_being_written(folder):
                shutil.rmtree(folder, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Return when a folder and all that is in it are on the disk."""
    paths: list[Path] = []
    for parent, _, files in os.walk(folder):
        paths += [Path(parent), *(Path(parent) / file for file in files)]
    # At once: a file system writes its journal for all that wait, not once for each of thousands of files.
    with ThreadPoolExecutor(min(_SYNCED_AT_ONCE, len(paths))) as pool:
        for _ in pool.map(sync, paths):
            pass


def sync(path: Path) -> None:
    """Return when a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
