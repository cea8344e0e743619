"""The options that many commands share, and what they mean.

`Source` and `Output` are declared whole, as `source: Source`; see `option_groups.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from kvtools.byte_size import byte_size
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.writing import WriteOptions
from kvtools.engine import Engine
from kvtools.errors import BadInputError, UsageError
from kvtools.partition import RULES

_Named = TypeVar("_Named")

SourcePath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint prefix, file or folder of any dialect, or a URL: s3://, gs://, https://, redis://...",
    ),
]


def no_standard_output(output: _Named) -> _Named:
    """Return where an option or argument says to write; raises `UsageError` for `-`, by which others mean standard
    output: what is written here is whole or not there, which no stream can be."""
    if str(output) == "-":
        raise UsageError("writing: got - as the output, expected a file, folder or URL; ./- is a file of that name")
    if str(output).startswith("--"):
        raise UsageError(
            f"writing: got {output} as the output: the option before it needs a value; ./{output} is a file"
        )
    return output


OutputPath = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="What to write: a prefix, file, folder or URL: s3://, gs://, redis://...",
        callback=no_standard_output,
    ),
]
DialectName = Annotated[
    str | None, typer.Option("--dialect", metavar="NAME", help="The dialect of PATH; found out if left out.")
]
KeyDtype = Annotated[
    str | None,
    typer.Option("--key-dtype", metavar="T", help="The keys' type, where the files do not record it; int64."),
]
ValueDtype = Annotated[
    str | None,
    typer.Option("--value-dtype", metavar="T", help="The values' type, where the files do not record it; float32."),
]
Dim = Annotated[int | None, typer.Option("--dim", metavar="D", help="The row width, where the files do not record it.")]
Memory = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="What to hold in memory at most; more spills to disk.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", metavar="N", help="How many shards to work on at once; all processors.")
]
EngineName = Annotated[
    str, typer.Option("--engine", metavar="local|ray", help="Where shards are worked on: here, or on a Ray cluster.")
]
Tables = Annotated[
    list[str] | None,
    typer.Option("--table", metavar="NAME", help="Only this table, or those like 'deep/*'; may be repeated."),
]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="EXPRESSION", help="Only rows that meet this, as in 'freq < 3 and norm < 0.01'."),
]
Sort = Annotated[
    str | None,
    typer.Option("--sort", metavar="bytes|rows|name", help="The order of tables: largest first, or by name."),
]
To = Annotated[str | None, typer.Option("--to", metavar="DIALECT", help="The dialect to write; that of PATH.")]
Parts = Annotated[
    int | None, typer.Option("--parts", metavar="N", help="How many parts each table gets; as many as it has.")
]
BatchRows = Annotated[
    int | None, typer.Option("--batch-rows", metavar="N", help="Rows of a row group, chunk or pipeline of the output.")
]
Partition = Annotated[
    str | None,
    typer.Option(
        "--partition",
        metavar="RULE",
        help=f"The rule by which parts own keys, if not the dialect's usual one: {', '.join(RULES)}.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that is there.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Do all but write: say what would be there, and change nothing on disk.")
]
Compression = Annotated[
    str | None, typer.Option("--compression", metavar="NAME", help="As the dialect names it; 'none' for none.")
]
CompressionLevel = Annotated[int | None, typer.Option("--compression-level", metavar="N", help="How hard to compress.")]
Until = Annotated[
    int | None,
    typer.Option("--until", metavar="N", help="Of a chain, take no member of a larger number than N."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

DEFAULT_MEMORY = "1GiB"


def check_output_options(output: object, *, force: bool, dry_run: bool, option: str = "--output") -> None:
    """Raise `UsageError` for `--force` or `--dry-run` where `output`, of this option, is None: nothing is written."""
    if output is None and (force or dry_run):
        raise UsageError(f"got --{'force' if force else 'dry-run'} without {option}: nothing is written")


@dataclass(frozen=True)
class Source:
    """How the files of a source are read; which files they are is an argument of the command."""

    dialect: DialectName = None
    key_dtype: KeyDtype = None
    value_dtype: ValueDtype = None
    dim: Dim = None

    def options(self, memory: str = DEFAULT_MEMORY, *, lenient: bool = False) -> OpenOptions:
        """Return what these options ask of a reader."""
        return OpenOptions(self.dialect, self.key_dtype, self.value_dtype, self.dim, bytes_of(memory), lenient)

    def open(self, path: str, memory: str = DEFAULT_MEMORY, *, lenient: bool = False) -> Checkpoint:
        """Open the checkpoint at `path`."""
        return open_checkpoint(path, self.options(memory, lenient=lenient))

    def open_for(self, tables: Sequence[str], path: str, memory: str = DEFAULT_MEMORY) -> Checkpoint:
        """Open the checkpoint at `path` for these tables, or all if empty: what is wrong with others is not asked."""
        checkpoint = self.open(path, memory, lenient=bool(tables))
        check_readable(checkpoint, tables)
        return checkpoint


@dataclass(frozen=True)
class Output:
    """How a command writes tables; where to, and in which dialect, are the command's own."""

    force: Force = False
    memory: Memory = DEFAULT_MEMORY
    workers: Workers = None
    dry_run: DryRun = False

    def options(
        self,
        *,
        compression: str | None = None,
        compression_level: int | None = None,
        batch_rows: int | None = None,
        partition: str | None = None,
    ) -> WriteOptions:
        """Return what these options, and those that only some commands have, ask of a writer."""
        if batch_rows is not None and batch_rows < 1:
            raise UsageError(f"got --batch-rows {batch_rows}, expected 1 or more")
        return WriteOptions(
            compression,
            compression_level,
            batch_rows,
            partition,
            memory=bytes_of(self.memory),
            force=self.force,
            dry_run=self.dry_run,
        )


def sorted_tables(tables: Sequence[TableReader], sort: str | None) -> list[TableReader]:
    """Return tables in the order that `--sort` says: the largest first, or by name; as they come if it is None.

    Raises:
        UsageError: there is no such order.
    """
    if sort not in (None, "bytes", "rows", "name"):
        raise UsageError(f"got --sort {sort!r}, expected bytes, rows or name")
    if sort is None:
        return list(tables)
    if sort == "name":
        return sorted(tables, key=lambda table: table.schema.name)
    return sorted(tables, key=lambda table: (-getattr(table.schema, sort), table.schema.name))


def check_readable(checkpoint: Checkpoint, tables: Sequence[str], *, any_table: bool = False) -> None:
    """Raise what kept one of `tables` from being opened; with `any_table`, what kept any, where none is named.

    A command that only reads opens a checkpoint leniently, asks before its work for the tables named, and after it
    for all, so that one damaged table hides none of the others.
    """
    for name in checkpoint.names_of(tables):
        if name in checkpoint.broken:
            raise checkpoint.broken[name]
    if any_table and not tables and checkpoint.broken:
        count, (name, error) = len(checkpoint.broken), next(iter(checkpoint.broken.items()))
        raise BadInputError(
            f"reading '{checkpoint.path}': {count} of {count + len(checkpoint.tables)} tables cannot be read, '{name}':"
            f" {error}"
        )


def bytes_of(text: str) -> int:
    """Return the number of bytes that `--memory` is; raises `UsageError` if it is none."""
    return byte_size(text, "--memory")


def engine_named(name: str) -> Engine:
    """Return the engine of this name; raises `UsageError` if there is none.

    >>> engine_named("local")
    'local'
    """
    if name == "local":
        return "local"
    if name == "ray":
        return "ray"
    raise UsageError(f"got --engine {name!r}, expected local or ray")
