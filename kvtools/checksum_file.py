"""Checksums of a checkpoint's files in a file beside them, for formats that have none, and what they say later on.

The file is `.kvtools-checksums` in a folder, and `<name>.kvtools-checksums` beside a file or a bundle. It is JSON:

    {
      "kvtools_checksums": 1,           the version of this format
      "crc32c": "1a2b3c4d",             CRC-32C of `content`, as it stands in the file
      "content": {
        "block": 1048576,               bytes that have a checksum together; the last ones of a file may be fewer
        "written": 1700000000000000000, when, in nanoseconds since 1970
        "files": [
          {
            "name": "emb_0-weight",     below the folder, with /; or beside this file
            "bytes": 3000000,
            "modified": 1690000000000000000,
            "crc32c": "0011223344556677aabbccdd"   of each block, 8 digits each
          }
        ]
      }
    }

Files whose names begin with a dot are left out: they are lists of files, marks and what is being written.

The checksums find every byte that changed. Whether it was damage, or somebody wrote the checkpoint again, they cannot
know; it is told by what changed, and when. See `_changed`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from kvtools.dialects.bundle.checksum import extend
from kvtools.dialects.interface import Finding
from kvtools.dialects.options import Progress
from kvtools.errors import BadInputError, CorruptFileError, OutputError, UsageError
from kvtools.remote.paths import shown_path
from kvtools.remote.stored import open_binary, read_bytes
from kvtools.replace_output import CHECKSUMS, bundle_files, replace_files

_VERSION = 1
_BLOCK = 1 << 20
_AT_ONCE = 8
_FEW = 5
_SECOND = 10**9


@dataclass(frozen=True)
class FileChecksums:
    """What is known of a file: its name, size, time in nanoseconds, and the CRC-32C of each block."""

    name: str
    bytes: int
    modified: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class ChecksumFile:
    """The checksums of the files of a checkpoint, from the file at `path`, `written` in nanoseconds since 1970."""

    path: Path
    block: int
    written: int
    files: tuple[FileChecksums, ...]

    @property
    def bytes(self) -> int:
        """How many bytes all files have."""
        return sum(file.bytes for file in self.files)

    @property
    def date(self) -> str:
        """When it was written, in UTC."""
        return datetime.fromtimestamp(self.written / _SECOND, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def checksum_path(checkpoint: Path) -> Path:
    """Return where the checksums of a checkpoint are, or would be; of one in a SavedModel, in the model's folder.

    >>> str(checksum_path(Path("no/such/model.ckpt-7")))
    'no/such/model.ckpt-7.kvtools-checksums'
    """
    folder = _folder_of(checkpoint)
    return checkpoint.with_name(checkpoint.name + CHECKSUMS) if folder is None else folder / CHECKSUMS


def _folder_of(checkpoint: Path) -> Path | None:
    if checkpoint.is_dir():
        return checkpoint
    model = checkpoint.parent.parent
    return model if checkpoint.parent.name == "variables" and (model / "saved_model.pb").exists() else None


def files_of(checkpoint: Path) -> dict[str, Path]:
    """Return the files of a checkpoint by the names that they go by in its checksums, sorted.

    Those in the folder, or the file, or a bundle's index, data files and `.meta`, and the tables that TFRA saved in a
    folder beside it.
    """
    folder = _folder_of(checkpoint)
    if folder is not None:
        return dict(_below(folder, folder))
    found = [file for file in bundle_files(checkpoint) if file.is_file()]
    files = {file.name: file for file in found}
    if f"{checkpoint.name}.index" in files:
        from kvtools.dialects.dialect import Source
        from kvtools.dialects.tfra_files import folder_of

        beside = folder_of(Source(str(checkpoint)))
        if beside is not None:
            files |= dict(_below(beside, checkpoint.parent))
    return dict(sorted(files.items()))


def _below(folder: Path, root: Path) -> Iterator[tuple[str, Path]]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent) / name
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path


def check_local(checkpoint: Path | str) -> None:
    """Raise `UsageError` where checksums are to be written of a checkpoint that is at a URL."""
    text = shown_path(checkpoint)
    if "://" in text:
        raise UsageError(
            f"writing checksums of '{text}': they are written for local files only; copy it to this machine first, or"
            f" write it in a dialect that has checksums, `kvtools migrate {text} OUT`"
        )


def write_checksums(
    checkpoint: Path | str, *, force: bool = False, dry_run: bool = False, progress: Progress | None = None
) -> ChecksumFile:
    """Write the checksums of a checkpoint's files beside them.

    Args:
        checkpoint: its path as `Checkpoint.path` has it.
        force: replace checksums that are there.
        dry_run: read every file, and write nothing.
        progress: called with bytes.

    Raises:
        UsageError: the checkpoint is at a URL.
        OutputError: there are checksums already, or they cannot be written; or a file changed meanwhile.

    Example:
        ```python
        print(write_checksums(Path("sok_dump")).path)  # sok_dump/.kvtools-checksums
        ```
    """
    check_local(checkpoint)
    checkpoint = Path(checkpoint)
    target = checksum_path(checkpoint)
    paths = files_of(checkpoint)
    if not paths:
        raise BadInputError(f"writing checksums of '{checkpoint}': there is no file of it")
    total = sum(path.stat().st_size for path in paths.values())
    with replace_files(target, force=force, dry_run=dry_run) as staging:
        files = tuple(_checksums_of(paths, total, progress))
        made = ChecksumFile(target, _BLOCK, time.time_ns(), files)
        staging.write_text(_encoded(made), "utf-8")
    return made


def _checksums_of(paths: dict[str, Path], total: int, progress: Progress | None) -> Iterator[FileChecksums]:
    done = 0

    def read(name: str) -> FileChecksums:
        path = paths[name]
        before = path.stat()
        blocks = tuple(_blocks(path, _BLOCK))
        after = path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise OutputError(f"writing checksums: '{path}' changed while it was read; try again when nobody writes it")
        return FileChecksums(name, before.st_size, before.st_mtime_ns, blocks)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvtools-checksums") as pool:
        for made in pool.map(read, paths):
            done += made.bytes
            if progress:
                progress("bytes", done, total)
            yield made


def _blocks(path: Path, block: int) -> Iterator[int]:
    with open_binary(path) as file:
        while data := _full(file, block):
            yield extend(0, data)


def _full(file: Any, size: int) -> bytes:
    """Read `size` bytes, fewer at the end of a file alone."""
    data: bytes = file.read(size)
    while data and len(data) < size and (more := file.read(size - len(data))):
        data += more
    return data


def _encoded(made: ChecksumFile) -> str:
    files = [
        {
            "name": file.name,
            "bytes": file.bytes,
            "modified": file.modified,
            "crc32c": "".join(f"{crc:08x}" for crc in file.blocks),
        }
        for file in made.files
    ]
    content = json.dumps({"block": made.block, "written": made.written, "files": files})
    return f'{{"kvtools_checksums": {_VERSION}, "crc32c": "{extend(0, content.encode()):08x}", "content": {content}}}\n'


def read_checksums(checkpoint: Path) -> ChecksumFile | None:
    """Return the checksums of a checkpoint, None if there are none.

    Raises:
        CorruptFileError: the file of checksums is damaged, or none.
        BadInputError: it cannot be read, or is of a later version.
    """
    path = checksum_path(checkpoint)
    doing = f"reading the checksums '{path}'"
    try:
        text = read_bytes(path).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInputError(f"{doing}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{doing}: it is no text; write it again") from error
    try:
        told = json.loads(text)
        if told["kvtools_checksums"] != _VERSION:
            raise BadInputError(
                f"{doing}: its version is {told['kvtools_checksums']!r}, expected {_VERSION}; update kvtools"
            )
        _, _, content = text.partition('"content": ')
        if f"{extend(0, content[: content.rindex('}')].encode()):08x}" != told["crc32c"]:
            raise CorruptFileError(f"{doing}: it does not match its own checksum: it is damaged; write it again")
        content = told["content"]
        files = tuple(
            FileChecksums(
                str(file["name"]),
                int(file["bytes"]),
                int(file["modified"]),
                tuple(int(file["crc32c"][at : at + 8], 16) for at in range(0, len(file["crc32c"]), 8)),
            )
            for file in content["files"]
        )
        block = int(content["block"])
        if block < 1:
            raise ValueError(block)
        return ChecksumFile(path, block, int(content["written"]), files)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFileError(f"{doing}: it is damaged ({type(error).__name__}); write it again") from error


def check_files(checkpoint: Path, known: ChecksumFile, *, command: str) -> list[Finding]:
    """Return where the files of a checkpoint differ from their checksums; `command` writes them anew."""
    there = files_of(checkpoint)
    findings: list[Finding] = []
    rewritten: list[str] = []
    listed = {file.name for file in known.files}
    missing = [file.name for file in known.files if file.name not in there]
    for name in missing:
        findings.append(
            Finding("error", "missing-file", "", f"'{name}' is in '{known.path}' and not there; copy every file")
        )
    present = [file for file in known.files if file.name in there]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvtools-checksums") as pool:
        changes = list(pool.map(lambda file: _changed(there[file.name], file, known), present))
    changed = [(file.name, change) for file, change in zip(present, changes, strict=True) if change is not None]
    again = any(change.kind == "written" for _, change in changed)
    for name, change in changed:
        # Beside a file that was certainly written again, another that was written after the checksums was, too.
        if change.kind == "written" or (again and change.kind == "unclear"):
            rewritten.append(name)
        else:
            findings.append(Finding("error", "changed-file", "", f"'{there[name]}' {change.message}"))
    extra = [name for name in there if name not in listed]
    if extra:
        message = f"{_named(extra)} not in '{known.path}': does it belong there? `{command}` takes it in"
        findings.append(Finding("warning", "extra-file", "", message))
    if rewritten:
        message = (
            f"{_named(rewritten)} written again after '{known.path}' of {known.date}, which is of what was there before"
            f" and says nothing of what is there now; if that is as it should be, `{command}` notes its checksums"
        )
        findings.append(Finding("warning", "stale-checksums", "", message))
    return findings


@dataclass(frozen=True)
class _Change:
    """What became of a file: it is damaged, or was written again, or may be either; and how that is said."""

    kind: Literal["damaged", "written", "unclear"]
    message: str = ""


def _changed(path: Path, known: FileChecksums, of: ChecksumFile) -> _Change | None:
    """Return how a file differs from its checksums, None if it does not.

    A file that was cut, one whose time says that nobody wrote to it, and one of which few blocks of many differ, is
    damaged. Where it was written after the checksums, is no piece of the old one, and has another size or as many
    other blocks as half of all, two at least, somebody wrote it again. Of a small file nobody knows.
    """
    try:
        status = path.stat()
        blocks = tuple(_blocks(path, of.block))
    except OSError as error:
        return _Change("damaged", f"cannot be read: {error.strerror or error}")
    size, expected = status.st_size, known.bytes
    if size == expected and blocks == known.blocks:
        return None
    later = status.st_mtime_ns > of.written
    whole = min(size, expected) // of.block
    if size < expected and blocks[:whole] == known.blocks[:whole]:
        kind: Literal["damaged", "unclear"] = "unclear" if later and not whole and size else "damaged"
        return _Change(kind, f"was cut: it has {size} bytes, expected {expected}; copy it again from its source")
    pairs = zip(blocks, known.blocks, strict=False)
    differing = [number for number, (got, stored) in enumerate(pairs) if got != stored]
    most = len(known.blocks) > 1 and 2 * len(differing) >= len(known.blocks)
    if later and (size != expected or most):
        return _Change("written")
    if size != expected:
        return _Change(
            "damaged",
            f"has {size} bytes, expected {expected}, and is no newer than its checksums: it is another file, or"
            " damaged; copy it again from its source",
        )
    first = differing[0] * of.block
    where = f"bytes {first} to {min(first + of.block, expected)}"
    more = f" and in {len(differing) - 1} other blocks" if len(differing) > 1 else ""
    why = "it is damaged, or was written again"
    if _same_time(status.st_mtime_ns, known.modified):
        why = "nobody wrote to it since: it is damaged"
    return _Change(
        "unclear" if later and len(known.blocks) == 1 else "damaged",
        f"differs from its checksums in {where}{more}; {why}; copy it again from its source",
    )


def _same_time(a: int, b: int) -> bool:
    """Tell whether two times are one, of which one may have lost its fraction of a second on the way."""
    return a == b or (a // _SECOND == b // _SECOND and (a % _SECOND == 0 or b % _SECOND == 0))


def _named(names: Sequence[str]) -> str:
    few = ", ".join(f"'{name}'" for name in names[:_FEW])
    return few + (f" and {len(names) - _FEW} more are" if len(names) > _FEW else " is" if len(names) == 1 else " are")
