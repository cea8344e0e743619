"""Which dialect a path is in: the most telling mark first, a plain TensorFlow checkpoint last."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvtools.chain_place import is_chain
from kvtools.dialects.dialect import Dialect, Source
from kvtools.dialects.interface import Checkpoint, Origin, TableReader
from kvtools.dialects.location import locate
from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError, UsageError
from kvtools.file_kind import FOLDER, file_kind
from kvtools.remote.paths import local_path, shown_path
from kvtools.remote.unfinished import UNFINISHED

_MODULES = (
    "snapshot",
    "savedmodel",
    "tfplugin",
    "tfplus",
    "deeprec",
    "tfra_files",
    "tfra",
    "sok",
    "sok_legacy",
    "hdf5",
    "parquet",
    "arrow",
    "npz",
    "safetensors",
    "huggingface",
    "torch",
    "hugectr",
    "tfra_redis",
    "redis",
    "tensorflow",
)
"""The modules of this package that are dialects, in the order in which they look at a path."""

_BY_SUFFIX = {
    ".arrow": "arrow",
    ".feather": "arrow",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".ipc": "arrow",
    ".kvsnap": "snapshot",
    ".npz": "npz",
    ".parq": "parquet",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".pt": "torch",
    ".pth": "torch",
    ".safetensors": "safetensors",
}
_BY_URL = ("tfra_redis", "redis")


def dialects() -> dict[str, Dialect]:
    """Return all dialects by name, in the order in which they look at a path."""
    return {dialect.name: dialect for dialect in _each()}


def _each() -> Iterator[Dialect]:
    """Yield the dialects in order, importing each only when it is its turn: most paths are told by the first few."""
    for module in _MODULES:
        dialect: Dialect = importlib.import_module(f"kvtools.dialects.{module}").DIALECT
        yield dialect


def dialect_named(name: str) -> Dialect:
    """Return the dialect of this name; raises `UsageError` naming those that there are."""
    known = dialects()
    if name not in known:
        raise UsageError(f"looking for dialect '{name}': there is none; expected one of {', '.join(known)}")
    return known[name]


def writable_dialects() -> tuple[str, ...]:
    """Return the names of the dialects that kvtools writes, sorted."""
    return tuple(sorted(name for name, dialect in dialects().items() if dialect.write is not None))


def dialect_for(output: str | os.PathLike[str], *, option: str = "--to") -> Dialect:
    """Return the dialect to write to an output that nobody named one for, by its suffix or URL scheme.

    Raises:
        UsageError: the name tells nothing; the message names the option, and lists the dialects that can be written.

    >>> dialect_for("model.ckpt")
    Traceback (most recent call last):
    kvtools.errors.UsageError: writing 'model.ckpt': its name does not tell the dialect; say --to one of ...
    """
    text = os.fspath(output)
    if "://" in text:
        source = Source(text)
        name = next((name for name in _BY_URL if dialect_named(name).sniff(source)), None)
    else:
        name = _BY_SUFFIX.get(Path(text).suffix.lower())
    if name is None:
        raise UsageError(
            f"writing '{text}': its name does not tell the dialect; say {option} one of"
            f" {', '.join(writable_dialects())}"
        )
    return dialect_named(name)


def open_checkpoint(path: str | os.PathLike[str], options: OpenOptions | None = None) -> Checkpoint:
    """Open the checkpoint that `path` means, whatever its dialect, reading no more than its index.

    Args:
        path: a checkpoint prefix, one of its files, a checkpoint folder, a SavedModel folder, a file or folder of
            another dialect, or a URL. Of a folder with increments in it, the newest whole chain is meant, folded.
        options: which dialect it is, if that is not to be found out, and what its files do not say.

    Raises:
        BadInputError: there is no checkpoint, or one of its files is missing, truncated or damaged; or it is an
            increment of a chain, which only who asks for it by `options.increments` gets.
        UsageError: there is no dialect of the given name, or the files say otherwise of a table than the options.

    Example:
        >>> open_checkpoint("no/such/model.ckpt")
        Traceback (most recent call last):
        kvtools.errors.BadInputError: looking for a checkpoint at 'no/such/model.ckpt': ...
    """
    options = options or OpenOptions()
    source = Source(os.fspath(local_path(path)), salvage=options.salvage)
    if not source.is_url and (kind := file_kind(source.path)) not in (None, FOLDER):
        raise BadInputError(f"opening '{source.text}': it is {kind}, expected a file or folder")
    if not source.is_url and os.path.exists(source.path / UNFINISHED):  # noqa: PTH110  (false where it may not be looked at)
        raise BadInputError(
            f"opening '{source.text}': it is being written, or its writing was broken off: '{UNFINISHED}' is in it;"
            " wait, or write it again with --force"
        )
    if not source.is_url and is_chain(source.path):
        folded: Checkpoint = importlib.import_module("kvtools.chain_fold").open_chain(source.path, options)
        return folded
    if options.dialect is not None:
        dialect = dialect_named(options.dialect)
        if not _takes(dialect, source):
            _explain(source)
            raise BadInputError(
                f"opening '{source.text}' as {dialect.name}: it is not {dialect.title}; leave --dialect out"
            )
    else:
        found = next((dialect for dialect in _each() if _takes(dialect, source)), None)
        if found is None:
            _explain(source)
            raise BadInputError(f"opening '{source.text}': it is in none of the dialects {', '.join(dialects())}")
        dialect = found
    checkpoint = _agreeing(dialect.open(source, options), options)
    path_elsewhere = source.text if source.is_url else shown_path(source.path.absolute())  # for other processes
    for name, table in checkpoint.tables.items():
        table.origin = Origin(path_elsewhere, options, name, open_table)
    return checkpoint


def _agreeing(checkpoint: Checkpoint, options: OpenOptions) -> Checkpoint:
    """Return the checkpoint if the options contradict none of its tables, without these if `options` are lenient."""
    said = {name: options.contradicted_by(table.schema) for name, table in checkpoint.tables.items()}
    wrong = {
        name: UsageError(f"opening table '{name}' of '{checkpoint.path}': {reason}")
        for name, reason in said.items()
        if reason is not None
    }
    if not wrong:
        return checkpoint
    if not options.lenient:
        raise next(iter(wrong.values()))
    agreeing = {name: table for name, table in checkpoint.tables.items() if name not in wrong}
    return dataclasses.replace(checkpoint, tables=agreeing, broken={**checkpoint.broken, **wrong})


def open_table(origin: Origin) -> TableReader:
    """Open the table again that was opened there."""
    return open_checkpoint(origin.path, origin.options).table(origin.table)


def _takes(dialect: Dialect, source: Source) -> bool:
    """Tell whether a source is of a dialect; raises `BadInputError` where it may not, or cannot, be looked at."""
    try:
        return dialect.sniff(source)
    except PermissionError as error:
        _explain(source)
        raise BadInputError(f"opening '{source.text}': {error.strerror}: '{error.filename}'") from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise BadInputError(f"opening '{source.text}': {error.strerror}") from error


def _explain(source: Source) -> None:
    """Raise what keeps a path from being a TensorFlow checkpoint, if something does."""
    if not source.is_url:
        locate(Path(source.text))
