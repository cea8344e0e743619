"""What a table costs, and that it gives memory back."""

from pathlib import Path

import numpy as np
import pytest

from kvtools._kvtable import Table


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_a_tiny_table_is_small():
    before = resident_bytes()
    tables = [Table("int64", "float32", 16, shards=8) for _ in range(200)]
    for table in tables:
        table.gather_or_insert(np.arange(20))
    use = tables[0].memory()
    assert use["row_bytes"] + use["index_bytes"] + use["column_bytes"] + use["slack_bytes"] < 100_000
    assert (resident_bytes() - before) / len(tables) < 150_000


def test_an_empty_table_holds_nothing():
    use = Table("int64", "float32", 16).memory()
    assert all(number == 0 for number in use.values())


@pytest.mark.parametrize("huge_pages", [True, False])
def test_overhead_at_two_million_rows(huge_pages):
    table = Table("int64", "float32", 16, huge_pages=huge_pages)
    rng = np.random.default_rng(0)
    out = np.empty((100_000, 16), np.float32)
    for _ in range(20):
        table.gather_or_insert(rng.integers(-(2**63), 2**63 - 1, 100_000), out=out)
    use = table.memory()
    assert use["row_bytes"] == len(table) * 64
    assert use["overhead_per_row"] <= 37
    resident = resident_bytes()
    assert resident > sum(use[name] for name in ("row_bytes", "index_bytes")) * 0.9
    table.clear()
    assert resident - resident_bytes() > 0.9 * use["row_bytes"]
    assert table.memory()["index_bytes"] == 0
    assert len(table) == 0
    table.gather_or_insert(np.arange(10))
    assert len(table) == 10


def test_removed_rows_count_as_slack_until_reused():
    table = Table("int64", "float32", 16)
    keys = np.arange(100_000)
    table.gather_or_insert(keys)
    full = table.memory()
    table.remove(keys[:50_000])
    half = table.memory()
    assert half["row_bytes"] == full["row_bytes"] // 2
    assert half["slack_bytes"] >= full["slack_bytes"] + 50_000 * 64
    table.gather_or_insert(keys[:50_000])
    assert table.memory()["slack_bytes"] == full["slack_bytes"]


def test_reserve_makes_room_once():
    table = Table("int64", "float32", 4, capacity_hint=500_000)
    before = table.memory()["index_bytes"]
    table.gather_or_insert(np.arange(500_000))
    assert before <= table.memory()["index_bytes"] <= 1.001 * before  # a few keys lie beside it


def test_ten_million_rows():
    table = Table("int64", "float32", 4, initializer={"kind": "uniform", "seed": 3})
    n, batch = 10_000_000, 200_000
    out = np.empty((batch, 4), np.float32)
    sums = []
    for begin in range(0, n, batch):
        table.gather_or_insert(np.arange(begin, begin + batch) * 7919, out=out)
        sums.append(float(out.sum(dtype=np.float64)))
    assert len(table) == n
    found = np.zeros(batch, bool)
    for i, begin in enumerate(range(0, n, batch)):
        table.gather(np.arange(begin, begin + batch) * 7919, out=out, found=found)
        assert found.all()
        assert float(out.sum(dtype=np.float64)) == sums[i]
    assert not table.contains(np.arange(batch) * 7919 + 1).any()
    assert table.memory()["overhead_per_row"] <= 40


@pytest.mark.parametrize(
    "keys",
    [
        np.arange(300_000),
        np.arange(300_000) << 32,
        np.arange(300_000) << 40 | 0x1234,
        np.arange(300_000) * 2**20,
        -np.arange(300_000) * 64,
        np.arange(300_000) * 0x9E3779B1,
        np.concatenate([np.int64(1) << np.arange(63), (np.arange(300_000) << 13) + 3]),
    ],
    ids=["sequential", "times 2^32", "same low bits", "times 2^20", "negative", "golden", "powers"],
)
def test_no_pattern_of_keys_makes_long_probes(keys):
    table = Table("int64", "float32", 1)
    table.gather_or_insert(np.ascontiguousarray(keys, np.int64))
    assert table.max_probe_length() <= 40
    assert table.memory()["index_bytes"] / len(table) <= 40


@pytest.mark.parametrize("shards", [8, 64])
@pytest.mark.parametrize("dim", [16, 64])
def test_many_shards_share_their_pages(shards, dim):
    table = Table("int64", "float32", dim, shards=shards)
    worst, out = 0.0, np.empty((20_000, dim), np.float32)
    for begin in range(0, 300_000, 20_000):
        table.gather_or_insert(np.arange(begin, begin + 20_000), out=out)
        use = table.memory()
        assert use["row_bytes"] == len(table) * dim * 4
        worst = max(worst, use["slack_bytes"])
    assert worst <= 7 * 2**20  # a piece for each shard, and of one page for all; 64 shards of dim 64 had 120 MB
