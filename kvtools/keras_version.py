"""The oldest Keras 3 that tables are trained, saved and exported with. Nothing here imports Keras."""

from __future__ import annotations

import re

FIRST_KERAS = (3, 8)
UPGRADE = f"pip install --upgrade 'keras>={FIRST_KERAS[0]}.{FIRST_KERAS[1]}'"


def too_old(version: str) -> str:
    """Return what is to be said of a Keras that is older than those that work, "" if it is not.

    >>> too_old("3.3.3")
    'Keras 3.3.3 is older than what kvtools works with, 3.8 or later'
    >>> too_old("3.10.0")
    ''
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= FIRST_KERAS:
        return ""
    return f"Keras {version} is older than what kvtools works with, {FIRST_KERAS[0]}.{FIRST_KERAS[1]} or later"
