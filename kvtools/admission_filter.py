"""Counting Bloom filters of keys that wait for admission: one for each part, joined where parts change.

Each part has a filter for the whole capacity, so those of one table have as many cells, and a table in other parts has
the larger of each cell in all of them; see `docs/checkpoint-layout.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import ADMISSION_FILTER, TableSchema

_MOST_IN_A_BYTE = 255


def filters_of(schema: TableSchema) -> tuple[str, ...]:
    """Return the names of a table's filters, of one part each."""
    return tuple(extra.name for extra in schema.extras if extra.name.startswith(ADMISSION_FILTER))


def admission_of(schema: TableSchema) -> dict[str, Any] | None:
    """Return what a table records of its filters' admission, None if it does not: cells are of no use without it."""
    policies = schema.metadata.get("policies")
    admission = policies.get("admission") if isinstance(policies, dict) else None
    return admission if isinstance(admission, dict) and admission.get("kind") == "bloom" else None


def can_join(schemas: Iterable[TableSchema]) -> bool:
    """Tell whether the filters of tables have cells of one meaning."""
    tables = [schema for schema in schemas if filters_of(schema)]
    admissions = [admission_of(schema) for schema in tables]
    shapes = {extra.shape for schema in tables for extra in schema.extras if extra.name in filters_of(schema)}
    return len(shapes) == 1 and admissions[0] is not None and all(one == admissions[0] for one in admissions)


def joined_filter(tables: Iterable[TableReader]) -> Array:
    """Return the filters of all parts of tables as one, cell by cell the larger: uint8 [bytes]; see `can_join`."""
    having = [table for table in tables if filters_of(table.schema)]
    admission = admission_of(having[0].schema) or {}
    threshold = admission.get("enter_threshold", 0)
    cells = np.dtype("<u2" if isinstance(threshold, int) and threshold > _MOST_IN_A_BYTE else "u1")
    joined: Array | None = None
    for table in having:
        for name in filters_of(table.schema):
            one = np.ascontiguousarray(table.extra(name), np.uint8)
            one = one[: len(one) // cells.itemsize * cells.itemsize].view(cells)
            joined = one.copy() if joined is None else np.maximum(joined, one, out=joined)
    assert joined is not None
    return joined.view(np.uint8)
