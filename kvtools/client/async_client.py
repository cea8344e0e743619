"""The client for programs on an event loop."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

from kvtools.client.asynchronous import AsyncTransport
from kvtools.client.construction import ClientBase
from kvtools.client.pooling import Combiner
from kvtools.client.session import Missing, Rows, Steps
from kvtools.client.tables import Array, Table

T = TypeVar("T")


class AsyncClient(ClientBase[AsyncTransport]):
    """Looks rows up at `kvtools serve`, as `Client` does and with its arguments; for one event loop.

    Needs asyncio alone. A task that is cancelled ends its requests.

    Example:
        ```python
        async with AsyncClient("http://127.0.0.1:8501") as client:
            embeddings, found = await client.lookup("user_emb", [17, -3])
        ```
    """

    _transport_type = AsyncTransport

    async def tables(self) -> dict[str, Table]:
        """Return the tables that there are now; see `Client.tables`."""
        return await self._run(self._session.tables())

    async def lookup(self, table: str, keys: Any, *, missing: Missing | None = None) -> Rows:
        """Look keys up; see `Client.lookup`."""
        return (await self._run(self._session.lookup_many({table: keys}, missing)))[table]

    async def lookup_many(self, keys: Mapping[str, Any], *, missing: Missing | None = None) -> dict[str, Rows]:
        """Look keys of several tables up; see `Client.lookup_many`."""
        return await self._run(self._session.lookup_many(keys, missing))

    async def lookup_pooled(
        self,
        table: str,
        keys: Any,
        row_splits: Any,
        *,
        combiner: Combiner = "sum",
        weights: Any = None,
        missing: Missing | None = None,
    ) -> Array:
        """Look bags of keys up; see `Client.lookup_pooled`."""
        return await self._run(self._session.lookup_pooled(table, keys, row_splits, combiner, weights, missing))

    async def close(self) -> None:
        """Close all connections; a call after it raises `ClientError`."""
        self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, steps: Steps[T]) -> T:
        try:
            while True:
                await self._transport.run(next(steps))
        except StopIteration as end:
            result: T = end.value
            return result
