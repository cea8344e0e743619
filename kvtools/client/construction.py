"""How a client is made, whichever way it waits."""

from __future__ import annotations

import dataclasses
import difflib
import os
import ssl
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvtools.client.asynchronous import AsyncTransport
from kvtools.client.blocking import BlockingTransport
from kvtools.client.errors import CA_FILE
from kvtools.client.options import OptionArguments, Options
from kvtools.client.session import Session
from kvtools.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

Transport = TypeVar("Transport", BlockingTransport, AsyncTransport)
_URLS = ("url", "urls", "server", "address", "host", "base_url", "endpoint")


class ClientBase(Generic[Transport]):
    """What `Client` and `AsyncClient` are made of: a session, and what moves its bytes."""

    _transport_type: type[Transport]

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        shards: Sequence[str | Sequence[str]] | None = None,
        **options: Unpack[OptionArguments],
    ) -> None:
        chosen = _with_certificates(_options(type(self).__name__, options))
        self._session = Session(_as_shards(servers, shards), chosen)
        self._transport: Transport = self._transport_type(chosen)

    @property
    def export(self) -> str | None:
        """The only export of which rows are taken, if there is one."""
        return self._session.options.export


def _options(client: str, given: Mapping[str, Any]) -> Options:
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            meant = f"; did you mean {near[0]}=?" if near else ""
            if name in _URLS:
                meant = f"; the URL comes first, as in {client}('http://host:8501')."
            raise TypeError(f"{client}() has no option {name}={meant} It has {', '.join(['shards', *known])}")
    return Options(**given)


def context_of(file: str | os.PathLike[str], doing: str, option: str) -> ssl.SSLContext:
    """Return a context that trusts the certificates in `file`; raises `UsageError`, which names it by `option`."""
    try:
        return ssl.create_default_context(cafile=file)
    except ssl.SSLError as error:
        raise UsageError(f"{doing}: {option}'{file}' has no certificate in PEM") from error
    except OSError as error:
        raise UsageError(f"{doing}: reading {option}'{file}': {error.strerror or error}") from error


def _with_certificates(options: Options) -> Options:
    """Return options with what `ca_file` has; raises `UsageError`: later it would look like a server that is down."""
    if options.ca_file is None or options.tls is not None:
        return options
    context = context_of(options.ca_file, "making a client", CA_FILE)
    return dataclasses.replace(options, tls=context)


def _as_shards(servers: str | Sequence[str] | None, shards: Sequence[str | Sequence[str]] | None) -> list[list[str]]:
    """Return the replicas of each shard, from what a client is made with."""
    if (servers is None) == (shards is None):
        raise UsageError("making a client: expected either servers or shards=")
    if shards is None:
        assert servers is not None
        return [[servers] if isinstance(servers, str) else list(servers)]
    if isinstance(shards, str):
        raise UsageError("making a client: got one string as shards=, expected a list with a URL or more for each")
    return [[shard] if isinstance(shard, str) else list(shard) for shard in shards]
