"""Write tables as a SavedModel of stock TensorFlow operations, which any TensorFlow server loads without
this package.

Per table the model holds two variables and a lookup:

    keys   [rows]           int64; an int32 key is widened, a uint64 key bit-cast; [0] for a table of no rows
    values [rows + 1, dim]  in the table's type; the last row is zeros, for missing keys; of int8 and int4 bytes
    ids -> StaticHashTable built from `keys` when the model loads -> row number, `rows` if missing -> gather

The signature of table `scope/emb` is `scope_emb`, with input `ids` (int64, any shape) and output `embeddings`
(ids.shape + [dim]); with one table only it is `serving_default` too. Half-precision tables stay so in the
model and answer in float32.

TensorFlow is not needed to write it: `kvtools.lookup_model` makes the graph, and the variables are streamed into their
bundle. Peak memory is a chunk of values and the keys of one table, twice.
Format: https://www.tensorflow.org/guide/saved_model
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtools import __version__
from kvtools.chain_reader import refuse_increments
from kvtools.chosen_as_read import LEAST_ROWS, RepeatedKeys, ToChoose
from kvtools.clip import Choice
from kvtools.clip_policy import Policy, choose_all
from kvtools.dialects import savedmodel
from kvtools.dialects.bundle import BundleWriter
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array
from kvtools.dialects.dialect import Dialect
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.object_graph import OBJECT_GRAPH
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.savedmodel import FORMAT, MANIFEST
from kvtools.dialects.schema import TableSchema
from kvtools.errors import BadInputError, OutputError
from kvtools.fit import fit
from kvtools.indexed_rows import DEFAULT_INDEX, Index, check_index, slot_order, table_rows
from kvtools.lookup_model.model import lookup_model
from kvtools.lookup_model.signatures import DEFAULT_SIGNATURE
from kvtools.model_digest import FILES, digests_of, sealed
from kvtools.narrow_rows import (
    KEYS_BEGIN_WITH,
    Dtypes,
    NarrowTable,
    bytes_of_values,
    check_dtypes,
    dtype_notes,
    dtype_of,
)
from kvtools.partition import owners
from kvtools.perfect_hash import check_count
from kvtools.quantized_rows import QUANTIZED, Rounding
from kvtools.read_ahead import read_ahead
from kvtools.remote.paths import local_path, shown_path
from kvtools.replace_output import check_apart, check_replaceable, folder_above, replace_folder
from kvtools.slot_order import MOST_TURNS
from kvtools.stock_model.initial_rows import InitialRows
from kvtools.stock_model.table import StockTable
from kvtools.table_view import MaskedTable

if TYPE_CHECKING:
    from kvtools.export_warmup import Warmup  # which a server that serves tables has no use for

MODEL_FILE = "saved_model.pb"
_CHUNKS_TO_SLOTS = 8
_NOT_IN_SIGNATURES = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True)
class TableExport:
    """What became of one table: `rows` were kept in `bytes` of keys and values, and `cut` were left out.

    `bytes_saved` is how many more all rows would take in the source's type: by what was cut and by a smaller type.

    `failed` counts the rows that each criterion cut; `lookups` is the sum of all rows' frequencies and `lookups_missed`
    that of the rows that were cut, None where the table has none. `left_out` says what else of the table is not in the
    output, one sentence each, and `notes` what else there is to know of it. `rounding` is what its rows lose where they
    are written in another type.
    """

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
    left_out: tuple[str, ...] = ()
    failed: Mapping[str, int] = field(default_factory=dict)
    lookups: int | None = None
    lookups_missed: int | None = None
    notes: tuple[str, ...] = ()
    rounding: Rounding | None = None


def export_saved_model(
    checkpoint: Checkpoint,
    output: str | Path,
    *,
    tables: Sequence[str] = (),
    policy: Policy | None = None,
    keep_zeros: bool = False,
    dtype: Dtypes = None,
    force: bool = False,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
    warmup: Warmup | None = None,
    index: Index = DEFAULT_INDEX,
) -> list[TableExport]:
    """Write tables of `checkpoint` as a SavedModel folder `output`.

    Where a key is there twice, its last row counts. Every byte read is checked against its checksum.

    Args:
        checkpoint: an opened checkpoint, of any dialect.
        output: the folder to write; it appears when it is whole, and what stood there stays if anything fails.
        tables: the tables' names; all if empty.
        policy: which rows to leave out.
        keep_zeros: keep rows of zeros alone; they are what a missing key gives, and left out otherwise.
        dtype: what rows of floating-point numbers become, for all tables or by their names: one of
            `kvtools.narrow_rows.DTYPES`, "int8" and "int4" with an offset and a scale for each row, which the graph
            decodes; as they are if None, and where they are integers.
        force: replace a SavedModel that is there.
        memory: how many bytes the search for keys that are there twice may hold; more spills to disk.
        progress: called after each chunk.
        warmup: the requests that servers warm the model up by.
        index: what finds the row of a key: "hash", a table that is made when the model is loaded, or "perfect",
            arithmetic over arrays; see `kvtools.indexed_rows`.

    Raises:
        UsageError: there is no such index.
        UnknownTableError: the checkpoint has no such table.
        UsageError: there is no type `dtype` for rows.
        BadInputError: there is no table, or a row that `dtype` does not hold.
        OutputError: `output` exists, or cannot be written.
        CorruptFileError: the checkpoint's data is damaged.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        export_saved_model(open_checkpoint("model.ckpt-100"), Path("out"), policy=Policy.of(Criteria(min_freq=2)))
        ```
    """
    output = Path(local_path(output))
    check_index(index)
    readers = checkpoint.select(tables)
    if not readers:
        raise BadInputError(f"exporting '{checkpoint.path}': it has no key-value table; see `kvtools inspect`")
    refuse_increments(f"exporting '{checkpoint.path}'", readers)
    check_saved_model(checkpoint, output, force=force)
    of_tables: dict[str, Any] = {"tables": tables, "policy": policy, "keep_zeros": keep_zeros, "dtype": dtype}
    for once in (index, None):
        choices = choices_to_write(checkpoint, **of_tables, memory=memory, progress=progress, once=once)
        check_room(choices, output, index)
        try:
            return _write_tables(
                checkpoint, readers, choices, output, policy, dtype, force, progress, warmup=warmup, index=index
            )
        except (RepeatedKeys, BadInputError):
            if not once:
                raise
    raise AssertionError


def check_saved_model(checkpoint: Checkpoint, output: Path, *, force: bool) -> None:
    """Raise `OutputError` where a SavedModel of tables of `checkpoint` may not be written to `output`."""
    if checkpoint.dialect != savedmodel.NAME:  # tables that were exported may be cut further in their place
        check_apart(checkpoint.path, output)
    check_replaceable(output, mark=MODEL_FILE, force=force)


def _write_tables(
    checkpoint: Checkpoint,
    readers: Sequence[TableReader],
    choices: Sequence[Choice | ToChoose],
    output: Path,
    policy: Policy | None,
    dtype: Dtypes,
    force: bool,
    progress: Progress | None,
    *,
    warmup: Warmup | None,
    index: Index,
) -> list[TableExport]:
    signatures = signature_names([reader.schema.name for reader in readers])
    with replace_folder(output, mark=MODEL_FILE, force=force) as folder:
        for part in ("assets", "variables"):
            (folder / part).mkdir()
        exports: list[TableExport] = []
        lookups: list[tuple[str, StockTable]] = []
        described: list[dict[str, Any]] = []
        with BundleWriter(folder / "variables" / "variables") as writer:
            for number, (reader, choice) in enumerate(zip(readers, choices, strict=True)):
                schema = reader.schema
                signature = signatures[schema.name]
                stored = dtype_of(schema, dtype)
                quantized = stored if stored in QUANTIZED else None
                table = StockTable(
                    number,
                    schema.name,
                    "int64",  # ids are asked for as such, whatever the type of the keys
                    "float32" if quantized else stored or schema.value_dtype,
                    schema.dim,
                    (choice.kept,),
                    InitialRows(),
                    index_name(),
                    "tables",
                    quantized or "",
                )
                written = write_table(
                    writer, table, reader, choice, progress, signature=signature, dtype=dtype, index=index
                )
                exports.append(written.export)
                lookups.append((signature, written.table))
                described.append({"signature": signature, **written.described})
            model = lookup_model(lookups)
            writer.string(OBJECT_GRAPH, model.object_graph)
        (folder / MODEL_FILE).write_bytes(model.saved_model)
        write_manifest(folder, checkpoint, policy or Policy(), list(zip(exports, described, strict=True)))
        if warmup is not None:
            warmup.add(folder)
    return exports


def index_name() -> str:
    """Return a name for the index of a table.

    It decides which index a session, or an eager process, shares: two models must never share one.
    """
    return f"kvtools_{uuid.uuid4().hex}"


def choose_for_saved_model(
    checkpoint: Checkpoint,
    *,
    tables: Sequence[str] = (),
    policy: Policy | None = None,
    keep_zeros: bool | Collection[str] = False,
    dtype: Dtypes = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
    distinct: bool = True,
) -> list[Choice]:
    """Decide which rows `export_saved_model` would keep, and write nothing; arguments and errors are its own.

    `keep_zeros` may name the tables that keep their rows of zeros. Where keys are not known to be distinct, rows whose
    key a later one has again are left out. Whether numbers fit `dtype`
    `narrow_rows.check_fits` tells.
    """
    check_dtypes(f"exporting '{checkpoint.path}'", dtype)
    return choose_all(
        checkpoint,
        policy or Policy(),
        tables=tables,
        distinct=distinct,
        zeros=lambda table: not (keep_zeros if isinstance(keep_zeros, bool) else table.schema.name in keep_zeros),
        size=lambda schema: bytes_of_values(schema, dtype) + 8,
        memory=memory,
        progress=progress,
    )


def signature_names(tables: Sequence[str]) -> dict[str, str]:
    """Name a signature for each table: other characters than letters, digits and `_` become `_`, clashes get
    a number.

    >>> signature_names(["scope/emb", "scope_emb", "user"])
    {'scope/emb': 'scope_emb', 'scope_emb': 'scope_emb_2', 'user': 'user'}
    """
    names: dict[str, str] = {}
    taken = {DEFAULT_SIGNATURE} if len(tables) > 1 else set()
    for table in tables:
        wanted = _NOT_IN_SIGNATURES.sub("_", table)
        if wanted.startswith("__saved_model"):
            wanted = "table" + wanted
        name, number = wanted, 1
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        taken.add(name)
        names[table] = name
    return names


def left_out(schema: TableSchema, dialect: Dialect) -> tuple[str, ...]:
    """Say what of a table, beside its keys and values, an export in `dialect` has no place for."""
    holds = dataclasses.replace(dialect.holds, key_dtypes=(schema.key_dtype,), value_dtypes=(schema.value_dtype,))
    return fit(schema, dataclasses.replace(dialect, holds=holds)).losses


@dataclass(frozen=True)
class WrittenTable:
    """What became of a table, the table as it is in the graph, and what the manifest says of its variables."""

    export: TableExport
    table: StockTable
    described: dict[str, Any]


def write_table(
    writer: BundleWriter,
    table: StockTable,
    reader: TableReader,
    choice: Choice | ToChoose,
    progress: Progress | None,
    *,
    signature: str = "",
    behind: Array | None = None,
    dtype: Dtypes = None,
    as_floats: bool = False,
    index: Index = "hash",
) -> WrittenTable:
    """Write the variables of a table: keys, values with a row of zeros and others behind, and what its index needs.

    Args:
        writer: the bundle.
        table: the table; the rows of its parts are counted here, and their slots found.
        reader: where its rows are read.
        choice: which rows to keep. Where it is to be made, this may raise `RepeatedKeys`, and the index is "hash".
        progress: called after each chunk.
        signature: by which it is looked up, for the account.
        behind: rows [n, dim] behind the row of zeros.
        dtype: what the rows become.
        as_floats: write what is read back of these rows, in the type of the source.
        index: what finds the row of a key.
    """
    schema = reader.schema
    as_read = choice.reading() if isinstance(choice, ToChoose) else None
    chosen = MaskedTable(reader, choice.mask) if isinstance(choice, Choice) else as_read
    assert chosen is not None
    kept = NarrowTable(chosen, dtype_of(schema, dtype))
    parts = len(table.part_rows)
    part_rows = np.zeros(parts, np.int64)
    done = 0

    def as_written(values: Array) -> Array:
        return kept.read_back(values).astype(reader.value_dtype, copy=False) if as_floats else kept.stored(values)

    order = slot_order(_as_int64(kept.all_keys(verify=False))) if index == "perfect" else None
    rows_behind = as_written(np.zeros((1, schema.dim), kept.value_dtype))
    if behind is not None and len(behind):
        begun = as_written(kept.beside(behind, KEYS_BEGIN_WITH))
        rows_behind = np.concatenate([rows_behind, begun])
    # To encode rows again costs more than to write them twice.
    most_turns = MOST_TURNS if kept.dtype in (None, schema.value_dtype) else 1
    with as_read or nullcontext(), table_rows(writer, table, order, rows_behind, most_turns=most_turns) as rows:
        # Rows that are staged in groups are cut into them: few large pieces of each.
        at_once = kept.chunk_rows(KEYS_AND_VALUES) * (_CHUNKS_TO_SLOTS if order and rows.turns == 1 else 1)
        for turn in range(rows.turns):
            for chunk in read_ahead(kept.chunks(KEYS_AND_VALUES, rows=at_once)):
                keys, values = chunk.keys, chunk.values
                assert values is not None
                rows.append(_as_int64(keys), as_written(values))
                if turn:
                    continue
                if parts > 1:
                    part_rows += np.bincount(owners(keys, parts, "floor_mod"), minlength=parts)
                done += len(keys)
                if progress:
                    progress(schema.name, done, choice.kept)
            rows.end_turn()
    made = choice if isinstance(choice, Choice) else as_read.choice()  # type: ignore[union-attr]
    row_bytes, whole = (bytes_of_values(schema, each) + 8 for each in (dtype, None))
    export = TableExport(
        name=schema.name,
        signature=signature,
        key_dtype=schema.key_dtype,
        value_dtype=kept.dtype or schema.value_dtype,
        dim=schema.dim,
        rows=done,
        cut=made.cut,
        duplicates=made.hidden,
        non_finite=kept.non_finite,
        bytes=done * row_bytes,
        bytes_saved=max(0, (done + made.cut) * whole - done * row_bytes),
        left_out=left_out(schema, savedmodel.DIALECT),
        failed=made.failed,
        lookups=made.lookups,
        lookups_missed=made.lookups_missed,
        notes=dtype_notes(schema, dtype),
        rounding=kept.rounding,
    )
    table = dataclasses.replace(
        table,
        part_rows=tuple(part_rows.tolist()) if parts > 1 else (done,),
        perfect=order.in_graph if order else None,
        rows_behind=len(rows_behind),
    )
    described = {"keys": table.tensor("keys"), "values": table.tensor("values")}
    if order:
        described |= {"index": table.tensor("index"), **order.described()}
    return WrittenTable(export, table, described)


def _as_int64(keys: Array) -> Array:
    """Keys as an index has them."""
    return keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64)


def write_manifest(
    folder: Path,
    checkpoint: Checkpoint,
    policy: Policy,
    tables: Sequence[tuple[TableExport, Mapping[str, Any]]],
    **more: Any,
) -> None:
    """Write what the tables of a model are, by which `kvtools` reads them, and the digests of its graph and assets.

    Args:
        folder: the model's, with its graph and assets.
        checkpoint: what was exported.
        policy: which rows were left out.
        tables: what became of each, and what else is to be said of it.
        more: what else is to be said of the model.
    """
    quantized = any(export.value_dtype in QUANTIZED and export.rounding for export, _ in tables)
    manifest = {
        "format": FORMAT if quantized else 1,
        "written_by": f"kvtools {__version__}",
        FILES: digests_of(folder),
        "source": shown_path(checkpoint.path),
        "source_dialect": checkpoint.dialect,
        **more,
        "budget": policy.budget,
        "tables": [
            {
                "name": export.name,
                "key_dtype": export.key_dtype,
                **_described_rows(export),
                "dim": export.dim,
                "rows": export.rows,
                "cut": export.cut,
                "clip": policy.criteria(export.name).described(),
                "cut_by": {criterion: count for criterion, count in export.failed.items() if count},
                **described,
            }
            for export, described in tables
        ],
    }
    path = folder / MANIFEST
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(sealed(manifest), indent=1) + "\n", "utf-8")


def _described_rows(export: TableExport) -> dict[str, str]:
    """The type that rows are read as, and what they are in the variable where that is another one."""
    if export.rounding is None or export.value_dtype not in QUANTIZED:
        return {"value_dtype": export.value_dtype}
    return {"value_dtype": "float32", "rows_as": export.value_dtype}


def choices_to_write(
    checkpoint: Checkpoint,
    *,
    tables: Sequence[str],
    policy: Policy | None,
    keep_zeros: bool | Collection[str],
    dtype: Dtypes,
    memory: int,
    progress: Progress | None,
    once: Index | None,
) -> list[Choice | ToChoose]:
    """Decide which rows to write, where `once` names the index as if no key were there twice: with it the writing would
    raise `RepeatedKeys` or `BadInputError`.

    Of a hash table all of the choice is left to the writing, where it can be, so that rows are read once. A perfect
    hash needs the keys before, and finds by itself that one is there twice.
    """
    chosen: list[Choice | ToChoose] = []
    clipped = policy is not None and policy.budget is not None
    for table in checkpoint.select(tables):
        name = table.schema.name
        whole = not clipped and (policy is None or policy.criteria(name).empty)
        if once == "hash" and whole and table.rows >= LEAST_ROWS:
            zeros = not (keep_zeros if isinstance(keep_zeros, bool) else name in keep_zeros)
            chosen.append(ToChoose(table, zeros, bytes_of_values(table.schema, dtype) + 8, memory))
    left = [one for one in checkpoint.select(tables) if one.schema.name not in {each.table for each in chosen}]
    if left:
        chosen += choose_for_saved_model(
            checkpoint,
            tables=[table.schema.name for table in left],
            policy=policy,
            keep_zeros=keep_zeros,
            dtype=dtype,
            memory=memory,
            progress=progress,
            distinct=once != "perfect",
        )
    by_name = {choice.table: choice for choice in chosen}
    return [by_name[table.schema.name] for table in checkpoint.select(tables)]


def check_room(choices: Sequence[Choice | ToChoose], output: Path, index: Index = "hash") -> None:
    """Raise where the rows that were chosen do not fit on the disk of `output`, or into an index.

    Raises:
        OutputError: the disk is too small.
        BadInputError: a table has too many keys for the index.
    """
    if index == "perfect":
        for choice in choices:
            check_count(choice.kept)
    needed = sum(choice.bytes for choice in choices)
    free = shutil.disk_usage(folder_above(output)).free
    if free < needed:
        raise OutputError(
            f"writing '{output}': {needed} bytes are needed and {free} are free; make room or name another place"
        )
