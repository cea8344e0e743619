"""Requests to a server by its port, and what its sockets say."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any


def get_json(port: int, path: str) -> tuple[int, Any]:
    """Status and JSON of a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def raw(port: int, data: bytes) -> bytes:
    """Send bytes and no more; return all that comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


def refuses(port: int) -> bool:
    """Whether nobody accepts connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False
