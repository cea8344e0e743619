"""A page of plots about the tables of a checkpoint: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

from kvtools import __version__
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import TableSchema
from kvtools.engine import Engine
from kvtools.errors import one_line
from kvtools.quantized_rows import stored_row_bytes
from kvtools.remote.paths import local_path, shown_path
from kvtools.replace_output import check_free, replace_files
from kvtools.report_plots import (
    clip_plot,
    frequency_clip_plot,
    growth_plot,
    norm_plot,
    parts_plot,
    short_number,
    version_plot,
    zipf_plot,
)
from kvtools.stats import ColumnStats, TableStats, describe_stats, table_stats

_TABLES_PLOTTED = 40
"""More would make a page that no browser likes."""

_STYLE = """
:root { --paper: #ffffff; --card: #f6f7f9; --ink: #1d2330; --quiet: #5d6675; --faint: #d5d9e0; --bad: #b3261e;
  --line-0: #2f6fde; --line-1: #e07b1a; --line-2: #2e9e6b; --line-3: #b13fb5; --line-4: #8a6d1f; --line-5: #1d9bb0;
  --line-6: #c9405a; --line-7: #6b7280; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171d; --card: #1d2129; --ink: #e6e9ef; --quiet: #9aa3b2; --faint: #3a414d; --bad: #ff8a80;
    --line-0: #6ea0ff; --line-1: #ffab5c; --line-2: #5fd39b; --line-3: #e58be8; --line-4: #d9bb66; --line-5: #5fd0e3;
    --line-6: #ff8299; --line-7: #a3acba; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 2.2rem 1.6rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 3rem 0 .2rem; padding-top: 1.2rem; border-top: 1px solid var(--faint);
  overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0; } .quiet { color: var(--quiet); } .bad { color: var(--bad); font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--faint); vertical-align: top; }
th { color: var(--quiet); font-weight: 500; white-space: nowrap; }
td { overflow-wrap: break-word; max-width: 24rem; } td.n, th.n { text-align: right; white-space: nowrap; }
a { color: var(--line-0); text-decoration: none; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem; margin: 1.1rem 0; }
.facts div { background: var(--card); border-radius: 8px; padding: .7rem .9rem; }
.facts b { display: block; font-size: 1.25rem; font-weight: 600; line-height: 1.3; }
.facts span { color: var(--quiet); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.1rem;
  align-items: start; margin-bottom: 1rem; }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: 1rem 1rem .7rem; }
figcaption { font-weight: 600; margin-bottom: .4rem; }
figcaption small { display: block; font-weight: 400; color: var(--quiet); font-size: .85rem; }
figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: inherit !important; }
footer { margin-top: 3rem; color: var(--quiet); font-size: .85rem; }
@media print {
  :root { --paper: #ffffff; --card: #ffffff; --ink: #000000; --quiet: #444444; --faint: #cccccc; --bad: #a00000;
    --line-0: #2f6fde; --line-1: #e07b1a; --line-2: #2e9e6b; --line-3: #b13fb5; --line-4: #8a6d1f; --line-5: #1d9bb0;
    --line-6: #c9405a; --line-7: #6b7280; }
  @page { margin: 12mm; }
  body { font-size: 9pt; } table { font-size: 7.5pt; } th, td { padding: .15rem .5rem .15rem 0; }
  main { max-width: none; padding: 0; } .wide { overflow: visible; }
  .plots { grid-template-columns: 1fr 1fr; gap: .5rem; } .facts { gap: .3rem; margin: .6rem 0; }
  figure, .facts div { border: 1px solid var(--faint); padding: .5rem; } .facts b { font-size: 11pt; }
  section.table { break-before: page; } h2 { border: 0; margin-top: 1rem; padding-top: 0; }
  figure, tr, .facts { break-inside: avoid; } h2, h3 { break-after: avoid; } }
"""


@dataclass(frozen=True)
class _Number:
    """A cell that is aligned to the right."""

    text: str


def write_report(
    checkpoints: Sequence[Checkpoint],
    output: str | Path,
    *,
    tables: Sequence[str] = (),
    title: str | None = None,
    memory: int = DEFAULT_MEMORY,
    workers: int | None = None,
    engine: Engine = "local",
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a report about the last of `checkpoints`, and how they grew if there are several; return its bytes.

    Args:
        checkpoints: one, or several of one model, oldest first. Only the last one's rows are read.
        output: the HTML file; appears whole or not at all.
        tables: names of tables; all if empty.
        title: what stands above; made from the path if None.
        memory: see `kvtools.stats.table_stats`, as for `workers`, `engine` and `progress`.
        workers: parts at once.
        engine: where they are read.
        force: replace an `output` that is there.
        progress: called as rows are read.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        CorruptFileError: the data is damaged.
        OutputError: `output` exists, or cannot be written.

    Example:
        ```python
        write_report([kvtools.open("model.ckpt-100")], Path("report.html"))
        ```
    """
    output = Path(local_path(output))
    check_free(output.absolute(), force=force)
    checkpoint = checkpoints[-1]
    readers = checkpoint.select(tables)
    stats = table_stats(readers, memory=memory, workers=workers, engine=engine, progress=progress)
    schemas = [reader.schema for reader in readers]
    page = render_report(checkpoints, schemas, stats, title=title).encode()
    with replace_files(output, force=force) as staging:
        staging.write_bytes(page)
    return len(page)


def render_report(
    checkpoints: Sequence[Checkpoint],
    schemas: Sequence[TableSchema],
    stats: dict[str, TableStats],
    *,
    title: str | None = None,
    when: datetime | None = None,
) -> str:
    """Return the page about these tables of the last of `checkpoints`, as HTML.

    `stats` are the tables' statistics by name; `when` is the time to show, now if None.
    """
    checkpoint = checkpoints[-1]
    title = title or f"Embedding tables of {Path(checkpoint.path).name or checkpoint.path}"
    when = when or datetime.now(timezone.utc)
    body = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="quiet">{_text(shown_path(checkpoint.path))} &middot; {_text(checkpoint.dialect)} &middot; '
        f'<time datetime="{when:%Y-%m-%dT%H:%M:%SZ}">{when:%Y-%m-%d %H:%M} UTC</time></p>',
        _overview(checkpoint, schemas, stats),
    ]
    if len(checkpoints) > 1:
        body.append(_growth(checkpoints, [schema.name for schema in schemas]))
    largest = sorted(schemas, key=lambda schema: -schema.bytes)[:_TABLES_PLOTTED]
    plotted = {schema.name for schema in largest}
    for number, schema in enumerate(schemas):
        body.append(_table(number, schema, stats[schema.name], with_plots=schema.name in plotted))
    body.append(f"<footer>Written by kvtools {__version__}.</footer>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _overview(checkpoint: Checkpoint, schemas: Sequence[TableSchema], stats: dict[str, TableStats]) -> str:
    total = sum(schema.bytes for schema in schemas)
    parts = [
        _facts(
            [
                (f"{len(schemas):,}", "table" if len(schemas) == 1 else "tables"),
                (f"{sum(schema.rows for schema in schemas):,}", "rows"),
                (short_number(total, binary=True), "in tables"),
                (f"{len(checkpoint.variables):,}", "dense variables"),
                (short_number(sum(variable.bytes for variable in checkpoint.variables), binary=True), "in variables"),
            ]
        )
    ]
    for name, error in checkpoint.broken.items():
        parts.append(f'<p class="bad">Table {_text(name)} cannot be read: {_text(one_line(str(error)))}</p>')
    if not schemas:
        parts.append("<p>There are no key-value tables here.</p>")
        return "\n".join(parts)
    header: list[str | _Number]
    header = ["table", "key", "value", _Number("dim"), _Number("rows"), _Number("parts"), "slots", _Number("bytes"), ""]
    rows: list[list[str | _Number]] = []
    for number, schema in enumerate(schemas):
        faults = _faults(stats[schema.name])
        rows.append(
            [
                f'<a href="#table-{number}">{_text(schema.name)}</a>',
                _text(schema.key_dtype),
                _text(schema.value_dtype),
                _Number(str(schema.dim)),
                _Number(f"{schema.rows:,}"),
                _Number(f"{schema.parts:,}"),
                _text(", ".join(slot.name for slot in schema.slots)) or "none",
                _Number(short_number(schema.bytes, binary=True)),
                f'<span class="bad">{_text(", ".join(faults))}</span>' if faults else "",
            ]
        )
    parts.append(_html_table(header, rows))
    return "\n".join(parts)


def _faults(stats: TableStats) -> list[str]:
    """Say in a few words what should not be there."""
    slots = stats.slots.values()
    found = [
        (stats.values.nan_rows, "rows with NaN"),
        (stats.values.inf_rows, "rows with infinities"),
        (sum(slot.nan_rows + slot.inf_rows for slot in slots), "slot rows with NaN or infinity"),
        (stats.repeated_keys, "repeated keys"),
    ]
    return [f"{name}: {count:,}" for count, name in found if count]


def _table(number: int, schema: TableSchema, stats: TableStats, *, with_plots: bool) -> str:
    found = describe_stats(schema, stats)
    width = stored_row_bytes(schema)
    freqs, skew = found["freqs"], found["parts"]
    facts = [
        (f"{stats.rows:,}", "rows"),
        (short_number(schema.bytes, binary=True), f"{width} bytes a row"),
        (_percent(stats.values.zero_rows, stats.rows), "rows all zero"),
    ]
    if freqs is not None and freqs["top_1_percent_share"] is not None:
        facts.append((f"{100 * freqs['top_1_percent_share']:.1f}%", "of all frequency is held by the top 1% of keys"))
        facts.append(
            (_percent(stats.freqs.below(2) if stats.freqs else 0, stats.rows), "of keys were seen once or never")
        )
    if schema.parts > 1:
        facts.append((f"{skew['max_over_mean']:.2f}", "largest part over the mean"))
    lines = [f'<section class="table" id="table-{number}">', f"<h2>{_text(schema.name)}</h2>"]
    lines.append(
        f'<p class="quiet">{_text(schema.key_dtype)} keys, {schema.dim} {_text(schema.value_dtype)} a row'
        + (f", slots {_text(', '.join(slot.name for slot in schema.slots))}" if schema.slots else ", no slots")
        + "</p>"
    )
    lines += [f'<p class="quiet">Note: {_text(note)}</p>' for note in schema.notes]
    lines.append(_facts(facts))
    if with_plots:
        lines += ['<div class="plots">', *_plots(schema, stats, found), "</div>"]
    else:
        lines.append(
            f'<p class="quiet">Only the {_TABLES_PLOTTED} largest tables have plots; name this one with --table.</p>'
        )
    lines += ["<h3>Numbers</h3>", _numbers(found)]
    lines += ["<h3>What a threshold cuts</h3>", _savings(found["clip"], stats.rows), "</section>"]
    return "\n".join(lines)


def _plots(schema: TableSchema, stats: TableStats, found: dict[str, Any]) -> list[str]:
    width, freqs, versions, skew = stored_row_bytes(schema), found["freqs"], found["versions"], found["parts"]
    plots = [
        _figure(
            "How large are the rows?",
            f"{_outside(stats.values)} have no place on this scale" if _outside(stats.values) else "no row is all zero",
            norm_plot(stats.values.l2),
            "There is no row with a norm to plot.",
        ),
        _figure(
            "What would clipping save?",
            "rows whose numbers, or whose norm, are below the threshold",
            clip_plot(schema, stats, width),
            "There is no row with a norm to cut by.",
        ),
    ]
    if stats.freqs is None:
        plots.append(_figure("How often are keys seen?", "", None, "This table records no frequencies."))
    else:
        exponent = freqs["zipf_exponent"]
        plots += [
            _figure(
                "How often are keys seen?",
                "frequency by rank" + ("" if exponent is None else f", Zipf exponent {exponent:.2f}"),
                zipf_plot(stats.freqs),
                "All frequencies are zero.",
            ),
            _figure(
                "What would a frequency filter save?",
                "rows that were seen less often than the threshold",
                frequency_clip_plot(stats.freqs, width),
                "There is no row.",
            ),
        ]
    if stats.versions is None:
        plots.append(_figure("When were rows updated?", "", None, "This table records no versions."))
    else:
        unset = f"; {versions['unset']:,} rows have no version" if versions["unset"] else ""
        plots.append(
            _figure(
                "When were rows updated?",
                f"rows by their last update, and in all up to then{unset}",
                version_plot(stats.versions),
                f"None of the {stats.rows:,} rows has a version." if stats.rows else "There is no row.",
            )
        )
    plots.append(
        _figure(
            "Are the parts even?",
            f"{schema.parts:,} parts, coefficient of variation {skew['coefficient_of_variation']:.3f}",
            parts_plot(schema.part_rows),
            "This table has one part.",
        )
    )
    return plots


def _outside(values: ColumnStats) -> str:
    """Say which rows the plot of norms leaves out."""
    left_out = [
        (values.zero_rows, "zero rows"),
        (int(values.l2.counts[0]) - values.zero_rows, "rows of norms below 1e-20"),
        (int(values.l2.counts[-1]), "rows of norms above 1e20"),
        (values.rows - values.l2.rows, "rows with NaN or infinities"),
    ]
    return ", ".join(f"{count:,} {name}" for count, name in left_out if count)


def _numbers(found: dict[str, Any]) -> str:
    """Make the table of counts and ranges of the values and each slot."""
    header: list[str | _Number] = [
        "column",
        *map(_Number, ["min", "max", "mean", "std", "zero rows", "NaN rows", "infinite rows", "denormal rows"]),
        *map(_Number, ["median norm", "largest norm"]),
    ]

    def line(name: str, column: dict[str, Any]) -> list[str | _Number]:
        return [
            _text(name),
            *(_Number(_short(column[field])) for field in ("min", "max", "mean", "std")),
            _Number(f"{column['zero_rows']:,}"),
            *(_Number(_alarming(column[field])) for field in ("nan_rows", "inf_rows")),
            _Number(f"{column['denormal_rows']:,}"),
            *(_Number(_short(column["l2"][field])) for field in ("median", "max")),
        ]

    rows = [line("values", found["values"]), *(line(f"slot {slot['name']}", slot) for slot in found["slots"])]
    repeated = found["repeated_keys"]
    note = f"<p>Rows whose key comes again in a later row: {_alarming(repeated)}</p>"
    return _html_table(header, rows) + note


def _savings(clip: dict[str, list[dict[str, Any]]], rows: int) -> str:
    rules = [("all |x| below", clip["abs"]), ("norm below", clip["l2"]), ("frequency below", clip["freq"][:12])]
    rules = [rule for rule in rules if rule[1]]
    header: list[str | _Number] = [_Number(text) for name, _ in rules for text in (name, "rows cut", "bytes saved")]
    lines: list[list[str | _Number]] = []
    for number in range(max(len(savings) for _, savings in rules)):
        line: list[str | _Number] = []
        for _, savings in rules:
            if number >= len(savings):
                line += [_Number("")] * 3
                continue
            saving = savings[number]
            cut = f"{saving['rows']:,} ({_percent(saving['rows'], rows)})"
            line += [
                _Number(f"{saving['threshold']:g}"),
                _Number(cut),
                _Number(short_number(saving["bytes"], binary=True)),
            ]
        lines.append(line)
    return _html_table(header, lines)


def _growth(checkpoints: Sequence[Checkpoint], names: Sequence[str]) -> str:
    labels = _labels([shown_path(checkpoint.path) for checkpoint in checkpoints])
    rows, sizes = (
        {name: [getattr(c.tables[name].schema, what) if name in c.tables else 0 for c in checkpoints] for name in names}
        for what in ("rows", "bytes")
    )
    header: list[str | _Number] = [
        "checkpoint",
        *map(_Number, ["rows", "bytes of tables", "rows since the one before"]),
    ]
    lines: list[list[str | _Number]] = []
    before: int | None = None
    for number, checkpoint in enumerate(checkpoints):
        total = sum(line[number] for line in rows.values())
        size = sum(line[number] for line in sizes.values())
        since = "" if before is None else f"{total - before:+,}"
        lines.append(
            [
                _text(shown_path(checkpoint.path)),
                _Number(f"{total:,}"),
                _Number(short_number(size, binary=True)),
                _Number(since),
            ]
        )
        before = total
    return "\n".join(
        [
            "<section>",
            "<h2>Growth by checkpoint</h2>",
            '<div class="plots">',
            _figure("Rows", "of each table", growth_plot(labels, rows, "rows", binary=False), ""),
            _figure("Bytes", "of each table", growth_plot(labels, sizes, "bytes", binary=True), ""),
            "</div>",
            _html_table(header, lines),
            "</section>",
        ]
    )


def _labels(paths: Sequence[str]) -> list[str]:
    """Return what tells the paths apart: their last names, or more of them where those are the same.

    >>> _labels(["a/model.ckpt-1", "a/model.ckpt-2"]), _labels(["1/model", "2/model"])
    (['model.ckpt-1', 'model.ckpt-2'], ['1/model', '2/model'])
    """
    split = [path.rstrip("/").split("/") for path in paths]
    for count in range(1, max(map(len, split))):
        labels = ["/".join(names[-count:]) for names in split]
        if len(set(labels)) == len(set(paths)):
            return labels
    return list(paths)


def _figure(question: str, note: str, svg: str | None, instead: str) -> str:
    small = f"<small>{_text(note)}</small>" if note and svg else ""
    content = svg or f'<p class="quiet">{_text(instead)}</p>'
    return f"<figure><figcaption>{_text(question)}{small}</figcaption>{content}</figure>"


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<div><b>{_text(value)}</b><span>{_text(name)}</span></div>" for value, name in facts)
    return f'<div class="facts">{cells}</div>'


def _html_table(header: Sequence[str | _Number], rows: Sequence[Sequence[str | _Number]]) -> str:
    def cell(tag: str, content: str | _Number) -> str:
        if isinstance(content, _Number):
            return f'<{tag} class="n">{content.text}</{tag}>'
        return f"<{tag}>{content}</{tag}>"

    lines = ["".join(cell("th", content) for content in header)]
    lines += ["".join(cell("td", content) for content in row) for row in rows]
    return '<div class="wide"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _text(text: str) -> str:
    """Escape a text for HTML, on one line."""
    return escape("".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text))


def _alarming(count: int) -> str:
    return f'<span class="bad">{count:,}</span>' if count else "0"


def _short(value: Any) -> str:
    return "&ndash;" if value is None else f"{value:.4g}" if isinstance(value, float) else _text(str(value))


def _percent(count: int, total: int) -> str:
    share = 100 * count / total if total else 0.0
    return "<0.1%" if 0 < share < 0.1 else ">99.9%" if 99.9 < share < 100 else f"{share:.3g}%"
