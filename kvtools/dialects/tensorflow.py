"""Any TensorFlow checkpoint as dense variables: the dialect of one with no table that kvtools knows."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping

from kvtools.dialects.bundle import Bundle
from kvtools.dialects.bundle.dtypes import dtype_name
from kvtools.dialects.bundle_output import variable_chunks
from kvtools.dialects.dialect import Dialect, Source
from kvtools.dialects.interface import Checkpoint, Finding, TableReader
from kvtools.dialects.location import Location
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import VariableSchema
from kvtools.errors import KvtoolsError

NAME = "tensorflow"
_BOOKKEEPING = frozenset({"_CHECKPOINTABLE_OBJECT_GRAPH"})
_OVERLAPS_TOLD = 10
_LONGEST_PADDING = 4096
"""Writers may align tensors; no more bytes than this lie between them for it."""


def bundle_checkpoint(
    dialect: str,
    location: Location,
    bundle: Bundle,
    tables: Mapping[str, TableReader],
    table_tensors: Collection[str],
    broken: Mapping[str, KvtoolsError] | None = None,
) -> Checkpoint:
    """Return the checkpoint of these tables, all tensors of the bundle but `table_tensors` being dense variables."""
    described = {
        name: VariableSchema(name, dtype_name(entry.dtype), entry.shape, bundle.nbytes(name))
        for name, entry in bundle.entries.items()
        if name not in table_tensors
    }
    return Checkpoint(
        path=location.saved_model or location.prefix,
        dialect=dialect,
        tables=dict(sorted(tables.items())),
        variables=tuple(variable for name, variable in described.items() if name not in _BOOKKEEPING),
        read_variable=functools.partial(variable_chunks, bundle),
        bookkeeping=tuple(variable for name, variable in described.items() if name in _BOOKKEEPING),
        broken=broken or {},
        check=functools.partial(_check_layout, bundle),
    )


def _check_layout(bundle: Bundle) -> Iterator[Finding]:
    """Yield where tensors lie upon each other in the data files, and how much of the files is in no tensor."""
    for number, (one, two) in enumerate(bundle.overlaps()):
        if number == _OVERLAPS_TOLD:
            yield Finding("error", "overlap", "", "and more tensors overlap; write the checkpoint again")
            break
        yield Finding(
            "error",
            "overlap",
            "",
            f"'{bundle.data_path(one.shard)}': '{two.name}' begins at byte {two.offset}, inside '{one.name}', which"
            f" ends at {one.end}; one of them is wrong, write the checkpoint again",
        )
    gaps = [gap for gap in bundle.gaps() if gap.end - gap.offset >= _LONGEST_PADDING]
    if gaps:
        unused = sum(gap.end - gap.offset for gap in gaps)
        where = f"{unused:,} bytes of the data files, in {len(gaps):,} runs, are in no tensor"
        yield Finding("info", "gap", "", f"{where}: the first at byte {gaps[0].offset} of data file {gaps[0].shard}")


def located(source: Source) -> tuple[Location, Bundle]:
    """Return where a source's bundle is, and the bundle; only for a source that a dialect recognised as a bundle."""
    assert source.location is not None and source.bundle is not None
    return source.location, source.bundle


def _open(source: Source, options: OpenOptions) -> Checkpoint:
    location, bundle = located(source)
    return bundle_checkpoint(NAME, location, bundle, {}, ())


DIALECT = Dialect(
    name=NAME,
    title="any TensorFlow checkpoint, dense variables only",
    sniff=lambda source: source.bundle is not None,
    open=_open,
)
