"""What a filter says of single columns: it is asked before rows are read, and before a norm is computed.

DuckDB hands a filter over as an expression of pyarrow, which computes it, and says nothing of what is in it. Its text
does: comparisons of columns with numbers, `and`, `or`. What is read of it here decides only what need not be looked
at: each row that is left is put to the expression itself, unless nothing of it was left out.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array

_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_VALUE_SET = re.compile(r"\{value_set=\w+:\[([-\d,\s]*)\], null_matching_behavior=\w+\}")
_NULL = re.compile(r"\bnull\[\w+\]")


class Necessary:
    """What must hold of some columns of integers where a filter holds.

    Args:
        expression: the filter, of pyarrow, on columns called c0, c1, ...
        columns: those of them that are integers.

    `exact` is whether nothing else must hold.

    Example:
        >>> import pyarrow.compute as pc
        >>> filter = (pc.field("c0") < 3) & (pc.field("c1") > pc.field("c2"))
        >>> needed = Necessary(filter, ["c0"])
        >>> needed.names, needed.exact, needed.mask({"c0": np.array([2, 3])}).tolist()
        (frozenset({'c0'}), False, [True, False])
    """

    def __init__(self, expression: Any, columns: list[str]) -> None:
        self._columns = frozenset(columns)
        self._tree: ast.expr | None = None
        text = str(expression)
        self.mentioned = frozenset(re.findall(r"\bc\d+\b", text))
        """All columns that the filter is about."""
        try:
            text = _NULL.sub("None", _VALUE_SET.sub(r"[\1]", text))
            self._tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self._tree = None
        known = self._known(self._tree)
        self.names: frozenset[str] = frozenset() if known is None else known[0]
        self.exact = known is not None and known[1]

    def mask(self, columns: Mapping[str, Array]) -> Array | None:
        """Return which rows may be among those of the filter, bool [n]; None if that cannot be told by these columns.

        Args:
            columns: [n] each; of what is not there, anything may be true.
        """
        return self._evaluated(self._tree, columns)

    def _known(self, node: ast.expr | None) -> tuple[frozenset[str], bool] | None:
        """Return which columns a node is told by, and whether these say all; None if none does."""
        if isinstance(node, ast.BoolOp):
            parts = [self._known(each) for each in node.values]
            told = [part for part in parts if part is not None]
            if not told or (isinstance(node.op, ast.Or) and len(told) < len(parts)):
                return None
            names = frozenset[str]().union(*(names for names, _ in told))
            return names, len(told) == len(parts) and all(exact for _, exact in told)
        compared = self._comparison(node)
        return None if compared is None else (frozenset([compared[0]]), True)

    def _evaluated(self, node: ast.expr | None, columns: Mapping[str, Array]) -> Array | None:
        if isinstance(node, ast.BoolOp):
            masks = [self._evaluated(each, columns) for each in node.values]
            told = [mask for mask in masks if mask is not None]
            if not told or (isinstance(node.op, ast.Or) and len(told) < len(masks)):
                return None
            together = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            mask = told[0]
            for other in told[1:]:
                mask = together(mask, other)
            return mask
        compared = self._comparison(node)
        if compared is None or compared[0] not in columns:
            return None
        name, compare = compared
        result: Array = np.asarray(compare(columns[name]), np.bool_)
        return result

    def _comparison(self, node: ast.expr | None) -> tuple[str, Callable[[Array], Any]] | None:
        """Return the column that a comparison with integers is about, and how to compare; None if it is none."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.left, ast.Name):
            number, compare = _integer(node.comparators[0]), _COMPARED.get(type(node.ops[0]))
            if node.left.id in self._columns and number is not None and compare is not None:
                return node.left.id, lambda column: compare(column, number)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "if_else" and len(node.args) == 3 and isinstance(node.args[2], ast.Constant):
                # No column has nulls, so that the other two cases never come.
                return self._comparison(node.args[1]) if node.args[2].value is None else None
            if node.func.id == "is_in" and len(node.args) == 2 and isinstance(node.args[0], ast.Name):
                numbers = [_integer(each) for each in getattr(node.args[1], "elts", [None])]
                if node.args[0].id in self._columns and None not in numbers:
                    return node.args[0].id, lambda column: _is_among(column, numbers)
        return None


def _integer(node: ast.expr) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _integer(node.operand)
        return None if number is None else -number
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def _is_among(column: Array, numbers: list[Any]) -> Array:
    limits = np.iinfo(column.dtype)
    fitting = [number for number in numbers if limits.min <= number <= limits.max]
    mask: Array = np.isin(column, np.array(fitting, column.dtype))
    return mask
