"""Full garbage collections look at what the tests of a file made, and at nothing that was there before them.

Some tests ask for one, and so do the plugin and the server, where something in a cycle has to go. Each looks at all
objects that there are: TensorFlow's modules, thousands of tests, and what earlier files have left in caches. What is
there when the first test begins is frozen, and what is left where a file ends is, once collections have become long.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

LONG = 0.05  # CPU seconds


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Garbage(), "garbage-of-files")


class Garbage:
    """Freezes what stays, between the tests of two files."""

    def __init__(self) -> None:
        self.longest = 0.0  # of the full collections since the last time
        self._began = 0.0

    def pytest_collection_finish(self) -> None:
        self.freeze()
        gc.callbacks.append(self.note)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        yield
        if self.longest > LONG and nextitem is not None and nextitem.path != item.path:
            self.freeze()

    def note(self, phase: str, info: dict[str, int]) -> None:
        """As one of `gc.callbacks`."""
        if info["generation"] == 2:
            if phase == "start":
                self._began = time.thread_time()
            else:
                self.longest = max(self.longest, time.thread_time() - self._began)

    def freeze(self) -> None:
        """Leave what is there now out of all collections to come, but for the garbage in it."""
        gc.collect()
        gc.freeze()
        self.longest = 0.0
