"""Checkpoints that are not what docs/checkpoint-layout.md says: DataLossError that names the file and the tensor."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import tensorflow as tf

from tfplugin.ops import raw

CONSTANT = '{"kind": "constant", "a": 0.0}'
DEEP = "[" * 100 + "]" * 100


@pytest.fixture
def tensors(make_sample, table_tensors):
    return table_tensors(make_sample(name="t", rows=20, dim=4, slots=("Adam.m",)))


def restore(prefix, **kwargs):
    table = raw.kv_table_handle(variable="emb", key_dtype=tf.int64, dtype=tf.float32, shape=[4], dim=4, anonymous=True)
    how = {"tensor_prefix": "t", "part_infix": "/part_", "part": 0, "parts": 1, "initializer": CONSTANT, **kwargs}
    raw.kv_table_restore(table, str(prefix), **how)
    return int(raw.kv_table_size(table))


def is_damaged(prefix, tensor, message="", **kwargs):
    with pytest.raises(tf.errors.DataLossError) as error:
        restore(prefix, **kwargs)
    assert f"Checkpoint '{prefix}': tensor '{tensor}' " in error.value.message, error.value.message
    assert message in error.value.message and "is damaged" in error.value.message


def test_a_whole_checkpoint_is_restored(tmp_path, save, tensors):
    assert restore(save(tmp_path / "whole", tensors)) == 20
    assert restore(save(tmp_path / "sliced", tensors, slices=3)) == 20
    assert restore(save(tmp_path / "shards", tensors, shards=2, slices=3)) == 20
    assert restore(tmp_path / "sliced", parts=3, part=1) < 20


BAD_TENSORS = {
    "keys of rank 2": {"t-keys": lambda a: a.reshape(-1, 1)},
    "one key": {"t-keys": lambda a: a[0]},
    "fewer keys": {"t-keys": lambda a: a[:-1]},
    "more keys": {"t-keys": lambda a: np.append(a, 77)},
    "no keys": {"t-keys": lambda _: None},
    "values of rank 1": {"t-values": lambda a: a.ravel()},
    "values of rank 3": {"t-values": lambda a: a[:, :, None]},
    "fewer values": {"t-values": lambda a: a[:-1]},
    "narrow values": {"t-values": lambda a: a[:, :3]},
    "no values": {"t-values": lambda _: None},
    "fewer slots": {"t-slot-Adam.m": lambda a: a[:-1]},
    "wide slots": {"t-slot-Adam.m": lambda a: np.hstack([a, a])},
    "slots of another dtype": {"t-slot-Adam.m": lambda a: a.astype(np.float64)},
    "no slots": {"t-slot-Adam.m": lambda _: None},
    "fewer freqs": {"t-freqs": lambda a: a[:-1]},
    "freqs of rank 2": {"t-freqs": lambda a: a[:, None]},
    "freqs of another dtype": {"t-freqs": lambda a: a.astype(np.int64)},
    "more versions": {"t-versions": lambda a: np.append(a, a)},
    "scores of another dtype": {"t-scores": lambda _: np.zeros(20, np.int64)},
    "fewer scores": {"t-scores": lambda _: np.zeros(3, np.uint64)},
    "meta of bytes": {"t-kvmeta": lambda _: np.zeros(24, np.uint8)},
    "meta of a number": {"t-kvmeta": lambda _: np.array(1)},
    "two metas": {"t-kvmeta": lambda a: np.array([a, a], object)},
    "no meta in it": {"t-kvmeta": lambda _: np.zeros([0], np.int64)},
}


@pytest.mark.parametrize("bad", BAD_TENSORS)
def test_tensors_that_do_not_fit(tmp_path, save, tensors, bad):
    ((name, change),) = BAD_TENSORS[bad].items()
    changed = change(tensors.pop(name, None))
    if changed is not None:
        tensors[name] = changed
    prefix = save(tmp_path / "c", tensors)
    # Other columns are held against the keys.
    is_damaged(prefix, "t-values" if name == "t-keys" and changed is not None and changed.ndim == 1 else name)


def slot(**fields):
    return {"slots": [{"name": "Adam.m", "width": 4, "init": "constant", "constant": 0.0, **fields}]}


@pytest.mark.parametrize(
    "fields",
    [
        {"layout": "1"},
        {"layout": None},
        {"parts": 0},
        {"parts": -1},
        {"parts": "1"},
        {"parts": 2**70},
        {"dim": -4},
        {"dim": 0},
        {"dim": 4.5},
        {"dim": "4"},
        {"dim": 1e300},
        {"slots": None},
        {"slots": {}},
        {"slots": "Adam.m"},
        {"slots": [1]},
        {"slots": [{}]},
        slot(width=-1),
        slot(width=0),
        slot(width=2**24 + 1),
        slot(width=2**62),
        slot(width=2**64),
        slot(width="4"),
        slot(width=[4]),
        slot(width=5, init="copy_value"),
        slot(name=5),
        slot(init="?"),
        slot(init=None),
        slot(constant="0"),
        {"slots": slot()["slots"] * 2},
        {"initializer": None},
        {"initializer": []},
        {"initializer": "constant"},
        {"initializer": {"kind": 3}},
        {"initializer": {"kind": "magic"}},
        {"initializer": {"kind": "uniform", "a": "x"}},
        {"initializer": {"kind": "uniform", "seed": -1}},
        {"initializer": {"kind": "uniform", "seed": 2**64}},
        {"policies": {"max_capacity": 9, "eviction": 3}},
    ],
    ids=json.dumps,
)
def test_metadata_of_wrong_types_and_ranges(tmp_path, save, tensors, fields):
    meta = {**json.loads(tensors["t-kvmeta"]), **fields}
    is_damaged(save(tmp_path / "c", {**tensors, "t-kvmeta": json.dumps(meta)}), "t-kvmeta")


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", "4", '"x"', "{} {}", "\0", DEEP, '{"layout": 1,5}', '{"a": "\\ud800\\u0041"}']
)
def test_metadata_that_is_none(tmp_path, save, tensors, text):
    is_damaged(save(tmp_path / "c", {**tensors, "t-kvmeta": text}), "t-kvmeta")


def test_metadata_changed_at_random_is_an_error_or_still_metadata(tmp_path, save, tensors):
    rng = random.Random(7)
    text = tensors["t-kvmeta"]
    for i in range(60):
        at = rng.randrange(len(text))
        changed = text[:at] + rng.choice('-0195{}[]",:e.x') + text[at + rng.randrange(3) :]
        try:
            assert restore(save(tmp_path / str(i), {**tensors, "t-kvmeta": changed})) == 20
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            assert "'t" in error.message and str(tmp_path / str(i)) in error.message


def test_initial_rows_that_do_not_fit(tmp_path, save, tensors):
    meta = {**json.loads(tensors["t-kvmeta"]), "initializer": {"kind": "rows"}}
    for i, rows in enumerate(
        (None, np.zeros([0, 4], "f4"), np.zeros([3, 5], "f4"), np.zeros(4, "f4"), np.zeros([3, 4]))
    ):
        more = {} if rows is None else {"t-init": rows}
        is_damaged(save(tmp_path / str(i), {**tensors, "t-kvmeta": json.dumps(meta), **more}), "t-init")


def test_slices_that_leave_rows_out_or_have_them_twice(tmp_path, save, tensors):
    keys, values = tensors["t-keys"], tensors["t-values"]
    for i, (name, slices) in enumerate(
        {
            "half": ("t-keys", [("20 0,10", keys[:10])]),
            "a hole": ("t-keys", [("20 0,5", keys[:5]), ("20 15,5", keys[15:])]),
            "the end": ("t-keys", [("20 10,10", keys[10:])]),
            "values": ("t-values", [("20 4 0,10:-", values[:10])]),
            "columns": ("t-values", [("20 4 -:0,2", values[:, :2]), ("20 4 -:2,2", values[:, 2:])]),
        }.values()
    ):
        is_damaged(save(tmp_path / str(i), {**tensors, name: slices}), name, "slice")


def test_more_rows_than_the_file_has_bytes(tmp_path, save, tensors):
    n = 2**40
    sliced = {}
    for name, value in tensors.items():
        if name != "t-kvmeta":
            shape = " ".join(map(str, (n, *value.shape[1:])))
            value = [(f"{shape} 0,20" + ":-" * (value.ndim - 1), value)]
        sliced[name] = value
    is_damaged(save(tmp_path / "c", sliced), "t-keys", "more than the")


def test_keys_that_belong_to_another_part(tmp_path, save, make_sample, table_tensors):
    tensors = table_tensors(make_sample(name="t", rows=20, dim=4, slots=()), parts=2)
    assert restore(save(tmp_path / "whole", tensors), parts=2, part=1) > 0
    for column in ("keys", "values", "freqs", "versions"):
        a, b = f"t/part_0-{column}", f"t/part_1-{column}"
        tensors[a], tensors[b] = tensors[b], tensors[a]
    is_damaged(save(tmp_path / "swapped", tensors), "t/part_1-keys", "belong to other parts", parts=2, part=1)


def test_data_that_were_changed_or_cut(tmp_path, save, tensors):
    prefix = save(tmp_path / "c", tensors)
    (file,) = tmp_path.glob("c.data-*")
    whole = file.read_bytes()
    at = whole.index(tensors["t-values"].tobytes())
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    is_damaged(prefix, "t-values", "hecksum")
    file.write_bytes(whole[: at + 20])
    with pytest.raises(tf.errors.DataLossError, match=r"tensor 't-.*is damaged"):
        restore(prefix)
    file.unlink()
    with pytest.raises((tf.errors.NotFoundError, tf.errors.DataLossError), match="tensor 't-"):
        restore(prefix)
