"""Ports for servers that have to be told theirs before they start."""

from __future__ import annotations

import contextlib
import random
import socket

_draw = random.SystemRandom()  # not what a test seeds: two processes would draw the same


def free_ports(count: int) -> list[int]:
    """Ports that are free, and so are those 10,000 above, where the nodes of a Redis cluster talk.

    They lie below those that Linux gives whoever asks for any port (from 32,768 on): nobody is given one of them
    before the server listens there, however long that takes.
    """
    ports: list[int] = []
    for port in _draw.sample(range(12_000, 22_000), 10_000):
        with socket.socket() as low, socket.socket() as high, contextlib.suppress(OSError):
            low.bind(("127.0.0.1", port))
            high.bind(("127.0.0.1", port + 10_000))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError(f"{count} ports are not free")
