"""`kvtools merge`: one checkpoint of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, get_args

import typer

from kvtools.chain_fold import apply_increments, merge_chain, newest_of, record_at
from kvtools.chain_place import chain_at, is_chain
from kvtools.chain_reader import is_increment
from kvtools.cli.account import print_account
from kvtools.cli.layout import columns, shown
from kvtools.cli.options import (
    AsJson,
    Output,
    Source,
    To,
    Until,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.tfplugin import NAME as TFPLUGIN
from kvtools.errors import KvtoolsError, UsageError
from kvtools.merge import Merged, OnConflict, merge
from kvtools.migrate import Account


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
        list[str] | None,
        typer.Option("--table", metavar="NAME", help="Merge only this table, or those like 'deep/*'; may be repeated."),
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
    until: Until = None,
    output: Output,
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Make one checkpoint of several: tables of one name become one table, with each key once.

    For shards that ranks wrote, a base and its increments, or a chain: one PATH that is a chain's folder, or
    a full checkpoint and increments of it, becomes the full checkpoint that training would have written, with
    all that it saves (see `kvtools apply`). Otherwise, keys that an increment lists as deleted are removed
    from what stands before it; tables that are not merged, dense variables, what new rows begin with and policies
    are those of the last checkpoint that has them (of the first with --on-conflict first); with sum and mean,
    values and slots are added up or averaged, frequencies added up, and the largest version kept. OUT appears
    whole or not at all; it may be one of the PATHs with --force.

    Of each table it says how many keys are in several: those that more than one checkpoint has a row of, once the
    rows are gone that a later increment deletes. `repeated` are rows whose key stands again in the same checkpoint.

    \b
    Examples:
      kvtools merge train model.ckpt
      kvtools merge train model.ckpt --until 17
      kvtools merge rank0.ckpt rank1.ckpt rank2.ckpt whole.ckpt --on-conflict error
      kvtools merge full.ckpt-100 .incremental_checkpoint/incr.ckpt-110 full.ckpt-110
      kvtools merge a.ckpt b.ckpt mean.ckpt --on-conflict mean --slots common
      kvtools merge towers.ckpt out.ckpt --into all --table users --table items
    """
    if len(paths) < 2:
        raise UsageError(f"merging {_listed(paths)}: expected the checkpoints and then OUT; see `kvtools merge --help`")
    if on_conflict not in get_args(OnConflict):
        raise UsageError(f"merging: got --on-conflict {on_conflict!r}, expected {', '.join(get_args(OnConflict))}")
    if slots not in ("same", "common"):
        raise UsageError(f"merging: got --slots {slots!r}, expected same or common")
    *sources, out = paths
    no_standard_output(out)
    plain = on_conflict == "last" and slots == "same" and not table and into is None
    if len(sources) == 1 and plain and is_a_chain(sources[0]):
        _merge_chain(sources[0], out, until, parts, to, output, source, as_json)
        return
    if until is not None:
        raise UsageError(
            f"merging {_listed(sources)}: --until is for one PATH that is a chain, without --on-conflict, --slots,"
            " --table and --into; leave it out"
        )
    opening = dataclasses.replace(source.options(output.memory), increments=True)
    checkpoints = [open_checkpoint(path, opening) for path in sources]
    kinds = [_is_increment(checkpoint) for checkpoint in checkpoints]
    if plain and len(kinds) > 1 and kinds[0] is False and all(kinds[1:]):
        with progress_bar("merging") as progress:
            account, merged = apply_increments(
                sources[0],
                sources[1:],
                out,
                parts=parts,
                to=to,
                open_options=opening,
                options=output.options(),
                workers=output.workers,
                progress=progress,
            )
        _print(account, merged, as_json, output.dry_run)
        return
    chained = next(
        (one for one, kind in zip(checkpoints, kinds, strict=True) if kind and one.dialect == TFPLUGIN), None
    )
    if chained is not None:
        says = f"merging {_listed(sources)}: '{chained.path}' is an increment of a chain"
        if kinds[0] is False and all(kinds[1:]):
            raise UsageError(
                f"{says}, which is applied to its full checkpoint row by row; leave --on-conflict, --slots, --table and"
                " --into out, or merge what `kvtools apply` makes of them"
            )
        raise UsageError(
            f"{says}, which goes after the full checkpoint that it belongs to; name that first, and increments alone"
            " after it, as for `kvtools apply`. To make one increment of several, apply them, and see `kvtools diff"
            " --output delta`"
        )
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
    _print(account, merged, as_json, output.dry_run)


def is_a_chain(path: str) -> bool:
    """Tell whether a path is a chain's folder, be there increments in it or full checkpoints with records alone."""
    if is_chain(path):
        return True
    try:
        found = newest_of(chain_at(path))
        return bool(found) and record_at(found[-1].prefix) is not None
    except KvtoolsError:
        return False


def _merge_chain(
    path: str,
    out: str,
    until: int | None,
    parts: int | None,
    to: str | None,
    output: Output,
    source: Source,
    as_json: bool,
) -> None:
    with progress_bar("merging") as progress:
        account, merged = merge_chain(
            path,
            out,
            until=until,
            parts=parts,
            to=to,
            open_options=source.options(output.memory),
            options=output.options(),
            workers=output.workers,
            progress=progress,
        )
    _print(account, merged, as_json, output.dry_run)


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(f"'{path}'" for path in paths)


def _is_increment(checkpoint: Checkpoint) -> bool | None:
    """Tell whether a checkpoint's tables are increments; None where some are, or there are none."""
    kinds = {is_increment(table) for table in checkpoint.tables.values()}
    return kinds.pop() if len(kinds) == 1 else None


def _print(account: Account, merged: list[Merged], as_json: bool, dry_run: bool) -> None:
    if not as_json and merged:
        print_merged(merged)
    print_account(account, as_json=as_json, planned=dry_run, merged=[dataclasses.asdict(one) for one in merged])


def print_merged(merged: list[Merged]) -> None:
    """Print what became of the rows of each merged table, and an empty line."""
    print(
        columns(
            [
                "merged table",
                "sources",
                "rows read",
                "rows",
                "keys in several",
                "repeated",
                "rows deleted",
                "keys gone",
            ],
            [
                [
                    shown(one.table),
                    str(len(one.sources)),
                    f"{one.rows_read:,}",
                    f"{one.rows:,}",
                    f"{one.conflicts:,}",
                    f"{one.repeated:,}",
                    f"{one.deleted:,}",
                    f"{one.gone:,}",
                ]
                for one in merged
            ],
            right=frozenset({1, 2, 3, 4, 5, 6, 7}),
        )
    )
    print()
