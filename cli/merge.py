"""`kvtools merge`: one checkpoint of several."""

from __future__ import annotations

import dataclasses
from typing import Annotated, get_args

import typer

from kvtools.cli.account import print_account
from kvtools.cli.layout import columns, shown
from kvtools.cli.options import (
    AsJson,
    Output,
    Source,
    To,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.errors import UsageError
from kvtools.merge import Merged, OnConflict, merge


def run(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH... OUT", help="The checkpoints, later ones replacing earlier ones; last, OUT."),
    ],
    *,
    on_conflict: Annotated[
        str,
        typer.Option(
            "--on-conflict",
            metavar="last|first|newest|sum|mean|error",
            help="What becomes of a key that several have.",
        ),
    ] = "last",
    slots: Annotated[
        str,
        typer.Option("--slots", metavar="same|common", help="Ask for the same slots, or keep those that all have."),
    ] = "same",
    table: Annotated[
        list[str] | None, typer.Option("--table", metavar="NAME", help="Merge only this table; may be repeated.")
    ] = None,
    into: Annotated[
        str | None,
        typer.Option("--into", metavar="NAME", help="Merge all tables, or those of --table, into one table NAME."),
    ] = None,
    parts: Annotated[
        int | None,
        typer.Option("--parts", metavar="N", help="How many parts a merged table gets; as in the first checkpoint."),
    ] = None,
    to: To = None,
    output: Output,
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Make one checkpoint of several: tables of one name become one table, with each key once.

    For shards that ranks wrote, or a base and its increments: keys that an increment lists as deleted are
    removed from what stands before it. Tables that are not merged and the dense variables are those of the
    last checkpoint that has them (of the first with --on-conflict first). With sum and mean, values and
    slots are added up or averaged, frequencies added up, and the largest version kept. OUT appears whole
    or not at all; it may be one of the PATHs with --force.

    \b
    Examples:
      kvtools merge rank0.ckpt rank1.ckpt rank2.ckpt whole.ckpt --on-conflict error
      kvtools merge full.ckpt-100 incr.ckpt-110 incr.ckpt-120 full.ckpt-120
      kvtools merge a.ckpt b.ckpt mean.ckpt --on-conflict mean --slots common
      kvtools merge model.ckpt-100 out.ckpt --into emb --table emb_old --table emb_new
    """
    if len(paths) < 2:
        raise UsageError(f"merging {paths}: expected the checkpoints and then OUT; see `kvtools merge --help`")
    if on_conflict not in get_args(OnConflict):
        raise UsageError(f"merging: got --on-conflict {on_conflict!r}, expected {', '.join(get_args(OnConflict))}")
    if slots not in ("same", "common"):
        raise UsageError(f"merging: got --slots {slots!r}, expected same or common")
    *sources, out = paths
    no_standard_output(out)
    checkpoints = [source.open(path, output.memory) for path in sources]
    with progress_bar("merging") as progress:
        account, merged = merge(
            checkpoints,
            out,
            on_conflict=on_conflict,  # type: ignore[arg-type]
            common=slots == "common",
            tables=table or (),
            into=into,
            parts=parts,
            to=to,
            options=output.options(),
            workers=output.workers,
            progress=progress,
        )
    if not as_json and merged:
        _print_merged(merged)
    print_account(account, as_json=as_json, merged=[dataclasses.asdict(one) for one in merged])


def _print_merged(merged: list[Merged]) -> None:
    print(
        columns(
            ["merged table", "sources", "rows read", "rows", "keys in several", "repeated", "deleted"],
            [
                [
                    shown(one.table),
                    str(len(one.sources)),
                    f"{one.rows_read:,}",
                    f"{one.rows:,}",
                    f"{one.conflicts:,}",
                    f"{one.repeated:,}",
                    f"{one.deleted:,}",
                ]
                for one in merged
            ],
            right=frozenset({1, 2, 3, 4, 5, 6}),
        )
    )
    print()
