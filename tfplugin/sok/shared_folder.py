"""Files that all ranks write together: a scratch folder that all of them see, and putting what is in it in place."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfplugin import ranks
from tfplugin.ranks import step

#: How long a file that rank 0 made may take to show on the other ranks.
SECONDS_TO_APPEAR = 15.0
_PROBE = "seen-by-all"


@contextlib.contextmanager
def shared_scratch(folder: Path, doing: str) -> Iterator[Path]:
    """A folder inside `folder` (made if need be) for all ranks, gone afterwards, whatever happens.

    Raises:
      OSError: it cannot be made; on the other ranks a `RankError`.
      RuntimeError: a rank does not see what rank 0 wrote there.
    """
    rank = ranks.rank()
    made: Path | None = None
    missing: list[Path] = []
    token = ""
    try:
        with step(doing):
            if rank == 0:
                missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
                folder.mkdir(parents=True, exist_ok=True)
                made = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
                made.chmod(0o777 & ~_umask())
                token = secrets.token_hex(16)
                (made / _PROBE).write_text(token)
        name, token = ranks.current().allgather((made.name if made else "", token))[0]
        with step(doing):
            _see(folder / name, token, doing)
        yield folder / name
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
            for parent in missing:  # what was made for nothing
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _see(scratch: Path, token: str, doing: str) -> None:
    give_up = time.monotonic() + SECONDS_TO_APPEAR
    while True:
        with contextlib.suppress(OSError):
            if (scratch / _PROBE).read_text() == token:
                return
        if time.monotonic() > give_up:
            raise RuntimeError(
                f"{doing}: rank {ranks.rank()} does not see what rank 0 wrote to '{scratch}': the folder must be on a "
                "filesystem that all ranks share."
            )
        time.sleep(0.05)


def put_in_place(scratch: Path, files: Sequence[tuple[Path, Path]], outdated: Sequence[Path] = ()) -> None:
    """Moves files of `scratch` to where they belong, and those that they replace or make `outdated` away.

    All or none: where a move fails, what was there before is there again. Done by one rank.
    """
    aside = scratch / "replaced"
    aside.mkdir()
    # The last of the files first: it is the one by which a reader finds the others.
    old = [path for path in (*(target for _, target in reversed(files)), *outdated) if path.exists()]
    moved_aside: list[tuple[Path, Path]] = []
    moved: list[tuple[Path, Path]] = []
    try:
        for number, path in enumerate(old):
            path.replace(aside / str(number))
            moved_aside.append((path, aside / str(number)))
        for source, target in files:
            source.replace(target)
            moved.append((source, target))
    except BaseException:
        for source, target in reversed(moved):
            target.replace(source)
        for path, kept in reversed(moved_aside):
            kept.replace(path)
        raise
    for folder in {target.parent for _, target in files}:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Has the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network filesystems cannot
            os.fsync(handle)
    finally:
        os.close(handle)
