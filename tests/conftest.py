"""Sample checkpoints, written by stock TensorFlow under the tensor names of docs/checkpoint-layout.md."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Before anything imports TensorFlow: what is printed is compared, and no log lines are wanted between.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

# A shell that runs in the background starts what it runs with interrupts ignored; the tests send some.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In tests/suite: what tests take, and which of them run.
pytest_plugins = ["durations", "garbage", "grids", "rewriting", "time_limit"]

DATA = Path(__file__).parent / "data"

# No property-based test fails for being slow. `make test` looks at few examples, `make test-all` at many, and each at
# the same in every run: what they decide does not hang on a draw. Whoever runs pytest alone draws others each time.
slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("everyday", **slow)
settings.register_profile("quick", **slow, max_examples=20, derandomize=True)
settings.register_profile("thorough", **slow, max_examples=200, derandomize=True)
settings.load_profile("everyday")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass
class Sample:
    """A table as plain columns, the reference that every reader is compared with."""

    name: str
    keys: np.ndarray
    values: np.ndarray
    slots: dict[str, np.ndarray] = field(default_factory=dict)
    freqs: np.ndarray | None = None
    versions: np.ndarray | None = None

    @property
    def dim(self) -> int:
        return self.values.shape[1]

    def rows(self) -> dict[int, np.ndarray]:
        return {int(key): value for key, value in zip(self.keys, self.values, strict=True)}

    def part_of(self, parts: int) -> np.ndarray:
        return np.array([int(key) % parts for key in self.keys], np.int64)


def _make_sample(
    name: str = "scope/emb",
    rows: int = 50,
    dim: int = 4,
    key_dtype: str = "int64",
    value_dtype: str = "float32",
    slots: Sequence[str] = ("Adam.m", "Adam.v"),
    seed: int = 0,
) -> Sample:
    rng = np.random.default_rng(seed)
    limits = np.iinfo(key_dtype)
    keys = [int(limits.min), int(limits.max), 0, 1, 3, -1, -2, -7]
    keys = [key for key in dict.fromkeys(keys) if limits.min <= key <= limits.max][:rows]
    while len(keys) < rows:
        key = int(rng.integers(limits.min, limits.max, dtype=key_dtype))
        if key not in keys:
            keys.append(key)
    dtype = BFLOAT16 if value_dtype == "bfloat16" else np.dtype(value_dtype)
    draw = lambda: rng.normal(size=(rows, dim)).astype(dtype)  # noqa: E731
    return Sample(
        name,
        np.array(keys, key_dtype),
        draw(),
        {slot: draw() for slot in slots},
        rng.integers(0, 2**32, rows, dtype=np.uint32),
        rng.integers(0, 2**32, rows, dtype=np.uint32),
    )


def _table_tensors(sample: Sample, parts: int = 1, prefix: str | None = None, **meta: Any) -> dict[str, Any]:
    """The tensors of one variable. `prefix` is an object path for an object-based checkpoint."""
    tensors: dict[str, Any] = {}
    owner = sample.part_of(parts)
    for part in range(parts):
        here = owner == part
        if prefix is None:
            x = sample.name if parts == 1 else f"{sample.name}/part_{part}"
        else:
            x = f"{prefix}/.ATTRIBUTES/kv" + ("" if parts == 1 else f"_part_{part}")
        tensors[f"{x}-keys"] = sample.keys[here]
        tensors[f"{x}-values"] = sample.values[here]
        if sample.freqs is not None:
            tensors[f"{x}-freqs"] = sample.freqs[here]
        if sample.versions is not None:
            tensors[f"{x}-versions"] = sample.versions[here]
        for slot, rows in sample.slots.items():
            tensors[f"{x}-slot-{slot}"] = rows[here]
        record = {
            "layout": 1,
            "name": sample.name,
            "part": part,
            "parts": parts,
            "key_dtype": sample.keys.dtype.name,
            "value_dtype": sample.values.dtype.name,
            "dim": sample.dim,
            "slots": [
                {"name": slot, "width": rows.shape[1], "init": "constant", "constant": 0.0}
                for slot, rows in sample.slots.items()
            ],
            "initializer": {"kind": "constant", "a": 0.0, "seed": 0},
        }
        tensors[f"{x}-kvmeta"] = json.dumps({**record, **meta})
    return tensors


def _sliced(array: np.ndarray, pieces: int) -> list[tuple[str, np.ndarray]]:
    """Cut an array along its first dimension: [(shape_and_slice, piece), ...]."""
    shape = " ".join(map(str, array.shape))
    rest = ":-" * (array.ndim - 1)
    bounds = np.linspace(0, len(array), pieces + 1).astype(int)
    return [(f"{shape} {a},{b - a}{rest}", array[a:b]) for a, b in itertools.pairwise(bounds) if b > a]


@pytest.fixture(scope="session")
def tf() -> Any:
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="session")
def save(tf: Any) -> Callable[..., Path]:
    """Save tensors (arrays, strings, lists of slices) as a bundle of `shards` data files."""

    def write(prefix: Path, tensors: Mapping[str, Any], *, shards: int = 1, slices: int = 1) -> Path:
        pieces: list[tuple[str, str, Any]] = []
        for name, value in tensors.items():
            if isinstance(value, np.ndarray) and slices > 1 and value.ndim and len(value) >= slices:
                value = _sliced(value, slices)
            if isinstance(value, list):
                pieces += [(name, spec, piece) for spec, piece in value]
            else:
                pieces.append((name, "", value))
        prefix.parent.mkdir(parents=True, exist_ok=True)

        def write_bundle(to: Path, chosen: list[tuple[str, str, Any]]) -> None:
            names, specs, values = zip(*chosen, strict=True)
            tf.raw_ops.SaveV2(
                prefix=str(to),
                tensor_names=list(names),
                shape_and_slices=list(specs),
                tensors=[tf.constant(value) for value in values],
            )

        if shards == 1:
            write_bundle(prefix, pieces)
        else:
            temporary = [Path(f"{prefix}_temp_{shard}") for shard in range(shards)]
            for shard, path in enumerate(temporary):
                write_bundle(path, pieces[shard::shards])
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=[str(path) for path in temporary], destination_prefix=str(prefix)
            )
        return prefix

    return write


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., Sample]:
    return _make_sample


@pytest.fixture(scope="session")
def table_tensors() -> Callable[..., dict[str, Any]]:
    return _table_tensors


@pytest.fixture(scope="session")
def save_plain() -> Callable[..., Path]:
    """Save arrays and strings with our own writer, where TensorFlow is not what is tested."""

    def write(prefix: Path, tensors: Mapping[str, Any]) -> Path:
        from kvtools.dialects.bundle import BundleWriter

        prefix.parent.mkdir(parents=True, exist_ok=True)
        with BundleWriter(prefix) as writer:
            for name, value in tensors.items():
                if isinstance(value, str | bytes):
                    writer.string(name, value.encode() if isinstance(value, str) else value)
                else:
                    writer.array(name, value)
        return prefix

    return write


@pytest.fixture
def sample_path(tmp_path: Path) -> Path:
    """A copy of the checkpoint that tests/data/make_sample.py wrote; it needs no TensorFlow."""
    return shutil.copytree(DATA / "sample", tmp_path / "sample")


@pytest.fixture(scope="session")
def sample_values() -> dict[str, dict[int, np.ndarray]]:
    """The rows of that checkpoint by table and key."""
    source = runpy.run_path(str(DATA / "make_sample.py"))
    return {
        "ads/emb": dict(zip(source["ADS_KEYS"].tolist(), source["rows"](11, 4), strict=True)),
        "user_emb": dict(zip(source["USER_KEYS"].tolist(), source["rows"](5, 8), strict=True)),
        "empty_emb": {},
    }
