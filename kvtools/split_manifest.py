"""`split.json`: how the two halves of a model belong together, its dense part and the rows of its tables.

Beside the manifest lie the dense part, a SavedModel, and the tables, a snapshot. Each signature of the model is two in
the dense part: one of its own name that takes rows, and one that computes ids from inputs.

    {"format": 1, "export": "<32 hexadecimal digits>", "fingerprint": "<of the snapshot>", "dense": "dense",
     "snapshot": "tables.kvsnap",
     "tables": [{"name": "user", "key_dtype": "int64", "value_dtype": "float32", "dim": 16, "rows": 10, ...}],
     "signatures": {"serving_default": {"ids_signature": "serving_default_ids",
       "inputs": [{"name": "price", "dtype": "float32", "shape": [-1]}, ...], "outputs": [...],
       "ids_inputs": ["user_id"], "dense_inputs": ["price"],
       "lookups": [{"table": "user", "ids": "user_ids", "ids_input": "user_id", "rows": "user_rows", "found": null,
         "dtype": "float32"}]}}}

`export` is in each table of the snapshot, too, and in its shards: a server of tables tells it, and is asked for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools import __version__
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.model_digest import check_manifest, sealed
from kvtools.remote.stored import read_bytes

FORMAT = 1
MANIFEST = "split.json"
DENSE = "dense"
SNAPSHOT = "tables.kvsnap"
EXPORT = "export"
"""What the metadata of a table has the number of an export as."""
EXPORT_HEADER = "x-embedding-export"
"""The header by which a server is asked for rows of one export, and of no other."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SplitTable:
    """A table: its name, the type of its keys, and its rows as the model has them."""

    name: str
    key_dtype: str
    value_dtype: str
    dim: int
    rows: int


@dataclass(frozen=True)
class SplitLookup:
    """A lookup of a signature.

    `ids` is the output of the signature of ids, `ids_input` the input that has the same ids, or None. `rows`
    [*shape of ids, dim] and `found` [*shape of ids] are inputs of the dense part, or None where it does not ask;
    `dtype` is the type of `rows`.
    """

    table: SplitTable
    ids: str
    ids_input: str | None
    rows: str | None
    found: str | None
    dtype: str


@dataclass(frozen=True)
class SplitTensor:
    """An input or an output of a model: -1 for a size that varies, a shape of None for any shape."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class SplitSignature:
    """A signature of a model: what a request has, and what of it goes where.

    `ids_signature` is the signature of the dense part that computes ids, from `ids_inputs`; None where there is no
    lookup. `dense_inputs` are those of `inputs` that the dense part takes beside rows, by the signature `name`.
    `export` is that of the model.
    """

    name: str
    ids_signature: str | None
    inputs: tuple[SplitTensor, ...]
    ids_inputs: tuple[str, ...]
    dense_inputs: tuple[str, ...]
    outputs: tuple[SplitTensor, ...]
    lookups: tuple[SplitLookup, ...]
    export: str

    @property
    def needs_ids(self) -> bool:
        """Whether some ids are no input as it is: TensorFlow computes them, by `ids_signature`."""
        return any(lookup.ids_input is None for lookup in self.lookups)

    def keys(self, request: Mapping[str, Any], ids: Mapping[str, Any] | None = None) -> list[Array]:
        """Return the keys of each lookup, in the table's key type and the shape of its ids.

        Args:
            request: the inputs of the model, by name: arrays, or what NumPy makes of one.
            ids: the outputs of `ids_signature`, where `needs_ids`.

        Raises:
            UsageError: an input, or ids, are not there, or are no integers of the table's key type.
        """
        return [self._keys_of(lookup, request, ids or {}) for lookup in self.lookups]

    @property
    def _inputs(self) -> str:
        return ", ".join(f"'{one.name}'" for one in self.inputs)

    def _keys_of(self, lookup: SplitLookup, request: Mapping[str, Any], ids: Mapping[str, Any]) -> Array:
        doing = f"looking up for signature '{self.name}': table '{lookup.table.name}'"
        source = lookup.ids_input
        if lookup.ids in ids:
            given, name = ids[lookup.ids], lookup.ids
        elif source is None:
            raise UsageError(
                f"{doing}: got no ids '{lookup.ids}', which are no input as it is; ask the dense part for them, by its"
                f" signature '{self.ids_signature}'"
            )
        elif source in request:
            given, name = request[source], source
        else:
            raise UsageError(f"{doing}: got no input '{source}', expected {self._inputs}")
        array = np.asarray(given)
        wanted = np.dtype(lookup.table.key_dtype)
        if array.dtype == wanted:
            return array
        if array.size and array.dtype.kind not in "iu":
            raise UsageError(f"{doing}: got '{name}' of type {array.dtype}, expected integers ({wanted})")
        limits = np.iinfo(wanted)
        if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
            raise UsageError(f"{doing}: got '{name}' with an id out of the range of {wanted}")
        return array.astype(wanted)

    def dense_request(self, request: Mapping[str, Any], rows: Sequence[tuple[Array, Array]]) -> dict[str, Any]:
        """Return the inputs of the dense part.

        Args:
            request: the inputs of the model.
            rows: of each lookup the rows [*shape of ids, dim], and whether each was found [*shape of ids].

        Raises:
            UsageError: an input is not there.
        """
        missing = [name for name in self.dense_inputs if name not in request]
        if missing:
            raise UsageError(f"asking signature '{self.name}': got no input '{missing[0]}', expected {self._inputs}")
        made = {name: request[name] for name in self.dense_inputs}
        for lookup, (values, found) in zip(self.lookups, rows, strict=True):
            if lookup.rows is not None:
                made[lookup.rows] = values.astype(lookup.dtype, copy=False)
            if lookup.found is not None:
                made[lookup.found] = found
        return made


@dataclass(frozen=True)
class SplitModel:
    """A model in two halves, as its manifest says: `export` tells it from all others, `folder` is where it lies, and
    `manifest` is all that it says, as `kvtools.model_digest` takes it.

    Example:
        ```python
        model = SplitModel.read("models/7")
        model.signature("serving_default").lookups[0].table.name
        ```
    """

    export: str
    fingerprint: str
    tables: Mapping[str, SplitTable]
    signatures: Mapping[str, SplitSignature]
    folder: Path = field(compare=False, default=Path())
    manifest: Mapping[str, Any] = field(compare=False, repr=False, default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SplitModel:
        """Read the manifest of a folder, or a manifest.

        Raises:
            BadInputError: there is none, or it is of a later kvtools.
            CorruptFileError: it is damaged.
        """
        file = Path(path)
        file = file / MANIFEST if file.is_dir() else file
        try:
            said = json.loads(read_bytes(file))
            check_manifest(said, file)
            if said["format"] > FORMAT:
                raise BadInputError(
                    f"reading '{file}': got format {said['format']}, expected at most {FORMAT}; update kvtools"
                )
            tables = {
                one["name"]: SplitTable(
                    one["name"], one["key_dtype"], one["value_dtype"], int(one["dim"]), int(one["rows"])
                )
                for one in said["tables"]
            }
            export = str(said["export"])
            signatures = {name: _signature(name, one, tables, export) for name, one in said["signatures"].items()}
            return cls(export, str(said["fingerprint"]), tables, signatures, file.parent, said)
        except OSError as error:
            raise BadInputError(f"reading '{file}': {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFileError(
                f"reading '{file}': {type(error).__name__} {error}; the manifest is damaged, export the model again"
            ) from error

    @property
    def dense(self) -> Path:
        """The SavedModel."""
        return self.folder / DENSE

    @property
    def snapshot(self) -> Path:
        """The snapshot."""
        return self.folder / SNAPSHOT

    def signature(self, name: str = "serving_default") -> SplitSignature:
        """Return a signature; raises `UsageError`."""
        try:
            return self.signatures[name]
        except KeyError:
            there = ", ".join(f"'{one}'" for one in self.signatures) or "none"
            raise UsageError(f"asking signature '{name}': the model has {there}") from None


def is_split(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a folder is a model in two halves."""
    return Path(folder, MANIFEST).is_file()


def check_half(folder: str | os.PathLike[str]) -> None:
    """Raise `BadInputError` for a folder that has the dense part of a model in two halves and lacks its manifest."""
    if Path(folder, DENSE, "saved_model.pb").is_file() and not is_split(folder):
        missing = [repr(name) for name in (MANIFEST, SNAPSHOT) if not Path(folder, name).is_file()]
        raise BadInputError(
            f"reading '{os.fspath(folder)}': it looks like a part of what `kvtools export --split` writes:"
            f" {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there; copy the folder as a whole"
        )


def encoded(
    *,
    export: str,
    fingerprint: str,
    tables: Sequence[Mapping[str, Any]],
    signatures: Mapping[str, Mapping[str, Any]],
    **more: Any,
) -> str:
    """Return a manifest as text: what `SplitModel` has, and what else is to be said."""
    said = {
        "format": FORMAT,
        "written_by": f"kvtools {__version__}",
        **more,
        "export": export,
        "fingerprint": fingerprint,
        "dense": DENSE,
        "snapshot": SNAPSHOT,
        "tables": tables,
        "signatures": signatures,
    }
    return json.dumps(sealed(json.loads(json.dumps(said))), indent=1) + "\n"


def _signature(name: str, said: Mapping[str, Any], tables: Mapping[str, SplitTable], export: str) -> SplitSignature:
    lookups = [
        SplitLookup(
            tables[one["table"]],
            str(one["ids"]),
            _name(one["ids_input"]),
            _name(one["rows"]),
            _name(one["found"]),
            np.dtype(one["dtype"]).name,
        )
        for one in said["lookups"]
    ]
    inputs, outputs = (tuple(map(_tensor, said[kind])) for kind in ("inputs", "outputs"))
    ids_inputs, dense_inputs = (tuple(map(str, said[kind])) for kind in ("ids_inputs", "dense_inputs"))
    return SplitSignature(
        name, _name(said["ids_signature"]), inputs, ids_inputs, dense_inputs, outputs, tuple(lookups), export
    )


def _tensor(said: Mapping[str, Any]) -> SplitTensor:
    shape = said["shape"]
    return SplitTensor(str(said["name"]), str(said["dtype"]), None if shape is None else tuple(map(int, shape)))


def _name(said: Any) -> str | None:
    return None if said is None else str(said)
