"""The result of a run of export_models.py as one Markdown page, with what was asked beside what was reached."""

from __future__ import annotations

import importlib.metadata
from typing import Any

#: an export over `cat` of the same bytes: at least
CAT_GOAL = 0.3
#: MiB that an export may take for its rows at the most, and bytes more for each key
MEMORY_GOAL, KEY_BYTES = 1024, 30
#: seconds that an export of 1,000 tables may take
TABLES_GOAL = 10.0
_PACKAGES = ("tensorflow", "keras", "numpy")


def versions() -> dict[str, str]:
    """Of the packages that took part."""
    return {package: importlib.metadata.version(package) for package in _PACKAGES}


def size(count: float) -> str:
    """Bytes for people.

    >>> size(123_456_789), size(2_048)
    ('117.7 MiB', '2.0 KiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            return f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked, and what came of it."""
    found: list[dict[str, Any]] = []
    for model in result.get("models", []):
        for name, one in model["exports"].items():
            if one["same"] and "export_seconds" in one:  # not the trained model itself
                what = f"{model['title']}, {name}: largest difference from the trained model"
                found.append({"what": what, "value": one["difference"], "at_most": 0.0})
    if speed := result.get("speed"):
        where = f"{speed['rows']:,} rows x {speed['dim']}"
        limit = MEMORY_GOAL + speed["rows"] * KEY_BYTES / 2**20
        for name, one in speed["sides"].items():
            if name.startswith("export"):
                found.append(
                    {"what": f"{where}, {name}: speed / cat", "value": one["beside"]["cat"], "at_least": CAT_GOAL}
                )
                found.append({"what": f"{where}, {name}: peak, MiB", "value": one["peak_mebibytes"], "at_most": limit})
        for index, seconds in speed["tables"]["sides"].items():
            what = f"{speed['tables']['count']:,} tables, {index}: seconds"
            found.append({"what": what, "value": seconds, "at_most": TABLES_GOAL})
    for one in found:
        one["reached"] = one["value"] <= one["at_most"] if "at_most" in one else one["value"] >= one["at_least"]
    return found


def markdown(result: dict[str, Any]) -> str:
    """The page."""
    on = result["machine"]
    programs = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"# Exported models: {on['cpu']}, {on['cpus']} CPUs",
        "",
        f"{result['date']}, {result['rounds']} rounds of {result['seconds']:g} s; Linux {on['kernel']},"
        f" {on['memory_gib']} GiB, Python {on['python']}, {programs}; load average before the run"
        f" {on['load_before']:.2f}. It took {result['took']['all'] / 60:.1f} minutes.",
    ]
    if judged := goals(result):
        lines += ["", "## What was asked", "", "| | measured | asked | reached |", "|---|---|---|---|"]
        for one in judged:
            asked = f"≤ {one['at_most']:.4g}" if "at_most" in one else f"≥ {one['at_least']:g}"
            lines.append(f"| {one['what']} | {one['value']:.4g} | {asked} | {'yes' if one['reached'] else '**no**'} |")
    for model in result.get("models", []):
        lines += ["", *_model(model, result["steps"])]
    if result.get("indexes"):
        lines += ["", *_indexes(result["indexes"])]
    if result.get("speed"):
        lines += ["", *_speed(result["speed"])]
    return "\n".join(lines) + "\n"


def _model(model: dict[str, Any], steps: int) -> list[str]:
    trained, exports = model["trained"], model["exports"]
    batches = [name for name in next(iter(exports.values())) if name.startswith("requests ")]
    lines = [
        f"## {model['title']}",
        "",
        f"{steps} steps of training made {trained['rows']:,} rows. AUC of {trained['held_out']:,} held-out examples in"
        f" the training process: {trained['auc']:.5f}; at best {trained['best_auc']:.5f}. What the trained model"
        f" answers in a session differs from that process by {trained['difference']:.2g} at most; the exports are held"
        " against the former. Load: seconds until a first request was answered. Memory: what the process then has"
        " more. Requests in a session, one after the other.",
        "",
        "| export | rows | on disk | load, s | memory | peak | "
        + " | ".join(f"requests/s, {name.split()[1]}" for name in batches)
        + " | AUC | largest difference |",
        "|---|---|---|---|---|---|" + "---|" * len(batches) + "---|---|",
    ]
    for name, one in exports.items():
        rates = " | ".join(f"{one[batch]:,.0f}" for batch in batches)
        difference = "none" if one["same"] else f"{one['difference']:.2g}"
        lines.append(
            f"| {name} | {one['rows']:,} | {size(one['bytes'])} | {one['load_seconds']:.2f} |"
            f" {size(one['load_memory'])} | {size(one['load_peak'])} | {rates} | {one['auc']:.5f} | {difference} |"
        )
    return lines


def _indexes(tables: list[dict[str, Any]]) -> list[str]:
    calls = [name for name in next(iter(tables[0]["sides"].values())) if name.startswith("rows ")]
    lines = [
        "## Indexes",
        "",
        f"A table of dim {tables[0]['dim']}, random ids that are there; million rows a second of a function's calls.",
        "",
        "| rows | | "
        + " | ".join(f"M rows/s, {int(name.split()[1]):,} ids" for name in calls)
        + " | load, s | memory | peak | export, s |",
        "|---|---|" + "---|" * len(calls) + "---|---|---|---|",
    ]
    for table in tables:
        for name, one in table["sides"].items():
            rates = " | ".join(f"{one[call] / 1e6:.2f}" for call in calls)
            took = "" if one["export_seconds"] is None else f"{one['export_seconds']:.2f}"
            lines.append(
                f"| {table['rows']:,} | {name} | {rates} | {one['load_seconds']:.2f} | {size(one['load_memory'])} |"
                f" {size(one['load_peak'])} | {took} |"
            )
    return lines


def _speed(speed: dict[str, Any]) -> list[str]:
    lines = [
        "## Speed of an export",
        "",
        f"A trained SavedModel of one table, {speed['rows']:,} rows x {speed['dim']}, {speed['bytes'] / 1e9:.2f} GB, in"
        " the page cache. Each command is a process of its own.",
        "",
        "| command | seconds (median) | GB/s | peak memory, MiB | speed / cat | speed / cat and sync |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in speed["sides"].items():
        rate = speed["bytes"] / 1e9 / one["seconds"]
        beside = " | ".join(f"{ratio:.2f}" for ratio in one["beside"].values())
        lines.append(f"| {name} | {one['seconds']:.2f} | {rate:.2f} | {one['peak_mebibytes']:.0f} | {beside} |")
    many = speed["tables"]
    told = ", ".join(f"{index} {seconds:.2f} s" for index, seconds in many["sides"].items())
    return [*lines, "", f"A trained SavedModel of {many['count']:,} tables: {told}."]
