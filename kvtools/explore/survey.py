"""What there is to explore in a table: thresholds and what they cut, hot keys, neighbours, a sample.

The values of a table are read once (twice where neighbours are looked for), its counters once more. What is held
meanwhile are histograms, a sample, and the norms of the rows, which go to a temporary file where they are many.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtools.decimal_histogram import DecimalHistogram
from kvtools.dialects.chunk import Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import TableSchema, VersionUnit, row_bytes
from kvtools.engine import run_all
from kvtools.explore.cuts import Cuts
from kvtools.explore.projection import Projection, principal_components
from kvtools.histogram import FrequencyHistogram, VersionHistogram
from kvtools.key_join import row_numbers
from kvtools.neighbours import nearest
from kvtools.read_ahead import read_ahead
from kvtools.row_norms import as_floats, row_norms, rows_not_finite
from kvtools.thresholds import PERCENTILES, age_thresholds, freq_thresholds, norm_thresholds
from kvtools.top import top_rows

Array = npt.NDArray[Any]

_CHUNK_BYTES = 1 << 22
_COUNTER_ROWS = 1 << 18
_SMALL = 1 << 24


@dataclass(frozen=True)
class Detail:
    """How much is looked for: thresholds at these percentiles, points of the projection, hot keys, neighbours.

    `asked` are keys of the sample whose neighbours are looked for, beside the hot ones; `neighbours` how many each
    gets, none if 0.
    """

    percentiles: tuple[float, ...] = PERCENTILES
    points: int = 1000
    hot: int = 10
    asked: int = 10
    neighbours: int = 8


@dataclass(frozen=True)
class Rows:
    """Some rows of a table: their keys [n], Euclidean norms [n], and frequencies and versions [n] where it has them."""

    keys: Array
    norms: Array
    freqs: Array | None
    versions: Array | None

    def take(self, rows: Array) -> Rows:
        """Return the rows of these numbers."""
        return Rows(
            self.keys[rows],
            self.norms[rows],
            None if self.freqs is None else self.freqs[rows],
            None if self.versions is None else self.versions[rows],
        )


@dataclass(frozen=True)
class TableSurvey:
    """What was found of a table.

    `row_bytes` are those of a row as `kvtools clip` counts them. `hot` are the rows of the highest frequency, or of the
    largest norm where there are none (`hot_by`). `near` has keys and cosines of the nearest rows, by key. `sample` are
    rows evenly spaced along the table, and `projection` where they lie.
    """

    schema: TableSchema
    row_bytes: int
    zero_rows: int
    non_finite_rows: int
    norms: DecimalHistogram
    freqs: FrequencyHistogram | None
    versions: VersionHistogram | None
    cuts: Cuts
    hot: Rows
    hot_by: Literal["freq", "norm"]
    near: dict[int, tuple[Array, Array]]
    sample: Rows
    projection: Projection


def survey_tables(
    tables: Sequence[TableReader],
    details: Sequence[Detail],
    *,
    version_unit: VersionUnit | None = None,
    memory: int = DEFAULT_MEMORY,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[TableSurvey]:
    """Survey tables, in their order; each survey holds histograms, which thousands of tables need not have at once.

    Args:
        tables: any readers.
        details: how much to look for in each.
        version_unit: what versions count, where the files do not say.
        memory: bytes to stay within; what needs more goes to temporary files.
        workers: parts at once; the processors there are if None.
        progress: called as rows are read.

    Raises:
        CorruptFileError: the data is damaged.

    Example:
        ```python
        tables = kvtools.open("model.ckpt-100").select(["user_emb"])
        (survey,) = survey_tables(tables, [Detail()])
        print(survey.cuts.kept((3, 0, 0)))
        ```
    """

    def survey(task: tuple[TableReader, Detail]) -> TableSurvey:
        return survey_table(*task, version_unit=version_unit, memory=memory, workers=workers, progress=progress)

    return run_all(survey, list(zip(tables, details, strict=True)), workers=workers)


def survey_table(
    table: TableReader,
    detail: Detail,
    *,
    version_unit: VersionUnit | None = None,
    memory: int = DEFAULT_MEMORY,
    workers: int | None = None,
    progress: Progress | None = None,
) -> TableSurvey:
    """Survey one table; see `survey_tables`."""
    schema = table.schema
    if schema.rows * row_bytes(schema) < _SMALL:  # threads would take longer than what they do
        workers = 1
    unit = version_unit or schema.version_unit
    norms = row_numbers(schema.rows, memory=memory).view(np.float64)
    starts = np.cumsum([0, *schema.part_rows])
    wanted = _evenly_spaced(schema.rows, detail.points)
    lock, done = threading.Lock(), 0

    def measure(part: int) -> _Measured:
        nonlocal done
        found = _Measured.empty(schema, unit)
        row = int(starts[part])
        columns = Columns(values=True, freqs=schema.has_freqs, versions=schema.has_versions)
        size = max(1, _CHUNK_BYTES // row_bytes(schema, columns))
        chunks = table.chunks(columns, part=part, rows=size)
        for chunk in chunks if schema.parts > 1 else read_ahead(chunks):
            first, last = wanted.searchsorted([row, row + len(chunk)])
            norms[row : row + len(chunk)] = found.add(chunk, wanted[first:last] - row)
            row += len(chunk)
            if progress:
                with lock:
                    done += len(chunk)
                    progress(schema.name, done, schema.rows)
        return found

    found = _Measured.empty(schema, unit)
    for of_part in run_all(measure, range(schema.parts), workers=workers):
        found.merge(of_part)
    axes = (
        freq_thresholds(found.freqs, detail.percentiles) if found.freqs else [],
        norm_thresholds(found.norms, detail.percentiles),
        age_thresholds(found.versions, detail.percentiles) if found.versions else [],
    )

    def count(part: int) -> Cuts:
        cuts = Cuts(axes, unit in ("seconds", "days"), schema.has_freqs)
        row = int(starts[part])
        columns = Columns(freqs=schema.has_freqs, versions=bool(axes[2]))
        for chunk in table.chunks(columns, part=part, rows=_COUNTER_ROWS):
            cuts.add(chunk, norms[row : row + len(chunk)])
            row += len(chunk)
        return cuts

    cuts = Cuts(axes, unit in ("seconds", "days"), schema.has_freqs)
    for of_cuts in run_all(count, range(schema.parts), workers=workers):
        cuts.merge(of_cuts)
    sample, values = found.sampled(table)
    hot_by: Literal["freq", "norm"] = "freq" if schema.has_freqs else "norm"
    hot, hot_values = _hot_rows(table, norms, hot_by, detail.hot, workers)
    near: dict[int, tuple[Array, Array]] = {}
    if detail.neighbours:
        asked = slice(None, None, max(1, len(sample.keys) // max(detail.asked, 1)))
        few = slice(0, detail.asked)
        near = neighbours_of(
            table,
            np.concatenate([hot.keys, sample.keys[asked][few]]),
            np.concatenate([as_floats(hot_values), as_floats(values)[asked][few]]),
            detail.neighbours,
        )
    return TableSurvey(
        schema,
        row_bytes(schema),
        found.zero_rows,
        found.non_finite_rows,
        found.norms,
        found.freqs,
        found.versions,
        cuts,
        hot,
        hot_by,
        near,
        sample,
        principal_components(values),
    )


def neighbours_of(table: TableReader, keys: Array, values: Array, count: int) -> dict[int, tuple[Array, Array]]:
    """Return keys and cosines of the rows nearest to these, by key, exactly; a row without a direction has none.

    Args:
        table: all of whose rows are compared.
        keys: whose neighbours, integers [n].
        values: their rows [n, dim].
        count: how many each gets.
    """
    norms = row_norms(values, "l2")
    _, first = np.unique(keys, return_index=True)
    usable = np.array([at for at in sorted(first.tolist()) if np.isfinite(norms[at]) and norms[at] > 0], np.int64)
    if not len(usable):
        return {}
    found = nearest(table, values[usable], count, exclude=keys[usable])
    return {int(keys[at]): (found.keys[i], found.scores[i]) for i, at in enumerate(usable.tolist())}


@dataclass
class _Measured:
    """What one pass over values and counters tells; `rows` and `values` are the sample's, piece by piece."""

    norms: DecimalHistogram
    freqs: FrequencyHistogram | None
    versions: VersionHistogram | None
    zero_rows: int = 0
    non_finite_rows: int = 0
    rows: list[Chunk] = field(default_factory=list)
    sample_norms: list[Array] = field(default_factory=list)

    @staticmethod
    def empty(schema: TableSchema, unit: VersionUnit) -> _Measured:
        return _Measured(
            DecimalHistogram(),
            FrequencyHistogram() if schema.has_freqs else None,
            VersionHistogram(unit) if schema.has_versions else None,
        )

    def add(self, chunk: Chunk, wanted: Array) -> Array:
        """Count a chunk, keep those of its rows that the sample has, [n]; return the norms of all."""
        assert chunk.values is not None
        norms = row_norms(chunk.values, "l2")
        self.norms.add(norms)
        self.zero_rows += len(chunk) - int(np.count_nonzero(norms))
        odd = ~np.isfinite(norms)
        if odd.any():
            self.non_finite_rows += int(np.count_nonzero(rows_not_finite(chunk.values[odd])))
        if self.freqs is not None and chunk.freqs is not None:
            self.freqs.add(chunk.freqs)
        if self.versions is not None and chunk.versions is not None:
            self.versions.add(chunk.versions)
        if len(wanted):
            self.rows.append(chunk.take(wanted))
            self.sample_norms.append(norms[wanted])
        return norms

    def merge(self, other: _Measured) -> None:
        self.norms.merge(other.norms)
        self.zero_rows += other.zero_rows
        self.non_finite_rows += other.non_finite_rows
        if self.freqs is not None and other.freqs is not None:
            self.freqs.merge(other.freqs)
        if self.versions is not None and other.versions is not None:
            self.versions.merge(other.versions)
        self.rows += other.rows
        self.sample_norms += other.sample_norms

    def sampled(self, table: TableReader) -> tuple[Rows, Array]:
        """Return the rows of the sample, and their values [n, dim]."""
        if not self.rows:
            return Rows(np.empty(0, table.key_dtype), np.empty(0), None, None), np.empty((0, table.dim))

        def joined(name: str) -> Array | None:
            columns = [getattr(chunk, name) for chunk in self.rows]
            return None if columns[0] is None else np.concatenate(columns)

        keys, values = joined("keys"), joined("values")
        assert keys is not None and values is not None
        return Rows(keys, np.concatenate(self.sample_norms), joined("freqs"), joined("versions")), values


def _evenly_spaced(rows: int, count: int) -> npt.NDArray[np.int64]:
    """Return the numbers of `count` of the rows, ascending, all of them if there are no more.

    >>> _evenly_spaced(10, 2).tolist(), _evenly_spaced(3, 5).tolist()
    ([2, 7], [0, 1, 2])
    """
    count = min(count, rows)
    return np.array([(2 * i + 1) * rows // (2 * count) for i in range(count)], np.int64)


def _hot_rows(
    table: TableReader, norms: Array, by: Literal["freq", "norm"], count: int, workers: int | None
) -> tuple[Rows, Array]:
    """Return the rows of the highest frequency, or of the largest finite norm, and their values [n, dim]."""
    schema = table.schema
    if by == "freq":
        numbers = top_rows(table, "freq", count, workers=workers).rows
    else:
        count = min(count, len(norms))
        ranked = np.where(np.isfinite(norms), norms, -1.0)
        numbers = np.argpartition(-ranked, count - 1)[:count] if count else np.empty(0, np.int64)
        numbers = numbers[np.lexsort((numbers, -ranked[numbers]))]
        numbers = numbers[ranked[numbers] >= 0]
    columns = Columns(values=True, freqs=schema.has_freqs, versions=schema.has_versions)
    order = np.argsort(numbers, kind="stable")
    chunk = table.take(numbers[order], columns) if len(numbers) else table.take(np.empty(0, np.int64), columns)
    chunk = chunk.take(np.argsort(order, kind="stable"))
    assert chunk.values is not None
    return Rows(chunk.keys, norms[numbers], chunk.freqs, chunk.versions), chunk.values
