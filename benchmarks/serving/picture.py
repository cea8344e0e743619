"""A picture of a result: keys a second by keys a request."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

COLORS = {
    "HTTP, binary": "#1b6ca8",
    "RESP, MGET": "#5fa8d3",
    "HTTP, JSON": "#8e6c8a",
    "Redis MGET": "#c8553d",
    "Redis, GETs in a pipeline": "#7f8c8d",
}


def draw(result: dict[str, Any], path: Path) -> Path | None:
    """Draw what load.cc saw with the most connections; None: there is nothing to draw, or no Matplotlib."""
    figures = [
        [one for one in table["figures"] if one["part"] == "load" and one["side"] in COLORS]
        for table in result["tables"]
    ]
    if not all(figures):
        return None
    try:
        import matplotlib
    except ImportError:
        print("no picture: Matplotlib is not installed (pip install '.[test]')", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(
        1, len(figures), figsize=(5 * len(figures), 3.6), squeeze=False, layout="constrained"
    )
    for axis, table, ones in zip(axes[0], result["tables"], figures, strict=True):
        most = max(one["connections"] for one in ones)
        for side, color in COLORS.items():
            line = sorted(
                (one["keys"], one["keys_per_second"])
                for one in ones
                if one["side"] == side and one["connections"] == most
            )
            if line:
                axis.plot(*zip(*line, strict=True), marker="o", color=color, label=side)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("keys a request")
        axis.set_ylabel("keys a second")
        axis.set_title(f"{table['rows']:,} rows x {table['dim']}, {most} connections", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#dddddd", linewidth=0.8)
    axes[0][0].legend(frameon=False, fontsize=8)
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
    return path
