"""A table whose columns are tensors of a TensorFlow bundle, in one or more parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtools.dialects.bundle.reader import BundleTensor
from kvtools.dialects.interface import (
    KEYS_AND_VALUES,
    Array,
    Chunk,
    Columns,
    TableReader,
    TableSchema,
)


@dataclass(frozen=True)
class BundlePart:
    """The columns of one part, all of the same number of rows.

    `rows` may be smaller than the tensors' own number of rows: the rest is no part of the table.
    """

    rows: int
    keys: BundleTensor
    values: BundleTensor
    slots: Mapping[str, BundleTensor] = field(default_factory=dict)
    freqs: BundleTensor | None = None
    versions: BundleTensor | None = None


class BundleTable(TableReader):
    """The parts of a table, one after the other; `decode_keys` turns stored keys into the schema's type."""

    def __init__(
        self,
        schema: TableSchema,
        parts: Sequence[BundlePart],
        decode_keys: Callable[[Array], Array] | None = None,
        extras: Mapping[str, BundleTensor] | None = None,
    ) -> None:
        self.schema = dataclasses.replace(schema, checksums="CRC-32C")
        self._parts = tuple(parts)
        self._decode_keys = decode_keys
        self._extras = dict(extras or {})
        self._starts = np.cumsum([0, *(part.rows for part in self._parts)])

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        source = self._parts[part]
        chosen = _chosen(source, columns)
        streams = {name: tensor.chunks(rows, verify=verify) for name, tensor in chosen.items()}
        for start in range(0, max(tensor.rows for tensor in chosen.values()), rows):
            n = max(0, min(rows, source.rows - start))
            # Rows past the table's own are read too, so that the checksum of the whole tensor is known.
            arrays = {name: next(stream, None) for name, stream in streams.items()}
            if n:
                yield self._chunk({k: a[:n] for k, a in arrays.items() if a is not None}, part)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        rows = np.asarray(rows, np.int64)
        if len(self._parts) == 1:
            chosen = _chosen(self._parts[0], columns)
            return self._chunk({name: tensor.take(rows) for name, tensor in chosen.items()})
        which = np.searchsorted(self._starts, rows, side="right") - 1
        arrays: dict[Any, Array] = {}
        for number, part in enumerate(self._parts):
            here = np.flatnonzero(which == number)
            for name, tensor in _chosen(part, columns).items():
                if name not in arrays:
                    arrays[name] = np.empty((len(rows), *tensor.row_shape), tensor.dtype)
                if len(here):
                    arrays[name][here] = tensor.take(rows[here] - self._starts[number])
        return self._chunk(arrays)

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        return self._extras[name].read()

    def _chunk(self, arrays: dict[Any, Array], part: int = 0) -> Chunk:
        keys = arrays[("keys", "")]
        return Chunk(
            keys=self._decode_keys(keys) if self._decode_keys else keys,
            values=arrays.get(("values", "")),
            slots={name: array for (kind, name), array in arrays.items() if kind == "slot"},
            freqs=arrays.get(("freqs", "")),
            versions=arrays.get(("versions", "")),
            part=part,
        )


def _chosen(part: BundlePart, columns: Columns) -> dict[tuple[str, str], BundleTensor]:
    chosen = {("keys", ""): part.keys}
    if columns.values:
        chosen["values", ""] = part.values
    if columns.slots:
        chosen.update({("slot", name): tensor for name, tensor in part.slots.items()})
    if columns.freqs and part.freqs is not None:
        chosen["freqs", ""] = part.freqs
    if columns.versions and part.versions is not None:
        chosen["versions", ""] = part.versions
    return chosen
