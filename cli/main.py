"""The `kvtools` command line.

Each command's module is imported only when that command runs: `kvtools --help` loads neither NumPy nor
TensorFlow. Errors are one line on stderr, and the exit status says of which kind: 2 bad usage, 1 bad input,
3 a failed check or nothing found, 128 and the number of a signal. That nobody reads what is printed is no error.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from kvtools import __version__
from kvtools.cli.option_groups import with_single_options
from kvtools.cli.remote_arguments import with_local_paths
from kvtools.cli.repeated_options import Command
from kvtools.cli.shared_options import Color, Quiet, StringKeys, command_of, is_quiet, own_options, with_shared_options
from kvtools.cli.signals import SignalError, ended_by_signals
from kvtools.cli.standard_output import (
    RefusedOutputError,
    escape_unencodable,
    give_up_output,
    open_standard_files,
    standard_error,
    standard_output,
)
from kvtools.cli.terminal import styled
from kvtools.errors import KvtoolsError, ScratchError, check_working_folder, one_line
from kvtools.remote.shown import shown

COMMANDS = {
    "dialects": "List the formats that are read and written, and what each holds.",
    "inspect": "Show what is in a checkpoint: tables, variables, single rows.",
    "stats": "Norms, frequencies, ages, bad numbers, and what clipping would save.",
    "verify": "Check that a checkpoint is sound.",
    "diff": "Compare two checkpoints, of any dialects.",
    "get": "Print the rows of keys.",
    "hash": "Print the keys that strings have in tables.",
    "sql": "Ask tables in SQL, of one checkpoint or several.",
    "scan": "Print the rows within a range of keys.",
    "top": "Print the rows that come first: hot keys, the largest norms, the oldest.",
    "neighbours": "Print the rows nearest to a key's, or to a vector.",
    "log": "List who came and went in a chain of increments.",
    "explore": "Look around in tables, on a page with sliders or in a terminal.",
    "report": "Write a page of plots about the tables.",
    "advise": "Say what would make tables smaller, and what that costs.",
    "simulate": "Replay a log of ids through the policies of training.",
    "migrate": "Move tables to another dialect.",
    "clip": "Leave out rows that are not worth their memory.",
    "cast": "Change the types of values and keys.",
    "reshard": "Change the number of parts.",
    "repair": "Mend what verify finds wrong.",
    "merge": "Make one checkpoint of several, or of a chain.",
    "apply": "Put increments into a checkpoint.",
    "split": "Make several checkpoints of one.",
    "rename": "Change the names of tables and slots.",
    "export": "Write tables as a SavedModel that any TensorFlow server loads.",
    "serve": "Answer embedding lookups over HTTP.",
    "follow": "Keep tables in Redis as new as a chain of checkpoints.",
    "doctor": "Look at this environment, and say what to do about what is missing.",
    "setup-horovod": "Build and install Horovod, for training on several ranks.",
    "completion": "Let bash, zsh or fish complete commands, options and tables.",
    "man": "Show the manual page of a command, or write those of all.",
}


HELD_BACK = frozenset(
    {"verify", "diff", "report", "migrate", "clip", "cast", "repair", "reshard", "merge", "apply", "split", "rename"}
    | {"advise", "explore", "export", "simulate"}
)
"""Commands whose work is a file or a verdict: they go on to their end, whoever reads what they say of it."""


_OF_ROWS = frozenset({"sql", "get", "scan", "top"})
"""Commands that print rows, or write them to a file."""


def build_app(*requested: str) -> typer.Typer:
    """Make the command line: the commands `requested` with their modules, the others as mere names."""
    app = typer.Typer(
        name="kvtools",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_kvtools)
    for name, summary in COMMANDS.items():
        command: Callable[..., None] = _not_loaded
        if name in requested:
            command = with_shared_options(with_single_options(importlib.import_module(_module(name)).run))
        app.command(name, short_help=summary, cls=Command)(command)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1, 2 or 3, or 128 and the signal that ended it."""
    open_standard_files()
    escape_unencodable()
    with own_options(), standard_error():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    requested = command_of(arguments)
    status = 0
    try:
        app = build_app(*([requested] if requested in COMMANDS else []))
        if not arguments:
            return _tell_usage(app)
        arguments = _prepared(arguments, requested)
        held_back = _is_held_back(requested, arguments)
        dropped = held_back and is_quiet(arguments)
        with ended_by_signals(), standard_output(held_back=held_back, dropped=dropped):
            arguments = with_local_paths(requested, arguments)
            result = app(arguments, prog_name="kvtools", standalone_mode=False)
            status = result if isinstance(result, int) else 0
        if status == 130:  # how Typer tells of an interrupt
            return _fail("interrupted", 130)
        return status
    except KvtoolsError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except SignalError as error:
        return _fail(str(error), 128 + error.number)
    except RefusedOutputError as error:
        if not error.reader_gone:
            return _fail(str(error), 1)
        give_up_output()  # who has read enough is told no more, which is no fault
        return status
    except MemoryError:
        return _fail("out of memory; run on a machine with more of it", 1)
    except ScratchError as error:
        return _fail(str(error), 1)
    except OSError as error:
        return _fail(_told(error), 1)
    except UnicodeEncodeError as error:
        return _fail(_unencodable(error), 1)
    except Exception as error:
        if isinstance(error, typer.Exit):
            return int(error.exit_code)
        # Bad usage, in the classes of whichever click typer brings along.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        hint = f"kvtools {requested}" if requested in COMMANDS else "kvtools"
        return _fail(f"{shown(str(message())).rstrip('.')}; see `{hint} --help`", 2)


def _is_held_back(requested: str | None, arguments: Sequence[str]) -> bool:
    """Tell whether a command goes on to its end, whoever reads; those of rows do where they write a file."""
    writes_rows = requested in _OF_ROWS and any(argument.partition("=")[0] == "--output" for argument in arguments)
    return requested in HELD_BACK or writes_rows


def _prepared(arguments: Sequence[str], requested: str | None) -> list[str]:
    """Let a command that takes what the parser cannot (negative numbers) rewrite its arguments."""
    module = sys.modules.get(_module(requested or ""))
    prepare: Callable[[Sequence[str]], list[str]] = getattr(module, "prepare_arguments", list)
    return prepare(arguments)


def _module(command: str) -> str:
    return f"kvtools.cli.{command.replace('-', '_')}"


def _fail(message: str, status: int) -> int:
    give_up_output()
    print(f"{styled('kvtools:', 'bold red', sys.stderr)} {one_line(message)}", file=sys.stderr)
    return status


def _told(error: OSError) -> str:
    """Say what the system refused, and that there is no working folder where it is for want of that."""
    if not error.filename:
        try:
            check_working_folder()
        except KvtoolsError as gone:
            return str(gone)
    file = f" '{shown(str(error.filename))}'" if error.filename else " a file"
    return f"working on{file}: {error.strerror or error}"


def _unencodable(error: UnicodeEncodeError) -> str:
    """Say that a file cannot have, or be opened by, such a name: all that is printed escapes what it cannot encode."""
    name = f"'{shown(error.object)}'"
    return f"working on {name}: the name is no {error.encoding}; choose another, or set LC_ALL=C.UTF-8 if it should be"


def _tell_usage(app: typer.Typer) -> int:
    """Print the help where nothing at all was asked for: on stderr and with status 2, as a script's slip would be."""
    with contextlib.redirect_stdout(sys.stderr):
        app(["--help"], prog_name="kvtools", standalone_mode=False)
    return 2


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvtools {__version__}")
        raise typer.Exit


def _kvtools(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
    string_keys: StringKeys = False,
    quiet: Quiet = False,
    color: Color = None,
) -> None:
    """Key-value embedding tables: look into their checkpoints, export and serve them, without custom ops.

    \b
    Examples:
      kvtools inspect model.ckpt-100
      kvtools export --savedmodel exported model.ckpt-100 --clip-abs 1e-6
      kvtools serve exported --port 8501
    """


def _not_loaded() -> None:
    """Stand in for a command that was not asked for."""


if __name__ == "__main__":
    sys.exit(main())
