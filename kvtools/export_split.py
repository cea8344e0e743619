"""Write a trained SavedModel in two halves: a dense part of stock TensorFlow operations that is given rows, and a
snapshot of its tables, with a manifest that says which ids of which table feed which input (`split_manifest`).

TensorFlow is not needed.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.check_model import (
    Answer,
    answers_of,
    check_available,
    check_model,
    expect_answers,
    mark_reordered,
    not_compared,
    refusals,
    wrong_answers,
)
from kvtools.clip import Choice
from kvtools.clip_policy import Policy
from kvtools.dialects.bundle import BundleWriter
from kvtools.dialects.bundle_output import write_variable
from kvtools.dialects.chunk import KEYS
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.errors import BadInputError, CheckFailedError
from kvtools.export import signature_names
from kvtools.export_model import ModelExport, TrainedModel, copy_assets, copy_rest, unasked_tables
from kvtools.export_snapshot import choose_for_snapshot, export_snapshot
from kvtools.meta_file import TrainedGraph
from kvtools.model_digest import digests_of
from kvtools.model_requests import Request
from kvtools.narrow_rows import Dtypes
from kvtools.partition import owners
from kvtools.remote.paths import local_path, shown_path
from kvtools.replace_output import check_apart, check_replaceable, replace_folder
from kvtools.snapshot import Snapshot
from kvtools.split_manifest import DENSE, EXPORT, MANIFEST, SNAPSHOT, SplitModel, encoded
from kvtools.stock_model.cut_model import CutSignature

_REAL = "give real requests with --savedmodel and --warmup FILE"


def export_split(
    checkpoint: Checkpoint,
    output: str | Path,
    *,
    policy: Policy | None = None,
    keep_zeros: bool = False,
    dtype: Dtypes = None,
    force: bool = False,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
    check: int = 0,
    graph: TrainedGraph | None = None,
) -> ModelExport:
    """Write the SavedModel that `checkpoint` was opened from as a folder `output` of a dense part and a snapshot.

    Args:
        checkpoint: a SavedModel with operations of its tables, opened.
        output: the folder to write; it appears when it is whole, and what stood there stays if anything fails.
        policy: which rows to leave out: their keys are answered like those that were never there.
        keep_zeros: keep rows of zeros alone; they are left out otherwise, where the model cannot tell.
        dtype: what rows become in the snapshot; see `export_snapshot`.
        force: replace a model in two halves that is there.
        memory: how many bytes of rows to hold; more go through the disk.
        progress: called as rows are read and written.
        check: how many random requests to compare of each signature, before `output` appears.
        graph: of a checkpoint of TensorFlow 1, what is to be served of its graph.

    Raises:
        MissingDependencyError: there is a check to be made, and no TensorFlow.
        CheckFailedError: the halves answer otherwise than the model, or the model takes none of the requests.
        BadInputError: what is served has an operation that cannot be rewritten, or a lookup that cannot be cut out:
            in a condition or a loop, or of ids that are computed from rows.
        OutputError: `output` exists, or cannot be written.
        CorruptFileError: the model's data is damaged.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        export_split(open_checkpoint("trained_model"), Path("models/7"), dtype="bfloat16")
        ```
    """
    output = Path(local_path(output))
    check_apart(checkpoint.path, output)
    check_replaceable(output, mark=MANIFEST, force=force)
    if check:
        check_available()
    export = uuid.uuid4().hex
    model, tables = _cut(checkpoint, export, graph)[:2]  # what cannot be cut is told before hours of writing
    with replace_folder(output, mark=MANIFEST, force=force) as folder:
        exports = export_snapshot(
            checkpoint,
            folder / SNAPSHOT,
            tables=tables,
            policy=policy,
            keep_zeros=keep_zeros or model.tells_zeros,
            dtype=dtype,
            metadata={EXPORT: export},
            memory=memory,
            progress=progress,
        )
        dense = folder / DENSE
        (dense / "variables").mkdir(parents=True)
        if graph is None:
            copy_rest(model.folder, dense)
        else:
            copy_assets(graph.files, dense)
        with BundleWriter(dense / "variables" / "variables") as writer:
            for variable in model.variables:
                write_variable(writer, variable, checkpoint.read_variable(variable.name))
        stored = open_checkpoint(folder / SNAPSHOT)
        part_rows = {
            prefix: _part_rows(stored.tables[reader.schema.name], model.parts[prefix])
            for prefix, reader in model.readers.items()
        }
        _, _, saved_model, signatures = _cut(checkpoint, export, graph, part_rows)
        (dense / "saved_model.pb").write_bytes(saved_model)
        snapshot = Snapshot(folder / SNAPSHOT)
        policy = policy or Policy()
        described = [
            {
                "name": one.name,
                "key_dtype": one.key_dtype,
                "value_dtype": checkpoint.tables[one.name].schema.value_dtype,
                "stored_dtype": one.value_dtype,
                "dim": one.dim,
                "rows": one.rows,
                "cut": one.cut,
                "clip": policy.criteria(one.name).described(),
                "cut_by": {criterion: count for criterion, count in one.failed.items() if count},
            }
            for one in exports
        ]
        manifest = encoded(
            source=shown_path(checkpoint.path),
            source_dialect=checkpoint.dialect,
            budget=policy.budget,
            files=digests_of(dense),
            export=export,
            fingerprint=snapshot.fingerprint,
            tables=described,
            signatures={one.name: _described(one) for one in signatures},
        )
        (folder / MANIFEST).write_text(manifest, "utf-8")
        checks = []
        unasked: list[str] = []
        if check:
            found: set[str] = set()
            checks = check_model(checkpoint, stored, check, graph=graph, theirs=_answers(folder, found))
            expect_answers(checks, f"splitting '{model.folder}'", _REAL)
            unfound = [one.name for one in exports if one.rows and one.name not in found]
            unasked = unasked_tables(exports, checks, unfound)
        if not any(one.cut or one.rounding for one in exports):
            checks = mark_reordered(
                checks, lambda: check_model(checkpoint, stored, check, graph=graph, theirs=_answers(folder, set()))
            )
            if wrong := wrong_answers(checks):
                raise CheckFailedError(
                    f"splitting '{model.folder}': the halves answer otherwise than the model, so '{output}' was not"
                    f" written: {'; '.join(wrong)}"
                )
    exports = [dataclasses.replace(one, left_out=()) for one in exports]
    warnings = [*model.warnings(exports), *refusals(checks, _REAL), *not_compared(unasked, _REAL)]
    return ModelExport(exports, model.unused(), warnings, checks, unasked)


def choose_for_split(
    checkpoint: Checkpoint,
    *,
    policy: Policy | None = None,
    keep_zeros: bool = False,
    dtype: Dtypes = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
    graph: TrainedGraph | None = None,
) -> list[Choice]:
    """Decide which rows `export_split` would keep, and write nothing; arguments and errors are its own."""
    model, tables, _, _ = _cut(checkpoint, uuid.uuid4().hex, graph)
    return choose_for_snapshot(
        checkpoint,
        tables=tables,
        policy=policy,
        keep_zeros=keep_zeros or model.tells_zeros,
        dtype=dtype,
        memory=memory,
        progress=progress,
    )


def _cut(
    checkpoint: Checkpoint,
    export: str,
    graph: TrainedGraph | None,
    part_rows: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[TrainedModel, list[str], bytes, list[CutSignature]]:
    model = TrainedModel(checkpoint, graph)
    if not model.readers:
        raise BadInputError(
            f"splitting '{model.folder}': nothing that is served looks up in a table; export it with --savedmodel"
        )
    tables = [reader.schema.name for reader in model.readers.values()]
    saved_model, signatures = model.cut(signature_names(tables), f"kvtools_{export}", part_rows or {})
    return model, tables, saved_model, signatures


def _part_rows(table: TableReader, parts: int) -> tuple[int, ...]:
    """Return how many rows each part of a model's table has, of those that are kept."""
    if parts == 1:
        return (table.rows,)
    counts = np.zeros(parts, np.int64)
    for chunk in table.chunks(KEYS):
        counts += np.bincount(owners(chunk.keys, parts, "floor_mod"), minlength=parts)
    return tuple(counts.tolist())


def _described(cut: CutSignature) -> Mapping[str, Any]:
    """A signature as the manifest has it."""
    lookups = [{key: value or None for key, value in dataclasses.asdict(lookup).items()} for lookup in cut.lookups]
    said = {key: value for key, value in dataclasses.asdict(cut).items() if key not in ("name", "lookups")}
    return {**json.loads(json.dumps(said)), "ids_signature": cut.ids_signature or None, "lookups": lookups}


def _answers(folder: Path, of_tables: set[str]) -> Callable[[str], Answer]:
    """Return what answers a signature by both halves: ids, rows of the snapshot, and the dense part.

    `of_tables` is given the names of tables that keys were found in.
    """
    model = SplitModel.read(folder)
    snapshot = Snapshot(model.snapshot)
    dense = answers_of(model.dense)

    def signature(name: str) -> Answer:
        of = model.signature(name)
        rows_answer = dense(name)
        ids_answer = dense(of.ids_signature) if of.ids_signature and of.needs_ids else None

        def answer(request: Request) -> Mapping[str, Any]:
            ids = ids_answer({key: request[key] for key in of.ids_inputs}) if ids_answer else {}
            keys = of.keys(request, ids)
            rows = []
            for lookup, wanted in zip(of.lookups, keys, strict=True):
                values, found = snapshot.table(lookup.table.name).lookup(wanted.reshape(-1))
                if found.any():
                    of_tables.add(lookup.table.name)
                rows.append((values.reshape(*wanted.shape, lookup.table.dim), found.reshape(wanted.shape)))
            return rows_answer(of.dense_request(request, rows))

        return answer

    return signature
