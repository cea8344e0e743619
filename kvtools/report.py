"""A page of plots about the tables of a checkpoint: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from kvtools import __version__
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import TableSchema, row_bytes
from kvtools.engine import Engine
from kvtools.errors import one_line
from kvtools.explore.command import ClipSource, clip_command
from kvtools.quantized_rows import stored_row_bytes
from kvtools.remote.paths import local_path, shown_path
from kvtools.replace_output import check_free, replace_files
from kvtools.report_changes import QUANTILES, Changes, TableChange, changes_since, describe_change
from kvtools.report_plots import (
    Plot,
    clip_plot,
    frequency_clip_plot,
    growth_plot,
    norm_plot,
    parts_plot,
    version_plot,
    zipf_plot,
)
from kvtools.short_numbers import short_number
from kvtools.stats import ColumnStats, TableStats, describe_stats, table_stats
from kvtools.table_answer import Advice, advise_table, describe_table
from kvtools.thresholds import Threshold, age_thresholds, freq_thresholds, norm_thresholds
from kvtools.visible_text import html_text

_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_FEW = 5
_ADVICE_SHOWN = 12
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
.answer { border-left: 4px solid var(--line-0); padding: .1rem 0 .1rem 1.1rem; margin: 1.2rem 0; }
ul { margin: .5rem 0; padding-left: 1.2rem; } li { margin: .4rem 0; overflow-wrap: anywhere; }
pre { background: var(--card); border-radius: 6px; padding: .5rem .8rem; margin: .3rem 0; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
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


@dataclass(frozen=True)
class _Reported:
    """A table with all that is told of it."""

    schema: TableSchema
    stats: TableStats
    advice: list[Advice]
    change: TableChange | None


def write_report(
    checkpoints: Sequence[Checkpoint],
    output: str | Path,
    *,
    compare: Checkpoint | None = None,
    source: str | None = None,
    tables: Sequence[str] = (),
    title: str | None = None,
    memory: int = DEFAULT_MEMORY,
    workers: int | None = None,
    engine: Engine = "local",
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a report about the last of `checkpoints`, and how they grew if there are several; return its bytes.

    Args:
        checkpoints: one, or several of one model, oldest first. Only the last one's rows are read.
        output: the HTML file; appears whole or not at all.
        compare: an older checkpoint: what changed since then is told, and its rows are read, too.
        source: what commands on the page name as the checkpoint; its path if None.
        tables: names of tables; all if empty.
        title: what stands above; made from the path if None.
        memory: see `kvtools.stats.table_stats`, as for `workers`, `engine` and `progress`.
        workers: parts at once.
        engine: where they are read.
        force: replace an `output` that is there.
        dry_run: make the page, and write none.
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
    read = [*checkpoints, *([] if compare is None else [compare])]
    check_free(output.absolute(), force=force, read=[one.path for one in read])
    checkpoint = checkpoints[-1]
    readers = checkpoint.select(tables)
    stats = table_stats(readers, fine=True, memory=memory, workers=workers, engine=engine, progress=progress)
    schemas = [reader.schema for reader in readers]
    changes = None
    if compare is not None:
        names = [schema.name for schema in schemas]
        changes = changes_since(
            compare, checkpoint, names, memory=memory, workers=workers, engine=engine, progress=progress
        )
    page = render_report(checkpoints, schemas, stats, changes=changes, source=source, title=title).encode()
    with replace_files(output, force=force, dry_run=dry_run) as staging:
        staging.write_bytes(page)
    return len(page)


def render_report(
    checkpoints: Sequence[Checkpoint],
    schemas: Sequence[TableSchema],
    stats: dict[str, TableStats],
    *,
    changes: Changes | None = None,
    source: str | None = None,
    title: str | None = None,
    when: datetime | None = None,
) -> str:
    """Return the page about these tables of the last of `checkpoints`, as HTML.

    `stats` are the tables' statistics by name, with fine norms; `changes` what changed since another checkpoint;
    `source` what commands name as the checkpoint, its path if None; `when` the time to show, now if None.
    """
    checkpoint = checkpoints[-1]
    title = title or f"Embedding tables of {Path(checkpoint.path).name or checkpoint.path}"
    when = when or datetime.now(timezone.utc)
    source = str(checkpoint.path) if source is None else source
    tables = [
        _Reported(
            schema,
            stats[schema.name],
            advise_table(schema, stats[schema.name], source),
            None if changes is None else changes.tables.get(schema.name),
        )
        for schema in sorted(schemas, key=lambda schema: -schema.bytes)
    ]
    body = [
        f"<h1>{html_text(title)}</h1>",
        f'<p class="quiet">{html_text(shown_path(checkpoint.path))} &middot; {html_text(checkpoint.dialect)} &middot; '
        f'<time datetime="{when:%Y-%m-%dT%H:%M:%SZ}">{when:%Y-%m-%d %H:%M} UTC</time></p>',
        _answer(checkpoint, tables, source, changes),
        _overview(checkpoint, tables),
    ]
    if len(checkpoints) > 1:
        body.append(_growth(checkpoints, [table.schema.name for table in tables]))
    for number, table in enumerate(tables):
        body.append(_table(number, table, with_plots=number < _TABLES_PLOTTED))
    body.append(f"<footer>Written by kvtools {__version__}.</footer>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _answer(checkpoint: Checkpoint, tables: Sequence[_Reported], source: str, changes: Changes | None) -> str:
    """Say what the tables are like and what to do, before all pictures."""
    lines = [f'<p class="bad">{line}</p>' for line in _broken(checkpoint)]
    if not tables:
        return "\n".join([*lines, "<p>There are no key-value tables here.</p>"])
    total = sum(table.schema.bytes for table in tables)
    largest = tables[0].schema
    size = f"{sum(table.schema.rows for table in tables):,} rows, {short_number(total, binary=True)}"
    said = f"{len(tables):,} tables: {size}."
    if len(tables) == 1:
        said = f"One table: {size}."
    elif total:
        half = int(np.searchsorted(np.cumsum([table.schema.bytes for table in tables]), total / 2)) + 1
        share = f"{_percent(largest.bytes, total)} of the bytes"
        said += f" The largest, <strong>{html_text(largest.name)}</strong>, has {share}"
        said += f"; the {half:,} largest have half of them." if half > 1 else "."
    lines.append(f"<p>{said}</p>")
    if changes is not None:
        lines.append(f"<p>{_changed(tables, changes)}</p>")
    cuts = [(table, advice) for table in tables for advice in table.advice[:_FEW] if advice.threshold is not None]
    first: dict[str, tuple[_Reported, Advice]] = {}
    for table, advice in cuts:  # the one of each table that saves most
        first.setdefault(table.schema.name, (table, advice))
    wrong = [(table, advice) for table in tables for advice in table.advice if advice.threshold is None]
    saved = sum(advice.bytes for _, advice in first.values())
    best = sorted(first.values(), key=lambda one: -one[1].bytes)
    if saved:
        lines.append(
            f"<p>Leaving out what is hardly worth its memory saves <strong>{short_number(saved, binary=True)}</strong>,"
            f" {_percent(saved, total)} of all:</p>"
        )
        chosen = [(table.schema.name, [advice.threshold]) for table, advice in best if advice.threshold is not None]
        place = ClipSource.of(source, checkpoint.dialect)
        lines.append(_advice_list(best[:_ADVICE_SHOWN]))
        if len(best) > _ADVICE_SHOWN:
            lines.append(f'<p class="quiet">And so of {len(best) - _ADVICE_SHOWN:,} more tables, see below.</p>')
        if 1 < len(best) <= _ADVICE_SHOWN:
            lines.append(f"<p>All of this at once:</p><pre>{_lines(clip_command(place, chosen, place.output))}</pre>")
    if wrong:
        lines += ["<p>What is wrong, or uneven:</p>", _advice_list(wrong[:_ADVICE_SHOWN])]
        if len(wrong) > _ADVICE_SHOWN:
            lines.append(f'<p class="quiet">And {len(wrong) - _ADVICE_SHOWN:,} more, see below.</p>')
    if not saved and not wrong:
        lines.append("<p>Nothing stands out: no bad numbers, and no rows that are hardly ever looked up.</p>")
    return '<div class="answer">\n' + "\n".join(lines) + "\n</div>"


def _advice_list(advice: Sequence[tuple[_Reported, Advice]]) -> str:
    items = (
        f"<li><strong>{html_text(table.schema.name)}</strong>: {html_text(one.text)}"
        f"<pre>{_lines(one.command)}</pre></li>"
        for table, one in advice
    )
    return f"<ul>{''.join(items)}</ul>"


def _changed(tables: Sequence[_Reported], changes: Changes) -> str:
    """Say what changed in all tables together."""
    diffs = [table.change.diff for table in tables if table.change is not None and table.change.diff is not None]
    said = f"Since {html_text(changes.path)}: {sum(diff.added for diff in diffs):,} rows came,"
    said += f" {sum(diff.removed for diff in diffs):,} went, {sum(diff.changed for diff in diffs):,} changed"
    for names, what in ((changes.added, "new"), (changes.removed, "gone")):
        if names:
            shown = ", ".join(html_text(name) for name in names[:_FEW])
            more = f" and {len(names) - _FEW:,} more" if len(names) > _FEW else ""
            said += f"; {what}: {'table' if len(names) == 1 else 'tables'} {shown}{more}"
    return f"{said}."


def _broken(checkpoint: Checkpoint) -> list[str]:
    return [
        f"Table {html_text(name)} cannot be read: {html_text(one_line(str(error)))}"
        for name, error in checkpoint.broken.items()
    ]


def _overview(checkpoint: Checkpoint, tables: Sequence[_Reported]) -> str:
    total = sum(table.schema.bytes for table in tables)
    parts = [
        _facts(
            [
                (f"{len(tables):,}", "table" if len(tables) == 1 else "tables"),
                (f"{sum(table.schema.rows for table in tables):,}", "rows"),
                (short_number(total, binary=True), "in tables"),
                (f"{len(checkpoint.variables):,}", "dense variables"),
                (short_number(sum(variable.bytes for variable in checkpoint.variables), binary=True), "in variables"),
            ]
        )
    ]
    if not tables:
        return parts[0]
    header: list[str | _Number]
    header = ["table", "key", "value", _Number("dim"), _Number("rows"), _Number("parts"), "slots", _Number("bytes")]
    header += [_Number("of all"), _Number("to save"), ""]
    rows: list[list[str | _Number]] = []
    for number, table in enumerate(tables):
        schema, faults = table.schema, _faults(table.stats)
        saved = max((advice.bytes for advice in table.advice), default=0)
        rows.append(
            [
                f'<a href="#table-{number}">{html_text(schema.name)}</a>',
                html_text(schema.key_dtype),
                html_text(schema.value_dtype),
                _Number(str(schema.dim)),
                _Number(f"{schema.rows:,}"),
                _Number(f"{schema.parts:,}"),
                html_text(", ".join(slot.name for slot in schema.slots)) or "none",
                _Number(short_number(schema.bytes, binary=True)),
                _Number(_percent(schema.bytes, total)),
                _Number(short_number(saved, binary=True) if saved else ""),
                f'<span class="bad">{html_text(", ".join(faults))}</span>' if faults else "",
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


def _table(number: int, table: _Reported, *, with_plots: bool) -> str:
    schema, stats, change = table.schema, table.stats, table.change
    found = describe_stats(schema, stats)
    width = stored_row_bytes(schema)
    freqs, skew = found["freqs"], found["parts"]
    lines = [f'<section class="table" id="table-{number}">', f"<h2>{html_text(schema.name)}</h2>"]
    lines.append(
        f'<p class="quiet">{html_text(schema.key_dtype)} keys, {schema.dim} {html_text(schema.value_dtype)} a row'
        + (f", slots {html_text(', '.join(slot.name for slot in schema.slots))}" if schema.slots else ", no slots")
        + "</p>"
    )
    lines += [f'<p class="quiet">Note: {html_text(note)}</p>' for note in schema.notes]
    lines.append(f"<p>{' '.join(html_text(sentence) for sentence in describe_table(schema, stats))}</p>")
    if table.advice:
        items = (f"<li>{html_text(one.text)}<pre>{_lines(one.command)}</pre></li>" for one in table.advice)
        lines.append(f"<ul>{''.join(items)}</ul>")
    elif stats.rows:
        lines.append("<p>Nothing to do stands out.</p>")
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
    lines.append(_facts(facts))
    if change is not None:
        lines += _change(change, stats, with_plots=with_plots)
    if with_plots:
        lines += ['<div class="plots">', *_plots(schema, stats, found), "</div>"]
    else:
        lines.append(
            f'<p class="quiet">Only the {_TABLES_PLOTTED} largest tables have plots; name this one with --table.</p>'
        )
    lines += ["<h3>Numbers</h3>", _numbers(found)]
    lines += ["<h3>What a threshold cuts</h3>", _savings(schema, stats), "</section>"]
    return "\n".join(lines)


def _change(change: TableChange, stats: TableStats, *, with_plots: bool) -> list[str]:
    """Say what changed in a table: in words, in pictures, in numbers."""
    lines = ["<h3>What changed</h3>", f"<p>{html_text(describe_change(change, stats))}</p>"]
    if change.refused:
        lines.append(f'<p class="quiet">Rows were not compared: {html_text(one_line(change.refused))}</p>')
    before, diff = change.before, change.diff
    if with_plots:
        lines.append('<div class="plots">')
        lines.append(
            _figure(
                "Did norms drift?",
                "shares of the rows, now and before",
                norm_plot(stats.fine["l2"], before.fine["l2"]) if stats.fine and before.fine else None,
                "There are no norms to compare.",
            )
        )
        if stats.freqs is not None and before.freqs is not None:
            plot = zipf_plot(stats.freqs, before.freqs)
            lines.append(_figure("Did frequencies?", "frequency by rank, now and before", plot, "All are zero."))
        lines.append("</div>")
    norms = [one.fine["l2"] for one in (before, stats) if one.fine]
    if len(norms) == 2 and all(one.rows for one in norms):
        header: list[str | _Number] = ["norm", *(_Number(f"{100 * share:g}%") for share in QUANTILES)]
        rows: list[list[str | _Number]] = [
            [name, *(_Number(_short(one.quantile(share))) for share in QUANTILES)]
            for name, one in zip(("before", "now"), norms, strict=True)
        ]
        lines.append(_html_table(header, rows))
    if diff is not None and diff.movers:
        movers: list[list[str | _Number]] = [
            [str(row.key), *(_Number(f"{number:.4g}") for number in (row.l2_change, row.l2_before, row.l2_after))]
            for row in diff.movers
        ]
        heads: list[str | _Number] = [
            "rows that moved furthest: key",
            _Number("by"),
            _Number("norm before"),
            _Number("now"),
        ]
        lines.append(_html_table(heads, movers))
    return lines


def _plots(schema: TableSchema, stats: TableStats, found: dict[str, Any]) -> list[str]:
    width, versions, skew = stored_row_bytes(schema), found["versions"], found["parts"]
    fine = stats.fine.get("l2")
    none = "There is no row with a norm to plot."
    if fine is not None and fine.smallest == fine.largest and fine.smallest > 0:
        none = f"All norms are {fine.smallest:.6g}."
    plots = [
        _figure(
            "How large are the rows?",
            f"{_outside(stats.values)} have no place on this scale" if _outside(stats.values) else "no row is all zero",
            norm_plot(fine) if fine is not None else None,
            none,
        ),
        _figure(
            "What would clipping save?",
            "rows whose numbers, or whose norm, are below the threshold",
            clip_plot(stats, width),
            "There is no row with a norm to cut by.",
        ),
    ]
    if stats.freqs is None:
        plots.append(_figure("How often are keys seen?", "", None, "This table records no frequencies."))
    else:
        fit = stats.freqs.zipf_fit()
        law = (
            "no power law fits"
            if fit is None
            else f"Zipf exponent {fit.exponent:.2f} from rank {fit.first:,} to {fit.last:,}"
        )
        plots += [
            _figure(
                "How often are keys seen?",
                f"frequency by rank, {law}",
                zipf_plot(stats.freqs),
                "All frequencies are zero.",
            ),
            _figure(
                "What would a frequency filter save?",
                "rows that were seen less often than the threshold, and their lookups",
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
            html_text(name),
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


def _savings(schema: TableSchema, stats: TableStats) -> str:
    """Make the table of what thresholds cut that are percentiles of the rows, exactly, and what is saved."""
    fine = stats.fine
    rules: list[tuple[str, list[Threshold]]] = [
        ("frequency below", freq_thresholds(stats.freqs, _PERCENTILES) if stats.freqs else []),
        ("norm below", norm_thresholds(fine["l2"], _PERCENTILES) if fine else []),
        ("all |x| below", norm_thresholds(fine["abs"], _PERCENTILES, norm="abs") if fine else []),
        ("older than", age_thresholds(stats.versions, _PERCENTILES) if stats.versions else []),
    ]
    rules = [rule for rule in rules if rule[1]]
    if not rules:
        return "<p>No threshold parts these rows.</p>"
    header: list[str | _Number] = [_Number(text) for name, _ in rules for text in (name, "rows cut", "saved")]
    width, lines = row_bytes(schema), []
    for number in range(max(len(thresholds) for _, thresholds in rules)):
        line: list[str | _Number] = []
        for _, thresholds in rules:
            if number >= len(thresholds):
                line += [_Number("")] * 3
                continue
            one = thresholds[number]
            cut = f"{one.rows:,} ({_percent(one.rows, stats.rows)})"
            line += [_Number(one.label), _Number(cut), _Number(short_number(one.rows * width, binary=True))]
        lines.append(line)
    moment = next((one.options[-1] for name, thresholds in rules if name == "older than" for one in thresholds), "")
    note = f'<p class="quiet">Ages are counted from {html_text(moment)}.</p>' if moment else ""
    return _html_table(header, lines) + note


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
                html_text(shown_path(checkpoint.path)),
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


def _figure(question: str, note: str, plot: Plot | None, instead: str) -> str:
    small = f"<small>{html_text(note)}</small>" if note and plot else ""
    content = plot.svg() if plot else f'<p class="quiet">{html_text(instead)}</p>'
    return f"<figure><figcaption>{html_text(question)}{small}</figcaption>{content}</figure>"


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<div><b>{html_text(value)}</b><span>{html_text(name)}</span></div>" for value, name in facts)
    return f'<div class="facts">{cells}</div>'


def _html_table(header: Sequence[str | _Number], rows: Sequence[Sequence[str | _Number]]) -> str:
    def cell(tag: str, content: str | _Number) -> str:
        if isinstance(content, _Number):
            return f'<{tag} class="n">{content.text}</{tag}>'
        return f"<{tag}>{content}</{tag}>"

    lines = ["".join(cell("th", content) for content in header)]
    lines += ["".join(cell("td", content) for content in row) for row in rows]
    return '<div class="wide"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _lines(text: str) -> str:
    """Escape a text of several lines for HTML."""
    return "\n".join(html_text(line) for line in text.split("\n"))


def _alarming(count: int) -> str:
    return f'<span class="bad">{count:,}</span>' if count else "0"


def _short(value: Any) -> str:
    return "&ndash;" if value is None else f"{value:.4g}" if isinstance(value, float) else html_text(str(value))


def _percent(count: int, total: int) -> str:
    share = 100 * count / total if total else 0.0
    return "<0.1%" if 0 < share < 0.1 else ">99.9%" if 99.9 < share < 100 else f"{share:.3g}%"
