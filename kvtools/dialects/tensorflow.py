"""Any TensorFlow checkpoint as dense variables: the dialect of one with no table that kvtools knows."""

from __future__ import annotations

from collections.abc import Collection

from kvtools.dialects.bundle import Bundle
from kvtools.dialects.bundle.dtypes import dtype_name
from kvtools.dialects.interface import Checkpoint, VariableSchema
from kvtools.dialects.location import Location

DIALECT = "tensorflow"

_BOOKKEEPING = frozenset({"_CHECKPOINTABLE_OBJECT_GRAPH"})


def dense_variables(bundle: Bundle, table_tensors: Collection[str] = ()) -> tuple[VariableSchema, ...]:
    """List the tensors of `bundle` that belong to no table, leaving out TensorFlow's own bookkeeping."""
    skip = _BOOKKEEPING.union(table_tensors)
    return tuple(
        VariableSchema(name, dtype_name(entry.dtype), entry.shape, bundle.nbytes(name))
        for name, entry in bundle.entries.items()
        if name not in skip
    )


def open_checkpoint(location: Location, bundle: Bundle) -> Checkpoint:
    """Open a checkpoint as no tables and all variables dense."""
    return Checkpoint(location.saved_model or location.prefix, DIALECT, {}, dense_variables(bundle))
