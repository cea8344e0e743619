"""The plots of a report, each as SVG that stands inside an HTML page: no font, script or address of elsewhere.

Colours are CSS variables of the page, so that one picture serves light and dark screens and paper.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.decimal_histogram import DecimalHistogram
from kvtools.errors import MissingDependencyError
from kvtools.histogram import FrequencyHistogram, VersionHistogram
from kvtools.short_numbers import short_number
from kvtools.stats import TableStats

Array = npt.NDArray[Any]

_WIDTH, _HEIGHT = 5.6, 3.0
_BARS = 60
_NORM_BARS = 48
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
_TICKS = 7
_MARGIN = 0.06
"""Inches between the outermost text and the end of a picture."""


@dataclass(frozen=True)
class Plot:
    """A picture that can be drawn: what it shows, for who cannot see it, and what draws it."""

    title: str
    draw: Callable[[Any], None]

    def figure(self) -> Any:
        """Return the `matplotlib.figure.Figure`, with margins that hold all of its text.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        with _style():
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure

            figure = Figure(figsize=(_WIDTH, _HEIGHT))
            self.draw(figure)
            _fit_margins(figure, FigureCanvasAgg(figure).get_renderer())
        return figure

    def svg(self) -> str:
        """Return the picture as an SVG element for an HTML page."""
        figure = self.figure()
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        with _style():
            output = io.StringIO()
            # Not savefig, which draws all of it twice.
            FigureCanvasSVG(figure).print_svg(output, metadata={"Date": None})
        return _embedded(output.getvalue(), self.title)


def norm_plot(norms: DecimalHistogram, before: DecimalHistogram | None = None) -> Plot | None:
    """Plot how many rows have which norm, beside those of `before` if it is given; zero has no place on the scale.

    None where all rows have the same norm, or none has one.
    """
    known = [one for one in (norms, before) if one is not None and len(one.counts)]
    ends = [[one.quantile(max(share, one.under / one.rows + 1e-9)) for share in (0.0005, 0.9995)] for one in known]
    low, high = (choose(end[i] or 0.0 for end in ends) if ends else 0.0 for i, choose in enumerate((min, max)))
    if not 0 < low < high * (1 - 1e-9):
        return None
    linear = high < 4 * low
    room = 0.04 * (high - low) if linear else (high / low) ** 0.04
    low, high = (low - room, high + room) if linear else (low / room, high * room)
    cuts = np.linspace(low, high, _NORM_BARS + 1) if linear else np.geomspace(low, high, _NORM_BARS + 1)

    def draw(figure: Any) -> None:
        axes = _axes(figure)
        for one, color, name in ((norms, _FIRST, "now"), (before, _SECOND, "before")):
            bars = [] if one is None else one.bars(cuts.tolist())
            if one is not None and bars:
                edges = np.array([bar[0] for bar in bars] + [bars[-1][1]])
                # Edges are round numbers, so bars are not all of one width: heights are as if they were.
                widths = np.diff(edges if linear else np.log(edges))
                rows = np.array([bar[2] for bar in bars], np.float64) * np.median(widths) / widths
                # Two histograms are compared by shares.
                heights = rows if before is None else 100 * rows / one.rows
                filled = one is norms
                axes.stairs(heights, edges, fill=filled, color=color, linewidth=1.6, label=name)
        axes.set(xlabel="Euclidean norm of the row", ylabel="rows" if before is None else "rows, %")
        axes.set_ylim(bottom=0)
        _amounts(axes.yaxis)
        if linear:
            axes.set_xlim(low, high)
            _plain(axes.xaxis)
        else:
            _logarithmic(axes.xaxis, low, high)
        if before is not None:
            _legend(axes)

    return Plot("Histogram of the Euclidean norms of the rows", draw)


def clip_plot(stats: TableStats, row_bytes: int) -> Plot | None:
    """Plot which share of the rows each threshold would cut, by the largest number and by the norm."""
    curves: list[tuple[str, Array, Array, str]] = []
    for name, norm, color in (("all |x| below", "abs", _FIRST), ("norm below", "l2", _SECOND)):
        norms = stats.fine.get(norm)  # type: ignore[call-overload]
        if norms is not None and len(norms.counts):
            below = norms.under + np.concatenate([[0], np.cumsum(norms.counts)])
            filled = np.flatnonzero(norms.counts)
            shown = slice(max(0, int(filled[0]) - 1), int(filled[-1]) + 3)
            curves.append((name, norms.edges[shown], below[shown], color))
    if not curves:
        return None
    low, high = min(float(edges[0]) for _, edges, _, _ in curves), max(float(edges[-1]) for _, edges, _, _ in curves)
    linear = high < 4 * low

    def draw(figure: Any) -> None:
        axes = _axes(figure)
        for name, edges, below, color in curves:
            step = max(1, len(edges) // 400)
            at = np.unique([*range(0, len(edges), step), len(edges) - 1])
            axes.plot(edges[at], 100 * below[at] / stats.rows, color=color, label=name, linewidth=1.8)
        axes.set(xlabel="threshold", ylabel="rows cut, %", ylim=(0, 102))
        if linear:
            axes.set_xlim(low, high)
            _plain(axes.xaxis)
        else:
            _logarithmic(axes.xaxis, low, high)
        _bytes_beside(axes, stats.rows * row_bytes)
        _legend(axes, "upper left")

    return Plot("Share of the rows that each clip threshold cuts", draw)


def frequency_clip_plot(freqs: FrequencyHistogram, row_bytes: int) -> Plot | None:
    """Plot which shares of the rows, and of the lookups, each frequency threshold would cut."""
    if not freqs.rows:
        return None
    ends = np.concatenate([[0], np.cumsum(freqs.counts)])
    sums = np.concatenate([[0.0], np.cumsum(freqs.sums)])
    filled = np.flatnonzero(freqs.counts)
    first, last = int(filled[0]), int(filled[-1])
    at = np.unique(np.concatenate([[first], filled + 1]))
    at = at[np.unique(np.geomspace(1, len(at), 300).astype(np.int64)) - 1]  # on a logarithmic scale that is enough
    thresholds = np.maximum([freqs.edge(int(number)) for number in at], 1)
    low, high = 0.8 * float(thresholds[0]), 1.25 * float(thresholds[-1])

    def draw(figure: Any) -> None:
        axes = _axes(figure)
        marker = "o" if len(at) < 40 else None
        axes.plot(thresholds, 100 * ends[at] / freqs.rows, color=_FIRST, linewidth=1.8, marker=marker, markersize=3)
        axes.lines[-1].set_label("rows")
        if sums[-1]:
            axes.plot(thresholds, 100 * sums[at] / sums[-1], color=_SECOND, linewidth=1.8, label="lookups")
        axes.set(xlabel="least frequency that is kept", ylabel="cut, %", ylim=(0, 102))
        _logarithmic(axes.xaxis, low, high)
        _bytes_beside(axes, freqs.rows * row_bytes)
        _legend(axes, "center right" if last > 16 * max(first, 1) else "best")

    return Plot("Shares of the rows and of the lookups that each frequency threshold cuts", draw)


def zipf_plot(freqs: FrequencyHistogram, before: FrequencyHistogram | None = None) -> Plot | None:
    """Plot frequency by rank, both on logarithmic scales, with the power law where there is one, or what was before."""
    curves = [
        (name, *_ranked(one), color)
        for name, one, color in (("keys" if before is None else "now", freqs, _FIRST), ("before", before, _SECOND))
        if one is not None and one.rows > one.counts[0]
    ]
    if not curves:
        return None
    fit = None if before is not None else freqs.zipf_fit()
    seen = max(int(ranks[-1]) for _, ranks, _, _ in curves)
    low = min(float(heights.min()) for _, _, heights, _ in curves)
    high = max(float(heights.max()) for _, _, heights, _ in curves)

    def draw(figure: Any) -> None:
        axes = _axes(figure)
        for name, ranks, heights, color in curves:
            axes.plot(ranks, heights, color=color, linewidth=1.8, label=name)
        if fit is not None:
            label = f"rank to the power of -{fit.exponent:.2f}"
            ends = np.array([fit.first, fit.last])
            axes.plot(ends, fit.frequencies(ends), color=_SECOND, linewidth=1.4, linestyle="--", label=label)
        _logarithmic(axes.xaxis, 0.9, 1.15 * max(seen, 2))
        _logarithmic(axes.yaxis, 0.8 * low, max(1.3 * high, 3 * low))
        axes.set(xlabel="rank of the key", ylabel="frequency")
        if len(axes.lines) > 1:
            _legend(axes)

    return Plot("Frequency of the keys by their rank", draw)


def _ranked(freqs: FrequencyHistogram) -> tuple[Array, Array]:
    """Return the corners of the curve of frequency by rank, without keys that were never seen."""
    rows, means = freqs.ranked()
    rows, means = rows[means > 0], means[means > 0]
    ends = np.cumsum(rows)
    ranks = np.stack([np.concatenate([[1], ends[:-1] + 1]), ends], axis=1).ravel()
    return ranks, np.repeat(means, 2)


def version_plot(versions: VersionHistogram) -> Plot | None:
    """Plot how many rows have which version, and how many have it or an older one."""
    bars = versions.bars(versions.readable_width(_BARS))
    if not bars:
        return None
    days = versions.unit in ("seconds", "days") and bars[0][0] >= 0
    scale = _DAY if versions.unit == "seconds" else 1
    days = days and bars[-1][1] * (_DAY // scale) < _YEAR_9999
    labels = {"seconds": "time of the last update, UTC", "days": "day of the last update", "steps": "step"}

    def draw(figure: Any) -> None:
        axes = _axes(figure)
        edges = np.array([bar[0] for bar in bars] + [bars[-1][1]], np.float64) / (scale if days else 1)
        rows = np.array([bar[2] for bar in bars])
        axes.stairs(rows, edges, fill=True, color=_FIRST)
        axes.set(xlabel=labels.get(versions.unit, "version"), ylabel="rows")
        _amounts(axes.yaxis)
        total = axes.twinx()
        total.plot(edges, np.concatenate([[0], np.cumsum(rows)]), color=_SECOND, linewidth=1.8)
        total.set(ylabel="rows in all", ylim=(0, None))
        total.grid(False)
        total.spines["right"].set_visible(True)
        _amounts(total.yaxis)
        if days:
            from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

            locator = AutoDateLocator(minticks=3, maxticks=6)
            axes.xaxis.set_major_locator(locator)
            axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        else:
            _amounts(axes.xaxis)

    return Plot("Rows by their version, and in all up to it", draw)


def parts_plot(part_rows: Sequence[int]) -> Plot | None:
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
        _legend(axes)
        _amounts(axes.yaxis)

    return Plot("Rows of each part", draw)


def growth_plot(labels: Sequence[str], amounts: Mapping[str, Sequence[int]], ylabel: str, *, binary: bool) -> Plot:
    """Plot numbers of each checkpoint, one line a name; `binary` for bytes. Beyond seven names the rest is added up."""
    if len(amounts) > len(_LINES):
        names = sorted(amounts, key=lambda name: -max(amounts[name]))
        kept, rest = names[: len(_LINES) - 1], names[len(_LINES) - 1 :]
        others = [sum(column) for column in zip(*(amounts[name] for name in rest), strict=True)]
        amounts = {name: amounts[name] for name in kept} | {f"{len(rest)} others": others}

    def draw(figure: Any) -> None:
        axes = _axes(figure)
        for (name, line), color in zip(amounts.items(), _LINES, strict=False):
            axes.plot(range(len(labels)), line, color=color, marker="o", markersize=4, linewidth=1.8, label=name)
        step = -(-len(labels) // 12)
        axes.set_xticks(range(0, len(labels), step), [_cut(label) for label in labels[::step]], rotation=30, ha="right")
        axes.set(ylabel=ylabel, ylim=(0, None))
        _amounts(axes.yaxis, binary=binary)
        # A name that starts with an underscore is drawn all the same.
        axes.legend(axes.get_lines(), [_cut(name) for name in amounts], loc="best", fontsize=8)

    return Plot(f"{ylabel} of each checkpoint", draw)


def tick_places(low: float, high: float, most: int = _TICKS) -> list[float]:
    """Return where a logarithmic axis is marked: powers of ten if there are three, else round numbers between them.

    >>> tick_places(0.5, 2e6)
    [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0, 1000000.0]
    >>> tick_places(1.1, 60.0), tick_places(0.97, 1.04)
    ([3.0, 10.0, 30.0], [0.975, 0.99, 1.005, 1.02, 1.035])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for multiples in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        places = [float(f"{m}e{decade}") for decade in range(first, last + 1) for m in multiples]
        places = [place for place in places if low <= place <= high]
        if len(multiples) == 1:
            places = places[:: -(-len(places) // most)] if places else []
        if 3 <= len(places) <= most + 2:
            return places
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(most, min_n_ticks=3).tick_values(low, high)
    places = [float(f"{place:.12g}") for place in ticks]
    return [place for place in places if low <= place <= high]


def _axes(figure: Any) -> Any:
    return figure.subplots()


def _fit_margins(figure: Any, renderer: Any) -> None:
    """Make the margins as wide as the text outside the axes needs; measuring takes as long as drawing."""
    width, height = (inches * figure.dpi for inches in figure.get_size_inches())
    margin = _MARGIN * figure.dpi
    beside = len(figure.axes) > 1 or any(axes.child_axes for axes in figure.axes)
    figure.subplots_adjust(left=0.13, right=0.85 if beside else 0.96, bottom=0.165, top=0.95)
    for _ in range(3):  # with other margins there may be other labels
        inner = figure.axes[0].get_window_extent(renderer)
        boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
        outer = min(box.x0 for box in boxes), min(box.y0 for box in boxes)
        ends = width - max(box.x1 for box in boxes), height - max(box.y1 for box in boxes)
        if all(0.4 * margin <= gap <= 0.3 * figure.dpi for gap in (*outer, *ends)):
            return
        left = inner.x0 - min(box.x0 for box in boxes) + margin
        right = max(box.x1 for box in boxes) - inner.x1 + margin
        bottom = inner.y0 - min(box.y0 for box in boxes) + margin
        top = max(box.y1 for box in boxes) - inner.y1 + margin
        figure.subplots_adjust(
            left=min(left / width, 0.45),
            right=max(1 - right / width, 0.55),
            bottom=min(bottom / height, 0.6),
            top=max(1 - top / height, 0.7),
        )


def _cut(text: str, length: int = 28) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= length else f"...{text[3 - length :]}"


def _amounts(axis: Any, *, binary: bool = False) -> None:
    """Mark a linear axis of counts or bytes with short numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value, binary=binary)))
    if binary:  # round numbers of bytes are not round numbers
        axis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(max(high, 4) / 6))))
    elif high - low > 3:
        axis.set_major_locator(MaxNLocator(_TICKS - 1, integer=True, min_n_ticks=3))
        unit = 1000.0 ** max(0, math.floor(math.log(max(abs(high), 1), 1000)))
        if (high - low) / unit < 0.01 * high / unit:  # short numbers of such an axis would all be the same
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_minor_locator(NullLocator())


def _plain(axis: Any) -> None:
    """Mark a linear axis of any numbers."""
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    axis.set_major_locator(MaxNLocator(_TICKS - 1, min_n_ticks=3))
    axis.set_major_formatter(ScalarFormatter(useOffset=True, useMathText=False))
    axis.set_minor_locator(NullLocator())


def _logarithmic(axis: Any, low: float, high: float) -> None:
    """Make an axis logarithmic between two numbers, and mark at least three places."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    along = "x" if axis.axis_name == "x" else "y"
    getattr(axis.axes, f"set_{along}scale")("log")
    getattr(axis.axes, f"set_{along}lim")(low, high)
    places = tick_places(low, high)
    decades = all(f"{place:e}".startswith("1.000000e") for place in places)
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _mark(value, decades)))
    axis.set_minor_locator(NullLocator())


def _mark(value: float, decade: bool) -> str:
    """Write a number beside a logarithmic axis, a mere power of ten where all are.

    >>> _mark(1e-3, True), _mark(20000.0, False), _mark(1.02, False)
    ('1e-3', '20k', '1.02')
    """
    if 1 <= value < 1e15:
        return short_number(value, digits=6 if value < 1000 else 4)
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if decade else f"{value:.3g}".replace("e-0", "e-")


def _legend(axes: Any, place: str = "best") -> None:
    axes.legend(loc=place, fontsize=8)


def _bytes_beside(axes: Any, total: int) -> None:
    from matplotlib.ticker import FuncFormatter

    beside = axes.secondary_yaxis("right", functions=(lambda share: share, lambda share: share))
    beside.yaxis.set_major_formatter(
        FuncFormatter(lambda share, _: short_number(share * total / 100, binary=True, digits=2))
    )
    beside.set_ylabel("saved")
    beside.spines["right"].set_color(_FAINT)


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Draw as the page wants it."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingDependencyError(
            "drawing a report: matplotlib is not installed; run `pip install 'kvtools[report]'`"
        ) from None

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # the browser's fonts are what counts
        yield


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
