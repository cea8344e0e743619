"""Chains of checkpoints without a training, as docs/chain.md says, and the model that they are of, as a dict."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.chain import RECORD_TENSOR, fingerprint
from kvtools.dialects.bundle.writer import BundleWriter

Rows = dict[int, npt.NDArray[Any]]


class ChainWriter:
    """Writes members of a chain in `folder`; `rows` are the tables as they are now, by key."""

    def __init__(
        self,
        folder: Path,
        tables: Mapping[str, int],
        *,
        parts: int = 1,
        key_dtype: str = "int64",
        value_dtype: str = "float32",
        slot: bool = True,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.dims = dict(tables)
        self.parts = parts
        self.key_dtype, self.value_dtype, self.slot = key_dtype, value_dtype, slot
        self.rows: dict[str, Rows] = {name: {} for name in tables}
        self.chain = str(uuid.uuid4())
        self.number = 0
        self.full_number = 0
        self.mark = ""
        self.changed: dict[str, set[int]] = {name: set() for name in tables}
        self.gone: dict[str, set[int]] = {name: set() for name in tables}

    def put(self, table: str, keys: Iterable[int], value: float) -> None:
        """Write `value`, and numbers derived from it, to the rows of keys, those that are not there included."""
        for key in keys:
            row = (np.arange(self.dims[table]) + value + (key % 1000) / 7).astype(self.value_dtype)
            self.rows[table][key] = row
            self.changed[table].add(key)
            self.gone[table].discard(key)

    def remove(self, table: str, keys: Iterable[int]) -> None:
        """Remove keys; those that are not there, too, may be in the increment."""
        for key in keys:
            self.rows[table].pop(key, None)
            self.changed[table].discard(key)
            self.gone[table].add(key)

    def full(self, *, beside: bool = False) -> Path:
        """Write all; `beside` the increment of the same moment, which was the last member."""
        previous = {"sequence": self.number, "fingerprint": self.mark} if self.mark else None
        if not beside:
            self.number += 1
        self.full_number = self.number
        prefix = self._write("full", previous, {name: set(rows) for name, rows in self.rows.items()}, None)
        if not beside:
            self._begin_anew(prefix)
        return prefix

    def increment(self, **record: Any) -> Path:
        """Write what has changed since the last member; `record` are fields that are to be wrong."""
        previous = {"sequence": self.number, "fingerprint": self.mark}
        self.number += 1
        prefix = self._write("delta", previous, self.changed, self.gone, record)
        self._begin_anew(prefix)
        return prefix

    def _begin_anew(self, prefix: Path) -> None:
        self.mark = fingerprint(prefix)
        self.changed = {name: set() for name in self.dims}
        self.gone = {name: set() for name in self.dims}

    def _write(
        self,
        kind: str,
        previous: dict[str, Any] | None,
        rows: Mapping[str, set[int]],
        gone: Mapping[str, set[int]] | None,
        record: Mapping[str, Any] | None = None,
    ) -> Path:
        name = f"ckpt-{self.number}" + (".delta" if kind == "delta" else "")
        staging = self.folder / f".{name}.kvtools-{os.getpid()}"
        counts = {}
        with BundleWriter(staging) as bundle:
            for table, dim in self.dims.items():
                for part in range(self.parts):
                    x = table if self.parts == 1 else f"{table}/part_{part}"
                    keys = np.array(sorted(k for k in rows[table] if k % self.parts == part), self.key_dtype)
                    values = np.array([self.rows[table][int(k)] for k in keys], self.value_dtype).reshape(-1, dim)
                    slots = [{"name": "Adam.m", "width": dim, "init": "constant", "constant": 0}] if self.slot else []
                    meta = {
                        "layout": 1,
                        "name": table,
                        "part": part,
                        "parts": self.parts,
                        "key_dtype": self.key_dtype,
                        "value_dtype": self.value_dtype,
                        "dim": dim,
                        "slots": slots,
                    }
                    if kind == "delta":
                        meta["delta"] = True
                    bundle.string(f"{x}-kvmeta", json.dumps(meta).encode())
                    bundle.array(f"{x}-keys", keys)
                    bundle.array(f"{x}-values", values)
                    bundle.array(f"{x}-freqs", (np.arange(len(keys)) + self.number).astype(np.uint32))
                    bundle.array(f"{x}-versions", np.full(len(keys), 1000 + self.number, np.uint32))
                    if self.slot:
                        bundle.array(f"{x}-slot-Adam.m", values * np.array(2, self.value_dtype))
                    went = [] if gone is None else sorted(k for k in gone[table] if k % self.parts == part)
                    if gone is not None:
                        bundle.array(f"{x}-removed", np.array(went, self.key_dtype))
                    counts[x] = {"rows": len(keys), "removed": len(went), "born": 0}
            said = {
                "format": 1,
                "chain": self.chain,
                "sequence": self.number,
                "kind": kind,
                "full": self.full_number,
                "previous": previous,
                "time": time.time(),
                "step": self.number * 10,
                "tables": counts,
            }
            bundle.string(RECORD_TENSOR, json.dumps({**said, **(record or {})}).encode())
        for suffix in (".data-00000-of-00001", ".index"):
            Path(f"{staging}{suffix}").replace(self.folder / f"{name}{suffix}")
        return self.folder / name

    def expected(self, table: str, keys: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return what a lookup of `keys` [n] gives: values [n, dim] and found [n]."""
        zeros = np.zeros(self.dims[table], self.value_dtype)
        values = np.array([self.rows[table].get(int(key), zeros) for key in keys], self.value_dtype)
        return values.reshape(-1, self.dims[table]), np.array([int(key) in self.rows[table] for key in keys], bool)


def without(prefix: Path) -> None:
    """Remove the files of a member, as one that was lost."""
    for file in prefix.parent.glob(f"{prefix.name}.*"):
        if file.name.removeprefix(f"{prefix.name}.").split("-")[0] in ("index", "data"):
            file.unlink()
