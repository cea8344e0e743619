"""The index from keys to rows that is arithmetic and the variable of pilots: see `kvtools.perfect_hash`.

Rows and keys lie in slot order. A slot that no key has holds a key of another slot, so that it matches nothing.
"""

from __future__ import annotations

import numpy as np

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import INT32, INT64, of_bool, of_number, of_type
from kvtools.perfect_hash import MIX
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.table import PerfectSlots, Resources

_UINT32 = number_named("uint32")


class _Numbers:
    """Arithmetic of int64 in a function, by operations that also XLA, GPUs and smaller runtimes have."""

    def __init__(self, body: FunctionBody) -> None:
        self._body = body
        self._begin, self._end, self._step = (self._body.constant(each, np.int32) for each in ([0, 1], [0, 2], [1, 1]))

    def times(self, a: str, b: str | int) -> str:
        """The product; of a constant of 64 bits, with or without a sign."""
        if isinstance(b, int):
            b = self._body.constant(np.uint64(b % 2**64).astype(np.int64), np.int64)
        return self._body.op("Mul", [a, b], "z", T=of_type(INT64))

    def plus(self, a: str, b: str) -> str:
        return self._body.op("AddV2", [a, b], "z", T=of_type(INT64))

    def high(self, a: str) -> str:
        """The upper half, without a sign."""
        return self._body.cast(self._half(a, _UINT32), _UINT32, INT64)

    def small_high(self, a: str) -> str:
        """The upper half, which is below 2^31, as int32."""
        return self._half(a, INT32)

    def _half(self, a: str, dtype: int) -> str:
        halves = self._body.op("Bitcast", [a], T=of_type(INT64), type=of_type(dtype))
        return self._body.op(
            "StridedSlice",
            [halves, self._begin, self._end, self._step],
            T=of_type(dtype),
            Index=of_type(INT32),
            begin_mask=of_number(0),
            end_mask=of_number(0),
            ellipsis_mask=of_number(1),
            new_axis_mask=of_number(0),
            shrink_axis_mask=of_number(2),
        )


def find(body: FunctionBody, slots: PerfectSlots, resources: Resources, keys: str, missing: str) -> str:
    """Return the slot of each of `keys` (int64), `missing` where there is none: int64, of their shape."""
    numbers = _Numbers(body)
    hashed = numbers.times(keys, slots.seed)
    hashed = numbers.times(numbers.plus(hashed, numbers.high(hashed)), MIX)
    bucket = numbers.small_high(numbers.times(numbers.high(hashed), slots.buckets))
    pilot = _gather(body, resources.index, bucket)
    slot = numbers.small_high(numbers.times(numbers.high(numbers.times(hashed, pilot)), slots.slots))
    there = _gather(body, resources.keys, slot)
    same = body.op("Equal", [there, keys], "z", T=of_type(INT64), incompatible_shape_error=of_bool(True))
    return body.op("SelectV2", [same, body.cast(slot, INT32, INT64), missing], T=of_type(INT64))


def _gather(body: FunctionBody, variable: str, places: str) -> str:
    return body.op("ResourceGather", [variable, places], dtype=of_type(INT64), Tindices=of_type(INT32))
