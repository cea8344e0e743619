"""The commands of the documentation run as they stand there, and print what the pages show."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import ROOT, blocks, commands

from kvtools.cli.main import main

DATA = ROOT / "tests" / "data"
FILES = {
    "checkpoints": DATA / "sample",
    "deeprec": DATA / "deeprec",
    "deeprec-run": DATA / "deeprec",
    "sok": DATA / "sok",
    "dump": DATA / "sok",
    "tfplus": DATA / "tfplus",
    "tfplus-run": DATA / "tfplus",
    "tfra": DATA / "tfra",
    "run": DATA / "tfra" / "v1_adam",
}
PAGES = sys.argv[1:]


def run(page):
    report = []
    for block in blocks(page):
        if block.language != "console" or block.no_run:
            continue
        for command in commands(block):
            if not command.text.startswith("kvtools ") or command.arguments[1] in ("serve", "setup-horovod"):
                report.append((command, "SKIP", ""))
                continue
            said = io.StringIO()
            try:
                if "|" in command.text or "$" in command.text or ">" in command.text:
                    raise RuntimeError("shell")
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    status = main(command.arguments[1:])
            except BaseException as e:
                report.append((command, f"EXC {e!r}", ""))
                continue
            lines = [line.rstrip() for line in said.getvalue().splitlines() if line.strip()]
            same = lines == command.printed
            report.append((command, f"{status} {'same' if same else 'silent' if not command.printed else 'DIFF'}", "\n".join(lines)))
    return report
