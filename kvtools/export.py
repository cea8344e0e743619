"""Write tables as a SavedModel of stock TensorFlow operations, which any TensorFlow server loads without
this package.

Per table the model holds two variables and a lookup:

    keys   [rows]           int64; an int32 key is widened, a uint64 key bit-cast; [0] for a table of no rows
    values [rows + 1, dim]  in the table's type; the last row is zeros, for missing keys
    ids -> StaticHashTable built from `keys` when the model loads -> row number, `rows` if missing -> gather

The signature of table `scope/emb` is `scope_emb`, with input `ids` (int64, any shape) and output `embeddings`
(ids.shape + [dim]); with one table only it is `serving_default` too. Half-precision tables stay so in the
model and answer in float32.

Nothing big passes through TensorFlow: it saves the model with empty variables, and the bundle of variables
is then written anew, streaming. Peak memory is a chunk of values and the keys of one table, twice.
Format: https://www.tensorflow.org/guide/saved_model
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtools import __version__
from kvtools.clip import Clip
from kvtools.dialects.bundle import Bundle, BundleWriter
from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES, Array
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.savedmodel import FORMAT, MANIFEST
from kvtools.errors import BadInputError, MissingDependencyError, OutputError, one_line
from kvtools.key_join import repeated_rows
from kvtools.replace_output import check_replaceable, replace_folder
from kvtools.row_norms import non_finite_rows

_MODEL_FILE = "saved_model.pb"
_NOT_IN_SIGNATURES = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True)
class TableExport:
    """What became of one table: `rows` were kept in `bytes`, `cut` were left out, saving `bytes_saved`."""

    name: str
    signature: str
    key_dtype: str
    value_dtype: str
    dim: int
    rows: int
    cut: int
    duplicates: int
    non_finite: int
    bytes: int
    bytes_saved: int


def export_saved_model(
    checkpoint: Checkpoint,
    output: Path,
    *,
    tables: Sequence[str] = (),
    clip: Clip | None = None,
    force: bool = False,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> list[TableExport]:
    """Write tables of `checkpoint` as a SavedModel folder `output`.

    Where a key is there twice, its last row counts. Every byte read is checked against its checksum.

    Args:
        checkpoint: an opened checkpoint, of any dialect.
        output: the folder to write; it appears when it is whole, and what stood there stays if anything fails.
        tables: the tables' names; all if empty.
        clip: leave out the rows under this threshold.
        force: replace a SavedModel that is there.
        memory: how many bytes the search for keys that are there twice may hold; more spills to disk.
        progress: called after each chunk.

    Raises:
        UnknownTableError: the checkpoint has no such table.
        OutputError: `output` exists, or cannot be written.
        CorruptFileError: the checkpoint's data is damaged.
        MissingDependencyError: TensorFlow is not installed.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        export_saved_model(open_checkpoint("model.ckpt-100"), Path("out"), clip=Clip("abs", 1e-6))
        ```
    """
    readers = checkpoint.select(tables)
    if not readers:
        raise BadInputError(f"exporting '{checkpoint.path}': it has no key-value table; see `kvtools inspect`")
    check_replaceable(output, mark=_MODEL_FILE, force=force)
    _check_room(readers, output, clip)
    tf = _import_tensorflow()
    signatures = signature_names([reader.schema.name for reader in readers])
    with replace_folder(output, mark=_MODEL_FILE, force=force) as folder:
        staging = folder / "staging"
        staging.mkdir()
        with BundleWriter(staging / "variables") as writer:
            exports = [
                _write_table(writer, number, reader, signatures[reader.schema.name], clip, memory, progress)
                for number, reader in enumerate(readers)
            ]
            try:
                _save_graph(tf, exports, folder)
            except tf.errors.OpError as error:
                raise OutputError(
                    f"writing '{output}': {one_line(str(error.message))}; nothing was changed there"
                ) from error
            _copy_small_variables(writer, Bundle(folder / "variables" / "variables"))
        shutil.rmtree(folder / "variables")
        staging.rename(folder / "variables")
        # The fingerprint is of the index that was replaced; a missing one is allowed, a wrong one misleads.
        (folder / "fingerprint.pb").unlink(missing_ok=True)
        _write_manifest(folder, checkpoint, exports, clip)
    return exports


def signature_names(tables: Sequence[str]) -> dict[str, str]:
    """Name a signature for each table: other characters than letters, digits and `_` become `_`, clashes get
    a number.

    >>> signature_names(["scope/emb", "scope_emb", "user"])
    {'scope/emb': 'scope_emb', 'scope_emb': 'scope_emb_2', 'user': 'user'}
    """
    names: dict[str, str] = {}
    for table in tables:
        wanted = _NOT_IN_SIGNATURES.sub("_", table)
        if wanted.startswith("__saved_model"):
            wanted = "table" + wanted
        name, number = wanted, 1
        while name in names.values() or (name == "serving_default" and len(tables) > 1):
            number += 1
            name = f"{wanted}_{number}"
        names[table] = name
    return names


def _write_table(
    writer: BundleWriter,
    number: int,
    reader: TableReader,
    signature: str,
    clip: Clip | None,
    memory: int,
    progress: Progress | None,
) -> TableExport:
    schema = reader.schema
    all_keys = (chunk.keys for chunk in reader.chunks(KEYS, rows=1 << 18))
    replaced = repeated_rows(all_keys, schema.rows, memory=memory)
    kept_keys: list[Array] = []
    done = cut = non_finite = 0
    writer.begin(_tensor(number, "values"), reader.value_dtype, (schema.dim,))
    for chunk in reader.chunks(KEYS_AND_VALUES):
        keys, values = chunk.keys, chunk.values
        assert values is not None
        start, done = done, done + len(keys)
        first, last = np.searchsorted(replaced, [start, done])
        if last > first:
            here = replaced[first:last] - start
            keys, values = np.delete(keys, here), np.delete(values, here, axis=0)
        non_finite += non_finite_rows(values)
        if clip is not None:
            keep = clip.keep(values)
            cut += len(keep) - int(np.count_nonzero(keep))
            if not keep.all():
                keys, values = keys[keep], values[keep]
        writer.append(values)
        kept_keys.append(keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64))
        if progress:
            progress(schema.name, done, schema.rows)
    writer.append(np.zeros((1, schema.dim), reader.value_dtype))
    writer.end()
    writer.begin(_tensor(number, "keys"), np.dtype(np.int64), ())
    for keys in kept_keys:
        writer.append(keys)
    rows = sum(map(len, kept_keys))
    if rows == 0:
        # TensorFlow initialises no hash table with nothing: one key that leads to the row of zeros changes
        # no answer.
        writer.append(np.zeros(1, np.int64))
    writer.end()
    row_bytes = schema.dim * reader.value_dtype.itemsize + 8
    return TableExport(
        name=schema.name,
        signature=signature,
        key_dtype=schema.key_dtype,
        value_dtype=schema.value_dtype,
        dim=schema.dim,
        rows=rows,
        cut=cut,
        duplicates=len(replaced),
        non_finite=non_finite,
        bytes=rows * row_bytes,
        bytes_saved=cut * row_bytes,
    )


def _save_graph(tf: Any, exports: Sequence[TableExport], folder: Path) -> None:
    """Save the model's graph, with variables of no rows, to `folder`."""

    class KeyIndex(tf.saved_model.experimental.TrackableResource):  # type: ignore[misc]
        """The hash table from key to row, filled from the variable `keys` when the model is loaded."""

        def __init__(self, keys: Any) -> None:
            super().__init__()
            self._keys = keys
            # The name decides which table a session or an eager process shares: two models must never share
            # one.
            self._shared_name = f"kvtools_{uuid.uuid4().hex}"
            # Created here, because inside a traced function it would be that function's own.
            self._eager_handle = self.resource_handle

        def _create_resource(self) -> Any:
            return tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name=self._shared_name)

        def _initialize(self) -> None:
            keys = self._keys.read_value()
            rows = tf.range(tf.size(keys, out_type=tf.int64), dtype=tf.int64)
            tf.raw_ops.InitializeTableV2(table_handle=self.resource_handle, keys=keys, values=rows)

        def rows_of(self, ids: Any, missing: int) -> Any:
            return tf.raw_ops.LookupTableFindV2(
                table_handle=self.resource_handle, keys=ids, default_value=tf.constant(missing, tf.int64)
            )

    def build(export: TableExport) -> tuple[Any, Any]:
        table = tf.Module()
        dtype = tf.as_dtype(export.value_dtype)
        table.keys = tf.Variable(
            tf.zeros([0], tf.int64), shape=[None], trainable=False, name=f"{export.signature}/keys"
        )
        table.values = tf.Variable(
            tf.zeros([0, export.dim], dtype),
            shape=[None, export.dim],
            trainable=False,
            name=f"{export.signature}/values",
        )
        table.index = KeyIndex(table.keys)

        def lookup(ids: Any) -> Any:
            embeddings = tf.gather(table.values, table.index.rows_of(ids, export.rows))
            return {"embeddings": tf.cast(embeddings, tf.float32) if dtype.size < 4 else embeddings}

        spec = tf.TensorSpec(None, tf.int64, name="ids")
        return table, tf.function(lookup, input_signature=[spec], autograph=False)

    model = tf.Module()
    model.tables, signatures = [], {}
    for export in exports:
        table, lookup = build(export)
        model.tables.append(table)
        signatures[export.signature] = lookup
    if len(exports) == 1:
        signatures["serving_default"] = signatures[exports[0].signature]
    tf.saved_model.save(model, str(folder), signatures=signatures)


def _tensor(number: int, variable: str) -> str:
    """The name under which TensorFlow saves `model.tables[number].<variable>`."""
    return f"tables/{number}/{variable}/.ATTRIBUTES/VARIABLE_VALUE"


def _copy_small_variables(writer: BundleWriter, saved: Bundle) -> None:
    """Copy what TensorFlow saved beside the tables: the graph of its objects."""
    for name, entry in saved.entries.items():
        if entry.dtype == 7:
            writer.string(name, saved.strings(name)[0])


def _write_manifest(folder: Path, checkpoint: Checkpoint, exports: Sequence[TableExport], clip: Clip | None) -> None:
    manifest = {
        "format": FORMAT,
        "written_by": f"kvtools {__version__}",
        "source": str(checkpoint.path),
        "source_dialect": checkpoint.dialect,
        "clip": None if clip is None else {"norm": clip.norm, "threshold": clip.threshold},
        "tables": [
            {
                "name": export.name,
                "signature": export.signature,
                "key_dtype": export.key_dtype,
                "value_dtype": export.value_dtype,
                "dim": export.dim,
                "rows": export.rows,
                "cut": export.cut,
                "keys": _tensor(number, "keys"),
                "values": _tensor(number, "values"),
            }
            for number, export in enumerate(exports)
        ],
    }
    path = folder / MANIFEST
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")


def _check_room(readers: Sequence[TableReader], output: Path, clip: Clip | None) -> None:
    if clip is not None:
        return  # how much is cut is not known yet
    needed = sum(r.schema.rows * (r.schema.dim * r.value_dtype.itemsize + 8) for r in readers)
    free = shutil.disk_usage(output.parent).free
    if free < needed:
        raise OutputError(
            f"writing '{output}': {needed} bytes are needed and {free} are free; make room or name another place"
        )


@contextlib.contextmanager
def _no_early_log() -> Iterator[None]:
    """Hide what TensorFlow logs before it heeds its log level, if that level says to log nothing."""
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "3":
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _import_tensorflow() -> Any:
    try:
        with _no_early_log():
            return importlib.import_module("tensorflow")
    except ImportError as error:
        raise MissingDependencyError(
            f"exporting a SavedModel: TensorFlow cannot be imported ({one_line(str(error))});"
            " run `pip install 'kvtools[tensorflow]'`"
        ) from error
