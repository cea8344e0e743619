"""The discrete model of a table's locks: where the answer is known, and where only the way of locking makes it."""

import doctest
from dataclasses import replace

import pytest


@pytest.fixture
def model(module):
    return module("lock_model")


@pytest.fixture
def costs(model):
    return model.Costs(read=30.0, write=60.0, group=10.0)


def run(model, costs, kind, processors, readers, writers, shards=8, milliseconds=20.0, **more):
    load = model.Load(processors, readers, writers, shards, **more)
    return model.simulate(load, costs, getattr(model, kind), milliseconds)


def test_examples(model):
    assert doctest.testmod(model).failed == 0


@pytest.mark.parametrize("kind", ["CountedLocks", "Seats"])
def test_one_thread_does_what_its_keys_cost(model, costs, kind):
    assert run(model, costs, kind, 1, 1, 0).reads == pytest.approx(1e3 / 30, rel=0.05)
    assert run(model, costs, kind, 1, 0, 1).writes == pytest.approx(1e3 / 70, rel=0.05)


@pytest.mark.parametrize("kind", ["CountedLocks", "Seats"])
def test_threads_beyond_the_processors_add_nothing(model, costs, kind):
    as_many = run(model, costs, kind, 2, 2, 0)
    assert as_many.reads == pytest.approx(2e3 / 30, rel=0.05)
    assert run(model, costs, kind, 2, 6, 0).reads == pytest.approx(as_many.reads, rel=0.05)
    assert as_many.waits == 0


def test_a_line_is_written_by_one_processor_at_a_time(model, costs):
    # Blocks of no work: 16 processors do nothing but count themselves in one lock, twice a block.
    nothing = replace(costs, read=0.0, line=100.0, own_line=1.0, abreast=1)
    alone = run(model, nothing, "CountedLocks", 1, 1, 0, shards=1, milliseconds=0.1).reads
    together = run(model, nothing, "CountedLocks", 16, 16, 0, shards=1, milliseconds=0.5).reads
    assert alone == pytest.approx(2048 / 2 * 1e3, rel=0.1)
    assert together == pytest.approx(2048 / 200 * 1e3, rel=0.1)


def test_a_long_write_holds_up_those_who_want_its_shard(model, costs):
    # All keys of the steps are in one shard, which is kept nearly all the time.
    one_shard = {"shares": (1.0,) + (0.0,) * 7}
    alone = run(model, costs, "Seats", 2, 1, 0).reads
    assert run(model, costs, "CountedLocks", 2, 1, 1, **one_shard).reads < 0.3 * alone
    beside = run(model, costs, "Seats", 2, 1, 1, **one_shard)
    assert beside.reads > 0.7 * alone and beside.writes > 0


def test_the_same_load_comes_to_the_same(model, costs):
    assert run(model, costs, "Seats", 4, 2, 2) == run(model, costs, "Seats", 4, 2, 2)


def test_the_page_has_what_was_measured_beside_the_word_of_the_model(model):
    def point(readers, writers):
        reads, writes = 33.0 * min(readers, 2), 14.0 * min(writers, 2)
        apart = {"reads_apart": reads, "writes_apart": writes}
        return {
            "shards": 8,
            "readers": readers,
            "writers": writers,
            "reads": reads,
            "writes": writes,
            "group_ns": 9,
        } | apart

    measured = {"line_transfer_ns": 75, "own_line_ns": 5, "batch": 65536, "read_batch": 65536}
    measured["points"] = [point(*threads) for threads in model.VALIDATED]
    costs = model.measured_costs(measured, 8, 1)
    validated = model.validate(measured, milliseconds=20.0)
    assert [(row["readers"], row["writers"]) for row in validated] == list(model.VALIDATED)
    assert validated[2]["model_reads"] == pytest.approx(66, rel=0.1)
    page = model.markdown(validated, model.predict(costs, (1, 4), milliseconds=1.0), costs)
    assert "A model's word, not measured" in page
    for block in page.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1
