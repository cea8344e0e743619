"""One store: the file system of fsspec that reaches it, and calls that are made again when it does not answer."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtools.errors import BadInputError, KvtoolsError, MissingDependencyError, OutputError
from kvtools.remote.fault import is_passing, lacks_bucket, reason_of, what_failed
from kvtools.remote.url import RemoteUrl

_Result = TypeVar("_Result")

TRIES = 6
_FIRST_WAIT = 0.2
_LONGEST_WAIT = 5.0
_sleep = time.sleep
_stores: dict[tuple[str, str], Store] = {}
_INSTALLS = {
    "s3": "pip install 'kvtools[remote]'",
    "s3a": "pip install 'kvtools[remote]'",
    "gs": "pip install gcsfs",
    "gcs": "pip install gcsfs",
    "abfs": "pip install adlfs",
    "abfss": "pip install adlfs",
    "az": "pip install adlfs",
    "oss": "pip install ossfs",
    "hdfs": "pip install pyarrow, and Hadoop's libhdfs",
    "webhdfs": "pip install requests",
    "sftp": "pip install paramiko",
    "ssh": "pip install paramiko",
    "hf": "pip install huggingface_hub",
    "http": "pip install aiohttp",
    "https": "pip install aiohttp",
}


@dataclass(frozen=True)
class Entry:
    """What a store says of a file or folder: `name` as the store has it, `identity` changes when the bytes do."""

    name: str
    folder: bool
    size: int
    identity: str
    modified: float | None


class Store:
    """A bucket, or a host: what reads and writes there."""

    def __init__(self, url: RemoteUrl) -> None:
        self.scheme = url.scheme
        self.fs = _file_system(url)

    def name_of(self, url: RemoteUrl) -> str:
        """Return what the store calls the place of a URL."""
        query = f"?{url.query}" if url.query else ""
        return str(self.fs._strip_protocol(url.text + query))

    def child(self, name: str, below: str) -> str:
        """Return what the store calls a name below another."""
        return f"{name.rstrip('/')}/{below}"

    def entry(self, told: Mapping[str, Any]) -> Entry:
        """Return what a store said of a place."""
        identity = next((str(told[key]) for key in ("ETag", "etag", "md5Hash", "content_md5") if told.get(key)), "")
        when = next((told[key] for key in ("LastModified", "mtime", "last_modified", "updated", "modified", "created")
                     if told.get(key) is not None), None)  # fmt: skip
        size = int(told.get("size") or 0)
        return Entry(
            str(told["name"]),
            told.get("type") == "directory",
            size,
            identity or f"{size}:{when}",
            _seconds(when),
        )

    def call(self, doing: str, call: Callable[[], _Result], *, writing: bool = False) -> _Result:
        """Call, and call again with longer and longer pauses where the store does not answer; at most `TRIES` times.

        Raises:
            FileNotFoundError: what is asked for is not there.
            BadInputError: the store refuses, or cannot be reached; `OutputError` of `writing`.
        """
        for number in range(TRIES):
            try:
                return call()
            except KvtoolsError:
                raise
            except Exception as raised:
                error = what_failed(raised)
                if isinstance(error, FileNotFoundError) and not writing and not lacks_bucket(error):
                    raise
                if not is_passing(error) or number == TRIES - 1:
                    kind = OutputError if writing else BadInputError
                    raise kind(f"{doing}: {reason_of(error)}") from error
                pause(number)
        raise AssertionError


def pause(number: int) -> None:
    """Wait before try `number` + 1: twice as long each time, and not all at the same moment."""
    _sleep(min(_LONGEST_WAIT, _FIRST_WAIT * 2**number) * (0.5 + random.random() / 2))


def store_of(url: RemoteUrl) -> Store:
    """Return the store of a URL, the same one for all URLs of it.

    Raises:
        MissingDependencyError: fsspec is not installed, or what it needs for this scheme; the message names it.
    """
    found = _stores.get((url.scheme, url.place))
    if found is None:
        found = _stores[url.scheme, url.place] = Store(url)
    return found


def _file_system(url: RemoteUrl) -> Any:
    doing = f"opening '{url.text}'"
    try:
        import fsspec
    except ImportError:
        raise MissingDependencyError(
            f"{doing}: URLs need fsspec, which is not installed; run `pip install 'kvtools[remote]'`"
        ) from None
    options: dict[str, Any] = {}
    if url.scheme in ("s3", "s3a"):
        # Tries are counted here, once, and not by each of three layers.
        options["config_kwargs"] = {
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 32,
            "connect_timeout": 10,
        }
    try:
        kind = fsspec.get_filesystem_class(url.scheme)
        options = {**kind._get_kwargs_from_urls(url.text), **options}
        if url.scheme != "memory":
            options |= {"skip_instance_cache": True, "use_listings_cache": False}
        made = kind(**options)
    except ImportError as error:
        install = _INSTALLS.get(url.scheme, "pip install 'kvtools[remote]'")
        raise MissingDependencyError(
            f"{doing}: {url.scheme}:// needs a package that is not installed ({' '.join(str(error).split())[:200]});"
            f" run `{install}`"
        ) from error
    except KvtoolsError:
        raise
    except Exception as error:
        raise BadInputError(f"{doing}: {reason_of(error)}") from error
    if url.scheme in ("s3", "s3a"):
        made.retries = 1
    return made


def _seconds(when: Any) -> float | None:
    if isinstance(when, datetime.datetime):
        return (when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)).timestamp()
    if isinstance(when, int | float):
        return when / 1000 if when > 1e11 else float(when)  # of webhdfs: milliseconds
    if isinstance(when, str):
        try:
            return datetime.datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()
        except ValueError:
            return None
    return None
