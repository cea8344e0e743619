"""Which file of a model has which tensor: what Hugging Face's indexes say, of safetensors and of PyTorch's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtools.errors import CorruptFileError


def weight_map(index: Mapping[str, Any], doing: str) -> dict[str, str]:
    """Return the file of each tensor that an index of Hugging Face's layout names, files of the folder itself.

    Raises:
        CorruptFileError: the index is none, or names a file elsewhere.
    """
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CorruptFileError(f"{doing}: it has no 'weight_map' of tensors and files; copy it again")
    elsewhere = next((file for file in files.values() if Path(file).name != file or file in ("", ".", "..")), None)
    if elsewhere is not None:
        raise CorruptFileError(f"{doing}: it names '{elsewhere[:200]}', expected a file of the folder itself")
    return files
