"""Pictures of a result: PNG files for docs/images.

python benchmarks/plots.py benchmarks/results/<machine>.json --output docs/images
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from report import speed

COLORS = {
    "kv": "#1b6ca8",
    "de": "#5fa8d3",
    "TFRA": "#c8553d",
    "tf.gather": "#7f8c8d",
    "dense": "#7f8c8d",
    "hashed tf.Variable": "#7f8c8d",
}
LABELS = {
    "kv": "kvtools",
    "de": "its dynamic_embedding API",
    "dense": "dense tf.Variable",
    "tf.gather": "tf.gather on a dense tf.Variable",
}
MARKS = {"kv": "o", "de": "d", "TFRA": "s", "tf.gather": "^"}


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws what the result has the figures for, and returns the files. Says so where Matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: Matplotlib is not installed (pip install '.[test]')", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    if "sides" in result:
        return [_tools(result, folder / "tools.png")]
    if "models" in result:
        return [_exports(result["models"], folder / "exports.png")]
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in result["cases"]:
        groups.setdefault(case["group"], []).append(case)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for group, x_label in (("rows", "rows in the table"), ("dims", "values per row")):
        if group in groups:
            drawn.append(_curves(groups[group], x_label, folder / f"speed-by-{group}.png"))
    if "threads" in groups:
        drawn.append(_threads(groups["threads"], folder / "speed-by-threads.png"))
    if "train" in groups:
        drawn.append(_train(groups["train"], folder / "training-step.png"))
    if "ctr" in groups:
        drawn.append(_ctr(groups["ctr"][0], folder / "deepfm.png"))
    return drawn


def _sides(cases: list[dict[str, Any]]) -> list[str]:
    return [name for name in COLORS if any(speed(case, name) is not None for case in cases)]


def _axes(columns: int = 1, width: float = 5.0) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width * columns, 3.6), squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, list(axes[0])


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    # One legend for all panels, outside of them.
    labels = {
        label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if labels:
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(figure)
    return path


def _curves(cases: list[dict[str, Any]], x_label: str, path: Path) -> Path:
    """Speed over what varies: the lookup on the left, the training step on the right."""
    figure, axes = _axes(2)
    for axis, work, title in zip(axes, ("lookup", "train"), ("Lookup", "Training step with Adam"), strict=True):
        chosen = [case for case in cases if case["work"] == work]
        for name in _sides(chosen):
            points = [(case["parameters"]["x"], speed(case, name)) for case in chosen]
            x, y = zip(*[(x, y / 1e6) for x, y in points if y is not None], strict=True)
            axis.plot(x, y, marker=MARKS[name], color=COLORS[name], label=LABELS.get(name, name))
        axis.set_xscale("log", base=2 if x_label.startswith("values") else 10)
        axis.set_yscale("log")
        if x_label.startswith("values"):
            ticks = [case["parameters"]["x"] for case in chosen]
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(_few_minor_labels)
        axis.set_title(title)
        axis.set_xlabel(x_label)
        axis.set_ylabel("million rows a second")
        low, high = axis.get_ylim()
        axis.set_ylim(low / 1.5, high * 1.5)  # a small change is to look small
    return _save(figure, path)


def _few_minor_labels(value: float, _: int) -> str:
    """Labels 2 and 5 between the powers of ten."""
    digit = f"{value:e}"[0]
    return f"{value:g}" if digit in "25" else ""


def _bars(axis: Any, labels: list[str], heights: dict[str, list[float | None]]) -> None:
    """Groups of bars, each with its height written above it."""
    width = 0.8 / len(heights)
    for i, (name, values) in enumerate(heights.items()):
        at = [group + (i - (len(heights) - 1) / 2) * width for group in range(len(labels))]
        bars = axis.bar(
            at, [value or 0 for value in values], width * 0.94, color=COLORS[name], label=LABELS.get(name, name)
        )
        texts = ["" if value is None else f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in values]
        axis.bar_label(bars, texts, fontsize=8, padding=1)
    axis.set_xticks(range(len(labels)), labels)
    axis.margins(y=0.12)


def _millions(cases: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    speeds = {name: [speed(case, name) for case in cases] for name in _sides(cases)}
    return {name: [value and value / 1e6 for value in values] for name, values in speeds.items()}


def _threads(cases: list[dict[str, Any]], path: Path) -> Path:
    figure, axes = _axes(2)
    for axis, work, title in zip(axes, ("lookup", "train"), ("Lookup", "Training step with Adam"), strict=True):
        chosen = [case for case in cases if case["work"] == work]
        _bars(axis, [str(case["threads"]) for case in chosen], _millions(chosen))
        axis.set_title(f"{title}, dim {chosen[0]['parameters']['dim']}")
        axis.set_xlabel("threads")
        axis.set_ylabel("million rows a second")
    return _save(figure, path)


def _train(cases: list[dict[str, Any]], path: Path) -> Path:
    kinds = list(dict.fromkeys(case["parameters"]["ids"] for case in cases))
    figure, axes = _axes(len(kinds), 6.5)
    for axis, ids in zip(axes, kinds, strict=True):
        chosen = [case for case in cases if case["parameters"]["ids"] == ids]
        labels = [f"{case['parameters']['optimizer']}\ndim {case['parameters']['dim']}" for case in chosen]
        _bars(axis, labels, _millions(chosen))
        axis.set_title(f"Training step, {'unique' if ids == 'unique' else 'Zipf-distributed'} ids")
        axis.set_ylabel("million rows a second")
    return _save(figure, path)


def _ctr(case: dict[str, Any], path: Path) -> Path:
    figure, (axis,) = _axes(1, 5.5)
    names = _sides([case])
    steps = [1 / case["sides"][name]["median"] for name in names]
    bars = axis.barh([LABELS.get(name, name) for name in names], steps, 0.6, color=[COLORS[name] for name in names])
    quality = [f"{value:.1f}  (AUC {case['sides'][name]['auc']:.3f})" for name, value in zip(names, steps, strict=True)]
    axis.bar_label(bars, quality, padding=4)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.35)
    axis.set_title(f"DeepFM, batches of {case['parameters']['batch']:,}")
    axis.set_xlabel("training steps a second")
    return _save(figure, path)


def _tools(result: dict[str, Any], path: Path) -> Path:
    """Seconds of each offline tool, beside a copy of the bytes and a script that does the same."""
    figure, (axis,) = _axes(width=8.0)
    sides = result["sides"]
    bars = axis.barh(list(sides), [side["median"] for side in sides.values()], color=COLORS["kv"], height=0.6)
    for bar, name in zip(bars, sides, strict=True):
        bar.set_color(
            COLORS["dense"] if name.startswith("cat") else COLORS["TFRA"] if "script" in name else COLORS["kv"]
        )
    told = [f"{side['median']:.1f} s, {side['peak_mebibytes']:,.0f} MiB" for side in sides.values()]
    axis.bar_label(bars, told, fontsize=8, padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(f"seconds for {result['rows'] / 1e6:.1f} million rows, {result['bytes'] / 1e9:.0f} GB; peak memory")
    return _save(figure, path)


def _exports(models: list[dict[str, Any]], path: Path) -> Path:
    """Size of each kind of export, with its AUC."""
    figure, axes = _axes(len(models), width=6.5)
    for axis, model in zip(axes, models, strict=True):
        exports = model["exports"]
        bars = axis.barh(list(exports), [export["bytes"] / 1e6 for export in exports.values()], height=0.6)
        for bar, name in zip(bars, exports, strict=True):
            bar.set_color(COLORS["dense"] if name.startswith("trained") else COLORS["kv"])
        told = [f"{export['bytes'] / 1e6:,.1f} MB, AUC {export['auc']:.4f}" for export in exports.values()]
        axis.bar_label(bars, told, fontsize=8, padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.45)
        axis.grid(axis="y", visible=False)
        axis.set_title(model["title"], fontsize=10)
        axis.set_xlabel("MB on disk; AUC of held-out examples")
    return _save(figure, path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="a .json of benchmarks/results")
    parser.add_argument("--output", type=Path, default=Path("docs/images"), help="folder (default: docs/images)")
    args = parser.parse_args()
    for path in draw(json.loads(args.result.read_text()), args.output):
        print(path)


if __name__ == "__main__":
    main()
