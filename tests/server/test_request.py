from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
from kvtools.server.request import RequestError, body_too_large, parse_lookup, parse_tables, table_keys
from kvtools.server.settings import Settings


def parse(body: bytes, *, binary: bool = False, key_dtype: str = "int64", max_keys: int = 10) -> np.ndarray:
    lookup, _ = parse_lookup(body, "", binary=binary, key_dtype=key_dtype, max_keys=max_keys)
    return table_keys(lookup.keys, key_dtype, np.iinfo(key_dtype))


@pytest.mark.parametrize(
    ("key_dtype", "keys"),
    [
        ("int64", [-(2**63), 0, 2**63 - 1]),
        ("int32", [-(2**31), 2**31 - 1]),
        ("uint64", [0, 2**64 - 1]),
        ("int64", []),
    ],
)
def test_json_and_binary(key_dtype: str, keys: list[int]) -> None:
    expected = np.array(keys, key_dtype)
    got = parse(str({"keys": keys}).replace("'", '"').encode(), key_dtype=key_dtype)
    assert got.dtype == expected.dtype and np.array_equal(got, expected)
    body = (expected.view(np.int64) if key_dtype == "uint64" else expected.astype("<i8")).tobytes()
    got = parse(body, binary=True, key_dtype=key_dtype)
    assert got.dtype == expected.dtype and np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "bad_json"),
        (b"{", "bad_json"),
        (b"\xff\xfe\x00", "bad_json"),
        (b'{"keys": [' + b"1" * 5000 + b"]}", "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b"[1]", "bad_body"),
        (b"{}", "bad_body"),
        (b'{"keys": 1}', "bad_body"),
        (b'{"keys": [1], "keys": [2]}', "bad_body"),
        (b'{"keys": {"0": 1}}', "bad_body"),
        (b'{"keys": [1.0]}', "bad_key"),
        (b'{"keys": [NaN]}', "bad_key"),
        (b'{"keys": ["1"]}', "bad_key"),
        (b'{"keys": [true]}', "bad_key"),
        (b'{"keys": [null]}', "bad_key"),
        (b'{"keys": [[1]]}', "bad_key"),
        (b'{"keys": [9223372036854775808]}', "bad_key"),
        (b'{"keys": [-9223372036854775809]}', "bad_key"),
        (b'{"keys": [1' + b",1" * 10 + b"]}", "too_many_keys"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_json(body: bytes, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert caught.value.code == code and 400 <= caught.value.status < 500 and len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("body", "member"),
    [
        (b'{"keys": [1], "missing": "zeros", "keys": [2]}', "keys"),
        (b'{"tables": {"t": {"keys": [1]}, "t": {"keys": [2]}}}', "t"),
        (b'{"tables": {"t": {"keys": [1], "keys": [2]}}}', "keys"),
    ],
)
def test_a_member_that_comes_twice_is_named(body: bytes, member: str) -> None:
    with pytest.raises(RequestError, match=f'got member "{member}" twice in an object, expected it once'):
        if b"tables" in body:
            parse_tables(body, frame=False, key_dtypes={"t": "int64"}, max_keys=10)
        else:
            parse(body)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"body": b"1234567"}, "bad_body"),
        ({"body": bytes(88)}, "too_many_keys"),
        ({"body": np.array([2**31]).tobytes(), "key_dtype": "int32"}, "bad_key"),
    ],
)
def test_wrong_binary(arguments: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**arguments, binary=True)
    assert caught.value.code == code


@pytest.mark.parametrize(("key_dtype", "key"), [("uint64", -1), ("uint64", 2**64), ("int32", 2**31)])
def test_out_of_range_of_the_table(key_dtype: str, key: int) -> None:
    with pytest.raises(RequestError, match="out of range"):
        parse(b'{"keys": [%d]}' % key, key_dtype=key_dtype)


def test_the_longest_keys_fit_the_body() -> None:
    import json

    assert len(json.dumps({"keys": [-(2**63)] * 1000}, indent=1)) <= Settings(max_keys=1000).body_limit


def test_a_body_that_is_too_large_names_the_option() -> None:
    assert "1000 bytes; send fewer keys a request, or have the server take more: --max-body-bytes" in str(
        body_too_large(1000)
    )


@pytest.mark.parametrize(
    ("key_dtype", "keys", "wrong"),
    [
        ("uint64", [1, -1, -2], -1),
        ("int32", [2**31, 5], 2**31),
        ("int64", [7, -(2**63) - 1], -(2**63) - 1),
    ],
)
def test_a_key_out_of_range_is_named(key_dtype: str, keys: list[int], wrong: int) -> None:
    with pytest.raises(RequestError, match=f"got key {wrong}, out of range, expected {key_dtype}: "):
        parse(str({"keys": keys}).replace("'", '"').encode(), key_dtype=key_dtype)
    if key_dtype == "int32":
        with pytest.raises(RequestError, match=f"got key {wrong}, out of range"):
            parse(np.array(keys).tobytes(), binary=True, key_dtype=key_dtype)


@pytest.mark.parametrize(("keys", "wrong"), [("[[1, 2], 3]", "3"), ("[4, [1]]", "4"), ('[[1], "x", 2]', '"x"')])
def test_of_keys_in_lists_and_others_the_others_are_wrong(keys: str, wrong: str) -> None:
    body = b'{"keys": %s, "combiner": "sum"}' % keys.encode()
    with pytest.raises(RequestError, match=f"got {wrong} beside keys in lists, expected lists alone") as caught:
        parse_lookup(body, "t", binary=False, key_dtype="int64", max_keys=9)
    assert (caught.value.status, caught.value.code) == (400, "bad_key")


@pytest.mark.parametrize("weights", ["", ', "weights": []'])
def test_no_bags_are_no_rows(weights: str) -> None:
    body = f'{{"keys": [], "combiner": "mean"{weights}}}'.encode()
    lookup, _ = parse_lookup(body, "t", binary=False, key_dtype="int64", max_keys=9)
    assert (lookup.bags, lookup.keys.tolist(), lookup.combiner) == (0, [], "mean")
