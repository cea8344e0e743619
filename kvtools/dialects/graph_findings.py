"""What a check says of the graph of an exported model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtools.dialects.interface import Finding
from kvtools.model_digest import differing_files, has_digests


def graph_findings(folder: Path, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with the graph and the assets of a SavedModel in `folder`, by its manifest."""
    if not has_digests(manifest):
        yield Finding(
            "warning",
            "graph",
            "",
            f"'{folder / 'saved_model.pb'}', its graph, cannot be checked: it was exported before kvtools wrote"
            " digests; export the model again to have them",
        )
    for what in differing_files(folder, manifest):
        yield Finding("error", "graph", "", what)
