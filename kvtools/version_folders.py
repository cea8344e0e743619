"""Versions of a model, as servers find them: folders and snapshots whose names are numbers, in one folder.

`models/ctr/7/` is a SavedModel, `models/ctr/7.kvsnap` a snapshot. A version is written whole, under a name that was
free. Old ones are removed after that, and only what `kvtools` wrote: SavedModels with its manifest, and snapshots.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from kvtools.dialects.savedmodel import MANIFEST
from kvtools.dialects.snapshot import MAGIC
from kvtools.errors import OutputError, UsageError
from kvtools.remote.stored import open_binary, read_bytes
from kvtools.replace_output import is_being_written
from kvtools.split_manifest import MANIFEST as SPLIT_MANIFEST
from kvtools.split_manifest import is_split

_VERSION = re.compile(r"([0-9]{1,19})(\.kvsnap|\.snapshot)?")
_BEING_WRITTEN = re.compile(r"\.([0-9]{1,19})(\.kvsnap|\.snapshot)?\.kvtools-.*")
_REMOVED = re.compile(r"\.[0-9]{1,19}\.kvtools-removed-[0-9a-f]{32}")


def next_version(folder: Path, suffix: str = "") -> Path:
    """Return the path of the version behind all that are in a folder, whoever wrote them; the first one is 1.

    A version that another process is writing counts.

    Args:
        folder: where the versions are.
        suffix: ".kvsnap" for a snapshot.

    Raises:
        OutputError: there is no such folder.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "9").mkdir(); (folder / "10.kvsnap").touch()
        >>> next_version(folder).name, next_version(folder, ".kvsnap").name
        ('11', '11.kvsnap')
    """
    if not folder.is_dir():
        raise OutputError(f"writing a version in '{folder}': there is no such folder; make it first")
    entries = _entries(folder)
    numbers = [_number(entry.name) for entry in entries]
    for entry in entries:
        if (found := _BEING_WRITTEN.fullmatch(entry.name)) and is_being_written(entry):
            numbers.append(int(found[1]))
    return folder / f"{max([number for number in numbers if number is not None], default=0) + 1}{suffix}"


def check_version(output: Path, keep: int) -> None:
    """Raise `UsageError` unless `output` is a version by its name, and `keep` a number of versions."""
    if keep < 1:
        raise UsageError(f"got --keep {keep}, expected 1 or more versions")
    if _number(output.name) is None:
        raise UsageError(
            f"got --keep {keep} and '{output}': versions are told by their numbers; name one, such as"
            f" '{output / '1' if not output.suffix else output.with_name('1.kvsnap')}', or add --next-version"
        )


def outdated(output: Path, keep: int) -> list[Path]:
    """Return the versions beside `output` that are not among the `keep` newest, the oldest first.

    Versions are of the kind of `output`, folders or snapshots, and such as `kvtools` wrote. `output` counts, there or
    not, and is never among them; neither is a link, nor what anybody else has put there.
    """
    snapshots = output.suffix != ""
    there = [
        (number, path)
        for path in _entries(output.parent)
        if (number := _number(path.name)) is not None
        and (path.suffix != "") == snapshots
        and path.name != output.name
        and _is_ours(path)
    ]
    this = _number(output.name)
    assert this is not None
    newest = sorted([*there, (this, output)], reverse=True)[:keep]
    return [path for number, path in sorted(there) if (number, path) not in newest]


def remove_versions(versions: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Remove versions; each is gone at once, for whoever lists the folder.

    Returns:
        Which were removed, and for each of the others what stood against it.
    """
    removed: list[Path] = []
    faults: list[str] = []
    for version in versions:
        try:
            if version.is_dir():
                gone = version.with_name(f".{version.name}.kvtools-removed-{uuid.uuid4().hex}")
                version.rename(gone)
            else:
                version.unlink()
            removed.append(version)
        except OSError as error:
            faults.append(f"removing '{version}': {error.strerror or error}")
    for folder in {version.parent for version in versions}:
        for entry in _entries(folder):  # those of a run that was killed here, too
            if _REMOVED.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
    return removed, faults


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _number(name: str) -> int | None:
    found = _VERSION.fullmatch(name)
    return int(found[1]) if found else None


def _is_ours(path: Path) -> bool:
    if path.is_symlink():
        return False
    try:
        if path.suffix:
            with open_binary(path) as file:
                return file.read(len(MAGIC)) == MAGIC
        manifest = json.loads(read_bytes(path / (SPLIT_MANIFEST if is_split(path) else MANIFEST)))
        return isinstance(manifest, dict) and str(manifest.get("written_by", "")).startswith("kvtools ")
    except (OSError, ValueError, RecursionError):
        return False
