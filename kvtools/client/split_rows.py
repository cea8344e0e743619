"""The rows that the dense part of a model asks for, from servers of its tables: see docs/client.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvtools.client.async_client import AsyncClient
from kvtools.client.client import Client
from kvtools.client.session import Rows
from kvtools.client.tables import Array
from kvtools.errors import UsageError
from kvtools.split_manifest import SplitSignature


def fetch_rows(
    client: Client, signature: SplitSignature, request: Mapping[str, Any], ids: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the inputs of the dense part: those of the request that it takes, and the rows of all lookups.

    Each id is asked for once, and all tables in one request where the server takes that many.

    Args:
        client: a client of servers of the tables, made with `export=` of the model.
        signature: which signature of the model is asked.
        request: its inputs, by name.
        ids: the outputs of `signature.ids_signature`, where `signature.needs_ids`.

    Raises:
        UsageError: an input or ids are not there; or the client was made for another export, or for none.
        kvtools.client.UnavailableError: no server has rows of this export, among the rest that `Client.lookup` raises.

    Example:
        ```python
        model = SplitModel.read("models/7")
        with Client("http://rows.example:8501", export=model.export) as client:
            inputs = fetch_rows(client, model.signature(), {"user_id": [17, 3]})
            outputs = dense.signatures["serving_default"](**inputs)
        ```
    """
    _check(client, signature)
    keys = signature.keys(request, ids)
    wanted, places = distinct_keys(signature, keys)
    answers = client.lookup_many(wanted, missing="zeros") if wanted else {}
    return signature.dense_request(request, rows_of_keys(signature, keys, places, answers))


async def fetch_rows_async(
    client: AsyncClient, signature: SplitSignature, request: Mapping[str, Any], ids: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the inputs of the dense part, on an event loop; see `fetch_rows`."""
    _check(client, signature)
    keys = signature.keys(request, ids)
    wanted, places = distinct_keys(signature, keys)
    answers = await client.lookup_many(wanted, missing="zeros") if wanted else {}
    return signature.dense_request(request, rows_of_keys(signature, keys, places, answers))


def _check(client: Client | AsyncClient, signature: SplitSignature) -> None:
    if client.export != signature.export:
        given = "none" if client.export is None else f"that of '{client.export}'"
        raise UsageError(
            f"looking up for signature '{signature.name}': the client was made with export= of another model, {given};"
            " make it with export=model.export, so that it takes rows of this one only"
        )


def distinct_keys(signature: SplitSignature, keys: Sequence[Array]) -> tuple[dict[str, Array], list[Array]]:
    """Return the distinct keys of each table, and for each lookup where among them its keys are."""
    by_table: dict[str, list[int]] = {}
    for at, lookup in enumerate(signature.lookups):
        by_table.setdefault(lookup.table.name, []).append(at)
    wanted: dict[str, Array] = {}
    places: list[Array] = [np.empty(0, np.int64)] * len(keys)
    for table, lookups in by_table.items():
        flat = [keys[at].reshape(-1) for at in lookups]
        wanted[table], inverse = np.unique(np.concatenate(flat), return_inverse=True)
        ends = np.cumsum([len(one) for one in flat])
        for at, part in zip(lookups, np.split(inverse.reshape(-1), ends[:-1]), strict=True):
            places[at] = part
    return wanted, places


def rows_of_keys(
    signature: SplitSignature, keys: Sequence[Array], places: Sequence[Array], answers: Mapping[str, Rows]
) -> list[Rows]:
    """Return the rows of each lookup, in the shape of its keys, from those of distinct keys."""
    found_rows = []
    for lookup, own, where in zip(signature.lookups, keys, places, strict=True):
        values, found = answers[lookup.table.name]
        found_rows.append((values[where].reshape(*own.shape, lookup.table.dim), found[where].reshape(own.shape)))
    return found_rows
