"""`kvtools export`: a trained model, or tables, as a SavedModel of stock TensorFlow operations, or as a snapshot."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtools.check_model import SignatureCheck
from kvtools.cli.account import print_of_tables
from kvtools.cli.clip_options import (
    Clipping,
    describe,
    describe_budget,
    print_budget,
    print_choices,
    print_cut,
    share_missed,
    warn_unmatched,
)
from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns, shown, size
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    AsJson,
    DryRun,
    Force,
    Memory,
    Source,
    SourcePath,
    Tables,
    bytes_of,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.cli.rounding import print_roundings
from kvtools.cli.terminal import prose
from kvtools.cli.versions import Keep, NextVersion, OldVersions, version_output
from kvtools.clip import Choice
from kvtools.clip_policy import BudgetOrder, budget_order
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.snapshot import NAME as SNAPSHOT
from kvtools.errors import UsageError
from kvtools.export import MODEL_FILE, TableExport, choose_for_saved_model, export_saved_model
from kvtools.export_model import choose_for_model, export_model, has_custom_operations
from kvtools.export_snapshot import choose_for_snapshot, export_snapshot, missing_is_zeros
from kvtools.export_split import choose_for_split, export_split
from kvtools.export_warmup import Warmup
from kvtools.indexed_rows import check_index
from kvtools.meta_file import named_tensors, trained_graph
from kvtools.migrate import check_output
from kvtools.narrow_rows import check_fits, cosine_warning, dtype_notes
from kvtools.replace_output import check_replaceable
from kvtools.shown_tables import counted
from kvtools.split_manifest import MANIFEST
from kvtools.stock_model.training_graph import Wanted

_WHOLE = re.compile(r"-?\d+", re.ASCII)
"""A number of requests; whatever else is the name of a file."""


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
    split: Annotated[
        Path | None,
        typer.Option(
            "--split",
            metavar="OUT",
            help="The folder to write a trained model to in two halves: one that is given rows, and a snapshot.",
            callback=no_standard_output,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="T",
            help="Rows as float32, float16, bfloat16, int8 or int4; integers stay as they are.",
        ),
    ] = None,
    clip_abs: Annotated[
        float | None,
        typer.Option("--clip-abs", metavar="X", help="Leave out rows whose values are all below X in size."),
    ] = None,
    clip_l2: Annotated[
        float | None,
        typer.Option("--clip-l2", metavar="X", help="Leave out rows whose Euclidean norm is below X."),
    ] = None,
    keep_keys: Annotated[
        str | None,
        typer.Option("--keep-keys", metavar="FILE", help="Keep only these keys: a key per line, or .npy; - is stdin."),
    ] = None,
    drop_keys: Annotated[str | None, typer.Option("--drop-keys", metavar="FILE", help="Leave out these keys.")] = None,
    keep_zeros: Annotated[
        bool, typer.Option("--keep-zeros", help="Keep rows of zeros, which are what a missing key gives.")
    ] = False,
    check: Annotated[
        int,
        typer.Option(
            "--check", metavar="N", min=0, help="Ask a trained model and its export N random requests, and compare."
        ),
    ] = 0,
    meta: Annotated[
        Path | None,
        typer.Option(
            "--meta", metavar="FILE", help="The graph of a TensorFlow 1 checkpoint; default: the .meta beside it."
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="NAME=TENSOR", help="A tensor of the .meta that requests give; may be repeated."
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--output", metavar="NAME=TENSOR", help="A tensor of the .meta to answer with; may be repeated."),
    ] = None,
    signature: Annotated[
        str | None, typer.Option("--signature", metavar="NAME", help="The signature of the .meta to serve.")
    ] = None,
    feed: Annotated[
        list[str] | None,
        typer.Option("--feed", metavar="TENSOR=VALUE", help="What else the .meta is fed, such as training=false."),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Lookups of the .meta that insert missing keys give zeros for them.")
    ] = False,
    warmup: Annotated[
        str | None,
        typer.Option(
            "--warmup",
            metavar="N|FILE",
            help="Requests that servers warm a SavedModel up by: N random ones of each signature, or those of a file.",
        ),
    ] = None,
    index: Annotated[
        str,
        typer.Option(
            "--index",
            metavar="KIND",
            help="How a SavedModel finds rows: hash (default), a table made when it is loaded, or perfect, arithmetic.",
        ),
    ] = "",
    next_one: NextVersion = False,
    keep: Keep = None,
    clipping: Clipping,
    table: Tables = None,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write a trained model, or tables, as a SavedModel of stock TensorFlow operations, or tables as a snapshot.

    A SavedModel with operations of its tables becomes one without them, signatures, dense variables and assets as they
    were. Of a checkpoint, and of the tables that --table names, each table gets a signature: it takes ids (int64, any
    shape) and gives embeddings; missing ids give zeros. TensorFlow Serving and tf.saved_model.load open a SavedModel
    without this package. --split writes the model without its tables, and a snapshot of these beside it, for kvtools
    serve, here or elsewhere. A snapshot is one file that kvtools serve maps and answers from at once. int8 and int4
    rows have an offset and a scale each, and what they lose is told. A row is kept if it passes all that is asked; rows
    of zeros are left out, as a missing id gives the same. OUT appears whole or not at all. With --keep, older versions
    of it go after that.

    \b
    Examples:
      kvtools export --savedmodel exported model.ckpt-100
      kvtools export --savedmodel exported model.ckpt-100 --clip-abs 1e-6 --table user_emb
      kvtools export --savedmodel models/7 trained_model --clip-l2 0.01
      kvtools export --savedmodel models/7 model.ckpt-100 --input ids=ids:0 --output click=Sigmoid:0
      kvtools export --savedmodel models/7 model.ckpt-100 --budget 2GiB --dry-run
      kvtools export --savedmodel models/7 model.ckpt-100 --policy thresholds.toml
      kvtools export --savedmodel models/ctr trained_model --next-version --keep 3 --check 100 --warmup 10
      kvtools export --savedmodel models/8 trained_model --dtype int8 --check 100
      kvtools export --snapshot model.kvsnap model.ckpt-100 --clip-l2 0.01 --dtype bfloat16
      kvtools export --split models/7 trained_model --dtype float16 --check 100
      kvtools export --snapshot models/ctr/7.kvsnap model.ckpt-100 --keep 3
    """
    if dry_run and (savedmodel, snapshot, split, keep, next_one) == (None, None, None, None, False):
        savedmodel = Path()
    _check_options(savedmodel, snapshot, split, table, warmup, index)
    of_index: dict[str, Any] = {"index": index} if index else {}
    named = next((output for output in (savedmodel, snapshot) if output is not None), split)
    assert named is not None
    old = OldVersions(version_output(named, snapshot=snapshot is not None, next_one=next_one, keep=keep), keep)
    warm = None if warmup is None else Warmup(int(warmup) if _WHOLE.fullmatch(warmup) else Path(warmup))
    policy = clipping.policy_of(str(path), clip_abs, clip_l2, keep_keys, drop_keys, ("--keep-keys", "--drop-keys"))
    checkpoint = source.open_for(table or [], path, memory)
    warn_unmatched(policy, [*checkpoint.tables], clipping.policy)
    dtypes = policy.dtypes([*checkpoint.tables])
    if dtype is not None and dtypes:
        raise UsageError(f"exporting: got --dtype {dtype}, and a dtype in '{clipping.policy}'; expected one of them")
    if dry_run and named != Path():
        if snapshot is not None:
            check_output(old.output, SNAPSHOT, force=force)
        else:
            check_replaceable(old.output, mark=MODEL_FILE if split is None else MANIFEST, force=force)
    what: dict[str, Any] = {
        "tables": table or (),
        "policy": policy,
        "keep_zeros": keep_zeros,
        "dtype": dtype or dtypes or None,
        "memory": bytes_of(memory),
    }
    tensors_of = {"input": inputs, "output": outputs, "feed": feed}
    given = {option: named_tensors(f"--{option}", tensors or ()) for option, tensors in tensors_of.items()}
    wanted = Wanted(signature or "", given["input"], given["output"], given["feed"], read_only)
    if meta is not None or wanted != Wanted():
        if snapshot is not None or table:
            raise UsageError(
                "exporting: --meta, --input, --output, --signature, --feed and --read-only are for a whole model:"
                " say --savedmodel OUT or --split OUT, without --table"
            )
        what["graph"] = trained_graph(checkpoint, wanted, meta)
    if "graph" in what or (snapshot is None and not table and has_custom_operations(Path(checkpoint.path))):
        del what["tables"]
        how = {"split": split is not None, "force": force, "dry_run": dry_run, "as_json": as_json}
        _export_model(checkpoint, old, what, of_index, warm, check, **how)
        return
    if split is not None:
        raise UsageError(
            f"exporting: got --split, and '{path}' is no trained SavedModel with lookups in key-value tables; tables"
            " alone go with --snapshot"
        )
    if check:
        raise UsageError(
            f"exporting: got --check {check}, which compares a trained SavedModel with its export; '{path}' is none"
            if not table
            else f"exporting: got --check {check} and --table: tables alone answer nothing that the model does"
        )
    how = {"snapshot": snapshot is not None, "force": force, "dry_run": dry_run, "as_json": as_json}
    _export_tables(checkpoint, old, what, of_index, warm, **how)


def _check_options(
    savedmodel: Path | None,
    snapshot: Path | None,
    split: Path | None,
    table: Sequence[str] | None,
    warmup: str | None,
    index: str,
) -> None:
    """Raise `UsageError` for options that contradict each other, before anything is opened."""
    if sum(output is not None for output in (savedmodel, snapshot, split)) != 1:
        raise UsageError("exporting: say --savedmodel OUT or --snapshot OUT or --split OUT, one of them")
    if split is not None and table:
        raise UsageError(f"exporting: got --split and --table {table[0]}, expected the whole model, or --snapshot")
    if warmup is not None and savedmodel is None:
        why = "a snapshot needs none" if split is None else "a model in two halves takes none"
        raise UsageError(f"exporting: got --warmup {warmup}, which is for --savedmodel; {why}")
    if index:
        if savedmodel is None:
            raise UsageError(f"exporting: got --index {index}, which is for --savedmodel: a snapshot is its own index")
        check_index(index)


def _export_tables(
    checkpoint: Checkpoint,
    old: OldVersions,
    what: dict[str, Any],
    of_index: Mapping[str, Any],
    warm: Warmup | None,
    *,
    snapshot: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    if dry_run:
        choose = choose_for_snapshot if snapshot else choose_for_saved_model
        _choose_only(checkpoint, choose, what, old, as_json)
        return
    if warm is not None:
        what["warmup"] = warm
    export = export_snapshot if snapshot else export_saved_model
    with progress_bar("exporting") as progress:
        exports = export(checkpoint, old.output, force=force, progress=progress, **what, **of_index)
    old.remove()
    _warn(exports)
    _warn_of_cuts(checkpoint, {each.name: (each.rows, each.cut) for each in exports}, snapshot=snapshot)
    order = _order(checkpoint, what, [export.name for export in exports])
    variables = [] if what["tables"] else _variables_left_out(checkpoint)
    if as_json:
        kind = "snapshot" if snapshot else "savedmodel"
        record = {"path": str(checkpoint.path), kind: str(old.output), **describe_budget(order), **old.described()}
        of_tables = [dataclasses.asdict(export) for export in exports]
        print(dumps({**record, "tables": of_tables, "left_out": variables, **_described(warm)}))
    else:
        _print_exports(old, exports, variables, order, warm)


def _export_model(
    checkpoint: Checkpoint,
    old: OldVersions,
    what: dict[str, Any],
    of_index: Mapping[str, Any],
    warm: Warmup | None,
    check: int,
    *,
    split: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    if dry_run:
        _choose_only(checkpoint, choose_for_split if split else choose_for_model, what, old, as_json)
        return
    with progress_bar("exporting") as progress:
        of_output: dict[str, Any] = {"force": force, "progress": progress, "check": check}
        if split:
            model = export_split(checkpoint, old.output, **of_output, **what)
        else:
            model = export_model(checkpoint, old.output, warmup=warm, **of_output, **what, **of_index)
    old.remove()
    _warn(model.tables)
    _warn_of_cuts(checkpoint, {export.name: (export.rows, export.cut) for export in model.tables}, snapshot=False)
    order = _order(checkpoint, what, [export.name for export in model.tables])
    for warning in model.warnings:
        print(f"kvtools: warning: {warning}", file=sys.stderr)
    if as_json:
        of_tables = [dataclasses.asdict(export) for export in model.tables]
        record = {
            "path": str(checkpoint.path),
            "split" if split else "savedmodel": str(old.output),
            "whole_model": True,
        }
        record |= describe_budget(order) | old.described() | _described(warm)
        checks = [dataclasses.asdict(one) for one in model.checks]
        compared = {"checks": checks, "not_compared": model.not_compared}
        print(dumps({**record, "tables": of_tables, "left_out": model.left_out, **compared}))
    else:
        for one in model.checks:
            print(prose(f"checked: {one.signature}: {_told(one, model.tables, model.not_compared)}"))
        for name in model.not_compared:
            print(prose(f"not compared: table '{name}': no answer came from a row of it"))
        _print_exports(old, model.tables, model.left_out, order, warm)


def _described(warm: Warmup | None) -> dict[str, Any]:
    return {} if warm is None else {"warmup": {"requests": warm.requests, "notes": warm.notes}}


def _order(checkpoint: Checkpoint, what: Mapping[str, Any], tables: Sequence[str]) -> BudgetOrder | None:
    return budget_order(what["policy"], [checkpoint.tables[name].schema for name in tables])


def _told(check: SignatureCheck, tables: Sequence[TableExport], not_compared: Sequence[str]) -> str:
    if check.refused:
        return f"not at all, as the model took none of the requests: {check.refused}"
    asked = f"{check.requests:,} requests, {check.outputs} outputs each"
    share = f"{check.differing:,} of {check.values:,} values differ, by up to {check.largest:.3g}"
    of_none = f"none from a row of {', '.join(map(repr, not_compared))}" if not_compared else ""
    if check.reordered:
        told = (
            f"{asked}: the same to the bit as the graphs are written; as TensorFlow's optimizer reorders them, {share}"
        )
        return f"{told}; {of_none}" if of_none else told
    if check.differing:
        why = [
            *(["cut"] if any(table.cut for table in tables) else []),
            *(["rounded"] if any(table.rounding for table in tables) else []),
        ]
        return f"{asked}: {share}, as rows were {' and '.join(why)}"
    return f"{asked}: the same to the bit" + (f", and {of_none}" if of_none else "")


def _choose_only(
    checkpoint: Checkpoint,
    choose: Callable[..., list[Choice]],
    what: Mapping[str, Any],
    old: OldVersions,
    as_json: bool,
) -> None:
    with progress_bar("choosing rows of") as progress:
        choices = choose(checkpoint, progress=progress, **what)
        check_fits(checkpoint, choices, what.get("dtype"), progress=progress)
    rows = {choice.table: (choice.kept, choice.cut) for choice in choices}
    _warn_of_cuts(checkpoint, rows, snapshot=choose is choose_for_snapshot)
    order = _order(checkpoint, what, [*rows])
    notes = [dtype_notes(checkpoint.tables[choice.table].schema, what.get("dtype")) for choice in choices]
    if as_json:
        of_tables = [describe(choice) | {"notes": said} for choice, said in zip(choices, notes, strict=True)]
        record = {"path": str(checkpoint.path), "dry_run": True, **describe_budget(order)}
        if old.keep is not None:
            record["removed"] = [str(path) for path in old.planned()]
        print(dumps({**record, "tables": of_tables}))
    else:
        print_choices(choices)
        print_budget(order)
        told = [(line, choice.table) for choice, said in zip(choices, notes, strict=True) for line in said]
        print_of_tables("note", told, len(choices))
        for path in old.planned():
            print(f"would remove {path}")
        print("nothing was written")


def _warn(exports: Sequence[TableExport]) -> None:
    for export in exports:
        warning = cosine_warning(export.name, export.value_dtype, export.rounding)
        if warning:
            print(f"kvtools: warning: {warning}", file=sys.stderr)
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


def _warn_of_cuts(checkpoint: Checkpoint, rows: Mapping[str, tuple[int, int]], *, snapshot: bool) -> None:
    """Warn of tables of which nothing is left, and whose cut keys may answer otherwise; `rows`: (kept, cut) of each."""
    for name, (kept, cut) in rows.items():
        if cut and not kept:
            print(
                f"kvtools: warning: table '{name}': the thresholds leave none of its {cut} rows; `kvtools stats` says"
                " what each threshold would keep",
                file=sys.stderr,
            )
        if cut and snapshot and not missing_is_zeros(checkpoint.tables[name]):
            print(
                f"kvtools: warning: table '{name}': {cut} rows were cut, and its default row is not zeros: their keys"
                " answer with it where a missing key does (`kvtools serve --missing default`)",
                file=sys.stderr,
            )


def _variables_left_out(checkpoint: Checkpoint) -> list[str]:
    if not checkpoint.variables:
        return []
    size = sum(variable.bytes for variable in checkpoint.variables)
    return [f"{counted(len(checkpoint.variables), 'dense variable')}, {size} bytes: only tables are exported"]


def _print_exports(
    old: OldVersions,
    exports: list[TableExport],
    variables: Sequence[str],
    order: BudgetOrder | None,
    warm: Warmup | None,
) -> None:
    counted = any(export.lookups for export in exports)
    signed = any(export.signature for export in exports)
    print(
        columns(
            [
                "table",
                *(["signature"] if signed else []),
                "rows kept",
                "rows cut",
                "bytes",
                "bytes saved",
                *(["lookups missed"] if counted else []),
            ],
            [
                [
                    shown(export.name),
                    *([export.signature] if signed else []),
                    f"{export.rows:,}",
                    f"{export.cut:,}",
                    size(export.bytes),
                    size(export.bytes_saved),
                    *([share_missed(export.lookups, export.lookups_missed)] if counted else []),
                ]
                for export in exports
            ],
            right=frozenset(range(1 + signed, 7)),
        )
    )
    for export in exports:
        print_cut(export.name, export.failed)
    print_budget(order)
    if any(export.rounding for export in exports):
        print()
    print_roundings([(export.name, export.value_dtype, export.rounding) for export in exports if export.rounding])
    for line in variables:
        print(prose(f"left out: {line}"))
    print_of_tables("left out", [(line, export.name) for export in exports for line in export.left_out], len(exports))
    print_of_tables("note", [(line, export.name) for export in exports for line in export.notes], len(exports))
    if warm is not None:
        print(f"warm-up: {warm.requests:,} requests")
        for line in warm.notes:
            print(prose(f"note: {line}"))
    print(f"wrote {old.output}")
    old.print_removed()
