"""`sok.dump` and `sok.load`: tables as the files of SparseOperationKit 2, specified in docs/dialects/sok.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from kvtools.dialects.chunk import ALL_COLUMNS, KEYS, KEYS_AND_VALUES, Chunk
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.sok import EMBEDDING, KEY, SLOT_BYTES, STATE, Header, SokTable, flat_name, is_file, open_table
from tfplugin import ranks
from tfplugin.kv_variable import KvVariable
from tfplugin.ranks import step
from tfplugin.sok.distributed_variable import ShardedVariable
from tfplugin.sok.dynamic_variable import DynamicVariable
from tfplugin.sok.optimizer_slots import core_of, file_name, make_slots, slots_of, table_specs
from tfplugin.sok.row_files import (
    ColumnFile,
    Rows,
    TableFiles,
    file_dtype,
    held_keys,
    owned,
    require_eager,
    table_rows,
    variable_rows,
    write_tables,
)

Variables = Any


def dump(path: str | os.PathLike[str], dump_vars: Variables, optimizer: Any = None) -> None:
    """Writes the rows that all ranks hold of variables to a folder, as SparseOperationKit 2 does. All ranks call it.

    A variable becomes ``<name>-key`` and ``<name>-weight``, and ``<name>-<Optimizer>-<slot>`` for each slot of
    `optimizer`. The keys of a static variable are its row numbers. Each rank writes its own rows into these files: the
    folder must be on a filesystem that all ranks share. Earlier files of the same variables are replaced once all has
    been written, and stay as they were if anything fails on any rank. ``kvtools`` opens the folder.

    Args:
      path: the folder; made if need be.
      dump_vars: a `sok.DynamicVariable` or `sok.Variable`, or a list of them, the same on all ranks.
      optimizer: the one that trains them, to write its slots, too; also a `sok.OptimizerWrapper`.

    Raises:
      TypeError: something that is no variable of sok.
      ValueError: two variables whose files would have one name; an optimizer that has slots for some of the static
        variables only; ranks that call it with different variables.
      OSError: the folder cannot be written to.
      RankError: another rank failed.

    Example:
      >>> sok.dump("weights", [v, w], optimizer)
    """
    doing = f"sok.dump to '{path}'"
    with step(doing):
        require_eager("sok.dump")
        folder = Path(path)
        optimizer = _one_optimizer(optimizer)
        variables = _variables(dump_vars, doing)
        for variable in variables:
            if optimizer is not None and isinstance(variable, KvVariable):
                _make_table_slots(optimizer, variable)
        slots = [slots_of(optimizer, v) if optimizer is not None else {} for v in variables]
        _check_slots(variables, slots, optimizer, doing)
    ranks.check_same([v.describe() for v in variables], doing)
    dynamic = [v for v in variables if isinstance(v, DynamicVariable)]
    keys = dict(zip(map(id, dynamic), held_keys(dynamic), strict=True))
    with step(doing):
        tables = [_files(v, keys.get(id(v)), s, optimizer) for v, s in zip(variables, slots, strict=True)]
    write_tables(folder, tables, doing)


def load(path: str | os.PathLike[str], load_vars: Variables, optimizer: Any = None) -> None:
    """Reads variables from a folder that `dump`, or SparseOperationKit 2, wrote. All ranks call it.

    Any number of ranks reads what any other has written. A static variable is read whole. Rows of a dynamic variable
    are added to those that it has: keys of the dump get the dump's values, others stay. The files are checked on every
    rank before anything is changed on any.

    Args:
      path: the folder, which every rank reads.
      load_vars: a `sok.DynamicVariable` or `sok.Variable`, or a list of them, named as they were when dumped.
      optimizer: reads its slots, too, and makes them if it has taken no step yet.

    Raises:
      TypeError: something that is no variable of sok.
      kvtools.errors.BadInputError: a file is missing.
      kvtools.errors.CorruptFileError: a file is truncated or damaged.
      ValueError: a dump of another dtype, dimension or number of rows.
      RankError: another rank failed.

    Example:
      >>> sok.load("weights", [v, w], optimizer)
    """
    doing = f"sok.load from '{path}'"
    with step(doing):
        require_eager("sok.load")
        optimizer = _one_optimizer(optimizer)
        variables = _variables(load_vars, doing)
        dumped = [_open(Path(path), v, doing) for v in variables]
        if optimizer is not None:
            make_slots(optimizer, [v for v in variables if isinstance(v, ShardedVariable)])
        found = [_check(v, table, optimizer, doing) for v, table in zip(variables, dumped, strict=True)]
    with step(doing):
        for one in found:
            one.read(optimizer)


def _one_optimizer(optimizer: Any) -> Any:
    if isinstance(optimizer, (list, tuple)):
        if len(optimizer) > 1:
            raise ValueError(f"sok: one optimizer is dumped or loaded at a time, got {len(optimizer)}.")
        return optimizer[0] if optimizer else None
    return optimizer


def _variables(given: Any, doing: str) -> list[Any]:
    variables = list(given) if isinstance(given, (list, tuple)) else [given]
    names: dict[str, str] = {}
    for variable in variables:
        if not isinstance(variable, (DynamicVariable, ShardedVariable)):
            raise TypeError(
                f"{doing}: expected sok.DynamicVariable or sok.Variable, got {type(variable).__name__}; "
                "sok.filter_variables tells them from others."
            )
        base = flat_name(variable.name)
        if base in names:
            raise ValueError(
                f"{doing}: variables '{names[base]}' and '{variable.name}' have the same files, '{base}-...': give "
                "them names that differ in more than punctuation."
            )
        names[base] = variable.name
    return variables


def _make_table_slots(optimizer: Any, variable: KvVariable) -> None:
    """Has the rows of a table hold the slots of an optimizer, if it is new to them."""
    specs = table_specs(optimizer, variable)
    if {spec.name for spec in specs} - variable.slot_names():
        variable.read_rows(tf.zeros([0], variable.key_dtype), core_of(optimizer), specs)


def _check_slots(variables: Sequence[Any], slots: Sequence[dict[str, Any]], optimizer: Any, doing: str) -> None:
    with_slots = [v.name for v, s in zip(variables, slots, strict=True) if s]
    without = [v.name for v, s in zip(variables, slots, strict=True) if not s]
    if with_slots and without:
        raise ValueError(
            f"{doing}: {file_name(optimizer)} has slots for {with_slots} and none for {without}: dump these without "
            "optimizer=, or after a step that trains them."
        )


def _files(variable: Any, keys: Rows | None, slots: dict[str, Any], optimizer: Any) -> TableFiles:
    base = flat_name(variable.name)
    dtype = file_dtype(variable.dtype)
    if isinstance(variable, DynamicVariable):
        dim = variable.dim
    else:
        dim = variable.global_shape[1]
        # What SparseOperationKit writes: the two kinds have different keys.
        keys = variable.global_rows().astype(np.int64 if variable.owner is None else np.uint64)
    held: Rows = keys

    def header(kind: int, slot: str, of: np.dtype[Any]) -> bytes:
        return Header("", kind, slot, of.name).encode()

    columns = [
        ColumnFile(f"{base}-key", header(KEY, "", held.dtype), held.dtype, ()),
        ColumnFile(f"{base}-weight", header(EMBEDDING, "", dtype), dtype, (dim,)),
    ]
    for name, slot in slots.items():
        if "/" in name or len(name.encode()) > SLOT_BYTES:
            raise ValueError(
                f"slot '{name}' of '{variable.name}' has no place in a dump: its name must be {SLOT_BYTES} bytes at "
                "the most, without '/'; use sok.Checkpoint."
            )
        of = file_dtype(tf.as_dtype(slot.dtype))
        columns.append(ColumnFile(f"{base}-{file_name(optimizer)}-{name}", header(STATE, name, of), of, (dim,)))
    dtypes = [column.dtype for column in columns]
    if isinstance(variable, DynamicVariable):
        read = table_rows(variable, held, [slot.spec for slot in slots.values()], dtypes)
    else:
        read = variable_rows(held, [variable, *slots.values()], dtypes)

    def outdated(path: Path) -> bool:
        """Slots of an earlier dump, which do not go with these rows."""
        return path.name.startswith(f"{base}-") and is_file(path, STATE)

    return TableFiles(variable.name, len(held), tuple(columns), read, outdated)


# ---- Reading ---------------------------------------------------------------------------------------------------------


def _open(folder: Path, variable: Any, doing: str) -> SokTable:
    if not folder.is_dir():
        raise FileNotFoundError(f"{doing}: there is no folder '{folder}' for rank {ranks.rank()}.")
    base = flat_name(variable.name)
    names = [path.name for path in folder.iterdir() if path.name.startswith(f"{base}-")]
    return open_table(folder, base, sorted(name.removeprefix(f"{base}-") for name in names), OpenOptions())


@dataclass(frozen=True)
class _Dumped:
    """A table of a dump that has been found to fit a variable.

    Attributes:
      slots: the optimizer's name for each slot -> (what holds it, its name in the dump), in the optimizer's order.
    """

    variable: Any
    table: SokTable
    slots: dict[str, tuple[Any, str]]

    def read(self, optimizer: Any) -> None:
        """Puts this rank's rows in place."""
        if isinstance(self.variable, KvVariable):
            if self.slots:
                _make_table_slots(optimizer, self.variable)  # also where no row of the dump is this rank's
            for chunk in self._chunks():
                write_table_rows(
                    self.variable,
                    chunk.keys,
                    [chunk.values, *(chunk.slots[name] for _, name in self.slots.values())],
                    optimizer if self.slots else None,
                )
            return
        rows = len(self.variable.global_rows())
        dim = self.variable.global_shape[1]
        targets = [(self.variable, None), *self.slots.values()]
        columns = [np.empty((rows, dim), file_dtype(tf.as_dtype(target.dtype))) for target, _ in targets]
        for chunk in self._chunks():
            local = self.variable.key_map(chunk.keys.astype(np.int64)).numpy()
            for column, (_, name) in zip(columns, targets, strict=True):
                column[local] = chunk.values if name is None else chunk.slots[name]
        for column, (target, _) in zip(columns, targets, strict=True):
            target.assign(tf.cast(column, target.dtype))

    def _chunks(self) -> Any:
        for chunk in self.table.chunks(ALL_COLUMNS if self.slots else KEYS_AND_VALUES):
            yield own_rows(self.variable, chunk)


def own_rows(variable: Any, chunk: Chunk) -> Chunk:
    """The rows of a chunk that this rank keeps."""
    mine = owned(variable, chunk.keys)
    return chunk if mine.all() else chunk.take(mine)


def write_table_rows(variable: KvVariable, keys: Rows, columns: Sequence[Any], optimizer: Any) -> None:
    """Writes values, and the slots of `optimizer` where one is given, of keys [n]."""
    if len(keys) == 0:
        return
    tensor = tf.constant(keys, variable.key_dtype)
    rows = [tf.cast(tf.constant(column), variable.dtype) for column in columns]
    if optimizer is None:
        variable.upsert(tensor, rows[0])
        return
    specs = table_specs(optimizer, variable)
    variable.read_rows(tensor, core_of(optimizer), specs)  # makes rows and slots that are not there
    variable.write_rows(tensor, rows, specs)


def _check(variable: Any, table: SokTable, optimizer: Any, doing: str) -> _Dumped:
    """What is read for a variable.

    Raises:
      ValueError: the table does not fit it.
    """
    schema, what = table.schema, f"{doing}: variable '{variable.name}'"
    wanted = file_dtype(variable.dtype).name
    if schema.value_dtype != wanted:
        raise ValueError(
            f"{what} holds {wanted}, its dump {schema.value_dtype}: make it with dtype={schema.value_dtype}."
        )
    dim = variable.dim if isinstance(variable, KvVariable) else variable.global_shape[1]
    if schema.rows and schema.dim != dim:
        raise ValueError(f"{what} has rows of {dim}, its dump of {schema.dim}: make it of that dimension.")
    if isinstance(variable, KvVariable):
        if schema.key_dtype != variable.key_dtype.name:
            raise ValueError(
                f"{what} has {variable.key_dtype.name} keys, its dump {schema.key_dtype}: make it with "
                f"key_type={schema.key_dtype}."
            )
    else:
        check_row_numbers(variable, table, what)
    slots = {}
    if optimizer is not None:
        for name, slot in slots_of(optimizer, variable).items():
            slots[name] = (slot, _slot_in(table, file_name(optimizer), name, what))
            held, stored = file_dtype(tf.as_dtype(slot.dtype)).name, _slot_schema(table, slots[name][1]).dtype
            if held != stored:
                raise ValueError(f"{what}: its slot '{name}' holds {held}, that of the dump {stored}.")
    return _Dumped(variable, table, slots)


def _slot_schema(table: SokTable, name: str) -> Any:
    return next(slot for slot in table.schema.slots if slot.name == name)


def _slot_in(table: SokTable, optimizer: str, name: str, what: str) -> str:
    full = f"{optimizer}.{name}"
    names = [slot.name for slot in table.schema.slots]
    if full in names:
        return full
    reasons = [reason for reason in table.incomplete if f"slot {full} " in reason]
    raise ValueError(
        f"{what}: its dump has no slot '{full}'"
        + (f" that can be read ({reasons[0]})" if reasons else f", it has {names or 'none'}")
        + "; load it without optimizer=, or with the optimizer that was dumped."
    )


def check_row_numbers(variable: ShardedVariable, table: Any, what: str) -> None:
    """Raises unless the keys are the numbers of all rows of this rank, each once, and no others."""
    rows = variable.global_shape[0]
    if table.schema.rows != rows:
        raise ValueError(f"{what} has {rows} rows, its dump {table.schema.rows}: make it of that many.")
    seen = np.zeros(rows, bool)
    for chunk in table.chunks(KEYS, rows=1 << 18):
        keys = chunk.keys
        if len(keys) and (int(keys.min()) < 0 or int(keys.max()) >= rows):
            wrong = keys.min() if int(keys.min()) < 0 else keys.max()
            raise ValueError(f"{what}: its dump has key {wrong}, expected the numbers of {rows} rows.")
        seen[keys.astype(np.int64)] = True
    if not seen.all():
        raise ValueError(f"{what}: its dump has no row {int(np.argmin(seen))}, and another one twice.")
