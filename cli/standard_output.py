"""Standard output and standard error that nobody reads, or that are full, and a command that has work to do."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from kvtools.remote.shown import shown


def open_standard_files() -> None:
    """Open what the caller closed (`>&-`) on the null device, so that no file of ours gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(opened, "w" if number else "r"))


def escape_unencodable() -> None:
    """Have standard output escape what its encoding has not, as standard error does: names in a locale of few letters,
    and of files whose names are no UTF-8. (Locales `C` and `POSIX` have "surrogateescape", which is of no help for the
    former.)"""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


class RefusedOutputError(Exception):
    """Standard output does not take what is printed: whoever read it has gone, or the disk behind it is full."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(f"writing to standard output: {reason.strerror or reason}")
        self.reason = reason
        self.reader_gone = isinstance(reason, BrokenPipeError)


class RefusedReportError(RefusedOutputError):
    """Standard output does not take what a command says at its end, having done its work."""

    def __str__(self) -> str:
        return f"{super().__str__()}; only this report is lost: what the command was to write is whole, in its place"


class _Output:
    """A stream whose errors are `RefusedOutputError`, so that nobody takes them for those of another file.

    What stands for a file of a store is told by its URL.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(shown(text))
        except OSError as error:
            raise RefusedOutputError(error) from error

    def write_bytes(self, data: bytes) -> None:
        """Write UTF-8 past the text's encoder, which takes longer than many rows of numbers take to make."""
        binary = getattr(self._stream, "buffer", None)
        if binary is None:  # a stream of text alone
            self.write(data.decode())
            return
        self.flush()
        try:
            binary.write(data)
        except OSError as error:
            raise RefusedOutputError(error) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise RefusedOutputError(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def write_bytes(data: bytes) -> None:
    """Write UTF-8 to standard output, behind what was printed to it."""
    if isinstance(sys.stdout, _Output):
        sys.stdout.write_bytes(data)
    else:
        sys.stdout.write(data.decode())


class _Told:
    """Standard error, with URLs in place of the paths that stand for them; a log that is full or gone stops no work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(shown(text))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Held(io.StringIO):
    """What is held back; `encoding` is the one that it will be printed in."""

    encoding = ""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.encoding = encoding


@contextlib.contextmanager
def standard_output(*, held_back: bool, dropped: bool = False) -> Iterator[None]:
    """Raise `RefusedOutputError` where what the block prints is refused; with `held_back`, when it has ended well, and
    as `RefusedReportError`. With
    `dropped`, nobody wants what is held back, and it is not printed at all.

    What is held back is printed when the block has ended, or failed, so that no pipe that closes cuts it short. A
    terminal shows everything at once: it goes away with a signal, not with an error.
    """
    stream: Any = _Output(sys.stdout)
    with contextlib.redirect_stdout(stream):
        if not held_back or (stream.isatty() and not dropped):
            yield
        else:
            held = _Held(stream.encoding)
            try:
                with contextlib.redirect_stdout(held):
                    yield
            except BaseException:
                with contextlib.suppress(RefusedOutputError):
                    stream.write("" if dropped else held.getvalue())
                raise
            try:
                stream.write("" if dropped else held.getvalue())
                stream.flush()
            except RefusedOutputError as error:
                raise RefusedReportError(error.reason) from error
        stream.flush()


@contextlib.contextmanager
def standard_error() -> Iterator[None]:
    """Let the block go on where nobody takes what it says on standard error."""
    stream = sys.stderr
    with contextlib.redirect_stderr(_Told(stream)):
        try:
            yield
        finally:
            _give_up(stream)


def give_up_output() -> None:
    """Print what is still to be printed, if it can be."""
    _give_up(sys.stdout)


def _give_up(stream: TextIO) -> None:
    """Write what is still to be written, if it can be; if not, Python must not try again when it exits."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
