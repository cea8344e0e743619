"""`kvtools neighbours`: the rows nearest to a key's, or to a vector."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from kvtools.cli.json_text import dumps
from kvtools.cli.key_arguments import key_words, mark_negative
from kvtools.cli.layout import columns, shown
from kvtools.cli.options import DEFAULT_MEMORY, Memory, Source, SourcePath, Tables, Where
from kvtools.cli.progress import progress_bar
from kvtools.cli.row_output import tables_for
from kvtools.cli.standard_output import write_bytes
from kvtools.csv_rows import csv_header, csv_lines
from kvtools.dialects.chunk import Array
from kvtools.dialects.interface import TableReader
from kvtools.errors import BadInputError, CheckFailedError, UsageError
from kvtools.json_numbers import json_ready
from kvtools.key_file import keys_from
from kvtools.neighbours import Neighbours, has_neighbours, metric_named, nearest, vectors_of_keys
from kvtools.row_filter import condition_of
from kvtools.shown_tables import counted
from kvtools.vector_file import read_vectors

prepare_arguments = mark_negative

_NAMES_SHOWN = 8


@dataclass(frozen=True)
class _Found:
    """The neighbours of some vectors in a table: `of` are the keys, or the numbers, of the vectors [q]."""

    of: Array
    neighbours: Neighbours


def run(
    path: SourcePath,
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY...", help="Keys, negative ones too.")] = None,
    *,
    keys_file: Annotated[
        str | None,
        typer.Option("--keys-file", metavar="FILE", help="More keys: text, or integers as .npy; - for stdin."),
    ] = None,
    vector: Annotated[
        str | None,
        typer.Option(
            "--vector", metavar="FILE", help="Vectors instead of keys: a line of numbers each, or .npy; - is stdin."
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option("--metric", metavar="cosine|dot|l2", help="What is near: by angle, product or distance.")
    ] = "cosine",
    k: Annotated[int, typer.Option("-k", metavar="K", help="How many neighbours of each.")] = 10,
    of: Annotated[
        str | None,
        typer.Option("--of", metavar="NAME", help="Take the keys' rows from this table, to look for others like them."),
    ] = None,
    where: Where = None,
    table: Tables = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Print a JSON object for each key or vector.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values, of one table.")] = False,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
) -> None:
    """Print the rows nearest to those of keys, in each table that has them, the nearest one first.

    Every row is compared, in float64 where it matters, so the answer is exact; equally near rows come in
    the order of their keys. A key is not its own neighbour. With --of, rows are of one table and
    neighbours of others. Rows with a NaN or an infinity have no neighbours and are none, nor, by cosine, rows of
    zeros; they are counted on stderr. Exits with 3 where no key has any.

    \b
    Examples:
      kvtools neighbours model.ckpt-100 17
      kvtools neighbours model.ckpt-100 17 -3 --table user_emb --metric dot -k 20
      kvtools neighbours towers.ckpt 17 --of users --table items --metric dot
      kvtools neighbours model.ckpt-100 --vector query.npy --table item_emb --where 'freq > 10' --csv
    """
    if sum([as_json, json_lines, as_csv]) > 1:
        raise UsageError("looking for neighbours: got several of --json, --json-lines and --csv, expected one")
    words = key_words(keys or [])
    if (bool(words) or keys_file is not None) == (vector is not None) or (keys and not words):
        raise UsageError("looking for neighbours: expected either keys, behind PATH or by --keys-file, or --vector")
    if of is not None and vector is not None:
        raise UsageError("looking for neighbours: --of is the table of keys, and --vector has none")
    if k < 1:
        raise UsageError(f"looking for neighbours: got -k {k}, expected 1 or more")
    by = metric_named(metric)
    condition = condition_of(where)
    asked = [*(table or []), *([] if of is None else [of])]
    checkpoint = source.open_for(asked if table else [], path, memory)
    tables = checkpoint.select(table or [])
    if condition is not None:
        tables = tables_for(tables, [condition.columns_of], table)
    if as_csv and len(tables) != 1:
        raise UsageError(f"printing neighbours as CSV: got {len(tables)} tables, expected one; name it with --table")
    wanted = np.empty(0, np.int64)
    missing = np.empty(0, np.bool_)
    sought: list[tuple[TableReader, Array, Array, bool]] = []  # table, keys or numbers, vectors, are they its own rows
    if vector is not None:
        vectors = read_vectors(vector, sys.stdin.buffer)
        sought = [(reader, np.arange(len(vectors)), vectors, False) for reader in _of_width(tables, vectors, table)]
    else:
        wanted = keys_from(words, keys_file, sys.stdin.buffer)
        missing = np.ones(len(wanted), np.bool_)
        others = None if of is None else checkpoint.table(of)
        for reader in tables if others is None else [others]:
            vectors, there = vectors_of_keys(reader, wanted)
            missing &= ~there
            sought += [
                (one, wanted[there], vectors, one is reader)
                for one in ([reader] if others is None else _of_width(tables, vectors, table))
            ]
    found = []
    with progress_bar("reading") as progress:
        for reader, names, vectors, own in sought:
            usable = has_neighbours(vectors, by)
            _tell_unusable(reader, names[~usable], "vector" if vector is not None else "key")
            if usable.any():
                exclude = names[usable] if own else None
                neighbours = nearest(
                    reader, vectors[usable], k, metric=by, exclude=exclude, where=condition, progress=progress
                )
                found.append(_Found(names[usable], neighbours))
    what = "vector" if vector is not None else "key"
    if as_json:
        told = [record for one in found for record in _records(one, what)]
        gone = {} if vector is not None else {"missing": [int(key) for key in wanted[missing]]}
        print(dumps({"metric": by, "neighbours": told, **gone}))
    elif json_lines:
        for one in found:
            for record in _records(one, what):
                print(dumps(record))
    elif as_csv:
        _print_csv(found, what)
    else:
        _print_text(found, what)
    _tell_left_out(found)
    if missing.any():
        few = ", ".join(str(key) for key in wanted[missing][:_NAMES_SHOWN])
        more = ", ..." if missing.sum() > _NAMES_SHOWN else ""
        number = counted(int(missing.sum()), "key")
        print(f"kvtools: looking for neighbours: {number} in no table: {few}{more}", file=sys.stderr)
    if not found:
        raise typer.Exit(CheckFailedError.exit_code)


def _of_width(tables: Sequence[TableReader], vectors: Array, named: Sequence[str] | None) -> list[TableReader]:
    """Return the tables whose rows are as wide as vectors; raises where one that is named is not, or none is."""
    fitting = [table for table in tables if table.dim == vectors.shape[1]]
    if not fitting or (named and len(fitting) < len(tables)):
        widths = ", ".join(f"'{table.schema.name}' {table.dim}" for table in tables if table not in fitting)
        raise BadInputError(
            f"looking for neighbours: got vectors of {vectors.shape[1]} numbers, expected as many as the rows of the"
            f" tables have: {widths or 'there are none'}"
        )
    return fitting


def _tell_unusable(table: TableReader, names: Array, what: str) -> None:
    if len(names):
        few = ", ".join(str(name) for name in names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        print(
            f"kvtools: {shown(table.schema.name)}: nothing is near {what} {few}: a NaN, an infinity, or zeros, which"
            " have no direction",
            file=sys.stderr,
        )


def _tell_left_out(found: Sequence[_Found]) -> None:
    for one in found:
        of = one.neighbours
        for count, what in ((of.non_finite, "with NaN or infinity"), (of.zero, "of zeros, which have no direction")):
            if count:
                rows = "1 row" if count == 1 else f"{count:,} rows"
                print(f"kvtools: {shown(of.table)}: {rows} {what}: left out", file=sys.stderr)


def _records(found: _Found, what: str) -> list[dict[str, Any]]:
    of = found.neighbours
    return [
        {
            "table": of.table,
            what: int(name),
            "neighbours": [
                {"key": key, "score": score}
                for key, score in zip(keys.tolist(), json_ready(scores.tolist()), strict=True)
            ],
        }
        for name, keys, scores in zip(found.of, of.keys, of.scores, strict=True)
    ]


def _print_csv(found: Sequence[_Found], what: str) -> None:
    print(csv_header([f"of_{what}", "rank", "key", "score"]))
    for one in found:
        of = one.neighbours
        lengths = [len(keys) for keys in of.keys]
        if not sum(lengths):
            continue
        rank = np.concatenate([np.arange(1, length + 1) for length in lengths])
        names = np.repeat(one.of, lengths)
        if names.dtype == object:  # keys of several types were asked for; those that were found are of the table's
            names = names.astype(of.keys[0].dtype)
        for lines in csv_lines([names, rank, np.concatenate(of.keys), np.concatenate(of.scores)]):
            write_bytes(lines)


def _print_text(found: Sequence[_Found], what: str) -> None:
    lines = []
    for one in found:
        of = one.neighbours
        for name, keys, scores in zip(one.of, of.keys, of.scores, strict=True):
            first = [shown(of.table), str(name)]
            for key, score in zip(keys.tolist(), scores.tolist(), strict=True):
                lines.append([*first, str(key), f"{score:.6g}"])
                first = ["", ""]
    if lines:
        metric = found[0].neighbours.metric
        print(columns(["table", what, "neighbour", metric], lines, right=frozenset({1, 2, 3})))
