"""`kvtools setup-horovod`: Horovod, built for the installed TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtools.cli.json_text import dumps
from kvtools.cli.options import AsJson
from kvtools.cli.progress import progress_bar
from kvtools.cli.shared_options import shared
from kvtools.cli.terminal import can_redraw
from kvtools.horovod_setup.build import HorovodBuildError
from kvtools.horovod_setup.setup import HorovodSetup, setup_horovod

_DONE = {
    "kept": "is installed and works",
    "checked": "is installed and works",
    "installed": "was installed from the wheel of an earlier build and works",
    "built": "was built and installed, and works",
}


def run(
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", help="How many files to compile at once; as memory and processors allow."),
    ] = None,
    sdist: Annotated[
        Path | None,
        typer.Option("--sdist", metavar="FILE", help="Horovod's source package, where it cannot be fetched."),
    ] = None,
    any_tensorflow: Annotated[
        bool, typer.Option("--any-tensorflow", help="Try with a TensorFlow that is not known to work, too.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Build it even if one that works is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build Horovod 0.28.1 with Gloo for the installed TensorFlow, install it and check it with two ranks.

    Takes some minutes the first time and seconds after that: what was built is kept in the virtual
    environment. Needs g++, make and a package index that pip can reach. Where a Horovod that works
    is installed, nothing is done.

    \b
    Examples:
      kvtools setup-horovod
      kvtools setup-horovod --jobs 8 --force
      kvtools setup-horovod --sdist horovod-0.28.1.tar.gz --json
    """
    watched = can_redraw(sys.stderr)
    with progress_bar("", unit="%") if watched else contextlib.nullcontext() as bar:
        last, shown = "", 0

        def progress(doing: str, done: int, total: int) -> None:
            nonlocal last, shown
            percent = done * 100 // total
            if bar is not None:
                if last and doing != last:
                    bar(last, 100, 100)
                bar(doing, percent, 100)
            elif shared().quiet:
                pass
            elif doing != last:
                print(f"kvtools: {doing} ...", file=sys.stderr, flush=True)
                shown = 0
            elif percent >= shown + 25:  # a log, too, is to show that the minutes pass with work
                print(f"kvtools: {doing}: {percent}%", file=sys.stderr, flush=True)
                shown = percent
            last = doing

        try:
            setup = setup_horovod(force=force, jobs=jobs, sdist=sdist, any_tensorflow=any_tensorflow, progress=progress)
        except HorovodBuildError as error:
            for line in error.details:
                print(f"  {line}", file=sys.stderr)
            raise
    if as_json or not shared().quiet:
        print(dumps(dataclasses.asdict(setup)) if as_json else _sentence(setup))


def _sentence(setup: HorovodSetup) -> str:
    return f"horovod {setup.horovod} {_DONE[setup.action]} with tensorflow {setup.tensorflow} ({setup.seconds:.0f} s)"
