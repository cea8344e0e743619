"""What `kvtools scan` prints or writes, and `kvtools get` where it is asked for all rows that meet a condition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvtools.cli.options import bytes_of
from kvtools.cli.progress import progress_bar
from kvtools.cli.row_output import RowForms, Rows, print_rows
from kvtools.dialects.dialect import Dialect
from kvtools.dialects.interface import TableReader
from kvtools.errors import CheckFailedError
from kvtools.get import ChosenRows, ColumnChoice
from kvtools.key_join import row_numbers
from kvtools.row_filter import RowFilter
from kvtools.scan import KeyRange, Order, rows_in_range, scan


def print_scan(
    tables: Sequence[TableReader],
    forms: RowForms,
    choice: ColumnChoice,
    target: Dialect | None,
    memory: str,
    *,
    keys: KeyRange | None = None,
    order: Order,
    limit: int | None = None,
    where: RowFilter | None,
    **more: Any,
) -> None:
    """Print the rows of a range of keys of each table, or write them; exits with 3 where there are none.

    `more` is what JSON has beside the rows.
    """
    count = 0
    keys = keys or KeyRange()
    if target is not None:
        chosen = []
        with progress_bar("reading keys of") as progress:
            for table in tables:
                found = rows_in_range(
                    table, keys, order=order, limit=limit, where=where, memory=bytes_of(memory), progress=progress
                )
                chosen.append(ChosenRows(table, _joined(found, table.rows, bytes_of(memory))))
        count = sum(one.rows for one in chosen)
        # A table without such rows is left out beside others; where there are none at all, OUT has tables without rows.
        forms.write([one for one in chosen if one.rows] or chosen, target, memory, **more)
    else:

        def rows() -> Iterator[Rows]:
            nonlocal count
            for table in tables:
                for chunk in scan(
                    table,
                    keys,
                    choice.to_read,
                    order=order,
                    limit=limit,
                    where=where,
                    memory=bytes_of(memory),
                    progress=progress,
                ):
                    count += len(chunk)
                    yield Rows(table, chunk)

        with progress_bar("reading") as progress:
            print_rows(rows(), forms, choice, tables[0] if tables else None, **more)
    if not count:
        which = "with a key in the range" if keys != KeyRange() else "in the tables"
        raise CheckFailedError(f"reading rows: there is none {which}{'' if where is None else ' that meets --where'}")


def _joined(found: Iterator[np.ndarray], rows: int, memory: int) -> np.ndarray:
    """Return arrays of row numbers as one, in a temporary file where that is large."""
    numbers, at = row_numbers(rows, memory=memory), 0
    for some in found:
        numbers[at : at + len(some)] = some
        at += len(some)
    return numbers[:at]
