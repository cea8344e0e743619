"""Write a checkpoint's tables with rows of fewer bits, whole numbers with an offset and a scale among them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtools.cast import ColumnCost, losses_of, with_losses
from kvtools.clip import Choice
from kvtools.clip_policy import BudgetOrder, Policy, budget_order, choose_all
from kvtools.dialects import savedmodel, snapshot
from kvtools.dialects.chunk import KEYS_AND_VALUES
from kvtools.dialects.detect import dialect_named
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import TableSchema
from kvtools.dialects.writing import WriteOptions, later_rows
from kvtools.errors import UsageError
from kvtools.export import TableExport, check_saved_model, choose_for_saved_model, export_saved_model, left_out
from kvtools.migrate import EVERY_ROW, EVERY_ROW_READ, Account, TableAccount, write_tables
from kvtools.narrow_rows import NarrowTable, check_dtypes, dtype_notes, dtype_of
from kvtools.quantized_rows import QUANTIZED, Rounding, inexact
from kvtools.shown_tables import counted
from kvtools.table_view import MaskedTable, changed_tables
from kvtools.written_bytes import row_bytes_in


@dataclass(frozen=True)
class CastByPolicy:
    """What a cast by a policy did: the account, what rows and slots lost (see `cast_rows`), which rows were cut, and by
    what a budget compared them."""

    account: Account
    losses: dict[str, Rounding]
    slot_costs: dict[str, list[ColumnCost]]
    choices: list[Choice]
    order: BudgetOrder | None


def cast_rows(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    dtype: str | Mapping[str, str],
    *,
    to: str | None = None,
    tables: Sequence[str] = (),
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[Account, dict[str, Rounding], dict[str, list[ColumnCost]]]:
    """Write a checkpoint whose tables of floating-point numbers have rows of `dtype`.

    Optimizer slots keep their type, where `to` has not one type for values and slots.

    Args:
        checkpoint: what to read.
        output: where to write it.
        dtype: one of `kvtools.narrow_rows.DTYPES`, for all tables or by their names, where others stay as they are;
            "int8" and "int4" have an offset and a scale for each row.
        to: the dialect to write, "savedmodel" for a model that looks the tables up; that of `checkpoint` if None.
        tables: which tables to change; all if empty. The others are written as they are.
        options: what to ask of the writer.
        workers: how many parts to work on at once.
        progress: called as rows are written.

    Returns:
        The account, what each table has lost whose rows are of another type now, and by table what its slots have
        lost where they had to follow.

    Raises:
        UsageError: there is no such type for rows, or the dialect has none such.
        BadInputError: a row, or a slot that had to follow, that the type does not hold.
        OutputError: `output` exists, or cannot be written.

    Example:
        ```python
        account, losses, _ = cast_rows(kvtools.open("model.ckpt-100"), "small.kvsnap", "int4", to="snapshot")
        print(losses["user_emb"].mean_cosine)
        ```
    """
    doing = f"casting '{checkpoint.path}'"
    check_dtypes(doing, dtype)
    options = options or WriteOptions()
    to = to or checkpoint.dialect
    chosen = [table.schema.name for table in checkpoint.select(tables)]
    dtypes = dict.fromkeys(chosen, dtype) if isinstance(dtype, str) else dict(dtype)
    if to == savedmodel.NAME:
        return *_as_saved_model(checkpoint, Path(output), dtypes, options, progress), {}
    quantized = next((each for each in dtypes.values() if each in QUANTIZED), None)
    if quantized is not None and to != snapshot.NAME:
        raise UsageError(
            f"{doing} to {quantized}: {to} has no rows of {quantized} with an offset and a scale; write them --to"
            f" {snapshot.NAME} or --to {savedmodel.NAME}, or choose --dtype float16 or bfloat16"
        )
    one_type = dialect_named(to).holds.slot_dtype_is_value
    narrow: dict[str, NarrowTable] = {}
    notes: dict[str, tuple[str, ...]] = {}

    def change(table: TableReader) -> TableReader:
        name = table.schema.name
        notes[name] = dtype_notes(table.schema, dtypes)
        narrow[name] = NarrowTable(table, dtype_of(table.schema, dtypes), slots_follow=one_type)
        return narrow[name]

    changed = changed_tables(checkpoint, tables, change)
    rows_as = {name: table.rows_as for name, table in narrow.items() if table.rows_as}
    account = write_tables(
        changed,
        output,
        to,
        beside=checkpoint,
        options=dataclasses.replace(options, rows_as=rows_as),
        workers=workers,
        progress=progress,
    )
    told = tuple(
        dataclasses.replace(table, changes=(*table.changes, *notes.get(table.name, ()))) for table in account.tables
    )
    losses = {name: loss for name, table in narrow.items() if (loss := table.rounding)}
    costs = {name: table.cost for name, table in narrow.items() if table.cost}
    account = dataclasses.replace(account, tables=told)
    return with_losses(account, {name: losses_of(_costs(table)) for name, table in narrow.items()}), losses, costs


def cast_by_policy(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    policy: Policy,
    *,
    dtype: str | None = None,
    to: str | None = None,
    tables: Sequence[str] = (),
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> CastByPolicy:
    """Leave out the rows that a policy cuts, and write the others in the type that it says for their table.

    Args:
        checkpoint, output, to, tables, options, workers, progress: as for `cast_rows`.
        policy: what rows must pass, and what those of each table become.
        dtype: what the rows of all tables become, where the policy says of none.

    Raises:
        UsageError: neither says what rows become, or both do; and as of `cast_rows`.
        BadInputError: a criterion asks for frequencies or versions of a table that has none; and as of `cast_rows`.

    Example:
        ```python
        done = cast_by_policy(kvtools.open("model.ckpt-100"), "small.kvsnap", read_policy("policy.toml"), to="snapshot")
        print([(choice.table, choice.cut) for choice in done.choices])
        ```
    """
    doing = f"casting '{checkpoint.path}'"
    names = [table.schema.name for table in checkpoint.select(tables)]
    dtypes = policy.dtypes(names)
    if dtype is not None:
        if dtypes:
            raise UsageError(f"{doing}: got --dtype {dtype}, and a dtype in the policy; expected one of them")
        dtypes = dict.fromkeys(names, dtype)
    if not dtypes:
        raise UsageError(
            f"{doing}: its policy says of no table what rows become, expected dtype in an entry of [[tables]] that"
            " matches one; `kvtools clip` cuts rows alone"
        )
    check_dtypes(doing, dtypes)
    options = options or WriteOptions()
    choices = []
    if not policy.empty:
        choices = choose_all(
            checkpoint,
            policy,
            tables=tables,
            size=row_bytes_in(
                to or checkpoint.dialect, checkpoint.tables, dtype=dtypes, compression=options.compression
            ),
            memory=options.memory,
            workers=workers,
            progress=progress,
        )
    masks = {choice.table: choice.mask for choice in choices}
    kept = {
        name: MaskedTable(table, masks[name]) if name in masks else table for name, table in checkpoint.tables.items()
    }
    account, losses, costs = cast_rows(
        dataclasses.replace(checkpoint, tables=kept),
        output,
        dtypes,
        to=to,
        tables=tables,
        options=options,
        workers=workers,
        progress=progress,
    )
    return CastByPolicy(account, losses, costs, choices, budget_order(policy, [kept[name].schema for name in names]))


def _costs(table: NarrowTable) -> list[ColumnCost]:
    """Return what slots and values have lost; of rows of int8 and int4 the account says it already."""
    if table.rounding is None or table.rows_as is not None:
        return table.cost
    return [_cost_of_values(table.source.schema, table.schema.value_dtype, table.rounding), *table.cost]


def _cost_of_values(schema: TableSchema, became: str, rounding: Rounding) -> ColumnCost:
    return ColumnCost("values", schema.value_dtype, became, max_error=rounding.max_error)


def _as_saved_model(
    checkpoint: Checkpoint,
    output: Path,
    dtypes: Mapping[str, str],
    options: WriteOptions,
    progress: Progress | None,
) -> tuple[Account, dict[str, Rounding]]:
    if options.dry_run:
        check_saved_model(checkpoint, output, force=options.force)
        exports = _read_only(checkpoint, dtypes, options, progress)
    else:
        exports = export_saved_model(
            checkpoint,
            output,
            keep_zeros=True,
            dtype=dtypes,
            force=options.force,
            memory=options.memory,
            progress=progress,
        )
    tables = []
    for export in exports:
        schema = checkpoint.tables[export.name].schema
        losses = list(export.left_out)
        if export.duplicates:
            losses.append(later_rows(export.duplicates))
        if export.rounding and export.value_dtype in QUANTIZED:
            losses.append(inexact(export.value_dtype))
        elif export.rounding:
            losses += losses_of([_cost_of_values(schema, export.value_dtype, export.rounding)])
        checks = []
        if export.rows + export.duplicates == schema.rows:
            checks.append(EVERY_ROW_READ if options.dry_run else EVERY_ROW)
        if schema.checksums:
            checks.append(f"{schema.checksums} of every column read")
        tables.append(
            TableAccount(
                name=export.name,
                rows_read=schema.rows,
                rows_written=export.rows,
                parts=1,
                bytes=export.bytes,
                part_rows=(export.rows,),
                losses=tuple(losses),
                changes=export.notes,
                checks=tuple(checks),
            )
        )
    size = sum(variable.bytes for variable in checkpoint.variables)
    dense = f"{counted(len(checkpoint.variables), 'dense variable')}, {size} bytes: a model of tables has none"
    account = Account(str(output), savedmodel.NAME, tuple(tables), 0, (dense,) if checkpoint.variables else ())
    return account, {export.name: export.rounding for export in exports if export.rounding}


def _read_only(
    checkpoint: Checkpoint,
    dtypes: Mapping[str, str],
    options: WriteOptions,
    progress: Progress | None,
) -> list[TableExport]:
    """Return what `export_saved_model` would say of each table, having read its rows and written none."""
    of_rows: dict[str, Any] = {"keep_zeros": True, "dtype": dtypes, "memory": options.memory, "progress": progress}
    exports = []
    for choice in choose_for_saved_model(checkpoint, **of_rows):
        table = checkpoint.tables[choice.table]
        schema = table.schema
        narrow = NarrowTable(MaskedTable(table, choice.mask), dtype_of(schema, dtypes))
        done = 0
        for chunk in narrow.chunks(KEYS_AND_VALUES):
            done += len(chunk)
            if progress:
                progress(choice.table, done, choice.kept)
        exports.append(
            TableExport(
                name=choice.table,
                signature="",
                key_dtype=schema.key_dtype,
                value_dtype=narrow.dtype or schema.value_dtype,
                dim=schema.dim,
                rows=choice.kept,
                cut=choice.cut,
                duplicates=choice.hidden,
                non_finite=narrow.non_finite,
                bytes=choice.bytes,
                bytes_saved=choice.bytes_saved,
                left_out=left_out(schema, savedmodel.DIALECT),
                notes=dtype_notes(schema, dtypes),
                rounding=narrow.rounding,
            )
        )
    return exports
