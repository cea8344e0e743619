"""`kvtools apply`: increments put into a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from kvtools.chain_fold import apply_increments
from kvtools.cli.account import print_account
from kvtools.cli.merge import print_merged
from kvtools.cli.options import AsJson, Output, Parts, Source, To, no_standard_output
from kvtools.cli.progress import progress_bar
from kvtools.errors import UsageError


def run(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="BASE INCREMENT... OUT", help="A full checkpoint or a chain, its increments, and OUT."),
    ],
    *,
    parts: Parts = None,
    to: To = None,
    strict: Annotated[bool, typer.Option("--strict", help="Write nothing if anything would be lost; exit 3.")] = False,
    output: Output,
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Write the checkpoint that a base and increments of it make: what training would have saved whole.

    Each increment is checked to follow what is before it: by number, chain and fingerprint; those of TFPlus and
    DeepRec, which do not record that, by the steps in their names. One that does not follow is named, and nothing
    is written. OUT appears whole or not at all; later increments apply to it.

    \b
    Examples:
      kvtools apply train/ckpt-4 train/ckpt-5.delta train/ckpt-6.delta model.ckpt
      kvtools apply monday.ckpt tuesday.delta tuesday.ckpt
      kvtools apply full.ckpt-100 .incremental_checkpoint/incr.ckpt-110 full.ckpt-110
    """
    if len(paths) < 3:
        raise UsageError(
            f"applying {paths}: expected BASE, an INCREMENT or several, and OUT; see `kvtools apply --help`"
        )
    base, *increments, out = paths
    no_standard_output(out)
    with progress_bar("applying to") as progress:
        account, merged = apply_increments(
            base,
            increments,
            out,
            parts=parts,
            to=to,
            open_options=source.options(output.memory),
            options=output.options(),
            workers=output.workers,
            progress=progress,
            strict=strict,
        )
    if not as_json:
        print_merged(merged)
    print_account(account, as_json=as_json, planned=output.dry_run, merged=[dataclasses.asdict(one) for one in merged])
