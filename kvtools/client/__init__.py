"""Rows from `kvtools serve`, for Python programs: `Client` waits, `AsyncClient` is for event loops.

Needs NumPy and nothing else: neither TensorFlow nor a library for HTTP.

client.py, async_client.py     the two clients; construction.py is how both are made
session.py                     what both do: shards, requests no larger than a server takes, checks of the answers
call.py                        one request: retries, time limits, hedging
replicas.py                    servers of the same rows: which one is asked
blocking.py, asynchronous.py   who moves the bytes: a thread, an event loop
http_answer.py                 HTTP/1.1, as bytes
split_rows.py                  the rows that the dense part of a model in two halves asks for
pooling.py, tables.py          bags in NumPy; what servers say of their tables

Example:
    ```python
    from kvtools.client import Client

    with Client("http://127.0.0.1:8501") as client:
        embeddings, found = client.lookup("user_emb", [17, -3])
    ```
"""

from __future__ import annotations

from kvtools.client.async_client import AsyncClient
from kvtools.client.client import Client
from kvtools.client.errors import (
    BadAnswerError,
    ClientError,
    RefusedError,
    TimeLimitError,
    UnavailableError,
    WrongExportError,
    WrongShardError,
)
from kvtools.client.options import Options
from kvtools.client.split_rows import fetch_rows, fetch_rows_async
from kvtools.client.tables import Shard, Table
from kvtools.split_manifest import SplitModel

__all__ = [
    "AsyncClient",
    "BadAnswerError",
    "Client",
    "ClientError",
    "Options",
    "RefusedError",
    "Shard",
    "SplitModel",
    "Table",
    "TimeLimitError",
    "UnavailableError",
    "WrongExportError",
    "WrongShardError",
    "fetch_rows",
    "fetch_rows_async",
]
