"""Where a server is: what is in a URL such as `https://rows.example:8501`."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

from kvtools.errors import UsageError
from kvtools.url_password import without_password


@dataclass(frozen=True)
class Endpoint:
    """A server: `prefix` is what stands before `/v1` in its paths; `shown` is the URL for messages."""

    host: str
    port: int
    secure: bool
    prefix: str

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    @property
    def shown(self) -> str:
        """The URL, for messages."""
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.prefix}"


def endpoint_of(url: str) -> Endpoint:
    """Return the server that a URL means.

    Raises:
        UsageError: it is no URL of http or https, or has more in it than a server's place.

    Example:
        >>> endpoint_of("http://[::1]:8501/rows/").shown
        'http://[::1]:8501/rows'
    """
    doing = f"reading the URL '{without_password(url)}' of a server"
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{doing}: {error}; expected http://host:8501") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{doing}: expected http://host:8501 or https://host")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{doing}: it has a user or a password; give api_key= to the client instead")
    if parts.query or parts.fragment:
        raise UsageError(f"{doing}: it has a query or a fragment; expected http://host:8501")
    if any(not " " < character < "\x7f" for character in f"{parts.hostname}{parts.path}"):
        raise UsageError(f"{doing}: it has characters that no URL may have; write them as %20 and so on")
    secure = parts.scheme == "https"
    return Endpoint(parts.hostname, port or (443 if secure else 80), secure, parts.path.rstrip("/"))
