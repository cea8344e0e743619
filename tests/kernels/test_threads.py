"""Many threads on one table."""

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvtools._kvtable import Table

DIM = 33


def run_all(*bodies: Callable[[Callable[[], bool]], None], seconds: float = 1.5) -> None:
    """Runs each body(go_on) in a thread, and raises what any of them raised."""
    errors: list[BaseException] = []
    end = time.monotonic() + seconds

    def guarded(body):
        try:
            body(lambda: time.monotonic() < end and not errors)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


def assert_whole(rows: np.ndarray) -> None:
    assert (rows == rows[:, :1]).all()


def writer(table, seed):
    def body(go_on):
        rng = np.random.default_rng(seed)
        while go_on():
            keys = rng.integers(0, 20_000, 3000)
            table.upsert(keys, np.repeat(rng.random((3000, 1), np.float32), DIM, 1), frequency=1)

    return body


def reader(table):
    def body(go_on):
        rng = np.random.default_rng(0)
        while go_on():
            assert_whole(table.gather(rng.integers(0, 20_000, 5000), "initial"))
            assert_whole(table.gather_or_insert(rng.integers(0, 20_000, 500)))

    return body


def remover(table):
    def body(go_on):
        rng = np.random.default_rng(5)
        while go_on():
            table.remove(rng.integers(0, 20_000, 500))

    return body


def exporter(table):
    def body(go_on):
        while go_on():
            for keys, _, _, columns in table.export([0], chunk=777):
                assert len(keys) == len(columns[0])
                assert_whole(columns[0])

    return body


def relayouter(table):
    def body(go_on):
        while go_on():
            table.ensure_slots([("a", 3), ("b", DIM, "copy_value")])
            table.ensure_slots([("c", 5, "constant", 1.0)])
            table.ensure_slots([])

    return body


def test_readers_never_see_a_torn_row():
    table = Table("int64", "float32", DIM, initializer=0.5, threads=2)
    run_all(writer(table, 1), writer(table, 2), reader(table), remover(table))


def test_export_under_concurrent_writes_gives_whole_rows():
    table = Table("int64", "float32", DIM, initializer=0.5, threads=2)
    run_all(writer(table, 1), remover(table), exporter(table))


def test_export_gives_every_row_that_stays_and_no_key_twice():
    table = Table("int64", "float32", 1, threads=2)
    stay = np.arange(-5000, 0)
    table.gather_or_insert(stay)

    def export(go_on):
        while go_on():
            keys = np.concatenate([k for k, *_ in table.export(chunk=500)])
            assert len(np.unique(keys)) == len(keys)
            kept = keys[keys < 0]
            assert len(kept) == len(stay) and len(np.unique(kept)) == len(stay)

    def churn(go_on):
        rng = np.random.default_rng(3)
        while go_on():
            keys = rng.integers(0, 10_000, 2000)
            table.gather_or_insert(keys)
            table.remove(keys)

    run_all(export, churn)


def test_slots_change_while_everybody_works():
    table = Table("int64", "float32", DIM, initializer=0.5, threads=2)
    run_all(writer(table, 1), reader(table), remover(table), exporter(table), relayouter(table))
    table.ensure_slots([("b", DIM, "copy_value")])
    keys = np.arange(20_000)
    value, copy = table.gather_columns(keys)
    np.testing.assert_array_equal(value, copy)


def test_clear_and_reserve_among_others():
    table = Table("int64", "float32", DIM, initializer=0.5, threads=2)

    def clear(go_on):
        while go_on():
            table.clear()
            table.reserve(30_000)
            time.sleep(0.01)

    run_all(writer(table, 1), reader(table), remover(table), exporter(table), clear)


def test_concurrent_accumulates_lose_nothing():
    table = Table("int64", "float32", 2, threads=2)
    keys = np.arange(30_000) % 1000
    ones = np.ones((30_000, 2), np.float32)

    def body(go_on):
        for _ in range(10):
            table.accumulate(keys, ones)

    run_all(body, body, body)
    assert (table.gather(np.arange(1000)) == 30 * 3 * 10).all()


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_works_and_exits():
    table = Table("int64", "float32", 2, threads=2)
    table.gather_or_insert(np.arange(100_000))
    child = os.fork()
    if child == 0:
        rows = table.gather_or_insert(np.arange(200_000))
        del table
        os._exit(0 if rows.shape == (200_000, 2) else 1)
    for _ in range(2000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert status == 0
            return
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")
