"""Arrays where a device table reaches them: NumPy's for the CPU's threads, CuPy's or PyTorch's for a GPU.

bfloat16 goes as its bits (uint16) where the library has no such type or does not pass it by DLPack.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from kvtools._kvtable import Table

REASON = "kvtools was built without it: install it with -C cmake.define.KVTOOLS_DEVICE_TABLE=ON, or KVTOOLS_CUDA=on"


def device_table_module() -> Any:
    return pytest.importorskip("kvtools._device_table", reason=REASON)


class Arrays:
    """put(array): a copy on the device. get(array, dtype): back, with the bits of bfloat16 as such again."""

    def __init__(self, put: Callable[[np.ndarray], Any], get: Callable[[Any], np.ndarray]) -> None:
        self._put = put
        self._get = get

    def put(self, array: np.ndarray) -> Any:
        array = np.ascontiguousarray(array)
        return self._put(array.view(np.uint16) if array.dtype.name == "bfloat16" else array.copy())

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        return self.put(np.zeros(shape, dtype))

    def get(self, array: Any, dtype: Any) -> np.ndarray:
        array = self._get(array)
        return array.view(dtype) if np.dtype(dtype).name == "bfloat16" else array


def gpu_arrays() -> Arrays | None:
    """None where there is no GPU, or no library for its arrays."""
    if find_spec("cupy") is not None:
        cupy = import_module("cupy")
        if cupy.cuda.is_available():
            return Arrays(cupy.asarray, cupy.asnumpy)
    if find_spec("torch") is not None:
        torch = import_module("torch")
        if torch.cuda.is_available():
            return Arrays(lambda array: torch.from_numpy(array).cuda(), lambda array: array.cpu().numpy())
    return None


ARRAYS = {"threads": Arrays(lambda array: array, lambda array: array), "cuda": gpu_arrays()}
DEVICES = [device for device, arrays in ARRAYS.items() if arrays is not None]


def arrays_on(device: str) -> Arrays:
    """Skips the test where there are none."""
    arrays = ARRAYS[device]
    if arrays is None:
        pytest.skip("tables on a GPU are tested where there are one and CuPy or PyTorch")
    return arrays


def assert_same(got: np.ndarray, expected: np.ndarray, device: str, exact: bool = True) -> None:
    """Bit for bit; on a GPU, and where not `exact`, to 1e-6, which is one unit of the last place in 16-bit types."""
    assert got.dtype == expected.dtype
    if (device == "threads" and exact) or got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, expected)
    else:
        last_place = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(got.dtype.name, 1e-6)
        np.testing.assert_allclose(
            got.astype(np.float64), expected.astype(np.float64), rtol=last_place, atol=min(last_place, 1e-6)
        )


class Pair:
    """One table on the CPU and one on the device, which are to stay the same."""

    def __init__(self, device: str, key_dtype: Any, value_dtype: Any, dim: int, slots: list[tuple], **options: Any):
        self.device, self.arrays = device, arrays_on(device)
        self.key_dtype, self.value_dtype, self.dim = np.dtype(key_dtype), np.dtype(value_dtype), dim
        self.widths = {"value": dim} | {name: width for name, width, *_ in slots}
        self.cpu = Table(key_dtype, value_dtype, dim, slots=slots, threads=1, **options)
        module = device_table_module()
        self.table = module.DeviceTable(key_dtype, value_dtype, dim, slots=slots, device=device, **options)
        self._seen = np.zeros(0, self.key_dtype)

    def put(self, array: np.ndarray) -> Any:
        return self.arrays.put(array)

    def remember(self, keys: np.ndarray) -> np.ndarray:
        """The keys that `check` is to look at from now on."""
        self._seen = np.union1d(self._seen, keys)
        return keys

    def read(self, fill: Callable[..., None], **dtypes_and_widths: tuple[Any, tuple[int, ...]]) -> list[np.ndarray]:
        """What fill(**arrays) writes to new arrays of these (dtype, shape)."""
        made = {name: self.arrays.zeros(shape, dtype) for name, (dtype, shape) in dtypes_and_widths.items()}
        fill(**made)
        return [self.arrays.get(made[name], dtype) for name, (dtype, _) in dtypes_and_widths.items()]

    def check(self, exact: bool = True) -> None:
        """Rows with their slots, stamps and marks are the same, and there are no others."""
        keys = self._seen
        n, there = len(keys), self.put(keys)
        assert len(self.table) == len(self.cpu)
        assert self.table.zeroed_rows == self.cpu.zeroed_rows
        assert self.table.skipped_updates == self.cpu.skipped_updates
        columns = {name: (self.value_dtype, (n, width)) for name, width in self.widths.items()}
        got = self.read(lambda **into: self.table.gather_columns(there, into), **columns)
        for column, expected in zip(got, self.cpu.gather_columns(keys), strict=True):
            assert_same(column, expected, self.device, exact)
        stamps = self.read(
            lambda **into: self.table.gather_stamps(there, **into),
            frequencies=(np.uint32, (n,)),
            versions=(np.uint32, (n,)),
        )
        for column, expected in zip(stamps, self.cpu.gather_stamps(keys), strict=True):
            np.testing.assert_array_equal(column, expected)
        (contained,) = self.read(lambda out: self.table.contains(there, out), out=(bool, (n,)))
        np.testing.assert_array_equal(contained, self.cpu.contains(keys))
        (zeroed,) = self.read(lambda out: self.table.zeroed(there, out), out=(bool, (n,)))
        np.testing.assert_array_equal(zeroed, self.cpu.zeroed(keys))
