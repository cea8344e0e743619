"""The plots of a report, each as SVG that stands inside an HTML page: no font, script or address of elsewhere.

Colours are CSS variables of the page, so that one picture serves light and dark screens and paper.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.dialects.schema import TableSchema
from kvtools.errors import MissingDependencyError
from kvtools.histogram import NORM_EDGES, FrequencyHistogram, NormHistogram, VersionHistogram
from kvtools.stats import TableStats

Array = npt.NDArray[Any]

_WIDTH, _HEIGHT = 5.6, 3.0
_BARS = 60
_DAY = 86400
_YEAR_9999 = 253_402_300_800
# Colours that stand for the page's variables while matplotlib draws.
_INK, _FAINT, _FIRST, _SECOND = "#010203", "#040506", "#070809", "#0a0b0c"
_LINES = (_FIRST, _SECOND, "#0d0e0f", "#101112", "#131415", "#161718", "#191a1b", "#1c1d1e")
_VARIABLES = {_INK: "--ink", _FAINT: "--faint"} | {colour: f"--line-{i}" for i, colour in enumerate(_LINES)}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvtools",
    "text.parse_math": False,  # names may hold dollar signs
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.5,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}
_numbers = itertools.count()


def norm_plot(norms: NormHistogram) -> str | None:
    """Plot how many rows have which norm, from 1e-20 to 1e20; zero has no place on a logarithmic scale."""
    bars = [(low, high, rows) for low, high, rows in norms.bars() if low > 0 and math.isfinite(high)]
    if not bars:
        return None

    def draw(figure: Any) -> None:
        axes = _axes(figure)
        edges = [bar[0] for bar in bars] + [bars[-1][1]]
        axes.stairs([bar[2] for bar in bars], edges, fill=True, color=_FIRST)
        axes.set_xscale("log")
        axes.set(xlabel="Euclidean norm of the row", ylabel="rows")
        _short(axes.yaxis)
        _powers(axes.xaxis)

    return _svg(draw, "Histogram of the Euclidean norms of the rows")


def clip_plot(schema: TableSchema, stats: TableStats, row_bytes: int) -> str | None:
    """Plot which share of the rows each threshold would cut, by the largest number and by the norm."""
    if not stats.values.l2.rows:
        return None
    curves = [
        (name, np.cumsum(norms.counts)[:-1], color)
        for name, norms, color in (
            ("all |x| below", stats.values.abs, _FIRST),
            ("norm below", stats.values.l2, _SECOND),
        )
    ]
    lowest = min(int(np.argmax(below > below[0])) for _, below, _ in curves)
    highest = max(int(np.argmax(below == below[-1])) for _, below, _ in curves)
    shown = slice(max(0, lowest - 3), max(highest, lowest) + 3)

    def draw(figure: Any) -> None:
        axes = _axes(figure, right=0.85)
        for name, below, color in curves:
            axes.plot(NORM_EDGES[shown], 100 * below[shown] / stats.rows, color=color, label=name, linewidth=1.8)
        axes.set_xscale("log")
        axes.set(xlabel="threshold", ylabel="rows cut, %", ylim=(0, 100))
        _powers(axes.xaxis)
        _bytes_beside(axes, stats.rows * row_bytes)
        axes.legend(loc="upper left")

    return _svg(draw, "Share of the rows that each clip threshold cuts")


def frequency_clip_plot(freqs: FrequencyHistogram, row_bytes: int) -> str | None:
    """Plot which share of the rows each frequency threshold would cut."""
    if not freqs.rows:
        return None
    octaves = max(1, int(freqs.largest).bit_length())
    thresholds = [1 << octave for octave in range(octaves + 1)]

    def draw(figure: Any) -> None:
        axes = _axes(figure, right=0.85)
        shares = [100 * freqs.below(threshold) / freqs.rows for threshold in thresholds]
        axes.plot(thresholds, shares, color=_FIRST, linewidth=1.8, marker="o", markersize=3)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="least frequency that is kept", ylabel="rows cut, %", ylim=(0, 100))
        _short(axes.xaxis)
        _bytes_beside(axes, freqs.rows * row_bytes)

    return _svg(draw, "Share of the rows that each frequency threshold cuts")


def zipf_plot(freqs: FrequencyHistogram) -> str | None:
    """Plot frequency by rank, both on logarithmic scales, with the fitted power law."""
    seen = freqs.rows - int(freqs.counts[0])
    if not seen:
        return None
    rows, means = freqs.ranked()
    above = means > 0
    ends = np.cumsum(rows[above])
    starts = np.concatenate([[1], ends[:-1] + 1])
    ranks = np.stack([starts, ends], axis=1).ravel()
    heights = np.repeat(means[above], 2)
    exponent = freqs.zipf_exponent()

    def draw(figure: Any) -> None:
        axes = _axes(figure)
        axes.plot(ranks, heights, color=_FIRST, linewidth=1.8, label="keys")
        if exponent is not None and seen > 1:
            fitted = np.unique(np.geomspace(1, seen, 100).astype(np.int64))
            level = np.mean(np.log(freqs.frequency_of_rank(fitted)) + exponent * np.log(fitted))
            label = f"rank to the power of -{exponent:.2f}"
            line = np.exp(level - exponent * np.log(fitted))
            axes.plot(fitted, line, color=_SECOND, linewidth=1.2, linestyle="--", label=label)
            axes.legend(loc="upper right")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(0.5, 0.7 * float(heights.min())))
        axes.set(xlabel="rank of the key", ylabel="frequency")
        _short(axes.xaxis)
        _short(axes.yaxis)

    return _svg(draw, "Frequency of the keys by their rank")


def version_plot(versions: VersionHistogram) -> str | None:
    """Plot how many rows have which version, and how many have it or an older one."""
    bars = versions.bars(versions.readable_width(_BARS))
    if not bars:
        return None
    days = versions.unit in ("seconds", "days") and bars[0][0] >= 0
    scale = _DAY if versions.unit == "seconds" else 1
    days = days and bars[-1][1] * (_DAY // scale) < _YEAR_9999
    labels = {"seconds": "time of the last update, UTC", "days": "day of the last update", "steps": "step"}

    def draw(figure: Any) -> None:
        axes = _axes(figure, right=0.87)
        edges = np.array([bar[0] for bar in bars] + [bars[-1][1]], np.float64) / (scale if days else 1)
        rows = np.array([bar[2] for bar in bars])
        axes.stairs(rows, edges, fill=True, color=_FIRST)
        axes.set(xlabel=labels.get(versions.unit, "version"), ylabel="rows")
        _short(axes.yaxis)
        total = axes.twinx()
        total.plot(edges, np.concatenate([[0], np.cumsum(rows)]), color=_SECOND, linewidth=1.8)
        total.set(ylabel="rows in all", ylim=(0, None))
        total.grid(False)
        total.spines["right"].set_visible(True)
        _short(total.yaxis)
        if days:
            from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

            locator = AutoDateLocator(maxticks=7)
            axes.xaxis.set_major_locator(locator)
            axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        else:
            _short(axes.xaxis)

    return _svg(draw, "Rows by their version, and in all up to it")


def parts_plot(part_rows: Sequence[int]) -> str | None:
    """Plot the rows of each part beside their mean."""
    if len(part_rows) < 2:
        return None

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = _axes(figure)
        count = len(part_rows)
        if count <= _BARS:
            axes.bar(range(count), part_rows, color=_FIRST, width=0.8)
        else:
            axes.stairs(part_rows, np.arange(count + 1) - 0.5, fill=True, color=_FIRST)
        mean = sum(part_rows) / count
        axes.axhline(mean, color=_SECOND, linewidth=1.2, linestyle="--", label="mean")
        axes.set(xlabel="part", ylabel="rows", ylim=(0, 1.25 * max(*part_rows, 1)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(False, axis="x")
        axes.legend(loc="upper right")
        _short(axes.yaxis)

    return _svg(draw, "Rows of each part")


def growth_plot(labels: Sequence[str], amounts: Mapping[str, Sequence[int]], ylabel: str, *, binary: bool) -> str:
    """Plot numbers of each checkpoint, one line a name; `binary` for bytes. Beyond seven names the rest is added up."""
    if len(amounts) > len(_LINES):
        names = sorted(amounts, key=lambda name: -max(amounts[name]))
        kept, rest = names[: len(_LINES) - 1], names[len(_LINES) - 1 :]
        others = [sum(column) for column in zip(*(amounts[name] for name in rest), strict=True)]
        amounts = {name: amounts[name] for name in kept} | {f"{len(rest)} others": others}

    def draw(figure: Any) -> None:
        axes = _axes(figure, bottom=0.3)
        for (name, line), color in zip(amounts.items(), _LINES, strict=False):
            axes.plot(range(len(labels)), line, color=color, marker="o", markersize=4, linewidth=1.8, label=name)
        step = -(-len(labels) // 12)
        axes.set_xticks(range(0, len(labels), step), labels[::step], rotation=30, ha="right")
        axes.set(ylabel=ylabel, ylim=(0, None))
        _short(axes.yaxis, binary=binary)
        # A name that starts with an underscore is drawn all the same.
        axes.legend(axes.get_lines(), [_cut(name) for name in amounts], loc="best", fontsize=8)

    return _svg(draw, f"{ylabel} of each checkpoint")


def short_number(value: float, *, binary: bool = False, digits: int = 3) -> str:
    """Write a number in a few characters.

    >>> short_number(1500), short_number(2e6), short_number(0.25), short_number(3 << 30, binary=True)
    ('1.5k', '2M', '0.25', '3 GiB')
    """
    base, units = (1024.0, (" B", " KiB", " MiB", " GiB", " TiB")) if binary else (1000.0, ("", "k", "M", "G", "T"))
    number, unit = float(value), 0
    while abs(number) >= base and unit < len(units) - 1:
        number /= base
        unit += 1
    return f"{number:.{digits if abs(number) < 10**digits else 4}g}{units[unit]}"


def _axes(figure: Any, *, right: float = 0.97, bottom: float = 0.17) -> Any:
    """Return axes with fixed margins; to measure every label takes longer than to draw all."""
    return figure.subplots(gridspec_kw={"left": 0.13, "right": right, "top": 0.97, "bottom": bottom})


def _cut(text: str, length: int = 28) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= length else f"...{text[3 - length :]}"


def _short(axis: Any, *, binary: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, MultipleLocator, NullLocator

    axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value, binary=binary)))
    if binary:  # round numbers of bytes are not round numbers
        axis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(max(axis.get_view_interval()[1], 4) / 6))))
    axis.set_minor_locator(NullLocator())


def _powers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")))
    axis.set_minor_locator(NullLocator())


def _bytes_beside(axes: Any, total: int) -> None:
    from matplotlib.ticker import FuncFormatter

    beside = axes.secondary_yaxis("right", functions=(lambda share: share, lambda share: share))
    beside.yaxis.set_major_formatter(
        FuncFormatter(lambda share, _: short_number(share * total / 100, binary=True, digits=2))
    )
    beside.set_ylabel("saved")
    beside.spines["right"].set_color(_FAINT)


def _svg(draw: Callable[[Any], None], title: str) -> str:
    """Return a figure as an SVG element for an HTML page."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "drawing a report: matplotlib is not installed; run `pip install 'kvtools[report]'`"
        ) from None
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # the browser's fonts are what counts
        figure = Figure(figsize=(_WIDTH, _HEIGHT))
        draw(figure)
        output = io.StringIO()
        # Not savefig, which draws all of it twice.
        FigureCanvasSVG(figure).print_svg(output, metadata={"Date": None})
    return _embedded(output.getvalue(), title)


def _embedded(svg: str, title: str) -> str:
    """Make an SVG file an element of a page: no prolog, no addresses, ids of its own, the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    number = next(_numbers)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>p{number}-", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return f'<svg {box[0]} role="img" aria-label="{title}">{body.strip()}'
