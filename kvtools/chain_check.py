"""What is in a chain, and whether it is sound: its members by their records, and every byte of the newest whole one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtools import chain
from kvtools.chain_fold import newest_of
from kvtools.chain_place import ChainPlace, chain_at
from kvtools.chain_reader import bytes_of, is_increment, open_member, removed_keys
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.chunk import KEYS
from kvtools.dialects.interface import Checkpoint, Finding, TableReader
from kvtools.dialects.options import OpenOptions, Progress
from kvtools.engine import Engine
from kvtools.errors import BadInputError, KvtoolsError
from kvtools.verify import CheckedFiles, CheckedTable, Verification, check

_KEY_ROWS = 1 << 18
_FEW = 5


@dataclass(frozen=True)
class MemberReport:
    """A member as its record describes it: counts are sums over tables. `taken` is whether a restore takes it;
    `error` is why its record cannot be read."""

    member: str
    number: int
    kind: chain.Kind
    taken: bool
    rows: int
    removed: int
    born: int
    bytes: int
    step: int | None
    time: float | None
    error: str | None = None


@dataclass(frozen=True)
class ChainReport:
    """The members of a chain; `fault` is what keeps the newest one from being whole, and what to do."""

    path: str
    name: str
    id: str | None
    members: tuple[MemberReport, ...]
    fault: chain.ChainError | BadInputError | None

    @property
    def reason(self) -> str | None:
        """The fault in a word."""
        return None if self.fault is None else getattr(self.fault, "reason", "damaged")

    def to_dict(self) -> dict[str, Any]:
        """Return the report ready for JSON."""
        fault = None if self.fault is None else {"reason": self.reason, "message": str(self.fault)}
        members = [dataclasses.asdict(member) for member in self.members]
        return {"path": self.path, "name": self.name, "chain": self.id, "members": members, "fault": fault}


def report_chain(path: str | os.PathLike[str]) -> ChainReport:
    """Describe the members of a chain by their records; no data file is read.

    Raises:
        BadInputError: there is no chain at `path`; see `kvtools.chain_place.chain_at`.
    """
    place = chain_at(path)
    found = place.members
    fault: BadInputError | None = None
    taken: list[chain.Member] = []
    try:
        taken = newest_of(place)
    except BadInputError as error:
        fault = error
    reports, ids = [], []
    for member in found:
        try:
            record, error_text = chain.record_of(member), None
            size = bytes_of(member)
        except (KvtoolsError, OSError) as error:
            record, error_text, size = None, str(error), 0
        counts = [] if record is None else list(record.tables.values())
        ids += [] if record is None else [record.chain]
        reports.append(
            MemberReport(
                member.prefix.name,
                member.number,
                member.kind,
                member in taken,
                sum(count.rows for count in counts),
                sum(count.removed for count in counts),
                sum(count.born for count in counts),
                size,
                None if record is None else record.step,
                None if record is None else record.time,
                error_text,
            )
        )
    return ChainReport(str(path), place.name, ids[-1] if ids else None, tuple(reports), fault)


def verify_chain(
    path: str | os.PathLike[str],
    options: OpenOptions | None = None,
    *,
    tables: Sequence[str] = (),
    workers: int | None = None,
    engine: Engine = "local",
    progress: Progress | None = None,
) -> Verification:
    """Check a chain: the order of its members, that each is what its record says, and each as `kvtools.verify` does.

    Members before the newest full checkpoint, which no restore takes, are checked for their order alone. Arguments and
    errors are those of `kvtools.verify.verify`.
    """
    options = dataclasses.replace(options or OpenOptions(), lenient=True)
    place = chain_at(path)
    findings: list[Finding] = []
    checked: list[CheckedTable] = []
    compared: list[CheckedFiles] = []
    variables = checks = 0
    members: list[chain.Member] = []
    try:
        members = newest_of(place)
    except BadInputError as error:
        findings.append(Finding("error", _check_of(error), "", str(error)))
        members = _readable(place)
    checks += 1
    findings += _older(place)
    full: Checkpoint | None = None
    for member in members:
        name = member.prefix.name
        try:
            checkpoint = open_member(member, options)
        except KvtoolsError as error:
            findings.append(Finding("error", "open", "", f"'{name}': {error}"))
            continue
        found = check(
            checkpoint, tables=tables, memory=options.memory, workers=workers, engine=engine, progress=progress
        )
        checked += [dataclasses.replace(table, name=f"{name}: {table.name}", member=name) for table in found.tables]
        variables, checks = found.variables, checks + found.checks
        compared += found.checked_files
        findings += [dataclasses.replace(one, message=f"'{name}': {one.message}") for one in found.findings]
        own = [*_record_faults(member)]
        for table_name, table in checkpoint.tables.items():
            if tables and table_name not in tables:
                continue
            before = None if full is None else full.tables.get(table_name)
            own += _increment_faults(member, table, before, has_full=full is not None)
        findings += [Finding("error", kind, of, f"'{name}': {message}") for kind, of, message in own]
        checks += 1 + len(checkpoint.tables)
        if member.kind == "full":
            full = checkpoint
    rank = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda finding: rank[finding.severity])
    return Verification(str(path), "chain", tuple(checked), variables, checks, tuple(findings), tuple(compared))


def _check_of(error: BadInputError) -> str:
    """Return what the check is called that finds such a fault."""
    return f"chain-{getattr(error, 'reason', 'damaged')}"


def _readable(place: ChainPlace) -> list[chain.Member]:
    """Return the newest full checkpoint and what comes after it, in whatever order."""
    there = place.members
    last = max((member.number for member in there if member.kind == "full"), default=-1)
    return [m for m in there if m.number > last or (m.number == last and m.kind == "full")]


def _older(place: ChainPlace) -> Iterator[Finding]:
    """Yield what is wrong with the chains before the newest one."""
    there = place.members
    fulls = [member.number for member in there if member.kind == "full"]
    for following in fulls[1:]:
        try:
            chain.chain_of([member for member in there if member.number < following])
        except BadInputError as error:
            message = f"before the newest full checkpoint, where no restore looks: {error}"
            yield Finding("warning", _check_of(error), "", message)


Fault = tuple[str, str, str]
"""What a check is called, of which table it is, and what it found."""


def _record_faults(member: chain.Member) -> Iterator[Fault]:
    """Yield where the record of a member counts other rows than it has."""
    try:
        record, bundle = chain.record_of(member), Bundle(member.prefix)
    except KvtoolsError as error:
        yield "open", "", str(error)
        return
    if record is None:
        return
    for prefix, counts in record.tables.items():
        for suffix, told in (("-keys", counts.rows), ("-removed", counts.removed)):
            shape = bundle.entries[prefix + suffix].shape if prefix + suffix in bundle else (0,)
            if shape != (told,):
                yield (
                    "chain-record",
                    prefix,
                    f"its record says {told} for '{prefix}{suffix}', which has {list(shape)}; it was changed,"
                    " or written by another program: save it again",
                )


def _increment_faults(
    member: chain.Member, table: TableReader, full: TableReader | None, *, has_full: bool
) -> Iterator[Fault]:
    name = table.schema.name
    if is_increment(table) != (member.kind == "delta"):
        what = "an increment" if is_increment(table) else "whole"
        yield "chain-kind", name, f"it is {what} by its kvmeta, and the member is {member.kind}; remove the member"
        return
    if member.kind == "full":
        return
    if full is None:
        if has_full:
            yield (
                "chain-table",
                name,
                "the full checkpoint has no such table; it is of another model, remove the member",
            )
        return
    one, two = full.schema, table.schema
    for what, was, now in (
        ("key type", one.key_dtype, two.key_dtype),
        ("value type", one.value_dtype, two.value_dtype),
        ("dim", one.dim, two.dim),
        ("slots", sorted(map(str, one.slots)), sorted(map(str, two.slots))),
    ):
        if was != now:
            yield (
                "chain-table",
                name,
                f"its {what} is {now}, in the full checkpoint {was}; it is of another table, remove the member and what"
                " comes after it",
            )
    gone = np.sort(removed_keys(table))
    both: list[int] = []
    for chunk in table.chunks(KEYS, rows=_KEY_ROWS, verify=False):
        both += chunk.keys[np.isin(chunk.keys, gone)][:_FEW].tolist()
    if both:
        yield "chain-removed", name, f"keys {', '.join(map(str, both[:_FEW]))} are removed and have rows; save it again"
