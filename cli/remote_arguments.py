"""Arguments of a command line that are URLs of stores: the local paths that stand for them.

So every PATH, OUT and FILE of every command may be a URL, alone, as `--option=URL` or as `NAME=URL`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from kvtools.errors import UsageError
from kvtools.remote.paths import local_path
from kvtools.remote.url import is_remote

_NAMED = re.compile(r"((?:--)?[A-Za-z][\w.-]*=)([A-Za-z][A-Za-z0-9+.:-]*://.*)", re.S)
_ALONE = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://\S.*", re.S)
_OTHER_URLS = frozenset({"--rows-from", "--backend", "--to"})
"""Options whose values are URLs of servers that are asked, and of no file."""


def with_local_paths(command: str | None, arguments: Sequence[str]) -> list[str]:
    """List what the URLs among the arguments name, and put local paths in their place.

    Raises:
        UsageError: a URL is of another kind, has a password in it, or the option does not go with one.
        MissingDependencyError, BadInputError: see `kvtools.remote.mirror.mirrored`.
    """
    if not any("://" in argument for argument in arguments):
        return list(arguments)
    found, before, remote = [], "", False
    for argument in arguments:
        named = _NAMED.fullmatch(argument)
        start, text = (named[1], named[2]) if named else ("", argument)
        if _takes_path(before, start) and (named or _ALONE.fullmatch(argument)) and is_remote(text):
            _check(command, before, start, text)
            argument, remote = start + str(local_path(text)), True
            if command == "serve":  # models are mapped, and run by TensorFlow
                importlib.import_module("kvtools.remote.stored").keep_below(argument.removeprefix(start))
        found.append(argument)
        before = argument
    if remote:
        option = next((one for one in arguments if one.partition("=")[0] == "--keep"), None)
        if option is not None and command == "export":
            raise UsageError(f"got {option} and a URL, expected a path: let the store's own rules remove old versions")
    return found


def _takes_path(before: str, start: str) -> bool:
    option = start.removesuffix("=") if start.startswith("--") else before
    return option not in _OTHER_URLS


def _check(command: str | None, before: str, start: str, text: str) -> None:
    following = command == "follow" or before == "--follow" or start == "--follow="
    if following:
        shown: Any = importlib.import_module("kvtools.remote.url").parse(text).text
        raise UsageError(
            f"following '{shown}': expected a folder of this machine: a store does not tell what changed; copy the"
            " chain as it grows (`aws s3 sync`, `rclone sync`), its index files last, and follow the copy"
        )
