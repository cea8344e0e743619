"""How ranks find out whether they share memory, and connect. Ranks are threads here; `tests/sok` has real ones."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tfplugin import ranks, shared_exchange
from tfplugin.ops import raw

RANKS = 3
Call = Callable[[int, shared_exchange.AllGather], Any]


@pytest.fixture
def handed_over(monkeypatch):
    """What each thread's rank hands to the ops: {rank: sockets}."""
    given: dict[int, list[int]] = {}

    def hand_over(rank: int, sockets: list[int]) -> None:
        if sockets:
            given[rank] = sockets

    monkeypatch.setattr(shared_exchange, "_hand_over", hand_over)
    yield given
    for sockets in given.values():
        for number in sockets:
            if number >= 0:
                socket.close(number)


def _on_ranks(call: Call) -> list[Any]:
    """What `call(rank, allgather)` gives on each of the ranks, or how it fails."""
    barrier = threading.Barrier(RANKS)
    said: list[Any] = [None] * RANKS

    def run(rank: int) -> Any:
        def allgather(values: Any) -> list[Any]:
            said[rank] = values
            barrier.wait(60)
            everything = list(said)
            barrier.wait(60)
            return everything

        return call(rank, allgather)

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(run, range(RANKS)))


def test_each_rank_has_a_socket_to_every_other(handed_over):
    assert _on_ranks(lambda rank, allgather: shared_exchange.connect(rank, RANKS, allgather)) == [True] * RANKS
    ends = {
        rank: [socket.socket(fileno=socket.dup(n)) if n >= 0 else None for n in handed_over[rank]]
        for rank in range(RANKS)
    }
    for one in range(RANKS):
        for other in range(RANKS):
            if one != other:
                ends[one][other].send(f"{one} to {other}".encode())
    for one in range(RANKS):
        for other in range(RANKS):
            assert one == other or ends[other][one].recv(100) == f"{one} to {other}".encode()
    for one in ends.values():
        for end in filter(None, one):
            end.close()


@pytest.mark.parametrize("which", ["another machine", "unknown machine", "not wanted"])
def test_ranks_that_do_not_all_share_a_machine_exchange_over_horovod(handed_over, monkeypatch, which, capsys):
    def of_rank(rank: int, allgather: shared_exchange.AllGather) -> bool:
        def gather(values: Any) -> list[Any]:
            if rank == 1 and isinstance(values, tuple):
                offer = shared_exchange._Offer(*values)
                if which == "not wanted":
                    offer = offer._replace(wanted=False)
                else:
                    offer = offer._replace(machine=None if which == "unknown machine" else "elsewhere")
                values = tuple(offer)
            return allgather(values)

        return shared_exchange.connect(rank, RANKS, gather)

    assert _on_ranks(of_rank) == [False] * RANKS
    assert not handed_over
    assert capsys.readouterr().err == ""


def test_ranks_that_cannot_connect_say_so_once_and_exchange_over_horovod(handed_over, capsys):
    """As in containers, each with a network of its own."""

    def of_rank(rank: int, allgather: shared_exchange.AllGather) -> bool:
        def gather(values: Any) -> list[Any]:
            if rank == 0 and isinstance(values, tuple):
                values = tuple(shared_exchange._Offer(*values)._replace(address=b"\0nobody listens here"))
            return allgather(values)

        return shared_exchange.connect(rank, RANKS, gather)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_exchange, "_TIMEOUT_S", 0.5)
        assert _on_ranks(of_rank) == [False] * RANKS
    assert not handed_over
    told = capsys.readouterr().err
    assert told.count("cannot connect to share memory") == 1
    assert "rank 1: " in told and "rank 2: " in told and "KVTOOLS_SHARED_MEMORY=0" in told


def test_a_stranger_is_not_taken_for_a_rank(handed_over):
    def of_rank(rank: int, allgather: shared_exchange.AllGather) -> bool:
        def gather(values: Any) -> list[Any]:
            everything = allgather(values)
            if rank == 2 and isinstance(values, tuple):
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stranger.connect(shared_exchange._Offer(*everything[0]).address)
                stranger.send(b"x" * 16 + (1).to_bytes(4, "little"))
            return everything

        return shared_exchange.connect(rank, RANKS, gather)

    assert _on_ranks(of_rank) == [True] * RANKS
    assert set(handed_over) == {0, 1, 2}


@pytest.mark.parametrize(("value", "wanted"), [("0", False), ("off", False), ("1", True), ("", True), ("YES", True)])
def test_the_switch(monkeypatch, value, wanted):
    monkeypatch.setenv(shared_exchange.SWITCH, value)
    assert shared_exchange._is_wanted() is wanted


def test_a_switch_that_says_neither_is_told(monkeypatch):
    monkeypatch.setenv(shared_exchange.SWITCH, "maybe")
    with pytest.raises(ValueError, match="KVTOOLS_SHARED_MEMORY must be 0 or 1, got 'maybe'"):
        shared_exchange._is_wanted()


def test_an_elastic_run_exchanges_over_horovod(monkeypatch):
    """A rank that comes later connects while the others wait for what they have in common: nothing is asked of them."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    world = ranks.HorovodRanks(SimpleNamespace(rank=lambda: 0, size=lambda: 2))
    world.connect()
    assert not world._shares(tf.zeros([2]))


def test_what_is_under_way_fails_when_the_exchange_ends():
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shared_exchange._hand_over(0, [-1, mine.detach()])
    with theirs, ThreadPoolExecutor(1) as threads:
        waits = threads.submit(raw.kv_shared_alltoall, tf.zeros([2]), [1, 1], exchange="x", ranks=2)
        assert theirs.recv(1000)
        shared_exchange.disconnect()
        with pytest.raises(tf.errors.UnknownError, match="connected anew during exchange 'x'"):
            waits.result(60)


@pytest.mark.parametrize(("value", "seconds"), [("90", 90), ("0.5", 1), ("-3", 0), ("soon", 60), ("inf", 60)])
def test_times_of_horovod_are_ours(monkeypatch, value, seconds):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", value)
    assert shared_exchange._seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60) == seconds
