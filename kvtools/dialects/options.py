"""How a user wants a checkpoint to be opened, and to be told of the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtools.dialects.schema import TableSchema

Progress = Callable[[str, int, int], None]
"""Called while work goes on, from any thread, with a table's name, the rows done and its rows in all."""

DEFAULT_MEMORY = 1 << 30
"""How many bytes an operation may hold unless told otherwise; what needs more spills to disk."""


@dataclass(frozen=True)
class OpenOptions:
    """How to open a checkpoint: what its files do not say, and how much memory a reader may hold.

    `key_dtype`, `value_dtype` and `dim` are for formats that do not record them; for one that does record them they are
    a check (`contradicted_by`). With `lenient`, a table that cannot be opened is left out and named in
    `Checkpoint.broken`. An increment of a chain is opened only with `increments`: it has the rows that changed, and who
    takes them for all rows loses the others. With `salvage` the data files of a TensorFlow checkpoint may be missing or
    cut: reading what lay there is an error then, opening the checkpoint is none.
    """

    dialect: str | None = None
    key_dtype: str | None = None
    value_dtype: str | None = None
    dim: int | None = None
    memory: int = DEFAULT_MEMORY
    lenient: bool = False
    increments: bool = False
    salvage: bool = False

    def contradicted_by(self, schema: TableSchema) -> str | None:
        """Return what a table says against these options, or None if it agrees.

        >>> OpenOptions(dim=9).contradicted_by(TableSchema("emb", "npz", "int64", "float32", 4, (7,)))
        'got --dim 9, it says 4; leave the option out'
        """
        for option, wanted, got in (
            ("--key-dtype", self.key_dtype, schema.key_dtype),
            ("--value-dtype", self.value_dtype, schema.value_dtype),
            ("--dim", self.dim, schema.dim),
        ):
            if wanted is not None and wanted != got:
                return f"got {option} {wanted}, it says {got}; leave the option out"
        return None
