"""What a client has to know of a server's tables before it asks for rows, and keys in the form of the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.client.errors import BadAnswerError
from kvtools.client.options import VALUES_AT_ONCE
from kvtools.errors import UnknownTableError, UsageError
from kvtools.lookup_frame import OWN_TYPES

Array = npt.NDArray[Any]
_KEY_DTYPES = ("int64", "int32", "uint64")
_OF_STRINGS = "; of strings: kvtools.string_keys"


@dataclass(frozen=True)
class Shard:
    """Which keys a server says it has: those of which `rule` says `number` of `of`."""

    number: int
    of: int
    rule: str


@dataclass(frozen=True)
class Table:
    """A table as a server describes it: rows are `dim` numbers.

    Of a table that is spread over servers `rows` counts those of all, and `shard` is None. `model` is that which has
    it, where the servers have several.
    """

    name: str
    key_dtype: str
    value_dtype: str
    dim: int
    rows: int
    shard: Shard | None = None
    model: str | None = None

    @property
    def rows_dtype(self) -> np.dtype[Any]:
        """The type of the rows that a lookup gives: float32, which has float16, bfloat16, int8 and bool exactly, or
        that of the table."""
        return np.dtype(self.value_dtype if self.value_dtype in OWN_TYPES else np.float32)


@dataclass(frozen=True)
class Tables:
    """The tables of a server, what it takes at once, and the version of each model, by what its tables have as `model`.

    `several` are names of tables that more than one of its models has, and those models. `export` names what they were
    exported with, where that was a model in two halves.
    """

    tables: Mapping[str, Table]
    max_keys: int
    max_values: int
    versions: Mapping[str | None, int] = field(default_factory=dict)
    several: Mapping[str, Sequence[str]] = field(default_factory=dict)
    export: str | None = None

    def table(self, name: str) -> Table:
        """Return a table; raises `UnknownTableError`, and `UsageError` where it could be that of several models."""
        try:
            return self.tables[name]
        except KeyError:
            if models := self.several.get(name):
                there = ", ".join(f"'{model}'" for model in models)
                raise UsageError(
                    f"looking up in table '{name}': the server has one in the models {there}; name one by model= to the"
                    " client"
                ) from None
            names = ", ".join(f"'{one}'" for one in sorted(self.tables)[:10])
            raise UnknownTableError(f"looking up in table '{name}': the server has {names or 'none'}") from None


def tables_of(body: bytes, doing: str, max_keys: int) -> Tables:
    """Return what the answer to `GET /v1/tables` says; raises `BadAnswerError` if it is none."""
    try:
        listing = json.loads(body)
        limits = listing.get("limits") or {}
        models: dict[str, list[str]] = {}
        for one in listing["tables"]:
            models.setdefault(one["name"], []).append(str(one.get("model")))
        several = {name: having for name, having in models.items() if len(having) > 1}
        tables = {
            one["name"]: Table(
                one["name"],
                one["key_dtype"],
                one["value_dtype"],
                int(one["dim"]),
                int(one["rows"]),
                _shard_of(one),
                one.get("model"),
            )
            for one in listing["tables"]
            if one["name"] not in several
        }
        keys, values = int(limits.get("max_keys", max_keys)), int(limits.get("max_values", VALUES_AT_ONCE))
        said = {None: listing.get("version")} | {one["model"]: one["version"] for one in listing.get("models", [])}
        versions = {model: int(version) for model, version in said.items() if version is not None}
        export = None if listing.get("export") is None else str(listing["export"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadAnswerError(
            f"{doing}: its list of tables is not one of kvtools serve ({error!r}); check the URL"
        ) from error
    return Tables(tables, max(1, min(keys, max_keys)), max(1, values), versions, several, export)


def wire_keys(keys: Any, table: Table) -> Array:
    """Return keys of any shape as int64 [n], those of a table of uint64 keys as their bits.

    Raises:
        UsageError: they are no integers, or out of the range of the table's key type.

    Example:
        >>> table = Table("emb", "uint64", "float32", 4, 10)
        >>> wire_keys([2**64 - 1, 7], table).tolist()
        [-1, 7]
    """
    doing = f"looking up in table '{table.name}'"
    try:
        given = np.asarray(keys)
    except ValueError as error:
        raise UsageError(
            f"{doing}: got keys in lists of several lengths, expected integers of one shape; of bags, keys [n] and"
            " row_splits, see lookup_pooled"
        ) from error
    if not given.size:
        return np.empty(0, np.int64)
    if given.dtype.kind == "f" and not isinstance(keys, np.ndarray):
        given = np.asarray(keys, object)  # NumPy makes floats of small and large ints together.
    if given.dtype == object and all(map(_is_whole, given.flat)):
        low, high = int(min(given.flat)), int(max(given.flat))
    elif given.dtype.kind in "iu":
        low, high = int(given.min()), int(given.max())
    elif given.dtype == object:
        wrong = next(key for key in given.flat if not _is_whole(key))
        hint = _OF_STRINGS if isinstance(wrong, str | bytes) else ""
        raise UsageError(f"{doing}: got key {wrong!r:.60}, expected integers ({table.key_dtype}){hint}")
    else:
        hint = _OF_STRINGS if given.dtype.kind in "UST" else ""
        raise UsageError(f"{doing}: got keys of type {given.dtype}, expected integers ({table.key_dtype}){hint}")
    if table.key_dtype not in _KEY_DTYPES:
        raise BadAnswerError(f"{doing}: the server says that its keys are {table.key_dtype}; update this client")
    limits = np.iinfo(table.key_dtype)
    if low < limits.min or high > limits.max:
        wrong = low if low < limits.min else high
        raise UsageError(f"{doing}: got key {wrong}, expected {table.key_dtype}: {limits.min} to {limits.max}")
    flat = given.reshape(-1).astype(np.uint64 if table.key_dtype == "uint64" else np.int64, copy=False)
    return np.ascontiguousarray(flat).view(np.int64)


def _is_whole(key: Any) -> bool:
    return type(key) is int or isinstance(key, np.integer)


def typed_keys(wire: Array, table: Table) -> Array:
    """Return the keys of `wire_keys` in 64 bits of the table's sign, as the rules of partitioning take them."""
    return wire.view(np.uint64) if table.key_dtype == "uint64" else wire


def _shard_of(description: Mapping[str, Any]) -> Shard | None:
    shard = description.get("shard")
    return None if shard is None else Shard(int(shard["number"]), int(shard["of"]), str(shard["rule"]))
