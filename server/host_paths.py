"""Paths of the host, which no answer shows."""

from __future__ import annotations

import re
from pathlib import Path

# Names of tables have slashes, too, and the URL of a Redis is not a path.
_QUOTED = re.compile(r"(?<!table )'(?!rediss?[a-z+]*://)(?:[^'\s]*/)+([^'/]*)'")
_WITH_SPACES = re.compile(r"(?<!table )'/[^']*/([^'/]*)'")
_BARE = re.compile(r"(?<![\w'/.:-])(?<!GET )/(?:[^\s'/]+/)+([^\s'/]*)")


def without_folders(message: str, path: str = "") -> str:
    """Return a message whose paths have lost their folders; names of tables stay whole.

    Paths are what stands in quotes, what begins with a slash, and what lies where `path` does.

    >>> without_folders("verifying '/srv/models/7.kvsnap': table 'ads/emb', its rows")
    "verifying '7.kvsnap': table 'ads/emb', its rows"
    >>> without_folders("no checkpoint: models/ctr/7/variables/variables", "models/ctr/7")
    'no checkpoint: 7/variables/variables'
    """
    message = _WITH_SPACES.sub(r"'\1'", _QUOTED.sub(r"'\1'", message))
    if path and (folder := str(Path(path).parent)) not in ("/", "."):
        message = re.sub(rf"(?<![\w./'-]){re.escape(folder)}/", "", message)
    return _BARE.sub(r"\1", message)
