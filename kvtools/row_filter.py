"""Conditions on rows, for whoever reads rows: what they are, and which tables have what they are about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.errors import BadInputError, KvtoolsError, UsageError

if TYPE_CHECKING:
    from kvtools.where import Where


class RowFilter(Protocol):
    """Which rows count at all: what `kvtools.where.Where` is."""

    def columns_of(self, table: TableReader) -> Columns:
        """Return what is to be read to tell; raises `UsageError` where the table has it not."""

    def mask(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        """Return which rows of a chunk count, bool [n]."""


def condition_of(text: str | None) -> Where | None:
    """Return the condition that a text is, None for None.

    Raises:
        UsageError: it is no condition.
        MissingDependencyError: DuckDB, which computes it, is not installed.
    """
    if text is None:
        return None
    from kvtools.where import Where  # with DuckDB, which is loaded where there is a condition

    return Where.parse(text)


def tables_with(
    tables: Sequence[TableReader], needs: Sequence[Callable[[TableReader], object]], *, all_named: bool
) -> tuple[list[TableReader], list[tuple[TableReader, KvtoolsError]]]:
    """Return the tables that have what is needed, and the others, each with what it has not.

    Args:
        tables: any tables.
        needs: functions of a table that raise `BadInputError` or `UsageError` where it has not something.
        all_named: each of the tables was asked for by name, so that one without is an error.

    Raises:
        BadInputError, UsageError: what the first table without has not, where it was named, or none has.
    """
    able: list[TableReader] = []
    without: list[tuple[TableReader, KvtoolsError]] = []
    for table in tables:
        try:
            for need in needs:
                need(table)
        except (BadInputError, UsageError) as error:
            if all_named:
                raise
            without.append((table, error))
        else:
            able.append(table)
    if without and not able:
        raise without[0][1]
    return able, without
