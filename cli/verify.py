"""`kvtools verify`: is a checkpoint sound?"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from kvtools.chain_check import verify_chain
from kvtools.chain_place import is_chain
from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns, shown, size
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    AsJson,
    EngineName,
    Memory,
    Source,
    SourcePath,
    Tables,
    Workers,
    engine_named,
)
from kvtools.cli.progress import progress_bar
from kvtools.cli.terminal import prose, styled
from kvtools.errors import CheckFailedError
from kvtools.verify import Verification, verify


def run(
    path: SourcePath,
    *,
    table: Tables = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
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

    \b
    Examples:
      kvtools verify model.ckpt-100
      kvtools verify model.ckpt-100 --table user_emb --json
      kvtools verify train
      kvtools verify model.ckpt-100 --strict && gsutil -m cp model.ckpt-100* gs://models/
    """
    options = source.options(memory)
    with progress_bar("verifying") as progress:
        result = (verify_chain if is_chain(path) else verify)(
            path, options, tables=table or [], workers=workers, engine=engine_named(engine), progress=progress
        )
    errors, warnings = result.count("error"), result.count("warning")
    failed = errors + (warnings if strict else 0)
    if as_json:
        record = dataclasses.asdict(result)
        print(dumps({**record, "errors": errors, "warnings": warnings, "ok": not failed}))
    else:
        _print(result)
    if failed:
        what = f"{_counted(errors, 'error')}" + (f" and {_counted(warnings, 'warning')}" if strict else "")
        raise CheckFailedError(f"verifying '{result.path}': found {what}, expected none; see the findings")


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
    counts = ", ".join(
        [
            *_sizes(result),
            _counted(result.variables, "dense variable"),
            _counted(result.checks, "check"),
            _counted(result.count("error"), "error"),
            _counted(result.count("warning"), "warning"),
        ]
    )
    print("\n" + prose(counts))


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
