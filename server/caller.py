"""Who asks, in a protocol of others: let in or not, and what was looked up for them, for whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtools.server.answer import TableCount
from kvtools.server.catalog import ServedVersion
from kvtools.server.observer import Answered, Observer
from kvtools.server.protocol_error import of_request
from kvtools.server.request import RequestError


@dataclass
class Caller:
    """One request's: `headers` are those of HTTP or the metadata of gRPC, names in lower case."""

    observer: Observer = field(default_factory=Observer)
    headers: Mapping[str, str] = field(default_factory=dict)
    client: tuple[str, int] | None = None
    counts: list[TableCount] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    protocol: Literal["http", "grpc"] = "http"
    request_id: str = ""
    # What is asked, as far as it is known: set by `asks`, and by who finds the signature.
    model: str = ""
    version: int = 0
    signature: str = ""

    def authorize(self, tables: Sequence[str] = ()) -> None:
        """Raise a `ProtocolError` if the caller may not look up `tables`, or without any, may not ask at all."""
        self._checked(lambda: self.observer.authorize(self.headers, tables))

    def looks_up(self, tables: Sequence[str] | None) -> None:
        """Raise a `ProtocolError` if the caller may not read `tables`; None: those of the model, which are unknown."""
        if tables is None:
            self._checked(lambda: self.observer.authorize_unknown(self.headers, self.model))
        else:
            self.authorize(tables)

    def asks(self, served: ServedVersion) -> None:
        """Note what is asked. Raises a `ProtocolError` if the caller may not ask this model."""
        self.model, self.version = served.model, served.number
        self._checked(lambda: self.observer.authorize_model(self.headers, served.model))

    def changes(self) -> None:
        """Raise a `ProtocolError` if the caller may not change what is served."""
        self._checked(lambda: self.observer.authorize_change(self.headers))

    def _checked(self, check: Callable[[], None]) -> None:
        try:
            check()
        except RequestError as error:
            raise of_request(error) from None

    def told(self, kind: str, status: int, code: str, bytes_in: int, bytes_out: int) -> Answered:
        """Return what the observer is told when the answer is made."""
        return Answered(
            kind,
            status,
            code,
            tuple(self.counts),
            time.perf_counter() - self.began,
            bytes_in,
            bytes_out,
            self.client,
            self.headers,
            False,
            self.protocol,
            self.request_id,
            self.model,
            version=self.version,
            signature=self.signature,
        )
