"""`kvtools verify`: is a checkpoint sound?"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from kvtools.chain_check import verify_chain
from kvtools.chain_place import is_chain
from kvtools.checksum_file import check_local, write_checksums
from kvtools.cli.account import print_of_tables
from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns, shown, size
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    AsJson,
    DryRun,
    EngineName,
    Force,
    Memory,
    Source,
    SourcePath,
    Tables,
    Workers,
    engine_named,
)
from kvtools.cli.progress import progress_bar
from kvtools.cli.terminal import prose, styled
from kvtools.errors import CheckFailedError, UsageError
from kvtools.verify import Verification, verify


def run(
    path: SourcePath,
    *,
    table: Tables = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
    write: Annotated[
        bool,
        typer.Option(
            "--write-checksums", help="If there is no error, write the files' checksums beside them, for the next time."
        ),
    ] = False,
    force: Force = False,
    dry_run: DryRun = False,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    engine: EngineName = "local",
    as_json: AsJson = False,
) -> None:
    """Check that a checkpoint is sound: reads all of it once, and lists what is wrong.

    Every checksum; keys that stand twice or in the wrong part; NaN and infinity; slots whose keys are not
    the table's; bytes that two tensors claim. Of a chain's folder, the order of its members too (gaps, members
    twice, of other chains or other runs), and each member of the newest chain. Exits with 3 if there is an error.

    --write-checksums is for formats that have none: where the file that it writes is, verify compares the files
    with it, and names those that changed, are missing, or came.

    \b
    Examples:
      kvtools verify model.ckpt-100
      kvtools verify model.ckpt-100 --table user_emb --json
      kvtools verify train
      kvtools verify sok_dump --write-checksums
      kvtools verify model.ckpt-100 --strict && gsutil -m cp model.ckpt-100* gs://models/
    """
    options = source.options(memory)
    chained = is_chain(path)
    if write:
        _check_writable(path, table, chained)
    elif force or dry_run:
        raise UsageError(f"verifying '{path}': got --force or --dry-run, which are for --write-checksums")
    how: dict[str, Any] = {"tables": table or [], "workers": workers, "engine": engine_named(engine)}
    if not chained:
        how["compare_files"] = not (write and force)
    with progress_bar("verifying") as progress:
        result = (verify_chain if chained else verify)(path, options, progress=progress, **how)
    errors, warnings = result.count("error"), result.count("warning")
    failed = errors + (warnings if strict else 0)
    written: dict[str, Any] = {}
    if write and not failed:
        with progress_bar("checksums of") as progress:
            made = write_checksums(result.path, force=force, dry_run=dry_run, progress=progress)
        written = {"written_checksums": {"path": str(made.path), "files": len(made.files), "bytes": made.bytes}}
        written |= {"dry_run": True} if dry_run else {}
    if as_json:
        record = dataclasses.asdict(result) | written
        print(dumps({**record, "errors": errors, "warnings": warnings, "ok": not failed}))
    else:
        _print(result)
        if written:
            done = "would write" if dry_run else "wrote"
            print(f"{done} {made.path}: checksums of {_counted(len(made.files), 'file')}, {size(made.bytes)}")
    if failed:
        what = f"{_counted(errors, 'error')}" + (f" and {_counted(warnings, 'warning')}" if strict else "")
        raise CheckFailedError(f"verifying '{result.path}': found {what}, expected none; see the findings")


def _check_writable(path: str, tables: list[str] | None, chained: bool) -> None:
    check_local(path)
    if tables:
        raise UsageError(f"verifying '{path}': got --write-checksums and --table {tables[0]}, expected the whole of it")
    if chained:
        raise UsageError(f"verifying '{path}': got --write-checksums and a chain; name its members, one at a time")


def _print(result: Verification) -> None:
    print(f"{result.path} ({result.dialect or 'cannot be opened'})")
    if result.tables:
        print()
        print(
            columns(
                ["table", "dialect", "rows", "parts", "bytes", "checks"],
                [
                    [shown(t.name), t.dialect, f"{t.rows:,}", str(t.parts), size(t.bytes), str(t.checks)]
                    for t in result.tables
                ],
                right=frozenset({2, 3, 4, 5}),
            )
        )
    if result.findings:
        print()
    for finding in result.findings:
        where = f" {shown(finding.table)}:" if finding.table else ""
        line = prose(f"{finding.severity}:{where} {shown(finding.message)} [{finding.check}]")
        head = f"{finding.severity}:"
        print(styled(head, "red" if finding.severity == "error" else "yellow") + line.removeprefix(head))
    print()
    _print_checked_by(result)
    counts = ", ".join(
        [
            *_sizes(result),
            _counted(result.variables, "dense variable"),
            _counted(result.checks, "check"),
            _counted(result.count("error"), "error"),
            _counted(result.count("warning"), "warning"),
        ]
    )
    print(prose(counts))


def _print_checked_by(result: Verification) -> None:
    """Say what bytes were compared with: checksums in the files, checksums beside them, or nothing."""
    inside = [(f"bytes with {table.checksums}, in its files", table.name) for table in result.tables if table.checksums]
    print_of_tables("compared", inside, len(result.tables))
    for one in result.checked_files:
        files = f"{_counted(one.files, 'file')}, {size(one.bytes)}"
        print(prose(f"compared: {files}, with the checksums of {one.written} in {one.path}"))
    if not result.checked_files:
        none = [(_NOTHING.format(table.dialect), table.name) for table in result.tables if not table.checksums]
        print_of_tables("not compared", none, len(result.tables))


_NOTHING = "bytes with any checksum: {} has none; see --write-checksums"


def _sizes(result: Verification) -> list[str]:
    """Return how many tables and rows were read; of a chain a table, and a row that changed, are in several members."""
    rows = _counted(sum(table.rows for table in result.tables), "row")
    members = {table.member for table in result.tables if table.member is not None}
    if not members:
        return [_counted(len(result.tables), "table"), rows]
    tables = {table.name.removeprefix(f"{table.member}: ") for table in result.tables}
    return [f"{_counted(len(members), 'member')} of {_counted(len(tables), 'table')}", f"{rows} in all members"]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)
