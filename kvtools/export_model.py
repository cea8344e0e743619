"""Write a trained SavedModel, or a checkpoint and its graph, with the operations of key-value tables as a SavedModel of
stock TensorFlow operations.

The graph is rewritten (`kvtools.stock_model`), the rows of its tables are streamed from the model's variables into
those of the new one, and all else, dense variables, assets and signatures, goes along as it is. TensorFlow is not
needed.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.chain_reader import refuse_increments
from kvtools.check_model import (
    Asked,
    SignatureCheck,
    check_available,
    check_model,
    expect_answers,
    mark_reordered,
    not_compared,
    refusals,
    rows_not_asked_for,
    wrong_answers,
)
from kvtools.chosen_as_read import RepeatedKeys, ToChoose
from kvtools.clip import Choice
from kvtools.clip_policy import Policy
from kvtools.dialects.bundle import BundleWriter
from kvtools.dialects.bundle_output import write_variable
from kvtools.dialects.chunk import Array
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.object_graph import OBJECT_GRAPH
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.savedmodel import is_whole_model
from kvtools.dialects.tfplugin import KEY_DTYPES, VALUE_DTYPES
from kvtools.errors import BadInputError, CheckFailedError, KvtoolsError
from kvtools.export import TableExport, check_room, choices_to_write, index_name, write_manifest, write_table
from kvtools.export_warmup import Warmup
from kvtools.indexed_rows import DEFAULT_INDEX, Index, check_index
from kvtools.meta_file import TrainedGraph
from kvtools.model_requests import Request
from kvtools.narrow_rows import KEYS_BEGIN_WITH, Dtypes, NarrowTable, check_dtypes, dtype_of
from kvtools.remote.paths import local_path
from kvtools.remote.stored import read_bytes, stored
from kvtools.replace_output import check_apart, check_replaceable, replace_folder
from kvtools.shown_tables import counted
from kvtools.stock_model.cut_functions import CannotCut
from kvtools.stock_model.cut_model import CutSignature, cut_model
from kvtools.stock_model.fields import join, messages, split, without
from kvtools.stock_model.given_rows import GivenTable
from kvtools.stock_model.handles import Restored
from kvtools.stock_model.initial_rows import InitialRows, initial_rows
from kvtools.stock_model.meta_graph import (
    DAMAGED,
    MetaGraph,
    Tables,
    malformed,
    restored_when_served,
    rewrite_meta_graph,
    served_nodes,
)
from kvtools.stock_model.objects import object_prefixes
from kvtools.stock_model.older_tensorflow import OLDEST, not_in_oldest
from kvtools.stock_model.op_table import ANSWERS_BEGIN, GIVES_DEFAULTS, HANDLES, OPERATIONS, REFUSED, RESTORES
from kvtools.stock_model.restores import read_what_is_restored, restore_what_is_served
from kvtools.stock_model.rewrite import UnsupportedOperation
from kvtools.stock_model.stock_ops import foreign_nodes, is_stock
from kvtools.stock_model.table import StockTable

_MODEL_FILE = "saved_model.pb"
_TEXT_FILE = "saved_model.pbtxt"
_ALSO_DONE = HANDLES | RESTORES
_TELL_ZEROS = frozenset({"KvTableContains", "KvTableSize"}) | GIVES_DEFAULTS
"""Operations that tell a row of zeros from none."""
_OBJECTS = 7  # of a MetaGraphDef
_NOT_COPIED = frozenset({_MODEL_FILE, "variables", "fingerprint.pb"})


@dataclass(frozen=True)
class ModelExport:
    """What became of a model: its tables, which functions were left out, a sentence each, and what was compared.

    `warnings` say what of the answers may not be as it was meant, what was not compared, and which TensorFlows cannot
    open it; `not_compared` are the tables that no request of a comparison got a row of.
    """

    tables: list[TableExport]
    left_out: list[str]
    warnings: list[str] = field(default_factory=list)
    checks: list[SignatureCheck] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)


def has_custom_operations(folder: Path) -> bool:
    """Tell whether a folder is a SavedModel with operations that stock TensorFlow has not.

    Raises:
        BadInputError: it is a SavedModel as text, or a model that was exported whole.
        CorruptFileError: its graph is damaged.
    """
    file = folder / _MODEL_FILE
    if not file.is_file():
        if (folder / _TEXT_FILE).is_file():
            raise BadInputError(
                f"exporting '{folder}': its graph is in '{_TEXT_FILE}', as text; save the model again without"
                " as_text, or export its tables alone with --table NAME"
            )
        return False
    if is_whole_model(folder):
        raise BadInputError(
            f"exporting '{folder}': it is an exported model already; export the trained one again, or its tables alone"
            " with --table NAME"
        )
    try:
        return any(True for _ in foreign_nodes(read_bytes(file)))
    except OSError as error:
        raise BadInputError(f"reading '{file}': {error.strerror or error}") from error
    except DAMAGED as error:
        raise malformed(file, error, "model") from error


def export_model(
    checkpoint: Checkpoint,
    output: str | Path,
    *,
    policy: Policy | None = None,
    keep_zeros: bool = False,
    dtype: Dtypes = None,
    force: bool = False,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
    check: int = 0,
    warmup: Warmup | None = None,
    graph: TrainedGraph | None = None,
    index: Index = DEFAULT_INDEX,
    source: str = "",
) -> ModelExport:
    """Write the SavedModel that `checkpoint` was opened from as a folder `output` of stock operations.

    Args:
        checkpoint: a SavedModel, opened; any checkpoint with a `graph`.
        output: the folder to write; it appears when it is whole, and what stood there stays if anything fails.
        policy: which rows to leave out: their keys are answered like those that were never there.
        keep_zeros: keep rows of zeros alone; they are left out otherwise, where the model cannot tell.
        dtype: what rows of floating-point numbers become in the export; see `kvtools.export.export_saved_model`. The
            model computes with numbers of the type that it had.
        force: replace a SavedModel that is there.
        memory: how many bytes the choice of rows may hold; more spills to disk.
        progress: called after each chunk.
        check: how many random requests to compare of each signature, before `output` appears.
        warmup: the requests that servers warm the model up by; where there is a check, those that it answers. Those of
            a file are compared, too.
        graph: of a checkpoint of TensorFlow 1, what to serve; see `kvtools.meta_file`.
        index: what finds the row of a key; see `kvtools.export.export_saved_model`.
        source: what the manifest says that was exported, where that is more than the path of `checkpoint`.

    Raises:
        UsageError: there is no type `dtype` for rows.
        MissingDependencyError: there is a check to be made, and no TensorFlow.
        CheckFailedError: the export answers otherwise than the model, or the model takes none of the requests.
        BadInputError: what is served has an operation that cannot be rewritten, or a table without rows to restore.
        OutputError: `output` exists, or cannot be written.
        CorruptFileError: the model's data is damaged.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        export_model(open_checkpoint("trained_model"), Path("models/1"))
        ```
    """
    output = Path(local_path(output))
    check_index(index)
    check_apart(checkpoint.path, output)
    check_replaceable(output, mark=_MODEL_FILE, force=force)
    check_dtypes(f"exporting '{checkpoint.path}'", dtype)
    if check:
        check_available()
    model = TrainedModel(checkpoint, graph)
    tables = {prefix: model.table(prefix, number, dtype) for number, prefix in enumerate(model.readers)}
    model.rewritten(tables)  # what cannot be rewritten is told before hours of writing
    for once in (None if check else index, None):
        choices = model.choose(policy, keep_zeros=keep_zeros, dtype=dtype, memory=memory, progress=progress, once=once)
        check_room(choices, output, index)
        try:
            return _export(
                model,
                output,
                tables,
                choices,
                policy,
                dtype,
                force,
                progress,
                check,
                warmup,
                index=index,
                source=source,
            )
        except (RepeatedKeys, BadInputError):
            if not once:
                raise
    raise AssertionError


def _export(
    model: TrainedModel,
    output: Path,
    tables: dict[str, StockTable],
    choices: Sequence[Choice | ToChoose],
    policy: Policy | None,
    dtype: Dtypes,
    force: bool,
    progress: Progress | None,
    check: int,
    warmup: Warmup | None,
    *,
    index: Index,
    source: str,
) -> ModelExport:
    with replace_folder(output, mark=_MODEL_FILE, force=force) as folder:
        exports, left_out = _write(model, folder, tables, choices, policy, dtype, progress, index=index, source=source)
        checks: list[SignatureCheck] = []
        unasked: list[str] = []
        if check:
            given = [] if warmup is None else warmup.given(folder)
            asked: Asked = []
            checks = _checked(model, folder, exports, choices, check, dtype, progress, given, asked)
            unasked = unasked_tables(exports, checks, rows_not_asked_for(folder, [*tables.values()], asked))
        if warmup is not None:
            warmup.add(folder, ask=bool(check))
        warnings = [*model.warnings(exports), *refusals(checks), *not_compared(unasked)]
        warnings += _too_new(read_bytes(folder / _MODEL_FILE))
    return ModelExport(exports, left_out, warnings, checks, unasked)


def _write(
    model: TrainedModel,
    folder: Path,
    tables: dict[str, StockTable],
    choices: Sequence[Choice | ToChoose],
    policy: Policy | None,
    dtype: Dtypes,
    progress: Progress | None,
    *,
    index: Index = "hash",
    as_floats: bool = False,
    source: str = "",
) -> tuple[list[TableExport], list[str]]:
    """Write a model of these tables to a folder; return what became of each, and what was left out."""
    checkpoint = model.checkpoint
    if model.graph is None:
        copy_rest(model.folder, folder)
    else:
        copy_assets(model.graph.files, folder)
    (folder / "variables").mkdir()
    exports: list[TableExport] = []
    described: list[dict[str, Any]] = []
    with BundleWriter(folder / "variables" / "variables") as writer:
        for (prefix, reader), choice in zip(model.readers.items(), choices, strict=True):
            table = tables[prefix]
            written = write_table(
                writer,
                table,
                reader,
                choice,
                progress,
                behind=model.initial[prefix][1],
                dtype=dtype,
                as_floats=as_floats,
                index=index,
            )
            tables[prefix] = written.table
            described.append({"initial_rows": table.initial.stored, **written.described})
            # What a server has no use for is not worth a line.
            exports.append(dataclasses.replace(written.export, left_out=()))
        for variable in model.variables:
            write_variable(writer, variable, checkpoint.read_variable(variable.name))
        encoded, tracked, left_out = model.rewritten(tables)
        if tracked:
            writer.string(OBJECT_GRAPH, tracked)
    (folder / _MODEL_FILE).write_bytes(encoded)
    if not as_floats:
        told = list(zip(exports, described, strict=True))
        of_source = {"source": source} if source else {}
        write_manifest(folder, checkpoint, policy or Policy(), told, whole_model=True, **of_source)
    return exports, left_out


def _checked(
    model: TrainedModel,
    folder: Path,
    exports: Sequence[TableExport],
    choices: Sequence[Choice | ToChoose],
    requests: int,
    dtype: Dtypes,
    progress: Progress | None,
    given: Sequence[tuple[str, Request]],
    asked: Asked,
) -> list[SignatureCheck]:
    """Compare the trained model with its export; raises `CheckFailedError` where they differ by more than they may.

    Rows that were rounded change answers, by how much depends on the model. So what they may change is computed: an
    export with rows as they were answers as the model does, and one with the rounded rows as plain numbers as the
    export does, each to the bit.
    """
    export = open_checkpoint(folder)

    def compare(checkpoint: Checkpoint = model.checkpoint, **how: Any) -> list[SignatureCheck]:
        graph = model.graph if checkpoint is model.checkpoint else None
        return check_model(checkpoint, export, requests, graph=graph, given=given, **how)

    if not any(one.rounding for one in exports):
        checks = compare(asked=asked)
        expect_answers(checks, f"exporting '{model.folder}'")
        return _expect_same(model, checks, exports, "the export answers otherwise than the model", compare)
    with tempfile.TemporaryDirectory(dir=folder, prefix="check-") as beside:
        plain, rounded = Path(beside) / "plain", Path(beside) / "rounded"
        for place, rows in ((plain, None), (rounded, dtype)):
            place.mkdir()
            tables = {prefix: model.table(prefix, number) for number, prefix in enumerate(model.readers)}
            _write(model, place, tables, choices, None, rows, progress, as_floats=True)
        # The keys of all three are the export's.
        as_it_was = partial(compare, run=plain)
        same = as_it_was()
        expect_answers(same, f"exporting '{model.folder}'")
        otherwise = "with its rows as they were, the export answers otherwise than the model"
        _expect_same(model, same, exports, otherwise, as_it_was)
        decode = partial(compare, export, run=rounded)
        _expect_same(model, decode(), [], "the export answers otherwise than its rows would as plain numbers", decode)
    return compare(asked=asked)


def unasked_tables(
    exports: Sequence[TableExport], checks: Sequence[SignatureCheck], unasked: Iterable[str]
) -> list[str]:
    """Return of which tables nothing was compared: those of `unasked`, and those all of whose rows were cut, if no
    answer differs for that."""
    without_rows = [one.name for one in exports if one.cut and not one.rows]
    lost = [] if any(one.differing for one in checks) else without_rows
    return sorted({*unasked, *lost})


def _expect_same(
    model: TrainedModel,
    checks: list[SignatureCheck],
    exports: Sequence[TableExport],
    otherwise: str,
    again: Callable[[], list[SignatureCheck]],
) -> list[SignatureCheck]:
    """Raise `CheckFailedError` where answers differ, unless rows of `exports` were cut, or nothing but TensorFlow's
    optimizer of graphs makes them differ, which is marked in what is returned."""
    if any(export.cut for export in exports):
        return checks
    checks = mark_reordered(checks, again)
    if wrong := wrong_answers(checks):
        raise CheckFailedError(f"exporting '{model.folder}': {otherwise}, so nothing was written: {'; '.join(wrong)}")
    return checks


def choose_for_model(
    checkpoint: Checkpoint,
    *,
    policy: Policy | None = None,
    keep_zeros: bool = False,
    dtype: Dtypes = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
    graph: TrainedGraph | None = None,
) -> list[Choice]:
    """Decide which rows `export_model` would keep, and write nothing; arguments and errors are its own."""
    model = TrainedModel(checkpoint, graph)
    model.rewritten({prefix: model.table(prefix, number) for number, prefix in enumerate(model.readers)})
    for prefix, reader in model.readers.items():
        NarrowTable(reader, dtype_of(reader.schema, dtype)).beside(model.initial[prefix][1], KEYS_BEGIN_WITH)
    chosen = model.choose(policy, keep_zeros=keep_zeros, dtype=dtype, memory=memory, progress=progress, once=None)
    return [choice for choice in chosen if isinstance(choice, Choice)]


def _all_restored(graphs: Sequence[MetaGraph], tracked: bytes, known: Mapping[str, TableReader]) -> list[Restored]:
    """What the tables of graphs, and of their objects, are restored from."""
    restored = [one for meta in graphs for one in restored_when_served(meta)]
    for meta in graphs:
        there = {one.prefix for one in restored}
        for prefix, _ in object_prefixes(meta.objects, tracked, known).values():
            if prefix not in there:
                restored.append(Restored(prefix, 0, 1, ""))
    return restored


class TrainedModel:
    """A SavedModel to be rewritten, or a checkpoint with the graph that it was trained by.

    Attributes:
        checkpoint, folder, graph: what it was opened as, where it is, and the graph of a checkpoint.
        variables: the dense variables that it restores.
        readers: its tables, by what their tensors begin with.
        parts: how many parts the graph has of each.
        initial: how the keys of each begin, and rows for that.
    """

    def __init__(self, checkpoint: Checkpoint, graph: TrainedGraph | None) -> None:
        self.folder, self.checkpoint, self.graph = Path(checkpoint.path), checkpoint, graph
        self._file = self.folder / _MODEL_FILE if graph is None else graph.file
        tensors = None if graph is None else graph.tensors
        try:
            self._fields = split(read_bytes(self._file) if graph is None else graph.saved_model)
            self._graphs = messages(self._fields, 2)
            decoded = [MetaGraph.decode(data) for data in self._graphs]
            if graph is None and not any(meta.objects for meta in decoded):
                tensors = frozenset().union(*map(restore_what_is_served, decoded))
                self._graphs = [meta.encode() for meta in decoded]
            elif graph is None:
                self._graphs = [
                    meta.encode() if read_what_is_restored(meta) else data
                    for meta, data in zip(decoded, self._graphs, strict=True)
                ]
        except OSError as error:
            raise BadInputError(f"reading '{self._file}': {error.strerror or error}") from error
        except DAMAGED as error:
            raise malformed(self._file, error, "model") from error
        self.variables = [one for one in checkpoint.variables if tensors is None or one.name in tensors]
        self._tracked = self._object_graph()
        by_prefix = {prefix: reader for reader in checkpoint.tables.values() for prefix in _prefixes(reader)}
        try:
            restored = _all_restored(decoded, self._tracked, by_prefix)
        except DAMAGED as error:
            raise malformed(self._file, error, "model") from error
        self._same: dict[str, str] = {}
        """What the tensors of a part begin with -> those of the first part, by which the table is known here."""
        self.readers: dict[str, TableReader] = {}
        self.parts: dict[str, int] = {}
        self.initial: dict[str, tuple[InitialRows, Array]] = {}
        begins = any(_asks_for_initial(meta) for meta in decoded) or (
            any(one.initializer for one in restored) and any(_answers_begin(meta) for meta in decoded)
        )
        self._not_zeros: set[int] = set()
        self._tells_zeros = begins or any(_asks_what_is_there(meta) for meta in decoded)
        for one in restored:
            if one.prefix not in by_prefix:
                continue
            reader = by_prefix[one.prefix]
            prefixes = _prefixes(reader)
            first = prefixes[0]
            self._same.update(dict.fromkeys(prefixes, first))
            if first in self.readers:
                continue
            _check_servable(reader, self.folder)
            self.readers[first] = reader
            self.parts[first] = one.parts
            nothing = InitialRows(), np.zeros((1, reader.dim), reader.value_dtype)
            self.initial[first] = initial_rows(reader, _fields_of(one.initializer)) if begins else nothing
        if graph is not None:
            return  # what is served of a graph may need no table
        if not checkpoint.tables:
            raise BadInputError(f"exporting '{self.folder}': it has no key-value table; see `kvtools inspect`")
        if not self.readers:
            raise BadInputError(
                f"exporting '{self.folder}': its graph restores none of the {len(checkpoint.tables)} tables in its"
                " variables; export its tables alone with --table NAME"
            )

    def _object_graph(self) -> bytes:
        if self.graph is not None or not any(variable.name == OBJECT_GRAPH for variable in self.checkpoint.bookkeeping):
            return b""
        chunk = next(self.checkpoint.read_variable(OBJECT_GRAPH))
        return bytes(chunk.reshape(-1)[0])

    def choose(
        self,
        policy: Policy | None,
        *,
        keep_zeros: bool,
        dtype: Dtypes,
        memory: int,
        progress: Progress | None,
        once: Index | None,
    ) -> list[Choice | ToChoose]:
        """Decide which rows of each table are kept; see `kvtools.export.choices_to_write`."""
        if not self.readers:
            return []
        return choices_to_write(
            self.checkpoint,
            tables=[reader.schema.name for reader in self.readers.values()],
            policy=policy,
            keep_zeros=keep_zeros or self._tells_zeros,
            dtype=dtype,
            memory=memory,
            progress=progress,
            once=once,
        )

    def unused(self) -> list[str]:
        """Say which tables and dense variables nothing that is served uses, a sentence each."""
        used = {reader.schema.name for reader in self.readers.values()}
        reasons = [
            f"table '{name}': nothing that is served uses it" for name in self.checkpoint.tables if name not in used
        ]
        unused = [one for one in self.checkpoint.variables if one not in self.variables]
        if unused:
            size = sum(one.bytes for one in unused)
            many = len(unused) > 1
            reasons.append(
                f"{counted(len(unused), 'dense variable')}, {size} bytes: nothing that is served uses "
                f"{'them' if many else 'it'}"
            )
        return reasons

    def warnings(self, exports: Sequence[TableExport]) -> list[str]:
        """Say of which tables keys that were cut are not answered with zeros."""
        begun = {
            reader.schema.name
            for number, (prefix, reader) in enumerate(self.readers.items())
            if number in self._not_zeros and self._begins_otherwise(prefix)
        }
        return [
            f"table '{export.name}': a key that was cut is answered with the values that new keys begin with, which the"
            " model asks for, and not with zeros"
            for export in exports
            if export.cut and export.name in begun
        ]

    def _begins_otherwise(self, prefix: str) -> bool:
        """Whether the rows of missing keys may be others than zeros: TFRA's lookups are given them."""
        begin, rows = self.initial[prefix]
        return "tfra" in self.readers[prefix].schema.metadata or begin.stored != 1 or bool(rows.any())

    def table(self, prefix: str, number: int, dtype: Dtypes = None) -> StockTable:
        """Return a table as far as it is known before its rows are written, as `dtype`."""
        schema = self.readers[prefix].schema
        if schema.key_dtype not in KEY_DTYPES or schema.value_dtype not in VALUE_DTYPES:
            raise BadInputError(
                f"exporting '{self.folder}': table '{schema.name}' has {schema.key_dtype} keys and {schema.value_dtype}"
                f" values; a model holds keys of {', '.join(KEY_DTYPES)} and values of {', '.join(VALUE_DTYPES)}"
            )
        index = index_name()
        parts = (schema.rows,) + (0,) * (self.parts[prefix] - 1)
        initial = self.initial[prefix][0]
        stored = dtype_of(schema, dtype)
        return StockTable(
            number,
            schema.name,
            schema.key_dtype,
            schema.value_dtype,
            schema.dim,
            parts,
            initial,
            index,
            rows_as="" if stored is None or stored == schema.value_dtype else stored,
        )

    def rewritten(self, tables: Mapping[str, StockTable]) -> tuple[bytes, bytes, list[str]]:
        """Return the model as it is with these tables, the objects of its checkpoint, and what was left out."""
        graphs: list[bytes] = []
        tracked = self._tracked
        reasons = self.unused()
        kept = frozenset([OBJECT_GRAPH, *(variable.name for variable in self.variables)])
        by_prefix = Tables({prefix: tables[first] for prefix, first in self._same.items()}, kept)
        for data in self._graphs:
            try:
                changed = rewrite_meta_graph(data, by_prefix, self._tracked, is_stock)
            except UnsupportedOperation as error:
                raise self._refused(error) from error
            except DAMAGED as error:
                raise malformed(self._file, error, "model") from error
            graphs.append(changed.meta_graph)
            self._not_zeros |= changed.not_zeros
            tracked = changed.tracked or tracked
            reasons += [f"function '{name}': {_told(error)}" for name, error in changed.left_out.items()]
        encoded = join([*without(self._fields, 2), *((2, 2, graph) for graph in graphs)])
        for function, node in foreign_nodes(encoded):
            raise self._refused(UnsupportedOperation(node, function, "it is none of stock TensorFlow's"))
        return encoded, tracked, reasons

    def cut(
        self, names: Mapping[str, str], unique: str, part_rows: Mapping[str, tuple[int, ...]]
    ) -> tuple[bytes, list[CutSignature]]:
        """Return the model cut at its lookups, whose rows are given to it, and its signatures; see `cut_model`.

        It is the graph that is served, without what TensorFlow 2 needs to make Python's objects of it. `part_rows` are
        the rows of each part of tables, by `readers`' keys, where they are known.
        """
        tables: dict[str, GivenTable] = {}
        for number, prefix in enumerate(self.readers):
            known = self.table(prefix, number)
            fields = {each.name: getattr(known, each.name) for each in dataclasses.fields(known)}
            fields["part_rows"] = part_rows.get(prefix, known.part_rows)
            tables[prefix] = GivenTable(**fields, begins=self.initial[prefix][1])
        kept = frozenset(variable.name for variable in self.variables)
        by_prefix = Tables({prefix: tables[first] for prefix, first in self._same.items()}, kept)
        try:
            tags = [MetaGraph.decode(data).tags for data in self._graphs]
            data = self._graphs[next((at for at, each in enumerate(tags) if "serve" in each), 0)]
            rewritten = rewrite_meta_graph(join(without(split(data), _OBJECTS)), by_prefix, b"", is_stock)
            graph, signatures = cut_model(
                rewritten.meta_graph, {table.number: table for table in tables.values()}, names, unique
            )
        except UnsupportedOperation as error:
            raise self._refused(error) from error
        except CannotCut as error:
            where = f"node '{error.node}'" + (f" of function '{error.function}'" if error.function else "")
            raise BadInputError(
                f"splitting '{self.folder}': the lookup in table '{error.table}' ({where}) cannot be cut out:"
                f" {error.reason}; export the model whole, with --savedmodel"
            ) from error
        except DAMAGED as error:
            raise malformed(self._file, error, "model") from error
        self._not_zeros |= rewritten.not_zeros
        encoded = join([*without(self._fields, 2), (2, 2, graph)])
        for function, node in foreign_nodes(encoded):
            raise self._refused(UnsupportedOperation(node, function, "it is none of stock TensorFlow's"))
        return encoded, signatures

    @property
    def tells_zeros(self) -> bool:
        """Whether the model can tell a row of zeros from none."""
        return self._tells_zeros

    def _refused(self, error: UnsupportedOperation) -> KvtoolsError:
        told = f"exporting '{self.folder}': {_told(error)}"
        if error.node.op in OPERATIONS:
            return BadInputError(told)  # it is no operation that is unknown, but what it does there
        done = ", ".join(sorted({*OPERATIONS, *_ALSO_DONE}.difference(REFUSED)))
        return BadInputError(f"{told}; those that can be rewritten are {done}")


def _told(error: UnsupportedOperation) -> str:
    where = f"node '{error.node.name}'" + (f" of function '{error.function}'" if error.function else "")
    return f"operation '{error.node.op}' ({where}) cannot be rewritten: {error.reason}"


def _too_new(saved_model: bytes) -> list[str]:
    """Say what keeps an older TensorFlow from opening a model."""
    told: list[str] = []
    for meta in map(MetaGraph.decode, messages(split(saved_model), 2)):
        saved_by = f"; {meta.tensorflow} saved the model" if meta.tensorflow else ""
        for what, node in not_in_oldest(node for _, node in meta.graph.all_nodes()).items():
            told.append(
                f"TensorFlow {OLDEST} has no {what} (node '{node}'): a later one is needed where the export is"
                f" served{saved_by}"
            )
    return told


def _prefixes(reader: TableReader) -> list[str]:
    """What a table's tensors begin with, as the operation says that restores it; of TFRA's, those of each part."""
    schema = reader.schema
    path, tfra = schema.metadata.get("object_path"), schema.metadata.get("tfra")
    if isinstance(tfra, dict):
        place, parts = str(tfra.get("places", {}).get("", "")), range(schema.parts)
        if "tables_of_" in place.rpartition("/")[2]:
            return [f"{place}/{part}/.ATTRIBUTES/table" for part in parts]
        # By tensors, or by the files beside the checkpoint.
        return [*(f"{place}_mht_{part + 1}of{schema.parts}" for part in parts), place]
    if not isinstance(path, str):
        return [schema.name]
    return [f"{path}/.ATTRIBUTES/kv" if path else ".ATTRIBUTES/kv"]


def _fields_of(initializer: str) -> Mapping[str, object]:
    found = json.loads(initializer) if initializer else {}
    return found if isinstance(found, dict) else {}


def _asks_for_initial(meta: MetaGraph) -> bool:
    return any(node.op in OPERATIONS and node.attrs.text("mode") == "initial" for node in served_nodes(meta))


def _answers_begin(meta: MetaGraph) -> bool:
    return any(node.op in ANSWERS_BEGIN for _, node in meta.graph.all_nodes())


def _check_servable(reader: TableReader, folder: Path) -> None:
    """Raise `BadInputError` where a table is not what a model would look up."""
    schema = reader.schema
    refuse_increments(f"exporting '{folder}'", [reader])
    if any(extra.name == "blacklist" for extra in schema.extras):
        banned = np.intersect1d(reader.extra("blacklist"), reader.all_keys())
        if len(banned):
            raise BadInputError(
                f"exporting '{folder}': {len(banned)} keys of table '{schema.name}', such as {banned[0]}, are in its"
                " blacklist, which TFPlus answers with zeros, and have rows; `kvtools clip --drop-keys` them first"
            )


def _asks_what_is_there(meta: MetaGraph) -> bool:
    """Whether a row of zeros is not the same as none."""
    return any(node.op in _TELL_ZEROS for node in served_nodes(meta))


def copy_assets(files: Mapping[str, Path], folder: Path) -> None:
    """Copy the assets of a graph, by their names, to a model's folder."""
    for name, file in files.items():
        (folder / "assets").mkdir(exist_ok=True)
        with stored(file).held():
            shutil.copyfile(file, folder / "assets" / name)


def copy_rest(source: Path, folder: Path) -> None:
    """Assets and what else lies in the model's folder; not who may write to it."""
    for entry in sorted(source.rglob("*")):
        place = entry.relative_to(source)
        if place.parts[0] in _NOT_COPIED:
            continue
        if entry.is_dir():
            (folder / place).mkdir()
        else:
            with stored(entry).held():
                shutil.copyfile(entry, folder / place)
