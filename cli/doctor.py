"""`kvtools doctor`: is this environment as it should be, and what to do where it is not."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Annotated

import typer

from kvtools.cli.json_text import dumps
from kvtools.cli.options import AsJson
from kvtools.cli.terminal import styled
from kvtools.doctor import SECTIONS, Check, diagnose
from kvtools.errors import CheckFailedError, UsageError

_MARKS = {"ok": " ok ", "note": "note", "warning": "WARN", "error": "FAIL"}
_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "error": "red"}


def run(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="SECTION", help=f"Look at this alone: {', '.join(SECTIONS)}; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this environment: versions, TensorFlow and its ops, processor, memory, CUDA, packages, ports, caches.

    Says what was found, and what to do about what is missing. TensorFlow is asked in a process of its own, which takes
    some seconds; without it, the rest takes half of one. Nothing is changed, compiled or sent anywhere. Exits with 3
    if something does not work.

    \b
    Examples:
      kvtools doctor
      kvtools doctor --only tensorflow
      kvtools doctor --json > doctor.json          # for a report of a fault
      kvtools doctor --only serving --only machine && kvtools serve models
    """
    wanted = frozenset(only or SECTIONS)
    if unknown := sorted(wanted - frozenset(SECTIONS)):
        raise UsageError(f"got --only {unknown[0]}, expected one of {', '.join(SECTIONS)}")
    found: dict[str, list[Check]] = {}
    for section, checks in diagnose(frozenset(SECTIONS) - wanted):
        found[section] = checks
        if not as_json:
            _print(section, checks, first=len(found) == 1)
    errors = sum(check.status == "error" for checks in found.values() for check in checks)
    if as_json:
        sections = {section: [dataclasses.asdict(check) for check in checks] for section, checks in found.items()}
        print(dumps({"ok": not errors, "sections": sections}))
    if errors:
        raise CheckFailedError(f"looking at this environment: {errors} of its parts do not work; see what is marked")


def _print(section: str, checks: list[Check], *, first: bool) -> None:
    if not first:
        print()
    print(section)
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = styled(_MARKS[check.status], _STYLES[check.status])
        print(f"  [{mark}] {check.name.ljust(width)}  {check.value}")
        if check.advice:
            for line in textwrap.wrap(check.advice, 90, break_long_words=False, break_on_hyphens=False):
                print(f"         {' ' * width} -> {line}")
