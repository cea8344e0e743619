"""What a dialect is to the rest of kvtools: its name, how to tell and open its files, what it can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from kvtools.dialects.bundle import Bundle
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.location import Location, locate
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import SlotSchema, TableSchema, VersionUnit
from kvtools.dialects.writing import CheckpointWriter, WriteOptions
from kvtools.errors import BadInputError


class Source:
    """What a user named: a path, or a URL such as `redis://localhost/0`; looked at no more than asked for.

    With `salvage` data files may be missing or cut: what lay there is an error when it is read.
    """

    def __init__(self, text: str, *, salvage: bool = False) -> None:
        self.text = text
        self.salvage = salvage
        self.path = Path(text)
        self.is_url = "://" in text

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The sorted names in the folder that is meant; none if it is no folder, or may not be read."""
        try:
            return () if self.is_url else tuple(sorted(entry.name for entry in self.path.iterdir()))
        except OSError:
            return ()

    @cached_property
    def location(self) -> Location | None:
        """The TensorFlow checkpoint that is meant, or None if there is none."""
        if self.is_url:
            return None
        try:
            return locate(self.path)
        except BadInputError:
            return None

    @cached_property
    def bundle(self) -> Bundle | None:
        """The opened TensorFlow bundle, or None if there is none; raises `BadInputError` if it is damaged."""
        return None if self.location is None else Bundle(self.location.prefix, salvage=self.salvage)


@dataclass(frozen=True)
class Holds:
    """What a dialect can hold; `kvtools.fit` turns a table into that, and names what is lost.

    Types are listed with the preferred ones first. No `freq_dtypes` or `version_dtypes` means that the dialect has no
    such column; `version_units` None means that it records the unit, whatever it is. `unknown_versions_are` is what
    versions of an unknown unit are read as, where it does not record that nobody knows.
    `partition` is the rule by which its parts own keys, or a function that chooses it for a source's schema; None
    where any row may stand in any part. `many_parts` is False where a table is always one part. `empty_dim` is False
    where only rows tell how wide a row is. `extras` and `metadata` are None where any can be held. `slot_inits` is how
    slots of new rows may begin, of what "slots" of the metadata describes (`docs/checkpoint-layout.md`). `only_slots`
    are all the slots that there can be, where a dialect has a place for some only. `key_bytes` is what a key takes,
    where that is the same for all types of keys. `keys_once` says that of rows of one key only the last is written.
    `status_tables` says that frequencies and versions are tables of their own there: where the source has such tables,
    of the names that `kvtools.status_names.status_table` gives, those are meant, and other counters are left out.
    """

    key_dtypes: tuple[str, ...]
    value_dtypes: tuple[str, ...]
    slots: bool = True
    slot_dtypes: tuple[str, ...] | None = None
    only_slots: tuple[SlotSchema, ...] | None = None
    slot_width_is_dim: bool = False
    slot_dtype_is_value: bool = False
    freq_dtypes: tuple[str, ...] = ()
    version_dtypes: tuple[str, ...] = ()
    version_units: tuple[VersionUnit, ...] | None = None
    unknown_versions_are: VersionUnit | None = None
    partition: str | Callable[[TableSchema], str] | None = None
    many_parts: bool = True
    empty_dim: bool = True
    extras: frozenset[str] | None = frozenset()
    metadata: frozenset[str] | None = frozenset()
    slot_inits: frozenset[str] = frozenset({"constant", "copy_value"})
    variables: bool = False
    status_tables: bool = False
    key_bytes: int | None = None
    keys_once: bool = False


@dataclass(frozen=True)
class Dialect:
    """A format: `sniff` tells it by content, `open` reads it, `write` (None where there is no writer) writes it.

    `write(staging, options)` is given a path (or URL) that nobody else reads yet: `output` says whether the dialect
    makes a bundle "prefix" (several files that start with the name), one "file", a "folder", or fills a "url". Where
    it can make either, "file_or_folder", a file, of one table, is meant by a name that ends in one of `suffixes`.
    `compresses` says that its writer takes a compression.
    `completed` returns a table that is to be written with what the dialect records of it and the source only implies.
    """

    name: str
    title: str
    sniff: Callable[[Source], bool]
    open: Callable[[Source, OpenOptions], Checkpoint]
    write: Callable[[str, WriteOptions], CheckpointWriter] | None = None
    output: Literal["prefix", "file", "folder", "file_or_folder", "url"] = "prefix"
    suffixes: tuple[str, ...] = ()
    holds: Holds = field(default_factory=lambda: Holds((), ()))
    compresses: bool = False
    completed: Callable[[TableReader], TableReader] = lambda table: table

    def output_kind(self, output: str) -> Literal["prefix", "file", "folder", "url"]:
        """Return what is made where the output is called so."""
        if self.output != "file_or_folder":
            return self.output
        return "file" if output.lower().endswith(self.suffixes) else "folder"
