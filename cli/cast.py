"""`kvtools cast`: other types for values, slots and keys."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from kvtools.cast import ColumnCost, cast
from kvtools.cast_rows import cast_by_policy, cast_rows
from kvtools.cli.account import print_account
from kvtools.cli.clip_options import describe, describe_budget, print_budget, print_choices, warn_unmatched
from kvtools.cli.layout import columns, shown
from kvtools.cli.options import AsJson, Output, OutputPath, Source, SourcePath, Tables, To
from kvtools.cli.progress import progress_bar
from kvtools.cli.rounding import print_roundings
from kvtools.clip_policy import read_policy
from kvtools.errors import UsageError
from kvtools.field_names import field_of
from kvtools.narrow_rows import cosine_warning


def run(
    path: SourcePath,
    out: OutputPath,
    *,
    to_value_dtype: Annotated[
        str | None,
        typer.Option(
            "--to-value-dtype", metavar="T", help="The values' new type: float32, float16, bfloat16, float64."
        ),
    ] = None,
    to_slot_dtype: Annotated[
        str | None,
        typer.Option(
            "--to-slot-dtype", metavar="T", help="The slots' new type; that of the values where they have it now."
        ),
    ] = None,
    to_key_dtype: Annotated[
        str | None,
        typer.Option("--to-key-dtype", metavar="T", help="The keys' new type: int64, int32, uint64, uint32."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="T",
            help="Rows of floating-point numbers as float16, bfloat16, int8 or int4, for lookups.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="FILE", help="What rows become by table, and which to cut first, in TOML."),
    ] = None,
    to: To = None,
    table: Tables = None,
    output: Output,
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Change the types of values, optimizer slots and keys, and say what was lost by it.

    --dtype makes rows smaller for lookups: int8 and int4 have an offset and a scale for each row, tables of integers
    stay as they are, and errors and cosines are told. Optimizer slots keep their type, where OUT does not have one type
    for values and slots; then what they lose is told, too. --policy says it by table, in a file that `kvtools clip` and
    `kvtools export` take, too: rows that it cuts are left out first.

    Numbers are rounded to nearest, ties to even. The largest rounding error, and how many numbers became
    infinite or zero, are told for each column. A key that the new type does not hold is an error. OUT
    appears whole or not at all; it may be PATH itself with --force.

    \b
    Examples:
      kvtools cast model.ckpt-100 half/model.ckpt-100 --to-value-dtype bfloat16
      kvtools cast model.ckpt-100 half.h5 --to-value-dtype float16 --to-slot-dtype float32 --to hdf5
      kvtools cast model.ckpt-100 model.ckpt-100 --to-key-dtype int64 --table user_emb --force
      kvtools cast model.ckpt-100 small.kvsnap --dtype int4 --to snapshot
      kvtools cast model.ckpt-100 small.kvsnap --policy policy.toml --to snapshot
    """
    checkpoint = source.open(path, output.memory)
    options = output.options()
    if dtype is not None or policy is not None:
        if to_value_dtype or to_slot_dtype or to_key_dtype:
            which = f"--dtype {dtype}" if dtype is not None else f"--policy {policy}"
            raise UsageError(
                f"casting '{path}': got {which} and another type; it is for rows that are looked up, cast in two steps"
            )
        how: dict[str, Any] = {"to": to, "tables": table or (), "options": options, "workers": output.workers}
        told: dict[str, Any] = {}
        with progress_bar("casting") as progress:
            if policy is None:
                assert dtype is not None
                account, losses, slot_costs = cast_rows(checkpoint, out, dtype, progress=progress, **how)
            else:
                rules = read_policy(policy)
                warn_unmatched(rules, [*checkpoint.tables], policy)
                done = cast_by_policy(checkpoint, out, rules, dtype=dtype, progress=progress, **how)
                account, losses, slot_costs = done.account, done.losses, done.slot_costs
                told = {"clipped": [describe(choice) for choice in done.choices], **describe_budget(done.order)}
        if policy is not None and not as_json and done.choices:
            print_choices(done.choices)
            print_budget(done.order)
            print()
        becomes = {name: dtype or rules.dtypes([name])[name] for name in losses}
        for name, loss in losses.items():
            warning = cosine_warning(name, becomes[name], loss)
            if warning:
                print(f"kvtools: warning: {warning}", file=sys.stderr)
        if not as_json:
            print_roundings([(name, becomes[name], loss) for name, loss in losses.items()])
            if slot_costs:
                _print_costs(slot_costs)
        of_tables = {name: dataclasses.asdict(loss) for name, loss in losses.items()}
        of_slots = {name: _described(costs) for name, costs in slot_costs.items()}
        whole = not told.get("clipped")
        told |= {"roundings": of_tables, "casts": of_slots}
        print_account(account, as_json=as_json, planned=output.dry_run, whole=whole, **told)
        return
    with progress_bar("casting") as progress:
        account, costs = cast(
            checkpoint,
            out,
            value_dtype=to_value_dtype,
            slot_dtype=to_slot_dtype,
            key_dtype=to_key_dtype,
            to=to,
            tables=table or (),
            options=options,
            workers=output.workers,
            progress=progress,
        )
    if not as_json and any(costs.values()):
        _print_costs(costs)
    described = {name: _described(costs[name]) for name in costs}
    print_account(account, as_json=as_json, planned=output.dry_run, casts=described)


def _described(costs: Sequence[ColumnCost]) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(cost), "column": field_of(cost.column)} for cost in costs]


def _print_costs(costs: Mapping[str, Sequence[ColumnCost]]) -> None:
    rows = [
        [
            shown(name),
            shown(field_of(cost.column)),
            f"{cost.was} to {cost.became}",
            f"{cost.max_error:.3g}",
            f"{cost.overflowed:,}",
            f"{cost.vanished:,}",
        ]
        for name, of_table in costs.items()
        for cost in of_table
    ]
    header = ["table", "column", "cast", "largest error", "became infinite", "became zero"]
    print(columns(header, rows, right=frozenset({3, 4, 5})))
    print()
