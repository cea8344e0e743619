"""What a model can be asked, the same for every protocol: signatures with named inputs and outputs.

Each table of a model is a signature, named as `kvtools export` names it in a SavedModel, with the same input, output
and values: `ids` (int64 of any shape; a uint64 key as its bits) to `embeddings` (ids.shape + [dim]; 16-bit and smaller
types as float32) and `found` (bool, ids.shape). The table's own name is taken, too. `serving_default` is that of the
only table, or else looks up in all of them: `user_ids` to `user_embeddings` and `user_found`, and so on.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvtools.dialects.savedmodel import MANIFEST
from kvtools.export import signature_names
from kvtools.server.answer import TableCount
from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog, ServedVersion, UnknownModelError, UnknownVersionError
from kvtools.server.protocol_error import ProtocolError, invalid, of_request
from kvtools.server.recent_keys import RecentKeys
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings
from kvtools.server.store import StoredTable

Array = npt.NDArray[Any]
DEFAULT = "serving_default"
STRING = np.dtype(object)  # an array of bytes objects
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# NumPy's name, TensorFlow's in DataType, TensorFlow's in prose, the Open Inference Protocol's
_TYPES = (
    ("float32", "DT_FLOAT", "float", "FP32"),
    ("float64", "DT_DOUBLE", "double", "FP64"),
    ("int32", "DT_INT32", "int32", "INT32"),
    ("uint8", "DT_UINT8", "uint8", "UINT8"),
    ("int16", "DT_INT16", "int16", "INT16"),
    ("int8", "DT_INT8", "int8", "INT8"),
    ("object", "DT_STRING", "string", "BYTES"),
    ("int64", "DT_INT64", "int64", "INT64"),
    ("bool", "DT_BOOL", "bool", "BOOL"),
    ("bfloat16", "DT_BFLOAT16", "bfloat16", "BF16"),
    ("uint16", "DT_UINT16", "uint16", "UINT16"),
    ("float16", "DT_HALF", "half", "FP16"),
    ("uint32", "DT_UINT32", "uint32", "UINT32"),
    ("uint64", "DT_UINT64", "uint64", "UINT64"),
)
_DTYPES = {name: BFLOAT16 if name == "bfloat16" else np.dtype(name) for name, *_ in _TYPES}
TENSORFLOW_TYPES: dict[np.dtype[Any], str] = {_DTYPES[name]: enum for name, enum, _, _ in _TYPES}
TYPE_WORDS: dict[np.dtype[Any], str] = {_DTYPES[name]: word for name, _, word, _ in _TYPES}
INFERENCE_TYPES: dict[np.dtype[Any], str] = {_DTYPES[name]: word for name, _, _, word in _TYPES}
FROM_TENSORFLOW = {enum: dtype for dtype, enum in TENSORFLOW_TYPES.items()}
FROM_INFERENCE = {word: dtype for dtype, word in INFERENCE_TYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of an input or output: -1 for a size that varies, None for any shape; `tensor` is its name in
    TensorFlow's graph. `dim` is its last size, where that is known of any shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    tensor: str = ""
    dim: int | None = None


class Signature(Protocol):
    """One thing that a model can be asked; for any number of threads."""

    @property
    def name(self) -> str:
        """Its name in the model."""
        ...

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """What it takes, all of it."""
        ...

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """What is answered unless outputs are named."""
        ...

    @property
    def method_name(self) -> str:
        """TensorFlow Serving's word for how it is asked."""
        ...

    @property
    def tables(self) -> tuple[str, ...] | None:
        """The tables whose rows it reads; None: that is not known."""
        ...

    def takes(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Tell whether the input `name` may have this type."""
        ...

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str], settings: Settings) -> dict[str, Array]:
        """Answer; `inputs` and `outputs` have been checked against the signature. Raises `ProtocolError`."""
        ...


@dataclass(frozen=True)
class TableSignature:
    """A table as a signature."""

    name: str
    table: StoredTable = field(repr=False)
    recent: RecentKeys | None = field(default=None, repr=False)
    method_name: str = "tensorflow/serving/predict"

    @cached_property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """`ids`."""
        return {"ids": TensorSpec(np.dtype(np.int64), None, f"{self.name}_ids:0")}

    @cached_property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """`embeddings` and `found`, as `kvtools export` has them."""
        return {
            "embeddings": TensorSpec(self.dtype, None, f"{self.name}_embeddings:0", self.table.schema.dim),
            "found": TensorSpec(np.dtype(np.bool_), None, f"{self.name}_found:0"),
        }

    @property
    def tables(self) -> tuple[str, ...]:
        """The table that is looked up in."""
        return (self.table.schema.name,)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of the answer."""
        values, _ = self._look_up(np.empty(0, self.table.schema.key_dtype))
        return values.dtype if values.dtype.itemsize >= 4 else np.dtype(np.float32)

    def takes(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Ids are int64; the table's own key type is as clear."""
        return dtype in (np.dtype(np.int64), np.dtype(self.table.schema.key_dtype))

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str], settings: Settings) -> dict[str, Array]:
        """Look `ids` up; what a missing one gets is `settings.missing`'s to say."""
        ids, dim = inputs["ids"], self.table.schema.dim
        check_count(ids.size, settings, dim)
        flat = np.require(ids, None, ["C", "A"]).reshape(-1)  # what lies in a message may be at odd addresses
        key_dtype = np.dtype(self.table.schema.key_dtype)
        outside = None
        if flat.dtype != key_dtype:
            if key_dtype == np.uint64:
                flat = flat.view(np.uint64)
            else:  # int32: a key that it cannot hold is in no table of it
                narrow = flat.astype(key_dtype)
                outside = narrow != flat
                flat = narrow
        values, found = self._look_up(flat)
        if outside is not None and outside.any():
            values, found = values.copy(), found & ~outside
            values[outside] = 0
        if settings.missing != "zeros" and not found.all():
            values = self._without_missing(values, found, ids, settings)
        if self.recent is not None:
            self.recent.note(flat)
        answer: dict[str, Array] = {}
        for name in outputs:
            if name == "found":
                answer[name] = found.reshape(ids.shape)
            else:
                rows = values.astype(np.float32) if values.dtype.itemsize < 4 else values
                answer[name] = rows.reshape(*ids.shape, dim)
        return answer

    def _look_up(self, keys: Array) -> tuple[Array, Array]:
        try:
            return self.table.lookup(keys)
        except RequestError as error:  # rows that lie elsewhere, which is not there; a file that was cut
            raise of_request(error) from None

    def _without_missing(self, values: Array, found: Array, ids: Array, settings: Settings) -> Array:
        name = self.table.schema.name
        if settings.missing == "error":
            key = ids.reshape(-1)[int(np.argmin(found))]
            raise ProtocolError("NOT_FOUND", f"table '{name}' has no row for key {key}")
        row = None if self.table.table is None else self.table.table.default_row
        if row is None:
            raise ProtocolError("FAILED_PRECONDITION", f"table '{name}' has no default row, and the server wants one")
        values[~found] = row
        return values


@dataclass(frozen=True)
class AllTables:
    """All tables of a model as one signature: `of` is that of each, by the name that goes before its inputs' and
    outputs'."""

    of: Mapping[str, TableSignature] = field(repr=False)
    name: str = DEFAULT
    method_name: str = "tensorflow/serving/predict"

    @cached_property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """`user_ids` for table `user`, and so on."""
        return {f"{name}_ids": _in_default(one.inputs["ids"], f"{name}_ids") for name, one in self._sorted()}

    @cached_property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """`user_embeddings` and `user_found`, and so on."""
        return {
            f"{name}_{output}": _in_default(spec, f"{name}_{output}")
            for name, one in self._sorted()
            for output, spec in one.outputs.items()
        }

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """The tables that are looked up in."""
        return tuple(one.table.schema.name for one in self.of.values())

    def takes(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Ids are of the types that the table's own signature takes."""
        return self.of[name.removesuffix("_ids")].takes("ids", dtype)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str], settings: Settings) -> dict[str, Array]:
        """Look the ids of each table up in it."""
        return self.run_and_count(inputs, outputs, settings, [])

    def run_and_count(
        self,
        inputs: Mapping[str, Array],
        outputs: Sequence[str],
        settings: Settings,
        counts: list[TableCount],
        model: str = "",
    ) -> dict[str, Array]:
        """Answer, and add to `counts` what was looked up."""
        check_count(sum(ids.size for ids in inputs.values()), settings)
        numbers = sum(inputs[f"{name}_ids"].size * one.table.schema.dim for name, one in self.of.items())
        if numbers > settings.max_values:
            raise ProtocolError(
                "INVALID_ARGUMENT",
                f"got ids of {numbers} numbers, expected at most {settings.max_values} numbers in an answer;"
                " send several requests",
                status=413,
            )
        rows: dict[str, Array] = {}
        for name, one in self.of.items():
            answer = one.run({"ids": inputs[f"{name}_ids"]}, ["embeddings", "found"], settings)
            found = answer["found"]
            missing = found.size - int(np.count_nonzero(found))
            counts.append(TableCount(one.table.schema.name, found.size, missing, model))
            rows |= {f"{name}_{output}": array for output, array in answer.items()}
        return {name: rows[name] for name in outputs}

    def _sorted(self) -> list[tuple[str, TableSignature]]:
        return sorted(self.of.items(), key=lambda item: f"{item[0]}_ids")  # as TensorFlow sorts them


def _in_default(spec: TensorSpec, name: str) -> TensorSpec:
    return dataclasses.replace(spec, tensor=f"{DEFAULT}_{name}:0")


def ask(
    signature: Signature, inputs: Mapping[str, Array], outputs: Sequence[str], settings: Settings, caller: Caller
) -> dict[str, Array]:
    """Answer a caller who may ask this; `inputs` and `outputs` have been checked. Raises `ProtocolError`."""
    caller.looks_up(signature.tables)
    if not isinstance(signature, TableSignature):
        if counting := getattr(signature, "run_and_count", None):
            return counting(inputs, outputs, settings, caller.counts, caller.model)  # type: ignore[no-any-return]
        return signature.run(inputs, outputs, settings)
    table = signature.table.schema.name
    answer = signature.run(inputs, list(dict.fromkeys([*outputs, "found"])), settings)
    found = answer["found"]
    caller.counts.append(TableCount(table, found.size, found.size - int(np.count_nonzero(found)), caller.model))
    return {name: answer[name] for name in outputs}


def check_count(count: int, settings: Settings, dim: int = 1) -> None:
    """Raise a `ProtocolError` if a request asks for more keys, or for more numbers, than the server allows."""
    if count > settings.max_keys:
        raise ProtocolError(
            "INVALID_ARGUMENT",
            f"got {count} ids, expected at most {settings.max_keys}; send several requests",
            status=413,
        )
    if count * dim > settings.max_values:
        raise ProtocolError(
            "INVALID_ARGUMENT",
            f"got {count} ids of {dim} numbers each, expected at most {settings.max_values} numbers in an answer;"
            " send several requests",
            status=413,
        )


_SMALL_NUMBERS = 32_768  # bytes of a request times numbers of a row

# Signatures of tables hold tables and not the store, which would never go otherwise.
_signatures: weakref.WeakKeyDictionary[Any, dict[str, Signature]] = weakref.WeakKeyDictionary()
_widest: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def signatures(version: ServedVersion) -> Mapping[str, Signature]:
    """Return what a version can be asked, by name: the names that are listed, then those that are taken, too."""
    store = version.store
    own: Mapping[str, Signature] | None = getattr(store, "signatures", None)
    if own:
        return own  # a whole model
    known = _signatures.get(store)
    if known is None:
        known = _table_signatures(store.tables, version.recent)
        if of_model := getattr(store, "model_signatures", None):  # in two halves: its own names count
            own_names = of_model(version.recent)
            known = own_names | {name: one for name, one in known.items() if name not in (*own_names, DEFAULT)}
        _signatures[store] = known
    return known


def numbers_at_once(version: ServedVersion) -> int:
    """Return the numbers in the widest row of a version whose rows are all in memory; 0 if anything is waited for."""
    store = version.store
    if not store.warm or hasattr(store, "model_signatures"):  # which TensorFlow runs
        return 0
    widest = _widest.get(store)
    if widest is None:
        tables = store.tables.values()
        here = all(table.table is not None for table in tables)
        widest = _widest[store] = max((table.schema.dim for table in tables), default=0) if here else 0
    return widest


def is_small(version: ServedVersion, bytes_in: int) -> bool:
    """Tell whether a request takes so little time that no thread need be asked: a few ids, and rows in memory."""
    widest = numbers_at_once(version)
    return widest > 0 and bytes_in * widest <= _SMALL_NUMBERS  # an id is two bytes at least, its comma counted


def listed(version: ServedVersion) -> dict[str, Signature]:
    """Return the signatures that a SavedModel of the same tables would have, by name."""
    return {name: signature for name, signature in signatures(version).items() if name in (signature.name, DEFAULT)}


def _table_signatures(tables: Mapping[str, StoredTable], recent: Mapping[str, RecentKeys]) -> dict[str, Signature]:
    names = signature_names(list(tables))
    found: dict[str, Signature] = {
        names[table]: TableSignature(names[table], tables[table], recent.get(table)) for table in tables
    }
    if len(tables) == 1:
        found.setdefault(DEFAULT, next(iter(found.values())))
    elif tables:
        found[DEFAULT] = AllTables(dict(found))  # type: ignore[arg-type]
    for table, name in names.items():
        if table != DEFAULT:
            found.setdefault(table, found[name])
    return found


def served_version(
    catalog: Catalog, model: str, *, number: int | None = None, label: str | None = None
) -> ServedVersion:
    """Return a version of a model; raises a `ProtocolError` in TensorFlow Serving's words."""
    try:
        if label is not None and label not in catalog.labels(model):
            raise invalid(f"Unrecognized servable version label: {label}")
        return catalog.version(model, number=number, label=label)
    except (UnknownModelError, UnknownVersionError):
        wanted = f"Latest({model})" if number is None else f"Specific({model}, {number})"
        raise ProtocolError("NOT_FOUND", f"Servable not found for request: {wanted}") from None


def signature_of(version: ServedVersion, name: str, *, code: str = "INVALID_ARGUMENT") -> Signature:
    """Return a signature by name ('': the default one); raises a `ProtocolError` that lists what there is."""
    known = signatures(version)
    try:
        return known[name or DEFAULT]
    except KeyError:
        there = ", ".join(f'"{signature}"' for signature in list(listed(version))[:20])
        trained = (version.path / "saved_model.pb").is_file() and not (version.path / MANIFEST).is_file()
        hint = (
            "; what else a trained model answers is served once `kvtools export --savedmodel` wrote it"
            if trained
            else ""
        )
        raise ProtocolError(
            code,
            f'Serving signature name: "{name or DEFAULT}" not found in signature def; the model has {there}:'
            f" name one as signature_name{hint}",
        ) from None


def defaults_of(signature: Signature) -> Mapping[str, Array]:
    """Return what inputs are that a request leaves out: those of a SavedModel's signature that have values of their
    own."""
    return getattr(signature, "defaults", {})


def check_inputs(signature: Signature, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return `inputs` and those that may be left out; raises a `ProtocolError` unless they are those of the signature,
    in its types and shapes."""
    inputs = {**defaults_of(signature), **inputs}
    got, wanted = sorted(inputs), sorted(signature.inputs)
    if got != wanted:
        extra, missing = sorted(set(got) - set(wanted)), sorted(set(wanted) - set(got))
        raise invalid(
            f"input size does not match signature: {len(got)}!={len(wanted)} len({_names(got)}) !="
            f" len({_names(wanted)}). Sent extra: {_names(extra)}. Missing but required: {_names(missing)}."
        )
    for name, spec in signature.inputs.items():
        array = inputs[name]
        if not signature.takes(name, array.dtype):
            raise invalid(f"input '{name}': expected {TYPE_WORDS[spec.dtype]}, got {TYPE_WORDS[array.dtype]}")
        if spec.shape is not None and (
            len(spec.shape) != array.ndim
            or any(size not in (-1, got_size) for size, got_size in zip(spec.shape, array.shape, strict=True))
        ):
            raise invalid(f"input '{name}': expected shape {list(spec.shape)}, got {list(array.shape)}")
    return inputs


def chosen_outputs(signature: Signature, names: Sequence[str]) -> list[str]:
    """Return which outputs to answer with: `names`, or the signature's own; raises a `ProtocolError`."""
    if not names:
        return list(signature.outputs)
    for place, name in enumerate(names):
        if name not in signature.outputs:
            raise invalid(
                f"output tensor alias not found in signature: {name} Outputs expected to be in the set"
                f" {_names(list(signature.outputs))}."
            )
        if name in names[:place]:
            raise invalid(f"duplicate output tensor alias: {name}")
    return list(names)


def _names(names: Sequence[str]) -> str:
    return "{" + ",".join(names[:20]) + "}"
