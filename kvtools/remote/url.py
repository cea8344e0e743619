"""Which URLs name a checkpoint in a store, and which are refused: what would leave the store, or give away a secret."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvtools.errors import UsageError

_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory")
"""Where a file appears whole or not at all, whoever writes it."""
_FILE_SYSTEMS = ("hdfs", "webhdfs", "sftp", "ssh", "hf")
_READ_ONLY = ("http", "https")
SCHEMES = (*_OBJECT_STORES, *_FILE_SYSTEMS, *_READ_ONLY, "file")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.S)
_CHAINED = re.compile(r"[A-Za-z0-9+.-]*::[^/]*(?:://|::)|[A-Za-z][A-Za-z0-9+.-]*://[^/]*::", re.S)
_USER_IN_NAME = ("abfs", "abfss", "az")  # container@account
_USER_TAKEN = ("hdfs", "webhdfs", "sftp", "ssh", "hf")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class RemoteUrl:
    """A URL as it was checked: `place` is host, bucket or container, `parts` the names below; `query` of http only."""

    scheme: str
    place: str
    parts: tuple[str, ...]
    query: str = ""
    folder: bool = False

    @property
    def text(self) -> str:
        """The URL, without a query, which may be a signature."""
        return f"{self.scheme}://{'/'.join(filter(None, (self.place, *self.parts)))}"

    @property
    def whole_puts(self) -> bool:
        """Whether a file appears whole or not at all where it is put."""
        return self.scheme in _OBJECT_STORES

    @property
    def read_only(self) -> bool:
        """Whether nothing is written there."""
        return self.scheme in _READ_ONLY


def is_remote(text: str) -> bool:
    """Tell whether a text is a URL of a store, rather than a path, or the URL of a Redis.

    >>> is_remote("s3://bucket/model.ckpt"), is_remote("model.ckpt"), is_remote("redis://localhost")
    (True, False, False)
    """
    if "://" not in text:
        return False
    found = _URL.fullmatch(text)
    return bool(_CHAINED.match(text)) if found is None else not found[1].lower().startswith(("redis", "unix"))


def parse(text: str) -> RemoteUrl:
    """Check a URL and take it apart.

    Raises:
        UsageError: it is of another scheme, or chained, has a user and password in it, or leaves its bucket by `..`.

    >>> parse("s3://bucket/train/model.ckpt").parts
    ('train', 'model.ckpt')
    >>> parse("s3://key:secret@bucket/model.ckpt")
    Traceback (most recent call last):
    kvtools.errors.UsageError: opening a URL of s3: it has a user or a password in it, which process lists show; ...
    """
    if _CHAINED.match(text):
        kinds = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UsageError(f"opening a URL: got one that is chained by '::', expected one of {kinds} alone")
    found = _URL.fullmatch(text)
    scheme = found[1].lower() if found else ""
    if found is None or scheme not in SCHEMES:
        kinds = ", ".join(f"{known}://" for known in SCHEMES)
        raise UsageError(f"opening '{text}': got a URL of '{scheme}', expected one of {kinds}, or a path")
    rest, query = found[2], ""
    if scheme in _READ_ONLY:
        rest, _, query = rest.partition("#")[0].partition("?")
    place, *names = rest.split("/")
    if scheme == "file":
        place, names = "", [place, *names] if place not in ("", "localhost") else names
    folder = bool(names) and names[-1] == ""
    while names and names[-1] == "":
        names.pop()
    _refuse_user(scheme, place, rest)
    shown = f"{scheme}://{place}/..."
    if _CONTROL.search(rest):
        raise UsageError(f"opening a URL of {scheme}: got one with control characters; write it without them")
    if not place and scheme not in ("memory", "file", "hdfs"):
        raise UsageError(f"opening '{scheme}://{rest}': got no bucket or host, expected {scheme}://NAME/...")
    if place in (".", ".."):
        raise UsageError(f"opening '{scheme}://{rest}': got '{place}' as the bucket or host, expected its name")
    if scheme == "hdfs" and not place:
        place = "default"  # as Hadoop calls what its configuration names
    if scheme == "memory" and not place and names:
        place, names = names[0], names[1:]
    for name in names:
        if name in ("", ".", ".."):
            said = "an empty name" if not name else f"'{name}'"
            raise UsageError(f"opening '{shown}': got {said} between slashes, expected names; write the URL in full")
    return RemoteUrl(scheme, place, tuple(names), query, folder)


def _refuse_user(scheme: str, place: str, rest: str) -> None:
    """Raise `UsageError` where a URL has credentials in it; the message has nothing of them."""
    user, at, _ = place.rpartition("@")
    secret = ":" in user or (at and scheme not in (*_USER_IN_NAME, *_USER_TAKEN))
    # A secret of AWS may have a slash in it: its first part is then what a bucket is taken for.
    port = scheme in (*_FILE_SYSTEMS, *_READ_ONLY) and place.rpartition(":")[2].isdecimal()
    if ":" in place and "@" in rest and not port and not place.startswith("arn:"):
        secret = True
    if secret:
        raise UsageError(
            f"opening a URL of {scheme}: it has a user or a password in it, which process lists show; leave them out,"
            " and give credentials by the environment: see docs/remote.md"
        )
