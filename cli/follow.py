"""`kvtools follow`: keep tables elsewhere as new as a chain of checkpoints."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvtools.chain import ChainError
from kvtools.cli.json_text import dumps
from kvtools.cli.options import AsJson
from kvtools.cli.shared_options import shared
from kvtools.cli.signals import SignalError
from kvtools.errors import KvtoolsError, UsageError, one_line

_RESTS = 1.0  # s, after Redis did not answer


def run(
    chain: Annotated[
        Path,
        typer.Argument(metavar="CHAIN", help="A folder of checkpoints and increments, of tfplugin.CheckpointManager."),
    ],
    *,
    to: Annotated[
        str, typer.Option("--to", metavar="URL", help="The Redis to keep fresh, as in redis://host:6379/0?prefix=ads.")
    ],
    poll: Annotated[float, typer.Option(metavar="SECONDS", help="How often to look for something new.")] = 0.1,
    once: Annotated[bool, typer.Option("--once", help="End when all that is there now is applied.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Begin anew from the newest full, and replace what is there, whose ever it is."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Keep the tables in a Redis as new as a chain of checkpoints: rows that change, and keys that go.

    A full checkpoint is written first, then each increment as it comes, until SIGTERM or Ctrl-C. A line is printed for
    each. How far it is lies in Redis: it goes on from there when it begins again. An increment that does not follow is
    refused with a name, and what is there stays until a newer full comes. Keys and values are written, for lookups; no
    optimizer slots.

    \b
    Examples:
      kvtools follow training/run7 --to redis://cache:6379/0
      kvtools follow training/run7 --to redis://cache:6379/0 --once --json
    """
    if "://" not in to:
        raise UsageError(f"following '{chain}': got --to {to}, expected a Redis, such as redis://localhost:6379/0")
    if not 0.01 <= poll <= 3600:
        raise UsageError(f"following '{chain}': got --poll {poll:g}, expected 0.01 to 3600")
    from kvtools.follow import expect_folder
    from kvtools.follow_redis import RedisFollower

    expect_folder(chain)

    def refused(error: ChainError) -> None:
        print(f"kvtools: refused ({error.reason}): {one_line(str(error))}", file=sys.stderr, flush=True)

    follower = RedisFollower(chain, to, force=force, on_refused=refused)
    trouble = gone = ""
    try:
        while True:
            try:
                applied = follower.step()
                trouble = ""
            except KvtoolsError as error:
                if once:
                    raise
                if str(error) != trouble:
                    print(f"kvtools: {one_line(str(error))}; trying again", file=sys.stderr, flush=True)
                trouble = str(error)
                time.sleep(_RESTS)
                continue
            if applied is not None:
                after = time.time() - applied.moment if applied.moment else None
                said = {"member": applied.name, "rows": applied.rows, "removed": applied.removed, "seconds": after}
                late = "" if after is None else f", {after:.2f} s after its moment"
                line = f"{applied.name}: {applied.rows:,} rows, {applied.removed:,} keys removed{late}"
                if as_json or not shared().quiet:
                    print(dumps(said) if as_json else line, flush=True)
            elif once:
                break
            else:
                if follower.walk.gone and follower.walk.gone != gone:
                    print(f"kvtools: {one_line(follower.walk.gone)}", file=sys.stderr, flush=True)
                gone = follower.walk.gone
                time.sleep(poll)
    except (SignalError, KeyboardInterrupt):
        if not shared().quiet:
            print("kvtools: ended", file=sys.stderr, flush=True)
        return
    finally:
        follower.close()
    if follower.walk.trouble:
        raise ChainError(follower.walk.trouble)
