"""`kvtools export`: tables as a SavedModel of stock TensorFlow operations, or as a snapshot."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvtools.cli.account import print_of_tables
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
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import UsageError
from kvtools.export import TableExport, export_saved_model
from kvtools.export_snapshot import export_snapshot


def run(
    path: SourcePath,
    *,
    savedmodel: Annotated[
        Path | None,
        typer.Option(
            "--savedmodel", metavar="OUT", help="The SavedModel folder to write.", callback=no_standard_output
        ),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--snapshot",
            metavar="OUT",
            help="The snapshot to write: a file, for `kvtools serve`.",
            callback=no_standard_output,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="T", help="Rows of a snapshot as float32, float16, bfloat16 or int8."),
    ] = None,
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
    """Write tables as a SavedModel of stock TensorFlow operations, one signature per table, or as a snapshot.

    TensorFlow Serving and tf.saved_model.load open a SavedModel without this package. A signature takes ids (int64, any
    shape) and gives embeddings; missing ids give zeros. A snapshot is one file that kvtools serve maps and answers from
    at once; int8 rows have a scale each. OUT appears whole or not at all.

    \b
    Examples:
      kvtools export --savedmodel exported model.ckpt-100
      kvtools export --savedmodel exported model.ckpt-100 --clip-abs 1e-6 --table user_emb
      kvtools export --savedmodel models/7 model.ckpt-100 --clip-l2 0.01 --json
      kvtools export --snapshot model.kvsnap model.ckpt-100 --clip-l2 0.01 --dtype bfloat16
    """
    clip = _clip(clip_abs, clip_l2)
    if (savedmodel is None) == (snapshot is None):
        raise UsageError("exporting: say --savedmodel OUT or --snapshot OUT, one of them")
    if dtype is not None and snapshot is None:
        raise UsageError(f"exporting: got --dtype {dtype}, which is for --snapshot; see `kvtools cast`")
    checkpoint = source.open_for(table or [], path, memory)
    output = snapshot if savedmodel is None else savedmodel
    assert output is not None
    if savedmodel is None:
        with progress_bar("exporting") as progress:
            exports = export_snapshot(
                checkpoint,
                output,
                tables=table or (),
                clip=clip,
                dtype=dtype,
                force=force,
                memory=bytes_of(memory),
                progress=progress,
            )
    else:
        exports = _export_saved_model(checkpoint, output, table or (), clip, force=force, memory=memory)
    _warn(exports)
    variables = [] if table else _variables_left_out(checkpoint)
    if as_json:
        kind = "snapshot" if savedmodel is None else "savedmodel"
        record = {"path": str(checkpoint.path), kind: str(output)}
        of_tables = [dataclasses.asdict(export) for export in exports]
        print(json.dumps({**record, "tables": of_tables, "left_out": variables}))
    else:
        _print_exports(output, exports, variables)


def _export_saved_model(
    checkpoint: Checkpoint, output: Path, tables: Sequence[str], clip: Clip | None, *, force: bool, memory: str
) -> list[TableExport]:
    with progress_bar("exporting") as progress:
        return export_saved_model(
            checkpoint,
            output,
            tables=tables,
            clip=clip,
            force=force,
            memory=bytes_of(memory),
            progress=progress,
        )


def _warn(exports: Sequence[TableExport]) -> None:
    for export in exports:
        if export.non_finite:
            print(
                f"kvtools: warning: table '{export.name}': {export.non_finite} rows with NaN or infinity were kept",
                file=sys.stderr,
            )
        if export.cut and not export.rows:
            print(
                f"kvtools: warning: table '{export.name}': the threshold leaves none of its {export.cut} rows;"
                " `kvtools stats` says what each threshold would keep",
                file=sys.stderr,
            )
        if export.duplicates:
            print(
                f"kvtools: warning: table '{export.name}': {export.duplicates} rows were left out because"
                " their key is there again later",
                file=sys.stderr,
            )


def _clip(clip_abs: float | None, clip_l2: float | None) -> Clip | None:
    if clip_abs is not None and clip_l2 is not None:
        raise UsageError("exporting: got --clip-abs and --clip-l2, expected one of them")
    if clip_abs is not None:
        return Clip("abs", clip_abs)
    return None if clip_l2 is None else Clip("l2", clip_l2)


def _variables_left_out(checkpoint: Checkpoint) -> list[str]:
    if not checkpoint.variables:
        return []
    size = sum(variable.bytes for variable in checkpoint.variables)
    return [f"{len(checkpoint.variables)} dense variables, {size} bytes: only tables are exported"]


def _print_exports(output: Path, exports: list[TableExport], variables: Sequence[str]) -> None:
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
    for line in variables:
        print(f"left out: {line}")
    print_of_tables("left out", [(line, export.name) for export in exports for line in export.left_out], len(exports))
    print(f"wrote {output}")
