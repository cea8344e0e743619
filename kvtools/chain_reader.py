"""The members of a chain: which come after one that a reader has, and the rows of each."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Sequence

import numpy as np

from kvtools.chain import ChainError, Member, Previous, chain_of, fingerprint, record_of
from kvtools.dialects.chunk import Array
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError


def following(found: Sequence[Member], have: Previous, chain: str) -> list[Member]:
    """Return what comes after a member that one has; only the records of those are read.

    Args:
        found: the members there are, as `kvtools.chain.members` lists them.
        have: the number and the fingerprint of the member that one has, which need not be there any more.
        chain: the chain that it is of.

    Returns:
        The increments after it, each checked to follow; where they do not lead on, or another training run has begun,
        the newest whole chain, which begins with a full checkpoint, if that has more. [] if there is nothing new.

    Raises:
        ChainError: what comes next does not follow, and no later full checkpoint makes up for it. Increments before
            one that does not are returned first.
        BadInputError, CorruptFileError: what comes next is damaged.
    """
    fault: BadInputError | None = None
    after: list[Member] = []
    at, known = have.sequence, {have.fingerprint}
    # A full of the same moment as the member that one has: what comes next may name either.
    for member in found:
        if member.number == have.sequence and member.kind == "full":
            record = record_of(member)
            if record is None or record.previous is None or record.previous.sequence != have.sequence:
                continue
            both = {fingerprint(member.prefix), record.previous.fingerprint}
            if have.fingerprint in both:
                known |= both
    for member in found:
        if member.kind == "full" or member.number <= at:
            continue
        try:
            _check(member, at, known, chain)
        except BadInputError as error:
            fault = error
            break
        after.append(member)
        at, known = member.number, {fingerprint(member.prefix)}
    fulls = [member for member in found if member.kind == "full"]
    if fulls and (fulls[-1].number > at or _another_run(fulls[-1], chain)):
        try:
            return chain_of(found)
        except BadInputError:
            if not after:
                raise
    if not after and fault is not None:
        raise fault
    return after


def _another_run(full: Member, chain: str) -> bool:
    """Tell whether the newest full is of another run than what one has: its chain began anew, or went back."""
    record = record_of(full)
    return record is not None and record.chain != chain


def _check(member: Member, at: int, known: set[str], chain: str) -> None:
    where = f"chain in '{member.prefix.parent}'"
    if member.number != at + 1:
        missing = f"{at + 1} is" if member.number == at + 2 else f"{at + 1} to {member.number - 1} are"
        raise ChainError(f"{where}: gap: increment {missing} missing before '{member.prefix.name}'", "gap")
    record = record_of(member)
    if record is None or record.chain != chain:
        raise ChainError(f"{where}: '{member.prefix.name}' is of another chain than what is before it", "other-chain")
    if record.previous is None or record.previous.sequence != at:
        raise ChainError(f"{where}: disorder: '{member.prefix.name}' does not say that it follows {at}", "disorder")
    if record.previous.fingerprint not in known:
        raise ChainError(
            f"{where}: '{member.prefix.name}' does not follow {at} as it was read, but another member of that number:"
            " its fingerprint differs",
            "fingerprint",
        )


def open_member(member: Member, options: OpenOptions | None = None) -> Checkpoint:
    """Open one member as what it is: the tables of an increment have the rows that changed, and no others.

    An increment's keys that went are the `removed_keys` of its tables. Whoever applies one removes first.

    Raises:
        BadInputError, CorruptFileError: see `kvtools.open`.
    """
    return open_checkpoint(member.prefix, dataclasses.replace(options or OpenOptions(), increments=True))


def removed_keys(table: TableReader) -> Array:
    """Return the keys that went, [R] of the table's key type, checked; none for a table that is no increment."""
    if any(extra.name == "deleted_keys" for extra in table.schema.extras):
        return table.extra("deleted_keys").astype(table.key_dtype, copy=False)
    return np.empty(0, table.key_dtype)


def is_increment(table: TableReader) -> bool:
    """Tell whether a table has only the rows that changed since a checkpoint before it."""
    return bool(table.schema.metadata.get("increment"))


def bytes_of(member: Member) -> int:
    """Return how many bytes the files of a member take."""
    files = member.prefix.parent.glob(f"{glob.escape(member.prefix.name)}.data-?????-of-?????")
    return sum(file.stat().st_size for file in (member.index, *files))
