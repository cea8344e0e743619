"""`kvtools clip`: leave out rows that are not worth their memory."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvtools.cli.account import print_account
from kvtools.cli.clip_options import (
    Clipping,
    describe,
    describe_budget,
    print_budget,
    print_choices,
    warn_unmatched,
)
from kvtools.cli.json_text import dumps
from kvtools.cli.options import AsJson, Output, Source, SourcePath, Tables, To, bytes_of, no_standard_output
from kvtools.cli.progress import progress_bar
from kvtools.cli.terminal import prose
from kvtools.clip import write_chosen
from kvtools.clip_policy import budget_order, choose_all
from kvtools.dialects.detect import dialect_named
from kvtools.dialects.schema import row_bytes
from kvtools.errors import UsageError
from kvtools.migrate import check_output, output_of
from kvtools.shown_tables import counted
from kvtools.written_bytes import row_bytes_in


def run(
    path: SourcePath,
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT", help="What to write: a prefix, file, folder or URL.", callback=no_standard_output
        ),
    ] = None,
    *,
    max_abs: Annotated[
        float | None,
        typer.Option("--max-abs", metavar="X", help="Cut rows whose values are all below X in size."),
    ] = None,
    l2: Annotated[
        float | None, typer.Option("--l2", metavar="X", help="Cut rows whose Euclidean norm is below X.")
    ] = None,
    keys_file: Annotated[
        str | None,
        typer.Option("--keys-file", metavar="FILE", help="Keep only these keys: a key per line, or .npy; - is stdin."),
    ] = None,
    drop_keys_file: Annotated[
        str | None, typer.Option("--drop-keys-file", metavar="FILE", help="Cut these keys.")
    ] = None,
    clipping: Clipping,
    to: To = None,
    table: Tables = None,
    output: Output,
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Leave out rows that are not worth their memory; slots, frequencies and versions stay with the others.

    A row is kept if it passes all that is asked. A row at a threshold is kept, and so is one with a NaN
    or an infinity, whatever its norm. Other tables and the dense variables are carried along. OUT
    appears whole or not at all; it may be PATH itself with --force.

    \b
    Examples:
      kvtools clip model.ckpt-100 --max-abs 1e-6 --dry-run
      kvtools clip model.ckpt-100 clipped/model.ckpt-100 --max-abs 1e-6 --min-freq 2
      kvtools clip model.ckpt-100 out/model.ckpt-100 --older-than 30d --table user_emb
      kvtools clip model.ckpt-100 small.ckpt-100 --top-k 1000000 --by freq
      kvtools clip model.ckpt-100 small.ckpt-100 --budget 2GiB
      kvtools clip model.ckpt-100 small.ckpt-100 --drop-where 'freq < 3 and norm < 0.01'
      kvtools clip model.ckpt-100 small.ckpt-100 --policy thresholds.toml
      cut -f1 banned.tsv | kvtools clip model.ckpt-100 model.ckpt-100 --drop-keys-file - --force
    """
    if out is None and not output.dry_run:
        raise UsageError(f"clipping '{path}': nothing says where to write; name OUT, or add --dry-run")
    names = ("--keys-file", "--drop-keys-file")
    policy = clipping.policy_of(path, max_abs, l2, keys_file, drop_keys_file, names)
    if policy.empty and clipping.policy is None:
        raise UsageError(f"clipping '{path}': nothing says what to cut; see `kvtools clip --help`")
    checkpoint = source.open(path, output.memory)
    warn_unmatched(policy, [*checkpoint.tables], clipping.policy)
    options = output.options()
    target = to or checkpoint.dialect
    if out is not None:
        check_output(output_of(out, target, [checkpoint]), target, force=output.force)
    with progress_bar("choosing rows of") as progress:
        choices = choose_all(
            checkpoint,
            policy,
            tables=table or (),
            size=row_bytes
            if dialect_named(target).write is None  # and nothing is asked to be written
            else row_bytes_in(target, checkpoint.tables, compression=options.compression),
            memory=bytes_of(output.memory),
            workers=output.workers,
            progress=progress,
        )
    dtypes = policy.dtypes([choice.table for choice in choices])
    order = budget_order(policy, [checkpoint.tables[choice.table].schema for choice in choices])
    if not as_json:
        print_choices(choices)
        print_budget(order)
    if policy.empty and not as_json:
        print(prose(f"note: '{clipping.policy}' says of nothing that it is to be cut: all rows stay"))
    if dtypes and not as_json:
        whose = f"{counted(len(dtypes), 'table')} in '{clipping.policy}'"
        print(prose(f"note: the dtype of {whose} is for `kvtools cast` and `kvtools export`"))
    described = [describe(choice) for choice in choices]
    if out is None:
        if as_json:
            record = {"path": str(checkpoint.path), "dry_run": True, **describe_budget(order)}
            print(dumps({**record, "clipped": described}))
        else:
            print("nothing was written")
        return
    with progress_bar("reading" if output.dry_run else "writing") as progress:
        account = write_chosen(
            checkpoint, choices, out, to=to, options=options, workers=output.workers, progress=progress
        )
    if not as_json:
        print()
    told: dict[str, Any] = {"path": str(checkpoint.path)} if output.dry_run else {}
    told |= {"clipped": described, **describe_budget(order)}
    print_account(account, as_json=as_json, planned=output.dry_run, whole=False, **told)
