"""What can go wrong when rows are asked for over the network."""

from __future__ import annotations

import ssl

from kvtools.errors import KvtoolsError

CA_FILE = "ca_file="
"""What names a certificate authority, in the words of errors."""
MORE_TIME = "; raise timeout=, or ask for less"
"""What to do about a time limit, in the words of errors."""


class ClientError(KvtoolsError):
    """Base of what a client raises; a wrong argument is a `UsageError`, a wrong name an `UnknownTableError`."""


class RefusedError(ClientError):
    """A server understood the request and will not answer it: `status` of HTTP, and the server's `code`, if any."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class UnavailableError(ClientError):
    """No server answered: none could be reached, or all were busy. `retry_after`: seconds that a server asked for."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TimeLimitError(UnavailableError, TimeoutError):
    """No answer came within the time limit."""


class BadAnswerError(ClientError):
    """What came is no answer of `kvtools serve`, or not one to this request."""


class WrongShardError(ClientError):
    """A server has the rows of another shard than the one in whose place it stands."""


class WrongExportError(ClientError):
    """A server has rows of another export than the one that is asked for, or cannot tell."""


def with_way_out(error: OSError, *, mute: bool = False) -> OSError:
    """Return a fault of a connection in words that say what to do, where its own do not.

    `mute`: it has no TLS, and nothing came on it.
    """
    if mute and isinstance(error, ConnectionResetError):
        return ConnectionResetError(f"{error.strerror or error}; if this port speaks TLS, name it by https://")
    if isinstance(error, ssl.SSLCertVerificationError):
        return OSError(f"{error.verify_message}; name its certificate authority by {CA_FILE}FILE, or in SSL_CERT_FILE")
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return OSError("it does not speak TLS; name it by http://, or check the port of the URL")
    return error
