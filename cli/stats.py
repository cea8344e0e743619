"""`kvtools stats`: what the rows of the tables are like."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Annotated, Any

import typer

from kvtools.chain import chain_to, member_of
from kvtools.chain_place import is_chain
from kvtools.cli.bars import bar_chart, percent, shows_blocks
from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns, shown, size, total
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    AsJson,
    EngineName,
    Memory,
    Sort,
    Source,
    SourcePath,
    Tables,
    Workers,
    bytes_of,
    check_readable,
    engine_named,
    sorted_tables,
)
from kvtools.cli.progress import progress_bar
from kvtools.cli.terminal import prose, width
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.schema import TableSchema, VersionUnit
from kvtools.errors import BadInputError
from kvtools.field_names import field_name
from kvtools.histogram import BINS_PER_DECADE, VersionHistogram
from kvtools.stats import ColumnStats, TableStats, describe_stats, each_table_stats

_BARS = 16
_RULE_WIDTH = 45  # of a rule's threshold, rows, share and bytes, with large numbers
_DAY = 86400


def run(
    path: SourcePath,
    *,
    table: Tables = None,
    sort: Sort = None,
    as_json: AsJson = False,
    ascii_only: Annotated[
        bool, typer.Option("--ascii", help="Draw with # even where the terminal has better.")
    ] = False,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    engine: EngineName = "local",
) -> None:
    """Show what the rows of each table are like, and what leaving rows out would save.

    Norms, frequencies and ages as histograms; zero rows, NaN, infinities, denormal numbers and repeated keys; what
    each clip threshold would cut; how even the parts are. Reads every byte once.

    \b
    Examples:
      kvtools stats model.ckpt-100
      kvtools stats model.ckpt-100 --table user_emb --json
      kvtools stats model.ckpt-100 --sort bytes
      kvtools stats model.ckpt-100 --workers 8 --memory 4GiB
    """
    where = engine_named(engine)
    checkpoint = source.open(path, memory, lenient=True)
    check_readable(checkpoint, table or [])
    tables = sorted_tables(checkpoint.select(table or []), sort)
    heading = _heading(path, checkpoint)
    blocks = shows_blocks() and not ascii_only
    with progress_bar("reading") as progress:
        found = each_table_stats(tables, memory=bytes_of(memory), workers=workers, engine=where, progress=progress)
        # Text alone is kept of each table: statistics of thousands of them would fill the memory.
        texts = [
            _json_text(reader.schema, stats) if as_json else _table_text(reader.schema, stats, blocks)
            for reader, stats in found
        ]
    if as_json:
        about = dumps({"path": str(checkpoint.path), "dialect": checkpoint.dialect})
        print(f'{about[:-1]}, "tables": [{", ".join(texts)}]}}')
    else:
        print(heading)
        together = total(len(tables), sum(one.rows for one in tables), sum(one.schema.bytes for one in tables))
        if together:
            print(together)
        if not tables and not checkpoint.broken:
            print("no key-value tables")
        for text in texts:
            print(f"\n{text}")
    check_readable(checkpoint, table or [], any_table=True)


def _heading(path: str, checkpoint: Checkpoint) -> str:
    """Return what was read: a checkpoint and its dialect, or a chain, which goes by its folder, and its members."""
    last = member_of(checkpoint.path)
    if last is None or last.kind != "delta" or not is_chain(path):
        return f"{checkpoint.path} ({checkpoint.dialect})"
    try:
        first = min(member.number for member in chain_to(last))
    except BadInputError:  # training has removed it meanwhile
        return f"{path} (chain, up to member {last.number})"
    return f"{path} (chain, members {first} to {last.number})"


def _json_text(schema: TableSchema, stats: TableStats) -> str:
    return dumps({field_name(name): value for name, value in describe_stats(schema, stats).items()})


def _table_text(schema: TableSchema, stats: TableStats, blocks: bool) -> str:
    lines: list[str] = []
    add = lines.append
    found = describe_stats(schema, stats)
    rows, values = stats.rows, stats.values
    about = (
        f"{shown(schema.name)}: {rows:,} rows of {schema.dim} {schema.value_dtype}, {size(schema.bytes)},"
        f" {found['row_bytes']} B a row"
    )
    add(prose(about))
    if not rows:
        return "\n".join(lines)
    if values.elements:
        of_values = f"mean {values.mean:.6g}, std {values.std:.6g}"
        add(prose(f"values from {values.smallest:.6g} to {values.largest:.6g}, {of_values}"))
    add("")
    add(_counts(stats))
    if stats.values.l2.rows:
        add("\nEuclidean norm of the values")
        add(bar_chart(_norm_bars(stats.values), blocks=blocks))
    if stats.freqs is not None:
        freqs = found["freqs"]
        add("\nfrequency")
        bars = [("0" if low == 0 else _range(low, high - 1), n) for low, high, n in stats.freqs.bars()]
        add(bar_chart(bars, blocks=blocks))
        if freqs["top_1_percent_share"] is not None:
            zipf = "" if freqs["zipf_exponent"] is None else f"; Zipf exponent {freqs['zipf_exponent']:.2f}"
            top = (
                f"  the top 1% of the keys have {_share(freqs['top_1_percent_share'])} of all frequency,"
                f" the top 10% have {_share(freqs['top_10_percent_share'])}{zipf}"
            )
            add(prose(top))
    if stats.versions is not None:
        lines += _version_lines(stats.versions, blocks)
    add("\nwhat `kvtools clip` would cut")
    add(_savings(found["clip"], rows))
    if schema.parts > 1:
        skew = found["parts"]
        even = (
            f"{schema.parts} parts, the largest {skew['max_over_mean']:.3f} times the mean,"
            f" coefficient of variation {skew['coefficient_of_variation']:.3f}"
        )
        add("\n" + prose(even))
        if schema.parts <= _BARS:
            add(bar_chart([(f"part {i}", n) for i, n in enumerate(schema.part_rows)], blocks=blocks))
    if schema.slots:
        add("\nEuclidean norm of the slots")
        add(_slots(found["slots"]))
    return "\n".join(lines)


def _counts(stats: TableStats) -> str:
    values = stats.values
    counts = [
        ("all zero", values.zero_rows, None),
        ("with NaN", values.nan_rows, values.nan_elements),
        ("with an infinity", values.inf_rows, values.inf_elements),
        ("with denormal numbers", values.denormal_rows, values.denormal_elements),
        ("of a key that comes again", stats.repeated_keys, None),
    ]
    return columns(
        ["rows", "count", "share", "numbers"],
        [
            [name, f"{count:,}", percent(count, stats.rows), "" if numbers is None else f"{numbers:,}"]
            for name, count, numbers in counts
        ],
        right=frozenset({1, 2, 3}),
    )


def _norm_bars(values: ColumnStats) -> list[tuple[str, int]]:
    """Return bars of a decade, or of less where that leaves few enough."""
    bars: list[tuple[float, float, int]] = []
    for bins in (1, 2, 5, BINS_PER_DECADE):
        bars = values.l2.bars(bins)
        if len(bars) <= _BARS:
            break
    only_zeros = values.l2.counts[0] == values.zero_rows
    return [("0" if low == 0 and only_zeros else f"{low:.3g} .. {high:.3g}", rows) for low, high, rows in bars]


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} .. {high:,}"


def _share(share: float) -> str:
    return f"{100 * share:.1f}%"


def _version_lines(versions: VersionHistogram, blocks: bool) -> list[str]:
    lines: list[str] = []
    add = lines.append
    unit = {"seconds": "time of the last update", "days": "day of the last update", "steps": "step of the last update"}
    add(f"\n{unit.get(versions.unit, 'version')}")
    width = versions.readable_width(_BARS)
    bars = [(version_range(low, high, versions.unit), rows) for low, high, rows in versions.bars(width)]
    if versions.unset:
        bars.insert(0, ("never set", versions.unset))
    add(bar_chart(bars, blocks=blocks))
    median, most = versions.age_of(0.5), versions.age_of(0.9)
    if versions.newest is not None and median is not None and most is not None:
        newest = version_range(versions.newest, versions.newest + 1, versions.unit)
        ages = (
            f"  the newest is {newest}; half of the rows are at most {_age(median, versions.unit)} older,"
            f" 90% at most {_age(most, versions.unit)}"
        )
        add(prose(ages))
    return lines


def _age(age: int, unit: VersionUnit) -> str:
    """Write an age in its unit, that of seconds in the largest that it has two of.

    >>> _age(90_000, "seconds"), _age(7200, "seconds"), _age(1_000_000, "seconds"), _age(5000, "steps")
    ('25 hours', '2 hours', '11.6 days', '5,000 steps')
    """
    if unit != "seconds":
        return f"{age:,}" + (f" {unit}" if unit != "unknown" else "")
    for name, length in (("days", _DAY), ("hours", 3600), ("minutes", 60)):
        if age >= 2 * length:
            return f"{age / length:,.1f} {name}".replace(".0 ", " ")
    return f"{age} seconds"


def version_range(low: int, high: int, unit: VersionUnit) -> str:
    """Write the versions from `low` to below `high`: Unix time as dates in UTC.

    >>> version_range(1_700_006_400, 1_700_092_800, "seconds"), version_range(100, 200, "steps")
    ('2023-11-15', '100 .. 199')
    """
    if unit == "unknown" or unit == "steps":
        return _range(low, high - 1)
    scale = 1 if unit == "seconds" else _DAY
    try:
        start, end = (datetime.fromtimestamp(0, timezone.utc) + timedelta(seconds=v * scale) for v in (low, high))
    except OverflowError:
        return _range(low, high - 1)
    if (end - start) % timedelta(days=1) or start.time() != datetime.min.time():
        style = "%H:%M:%S" if (end - start) % timedelta(minutes=1) else "%H:%M"
        return f"{start:%Y-%m-%d} {start.strftime(style)}"
    last = end - timedelta(days=1)
    return f"{start:%Y-%m-%d}" if last == start else f"{start:%Y-%m-%d} .. {last:%Y-%m-%d}"


def _savings(clip: dict[str, list[dict[str, Any]]], rows: int) -> str:
    """Print the rules, named as the options of `kvtools clip`, side by side, each with its own thresholds; below one
    another on a narrow terminal."""

    def cells(savings: Sequence[dict[str, Any]], number: int) -> list[str]:
        if number >= len(savings):
            return ["", "", "", ""]
        found = savings[number]
        threshold = f"{found['threshold']:g}" if isinstance(found["threshold"], float) else str(found["threshold"])
        return [threshold, f"{found['rows']:,}", percent(found["rows"], rows), size(found["bytes"])]

    rules = [("--max-abs", clip["abs"]), ("--l2", clip["l2"])]
    if clip["freq"]:
        telling = sum(found["rows"] < 0.99 * rows for found in clip["freq"])
        rules.append(("--min-freq", clip["freq"][: telling + 1]))

    def table(rules: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
        header = [cell for name, _ in rules for cell in (name, "rows", "share", "saved")]
        lines = [
            [cell for _, savings in rules for cell in cells(savings, number)]
            for number in range(max(len(savings) for _, savings in rules))
        ]
        return columns(header, lines, right=frozenset(range(len(header))))

    room = width()
    if room is not None and room < len(rules) * _RULE_WIDTH:
        return "\n\n".join(table([rule]) for rule in rules)
    return table(rules)


def _slots(slots: Sequence[dict[str, Any]]) -> str:
    def number(value: Any) -> str:
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    return columns(
        ["slot", "width", "type", "zero rows", "NaN", "inf", "min", "median", "p99", "max"],
        [
            [
                shown(slot["name"]),
                str(slot["width"]),
                slot["dtype"],
                *(f"{slot[name]:,}" for name in ("zero_rows", "nan_rows", "inf_rows")),
                *(number(slot["l2"][name]) for name in ("min", "median", "p99", "max")),
            ]
            for slot in slots
        ],
        right=frozenset({1, *range(3, 10)}),
    )
