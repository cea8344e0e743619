"""What a lookup gives for a key that is not there, where it asks for the key's initial value.

Constant rows, and rows to choose from by the key's hash, stand behind the table's own in its variable. Random ones are
computed in the graph, to the bit as `kernels/src/values` does: a pure function of seed, key and column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtools.default_row import constant_row
from kvtools.dialects.bundle.dtypes import number_named
from kvtools.dialects.chunk import Array
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import INITIAL_VALUES, numpy_dtype
from kvtools.errors import BadInputError
from kvtools.lookup_model.messages import INT64, of_number, of_type
from kvtools.stock_model.function_body import FunctionBody

_UINT64 = number_named("uint64")
_FLOAT32, _FLOAT64 = number_named("float32"), number_named("float64")
_DRAWN = ("uniform", "normal", "truncated_normal")
_GOLDEN = 0x9E3779B97F4A7C15
_WITHIN_TWO_DEVIATIONS = 0.95449973610364158


@dataclass(frozen=True)
class InitialRows:
    """How keys begin: with one of `stored` rows, or, if there are none, with numbers drawn as `kind` says."""

    stored: int = 1
    kind: str = "constant"
    a: float = 0.0
    b: float = 0.0
    seed: int = 0


def initial_rows(reader: TableReader, otherwise: Mapping[str, Any]) -> tuple[InitialRows, Array]:
    """Return how the keys of a table begin, and the rows [stored, dim] to keep for it.

    Args:
        reader: the table, whose checkpoint may say so.
        otherwise: the initializer that the graph gives, by the fields of `kvmeta`.

    Raises:
        BadInputError: the table has a padding key, which gives zeros where other keys do not.
    """
    dtype = numpy_dtype(reader.schema.value_dtype)
    _refuse_padding(reader, otherwise)
    if any(extra.name == INITIAL_VALUES for extra in reader.schema.extras):
        rows = np.asarray(reader.extra(INITIAL_VALUES), dtype)
        return InitialRows(len(rows), "rows"), rows
    recorded = reader.schema.metadata.get("initializer")
    initializer = recorded if isinstance(recorded, dict) else otherwise
    kind = initializer.get("kind", "constant")
    if kind in _DRAWN:
        a, b, seed = float(initializer["a"]), float(initializer["b"]), int(initializer["seed"])
        return InitialRows(0, kind, a, b, seed), np.zeros((0, reader.dim), dtype)
    row = constant_row(initializer.get("a", 0.0) if kind == "constant" else 0.0, reader.schema.value_dtype, reader.dim)
    return InitialRows(), (np.zeros(reader.dim, dtype) if row is None else row)[np.newaxis]


def _refuse_padding(reader: TableReader, otherwise: Mapping[str, Any]) -> None:
    policies = reader.schema.metadata.get("policies")
    recorded = reader.schema.metadata.get("initializer")
    initializer = recorded if isinstance(recorded, dict) else otherwise
    zeros = initializer.get("kind", "constant") == "constant" and not initializer.get("a", 0.0)
    if isinstance(policies, dict) and "padding_key" in policies and not zeros:
        raise BadInputError(
            f"Exporting table '{reader.schema.name}': its lookups ask for initial values, and its padding key "
            f"{policies['padding_key']} gives zeros instead, which stock operations do not tell apart. Take that key "
            "out of the ids before the lookup (ragged or sparse ids), and build the variable without padding_key."
        )


class _Integers:
    """Arithmetic of uint64 in a function."""

    def __init__(self, body: FunctionBody) -> None:
        self.body = body

    def constant(self, value: int) -> str:
        return self.body.constant(value, np.uint64)

    def of_signed(self, tensor: str) -> str:
        return self.body.op("Bitcast", [tensor], T=of_type(INT64), type=of_type(_UINT64))

    def _binary(self, op: str, a: str, b: str, output: str = "z") -> str:
        return self.body.op(op, [a, b], output, T=of_type(_UINT64))

    def xor(self, a: str, b: str) -> str:
        return self._binary("BitwiseXor", a, b)

    def shifted(self, a: str, bits: int) -> str:
        return self._binary("RightShift", a, self.constant(bits))

    def add(self, a: str, b: str) -> str:
        return self._binary("AddV2", a, b)

    def mix(self, x: str) -> str:
        """`Mix64` of kernels/src/base/hash.h."""
        x = self._binary("Mul", self.xor(x, self.shifted(x, 30)), self.constant(0xBF58476D1CE4E5B9))
        x = self._binary("Mul", self.xor(x, self.shifted(x, 27)), self.constant(0x94D049BB133111EB))
        return self.xor(x, self.shifted(x, 31))

    def remainder(self, a: str, divisor: int) -> str:
        return self._binary("FloorMod", a, self.constant(divisor))


def stored_row(body: FunctionBody, ids: str, zeros_row: int, initial: InitialRows) -> str:
    """Return the numbers of the stored rows that `ids` (int64) begin with; the first is number `zeros_row` + 1."""
    if initial.stored == 1:
        return body.constant(zeros_row + 1, np.int64)
    integers = _Integers(body)
    chosen = integers.remainder(integers.mix(integers.of_signed(ids)), initial.stored)
    return body.op(
        "AddV2", [body.cast(chosen, _UINT64, INT64), body.constant(zeros_row + 1, np.int64)], "z", T=of_type(INT64)
    )


def drawn_rows(body: FunctionBody, ids: str, dim: int, dtype: int, initial: InitialRows) -> str:
    """Return the rows [*ids.shape, dim] that `ids` (int64) begin with, of the type of the table's values."""
    wide = dtype == _FLOAT64
    compute, real = (_FLOAT64, np.float64) if wide else (_FLOAT32, np.float32)
    integers = _Integers(body)
    stream = integers.mix(integers.xor(integers.constant(initial.seed), integers.mix(integers.of_signed(ids))))
    last = body.constant(-1, np.int32)
    stream = body.op("ExpandDims", [stream, last], T=of_type(_UINT64), Tdim=of_type(number_named("int32")))
    words = dim if wide else (dim + 1) // 2
    steps = [(j + 1) * _GOLDEN & (1 << 64) - 1 for j in range(words)]
    bits = integers.mix(integers.add(stream, body.constant(np.array(steps, np.uint64))))
    floats = _Floats(body, compute, real)
    if wide:
        numbers = floats.draw(bits, _UINT64, initial)
    else:
        # Of each word the low half makes a column, and the high half the next.
        uint32 = number_named("uint32")
        halves = body.op("Bitcast", [bits], T=of_type(_UINT64), type=of_type(uint32))
        ids_shape = body.op("Shape", [ids], T=of_type(INT64), out_type=of_type(INT64))
        columns = body.constant(np.array([2 * words], np.int64))
        axis = body.constant(0, np.int32)
        wanted = body.op(
            "ConcatV2",
            [ids_shape, columns, axis],
            N=of_number(2),
            T=of_type(INT64),
            Tidx=of_type(number_named("int32")),
        )
        halves = body.op("Reshape", [halves, wanted], T=of_type(uint32), Tshape=of_type(INT64))
        if dim % 2:
            begin, stop = np.array([0, 0]), np.array([0, dim])
            halves = body.op(
                "StridedSlice",
                [halves, *(body.constant(each, np.int32) for each in (begin, stop, [1, 1]))],
                T=of_type(uint32),
                Index=of_type(number_named("int32")),
                begin_mask=of_number(2),
                end_mask=of_number(0),
                ellipsis_mask=of_number(1),
                new_axis_mask=of_number(0),
                shrink_axis_mask=of_number(0),
            )
        numbers = floats.draw(halves, uint32, initial)
    return body.cast(numbers, compute, dtype)


class _Floats:
    """Arithmetic of floats in a function, as kernels/src/values/random.h has it: nothing is fused."""

    def __init__(self, body: FunctionBody, dtype: int, real: type[np.floating[Any]]) -> None:
        self.body, self.dtype, self.real = body, dtype, real

    def constant(self, value: float) -> str:
        return self.body.constant(value, self.real)

    def _op(self, op: str, *inputs: str, output: str = "z") -> str:
        return self.body.op(op, inputs, output, T=of_type(self.dtype))

    def add(self, a: str, b: str) -> str:
        return self._op("AddV2", a, b)

    def subtract(self, a: str, b: str) -> str:
        return self._op("Sub", a, b)

    def times(self, a: str, b: str) -> str:
        return self._op("Mul", a, b)

    def over(self, a: str, b: str) -> str:
        return self._op("RealDiv", a, b)

    def choose(self, condition: str, a: str, b: str) -> str:
        return self.body.op("SelectV2", [condition, a, b], T=of_type(self.dtype))

    def at_most(self, a: str, limit: float) -> str:
        return self._op("LessEqual", a, self.constant(limit))

    def polynomial(self, r: str, coefficients: tuple[float, ...]) -> str:
        """The polynomial of these coefficients, the highest first."""
        value = self.constant(coefficients[0])
        for coefficient in coefficients[1:]:
            value = self.add(self.times(value, r), self.constant(coefficient))
        return value

    def draw(self, bits: str, unsigned: int, initial: InitialRows) -> str:
        """Numbers of the distribution, of random bits as wide as they are."""
        wide = self.real is np.float64
        kept, scale = (11, 2.0**-53) if wide else (8, 2.0**-24)
        a, b = self.real(initial.a), self.real(initial.b)
        if initial.kind == "uniform":
            width = self.real(b - a)
            below = max(a, np.nextafter(b, a))
            shift = self.body.constant(kept, np.uint64 if wide else np.uint32)
            top = self.body.op("RightShift", [bits, shift], "z", T=of_type(unsigned))
            unit = self.times(self.body.cast(top, unsigned, self.dtype), self.constant(scale))
            x = self.add(self.constant(float(a)), self.times(self.constant(float(width)), unit))
            return self._op("Minimum", x, self.constant(float(below)))
        signed = INT64 if wide else number_named("int32")
        number = self.body.op("Bitcast", [bits], T=of_type(unsigned), type=of_type(signed))
        shift = self.body.constant(kept, np.int64 if wide else np.int32)
        number = self.body.op("RightShift", [number, shift], "z", T=of_type(signed))
        half = self.add(self.body.cast(number, signed, self.dtype), self.constant(0.5))
        q = self.times(half, self.constant(scale))
        if initial.kind == "truncated_normal":
            q = self.times(self.constant(_WITHIN_TWO_DEVIATIONS), q)
        quantile = self._quantile(q)
        return self.add(self.constant(float(a)), self.times(self.constant(float(b)), quantile))

    def _quantile(self, q: str) -> str:
        """The normal distribution's quantile at 1/2 + q: Wichura's algorithm AS 241."""
        middle, near, far = _PPND16 if self.real is np.float64 else _PPND7
        distance = self._op("Abs", q, output="y")
        r = self.subtract(self.constant(0.180625), self.times(q, q))
        central = self.over(self.times(q, self.polynomial(r, middle[0])), self.polynomial(r, middle[1]))
        tail = self.subtract(self.constant(0.5), distance)
        wide = _Floats(self.body, _FLOAT64, np.float64)
        logarithm = wide._logarithm(self.body.cast(tail, self.dtype, _FLOAT64))
        minus = self.body.cast(wide._op("Neg", logarithm, output="y"), _FLOAT64, self.dtype)
        r = self._op("Sqrt", minus, output="y")
        at = self.subtract(r, self.constant(1.6))
        z_near = self.over(self.polynomial(at, near[0]), self.polynomial(at, near[1]))
        at = self.subtract(r, self.constant(5.0))
        z_far = self.over(self.polynomial(at, far[0]), self.polynomial(at, far[1]))
        z = self.choose(self.at_most(r, 5.0), z_near, z_far)
        negative = self._op("Less", q, self.constant(0.0))
        z = self.choose(negative, self._op("Neg", z, output="y"), z)
        return self.choose(self.at_most(distance, 0.425), central, z)

    def _logarithm(self, x: str) -> str:
        """`NaturalLog` of random.h, of float64."""
        body = self.body
        as_bits = {"T": of_type(INT64)}
        bits = body.op("Bitcast", [x], T=of_type(_FLOAT64), type=of_type(INT64))
        offset = body.op("Sub", [bits, body.constant(0x3FE6A09E667F3BCD, np.int64)], "z", **as_bits)
        exponent = body.op("RightShift", [offset, body.constant(52, np.int64)], "z", **as_bits)
        shifted = body.op("LeftShift", [exponent, body.constant(52, np.int64)], "z", **as_bits)
        bits = body.op("Sub", [bits, shifted], "z", **as_bits)
        m = body.op("Bitcast", [bits], T=of_type(INT64), type=of_type(_FLOAT64))
        one = self.constant(1.0)
        s = self.over(self.subtract(m, one), self.add(m, one))
        t = self.times(s, s)
        series = self.constant(1.0 / 21)
        for term in range(19, 0, -2):
            series = self.add(self.times(series, t), self.constant(1.0 / term))
        whole = self.times(self.body.cast(exponent, INT64, _FLOAT64), self.constant(math.log(2)))
        return self.add(whole, self.times(self.times(self.constant(2.0), s), series))


_PPND7 = (
    (
        (5.9109374720e01, 1.5929113202e02, 5.0434271938e01, 3.3871327179e00),
        (6.7187563600e01, 7.8757757664e01, 1.7895169469e01, 1.0),
    ),
    (
        (1.7023821103e-01, 1.3067284816e00, 2.7568153900e00, 1.4234372777e00),
        (1.2021132975e-01, 7.3700164250e-01, 1.0),
    ),
    (
        (1.7337203997e-02, 4.2868294337e-01, 3.0812263860e00, 6.6579051150e00),
        (1.2258202635e-02, 2.4197894225e-01, 1.0),
    ),
)
"""Coefficients of both polynomials in the middle, near the tails and in them; the highest first."""

_PPND16 = (
    (
        (
            2.5090809287301226727e3,
            3.3430575583588128105e4,
            6.7265770927008700853e4,
            4.5921953931549871457e4,
            1.3731693765509461125e4,
            1.9715909503065514427e3,
            1.3314166789178437745e2,
            3.3871328727963666080e0,
        ),
        (
            5.2264952788528545610e3,
            2.8729085735721942674e4,
            3.9307895800092710610e4,
            2.1213794301586595867e4,
            5.3941960214247511077e3,
            6.8718700749205790830e2,
            4.2313330701600911252e1,
            1.0,
        ),
    ),
    (
        (
            7.74545014278341407640e-4,
            2.27238449892691845833e-2,
            2.41780725177450611770e-1,
            1.27045825245236838258e0,
            3.64784832476320460504e0,
            5.76949722146069140550e0,
            4.63033784615654529590e0,
            1.42343711074968357734e0,
        ),
        (
            1.05075007164441684324e-9,
            5.47593808499534494600e-4,
            1.51986665636164571966e-2,
            1.48103976427480074590e-1,
            6.89767334985100004550e-1,
            1.67638483018380384940e0,
            2.05319162663775882187e0,
            1.0,
        ),
    ),
    (
        (
            2.01033439929228813265e-7,
            2.71155556874348757815e-5,
            1.24266094738807843860e-3,
            2.65321895265761230930e-2,
            2.96560571828504891230e-1,
            1.78482653991729133580e0,
            5.46378491116411436990e0,
            6.65790464350110377720e0,
        ),
        (
            2.04426310338993978564e-15,
            1.42151175831644588870e-7,
            1.84631831751005468180e-5,
            7.86869131145613259100e-4,
            1.48753612908506148525e-2,
            1.36929880922735805310e-1,
            5.99832206555887937690e-1,
            1.0,
        ),
    ),
)
