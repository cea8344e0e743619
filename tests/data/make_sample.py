"""Write tests/data/sample, the checkpoint of the tests that need no TensorFlow.

python tests/data/make_sample.py

ads/emb    int64 keys, float32 rows of 4, 3 parts, Adam slots, values in two slices
user_emb   int32 keys, bfloat16 rows of 8, one part
empty_emb  uint64 keys, float64 rows of 2, no rows
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ADS_KEYS = np.array([-(2**63), -7, -3, -1, 0, 1, 2, 5, 42, 2**40, 2**63 - 1], np.int64)
USER_KEYS = np.array([-(2**31), -5, 0, 9, 2**31 - 1], np.int32)


def rows(count: int, dim: int) -> np.ndarray:
    """Row i is i + 1, i + 1 + 1/8, i + 1 + 2/8, ...: exact in every float type used."""
    return (np.arange(count)[:, None] + 1 + np.arange(dim)[None, :] / 8).astype(np.float32)


def tensors() -> dict[str, Any]:
    """The tensors of the checkpoint."""

    def meta(name: str, part: int, parts: int, key: str, value: str, dim: int, slots: list[str]) -> str:
        record = {
            "layout": 1,
            "name": name,
            "part": part,
            "parts": parts,
            "key_dtype": key,
            "value_dtype": value,
        }
        constant = {"width": dim, "init": "constant", "constant": 0.0}
        return json.dumps(
            {
                **record,
                "dim": dim,
                "slots": [{"name": slot, **constant} for slot in slots],
                "initializer": {"kind": "uniform", "a": -0.05, "b": 0.05, "seed": 7},
            }
        )

    result: dict[str, Any] = {}
    values = rows(len(ADS_KEYS), 4)
    for part in range(3):
        here = part == ADS_KEYS % 3
        x = f"ads/emb/part_{part}"
        count = int(here.sum())
        result[f"{x}-keys"] = ADS_KEYS[here]
        result[f"{x}-values"] = [
            (f"{count} 4 0,1:-", values[here][:1]),
            (f"{count} 4 1,{count - 1}:-", values[here][1:]),
        ]
        result[f"{x}-freqs"] = np.flatnonzero(here).astype(np.uint32) + 1
        result[f"{x}-versions"] = np.flatnonzero(here).astype(np.uint32) + 1_700_000_000
        result[f"{x}-slot-Adam.m"] = -values[here]
        result[f"{x}-slot-Adam.v"] = values[here] * 2
        result[f"{x}-kvmeta"] = meta("ads/emb", part, 3, "int64", "float32", 4, ["Adam.m", "Adam.v"])
    result["user_emb-keys"] = USER_KEYS
    result["user_emb-values"] = rows(len(USER_KEYS), 8).astype(ml_dtypes.bfloat16)
    result["user_emb-freqs"] = np.ones(len(USER_KEYS), np.uint32)
    result["user_emb-versions"] = np.zeros(len(USER_KEYS), np.uint32)
    result["user_emb-kvmeta"] = meta("user_emb", 0, 1, "int32", "bfloat16", 8, [])
    result["empty_emb-keys"] = np.zeros(0, np.uint64)
    result["empty_emb-values"] = np.zeros((0, 2), np.float64)
    result["empty_emb-freqs"] = np.zeros(0, np.uint32)
    result["empty_emb-versions"] = np.zeros(0, np.uint32)
    result["empty_emb-kvmeta"] = meta("empty_emb", 0, 1, "uint64", "float64", 2, [])
    result["dense/kernel"] = np.arange(6, dtype=np.float32).reshape(2, 3)
    result["global_step"] = np.int64(7)
    return result


def main() -> None:
    """Write the checkpoint and its `checkpoint` file."""
    import tensorflow as tf

    folder = Path(__file__).parent / "sample"
    folder.mkdir(exist_ok=True)
    pieces = []
    for name, value in tensors().items():
        pieces += [(name, *piece) for piece in value] if isinstance(value, list) else [(name, "", value)]
    names, specs, values = zip(*pieces, strict=True)
    tf.raw_ops.SaveV2(
        prefix=str(folder / "model.ckpt-7"),
        tensor_names=list(names),
        shape_and_slices=list(specs),
        tensors=[tf.constant(value) for value in values],
    )
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-7"\n')


if __name__ == "__main__":
    main()
