"""`kvtools top`: the rows that come first by a number."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from kvtools.cli.layout import shown
from kvtools.cli.options import DEFAULT_MEMORY, Memory, Source, SourcePath, Tables, Where, Workers, bytes_of
from kvtools.cli.progress import progress_bar
from kvtools.cli.row_output import OutputDialect, RowForms, Rows, print_rows, tables_for
from kvtools.dialects.chunk import Columns
from kvtools.dialects.interface import TableReader
from kvtools.errors import CheckFailedError, UsageError
from kvtools.get import ChosenRows, ColumnChoice, read_rows
from kvtools.row_filter import condition_of
from kvtools.top import BUILT_IN, Top, overall, ranking, top_rows


def run(
    path: SourcePath,
    *,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="freq|norm|version|value-abs|EXPRESSION",
            help="What to compare; the frequency if left out, and the norm where no table has frequencies.",
        ),
    ] = None,
    ascending: Annotated[bool, typer.Option("--ascending", help="The smallest first.")] = False,
    limit: Annotated[int, typer.Option("-n", "--limit", metavar="N", help="How many rows.")] = 10,
    together: Annotated[
        bool, typer.Option("--overall", help="N rows of all tables together, instead of each table's.")
    ] = False,
    where: Where = None,
    table: Tables = None,
    to: OutputDialect = None,
    forms: RowForms,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
) -> None:
    """Print the rows that come first: hot keys, the largest norms, the oldest and the newest rows.

    value-abs is the largest absolute value in a row; an expression is one of `kvtools sql`, as in
    'freq / norm'. Equal rows come in the order of their keys. Rows for which there is no number (NaN)
    are left out, and counted on stderr. Tables that have not what is compared are left out, unless they are
    named. Forms are those of `kvtools get`; text has no slots, unless --columns names them. Exits with 3 where there
    is no row.

    \b
    Examples:
      kvtools top model.ckpt-100
      kvtools top model.ckpt-100 --by norm -n 20 --table 'user*'
      kvtools top model.ckpt-100 --by version --ascending --overall
      kvtools top model.ckpt-100 --by 'freq / norm' --where 'norm > 0' --table user_emb --csv
    """
    target = forms.target(to)
    if limit < 0:
        raise UsageError(f"ranking rows: got --limit {limit}, expected 0 or more")
    condition = condition_of(where)
    checkpoint = source.open_for(table or [], path, memory)
    forms.check_place(target, [checkpoint.path])
    tables = checkpoint.select(table or [])
    if by is None:
        by = "freq" if not tables or any(reader.schema.has_freqs for reader in tables) else "norm"
    chosen = ranking(by)
    tables = tables_for(tables, [chosen.columns_of, *([condition.columns_of] if condition else [])], table)
    choice = forms.choice(tables, target)
    if forms.text and forms.choose is None:
        choice = ColumnChoice(Columns(values=True, freqs=True, versions=True), frozenset(), ("norm",))
    tops = []
    with progress_bar("reading") as progress:
        for reader in tables:
            tops.append(
                top_rows(
                    reader, chosen, limit, ascending=ascending, where=condition, workers=workers, progress=progress
                )
            )
    for top in tops:
        if top.without:
            rows = "1 row has" if top.without == 1 else f"{top.without:,} rows have"
            print(
                f"kvtools: {shown(top.table)}: {rows} no number to compare ({_reason(by)}): left out", file=sys.stderr
            )
    first = overall(tops, limit, ascending=ascending) if together else None
    if first is not None:
        tops = [_only(top, [at for of, at in first if of == which]) for which, top in enumerate(tops)]
    if target is not None:
        written = [ChosenRows(reader, top.rows) for reader, top in zip(tables, tops, strict=True)]
        forms.write([one for one in written if one.rows] or written, target, memory, by=by)
    else:
        found = _rows(tables, tops, choice, by, bytes_of(memory))
        if first is not None:
            found = _in_order(found, tables, [of for of, _ in first])
        print_rows(found, forms, choice, tables[0] if tables else None, by=by)
    if not any(len(top.rows) for top in tops):
        meets = "" if condition is None else " that meets --where"
        raise CheckFailedError(f"ranking rows: there is none to show in the tables{meets}")


def _reason(by: str) -> str:
    """Return why a row may have no number."""
    if by in BUILT_IN:
        return "NaN"
    return "NULL or NaN; value[n] is NULL where rows have no nth number" if "[" in by else "NULL or NaN"


def _only(top: Top, at: Sequence[int]) -> Top:
    return dataclasses.replace(top, rows=top.rows[at], keys=top.keys[at], numbers=top.numbers[at])


def _rows(
    tables: Sequence[TableReader], tops: Sequence[Top], choice: ColumnChoice, by: str, memory: int
) -> Iterator[Rows]:
    """Yield the rows, table by table, with what they were compared by where no column shows it."""
    asked = choice.columns
    told = {"key": True, "freq": asked.freqs, "version": asked.versions, **dict.fromkeys(choice.computed, True)}.get(
        by, False
    )
    for table, top in zip(tables, tops, strict=True):
        at = 0
        for chunk in read_rows(table, top.rows, choice.to_read, memory=memory):
            numbers = {} if told else {by: top.numbers[at : at + len(chunk)]}
            at += len(chunk)
            yield Rows(table, chunk, numbers)


def _in_order(rows: Iterator[Rows], tables: Sequence[TableReader], order: Sequence[int]) -> Iterator[Rows]:
    """Yield rows one by one, as tables are named in `order`; the rows of each table stay in their order."""
    single: dict[str, list[Rows]] = {table.schema.name: [] for table in tables}
    for some in rows:
        single[some.table.schema.name] += [
            Rows(some.table, some.chunk.take([at]), {name: of[at : at + 1] for name, of in some.numbers.items()})
            for at in range(len(some.chunk))
        ]
    queues = {name: iter(found) for name, found in single.items()}
    for which in order:
        yield next(queues[tables[which].schema.name])
