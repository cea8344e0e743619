"""The codecs of the lookup server. Compiled from kernels/python/serving_binding.cc."""

from typing import Any

import numpy as np
import numpy.typing as npt

def read_json_lookup(
    body: bytes, key_dtype: str, max_keys: int
) -> (
    tuple[
        npt.NDArray[np.int64],
        npt.NDArray[np.int64] | None,
        str | None,
        npt.NDArray[np.float32] | None,
        str | None,
    ]
    | None
): ...
def json_rows(values: npt.NDArray[Any]) -> bytes: ...
def json_flags(flags: npt.NDArray[np.bool_]) -> bytes: ...

class RespReader:
    partial: bool

    def __init__(self, max_keys: int, max_bytes: int, max_word_bytes: int) -> None: ...
    def feed(self, data: bytes) -> None: ...
    def next(self) -> tuple[Any, ...] | None: ...
    def commands(self) -> list[tuple[int, bool, int, int]]: ...
    def reply(self, rows: npt.NDArray[Any], found: npt.NDArray[np.bool_], resp3: bool) -> bytes: ...

def resp_rows(rows: npt.NDArray[Any], found: npt.NDArray[np.bool_], single: bool, resp3: bool) -> bytes: ...
