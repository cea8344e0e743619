"""What is printed of rows that were written in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

from kvtools.cli.layout import columns, shown
from kvtools.quantized_rows import Rounding


def print_roundings(roundings: Sequence[tuple[str, str, Rounding]]) -> None:
    """Print what tables have lost: the name of each, the type of its rows, and the loss; nothing if there is none."""
    if not roundings:
        return
    header = ["table", "rows as", "largest error", "mean error", "mean cosine", "least cosine"]
    rows = [
        [
            shown(name),
            dtype,
            f"{rounding.max_error:.3g}",
            f"{rounding.mean_error:.3g}",
            f"{rounding.mean_cosine:.6f}",
            f"{rounding.least_cosine:.6f}",
        ]
        for name, dtype, rounding in roundings
    ]
    print(columns(header, rows, right=frozenset({2, 3, 4, 5})))
    print()
