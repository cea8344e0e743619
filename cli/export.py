"""`kvtools export`: tables as a SavedModel of stock TensorFlow operations."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtools.cli.layout import columns, shown, size
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    AsJson,
    Force,
    Memory,
    Source,
    SourcePath,
    Tables,
    bytes_of,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.clip import Clip
from kvtools.errors import UsageError
from kvtools.export import TableExport, export_saved_model


def run(
    path: SourcePath,
    *,
    savedmodel: Annotated[
        Path,
        typer.Option(
            "--savedmodel", metavar="OUT", help="The SavedModel folder to write.", callback=no_standard_output
        ),
    ],
    clip_abs: Annotated[
        float | None,
        typer.Option("--clip-abs", metavar="X", help="Leave out rows whose values are all below X in size."),
    ] = None,
    clip_l2: Annotated[
        float | None,
        typer.Option("--clip-l2", metavar="X", help="Leave out rows whose Euclidean norm is below X."),
    ] = None,
    table: Tables = None,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write tables as a SavedModel of stock TensorFlow operations, one signature per table.

    TensorFlow Serving and tf.saved_model.load open it without this package. A signature takes ids
    (int64, any shape) and gives embeddings; missing ids give zeros. OUT appears whole or not at all.

    \b
    Examples:
      kvtools export --savedmodel exported model.ckpt-100
      kvtools export --savedmodel exported model.ckpt-100 --clip-abs 1e-6 --table user_emb
      kvtools export --savedmodel models/7 model.ckpt-100 --clip-l2 0.01 --json
    """
    clip = _clip(clip_abs, clip_l2)
    checkpoint = source.open_for(table or [], path, memory)
    with progress_bar("exporting") as progress:
        exports = export_saved_model(
            checkpoint,
            savedmodel,
            tables=table or (),
            clip=clip,
            force=force,
            memory=bytes_of(memory),
            progress=progress,
        )
    for export in exports:
        if export.non_finite:
            print(
                f"kvtools: warning: table '{export.name}': {export.non_finite} rows with NaN or infinity were kept",
                file=sys.stderr,
            )
        if export.duplicates:
            print(
                f"kvtools: warning: table '{export.name}': {export.duplicates} rows were left out because"
                " their key is there again later",
                file=sys.stderr,
            )
    if as_json:
        record = {"path": str(checkpoint.path), "savedmodel": str(savedmodel)}
        print(json.dumps({**record, "tables": [dataclasses.asdict(export) for export in exports]}))
    else:
        _print_exports(savedmodel, exports)


def _clip(clip_abs: float | None, clip_l2: float | None) -> Clip | None:
    if clip_abs is not None and clip_l2 is not None:
        raise UsageError("exporting: got --clip-abs and --clip-l2, expected one of them")
    if clip_abs is not None:
        return Clip("abs", clip_abs)
    return None if clip_l2 is None else Clip("l2", clip_l2)


def _print_exports(savedmodel: Path, exports: list[TableExport]) -> None:
    print(
        columns(
            ["table", "signature", "rows kept", "rows cut", "bytes", "bytes saved"],
            [
                [
                    shown(export.name),
                    export.signature,
                    f"{export.rows:,}",
                    f"{export.cut:,}",
                    size(export.bytes),
                    size(export.bytes_saved),
                ]
                for export in exports
            ],
            right=frozenset({2, 3, 4, 5}),
        )
    )
    print(f"wrote {savedmodel}")
