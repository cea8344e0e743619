"""`kvtools diff`: what changed between two checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvtools.chain_increment import write_increment
from kvtools.cli.account import print_account
from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns, shown
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    AsJson,
    Dim,
    DryRun,
    Force,
    KeyDtype,
    Memory,
    Output,
    Source,
    ValueDtype,
    Workers,
    bytes_of,
    check_output_options,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.cli.terminal import prose
from kvtools.diff import CheckpointDiff, ColumnDiff, compare_checkpoints
from kvtools.errors import UsageError
from kvtools.field_names import field_of
from kvtools.json_numbers import json_ready
from kvtools.shown_tables import counted

_NAMES_SHOWN = 10


def run(
    a: Annotated[str, typer.Argument(metavar="A", help="The checkpoint before: of any dialect.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The checkpoint after: of any dialect.")],
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="[OUT]", help="With --output: what to write.", callback=no_standard_output, show_default=False
        ),
    ] = None,
    *,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="delta", help="Write what changed as an increment of A, to OUT."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table", metavar="NAME", help="Only this table, those like 'deep/*', or A_NAME=B_NAME; may be repeated."
        ),
    ] = None,
    rtol: Annotated[float, typer.Option("--rtol", metavar="R", help="Numbers may be off by R times their size.")] = 0.0,
    atol: Annotated[float, typer.Option("--atol", metavar="D", help="Numbers may be off by D.")] = 0.0,
    top: Annotated[int, typer.Option("--top", metavar="N", help="Name the N rows of a table that moved most.")] = 0,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="Exit with 0 also where they differ.")] = False,
    dialect_a: Annotated[str | None, typer.Option("--dialect-a", metavar="NAME", help="The dialect of A.")] = None,
    dialect_b: Annotated[str | None, typer.Option("--dialect-b", metavar="NAME", help="The dialect of B.")] = None,
    key_dtype: KeyDtype = None,
    value_dtype: ValueDtype = None,
    dim: Dim = None,
    force: Force = False,
    dry_run: DryRun = False,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints, of any dialects: rows added, removed and changed, and how far they moved.

    Rows are matched by key, tables and dense variables by name. Without --rtol and --atol, numbers are the
    same if their bits are. The exit status is 0 if nothing differs and 3 if something does.

    With --output delta, what leads from A to B is written to OUT as an increment: rows that changed or were born,
    with all their columns, keys that went, and B's dense variables. `kvtools apply A OUT C` makes B of it again.
    A and B are in kvtools' own layout, or chains; where A is a chain, OUT goes on with it as the next member.
    The exit status is 0 then.

    \b
    Examples:
      kvtools diff model.ckpt-100 model.ckpt-200 --top 10
      kvtools diff model.ckpt-100 tables.h5
      kvtools diff monday.ckpt tuesday.ckpt --output delta tuesday.delta
      kvtools diff train tuesday.ckpt --output delta train/ckpt-18.delta
      kvtools diff model.ckpt-100 renamed.ckpt --table user_emb=towers/user --rtol 1e-3
    """
    if top < 0:
        raise UsageError(f"comparing checkpoints: got --top {top}, expected 0 or more")
    if (output is None) != (out is None):
        raise UsageError("comparing checkpoints: expected both or neither of --output delta and OUT")
    check_output_options(output, force=force, dry_run=dry_run, option="--output delta")
    if out is not None:
        if output != "delta":
            raise UsageError(f"comparing checkpoints: got --output {output}, expected delta")
        if table or rtol or atol or top or dialect_a or dialect_b:
            raise UsageError(
                "comparing checkpoints: --table, --rtol, --atol, --top and --dialect are for what is shown; leave them"
                " out with --output delta, which has every bit that changed"
            )
        _write_delta(a, b, out, Output(force, memory, workers, dry_run), as_json)
        return
    before = Source(dialect_a, key_dtype, value_dtype, dim).open(a, memory)
    after = Source(dialect_b, key_dtype, value_dtype, dim).open(b, memory)
    with progress_bar("comparing") as progress:
        diff = compare_checkpoints(
            before,
            after,
            tables=table or [],
            rtol=rtol,
            atol=atol,
            memory=bytes_of(memory),
            top=top,
            workers=workers,
            progress=progress,
        )
    if as_json:
        print(dumps(json_ready(_described(diff))))
    else:
        _print(diff)
    if not (diff.same or exit_zero):
        raise typer.Exit(3)


def _write_delta(a: str, b: str, out: str, output: Output, as_json: bool) -> None:
    with progress_bar("comparing") as progress:
        account, changes, record = write_increment(
            a,
            b,
            out,
            open_options=Source().options(output.memory),
            options=output.options(),
            workers=output.workers,
            progress=progress,
        )
    if not as_json:
        header = ["table", "born", "changed", "removed", "unchanged"]
        lines = [
            [shown(one.table), f"{one.born:,}", f"{one.changed:,}", f"{one.removed:,}", f"{one.unchanged:,}"]
            for one in changes
        ]
        print(columns(header, lines, right=frozenset({1, 2, 3, 4})))
        print(prose(f"increment {record.sequence} after {record.sequence - 1}, of chain {record.chain}") + "\n")
    print_account(
        account,
        as_json=as_json,
        planned=output.dry_run,
        sequence=record.sequence,
        chain=record.chain,
        changes=[dataclasses.asdict(one) for one in changes],
    )


def _described(diff: CheckpointDiff) -> dict[str, Any]:
    """Return a comparison as it stands in JSON."""
    record = {**dataclasses.asdict(diff), "same": diff.same}
    for table in record["tables"]:
        columns_of = {field_of(name): column for name, column in table["columns"].items()}
        table["columns"] = {name: {**column, "name": name} for name, column in columns_of.items()}
        for where in ("only_in_a", "only_in_b"):
            table[where] = [field_of(name) for name in table[where]]
    return record


def _print(diff: CheckpointDiff) -> None:
    print(f"a: {diff.path_a} ({diff.dialect_a})")
    print(f"b: {diff.path_b} ({diff.dialect_b})")
    if diff.tables:
        print()
        _print_tables(diff)
    _print_changes(diff)
    _print_movers(diff)
    lines = [
        *(f"{shown(t.name_a)}: only in a: {', '.join(map(shown, t.only_in_a))}" for t in diff.tables if t.only_in_a),
        *(f"{shown(t.name_a)}: only in b: {', '.join(map(shown, t.only_in_b))}" for t in diff.tables if t.only_in_b),
        *(f"{shown(t.name_a)}: differs: {shown(extra)}" for t in diff.tables for extra in t.extras),
        *(f"{shown(t.name_a)}: added keys {_few(t.added_keys, t.added)}" for t in diff.tables if t.added),
        *(f"{shown(t.name_a)}: removed keys {_few(t.removed_keys, t.removed)}" for t in diff.tables if t.removed),
        *_alone("tables", "a", diff.tables_only_in_a),
        *_alone("tables", "b", diff.tables_only_in_b),
        *_alone("dense variables", "a", diff.variables_only_in_a),
        *_alone("dense variables", "b", diff.variables_only_in_b),
        *(f"{shown(t.name_a)}: in form alone: {'; '.join(map(shown, t.schema))}" for t in diff.tables if t.schema),
    ]
    if lines:
        print()
        print("\n".join(map(prose, lines)))
    print()
    if diff.same:
        rows = sum(table.rows_a for table in diff.tables)
        there = ((len(diff.tables), "table"), (rows, "row"), (len(diff.variables), "dense variable"))
        print(prose(f"the same: {', '.join(counted(count, thing) for count, thing in there)}"))
    else:
        print("different")


def _print_tables(diff: CheckpointDiff) -> None:
    rows = [
        [
            shown(t.name_a if t.name_a == t.name_b else f"{t.name_a} = {t.name_b}"),
            f"{t.rows_a:,}",
            f"{t.rows_b:,}",
            f"{t.added:,}",
            f"{t.removed:,}",
            f"{t.changed:,}",
            f"{t.unchanged:,}",
        ]
        for t in diff.tables
    ]
    header = ["table", "rows a", "rows b", "added", "removed", "changed", "unchanged"]
    print(columns(header, rows, right=frozenset(range(1, 7))))


def _print_changes(diff: CheckpointDiff) -> None:
    header = ["changed", "rows", "max", "mean", "L2", "relative", "non-finite"]
    right = frozenset(range(1, 7))
    rows = [
        [shown(f"{t.name_a} {field_of(name)}"), *_numbers(column)]
        for t in diff.tables
        for name, column in t.columns.items()
        if column.changed
    ]
    if rows:
        print()
        print(columns(header, rows, right=right))
    changed = [variable for variable in diff.variables if not variable.same]
    if changed:
        header[:2] = ["changed variable", "numbers"]
        rows = []
        for v in changed:
            if v.shape_a != v.shape_b:
                rows.append([f"{shown(v.name)} {list(v.shape_a)} -> {list(v.shape_b)}", *["-"] * 6])
            elif v.numbers is None:
                rows.append([shown(v.name), f"{v.changed:,}", *["-"] * 5])
            else:
                rows.append([shown(v.name), *_numbers(v.numbers)])
        print()
        print(columns(header, rows, right=right))


def _print_movers(diff: CheckpointDiff) -> None:
    rows = [
        [shown(t.name_a), str(m.key), f"{m.l2_change:.6g}", f"{m.l2_before:.6g}", f"{m.l2_after:.6g}"]
        for t in diff.tables
        for m in t.movers
    ]
    if rows:
        print()
        print(columns(["moved most", "key", "|change|", "|before|", "|after|"], rows, right=frozenset({1, 2, 3, 4})))


def _numbers(column: ColumnDiff) -> list[str]:
    changes = (column.max_change, column.mean_change, column.l2_change, column.relative_change)
    return [f"{column.changed:,}", *(f"{change:.6g}" for change in changes), f"{column.non_finite:,}"]


def _few(keys: Sequence[int], count: int) -> str:
    return ", ".join(map(str, keys)) + (", ..." if count > len(keys) else "")


def _alone(what: str, where: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [f"{what} only in {where}: {', '.join(map(shown, names[:_NAMES_SHOWN]))}{more}"]
