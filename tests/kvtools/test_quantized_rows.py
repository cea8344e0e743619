"""Rows of int8 and int4 beside plain NumPy, number by number, over a grid of rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtools import quantized_rows
from kvtools.quantized_rows import Rounding, RowLoss, bytes_of_row, decode, encode, loss_of

SMALLEST_NORMAL = np.float32(2.0**-126)
STEPS = {"int8": 255, "int4": 15}
RANDOM = np.random.default_rng(0)


def rows_of(kind: str, dim: int) -> np.ndarray:
    """40 rows of a kind."""
    normal = RANDOM.normal(size=(40, dim))
    rows = {
        "normal": normal,
        "skewed": np.exp(normal),
        "far from zero": 1000 + normal / 1000,
        "tiny": normal * 1e-30,
        "denormal": normal * 1e-40,
        "partly denormal": normal * 1e-37,
        "huge": np.clip(normal, -1, 1) * 1.6e38,
        "zeros": normal * 0,
        "constant": np.broadcast_to(normal[:, :1], normal.shape),
        "few": np.round(normal),
    }[kind]
    return np.ascontiguousarray(rows, np.float32)


KINDS = (
    "normal",
    "skewed",
    "far from zero",
    "tiny",
    "denormal",
    "partly denormal",
    "huge",
    "zeros",
    "constant",
    "few",
)


def reference(row: np.ndarray, dtype: str) -> bytes:
    """The bytes of a row, as docs/dialects/snapshot.md says."""
    steps = STEPS[dtype]
    low, high = row.min(), row.max()
    offset = np.float32(0) if abs(low) < SMALLEST_NORMAL else low
    width = float(high) - float(offset)
    scale, codes = np.float32(0), np.zeros(len(row), np.uint8)
    if width > 0:
        up = np.float32(width / steps).view(np.uint32) + 0xFFFF & 0xFFFF0000
        scale = max(np.uint32(up).view(np.float32), SMALLEST_NORMAL)
        codes = np.rint(np.clip((row - offset) / scale, 0, steps)).astype(np.uint8)
    head = offset.tobytes() + np.uint16(int(scale.view(np.uint32)) >> 16).tobytes()
    if dtype == "int8":
        return head + codes.tobytes()
    half = (len(row) + 1) // 2
    second = np.zeros(half, np.uint8)
    second[: len(row) - half] = codes[half:]
    return head + (codes[:half] | second << 4).astype(np.uint8).tobytes()


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 2, 3, 15, 16, 17, 64, 129])
def test_bytes_are_those_of_the_reference(dim: int, kind: str, dtype: str) -> None:
    rows = rows_of(kind, dim)
    encoded = encode(rows, dtype)
    assert (
        encoded.shape == (len(rows), bytes_of_row(dtype, dim)) == (40, 6 + (dim if dtype == "int8" else -(-dim // 2)))
    )
    assert [row.tobytes() for row in encoded] == [reference(row, dtype) for row in rows]


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_a_number_is_off_by_half_a_step_at_most(dim: int, kind: str, dtype: str) -> None:
    rows = rows_of(kind, dim)
    got = decode(encode(rows, dtype), dtype, dim)
    wide = rows.astype(np.float64)
    # The scale is rounded up by one part in 128 at most; what is denormal becomes zero.
    width = wide.max(axis=1, keepdims=True) - wide.min(axis=1, keepdims=True)
    allowed = width / STEPS[dtype] / 2 * (1 + 2**-7) + np.abs(wide) * 2**-23 + 2 * float(SMALLEST_NORMAL)
    assert (np.abs(got - wide) <= allowed).all()
    if kind in ("zeros", "constant"):
        assert got.tobytes() == (rows + 0).tobytes()


@pytest.mark.parametrize("dtype", STEPS)
def test_rows_of_zeros_stay_zeros(dtype: str) -> None:
    rows = np.float32([[0, -0.0, 0], [-0.0, -0.0, -0.0]])
    assert decode(encode(rows, dtype), dtype, 3).tobytes() == bytes(24)
    assert not encode(rows, dtype).any()


@pytest.mark.parametrize("dtype", STEPS)
def test_the_sum_has_the_same_bits_in_one_step_or_two(dtype: str) -> None:
    """A scale has so few bits that its product with any code is a float32: a fused multiply-add rounds no less."""
    rows = np.concatenate([rows_of(kind, 33) for kind in KINDS if kind != "denormal"])
    encoded = encode(rows, dtype)
    offset = encoded[:, :4].copy().view(np.float32)
    scale = (encoded[:, 4:6].copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    codes = encoded[:, 6:] if dtype == "int8" else np.concatenate([encoded[:, 6:] & 15, encoded[:, 6:] >> 4], 1)[:, :33]
    products = scale * codes.astype(np.float32)
    assert np.array_equal(products, scale.astype(np.float64) * codes)
    assert np.array_equal(offset + products, decode(encoded, dtype, 33))


_IN_OTHER_INSTRUCTIONS = """
import sys
from pathlib import Path
import numpy as np
from kvtools.quantized_rows import decode, encode
rows = np.load(sys.argv[1])
for dtype in ("int8", "int4"):
    encoded = encode(rows, dtype)
    np.save(f"{sys.argv[2]}_{dtype}.npy", np.concatenate([encoded, decode(encoded, dtype, 37).view(np.uint8)], 1))
"""


def test_every_instruction_set_gives_the_same_bytes(tmp_path: Path) -> None:
    rows = np.concatenate([rows_of(kind, 37) for kind in KINDS])
    np.save(f"{tmp_path}/rows.npy", rows)
    arguments = [sys.executable, "-c", _IN_OTHER_INSTRUCTIONS, f"{tmp_path}/rows.npy", f"{tmp_path}/baseline"]
    subprocess.run(arguments, check=True, cwd=tmp_path, env={**os.environ, "KVTABLE_ISA": "baseline"})
    for dtype in STEPS:
        encoded = encode(rows, dtype)
        own = np.concatenate([encoded, decode(encoded, dtype, 37).view(np.uint8)], 1)
        assert np.array_equal(np.load(f"{tmp_path}/baseline_{dtype}.npy"), own)


def test_rows_that_do_not_lie_on_a_boundary() -> None:
    bytes_of = RANDOM.normal(size=(9, 5)).astype(np.float32).tobytes()
    odd = np.frombuffer(b"x" + bytes_of, np.uint8)[1:].view(np.float32).reshape(9, 5)
    assert np.array_equal(encode(odd, "int8"), encode(odd.copy(), "int8"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_what_rows_lose(dtype: type) -> None:
    before = RANDOM.normal(size=(50, 19)).astype(dtype)
    after = before + RANDOM.normal(size=(50, 19)).astype(dtype) / 10
    before[3], after[3] = 0, 0
    before[4] = 0
    before[5, 2], after[6, 1] = np.nan, np.inf
    loss = loss_of(before, after)
    kept = np.delete(np.arange(50), [5, 6])
    a, b = before[kept].astype(np.float64), after[kept].astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines = np.where(norms > 0, (a * b).sum(axis=1) / np.where(norms > 0, norms, 1), 0)
    cosines[3] = 1
    got = loss.rounding()
    assert (loss.rows, loss.numbers) == (48, 48 * 19)
    expected = [np.abs(a - b).max(), np.abs(a - b).mean(), cosines.mean(), cosines.min()]
    assert np.allclose([got.max_error, got.mean_error, got.mean_cosine, got.least_cosine], expected, rtol=1e-6)


def test_losses_add_up() -> None:
    before = RANDOM.normal(size=(50, 6)).astype(np.float32)
    after = decode(encode(before, "int4"), "int4", 6)
    parts = loss_of(before[:20], after[:20]).plus(loss_of(before[20:], after[20:])).rounding()
    whole = loss_of(before, after).rounding()
    assert np.allclose(list(vars(parts).values()), list(vars(whole).values()), rtol=1e-12)
    assert RowLoss().rounding() == Rounding(0, 0, 1, 1)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="int8 or int4"):
        bytes_of_row("int2", 4)
    with pytest.raises(ValueError, match="must be"):
        quantized_rows.decode(np.zeros((3, 9), np.uint8), "int8", 4)


def test_rows_that_do_not_fit() -> None:
    rows = np.float32([[1, -1], [3.3e38, 1], [-1.65e38, 1.64e38]])
    assert quantized_rows.first_unfit(rows) is None
    for unfit in ([np.nan, 0], [0, np.inf], [-np.inf, 0], [-3e38, 3e38]):
        assert quantized_rows.first_unfit(np.concatenate([rows, np.float32([unfit])])) == 3
    got = decode(encode(rows, "int4"), "int4", 2)
    assert np.allclose(got, rows, rtol=0.01, atol=3.3e38 / 25)
    assert np.isfinite(got).all()
