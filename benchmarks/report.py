"""The result of a run as one Markdown page."""

from __future__ import annotations

from typing import Any

import floor
from cases.case import Case
from turns import ratio

#: group -> heading, what the figures are, unit of a speed
GROUPS = {
    "lookup": (
        "Lookup through the TensorFlow op",
        "Uniformly random ids that are there, in a `tf.function`; million rows a second. `de` is "
        "`tfplugin.dynamic_embedding`, whose lookups never insert.",
        "rows",
    ),
    "train": (
        "Training step",
        "Lookup, gradient of the sum of squares and apply in one `Session.run`, ids fed; million rows a second. "
        "`de` is `tfplugin.dynamic_embedding`, written as for TFRA. Dense is a `tf.Variable` with `tf.gather`. The "
        "optimizers are those of `tf.compat.v1.train`; on the dense variable Adam decays and moves every row at each "
        "step.",
        "rows",
    ),
    "half": (
        "Rows of 16 bits",
        "The training step above with unique ids, its loss in float32; rows of float16 and bfloat16 are looked up as "
        "float32, and their updates are rounded stochastically. Million rows a second.",
        "rows",
    ),
    "parts": ("Parts on one device", "Million rows a second.", "rows"),
    "pooled": (
        "Pooled lookups",
        "`embedding_lookup_sparse`, combiner mean, one call per feature, all features in one `Session.run`; "
        "milliseconds of a step.",
        "milliseconds",
    ),
    "small": ("Small batches", "One lookup; microseconds of a call. Ratios are of times.", "microseconds"),
    "threads": ("Threads", "Million rows a second.", "rows"),
    "rows": ("Rows", "Million rows a second.", "rows"),
    "dims": ("Dims", "Million rows a second.", "rows"),
    "ctr": (
        "End to end: DeepFM on a generated log",
        "The model of `examples/deepfm.py`: 26 sparse and 13 dense features, one table, Adam; steps a second, and the "
        "held-out quality after the same steps on the same batches.",
        "steps",
    ),
    "keras": (
        "Keras: `fit` of a DeepFM",
        "`tfplugin.keras.Embedding` under plain `compile(Adam)` and `fit`; milliseconds of an epoch of `steps` steps. "
        "`loop`: the same model in a loop by hand, whose lookups update their rows in the backward pass "
        "(`apply_in_backward`). `hashed Embedding`: Keras's own layer, ids by remainder. `TFRA`: its Keras layer and "
        "optimizer under `fit`.",
        "milliseconds",
    ),
    "exchange": (
        "`sok.lookup_sparse` over Horovod ranks",
        "In a `tf.function`, combiner mean, Zipf ids; milliseconds of a step, the same threads for each rank. "
        "`one call` for all tables; `bfloat16`: the same, whose rows and gradients travel as that; `a call each`; "
        "`over Horovod`: the one call where ranks do not share memory; "
        "`alltoall`: `hvd.alltoall` alone, as often and with as many bytes as the one call needs (with float32 rows); "
        "`one rank`: the one call without Horovod, on as many samples as a rank has.",
        "milliseconds",
    ),
    "overlap": (
        "A lookup beside a dense part",
        "A step with gradients and SGD; the dense part, 4 layers of 256, does not wait for what is looked up. "
        "Milliseconds of a step: of the `lookup`, of the `dense` part, and of `both` in one `tf.function`.",
        "milliseconds",
    ),
    "rank scaling": (
        "From 1 rank to 4",
        "One call, of a thread for each rank, on the CPUs that are named above: with more ranks than CPUs, ranks take "
        "turns on these. Weak: each rank has as many samples; strong: all together have. Milliseconds of a step.",
        "milliseconds",
    ),
    "bounded": (
        "A table with a capacity",
        "Lookups of keys that are there, in a `tf.function`; million rows a second. `LRU` is full, and in training it "
        "remembers the last use of each row.",
        "rows",
    ),
}


LOCKS = "Many threads on one table"


def case_result(case: Case, sides: dict[str, Any], bandwidth: float | None) -> dict[str, Any]:
    """What goes into the JSON for one case: its parameters, its sides' seconds, ratios, and the floor."""
    ratios = []
    for comparison in case.comparisons:
        value = ratio(sides, comparison.of, comparison.to, of_times=comparison.at_most is not None)
        if value is None:
            continue
        ratios.append({"of": comparison.of, "to": comparison.to, "ratio": value})
        if comparison.at_most is not None:
            ratios[-1].update(at_most=comparison.at_most, reached=value <= comparison.at_most)
        elif comparison.at_least is not None:
            ratios[-1].update(at_least=comparison.at_least, reached=value >= comparison.at_least)
    result: dict[str, Any] = {
        "group": case.group,
        "title": case.title,
        "work": case.work,
        "parameters": {name: value for name, value in case.parameters.items() if name != "log"},
        "threads": case.threads,
        "items": case.items,
        "sides": sides,
        "ratios": ratios,
    }
    if case.floor is not None and bandwidth is not None and "median" in sides.get("kv", {}):
        size = floor.bytes_per_item(case.work, case.parameters)
        share = size * case.items / sides["kv"]["median"] / bandwidth
        result["floor"] = {"bytes_per_item": size, "copy_bytes_per_second": bandwidth, "share": share}
        if case.floor:
            result["floor"].update(at_least=case.floor, reached=share >= case.floor)
    return result


def markdown(result: dict[str, Any]) -> str:
    """The page."""
    on = result["machine"]
    lines = [f"# {on['cpu']}, {on['cpus']} CPUs", ""]
    lines += [
        f"{result['date']}, size `{result['size']}`, {result['rounds']} rounds, `--malloc {result['malloc']}`; "
        f"Linux {on['kernel']}, {on['memory_gib']} GiB, huge pages {on['transparent_hugepages']}, "
        f"Python {on['python']}; load average before the run {on['load_before']:.2f}"
        f"{', at real-time priority' if on.get('real_time') else ''}.",
        "",
    ]
    for library, versions in result["versions"].items():
        lines.append(f"- {library}: " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    lines += [f"- left out: {note}" for note in result["left_out"]]
    lines += ["", "Medians over the rounds; a ratio is the median of the ratios within a round. Method: `../NOTES.md`."]
    lines += _line_transfers(result["cases"])
    lines += _targets(result["cases"], result.get("locks", {}).get("ratios", []))
    for group in dict.fromkeys(case["group"] for case in result["cases"]):
        lines += _group(group, [case for case in result["cases"] if case["group"] == group])
    for name, heading in (("table_engine", "Table engine (C++, 2 threads)"), ("command_line", "Command line")):
        if name in result:
            lines += ["", f"## {heading}", "", "| figure | value |", "|---|---|"]
            lines += [f"| {figure.replace('_', ' ')} | {value:.4g} |" for figure, value in result[name].items()]
    if "locks" in result:
        lines += ["", f"## {LOCKS}", "", result["locks"]["page"].rstrip()]
    return "\n".join(lines) + "\n"


def _line_transfers(cases: list[dict[str, Any]]) -> list[str]:
    """How far apart the processors were, and beside which cases they were further than beside the others."""
    taken = {
        f"{GROUPS[case['group']][0]}, {case['title']}": case["line_transfer_ns"]
        for case in cases
        if "line_transfer_ns" in case
    }
    if not taken:
        return []
    least = min(min(of_case) for of_case in taken.values())
    told = f"A cache line took {least:.0f} ns and more from one processor to another"
    far = [
        f"{title} ({before:.0f}, {after:.0f})"
        for title, (before, after) in taken.items()
        if max(before, after) > 2 * least
    ]
    if not far:
        return ["", f"{told}, and never twice as long."]
    return ["", f"{told}; more than twice as long before or after: {'; '.join(far)}."]


def _targets(cases: list[dict[str, Any]], locks: list[dict[str, Any]]) -> list[str]:
    """Everything that has a target, in one table."""
    rows = []
    of_locks = {"title": "lookups, dim 16", "ratios": locks}
    for heading, case in [*((GROUPS[case["group"]][0], case) for case in cases), (LOCKS, of_locks)]:
        judged = [(f"{entry['of']} / {entry['to']}", entry["ratio"], entry) for entry in case["ratios"]]
        if "floor" in case:
            judged.append(("kv / memory floor", case["floor"]["share"], case["floor"]))
        for what, value, entry in judged:
            if "reached" in entry:
                sign, target = ("≤", entry["at_most"]) if "at_most" in entry else ("≥", entry["at_least"])
                reached = "yes" if entry["reached"] else "**no**"
                rows.append(f"| {heading} | {case['title']} | {what} | {value:.2f} | {sign} {target:g} | {reached} |")
    if not rows:
        return []
    return ["", "## Targets", "", "| | | ratio | measured | target | reached |", "|---|---|---|---|---|---|", *rows]


def _group(group: str, cases: list[dict[str, Any]]) -> list[str]:
    heading, explanation, unit = GROUPS[group]
    sides = list(dict.fromkeys(name for case in cases for name in case["sides"]))
    pairs = list(dict.fromkeys((entry["of"], entry["to"]) for case in cases for entry in case["ratios"]))
    with_floor = any("floor" in case for case in cases)
    with_quality = any("auc" in side for case in cases for side in case["sides"].values())
    columns = [_with_unit(name, unit) for name in sides] + [f"{of} / {to}" for of, to in pairs]
    columns += ["bytes per row", "copy, GB/s", "share of the floor"] if with_floor else []
    columns += [f"AUC, {name}" for name in sides] + ["best AUC possible"] if with_quality else []
    lines = ["", f"## {heading}", "", explanation, ""]
    lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for case in cases:
        cells = [_speed(case, name, unit) for name in sides]
        ratios = {(entry["of"], entry["to"]): entry["ratio"] for entry in case["ratios"]}
        cells += [f"{ratios[pair]:.2f}" if pair in ratios else "" for pair in pairs]
        if with_floor:
            found = case.get("floor")
            cells += ["", "", ""] if found is None else _floor_cells(found)
        if with_quality:
            cells += [f"{case['sides'][name].get('auc', float('nan')):.4f}" for name in sides]
            cells.append(next((f"{s['best_auc']:.4f}" for s in case["sides"].values() if "best_auc" in s), ""))
        lines.append(f"| {case['title']} | " + " | ".join(cells) + " |")
    return lines


def _floor_cells(found: dict[str, Any]) -> list[str]:
    copy = found["copy_bytes_per_second"] / 1e9
    return [f"{found['bytes_per_item']:.0f}", f"{copy:.1f}", f"{found['share']:.2f}"]


def _with_unit(name: str, unit: str) -> str:
    return name + {"rows": ", M/s", "steps": ", steps/s", "milliseconds": ", ms", "microseconds": ", µs"}[unit]


def speed(case: dict[str, Any], side: str) -> float | None:
    """Items a second of a side; None where it did not take part or failed."""
    median = case["sides"].get(side, {}).get("median")
    return None if median is None else case["items"] / median


def _speed(case: dict[str, Any], side: str, unit: str) -> str:
    result = case["sides"].get(side, {})
    if "median" not in result:
        return "failed" if "error" in result else ""
    if unit == "milliseconds":
        return f"{result['median'] * 1e3:.1f}"
    if unit == "microseconds":
        return f"{result['median'] * 1e6:.0f}"
    if unit == "steps":
        return f"{1 / result['median']:.1f}"
    return f"{case['items'] / result['median'] / 1e6:.2f}"
