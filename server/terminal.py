"""Whether there is a terminal: SIGHUP has a server look for new versions, and it also comes when a terminal closes."""

from __future__ import annotations

import os


def has_terminal() -> bool:
    """Return whether this process has a terminal that controls it; a closed one is none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
