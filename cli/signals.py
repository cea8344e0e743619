"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it was writing is removed on the way out."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SAID = {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class SignalError(BaseException):
    """A signal came; `number` is which. No `Exception`, so that nothing takes it for a fault and goes on."""

    def __init__(self, number: int) -> None:
        super().__init__(_SAID[signal.Signals(number)])
        self.number = number


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `SignalError` inside the block, a second one of them end the process.

    A signal that is ignored (`nohup`) or handled already is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in _SAID if signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        raise SignalError(number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
