"""Tables in folders of files: which files of a folder are parts of one table, and what the table is called."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER_MARK = ".kvtools"
"""A file in each folder that kvtools wrote: `--force` replaces no folder without it."""

_VARYING = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\d+")

_FOLDERS_LOOKED_AT = 1000


def files_below(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files of a folder and its subfolders that end in one of `suffixes`, in the order of their names.

    As Spark, Hive and pyarrow do, names that begin with a dot or an underscore are passed over.
    """
    return list(_walk(folder, suffixes))


def other_files(folder: Path, suffixes: tuple[str, ...], most: int) -> list[Path]:
    """Return up to `most` of the files that `files_below` passes over although their names hide nothing."""
    return list(itertools.islice(_walk(folder, suffixes, others=True), most))


def has_file(folder: Path, suffixes: tuple[str, ...]) -> bool:
    """Tell whether there is such a file, looking no further than the first, and at so many folders at the most."""
    return next(_walk(folder, suffixes, _FOLDERS_LOOKED_AT), None) is not None


def group_files(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Group files by the table that they are parts of; returns the table's name and its files.

    The files of a folder whose names differ in numbers only are parts of one table, which goes by the folder's name;
    files of other names are tables of their own. Folders called `column=value` belong to the folder above.

    >>> group_files(Path("d"), [Path("d/part-0.parquet"), Path("d/part-1.parquet")])
    {'d': [PosixPath('d/part-0.parquet'), PosixPath('d/part-1.parquet')]}
    >>> list(group_files(Path("d"), [Path("d/a.parquet"), Path("d/b/part-0.parquet")]))
    ['a', 'b']
    """
    by_place: dict[Path, dict[str, list[Path]]] = {}
    for file in files:
        place = file.parent
        while "=" in place.name and place != folder:
            place = place.parent
        pattern = _VARYING.sub("#", file.name.split(".")[0])
        by_place.setdefault(place, {}).setdefault(pattern, []).append(file)
    groups: dict[str, list[Path]] = {}
    for place, patterns in by_place.items():
        inside = "" if place == folder else place.relative_to(folder).as_posix()
        for pattern, found in patterns.items():
            if len(patterns) == 1 and ("#" in pattern or len(found) > 1):
                name = inside or folder.resolve().name
            else:
                stem = pattern.split("#")[0].rstrip("-_") if "#" in pattern and len(found) > 1 else ""
                stem = stem or found[0].name.split(".")[0]
                name = f"{inside}/{stem}" if inside else stem
            groups.setdefault(name, []).extend(found)
    return groups


def _walk(folder: Path, suffixes: tuple[str, ...], most: int | None = None, *, others: bool = False) -> Iterator[Path]:
    for parent, folders, files in itertools.islice(os.walk(folder), most):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        for name in sorted(files):
            if name[0] not in "._" and name.endswith(suffixes) != others:
                yield Path(parent) / name
