"""`kvtools man`: manual pages, made of what `--help` says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvtools import __version__
from kvtools.cli.command_tree import Command, command_tree
from kvtools.cli.options import DryRun, no_standard_output
from kvtools.cli.terminal import is_terminal
from kvtools.errors import MissingDependencyError, OutputError, UsageError

_EXIT = (
    ("0", "Done."),
    ("1", "The input cannot be used, or the output not be written."),
    ("2", "Bad usage."),
    ("3", "A check failed, something differs, or nothing was found."),
    ("130, 143", "Interrupted by Ctrl-C, or ended by SIGTERM: what was being written is removed."),
)
_ENVIRONMENT = (
    ("NO_COLOR", "No colours, where --color does not say otherwise."),
    ("FORCE_COLOR", "Colours in pipes, too."),
    ("COLUMNS", "How wide the terminal is, if not as wide as it says."),
    ("KVTOOLS_HEARTBEAT", "Seconds between two lines about the progress, without a terminal; 30, and 0 for none."),
    ("TMPDIR", "Where more than --memory is kept meanwhile."),
)


def run(
    command: Annotated[
        str | None, typer.Argument(metavar="[COMMAND]", help="The command; kvtools itself.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FOLDER",
            help="Write the pages of all commands into a folder, such as ~/.local/share/man/man1.",
            callback=no_standard_output,
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Show the manual page of a command, or write those of all.

    On a terminal `man` shows the page; in a pipe or file it is printed as it is, in the language of man pages.

    \b
    Examples:
      kvtools man clip
      kvtools man --output man1
      kvtools man clip > kvtools-clip.1
    """
    if command is not None and output is not None:
        raise UsageError(f"writing manual pages: got {command} and --output, expected one of them")
    top, commands = command_tree()
    if output is not None:
        pages = {"kvtools": _page(top, commands), **{f"kvtools-{c.name}": _page(c, {}) for c in commands.values()}}
        if dry_run:
            print(f"would write {len(pages)} pages to {output}")
            return
        try:
            output.mkdir(parents=True, exist_ok=True)
            for name, text in pages.items():
                (output / f"{name}.1").write_text(text)
        except OSError as error:
            raise OutputError(f"writing manual pages to '{output}': {error.strerror or error}") from error
        print(f"wrote {len(pages)} pages to {output}")
        return
    if command is not None and command not in commands:
        raise UsageError(f"showing a manual page: got {command}, expected one of {', '.join(commands)}")
    text = _page(top, commands) if command is None else _page(commands[command], {})
    if not is_terminal(sys.stdout):
        sys.stdout.write(text)
        return
    if shutil.which("man") is None:
        name = command or ""
        raise MissingDependencyError(f"showing a manual page: there is no program man; see `kvtools {name} --help`")
    subprocess.run(["man", "-l", "-"], input=text, text=True, check=False)


def _page(command: Command, commands: Mapping[str, Command]) -> str:
    """Return a page in troff, as man(7) describes it."""
    top = bool(commands)
    name = "kvtools" if top else f"kvtools-{command.name}"
    called = "kvtools" if top else f"kvtools {command.name}"
    about, examples = _parts(command.text)
    words = ["[OPTIONS]", *(["COMMAND [ARGS]..."] if top else [metavar for metavar, _ in command.arguments])]
    lines = [
        f'.TH "{name.upper()}" 1 "" "kvtools {__version__}" "kvtools"',
        *(".SH NAME", f"{_troff(name)} \\- {_troff(command.summary.rstrip('.'))}"),
        *(".SH SYNOPSIS", f".B {_troff(called)}", _troff(" ".join(words))),
        *(".SH DESCRIPTION", *_paragraphs(about)),
    ]
    if top:
        lines += [".SH COMMANDS", *_items((f"kvtools-{one.name}(1)", one.summary) for one in commands.values())]
    described = [(metavar, text) for metavar, text in command.arguments if text]
    if described:
        lines += [".SH ARGUMENTS", *_items(described)]
    options = [
        (", ".join(f"{name} {option.metavar}" if option.metavar else name for name in option.names), option.help)
        for option in command.options
    ]
    lines += [".SH OPTIONS", *_items(options)]
    if examples:
        lines += [".SH EXAMPLES", ".nf", *(_troff(line.strip()) for line in examples), ".fi"]
    lines += [".SH EXIT STATUS", *_items(_EXIT), ".SH ENVIRONMENT", *_items(_ENVIRONMENT)]
    if not top:
        lines += [".SH SEE ALSO", ".BR kvtools (1)"]
    return "\n".join(lines) + "\n"


def _parts(text: str) -> tuple[str, Sequence[str]]:
    """Return what a help text says, and the lines of its examples."""
    about, _, examples = text.replace("\b", "").partition("Examples:")
    return about, [line for line in examples.splitlines() if line.strip()]


def _paragraphs(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        indented = all(line.startswith(" ") for line in paragraph.splitlines())
        body = [_troff(line.strip()) for line in paragraph.splitlines() if line.strip()]
        lines += [".PP", ".nf", *body, ".fi"] if indented else [".PP", *body]
    return lines[1:] if lines[:2] != [".PP", ".nf"] else lines


def _items(items: object) -> list[str]:
    return [line for term, text in items for line in (".TP", f".B {_troff(term)}", _troff(" ".join(text.split())))]  # type: ignore[attr-defined]


def _troff(text: str) -> str:
    r"""Return a text with what troff would take for its own written out.

    >>> _troff("--max-abs"), _troff(".incremental")
    ('\\-\\-max\\-abs', '\\&.incremental')
    """
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
