"""A bucket of the S3 server of the tests, and all that a checkpoint has, to compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from s3_proxy import Proxy

from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.interface import Checkpoint


@dataclass
class Bucket:
    """A bucket: `url` without a slash at its end, `proxy` the server by which it is reached, `client` that of boto3."""

    name: str
    proxy: Proxy
    client: Any

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def put(self, path: Path, name: str) -> str:
        """Put a file, or a folder, there; return its URL."""
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                below = f"{name}/{file.relative_to(path).as_posix()}" if path.is_dir() else name
                self.client.put_object(Bucket=self.name, Key=below, Body=file.read_bytes())
        self.proxy.reset()
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        told = self.client.list_objects_v2(Bucket=self.name)
        return [one["Key"] for one in told.get("Contents", [])]

    def get(self, name: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=name)["Body"].read()
        return data


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that a checkpoint has, as bytes: rows in order, single rows, extra arrays, dense variables."""
    found: dict[str, Any] = {"dialect": checkpoint.dialect, "broken": [*checkpoint.broken]}
    for name, table in checkpoint.tables.items():
        columns: dict[str, bytes] = {}
        for chunk in table.chunks(ALL_COLUMNS):
            of_chunk = {"keys": chunk.keys, "values": chunk.values, "freqs": chunk.freqs, "versions": chunk.versions}
            for column, array in {**of_chunk, **chunk.slots}.items():
                if array is not None:
                    columns[column] = columns.get(column, b"") + array.tobytes()
        some = range(0, table.rows, max(1, table.rows // 7))
        taken = table.take(np.array([*some][::-1], np.int64), ALL_COLUMNS)
        extras = {extra.name: np.asarray(table.extra(extra.name)).tobytes() for extra in table.schema.extras}
        values = None if taken.values is None else taken.values.tobytes()
        found[name] = {
            "rows": columns,
            "schema": (table.schema.dim, table.schema.key_dtype, table.schema.value_dtype, table.schema.part_rows),
            "taken": (taken.keys.tobytes(), values, {slot: rows.tobytes() for slot, rows in taken.slots.items()}),
            "extras": extras,
        }
    for variable in checkpoint.variables:
        found[f"variable {variable.name}"] = [np.asarray(a).tobytes() for a in checkpoint.read_variable(variable.name)]
    return found
