"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what it is, in a few words.
        status: "ok"; "note": something optional is not there; "warning": it works, and not as well as it could;
            "error": it does not work.
        value: what was found.
        advice: what to do about it, "" where there is nothing to do.
    """

    name: str
    status: Status
    value: str
    advice: str = ""
