"""Chunks that a thread reads while others are worked on."""

import threading

import pytest

from kvtools.read_ahead import read_ahead


def threads() -> int:
    return sum(thread.name == "kvtools-read-ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 50])
def test_all_come_in_their_order(count):
    assert list(read_ahead(iter(range(count)))) == list(range(count))
    assert threads() == 0


def test_an_error_comes_after_what_was_read_before_it():
    def damaged():
        yield from range(5)
        raise ValueError("the checksum differs")

    got = []
    with pytest.raises(ValueError, match="checksum"):
        for item in read_ahead(damaged()):
            got.append(item)
    assert got == [0, 1, 2, 3, 4]
    assert threads() == 0


def test_who_stops_early_ends_the_thread_and_reads_no_further_than_ahead():
    read = []

    def endless():
        while True:
            read.append(1)
            yield 1

    ahead = read_ahead(endless(), most=3)
    for _ in range(4):
        next(ahead)
    ahead.close()
    assert threads() == 0 and len(read) <= 4 + 3 + 2
