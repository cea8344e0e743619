"""Metadata of checkpoints is JSON, whatever the process's locale is."""

from __future__ import annotations

import json
import locale

import numpy as np
import pytest
import tensorflow as tf

from tfplugin.ops import raw

# LC_NUMERIC of glibc's de_DE.UTF-8, as localedef makes it: a machine need not have the sources of locales.
GERMAN_NUMBERS = bytes.fromhex(
    "14110320 06000000 20000000 22000000 24000000 28000000 2c000000 30000000"
    "2c002e00 03030000 2c000000 2e000000 5554462d3800"
)


@pytest.fixture
def german_numbers(tmp_path, monkeypatch):
    folder = tmp_path / "de_XX.UTF-8"
    folder.mkdir()
    (folder / "LC_NUMERIC").write_bytes(GERMAN_NUMBERS)
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    before = locale.setlocale(locale.LC_NUMERIC)
    locale.setlocale(locale.LC_NUMERIC, "de_XX.UTF-8")
    try:
        assert locale.localeconv()["decimal_point"] == "," and locale.str(0.5) == "0,5"
        yield
    finally:
        locale.setlocale(locale.LC_NUMERIC, before)


def table(initializer):
    made = raw.kv_table_handle(variable="emb", key_dtype=tf.int64, dtype=tf.float32, shape=[4], dim=4, anonymous=True)
    if initializer is not None:
        raw.kv_table_initialize(made, tf.zeros([0, 4]), initializer=json.dumps(initializer))
    return made


def test_a_checkpoint_is_written_and_read_under_a_locale_with_decimal_commas(german_numbers, tmp_path):
    initializer = {"kind": "uniform", "a": -0.05, "b": 1234567.5, "seed": 2**64 - 1}
    slots = [{"name": "Ftrl.accum", "width": 4, "init": "constant", "constant": 0.1}]
    written = table(initializer)
    keys = tf.constant([1, 2, 3], tf.int64)
    raw.kv_table_read_rows(
        written,
        keys,
        dtype=tf.float32,
        slots=json.dumps(slots),
        all_slots=json.dumps(slots),
        generation=1,
        widths=[4, 4],
        N=2,
    )
    rows, _ = raw.kv_table_gather(written, keys, dtype=tf.float32, dim=4)
    prefix = str(tmp_path / "c")
    raw.kv_table_save(prefix, [written], tensor_prefixes=["t"], names=["emb"], part=[0], parts=[1])

    meta = json.loads(tf.train.load_checkpoint(prefix).get_tensor("t-kvmeta"))
    assert meta["initializer"] == initializer and meta["slots"] == slots
    read = table(None)
    raw.kv_table_restore(read, prefix, tensor_prefix="t", part_infix="/part_", part=0, parts=1)
    assert json.loads(raw.kv_table_slots(read).numpy()) == slots
    more = tf.constant([1, 2, 3, 77], tf.int64)
    got, _ = raw.kv_table_gather(read, more, dtype=tf.float32, dim=4, mode="initial")
    wanted, _ = raw.kv_table_gather(written, more, dtype=tf.float32, dim=4, mode="initial")
    assert np.array_equal(got[:3], rows) and np.array_equal(got, wanted)
    assert float(np.abs(got).max()) > 1000  # 1234567.5 was not read as 1234567 or as 1


# No smaller ones: TensorFlow's threads take what is below the smallest normal number for zero.
@pytest.mark.parametrize(
    "number", [0.1, -0.0, 1e300, 2.2250738585072014e-308, 1 / 3, 1e22, 1.7976931348623157e308, float("inf")]
)
def test_numbers_come_back_as_they_were(german_numbers, number):
    slots = [{"name": "s", "width": 1, "init": "constant", "constant": number}]
    made = table({"kind": "constant", "a": 0.0})
    raw.kv_table_read_rows(
        made,
        tf.constant([], tf.int64),
        dtype=tf.float32,
        slots=json.dumps(slots),
        all_slots=json.dumps(slots),
        generation=1,
        widths=[4, 1],
        N=2,
    )
    found = json.loads(raw.kv_table_slots(made).numpy())[0]["constant"]
    assert np.float64(found).tobytes() == np.float64(number).tobytes()
