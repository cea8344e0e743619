"""The arithmetic of docs/planning.md, over again: by hand, and from the messages that are sent."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from page_blocks import ROOT, blocks

PAGE = "docs/planning.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the blocks of the page define."""
    names: dict[str, Any] = {"__name__": "planning"}
    for block in blocks(PAGE):
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, PAGE, "exec", dont_inherit=True)
            exec(code, names)
    return names


def test_the_tables_are_what_the_blocks_compute(page: dict[str, Any]) -> None:
    tables = re.findall(r"^\|---\|.*\n((?:\|.*\n)*)", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert len(tables) == 2
    for table, wire_bytes in zip(tables, (4, 2), strict=True):
        model = page["Model"](wire_bytes=wire_bytes)
        expected = [page["row"](hosts, model) for hosts in (page["hosts_for"](), 500, 1000)]
        assert table.splitlines() == expected, "\n".join(expected)


def test_a_step_by_hand(page: dict[str, Any]) -> None:
    """500 hosts, all in whole numbers first."""
    p = page["plan"](500)
    assert p.rows == 2_000_000_000
    assert p.memory == 2_000_000_000 * (16 * 4 * 3 + 33) == 450_000_000_000 and p.fits
    ids = 16_384 * 260
    assert ids == 4_259_840
    keys = ids * 27 / 100
    of_one = keys / 2000  # what a rank asks another for: there are 4 on a host
    assert p.sent == pytest.approx(1999 * (of_one * 8 + 2 * of_one * 64 + 4 * 8 + 26 * 8))
    assert p.exchange == pytest.approx(p.sent / page["EXCHANGE"]) and page["EXCHANGE"] < 12.5e9 / 4
    assert p.messages == pytest.approx(3 * 1999 / 100_000)
    width = 64
    nanoseconds = ids * page["per_id"](width) + keys * page["per_key"](width)
    assert p.processor == pytest.approx(nanoseconds / 1e9 / (16 * 0.7))
    assert p.at_least == pytest.approx(max(p.processor, p.exchange) + p.messages)
    assert p.at_most == pytest.approx(p.processor + p.exchange + p.messages)
    assert p.save == pytest.approx(2e9 * 200 / 2e9)
    slow = page["plan"](500, host=page["Host"](network=1e9))
    assert slow.exchange == pytest.approx(slow.sent * 4 / 1e9)  # the ranks of a host share its network


def test_fewer_hosts_than_needed_do_not_fit(page: dict[str, Any]) -> None:
    needed = page["hosts_for"]()
    assert page["plan"](needed).fits and not page["plan"](needed - 1).fits


@pytest.mark.parametrize("hosts", [2, 5])
@pytest.mark.parametrize("wire_bytes", [4, 2])
def test_a_step_sends_the_bytes_of_the_plan(page: dict[str, Any], hosts: int, wire_bytes: int) -> None:
    """The messages for the other ranks as the ops make them: of keys, of rows, and of gradients."""
    tf, raw = pytest.importorskip("tensorflow"), pytest.importorskip("tfplugin.ops").raw
    tables, samples, hotness, dim = 3, 40, 4, 16
    rng = np.random.default_rng(hosts)
    ids = [rng.integers(0, 200, samples * hotness) for _ in range(tables)]
    keys = sum(len(np.unique(own)) for own in ids)
    message, splits, _ = raw.kv_exchange_request(
        [tf.constant(own) for own in ids],
        [tf.range(0, samples * hotness + 1, hotness, dtype=tf.int64)] * tables,
        [],
        [],
        [],
        rank=0,
        ranks=hosts,
        names=["a", "b", "c"],
        owners=[-1] * tables,
        rows=[-1] * tables,
        key_dtypes=[tf.int64] * tables,
        dims=[dim] * tables,
        hotness=[-1] * tables,
        outer=[-1] * tables,
        weighted=[False] * tables,
    )
    counts = np.stack([part[4 : 4 + tables] for part in np.split(message.numpy(), np.cumsum(splits)[:-1])])
    # An owner's reply to a rank has a row for each key that it was asked for; so has the gradient on its way back.
    wire = tf.float16 if wire_bytes == 2 else tf.float32
    rows = [tf.ones([of_table, dim]) for of_table in counts.sum(axis=0)]
    reply, _ = raw.kv_exchange_reply(rows, counts, dims=[dim] * tables, Tflat=wire)
    assert counts.sum() == keys
    to_others = (message.numpy().nbytes - 8 * int(splits[0])) + 2 * (
        reply.numpy().nbytes - int(counts[0].sum()) * dim * wire_bytes
    )
    model = page["Model"](
        tables=tables,
        dim=dim,
        samples=samples,
        ids=tables * hotness,
        distinct=keys / sum(map(len, ids)),
        wire_bytes=wire_bytes,
    )
    # The plan has keys spread evenly; here the first rank has some more or fewer than its share.
    more = keys / hosts - int(counts[0].sum())
    expected = page["plan"](hosts, model, page["Host"](ranks=1)).sent + more * (
        page["KEY_BYTES"] + 2 * dim * wire_bytes
    )
    assert to_others == pytest.approx(expected)
