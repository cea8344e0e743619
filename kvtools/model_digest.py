"""Digests of what no checksum covers in an exported model: its graph, its assets, and the manifest that says how to
read it.

The manifest of a model (`assets.extra/kvtools.json`, `split.json`) has them:

    {"files": {"saved_model.pb": "<SHA-256>", "assets/words.txt": "<SHA-256>"}, ..., "digest": "<SHA-256>"}

`digest` is that of all the rest of the manifest, as JSON with sorted keys and without spaces. Variables and tables have
checksums of their own. Models that were exported by kvtools before it had digests have none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtools.errors import CorruptFileError
from kvtools.remote.stored import read_bytes

FILES = "files"
DIGEST = "digest"
_GRAPHS = ("saved_model.pb", "saved_model.pbtxt")
_ASSETS = "assets"
_WAY_OUT = "copy the model again, or export it again"


def digests_of(folder: Path) -> dict[str, str]:
    """Return the digests of a SavedModel's graph and assets, by their names below its folder."""
    files = [folder / name for name in _GRAPHS] + sorted((folder / _ASSETS).rglob("*"))
    return {file.relative_to(folder).as_posix(): _digest_of(file) for file in files if file.is_file()}


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with its own digest, in place of one that it has.

    >>> sealed({"format": 1})["digest"][:8]
    '3f0a9925'
    """
    return {**manifest, DIGEST: _digest(manifest)}


def check_manifest(manifest: Mapping[str, Any], path: Path) -> None:
    """Raise `CorruptFileError` for a manifest, read from `path`, that has another digest than it says."""
    said = manifest.get(DIGEST)
    if said is not None and said != _digest(manifest):
        raise CorruptFileError(f"reading '{path}': it is not what was written: SHA-256 mismatch; {_WAY_OUT}")


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise `CorruptFileError` for a SavedModel in `folder` whose graph or assets are not those of its manifest."""
    for what in differing_files(folder, manifest):
        raise CorruptFileError(what)


def has_digests(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a manifest has the digests of its model's files."""
    return isinstance(manifest.get(FILES), Mapping)


def differing_files(folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the graph and the assets of a SavedModel in `folder`, by its manifest."""
    for name, said in manifest[FILES].items() if has_digests(manifest) else ():
        file = folder / name
        try:
            found = _digest_of(file)
        except OSError as error:
            yield f"reading '{file}': {error.strerror or error}; {_WAY_OUT}"
            continue
        if found != said:
            yield f"reading '{file}': it is not what was written: SHA-256 mismatch; {_WAY_OUT}"


def _digest_of(file: Path) -> str:
    return hashlib.sha256(read_bytes(file)).hexdigest()


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != DIGEST}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
