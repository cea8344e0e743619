"""Any name as one component of a path: what folders, files and HDF5 groups of tables are called."""

from __future__ import annotations

import hashlib

_SPECIAL = frozenset('/\\%:*?"<>|=\x7f')
_LIMIT = 180


def safe_name(name: str) -> str:
    r"""Return `name` as one component of a path; different names give different ones.

    What file systems, HDF5 or a dataset of Parquet files read as more than a letter (slashes, `=`, control characters,
    a dot or underscore in front) becomes `%` and the hexadecimal of its UTF-8 bytes, as in a URL; the empty name is
    `%`; one too long for a file system is cut and ends in `%~` and a hash of all of it.

    >>> safe_name("ads/emb"), safe_name("Adam.m"), safe_name("..")
    ('ads%2Femb', 'Adam.m', '%2E.')
    """
    safe = "".join(_quoted(letter) if _is_special(letter) else letter for letter in name) or "%"
    if safe[0] in "._":
        safe = _quoted(safe[0]) + safe[1:]
    if len(safe.encode()) <= _LIMIT:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:20]
    return f"{safe.encode()[:_LIMIT].decode('utf-8', 'ignore')}%~{digest}"


def _is_special(letter: str) -> bool:
    return letter in _SPECIAL or letter < " " or "\ud800" <= letter <= "\udfff"


def _quoted(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode("utf-8", "surrogatepass"))
