"""Types of the table engine's Python module; its docstrings are in the module itself."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

_Array: TypeAlias = npt.NDArray[Any]
_Keys: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.uint64]
_Bools: TypeAlias = npt.NDArray[np.bool_]
_Stamps: TypeAlias = npt.NDArray[np.uint32]
_Positions: TypeAlias = npt.NDArray[np.uint64]
_Initializer: TypeAlias = float | Mapping[str, Any] | None
_Slot: TypeAlias = (
    tuple[str, int]
    | tuple[str, int, Literal["constant", "copy_value"]]
    | tuple[str, int, Literal["constant", "copy_value"], float]
)
_Column: TypeAlias = int | str
_Chunk: TypeAlias = tuple[_Array, _Stamps, _Stamps, dict[int, _Array]]

class MemoryUse(TypedDict):
    rows: int
    row_bytes: int
    index_bytes: int
    column_bytes: int
    slack_bytes: int
    overhead_per_row: float

class Optimizer(TypedDict):
    hyperparameters: dict[str, tuple[float | None, str]]
    slots: dict[str, float]

class Exporter(Iterator[_Chunk]):
    def __iter__(self) -> Exporter: ...
    def __next__(self) -> _Chunk: ...
    @property
    def max_rows(self) -> int: ...

class Table:
    def __init__(
        self,
        key_dtype: npt.DTypeLike,
        value_dtype: npt.DTypeLike,
        dim: int,
        *,
        initializer: _Initializer = None,
        slots: Sequence[_Slot] = (),
        capacity_hint: int = 0,
        max_capacity: int = 0,
        eviction: Literal["lru", "lfu", "custom", "epoch_lru", "epoch_lfu"] = "lru",
        shards: int = 0,
        huge_pages: bool = True,
        threads: int = 0,
        max_age: int = 0,
        age_unit: Literal["seconds", "steps"] = "seconds",
        clock: npt.NDArray[np.uint64] | None = None,
        admission: Mapping[str, Any] | None = None,
        padding_key: int | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def key_dtype(self) -> np.dtype[Any]: ...
    @property
    def value_dtype(self) -> np.dtype[Any]: ...
    @property
    def dim(self) -> int: ...
    @property
    def initializer(self) -> dict[str, Any]: ...
    @initializer.setter
    def initializer(self, value: _Initializer) -> None: ...
    @property
    def slots(self) -> list[tuple[str, int, Literal["constant", "copy_value"], float]]: ...
    @property
    def max_capacity(self) -> int: ...
    @property
    def eviction(self) -> str: ...
    @property
    def evicted_rows(self) -> int: ...
    @property
    def expired_rows(self) -> int: ...
    @property
    def waiting_keys(self) -> int: ...
    @property
    def admission_bytes(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def gather(
        self,
        keys: _Keys,
        missing: Literal["zeros", "initial"] | _Array = "zeros",
        *,
        out: _Array | None = None,
        found: _Bools | None = None,
        positions: _Positions | None = None,
    ) -> _Array: ...
    def gather_or_insert(
        self,
        keys: _Keys,
        *,
        frequency: int = 0,
        version: int = 0,
        admission: float = 1.0,
        seed: int = 0,
        out: _Array | None = None,
        inserted: _Bools | None = None,
        positions: _Positions | None = None,
    ) -> _Array: ...
    @property
    def now(self) -> int: ...
    def set_step(self, step: int) -> None: ...
    def evict(
        self,
        policy: Literal["after_steps", "after_seconds", "below_norm", "below_frequency", "keep_top"],
        number: float,
        *,
        by: Literal["frequency", "version", "norm"] = "frequency",
    ) -> int: ...
    def begin_sweep(self, policies: Sequence[tuple[Any, ...]]) -> None: ...
    def sweep(self, rows: int) -> int: ...
    def gather_columns(
        self, keys: _Keys, columns: Sequence[_Column] | None = None, *, found: _Bools | None = None
    ) -> list[_Array]: ...
    def contains(self, keys: _Keys, *, out: _Bools | None = None) -> _Bools: ...
    def gather_stamps(self, keys: _Keys) -> tuple[_Stamps, _Stamps]: ...
    def upsert(self, keys: _Keys, values: _Array, *, frequency: int = 0, version: int = 0) -> None: ...
    def upsert_columns(
        self, keys: _Keys, columns: Mapping[int, _Array] | Mapping[str, _Array], *, frequency: int = 0, version: int = 0
    ) -> None: ...
    def accumulate(
        self,
        keys: _Keys,
        deltas: _Array,
        *,
        from_zeros: bool = False,
        frequency: int = 0,
        version: int = 0,
    ) -> None: ...
    def apply(
        self,
        optimizer: str,
        keys: _Keys,
        gradients: _Array,
        hyperparameters: Mapping[str, float],
        *,
        slots: Sequence[_Column] = (),
        positions: npt.NDArray[np.uint64] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        skip_nonfinite: bool = False,
        frequency: int = 1,
        version: int = 0,
    ) -> tuple[int, int]: ...
    def zeroed(self, keys: _Keys) -> _Bools: ...
    @property
    def zeroed_rows(self) -> int: ...
    @property
    def skipped_updates(self) -> int: ...
    def remove(self, keys: _Keys) -> int: ...
    def clear(self) -> None: ...
    def reserve(self, rows: int) -> None: ...
    def ensure_slots(self, slots: Sequence[_Slot]) -> int: ...
    def export(self, columns: Sequence[_Column] | None = None, *, chunk: int = 65536) -> Exporter: ...
    def import_rows(
        self,
        keys: _Keys,
        columns: Mapping[int, _Array] | Mapping[str, _Array],
        *,
        frequencies: _Stamps | None = None,
        versions: _Stamps | None = None,
    ) -> None: ...
    def memory(self) -> MemoryUse: ...
    def max_probe_length(self) -> int: ...

def hash_key(key: int) -> int: ...
def initial_values(keys: _Keys, value_dtype: npt.DTypeLike, dim: int, initializer: _Initializer = None) -> _Array: ...
def optimizers() -> dict[str, Optimizer]: ...
def apply_to_arrays(
    optimizer: str,
    columns: Sequence[_Array],
    gradients: _Array,
    hyperparameters: Mapping[str, float],
    *,
    rows: npt.NDArray[np.int64] | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    skip_nonfinite: bool = False,
) -> tuple[int, int]: ...
