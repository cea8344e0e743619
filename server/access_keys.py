"""Who may ask: keys with names, scoped to tables and models, read from a file.

    [[key]]
    name = "ranker"
    sha256 = "9f86d081..."            # of the key; or the key itself, as `key = "..."`
    tables = ["user_emb", "ads/*"]    # all, if it is left out
    models = ["ctr"]                  # all, if it is left out
    admin = false                     # may labels and models be changed with it?

A whole model, which TensorFlow runs, needs a key for all tables that its manifest names. Where nobody says which they
are, it needs one for all tables, or one that names the model in `models`.

Only digests are kept, and all of them are compared, each in constant time. What a client sends is never logged or
shown.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvtools.errors import BadInputError
from kvtools.server.request import RequestError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "KVTOOLS_SERVE_API_KEY"
FILE_VARIABLE = "KVTOOLS_SERVE_API_KEYS"  # of --api-keys
_FIELDS = {"name", "key", "sha256", "tables", "models", "admin"}
_SHORTEST = 16
_EXPECTED = f"expected a key of {_SHORTEST} characters or more, without spaces around it"
_NAMES_TOLD = 10
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class AccessKey:
    """What one key opens. `tables` and `models` are names, or patterns of `fnmatch`; None: all."""

    name: str
    digest: bytes
    tables: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    admin: bool = False


class AccessKeys:
    """The keys that a server knows.

    Example:
        >>> keys = AccessKeys([AccessKey("ranker", hashlib.sha256(b"a long secret key").digest(), ("user_emb",))])
        >>> keys.authorize({"authorization": "Bearer a long secret key"}, ["user_emb"])
        >>> keys.authorize({"x-api-key": "a long secret key"}, ["item_emb"])
        Traceback (most recent call last):
        ...
        kvtools.server.request.RequestError: the key 'ranker' is not for table 'item_emb'
    """

    def __init__(self, keys: Sequence[AccessKey]) -> None:
        self._keys = tuple(keys)
        self.by_model = any(key.models is not None for key in keys)
        """Whether any key is for some models only."""

    def find(self, headers: Mapping[str, str]) -> AccessKey | None:
        """Return the key that a client has sent, by `headers` with names in lower case, or None: it is none of ours."""
        sent = headers.get("x-api-key")
        if sent is None:
            kind, _, sent = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer":
                return None
        digest = hashlib.sha256(sent.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def unmatched(
        self, tables: Collection[str], models: Collection[str], of_unknown: Collection[str] = ()
    ) -> list[str]:
        """Return a sentence for each name or pattern of a key that none of `tables`, or of `models`, has.

        So it does for a key whose lists open nothing at all. `of_unknown` are the models whose tables are not known.
        """
        said = []
        for key in self._keys:
            if key.models == () and not key.admin:
                said.append(f"key '{key.name}' opens nothing: its list of models is empty; leave it out to open all")
            elif key.tables == () and not key.admin and not any(_opens_unknown(key, model) for model in of_unknown):
                said.append(f"key '{key.name}' opens nothing: its list of tables is empty; leave it out to open all")
            for what, patterns, names in (("table", key.tables, tables), ("model", key.models, models)):
                for pattern in patterns or ():
                    if not any(_opens((pattern,), name) for name in names):
                        there = ", ".join(f"'{name}'" for name in sorted(names)[:_NAMES_TOLD]) or "none"
                        unknown = f"{what} '{pattern[:200]}', which is not served"
                        said.append(f"key '{key.name}' is for {unknown}; there is {there}")
        return said

    def authorize(
        self, headers: Mapping[str, str], tables: Iterable[str] = (), *, model: str | None = None, admin: bool = False
    ) -> None:
        """Raise `RequestError` unless the client's key opens all of this: 401 without a key of ours, 403 with one."""
        key = self.find(headers)
        if key is None:
            sent = "x-api-key" in headers or "authorization" in headers
            said = "this key is not known here" if sent else "a key is needed"
            raise RequestError(
                401,
                "unauthorized",
                f"{said}; send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'",
                {"WWW-Authenticate": "Bearer"},
            )
        if admin and not key.admin:
            raise RequestError(403, "forbidden", f"the key '{key.name}' is not for administration")
        if model is not None and not _opens(key.models, model):
            raise RequestError(403, "forbidden", f"the key '{key.name}' is not for model '{model}'")
        if key.tables is not None:
            for table in tables:
                if not _opens(key.tables, table):
                    raise RequestError(403, "forbidden", f"the key '{key.name}' is not for table '{table[:200]}'")

    def authorize_unknown(self, headers: Mapping[str, str], model: str) -> None:
        """Raise `RequestError` unless the client's key opens `model`, of which nobody knows the tables."""
        self.authorize(headers, model=model)
        key = self.find(headers)
        if key is not None and not _opens_unknown(key, model):
            raise RequestError(
                403,
                "forbidden",
                f"the key '{key.name}' is for some tables only, and which tables model '{model}' reads is not known:"
                f' give the key models = ["{model}"], or serve what `kvtools export --savedmodel` or --split wrote',
            )


def read_access_keys(path: Path | None) -> AccessKeys | None:
    """Return the keys of a file and that of the environment (`KVTOOLS_SERVE_API_KEY`: all tables, no administration).

    None: there is neither, and everybody may ask. Raises `BadInputError`, which never shows a key.
    """
    keys = [] if path is None else _read(path)
    if path is None and os.environ.get(FILE_VARIABLE) == "":  # which the command line takes for no option
        raise BadInputError(f"reading the keys in {FILE_VARIABLE}: it is empty; unset it to let everybody ask")
    secret = os.environ.get(VARIABLE)
    if secret is not None:
        if not _is_long_enough(secret):
            raise BadInputError(f"reading the key in {VARIABLE}: {_EXPECTED}; unset it to do without")
        keys.append(AccessKey("environment", hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()))
    return AccessKeys(keys) if keys else None


def _is_long_enough(secret: str) -> bool:
    return len(secret) >= _SHORTEST and secret == secret.strip()


def _opens(patterns: tuple[str, ...] | None, name: str) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _opens_unknown(key: AccessKey, model: str) -> bool:
    """Tell whether a key opens a model of which nobody knows the tables: it opens all tables, or names the model."""
    return key.tables is None or "*" in key.tables or (key.models is not None and _opens(key.models, model))


def _read(path: Path) -> list[AccessKey]:
    doing = f"reading the keys in '{path}'"
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadInputError(f"{doing}: {error.strerror or error}") from error
    except ValueError as error:  # A line of it might have a key in it, so what is wrong is told by its place alone.
        place = re.search(r"\(at .*\)$", str(error))
        raise BadInputError(f"{doing}: it is no TOML in UTF-8 {place[0] if place else ''}".rstrip()) from None
    entries = document.pop("key", None)
    if document or not isinstance(entries, list) or not entries or not all(isinstance(each, dict) for each in entries):
        raise BadInputError(f"{doing}: expected tables [[key]], each with a name and a key or sha256, and nothing else")
    keys = [_entry(f"{doing}: key {number}", entry) for number, entry in enumerate(entries, 1)]
    for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
        for number, value in enumerate(values, 1):
            if value in values[: number - 1]:
                raise BadInputError(f"{doing}: key {number} has the {what} of another")
    return keys


def _entry(doing: str, entry: dict[str, Any]) -> AccessKey:
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadInputError(f"{doing} needs a name of up to 64 letters, digits, '.', '_' and '-'")
    doing = f"{doing} ('{name}')"
    if unknown := sorted(entry.keys() - _FIELDS):
        raise BadInputError(f"{doing} has '{unknown[0][:40]}', expected {', '.join(sorted(_FIELDS))}")
    secret, digest = entry.get("key"), entry.get("sha256")
    if (secret is None) == (digest is None):
        raise BadInputError(f"{doing} needs either a key or its sha256")
    if secret is not None:
        if not isinstance(secret, str) or not _is_long_enough(secret):
            raise BadInputError(f"{doing}: {_EXPECTED}")
        digest = hashlib.sha256(secret.encode()).hexdigest()
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise BadInputError(f"{doing}: expected a sha256 of 64 hexadecimal digits")
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise BadInputError(f"{doing}: expected admin true or false")
    return AccessKey(name, bytes.fromhex(digest), _names(doing, entry, "tables"), _names(doing, entry, "models"), admin)


def _names(doing: str, entry: dict[str, Any], field: str) -> tuple[str, ...] | None:
    names = entry.get(field)
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise BadInputError(f"{doing}: expected {field} to be a list of names")
    return tuple(names)
