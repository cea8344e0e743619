"""Where a chain lies: which paths mean one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvtools.chain import Member, member_of, members
from kvtools.errors import BadInputError

_INCREMENT = re.compile(r"(?P<name>.+)-\d+\.delta\.index", re.S)


@dataclass(frozen=True)
class ChainPlace:
    """Where a chain lies: its folder, and what the names of its members begin with."""

    folder: Path
    name: str

    @property
    def members(self) -> list[Member]:
        """The members by their names, sorted; see `kvtools.chain.members`."""
        return members(self.folder, self.name)


def is_chain(path: str | os.PathLike[str]) -> bool:
    """Tell by names alone whether a path is a folder with increments in it, or names one of several chains there.

    >>> is_chain("no/such/folder")
    False
    """
    given = Path(path)
    try:
        if given.is_dir():
            return bool(_names(given))
        return given.parent.is_dir() and not Path(f"{given}.index").exists() and given.name in _names(given.parent)
    except (OSError, ValueError):
        return False


def chain_at(path: str | os.PathLike[str]) -> ChainPlace:
    """Find the chain that a path means: a folder, or, of several chains in one, the folder and the chain's name.

    Raises:
        BadInputError: there is none, or there are several and none is named.

    Example:
        >>> chain_at("no/such/folder")
        Traceback (most recent call last):
        kvtools.errors.BadInputError: looking for a chain at 'no/such/folder': there is no such folder; ...
    """
    given = Path(path)
    if not given.is_dir():
        if given.parent.is_dir() and given.name in {_name_of(member) for member in members(given.parent)}:
            return ChainPlace(given.parent, given.name)
        member = member_of(given.with_name(given.name.removesuffix(".index"))) if given.name else None
        if member is not None and member.index.exists():
            raise BadInputError(
                f"looking for a chain at '{given}': that is one checkpoint; name the folder of its chain,"
                f" '{given.parent}', or, of several chains in it, '{given.parent / _name_of(member)}'"
            )
        raise BadInputError(
            f"looking for a chain at '{given}': there is no such folder; name the folder that a CheckpointManager saves"
            " to"
        )
    names = _names(given) or {_name_of(member) for member in members(given)}
    if not names:
        raise BadInputError(
            f"looking for a chain in '{given}': there is no checkpoint called '<name>-<number>' in it; name the folder"
            " that a CheckpointManager saves to"
        )
    if len(names) > 1:
        few = ", ".join(f"'{given / name}'" for name in sorted(names)[:4])
        raise BadInputError(f"looking for a chain in '{given}': there are several, expected one; name one: {few}")
    return ChainPlace(given, names.pop())


def _name_of(member: Member) -> str:
    return member.prefix.name.removesuffix(".delta").rpartition("-")[0]


def _names(folder: Path) -> set[str]:
    """Return what the names of the increments in a folder begin with."""
    with os.scandir(folder) as entries:
        found = (_INCREMENT.fullmatch(entry.name) for entry in entries if not entry.name.startswith("."))
        return {match["name"] for match in found if match}
