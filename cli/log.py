"""`kvtools log`: who came and went in a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvtools.chain_fold import newest_of
from kvtools.chain_log import KeyEvent, MemberLog, life_of, log_chain
from kvtools.chain_place import chain_at
from kvtools.cli.json_text import dumps
from kvtools.cli.key_arguments import spread_option
from kvtools.cli.layout import columns, shown, told_time
from kvtools.cli.options import DEFAULT_MEMORY, AsJson, Memory, Source, Tables, Until, bytes_of
from kvtools.cli.progress import progress_bar
from kvtools.cli.terminal import prose
from kvtools.errors import CheckFailedError, UsageError
from kvtools.json_numbers import json_ready

_VALUES_SHOWN = 6


def run(
    path: Annotated[str, typer.Argument(metavar="CHAIN", help="The folder of a chain; of several in it, FOLDER/NAME.")],
    *,
    key: Annotated[
        int | None, typer.Option("--key", metavar="K", help="Follow this key from member to member.")
    ] = None,
    few: Annotated[
        int, typer.Option("--keys", metavar="N", help="Name the first N keys of each kind, per member and table.")
    ] = 0,
    table: Tables = None,
    until: Until = None,
    memory: Memory = DEFAULT_MEMORY,
    as_json: AsJson = False,
) -> None:
    """List who came and went in a chain: per member and table the rows born, changed and removed.

    It is told from the keys of the newest whole chain, whatever the records say; a key that went and came again
    counts each time. With --key, what became of one key, and its row each time. Exits with 3 if no member has it.

    \b
    Examples:
      kvtools log train
      kvtools log train --table user_emb --keys 10
      kvtools log train --key 17 --json
    """
    if few < 0:
        raise UsageError(f"reading a chain: got --keys {few}, expected 0 or more")
    members = newest_of(chain_at(path), until)
    options = Source().options(memory)
    with progress_bar("reading keys of") as progress:
        if key is not None:
            events = life_of(members, key, tables=table or [], options=options, progress=progress)
        else:
            logs = log_chain(
                members, tables=table or [], few=few, options=options, memory=bytes_of(memory), progress=progress
            )
    if key is None:
        if as_json:
            print(dumps({"path": path, "members": [dataclasses.asdict(log) for log in logs]}))
        else:
            _print_log(logs)
        return
    if as_json:
        print(dumps(json_ready({"path": path, "key": key, "events": [_described(event) for event in events]})))
    elif events:
        _print_life(events)
    if not events:
        raise CheckFailedError(f"following key {key} in '{path}': no member has it, expected one")


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """Let `--key` take a negative number."""
    return spread_option(arguments, "--key")


def _print_log(logs: Sequence[MemberLog]) -> None:
    lines = []
    for log in logs:
        first = [
            shown(log.member),
            "-" if log.step is None else f"{log.step:,}",
            "-" if log.time is None else told_time(log.time),
        ]
        for one in log.tables:
            changes = [f"{one.born:,}", f"{one.changed:,}", f"{one.removed:,}"] if log.kind == "delta" else ["-"] * 3
            lines.append([*first, shown(one.table), f"{one.rows:,}", *changes])
            first = ["", "", ""]
    header = ["member", "step", "time", "table", "rows", "born", "changed", "removed"]
    print(columns(header, lines, right=frozenset({1, 4, 5, 6, 7}), spare=(1, 2)))
    for log in logs:
        for one in log.tables:
            for kind, keys, count in (
                ("born", one.born_keys, one.born),
                ("changed", one.changed_keys, one.changed),
                ("removed", one.removed_keys, one.removed),
            ):
                if keys:
                    more = ", ..." if count > len(keys) else ""
                    keys_told = ", ".join(map(str, keys)) + more
                    print(prose(f"{shown(log.member)}: {shown(one.table)}: {kind} {keys_told}"))
    for log in logs:
        for one in log.tables:
            if one.recorded_born not in (None, one.born):
                line = (
                    f"note: {shown(log.member)}: {shown(one.table)}: by its record {one.recorded_born:,} rows were"
                    " born: a key that went and came again since the member before counts as born there, and as"
                    " changed here"
                )
                print(prose(line))


def _described(event: KeyEvent) -> dict[str, Any]:
    record = dataclasses.asdict(event)
    return {"norm" if name == "l2" else name: value for name, value in record.items()}


def _print_life(events: Sequence[KeyEvent]) -> None:
    lines = [
        [
            shown(event.table),
            shown(event.member),
            event.what,
            "-" if event.freq is None else str(event.freq),
            "-" if event.version is None else str(event.version),
            "-" if event.l2 is None else f"{event.l2:.6g}",
            " ".join(f"{number:.6g}" for number in event.value[:_VALUES_SHOWN])
            + (" ..." if len(event.value) > _VALUES_SHOWN else ""),
        ]
        for event in events
    ]
    header = ["table", "member", "what", "freq", "version", "norm", "value"]
    print(columns(header, lines, right=frozenset({3, 4, 5})))
