"""The client that waits: for programs with threads."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

from kvtools.client.blocking import BlockingTransport
from kvtools.client.construction import ClientBase
from kvtools.client.pooling import Combiner
from kvtools.client.session import Missing, Rows, Steps
from kvtools.client.tables import Array, Table, Tables

T = TypeVar("T")


class Client(ClientBase[BlockingTransport]):
    """Looks rows up at `kvtools serve`; any number of threads may use one client.

    Args:
        servers: the URL of a server, as in "http://host:8501", or a list of URLs of replicas: servers of the same rows.
        shards: in place of `servers`, for tables that are spread over servers by key: for each shard in order the URL
            of its server, or a list of those of its replicas.
        **options: see `kvtools.client.Options`: time limits, retries, hedging, access.

    Raises, from every method:
        kvtools.client.UnavailableError: no server answered; `TimeLimitError`, if not in time.
        kvtools.client.RefusedError: a server would not answer; its message says why.
        kvtools.client.WrongShardError: servers are not the shards that they should be.
        kvtools.errors.UnknownTableError: no such table.
        kvtools.errors.UsageError: keys are no integers, or out of the range of the table's key type.

    Example:
        ```python
        with Client("http://127.0.0.1:8501") as client:
            embeddings, found = client.lookup("user_emb", [17, -3])
        ```
    """

    _transport_type = BlockingTransport

    def tables(self) -> dict[str, Table]:
        """Return the tables that there are now, by name: key type, value type, dim, rows (of all shards).

        Where servers have several models and `model` is not given: those whose name only one of these has.
        """
        return self._run(self._session.tables())

    def check(self) -> tuple[list[Tables], str]:
        """Ask every server, of every shard and replica, what it has, and whether that is what it should have.

        Returns:
            What those have that answered, and what is said by the servers of a shard of which none did: "" where every
            shard can be asked.

        Raises:
            WrongShardError, WrongExportError: a server has other rows than it should have.
        """
        return self._run(self._session.check())

    def lookup(self, table: str, keys: Any, *, missing: Missing | None = None) -> Rows:
        """Look keys up.

        Args:
            table: the table's name.
            keys: integers of any shape, of which there may be any number: more than a server takes at once go in
                several requests. Where these would be answered by different versions, all are asked of one.
            missing: what a key without a row gives: "zeros", the table's "default" row, or an "error"; None: what the
                server is set to.

        Returns:
            The rows [*shape of keys, dim], and whether each key was found, bool [*shape of keys]. Rows are float32; of
            a table of float64, int32 or int64 they are of its type.
        """
        return self._run(self._session.lookup_many({table: keys}, missing))[table]

    def lookup_many(self, keys: Mapping[str, Any], *, missing: Missing | None = None) -> dict[str, Rows]:
        """Look keys of several tables up, in one request where a server takes that many; see `lookup`."""
        return self._run(self._session.lookup_many(keys, missing))

    def lookup_pooled(
        self,
        table: str,
        keys: Any,
        row_splits: Any,
        *,
        combiner: Combiner = "sum",
        weights: Any = None,
        missing: Missing | None = None,
    ) -> Array:
        """Look bags of keys up, and return one row for each: float32 [bags, dim].

        The server pools, so that one row a bag comes over the network; with `shards`, and for more keys than a server
        takes at once, rows are pooled here.

        Args:
            table: the table's name.
            keys: integers [n].
            row_splits: integers [bags + 1] that ascend from 0 to n: bag i has keys `row_splits[i]` to
                `row_splits[i + 1]`.
            combiner: "sum", "mean" (over the sum of weights) or "sqrtn" (over the root of the sum of their squares).
            weights: a number for each key; None: all 1.
            missing: see `lookup`.
        """
        return self._run(self._session.lookup_pooled(table, keys, row_splits, combiner, weights, missing))

    def close(self) -> None:
        """Close all connections; a call after it raises `ClientError`."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        try:
            while True:
                self._transport.run(next(steps))
        except StopIteration as end:
            result: T = end.value
            return result
