"""What every kind of work hands to the worker once its tables are filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _nothing() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Prepared:
    """Work that is ready to be timed."""

    step: Callable[[], Any]  # one call
    check: float | None = None  # on which all libraries must agree to 1e-4
    evaluate: Callable[[], dict[str, Any]] = _nothing  # after the last call
