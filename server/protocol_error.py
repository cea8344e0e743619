"""What a protocol answers in place of a result: one error, told by gRPC as a code and by HTTP as a status."""

from __future__ import annotations

from collections.abc import Mapping

from kvtools.server.request import RequestError

# How TensorFlow Serving maps codes to statuses; what it has none for is 500.
HTTP_STATUSES = {
    "CANCELLED": 499,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "UNAUTHENTICATED": 401,
}


class ProtocolError(Exception):
    """A request that is not answered: `code` is the name of a gRPC status, `status` HTTP's.

    Example:
        >>> ProtocolError("NOT_FOUND", "Servable not found for request: Latest(emb)").status
        404
    """

    def __init__(
        self, code: str, message: str, *, status: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status or HTTP_STATUSES.get(code, 500)
        self.headers = dict(headers or {})


def of_request(error: RequestError) -> ProtocolError:
    """Return what an error of our own interface is here.

    >>> of_request(RequestError(503, "backend_unavailable", "Redis does not answer")).code
    'UNAVAILABLE'
    """
    code = next((code for code, status in HTTP_STATUSES.items() if status == error.status), "INVALID_ARGUMENT")
    return ProtocolError(code, error.message, status=error.status, headers=error.headers)


def invalid(message: str) -> ProtocolError:
    """Return the error of a request that is wrong in itself."""
    return ProtocolError("INVALID_ARGUMENT", message)
