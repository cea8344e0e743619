"""What is left between the tests of two files is in no full collection that comes later, once these are long."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from garbage import LONG, Garbage


class Held:
    def __init__(self) -> None:
        self.cycle = self


@pytest.mark.parametrize(
    ("longest", "following", "frozen"),
    [(2 * LONG, "b.py", True), (2 * LONG, "a.py", False), (LONG / 2, "b.py", False), (2 * LONG, None, False)],
)
def test_what_stays_is_frozen_between_two_files(longest: float, following: str | None, frozen: bool) -> None:
    garbage, stays, goes = Garbage(), Held(), Held()
    gone = weakref.ref(goes)
    del goes
    garbage.longest = longest
    item: Any = SimpleNamespace(path=Path("a.py"))
    nextitem: Any = None if following is None else SimpleNamespace(path=Path(following))
    teardown = garbage.pytest_runtest_teardown(item, nextitem)
    next(teardown)
    with pytest.raises(StopIteration):
        next(teardown)
    assert all(one is not stays for one in gc.get_objects()) == frozen
    assert not frozen or (gone() is None and garbage.longest == 0.0)


def test_full_collections_are_timed() -> None:
    garbage = Garbage()
    garbage.note("start", {"generation": 1})
    garbage.note("stop", {"generation": 1})
    assert garbage.longest == 0.0
    garbage.note("start", {"generation": 2})
    sum(range(10_000))
    garbage.note("stop", {"generation": 2})
    assert garbage.longest > 0.0
