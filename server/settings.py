"""Everything that `kvtools serve` can be told, with defaults that work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_KEY_BYTES_IN_JSON = 32
SAME_SIGNAL = 0.5  # s: SIGTERM or SIGINT so soon after the first one is the same one, as `timeout` sends it


@dataclass(frozen=True)
class Settings:
    """How answers are given, to whom, and within which limits. Times are in seconds.

    Example:
        >>> Settings(port=0, max_keys=100).max_keys
        100
    """

    host: str = "127.0.0.1"
    port: int = 8501
    grpc_port: int | None = None  # None: no gRPC
    resp_port: int | None = None  # None: no Redis protocol

    max_keys: int = 65536  # keys of a request
    max_values: int = 16_777_216  # keys x dim of a request: the numbers of its answer
    max_body_bytes: int | None = None  # None: what max_keys keys take, generously spaced
    max_connections: int = 1024
    max_concurrent: int = 64  # lookups at once that take a thread; beyond: 429 with Retry-After

    header_timeout: float = 10
    body_timeout: float = 30
    keep_alive: float = 75
    # How long the event loop looks for the next lookup before it sleeps, whatever comes of it; None: a while, as long
    # as lookups do come so soon and nobody else wants the CPU.
    spin: float | None = None
    grace: float = 30  # what requests in hand get to end when the server is told to

    missing: Literal["zeros", "default", "error"] = "zeros"
    backend: str | None = None  # the URL of a Redis that has the rows which the path has not; or all, if it is the path
    backend_down: Literal["error", "missing"] = "error"  # what keys give that only a Redis could have that is down
    rows_from: tuple[tuple[str, ...], ...] = ()  # servers of the rows of models in two halves, of each shard
    rows_from_ca: Path | None = None  # certificates in PEM to trust there, in place of the system's
    workers: int = 1  # processes; with more than one, every port is listened on with SO_REUSEPORT
    poll: float | None = None  # how often folders are looked at; None: at SIGHUP, when a file was cut, and chains often
    follow: tuple[tuple[str, str], ...] = ()  # models that are served from chains: their names and folders
    wait: bool = False  # begin without a version, and wait for the first; otherwise it is an error that there is none
    cache: Path | None = None  # where snapshots are kept that are made of anything else; None: the user's cache
    verify: bool = True  # look at all checksums of a version: before a swap, and soon after the start
    admin: bool = False  # labels and models may be changed by requests
    api_keys: Path | None = None  # a file of who may ask; None, and none in the environment: everybody may
    tls_cert: Path | None = None  # a certificate chain in PEM, and its key: every port speaks TLS
    tls_key: Path | None = None
    access_log: str | None = None  # a file, or - for standard output
    page: bool = True  # answer / with a page for people, and what it asks
    shared: Path | None = None  # with several workers: a folder for what they tell each other, made by the supervisor

    @property
    def body_limit(self) -> int:
        """How many bytes a body may have, once decoded: generously spaced JSON of `max_keys` keys fits."""
        return self.max_body_bytes or self.max_keys * _KEY_BYTES_IN_JSON + 1024
