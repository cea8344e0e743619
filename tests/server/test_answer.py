"""The core beside NumPy: every key and value type, in one C++ call and step by step, in every form of an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")
from kvtools import _snapshot
from kvtools.lookup_frame import OWN_TYPES, TableKeys, decode_answer, encode_request
from kvtools.server import answer, request
from kvtools.server.answer import Answer, answer_lookup, answer_row, answer_tables
from kvtools.server.catalog import ServedVersion, static_catalog
from kvtools.server.codecs import Codec
from kvtools.server.lookups import Ask, Lookups
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings
from kvtools.server.store import TableStore

DIM = 3
KEY_TYPES = ("int64", "int32", "uint64")
VALUE_TYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "bool", "as_int8", "as_int4")
TABLES = [(key, value) for key in KEY_TYPES for value in VALUE_TYPES]
SETTINGS = Settings(max_keys=50, max_values=120)
JSON, BINARY, FRAME = Codec("json", "json"), Codec("binary", "binary"), Codec("frame", "frame")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else np.float32 if name.startswith("as_") else name)


class Reference:
    """A table of plain arrays."""

    def __init__(self, key_type: str, value_type: str) -> None:
        rng = np.random.default_rng(0)
        limits = np.iinfo(key_type)
        some = [limits.min, limits.max, 0, 1, 7, limits.max - 1]
        self.keys = np.array(
            list(dict.fromkeys([*some, *rng.integers(limits.min, limits.max, 20, dtype=key_type).tolist()])), key_type
        )
        self.dtype = dtype_of(value_type)
        if self.dtype.kind in "ib":
            low, high = (0, 2) if value_type == "bool" else (np.iinfo(self.dtype).min, np.iinfo(self.dtype).max)
            self.values = rng.integers(low, high, (len(self.keys), DIM), np.int64).astype(self.dtype)
        else:
            self.values = (rng.normal(size=(len(self.keys), DIM)) * 3).astype(self.dtype)
            if not value_type.startswith("as_"):
                self.values[0] = [np.nan, np.inf, -np.inf]
        self.default = self.values[3] if value_type.startswith("as_") else self.values[2]
        self.key_type, self.value_type = key_type, value_type

    def write(self, writer: _snapshot.Writer) -> None:
        writer.begin_table(
            self.name,
            key_dtype=self.key_type,
            value_dtype=str(self.dtype),
            dim=DIM,
            rows=len(self.keys),
            rows_as=self.value_type.removeprefix("as_") if self.value_type.startswith("as_") else "",
        )
        writer.add_keys(self.keys)
        writer.sort_keys()
        writer.add_rows(0, self.values)
        writer.set_default_row(self.default)
        writer.end_table()

    @property
    def name(self) -> str:
        return f"{self.key_type}/{self.value_type}"

    def rows(self, keys: list[int], default: bool) -> tuple[np.ndarray, list[bool]]:
        of = {int(key): row for key, row in zip(self.keys, self.values, strict=True)}
        other = self.default if default else np.zeros(DIM, self.dtype)
        return np.array([of.get(key, other) for key in keys], self.dtype).reshape(-1, DIM), [key in of for key in keys]


def pooled(values: np.ndarray, splits: list[int], combiner: str, weights: np.ndarray | None) -> np.ndarray:
    """float32 [bags, dim], one row after the other."""
    kind = np.float64 if values.dtype == np.float64 else np.float32
    rows = values.astype(kind)
    weights = np.ones(len(rows), kind) if weights is None else weights.astype(kind)
    out = np.zeros((len(splits) - 1, DIM), kind)
    with np.errstate(invalid="ignore"):
        for bag, (begin, end) in enumerate(pairwise(splits)):
            divisor = kind(0)
            for i in range(begin, end):
                out[bag] += weights[i] * rows[i]
                divisor += weights[i] if combiner == "mean" else weights[i] * weights[i]
            if combiner == "sqrtn":
                divisor = np.sqrt(divisor)
            if combiner != "sum":
                out[bag] = out[bag] / divisor if divisor else 0
    return out.astype(np.float32)


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {reference.name: reference for reference in (Reference(*types) for types in TABLES)}


@pytest.fixture(scope="module")
def version(references: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory) -> ServedVersion:
    path = tmp_path_factory.mktemp("snapshot") / "all.kvsnap"
    writer = _snapshot.Writer(str(path), 1 << 20)
    for reference in references.values():
        reference.write(writer)
    writer.close(json.dumps({"format": "kvtools snapshot", "tables": {}}).encode())
    return static_catalog(TableStore(path), number=5).version()


@pytest.fixture(scope="module", autouse=True)
def quantized_rows_are_what_the_table_has(version: ServedVersion, references: dict[str, Reference]) -> None:
    """Rows of int8 and int4 are off by up to half a step; answers are compared with what the rows have become."""
    for reference in references.values():
        if reference.value_type.startswith("as_"):
            table = version.store.table(reference.name)
            kept, found = table.lookup(reference.keys)
            steps = {"as_int8": 255, "as_int4": 15}[reference.value_type]
            assert found.all() and np.abs(kept - reference.values).max() < np.ptp(reference.values) / steps / 1.9
            reference.values = kept
            reference.default = table.table.default_row


@pytest.fixture(params=["at once", "step by step"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "step by step":
        monkeypatch.setattr(answer._snapshot, "answer", lambda *arguments: None)
        monkeypatch.setattr(answer._snapshot, "frame_tables", lambda body: None)
    yield request.param


def body_of(done: Answer) -> bytes:
    assert done.status == 200 and done.body is not None
    return done.body


def numbers(rows: list[list[Any]], dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.kind in "ib":
        return np.array(rows, dtype).reshape(-1, DIM)
    kind = np.float64 if dtype == np.float64 else np.float32
    return np.array([[float(number) for number in row] for row in rows], kind).astype(dtype).reshape(-1, DIM)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Bit for bit; but one NaN is like another."""
    if left.dtype.kind in "ib":
        return np.array_equal(left, right)
    wide = np.float64 if left.dtype == np.float64 else np.float32
    left, right = left.astype(wide), right.astype(wide)
    return np.array_equal(left, right, equal_nan=True) and np.array_equal(
        np.signbit(left[~np.isnan(left)]), np.signbit(right[~np.isnan(right)])
    )


def ask(reference: Reference) -> list[int]:
    keys = reference.keys.tolist()
    return [keys[0], 2, keys[1], keys[5], keys[0], 3, *keys[6:10]]


@pytest.mark.parametrize("types", TABLES, ids="/".join)
@pytest.mark.parametrize("missing", ["zeros", "default"])
def test_every_form_has_the_rows_of_the_table(
    version: ServedVersion, references: dict[str, Reference], types: tuple[str, str], missing: str, way: str
) -> None:
    reference = references["/".join(types)]
    keys = ask(reference)
    expected, found = reference.rows(keys, missing == "default")
    text = json.dumps({"keys": keys, "missing": missing}).encode()
    patterns = (
        np.array(keys, reference.key_type).astype(np.int64)
        if types[0] != "uint64"
        else np.array(keys, np.uint64).view(np.int64)
    )
    with np.errstate(over="ignore"):
        floats = expected.astype(np.float32)

    done = answer_lookup(version, reference.name, text, JSON, None, SETTINGS)
    got = json.loads(body_of(done))
    assert got["found"] == found and same(numbers(got["embeddings"], reference.dtype), expected)
    assert done.headers["X-Embedding-Version"] == "5"
    ((table, count, lost),) = [(c.table, c.keys, c.missing) for c in done.counts]
    assert (table, count, lost) == (reference.name, len(keys), found.count(False))

    for codec, body, how in ((BINARY, patterns.tobytes(), missing), (Codec("json", "binary"), text, "error")):
        done = answer_lookup(version, reference.name, body, codec, how, SETTINGS)
        assert body_of(done) == floats.tobytes()
        assert done.headers["X-Embedding-Shape"] == f"{len(keys)},{DIM}"
        assert done.headers["X-Embedding-Missing"] == str(found.count(False))

    frame = encode_request([TableKeys(reference.name, patterns)] * 2, missing)
    rows, number = decode_answer(body_of(answer_tables(version, frame, FRAME, None, SETTINGS)))
    assert number == 5 and len(rows) == 2
    for each in rows:
        assert each.embeddings.tobytes() == floats.tobytes()
        assert each.found is not None and each.found.tolist() == found and each.missing == found.count(False)

    frame = encode_request([TableKeys(reference.name, patterns, own_type=True)], missing)
    ((own,), _) = decode_answer(body_of(answer_tables(version, frame, FRAME, None, SETTINGS)))
    exact = reference.dtype if reference.value_type in OWN_TYPES else np.dtype(np.float32)
    assert own.embeddings.dtype == exact and own.embeddings.tobytes() == expected.astype(exact).tobytes()

    one = json.loads(body_of(answer_row(version, reference.name, str(keys[0]), JSON, None, SETTINGS)))
    assert one["key"] == keys[0] and same(numbers([one["embedding"]], reference.dtype), expected[:1])


@pytest.mark.parametrize("value_type", VALUE_TYPES)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_lookups(
    version: ServedVersion,
    references: dict[str, Reference],
    value_type: str,
    combiner: str,
    weighted: bool,
    way: str,
) -> None:
    reference = references[f"int64/{value_type}"]
    keys, splits = [*reference.keys.tolist()[2:9], 2, 3], [0, 0, 1, 4, 4, 9]
    values, found = reference.rows(keys, False)
    weights = np.linspace(-1, 3, len(keys), dtype=np.float32) if weighted else None
    expected = pooled(values, splits, combiner, weights)
    bags: dict[str, Any] = {
        "keys": [keys[a:b] for a, b in pairwise(splits)],
        "combiner": combiner,
    }
    flat: dict[str, Any] = {"keys": keys, "row_splits": splits, "combiner": combiner}
    if weights is not None:
        bags["weights"] = [weights.tolist()[a:b] for a, b in pairwise(splits)]
        flat["weights"] = weights.tolist()
    bodies = []
    for document in (bags, flat):
        done = answer_lookup(version, reference.name, json.dumps(document).encode(), JSON, None, SETTINGS)
        got = json.loads(body_of(done))
        assert got["missing"] == found.count(False) and "found" not in got
        np.testing.assert_allclose(numbers(got["embeddings"], np.dtype(np.float32)), expected, rtol=1e-6)
        bodies.append(numbers(got["embeddings"], np.dtype(np.float32)).tobytes())
        done = answer_lookup(
            version, reference.name, json.dumps(document).encode(), Codec("json", "binary"), None, SETTINGS
        )
        bodies.append(body_of(done))
        assert done.headers["X-Embedding-Shape"] == f"5,{DIM}"
    lookup = TableKeys(reference.name, np.array(keys), combiner, np.array(splits), weights)
    ((rows,), _) = decode_answer(body_of(answer_tables(version, encode_request([lookup]), FRAME, None, SETTINGS)))
    bodies.append(rows.embeddings.tobytes())
    assert rows.found is None and rows.missing == found.count(False)
    assert len(set(bodies)) == 1  # bit for bit, whatever the form


def test_missing_keys_as_an_error_are_named(version: ServedVersion, way: str) -> None:
    for body in (b'{"keys": [2, 0, 3], "missing": "error"}', b'{"keys": [[2, 0], [3]], "combiner": "sum"}'):
        with pytest.raises(RequestError, match=r"no row of 2, 3$") as caught:
            answer_lookup(version, "int64/float32", body, JSON, "error", SETTINGS)
        assert (caught.value.status, caught.value.code) == (404, "missing_keys")
    with pytest.raises(RequestError, match=r"no row of 2$"):
        answer_row(version, "int64/float32", "2", JSON, None, SETTINGS)
    assert (
        json.loads(body_of(answer_row(version, "int64/float32", "2", JSON, "zeros", SETTINGS)))["embedding"] == [0] * 3
    )


def test_keys_times_dim_is_bounded(version: ServedVersion, way: str) -> None:
    for document in (
        {"keys": [0] * 41},
        {"keys": [[0]] * 41, "combiner": "sum"},
        {"keys": [[]] * 41, "combiner": "sum"},
    ):
        with pytest.raises(RequestError, match="at most 120; send several requests of at most 40 keys") as caught:
            answer_lookup(version, "int64/float32", json.dumps(document).encode(), JSON, None, SETTINGS)
        assert (caught.value.status, caught.value.code) == (413, "too_many_values")
    frame = encode_request([TableKeys("int64/float32", np.zeros(21, np.int64))] * 2)
    with pytest.raises(RequestError, match="at most 40 keys"):
        answer_tables(version, frame, FRAME, None, SETTINGS)


@given(st.data())
def test_a_frame_with_bytes_changed_is_an_error_or_a_lookup_in_both_readers(
    version: ServedVersion, data: st.DataObject
) -> None:
    lookup = TableKeys("int64/float32", np.array([0, 2]), "mean", np.array([0, 1, 2]), np.ones(2, np.float32))
    body = bytearray(encode_request([lookup, TableKeys("int32/float16", np.array([7]))]))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    at_once = outcome(version, bytes(body))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer._snapshot, "frame_tables", lambda body: None)
        assert outcome(version, bytes(body)) == at_once


def outcome(version: ServedVersion, body: bytes) -> bytes | str:
    try:
        return body_of(answer_tables(version, body, FRAME, None, SETTINGS))
    except RequestError as error:
        assert error.status in (400, 404, 413)
        return error.code


def test_rows_that_come_from_elsewhere_than_a_snapshot(version: ServedVersion, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "int64/float32"
    stored = version.store.table(name)
    frame = encode_request([TableKeys(name, np.array([0, 2])), TableKeys(name, np.array([0]), "sum", np.array([0, 1]))])
    expected = outcome(version, frame)
    elsewhere = SimpleNamespace(table=None, schema=stored.schema, key_limits=stored.key_limits, lookup=stored.lookup)
    monkeypatch.setitem(version.store.tables, name, elsewhere)
    assert outcome(version, frame) == expected and not isinstance(expected, str)


def test_a_snapshot_that_was_cut_is_an_error_with_no_path(version: ServedVersion, tmp_path: Path, way: str) -> None:
    path = tmp_path / "cut.kvsnap"
    path.write_bytes(Path(version.path).read_bytes())
    lookups = Lookups(static_catalog(TableStore(path)), SETTINGS)
    ask = Ask("lookup", "int64/float32", JSON)
    assert lookups.answer(ask, b'{"keys": [0]}').status == 200
    with path.open("r+b") as file:
        file.truncate(4096)
    done = lookups.answer(ask, b'{"keys": [0]}')
    assert done.status == 503 and done.code == "file_changed"
    assert done.body is not None and b"cut.kvsnap" not in done.body


def test_the_reader_in_python_is_the_one_that_explains() -> None:
    with pytest.raises(RequestError, match='member "combinr", expected keys, row_splits'):
        request.parse_lookup(b'{"keys": [], "combinr": 1}', "t", binary=False, key_dtype="int64", max_keys=9)


def test_a_lookup_for_which_no_thread_can_be_started_is_an_answer(
    version: ServedVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = Lookups(static_catalog(TableStore(version.path)), SETTINGS)

    def submit(*work: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(lookups._threads, "submit", submit)
    done = asyncio.run(lookups.answer_in_thread(Ask("lookup", "int64/float32", JSON), b'{"keys": [0]}'))
    assert (done.status, lookups.running) == (500, 0)
