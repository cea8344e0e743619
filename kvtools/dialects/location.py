"""From the path that a user typed to the checkpoint files that are meant.

A checkpoint is named by its prefix (`model.ckpt-100`), by one of its files, by the folder that holds it (the
latest one is taken, as the folder's `checkpoint` file says, else the newest), or by a SavedModel folder.
Format of the `checkpoint` file: text protocol buffer, https://www.tensorflow.org/guide/checkpoint.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvtools.errors import BadInputError
from kvtools.remote.stored import for_library, read_bytes

_FILE_OF_CHECKPOINT = re.compile(r"\.(index|meta|data-\d{5,}-of-\d{5,})$")
_LATEST = re.compile(r'^\s*model_checkpoint_path\s*:\s*(?:"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\')', re.M)
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|.)")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


@dataclass(frozen=True)
class Location:
    """The bundle prefix that is meant, and the SavedModel folder around it, if it is in one."""

    prefix: Path
    saved_model: Path | None = None


def locate(path: Path) -> Location:
    """Find the checkpoint that `path` means.

    Raises `BadInputError` if there is none, naming what was looked for.

    >>> locate(Path("no/such/model.ckpt"))
    Traceback (most recent call last):
    kvtools.errors.BadInputError: looking for a checkpoint at 'no/such/model.ckpt': ...
    """
    if _is_file(Path(f"{path}.index")):
        return Location(path)
    _check_readable(path)
    if path.is_dir():
        return _locate_in_folder(path)
    prefix = prefix_of_file(path)
    if prefix is not None:
        return Location(prefix)
    orphans = sorted(path.parent.glob(f"{_glob_escape(path.name)}.data-*")) if path.parent.is_dir() else []
    if orphans:
        raise BadInputError(
            f"looking for a checkpoint at '{path}': found '{orphans[0].name}' but no '{path.name}.index';"
            " copy the index file too"
        )
    if path.exists():
        refuse_keras_archive(path)
        raise BadInputError(
            f"looking for a checkpoint at '{path}': this file is none of a checkpoint's;"
            " name a checkpoint prefix (without .index), a checkpoint folder or a SavedModel folder"
        )
    if _is_file(Path(f"{path}.delta.index")):
        raise BadInputError(
            f"looking for a checkpoint at '{path}': there is no '{path}.index', but the increment '{path.name}.delta'"
            f" of a chain; name the chain's folder '{path.parent}', or put it together up to there, `kvtools merge"
            f" {path.parent} OUT --until {path.name.rpartition('-')[2]}`"
        )
    raise BadInputError(
        f"looking for a checkpoint at '{path}': there is no such file, no such folder and no '{path}.index';"
        " name a file or folder of one of the dialects (`kvtools dialects`), or a checkpoint's prefix"
    )


def prefix_of_file(path: Path) -> Path | None:
    """Return the prefix of a checkpoint of which a path, going by its name, is a file; None where it is none.

    >>> print(prefix_of_file(Path("run/model.ckpt-100.data-00000-of-00002")))
    run/model.ckpt-100
    """
    file = _FILE_OF_CHECKPOINT.search(path.name)
    return path.with_name(path.name[: file.start()]) if file and file.start() > 0 else None


def refuse_keras_archive(path: Path) -> None:
    """Raise `BadInputError` for a file of Keras, saying how to get at the tables that it may have."""
    try:
        with zipfile.ZipFile(for_library(path)) as archive:
            names = archive.namelist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return
    if "kv_tables/tables.index" in names:
        raise BadInputError(
            f"looking for a checkpoint at '{path}': it is a file of Keras, with a checkpoint of its tables in it;"
            f" `unzip {path} 'kv_tables/*'`, and name kv_tables/tables"
        )
    if "model.weights.h5" in names:
        raise BadInputError(
            f"looking for a checkpoint at '{path}': it is a file of Keras without tables;"
            " load it, and save a tf.train.Checkpoint(model=model)"
        )


def _check_readable(path: Path) -> None:
    """Raise `BadInputError` where something is there, or may be, that this user may not read."""
    for file in (Path(f"{path}.index"), path):
        try:
            folder = stat.S_ISDIR(file.stat().st_mode)
            denied = not os.access(file, os.R_OK | os.X_OK if folder else os.R_OK, effective_ids=True)
        except PermissionError:
            denied = True
        except (OSError, ValueError):
            continue
        if denied:
            raise BadInputError(
                f"reading '{file}': Permission denied; run as a user who may read it, or change its permissions"
            )


def _locate_in_folder(folder: Path) -> Location:
    variables = folder / "variables" / "variables"
    if _is_file(folder / "saved_model.pb") or _is_file(Path(f"{variables}.index")):
        return Location(variables, folder)
    state = folder / "checkpoint"
    if _is_file(state):
        return Location(_latest(folder, state))
    indexes = [file for file in folder.glob("*.index") if file.is_file()]
    if not indexes:
        raise BadInputError(
            f"looking for a checkpoint in folder '{folder}': no '*.index' file, no 'checkpoint' file and no"
            " 'saved_model.pb'; name the folder that holds the checkpoint, or its prefix"
        )
    newest = max(indexes, key=lambda file: (file.stat().st_mtime_ns, file.name))
    return Location(newest.with_name(newest.name.removesuffix(".index")))


def _latest(folder: Path, state: Path) -> Path:
    try:
        found = _LATEST.search(read_bytes(state).decode("utf-8", errors="surrogateescape"))
    except OSError as error:
        raise BadInputError(f"reading '{state}': {error.strerror or error}") from error
    if not found:
        raise BadInputError(
            f"reading '{state}': it names no model_checkpoint_path; name the checkpoint's prefix instead of its folder"
        )
    named = Path(_unescape(found[1] if found[1] is not None else found[2]))
    # An absolute path goes stale when the folder is copied elsewhere: the file of that name beside it is
    # then meant.
    candidates = [folder / named, folder / named.name]
    for prefix in candidates:
        if _is_file(Path(f"{prefix}.index")):
            return prefix
    raise BadInputError(
        f"looking for the latest checkpoint of folder '{folder}': its 'checkpoint' file names '{named}',"
        f" and there is no '{candidates[0]}.index'; copy that checkpoint too, or name another prefix"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _unescape(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "01234567":
            return chr(int(code, 8))
        if code[0] == "x" and len(code) > 1:
            return chr(int(code[1:], 16))
        return _LETTERS.get(code, code)

    return _ESCAPE.sub(replace, text)


def _glob_escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
