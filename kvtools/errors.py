"""The one family of exceptions of the offline tools.

Every message says what was being done, to which file or table, what was found and what was expected, and
what to do next, in one line: the command line prints it as it is. `exit_code` is what the `kvtools` command
exits with.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvtools.remote.shown import shown
from kvtools.url_password import without_password


class KvtoolsError(Exception):
    """Base of every error that kvtools raises on purpose. No message has the password of a URL.

    >>> KvtoolsError("reading 'a.index': the file is empty").exit_code
    1
    >>> print(KvtoolsError("opening 'redis://:secret@cache/0': refused"))
    opening 'redis://cache/0': refused
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*[without_password(shown(one)) if isinstance(one, str) else one for one in args])


class BadInputError(KvtoolsError):
    """A file, table or key that was given cannot be used: missing, truncated, of another format (exit 1)."""


class CorruptFileError(BadInputError):
    """A file's bytes contradict its own checksum or its own structure (exit 1)."""


class UnknownTableError(BadInputError, KeyError):
    """A table was named that the checkpoint does not have (exit 1); a `KeyError`, as of any mapping."""

    __str__ = Exception.__str__


class UnknownKeyError(BadInputError, KeyError):
    """A key was asked for that the table does not have (exit 1); a `KeyError`, as of any mapping."""

    __str__ = Exception.__str__


class OutputError(KvtoolsError):
    """An output exists already, or could not be written; what stood there before is untouched (exit 1)."""


class ScratchError(OSError):
    """Temporary files cannot be written (exit 1). No `KvtoolsError`: it says nothing of what is read, so that who looks
    for faults there, or leaves out what cannot be read, does not take it for one."""


class MissingDependencyError(KvtoolsError):
    """An optional package is needed for this and is not installed (exit 1)."""


class UsageError(KvtoolsError):
    """An option or argument has a value that makes no sense (exit 2)."""

    exit_code: ClassVar[int] = 2


class CheckFailedError(KvtoolsError):
    """A check ran to its end and found a difference or a fault (exit 3)."""

    exit_code: ClassVar[int] = 3


def one_line(text: str) -> str:
    r"""Fold a message into one line, so that a script that reads stderr line by line gets it whole.

    >>> one_line("no such\n  table")
    'no such table'
    """
    return " ".join(text.split())


def check_working_folder() -> None:
    """Raise `BadInputError` where the working folder was removed: a path that is not absolute leads nowhere then."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise BadInputError("the working folder was removed; change to one that is there") from None
