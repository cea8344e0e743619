"""A table as a mapping of keys: `table[key]`, `table.get(keys)`, `key in table`.

Each call goes through the keys of the table once, and reads the rows that it finds: ask for many keys at a time.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import KEYS_AND_VALUES, Array
from kvtools.errors import UnknownKeyError, UsageError
from kvtools.get import rows_of_keys

if TYPE_CHECKING:
    from kvtools.dialects.interface import TableReader

_KEYS_SHOWN = 8


class FoundRows(NamedTuple):
    """The values of several keys: `values` [n, dim], and which keys have a row, `found` bool [n]."""

    values: Array
    found: npt.NDArray[np.bool_]


def get_rows(table: TableReader, keys: Any, default: Any = None) -> Any:
    """Return the values of keys, and what stands for those that are not there.

    Args:
        table: the table.
        keys: an integer, or several: a list or array [n] of integers, in any order.
        default: what a key without a row gets: of one key anything; of several a number, or a row [dim], zeros if None.

    Returns:
        Of one key its values [dim], or `default`. Of several `FoundRows`: `values` [n, dim], `found` bool [n].

    Example:
        >>> from kvtools.array_table import ArrayTable
        >>> table = ArrayTable("emb", np.array([7, -2]), np.float32([[1, 2], [3, 4]]))
        >>> table.get(-2).tolist(), table.get(5)
        ([3.0, 4.0], None)
        >>> values, found = table.get([5, 7])
        >>> values.tolist(), found.tolist()
        ([[0.0, 0.0], [1.0, 2.0]], [False, True])
    """
    wanted, single = _keys(table, keys)
    rows = rows_of_keys(table, wanted)
    found = rows >= 0
    if single:
        return _values(table, rows)[0] if found[0] else default
    values = np.zeros((len(wanted), table.dim), table.value_dtype)
    if default is not None:
        row = _fitting(table, default)
        if row.shape not in ((), (table.dim,)):
            raise UsageError(
                f"looking up keys in table '{table.schema.name}': got a default of shape {list(row.shape)}, expected a"
                f" number, or [{table.dim}]"
            )
        values[:] = row
    values[found] = _values(table, rows[found])
    return FoundRows(values, found)


def rows_of(table: TableReader, keys: Any) -> Array:
    """Return the values of a key, [dim], or of several, [n, dim].

    Raises:
        UnknownKeyError: a key has no row.
        UsageError: what is asked for is no integer.
    """
    wanted, single = _keys(table, keys)
    rows = rows_of_keys(table, wanted)
    missing = wanted[rows < 0]
    if len(missing):
        few = ", ".join(str(key) for key in missing[:_KEYS_SHOWN].tolist()) + ", ..." * (len(missing) > _KEYS_SHOWN)
        raise UnknownKeyError(
            f"looking up keys in table '{table.schema.name}': {len(missing)} of {len(wanted)} have no row: {few}; get()"
            " gives something for them"
        )
    values = _values(table, rows)
    return values[0] if single else values


def has_key(table: TableReader, key: object) -> bool:
    """Tell whether a key has a row; what is no integer has none."""
    try:
        number = operator.index(key)  # type: ignore[arg-type]
    except TypeError:
        return False
    limits = np.iinfo(table.key_dtype)
    if not limits.min <= number <= limits.max:
        return False
    return bool(rows_of_keys(table, np.array([number], table.key_dtype))[0] >= 0)


def _values(table: TableReader, rows: Array) -> Array:
    """Return the values [n, dim] of the rows of these numbers, read in the order in which they lie."""
    order = np.argsort(rows, kind="stable")
    taken = table.take(rows[order], KEYS_AND_VALUES).values
    assert taken is not None
    values = np.empty_like(taken)
    values[order] = taken
    return values


def _fitting(table: TableReader, default: Any) -> Array:
    """Return what keys without a row get in the type of the values, which has to hold it."""
    doing = f"looking up keys in table '{table.schema.name}'"
    try:
        given = np.asarray(default)
        with np.errstate(all="ignore"):
            row = given.astype(table.value_dtype)
        whole = row.dtype.kind in "iub"
        fits = (row == given).all() if whole else (np.isfinite(row) == np.isfinite(given.astype(np.float64))).all()
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"{doing}: got default={default!r:.60}, expected a number, or [{table.dim}]") from error
    if not fits:
        raise UsageError(f"{doing}: got default={default!r:.60}, expected what {table.value_dtype} holds")
    return row


def _keys(table: TableReader, keys: Any) -> tuple[Array, bool]:
    """Return keys as an array [n] of integers, and whether it was one alone."""
    try:
        array = np.asarray(keys)
    except ValueError as error:  # lists of several lengths
        raise _no_keys(table, keys) from error
    if array.dtype.kind == "f" and not isinstance(keys, np.ndarray | np.generic):
        array = np.asarray(keys, object)  # or NumPy makes floats of integers of 64 bits and others
    single = array.ndim == 0
    if array.ndim < 2 and not array.size:
        return np.empty(0, np.int64), False
    if array.ndim > 1 or array.dtype.kind not in "iuO" or isinstance(keys, bool | np.bool_):
        raise _no_keys(table, keys, strings=array.dtype.kind in "UST")
    if array.dtype.kind == "O":  # integers beyond 64 bits, or of both signs and 64 bits
        return _wide_keys(table, array.reshape(-1)), single
    return array.reshape(-1), single


def _wide_keys(table: TableReader, array: Array) -> Array:
    limits = np.iinfo(table.key_dtype)
    numbers = []
    for key in array.tolist():
        try:
            numbers.append(operator.index(key))
        except TypeError as error:
            raise _no_keys(table, key, strings=isinstance(key, str | bytes)) from error
    for number in numbers:
        if not limits.min <= number <= limits.max:
            raise UsageError(
                f"looking up keys in table '{table.schema.name}': got {number}, expected what {table.key_dtype} holds"
            )
    return np.array(numbers, table.key_dtype)


def _no_keys(table: TableReader, keys: Any, *, strings: bool = False) -> UsageError:
    hint = "; the keys of strings are kvtools.string_keys(strings)" if strings else ""
    return UsageError(
        f"looking up keys in table '{table.schema.name}': got {type(keys).__name__} {str(keys)[:40]!r}, expected an"
        f" integer, or a list or array [n] of them{hint}"
    )
