"""Import TensorFlow without the notes that it writes to stderr as it starts, whatever its log level."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType


def import_quietly(*names: str) -> list[ModuleType]:
    """Import modules; what they write to file descriptor 2 meanwhile is dropped, unless the first was there before.

    If it fails, what was written is passed on, and the error is raised as it is.

    Example:
        ```python
        (tf,) = import_quietly("tensorflow")
        ```
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # 2 complains of GPUs that are not there
    with contextlib.nullcontext() if names[0] in sys.modules else _silence():
        return [importlib.import_module(name) for name in names]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, stderr)
        said = stack.enter_context(tempfile.TemporaryFile())
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(stderr, 2)
            said.seek(0)
            with open(2, "wb", closefd=False) as file:
                file.write(said.read())
            raise
        finally:
            os.dup2(stderr, 2)
