"""Whether an event loop looks for the next lookup for a while before it sleeps: `Spin`, by the settings."""

from __future__ import annotations

import asyncio

from kvtools._snapshot import Spin
from kvtools.server.observer import Observer
from kvtools.server.settings import Settings

#: How long, where nobody has said. A client on the same machine that waits for its answer asks again within this time.
_WHILE = 100e-6


def make_spin(settings: Settings, observer: Observer, loop: asyncio.AbstractEventLoop) -> Spin | None:
    """Return what keeps `loop` from sleeping for a while after a lookup, and have it counted; None: nothing does."""
    if settings.spin == 0:
        return None
    bounded = settings.spin is None
    spin = Spin(_WHILE if settings.spin is None else settings.spin, loop.call_soon, bounded)
    observer.on_spin(spin)
    return spin
