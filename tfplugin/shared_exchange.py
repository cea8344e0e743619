"""Exchanges among ranks of one machine through memory that they share; see kernels/include/kvtable/shared_exchange.h.

Horovod says who the ranks are. They connect by sockets of this machine, one for each pair, over which they tell each
other where what they send lies. Ranks that are on several machines, or cannot connect, exchange over Horovod.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context

from tfplugin.ops import raw

#: Set to 0 on any rank, all exchange over Horovod.
SWITCH = "KVTOOLS_SHARED_MEMORY"
#: What travels so; everything else goes over Horovod.
DTYPES = frozenset([tf.int32, tf.int64, tf.uint64, tf.float16, tf.bfloat16, tf.float32, tf.float64])

_TIMEOUT_S = 30.0
_SECRET_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

#: Gives all ranks what each one has.
AllGather = Callable[[Any], list[Any]]


class _Offer(NamedTuple):
    """What a rank says of itself."""

    machine: str | None
    wanted: bool
    address: bytes
    secret: bytes


def connect(rank: int, size: int, allgather: AllGather) -> bool:
    """Connects this process to the other ranks. All of them call it, and get the same.

    Returns:
      Whether `kv_shared_alltoall` works from now on: all ranks are on this machine, and want it.
    """
    with contextlib.closing(_listen(size)) as listener:
        mine = _Offer(_machine(), _is_wanted(), listener.getsockname(), secrets.token_bytes(_SECRET_BYTES))
        offers = [_Offer(*offer) for offer in allgather(tuple(mine))]
        if mine.machine is None or any(not one.wanted or one.machine != mine.machine for one in offers):
            disconnect()
            return False
        sockets: list[socket.socket | None] = [None] * size
        error: str | None = None
        try:
            _connect_all(listener, rank, offers, sockets)
        except OSError as failure:
            error = f"rank {rank}: {failure}"
    errors = [one for one in allgather(error) if one is not None]
    if errors:
        for one in filter(None, sockets):
            one.close()
        disconnect()
        if rank == 0:
            print(
                "tfplugin: the ranks are on one machine and cannot connect to share memory, so that they exchange over "
                f"Horovod, which is slower ({'; '.join(errors)}). {SWITCH}=0 says that this is as it should be.",
                file=sys.stderr,
                flush=True,
            )
        return False
    _hand_over(rank, [-1 if one is None else one.detach() for one in sockets])
    return True


def disconnect() -> None:
    """Ends the exchange of this process, if it has one; what is under way fails."""
    _hand_over(0, [])


def _machine() -> str | None:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def _is_wanted() -> bool:
    value = os.environ.get(SWITCH, "1").strip().lower()
    if value in ("1", "true", "yes", "on", ""):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{SWITCH} must be 0 or 1, got {value!r}.")


def _listen(size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # an address that the system makes up, and no file
    listener.listen(size)
    return listener


def _connect_all(listener: socket.socket, rank: int, offers: list[_Offer], sockets: list[socket.socket | None]) -> None:
    """Connects to the ranks below this one, and takes the calls of those above."""
    end = time.monotonic() + _TIMEOUT_S
    for other in range(rank):
        one = sockets[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.settimeout(_TIMEOUT_S)
        one.connect(offers[other].address)
        one.send(offers[other].secret + rank.to_bytes(4, "little"))
    while None in sockets[rank + 1 :]:
        listener.settimeout(max(end - time.monotonic(), 0.001))
        try:
            one, _ = listener.accept()
        except TimeoutError:
            missing = [r for r in range(rank + 1, len(sockets)) if sockets[r] is None]
            raise TimeoutError(f"nothing came of ranks {missing} in {_TIMEOUT_S:.0f} s") from None
        one.settimeout(_TIMEOUT_S)
        said = one.recv(_SECRET_BYTES + 4)
        other = int.from_bytes(said[_SECRET_BYTES:], "little")
        if said[:_SECRET_BYTES] != offers[rank].secret or not rank < other < len(sockets) or sockets[other]:
            one.close()  # a stranger's
            continue
        sockets[other] = one


def _hand_over(rank: int, sockets: list[int]) -> None:
    warned = not _seconds("HOROVOD_STALL_CHECK_DISABLE", 0)
    with context.eager_mode(), tf.device("CPU:0"):
        raw.kv_shared_exchange_connect(
            rank=rank,
            sockets=sockets,
            warn_after_s=_seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60) if warned else 0,
            fail_after_s=_seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0),
        )


def _seconds(variable: str, otherwise: int) -> int:
    """Of one of Horovod's settings, which are for these exchanges, too."""
    try:
        return max(0, math.ceil(float(os.environ.get(variable, otherwise))))
    except (ValueError, OverflowError):
        return otherwise
