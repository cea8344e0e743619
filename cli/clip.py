"""`kvtools clip`: leave out rows that are not worth their memory."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import typer

from kvtools.cli.account import print_account
from kvtools.cli.layout import columns, shown, size
from kvtools.cli.options import (
    AsJson,
    Output,
    Source,
    SourcePath,
    Tables,
    To,
    bytes_of,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.clip import Age, Choice, Clip, Criteria, Top, choose_all, write_chosen
from kvtools.dialects.schema import VersionUnit
from kvtools.errors import UsageError
from kvtools.key_list import read_key_list
from kvtools.migrate import check_output, output_of

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_By = Literal["freq", "l2", "abs", "version"]


def run(
    path: SourcePath,
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT", help="What to write: a prefix, file, folder or URL.", callback=no_standard_output
        ),
    ] = None,
    *,
    max_abs: Annotated[
        float | None,
        typer.Option("--max-abs", metavar="X", help="Cut rows whose values are all below X in size."),
    ] = None,
    l2: Annotated[
        float | None, typer.Option("--l2", metavar="X", help="Cut rows whose Euclidean norm is below X.")
    ] = None,
    min_freq: Annotated[
        int | None, typer.Option("--min-freq", metavar="N", help="Cut rows seen fewer than N times.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Cut rows last written so long ago: 30d, 12h, or N steps."),
    ] = None,
    now: Annotated[
        str | None,
        typer.Option("--now", metavar="WHEN", help="Count the age from here: 2024-05-31, Unix seconds, or a step."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", help="Of what is left keep the K rows highest by --by.")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="freq|l2|abs|version", help="What --top-k compares.")
    ] = None,
    keys_file: Annotated[
        str | None,
        typer.Option("--keys-file", metavar="FILE", help="Keep only these keys: a key per line, or .npy; - is stdin."),
    ] = None,
    drop_keys_file: Annotated[
        str | None, typer.Option("--drop-keys-file", metavar="FILE", help="Cut these keys.")
    ] = None,
    version_unit: Annotated[
        str | None,
        typer.Option("--version-unit", metavar="seconds|days|steps", help="What versions count."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be cut; OUT may be left out.")
    ] = False,
    to: To = None,
    table: Tables = None,
    output: Output,
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Leave out rows that are not worth their memory; slots, frequencies and versions stay with the others.

    A row is kept if it passes all that is asked. A row at a threshold is kept, and so is one with a NaN
    or an infinity, whatever its norm. Other tables and the dense variables are carried along. OUT
    appears whole or not at all; it may be PATH itself with --force.

    \b
    Examples:
      kvtools clip model.ckpt-100 --max-abs 1e-6 --dry-run
      kvtools clip model.ckpt-100 clipped/model.ckpt-100 --max-abs 1e-6 --min-freq 2
      kvtools clip model.ckpt-100 out/model.ckpt-100 --older-than 30d --table user_emb
      kvtools clip model.ckpt-100 small.ckpt-100 --top-k 1000000 --by freq
      cut -f1 banned.tsv | kvtools clip model.ckpt-100 model.ckpt-100 --drop-keys-file - --force
    """
    criteria = Criteria(
        norms=_norms(max_abs, l2),
        min_freq=min_freq,
        age=_age(older_than, now),
        top=_top(top_k, by),
        version_unit=_version_unit(version_unit),
    )
    if out is None and not dry_run:
        raise UsageError(f"clipping '{path}': nothing says where to write; name OUT, or add --dry-run")
    if keys_file == drop_keys_file == "-":
        raise UsageError(f"clipping '{path}': got --keys-file - and --drop-keys-file -, expected one of them")
    if criteria.empty and keys_file is None and drop_keys_file is None:
        raise UsageError(f"clipping '{path}': nothing says what to cut; see `kvtools clip --help`")
    checkpoint = source.open(path, output.memory)
    criteria = Criteria(
        criteria.norms,
        criteria.min_freq,
        criteria.age,
        None if keys_file is None else read_key_list(keys_file),
        None if drop_keys_file is None else read_key_list(drop_keys_file),
        criteria.top,
        criteria.version_unit,
    )
    options = output.options()
    if out is not None and not dry_run:
        target = to or checkpoint.dialect
        check_output(output_of(out, target, [checkpoint]), target, force=output.force)
    with progress_bar("choosing rows of") as progress:
        choices = choose_all(
            checkpoint,
            criteria,
            tables=table or (),
            memory=bytes_of(output.memory),
            workers=output.workers,
            progress=progress,
        )
    if not as_json:
        _print_choices(choices)
    described = [_describe(choice) for choice in choices]
    if dry_run or out is None:
        if as_json:
            print(json.dumps({"path": str(checkpoint.path), "dry_run": True, "clipped": described}))
        else:
            print("nothing was written")
        return
    with progress_bar("writing") as progress:
        account = write_chosen(
            checkpoint, choices, out, to=to, options=options, workers=output.workers, progress=progress
        )
    if not as_json:
        print()
    print_account(account, as_json=as_json, whole=False, clipped=described)


def _norms(max_abs: float | None, l2: float | None) -> tuple[Clip, ...]:
    norms = [] if max_abs is None else [Clip("abs", max_abs)]
    return tuple(norms if l2 is None else [*norms, Clip("l2", l2)])


def _age(older_than: str | None, now: str | None) -> Age | None:
    if older_than is None:
        if now is not None:
            raise UsageError("clipping: got --now without --older-than, expected both or neither")
        return None
    found = re.fullmatch(r"(\d{1,18})([smhdw]?)", older_than)
    if not found:
        raise UsageError(
            f"clipping by age: got --older-than {older_than!r}, expected a time such as 30d, 12h or 90m,"
            " or a number of steps"
        )
    timed = bool(found[2])
    return Age(int(found[1]) * _UNITS.get(found[2], 1), timed, None if now is None else _moment(now, timed))


def _moment(now: str, timed: bool) -> int:
    if re.fullmatch(r"\d{1,18}", now):
        return int(now)
    try:
        if not timed:
            raise ValueError
        moment = datetime.datetime.fromisoformat(now)
    except ValueError:
        expected = "a date such as 2024-05-31, or Unix seconds" if timed else "a step"
        raise UsageError(f"clipping by age: got --now {now!r}, expected {expected}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return int(moment.timestamp())


def _top(rows: int | None, by: str | None) -> Top | None:
    if rows is None and by is None:
        return None
    if rows is None or by is None:
        raise UsageError("clipping: --top-k K and --by freq|l2|abs|version go together")
    if by not in get_args(_By):
        raise UsageError(f"clipping: got --by {by!r}, expected freq, l2, abs or version")
    return Top(rows, by)  # type: ignore[arg-type]


def _version_unit(name: str | None) -> VersionUnit | None:
    if name is not None and name not in ("seconds", "days", "steps"):
        raise UsageError(f"clipping: got --version-unit {name!r}, expected seconds, days or steps")
    return name  # type: ignore[return-value]


def _print_choices(choices: Sequence[Choice]) -> None:
    print(
        columns(
            ["table", "rows", "cut", "kept", "bytes kept", "bytes saved"],
            [
                [
                    shown(choice.table),
                    f"{choice.rows:,}",
                    f"{choice.cut:,}",
                    f"{choice.kept:,}",
                    size(choice.bytes),
                    size(choice.bytes_saved),
                ]
                for choice in choices
            ],
            right=frozenset({1, 2, 3, 4, 5}),
        )
    )
    for choice in choices:
        name = shown(choice.table)
        failed = [f"{count:,} fail {criterion}" for criterion, count in choice.failed.items() if count]
        if len(failed) > 1:
            print(f"cut: {name}: {', '.join(failed)}; a row may fail several")
        elif failed:
            print(f"cut: {name}: {failed[0]}")
        if choice.non_finite:
            print(f"kept: {name}: {choice.non_finite:,} rows with NaN or infinity, whatever their norm")
        if choice.undated:
            print(f"kept: {name}: {choice.undated:,} rows with version 0, which is no time")


def _describe(choice: Choice) -> dict[str, Any]:
    return {
        "table": choice.table,
        "rows": choice.rows,
        "kept": choice.kept,
        "cut": choice.cut,
        "bytes": choice.bytes,
        "bytes_saved": choice.bytes_saved,
        "failed": dict(choice.failed),
        "non_finite": choice.non_finite,
        "undated": choice.undated,
    }
