"""Tables as files beside what else a model saves: a checkpoint of them, and a list of what it has.

A folder has the checkpoint ``tables`` (see docs/checkpoint-layout.md) and ``tables.json``. It lies as it is in an
archive or a folder, or as the datasets of a group of an HDF5 file: each file's bytes, with their CRC-32.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin import slot_binding
from tfplugin.held_tables import HeldTable, names_of
from tfplugin.kv_variable import KvVariable
from tfplugin.optimizers import accumulated_rows
from tfplugin.optimizers.inner_optimizer import innermost
from tfplugin.saveable import check_whole, restore_op, save_ops

#: The folder, or the group of an HDF5 file.
FOLDER = "kv_tables"

_LIST = "tables.json"
_BUNDLE = "tables"
_PENDING = "pending.npz"
_LAYOUT = 1
#: What is said of each table.
_FIELDS = ("name", "dim", "key_dtype", "value_dtype", "tables", "optimizer", "own_iterations", "steps_in_backward")
_PIECE = 1 << 24


class DamagedTablesError(OSError, ValueError):
    """What a file has of tables contradicts itself: it is truncated, or was changed."""


# ---- Folders ---------------------------------------------------------------------------------------------------------


def write(held: Sequence[HeldTable], folder: Path, optimizer: Any) -> None:
    """Writes tables into a folder, which it makes: rows, slots, counts, times. `optimizer` is the model's, or None.

    Raises:
      ValueError: a table that one process cannot save.
    """
    for one in held:
        _check(one)
    folder.mkdir(parents=True)
    described, saved = [], []
    for one, name in zip(held, names_of(held), strict=True):
        described.append(_described(one, name, optimizer))
        saved += [(_prefix_of(one, name, number), part) for number, part in enumerate(one.parts)]
    listed = {"layout": _LAYOUT, "iterations": iterations_of(optimizer), "tables": described}
    with tf.init_scope():
        shards = save_ops(tf.constant(os.fsencode(folder / "shards" / "part")), saved)
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=tf.stack(shards), destination_prefix=os.fsencode(folder / _BUNDLE), delete_old_dirs=True
        )
    (folder / _LIST).write_text(json.dumps(listed))
    pending = _pending(held, optimizer)
    if pending:
        np.savez(folder / _PENDING, **pending)  # type: ignore[arg-type]


def _pending(held: Sequence[HeldTable], optimizer: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Gradients that an optimizer has gathered for its next update, by the number of the table."""
    arrays = {}
    for number, one in enumerate(held):
        core = _core(one.own_optimizer() or optimizer)
        found = [] if core is None else [accumulated_rows.pending(core, part) for part in one.parts]
        gathered = [pair for pair in found if pair is not None]
        if gathered:
            arrays[f"keys_{number}"] = np.concatenate([keys for keys, _ in gathered])
            arrays[f"rows_{number}"] = np.concatenate([rows for _, rows in gathered])
    return arrays


def _check(one: HeldTable) -> None:
    for part in one.parts:
        check_whole(part)
        if not part._eager:
            raise ValueError(
                f"Key-value variable '{one.name}' is one of a graph, whose rows are in a session: save them by "
                "tf.compat.v1.train.Saver."
            )
    if _in_parts(one) and len(one.parts) != one.parts[0].parts:
        raise ValueError(
            f"The layer '{one.layer.name}' holds a part of key-value variable '{one.name}', and parts are saved by the "
            "whole: have it hold what get_kv_variable gave."
        )
    if getattr(one.table, "names", None) is not None:
        raise ValueError(
            f"The keys of '{one.name}' are strings, which a variable of tfplugin.dynamic_embedding saves in a "
            "tf.train.Checkpoint."
        )


def _in_parts(one: HeldTable) -> bool:
    """Whether its parts are those of one variable, by ``key mod parts``."""
    return one.parts[0].parts > 1


def _prefix_of(one: HeldTable, name: str, number: int) -> str:
    if _in_parts(one):
        return f"{name}/part_{number}"
    return name if len(one.parts) == 1 else f"{name}/table_{number}"


def _described(one: HeldTable, name: str, optimizer: Any) -> dict[str, Any]:
    own = one.own_optimizer()
    optimizer = optimizer if own is None else own
    prefix = slot_binding.prefix_in_use(one.parts[0], _core(optimizer))
    updates = [part._in_backward for part in one.parts if part._in_backward is not None]
    return {
        "name": name,
        "unnumbered": one.unnumbered,
        "dim": one.dim,
        "key_dtype": one.key_dtype.name,
        "value_dtype": one.dtype.name,
        "rows": one.rows(),
        "in_parts": _in_parts(one),
        "tables": 1 if _in_parts(one) else len(one.parts),
        # What the names of its optimizer's slots begin with; and the steps, and all else but slots, of one that its
        # layer has for it.
        "optimizer": prefix,
        "own_iterations": None if own is None else iterations_of(own),
        "own_scalars": None if own is None else [np.asarray(one).item() for one in _scalars_of(own)],
        "steps_in_backward": max(int(update.step) for update in updates) if updates else None,
    }


def _has_several(optimizer: Any) -> bool:
    """Whether a model has optimizers in a list, as a ``WideDeepModel`` of tf_keras: its step tells which has which."""
    return isinstance(optimizer, (list, tuple))


def _core(optimizer: Any) -> Any:
    """The optimizer that updates variables; None of none, and of several."""
    return None if optimizer is None or _has_several(optimizer) else innermost(optimizer)


def iterations_of(optimizer: Any) -> int | None:
    """The steps of a model's optimizer, or of all of several; None of none."""
    if _has_several(optimizer):
        return sum(iterations_of(one) or 0 for one in optimizer)
    iterations = getattr(optimizer, "iterations", None)
    return None if iterations is None else int(np.asarray(iterations))


def _scalars_of(optimizer: Any) -> list[Any]:
    """What an optimizer has beside the slots of variables: steps, learning rate, the product of Nadam's momenta."""
    variables = optimizer.variables
    scalars = [one for one in (variables() if callable(variables) else variables) if len(one.shape) == 0]
    rate = getattr(optimizer, "_learning_rate", None)  # which is not among them in tf_keras
    return [*scalars, rate] if isinstance(rate, tf.Variable) and all(rate is not one for one in scalars) else scalars


def _go_on(own: Any, entry: dict[str, Any]) -> None:
    """Has the optimizer of a layer go on from the steps that were saved."""
    own.iterations.assign(entry["own_iterations"])
    if hasattr(own, "_check_variables_are_known") and not own.built:  # Keras 3 makes some of them then
        own.build([])
    scalars, values = _scalars_of(own), entry.get("own_scalars") or ()
    if len(scalars) == len(values):
        for variable, value in zip(scalars, values, strict=True):
            variable.assign(value)


class SavedTables:
    """What a folder has.

    Args:
      folder: as `write` leaves it.
      where: what to call it in messages.

    Attributes:
      tables: what is said of each.
      iterations: of the optimizer when they were saved.
    """

    def __init__(self, folder: Path, where: str) -> None:
        self._folder = folder
        self.where = where
        listed = _read_list(folder / _LIST, where)
        self.iterations: int | None = listed["iterations"]
        self.tables: list[dict[str, Any]] = listed["tables"]
        self._pending = _read_pending(folder / _PENDING, where)

    # ---- Which is which ----

    def matched(
        self, held: Sequence[HeldTable], what: str, *, by_name: bool = False, partial: bool = False
    ) -> tuple[list[tuple[dict[str, Any], HeldTable]], list[str]]:
        """Pairs of what is saved and what a model holds, and what is wrong with the others.

        By name; names that Keras made, of layers without one, where that does not tell in their order, if they are
        equal but for their numbers.

        Args:
          held: the tables of the model.
          what: the model, for messages.
          by_name: tables that only one of the two has are no fault.
          partial: what fits is taken although other things are wrong.

        Raises:
          ValueError: one of the two has a table that the other one has not; another width or type. Not if `partial`.
        """
        names = names_of(held)
        saved = {entry["name"]: entry for entry in self.tables}
        wrong = []
        exact = {
            name
            for name, one in zip(names, held, strict=True)
            if name in saved and None in (one.unnumbered, saved[name].get("unnumbered"))
        }
        rest = [one for name, one in zip(names, held, strict=True) if name not in exact]
        rest_saved = [entry for entry in self.tables if entry["name"] not in exact]
        alike = [one.unnumbered for one in rest] == [entry.get("unnumbered") for entry in rest_saved]
        if by_name:
            pairs = [(saved[name], one) for name, one in zip(names, held, strict=True) if name in saved]
        elif set(names) == set(saved):
            pairs = [(saved[name], one) for name, one in zip(names, held, strict=True)]
        elif alike and all(one.unnumbered is not None for one in rest):
            pairs = [(saved[name], one) for name, one in zip(names, held, strict=True) if name in exact]
            pairs += zip(rest_saved, rest, strict=True)
        else:
            pairs = [(saved[name], one) for name, one in zip(names, held, strict=True) if name in saved]
            wrong.append(
                f"{self.where} has the tables {_listed(saved)}, and {what} holds {_listed(names)}: give those of the "
                "model the names that they were saved by, or restore by tfplugin.restore_tables"
            )
        fitting = []
        for entry, one in pairs:
            was = f"{entry['key_dtype']} -> {entry['value_dtype']}[{entry['dim']}]"
            now = f"{one.key_dtype.name} -> {one.dtype.name}[{one.dim}]"
            tables = 1 if _in_parts(one) else len(one.parts)
            if was != now:
                wrong.append(f"{self.where} has table '{entry['name']}' as {was}, and in {what} it is {now}")
            elif tables != entry["tables"] and max(tables, entry["tables"]) > 1:
                wrong.append(
                    f"{self.where} has table '{entry['name']}' on {entry['tables']} devices, {what} on {tables}"
                )
            else:
                fitting.append((entry, one))
        if wrong and not partial:
            way_out = "load_weights(..., skip_mismatch=True) takes what fits, and warns of the rest"
            raise ValueError("; ".join(wrong) + f". Nothing was loaded; {way_out}.")
        return fitting, wrong

    # ---- Rows ----

    def restore(self, pairs: Sequence[tuple[dict[str, Any], HeldTable]], optimizer: Any) -> None:
        """Gives tables the rows that were saved of them, in place of what they hold.

        Slots come along where their optimizer, that of the model or of the layer, goes on from the file, too. Where it
        does not, rows keep the slots that they have now: they are the optimizer's, as those of dense weights.
        """
        for entry, one in pairs:
            _check(one)
            leaves = self._slots(entry, one, optimizer) == "leave"
            if leaves and any(part.slot_names() for part in one.parts):
                self._replace_rows(entry, one)
            else:
                self._restore(entry, one)
                self._settle(entry, one, optimizer)

    def restore_all(self, pairs: Sequence[tuple[dict[str, Any], HeldTable]]) -> None:
        """Gives tables of a new model the rows and all slots. `settle` is to follow, once it has its optimizer."""
        for entry, one in pairs:
            _check(one)
            self._restore(entry, one)

    def settle(self, pairs: Sequence[tuple[dict[str, Any], HeldTable]], optimizer: Any) -> None:
        """Has optimizers go on with the slots that they had; those of one that starts anew go."""
        for entry, one in pairs:
            self._settle(entry, one, optimizer)

    def _slots(self, entry: dict[str, Any], one: HeldTable, optimizer: Any) -> str:
        """What becomes of a table's slots: an optimizer is to "take" them, or they "leave" with it; or just "keep"."""
        own = one.own_optimizer()
        if entry["steps_in_backward"] is not None:
            return "keep"
        if own is not None or entry["own_iterations"] is not None:
            return "take" if own is not None and entry["own_iterations"] is not None else "leave"
        if self.iterations is None:  # of a loop that is not Keras's
            return "keep"
        return "take" if iterations_of(optimizer) == self.iterations else "leave"

    def _settle(self, entry: dict[str, Any], one: HeldTable, optimizer: Any) -> None:
        what, prefix, own = self._slots(entry, one, optimizer), entry["optimizer"], one.own_optimizer()
        if what == "leave" and (prefix is not None or _has_several(optimizer)):
            for part in one.parts:
                drop_restored_slots(part, prefix)
        if what != "take":
            return
        if own is not None:
            _go_on(own, entry)
        core = _core(optimizer if own is None else own)
        if core is None:  # the one of several that trains the table finds the slots
            return
        for part in one.parts:
            if prefix is not None:
                slot_binding.take_over(part, core, prefix)
            self._bring_pending(entry, one, part, core)

    def _restore(self, entry: dict[str, Any], one: HeldTable) -> None:
        for number, part in enumerate(one.parts):
            base = entry["name"] if entry["tables"] == 1 else f"{entry['name']}/table_{number}"
            with tf.init_scope():
                restore_op(self._bundle, part, base, "/part_")
            slot_binding.restored(part, getattr(one.table, "_update_uid", -1))
            if entry["steps_in_backward"] is not None:
                _set_steps(part, entry["steps_in_backward"])

    def _replace_rows(self, entry: dict[str, Any], one: HeldTable) -> None:
        read = KvVariable(one.name, one.dim, one.key_dtype, one.dtype, one.parts[0].kv_initializer)
        with tf.init_scope():
            restore_op(self._bundle, read, entry["name"], "/part_")
        keys, rows = (column.numpy() for column in read.export())
        one.replace(keys, rows)

    @property
    def _bundle(self) -> tf.Tensor:
        return tf.constant(os.fsencode(self._folder / _BUNDLE))

    def _bring_pending(self, entry: dict[str, Any], one: HeldTable, part: Any, optimizer: Any) -> None:
        number = self.tables.index(entry)
        keys, rows = np.zeros(0, one.key_dtype.as_numpy_dtype), np.zeros((0, one.dim), np.float32)
        if f"keys_{number}" in self._pending:
            keys, rows = self._pending[f"keys_{number}"], self._pending[f"rows_{number}"]
        mine = keys % np.array(len(one.parts), keys.dtype) == part.part if _in_parts(one) else slice(None)
        if len(keys) or accumulated_rows.pending(optimizer, part) is not None:
            accumulated_rows.bring(optimizer, part, keys[mine], rows[mine])


def _read_list(file: Path, where: str) -> dict[str, Any]:
    try:
        listed = json.loads(file.read_text())
        layout = int(listed["layout"])
        if layout <= _LAYOUT:
            for entry in listed["tables"]:
                for field in _FIELDS:
                    _ = entry[field]
            _ = listed["iterations"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedTablesError(f"{where}: what it says of its tables cannot be read ({error!r}).") from error
    if layout > _LAYOUT:
        raise ValueError(f"{where}: its tables are of layout {layout}, which a later version of kvtools has written.")
    return dict(listed)


def _read_pending(file: Path, where: str) -> dict[str, np.ndarray[Any, Any]]:
    if not file.exists():
        return {}
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DamagedTablesError(
            f"{where}: the gradients that it has of its tables cannot be read ({error!r})."
        ) from error


def _listed(names: Any) -> str:
    return "[" + ", ".join(f"'{name}'" for name in sorted(names)) + "]"


def _set_steps(part: Any, steps: int) -> None:
    if part._in_backward is not None:
        part._in_backward.step.assign(steps)
    else:
        part._steps_in_backward = steps  # `apply_in_backward` goes on from there


def drop_restored_slots(part: Any, prefix: str | None = None) -> None:
    """Takes slots out of the rows of a table that was just restored: those of one prefix, or all."""
    if slot_binding.drop_slots(part, prefix):
        slot_binding.restored(part, -1)


# ---- Archives --------------------------------------------------------------------------------------------------------


def add_to_archive(archive: zipfile.ZipFile, folder: Path) -> None:
    """Puts a folder of tables into an archive, some megabytes at a time."""
    for file in sorted(folder.iterdir()):
        archive.write(file, f"{FOLDER}/{file.name}", compress_type=zipfile.ZIP_STORED)


def in_archive(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The files of tables that an archive has."""
    return [info for info in archive.infolist() if info.filename.startswith(f"{FOLDER}/")]


def from_archive(archive: zipfile.ZipFile, into: Path, where: str) -> None:
    """Writes the files of tables in an archive to a new folder.

    Raises:
      DamagedTablesError: bytes that contradict their checksum.
    """
    into.mkdir(parents=True)
    for info in in_archive(archive):
        with _told(where), archive.open(info) as source, (into / _plain(info.filename, where)).open("wb") as target:
            shutil.copyfileobj(source, target, _PIECE)


def _plain(path: str, where: str) -> str:
    name = path.removeprefix(f"{FOLDER}/")
    if not re.fullmatch(r"pending\.npz|tables\.(json|index|data-\d{5}-of-\d{5})", name):
        raise DamagedTablesError(f"{where}: '{path}' is no file of tables.")
    return name


class _told:
    """Says which file is damaged."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (zipfile.BadZipFile, EOFError, zlib.error)):
            raise DamagedTablesError(f"{self._where}: its tables are damaged: {error}.") from error


# ---- HDF5 ------------------------------------------------------------------------------------------------------------


def add_to_hdf5(group: Any, folder: Path) -> None:
    """Puts a folder of tables into a group of an HDF5 file, some megabytes at a time."""
    tables = group.create_group(FOLDER)
    for file in sorted(folder.iterdir()):
        size, checksum, first = file.stat().st_size, 0, 0
        dataset = tables.create_dataset(file.name, (size,), np.uint8)
        for piece in _pieces(file):
            dataset[first : first + len(piece)] = np.frombuffer(piece, np.uint8)
            checksum, first = zlib.crc32(piece, checksum), first + len(piece)
        dataset.attrs["crc32"] = checksum


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            yield piece


def in_hdf5(group: Any) -> bool:
    """Whether a group of an HDF5 file has tables."""
    return FOLDER in group


def from_hdf5(group: Any, into: Path, where: str) -> None:
    """Writes the files of tables in a group of an HDF5 file to a new folder.

    Raises:
      DamagedTablesError: bytes that contradict their checksum.
    """
    into.mkdir(parents=True)
    tables = group[FOLDER]
    for name in tables:
        plain = _plain(name, where)
        # A link may lead to another file.
        is_link = type(tables.get(name, getlink=True)).__name__ != "HardLink"
        dataset, checksum = None if is_link else tables[name], 0
        if dataset is None or dataset.dtype != np.uint8 or dataset.external or dataset.is_virtual:
            raise DamagedTablesError(f"{where}: '{FOLDER}/{name}' is no file of tables.")
        with (into / plain).open("wb") as target:
            for first in range(0, dataset.shape[0], _PIECE):
                piece = dataset[first : first + _PIECE].tobytes()
                checksum = zlib.crc32(piece, checksum)
                target.write(piece)
        if checksum != int(dataset.attrs.get("crc32", -1)):
            raise DamagedTablesError(f"{where}: its tables are damaged: the checksum of '{name}' is another one.")
