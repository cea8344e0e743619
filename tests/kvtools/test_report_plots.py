"""The plots of a report, by what is drawn: no text is cut off, every axis can be read, lines lie where data does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from kvtools.array_table import ArrayTable
from kvtools.decimal_histogram import DecimalHistogram
from kvtools.histogram import FrequencyHistogram, VersionHistogram
from kvtools.report_plots import (
    Plot,
    clip_plot,
    frequency_clip_plot,
    growth_plot,
    norm_plot,
    parts_plot,
    tick_places,
    version_plot,
    zipf_plot,
)
from kvtools.stats import table_stats

RNG = np.random.default_rng(8)


def norms(values: Any) -> DecimalHistogram:
    histogram = DecimalHistogram()
    histogram.add(np.asarray(values, np.float64))
    return histogram


def freqs(values: Any) -> FrequencyHistogram:
    histogram = FrequencyHistogram()
    histogram.add(np.asarray(values, np.int64))
    return histogram


def versions(values: Any, unit: Any) -> VersionHistogram:
    histogram = VersionHistogram(unit)
    histogram.add(np.asarray(values, np.int64))
    return histogram


NORMS = {
    "concentrated": RNG.normal(1, 0.02, 5000),
    "one decade": RNG.uniform(0.2, 0.9, 5000),
    "two values": np.repeat([0.5, 0.7], 500),
    "usual": RNG.lognormal(-4, 1, 5000),
    "everywhere": 10.0 ** RNG.uniform(-19, 19, 5000),
    "nearly one": 1 + 1e-5 * RNG.standard_normal(5000),
    "with zeros": np.concatenate([np.zeros(4000), RNG.normal(3, 0.3, 1000)]),
}
FREQS = {
    "zipf": (1e9 * np.arange(1, 100_001, dtype=np.float64) ** -1.1).astype(np.int64),
    "flat head": (3e5 / (np.arange(30_000) + 500.0) ** 1.0).astype(np.int64) + 1,
    "lognormal": RNG.lognormal(3, 1.5, 20_000).astype(np.int64),
    "few": [1, 1, 2, 3],
    "narrow": RNG.integers(900, 1100, 4000),
    "two steps": np.repeat([5, 50_000], 1000),
    "all the same": np.full(100, 7),
    "huge": (RNG.pareto(0.5, 5000) * 1e6).clip(max=2**50).astype(np.int64) + 1,
}


def plots() -> Iterator[tuple[str, Plot | None]]:
    for name, values in NORMS.items():
        yield f"norms {name}", norm_plot(norms(values))
        rows = np.stack([values, np.zeros(len(values))], axis=1).astype(np.float32)
        stats = table_stats([ArrayTable("t", np.arange(len(values)), rows)], fine=True)["t"]
        yield f"clip {name}", clip_plot(stats, 12_345_678)
    for name, values in FREQS.items():
        yield f"zipf {name}", zipf_plot(freqs(values))
        yield f"filter {name}", frequency_clip_plot(freqs(values), 3 << 20)
    yield "drift", norm_plot(norms(NORMS["concentrated"]), norms(NORMS["usual"]))
    yield "now and before", zipf_plot(freqs(FREQS["zipf"]), freqs(FREQS["lognormal"]))
    for unit, newest, spread in (("seconds", 1_760_000_000, 3e6), ("days", 20_000, 3), ("steps", 2_000_000_000, 5e5)):
        yield f"versions {unit}", version_plot(versions(newest - RNG.exponential(spread, 4000).astype(int), unit))
    yield "one version", version_plot(versions([1_234_567_890], "unknown"))
    yield "parts", parts_plot([10_000_000, 12_000_000, 999])
    yield "even parts", parts_plot([1_000_000] * 200)
    long = [f"checkpoints/run_{number}/a_rather_long_name_of_a_model.ckpt-{number}00000" for number in range(14)]
    yield (
        "growth",
        growth_plot(long, {"a_long_name/of_a_table": range(1, 14 * 7 * 10**7, 7 * 10**7)}, "bytes", binary=True),
    )
    yield "rows", growth_plot(["a", "b"], {"t": [360_000, 360_001]}, "rows", binary=False)


PLOTS = dict(plots())


@pytest.mark.parametrize("name", [name for name, plot in PLOTS.items() if plot is not None])
def test_no_text_is_cut_off_and_every_axis_has_marks(name: str) -> None:
    plot = PLOTS[name]
    assert plot is not None
    figure = plot.figure()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip():
            box = text.get_window_extent(renderer)
            inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
            assert inside or outside_its_axis(text, figure), f"{text.get_text()!r} is cut off: {box}"
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            marks = shown_marks(axis)
            if name in ("parts", "one version") and axis is axes.xaxis:
                continue
            least = 2 if axes.get_xlabel() == "" and axis is axes.xaxis else 3
            assert len(marks) >= least, f"{axis.axis_name}: {marks}"
            assert len(set(marks)) == len(marks), f"{axis.axis_name}: {marks}"
            assert len(marks) <= 14


def shown_marks(axis: Any) -> list[str]:
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    places = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [label.get_text() for place, label in places if low - slack <= place <= high + slack]


def outside_its_axis(text: Text, figure: Any) -> bool:
    """Whether it is the label of a mark that is not drawn, as it lies beyond the axis."""
    for axes in (*figure.axes, *(child for one in figure.axes for child in one.child_axes)):
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False):
                if label is text and not low <= place <= high:
                    return True
    return False


@pytest.mark.parametrize("name", ["concentrated", "one decade", "usual", "nearly one", "with zeros"])
def test_norms_have_bars_enough_to_see_their_form(name: str) -> None:
    plot = norm_plot(norms(NORMS[name]))
    assert plot is not None
    axes = plot.figure().axes[0]
    (stairs,) = (patch for patch in axes.patches if hasattr(patch, "get_data"))
    heights, edges, _ = stairs.get_data()
    assert np.count_nonzero(heights) >= 20
    positive = NORMS[name][NORMS[name] > 0]
    assert heights.sum() == pytest.approx(len(positive), rel=0.03)
    # Bars of about one width, so that their heights can be compared.
    widths = np.diff(edges if axes.get_xscale() == "linear" else np.log(edges))[1:-1]
    assert widths.max() <= 1.6 * np.median(widths) and widths.min() >= 0.5 * np.median(widths)


@pytest.mark.parametrize("name", FREQS)
def test_a_power_law_is_drawn_only_where_it_lies_on_the_curve(name: str) -> None:
    histogram = freqs(FREQS[name])
    plot = zipf_plot(histogram)
    assert plot is not None
    lines = plot.figure().axes[0].lines
    if len(lines) == 1:
        assert histogram.zipf_fit() is None and name in ("few", "two steps", "flat head", "lognormal")
        return
    ranks, heights = lines[1].get_data()
    between = np.unique(np.geomspace(ranks[0], ranks[-1], 50).astype(np.int64))
    drawn = np.exp(np.interp(np.log(between), np.log(ranks), np.log(heights)))
    assert np.abs(np.log(drawn / histogram.frequency_of_rank(between))).max() <= math.log(1.6)
    assert np.log(ranks[-1] / ranks[0]) >= 0.35 * np.log(np.count_nonzero(FREQS[name]))


@pytest.mark.parametrize("low", [1e-20, 3e-7, 0.97, 1.0, 4.2, 1234.0, 7e18])
@pytest.mark.parametrize("ratio", [1.0001, 1.05, 1.7, 4.0, 9.0, 60.0, 999.0, 1e6, 1e30])
def test_a_logarithmic_axis_is_marked_in_three_places_at_least(low: float, ratio: float) -> None:
    places = tick_places(low, low * ratio)
    assert 3 <= len(places) <= 10 and places == sorted(set(places))
    assert all(low <= place <= low * ratio for place in places)
