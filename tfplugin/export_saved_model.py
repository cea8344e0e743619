"""`export_saved_model`: a model that is being trained, as a SavedModel of stock TensorFlow operations."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.saved_model import save_context

from tfplugin import ranks, session_model
from tfplugin.keras_inputs import first_holder, given_as
from tfplugin.keras_models import held_by, signatures_are_named
from tfplugin.kv_variable import KvVariable
from tfplugin.partitioned_kv_variable import put_together

if TYPE_CHECKING:
    from kvtools.clip import Criteria
    from kvtools.clip_policy import Policy
    from kvtools.export_model import ModelExport

_log = logging.getLogger("tfplugin")

_DEFAULT = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
_INTERNAL = "__saved_model"
_IN_PYTHON = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\badd --force\b", "say force=True"),
        (r"(?<=\s)--force\b", "force=True"),
        (r"\bof a \.meta, --read-only\b", "of a session, read_only=True"),
        (r"(?<=\bgot )--(dtype|index) ([^\s,]*)(?=, expected)", r'\1="\2"'),
        (r"(?<=\bgot )--warmup (-?\d+)", r"warmup=\1"),
        (r"; export its tables alone with --table NAME", ""),
    )
]
"""What errors of kvtools call the command line's options, and what these are in a call."""
_FUNCTIONS = (tf.types.experimental.GenericFunction, tf.types.experimental.ConcreteFunction)


@contextlib.contextmanager
def _in_words_of_python() -> Iterator[None]:
    """Has errors of kvtools name arguments, and not options of the command line."""
    from kvtools.errors import KvtoolsError

    try:
        yield
    except KvtoolsError as error:
        told = str(error)
        for pattern, words in _IN_PYTHON:
            told = pattern.sub(words, told)
        error.args = (told,)
        raise


@_in_words_of_python()
def export_saved_model(
    model: Any,
    path: str | os.PathLike[str],
    *,
    signatures: Any = None,
    inputs: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Any] | None = None,
    feed: Mapping[Any, Any] | None = None,
    read_only: bool = False,
    input_signature: Any = None,
    clip: Criteria | Policy | None = None,
    keep_zeros: bool = False,
    dtype: str | Mapping[str, str] | None = None,
    check: int = 0,
    warmup: int | str | os.PathLike[str] | None = None,
    force: bool = False,
    **options: Any,
) -> ModelExport:
    """Writes a model as a SavedModel that stock TensorFlow serves, tables included: ``kvtools export`` within training.

    It is saved to a hidden folder beside `path` and rewritten from there; until it is done that takes the disk of its
    checkpoint, too. Training goes on afterwards from where it was: nothing of tables, slots or steps changes.

    Args:
      model: what is served, one of

        - a model of Keras 3 or tf_keras that has been built. Without `signatures` it becomes what its ``export`` makes:
          the signature ``serving_default``, and in Keras 3 ``serve``, with the model's own inputs;
        - a `tf.Module` or another object that `tf.saved_model.save` takes, and its `signatures`;
        - a `tf.function` with an ``input_signature``, or a concrete function: ``serving_default``;
        - a session of TensorFlow 1, with `inputs` and `outputs`, or `signatures`. What is served of its graph is built
          inside `tfplugin.inference_mode`, or made so by `read_only`.

      path: the folder to write. It appears when it is whole.
      signatures: functions by name, or one for ``serving_default``, as for `tf.saved_model.save`. Of a session
        ``{name: (inputs, outputs)}``.
      inputs, outputs: of a session: the tensors of ``serving_default`` by name.
      feed: of a session: what else `outputs` need, a number, text, True or False for each tensor, such as
        ``{is_training: False}``. They are constants of what is served.
      read_only: of a session: have lookups that insert missing keys, as in training, answer them with zeros.
      input_signature: of a Keras model: what its inputs are, as for its ``export``, where the model does not say. In a
        dictionary one without a name is named by its key.
      clip: which rows to leave out: criteria for all tables, or a policy of criteria by table; see `kvtools.clip`. A
        key that was cut is answered as one that was never there.
      keep_zeros: keep rows of zeros, too.
      dtype: what the rows become, of all tables or by their names: ``"float16"``, ``"bfloat16"``, ``"int8"`` or
        ``"int4"``, which the graph makes floats again; as they are if None.
      check: ask model and export that many random requests of each signature, and compare, before `path` appears.
      warmup: requests that servers warm the model up by: how many random ones of each signature, or a file of them.
      force: replace a SavedModel that is there.
      **options: what else `kvtools.export_model.export_model` takes.

    Returns:
      What became of the tables: rows, bytes, what was left out, and what was compared.

    Raises:
      ValueError: a Keras model that was never built; a function without an ``input_signature``; no signature; a session
        without outputs; tables that are spread over the ranks of Horovod, or another rank than the first.
      TypeError: what is no model; an option that there is not.
      kvtools.errors.BadInputError: an operation that cannot be rewritten, such as a lookup that inserts keys while it
        serves; an output of a session that depends on a placeholder which is neither an input nor fed.
      kvtools.errors.UsageError: an argument has a value that makes no sense.
      kvtools.errors.OutputError: `path` exists, or cannot be written. What stood there stays.
      kvtools.errors.CheckFailedError: the export answers otherwise than the model.

    Example:
      >>> class Scores(tf.Module):
      ...     def __init__(self):
      ...         self.table = tfplugin.get_kv_variable("user", embedding_dim=4)
      ...     @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
      ...     def serve(self, ids):
      ...         return {"scores": tf.reduce_sum(tf.nn.embedding_lookup(self.table, ids), -1)}
      >>> model = Scores()
      >>> export = tfplugin.export_saved_model(model, "models/1", signatures=model.serve)
    """
    from kvtools.clip_policy import Policy
    from kvtools.dialects.detect import open_checkpoint
    from kvtools.errors import KvtoolsError, OutputError, UsageError
    from kvtools.export_model import export_model
    from kvtools.export_warmup import Warmup
    from kvtools.replace_output import check_replaceable, work_folder

    output = Path(path).absolute()
    _check_options(options, export_model)
    if check < 0:
        raise UsageError(f"exporting: got check={check}, expected how many requests to compare, 0 for none")
    _check_rank(model)  # before the place: another rank may be writing it at this moment
    check_replaceable(output, mark="saved_model.pb", force=force)
    policy = clip if clip is None or isinstance(clip, Policy) else Policy.of(clip)
    asked = None if warmup is None else Warmup(warmup if isinstance(warmup, int) else Path(warmup))
    with work_folder(output) as scratch:
        source = scratch / "trained"
        try:
            if feed or read_only:
                _check_fed(model, signatures, outputs)
                trained = session_model.save_graph(model, source, inputs or {}, outputs or {}, feed or {}, read_only)
                options = {**options, "graph": trained}
            else:
                _save(model, source, signatures, inputs, outputs, input_signature)
            return export_model(
                open_checkpoint(source),
                output,
                policy=policy,
                keep_zeros=keep_zeros,
                dtype=dtype,
                check=check,
                warmup=asked,
                force=force,
                source=_called(model),
                **options,
            )
        except KvtoolsError as error:
            # What lay in the hidden folder is gone by then.
            raise type(error)(str(error).replace(f"'{source}'", _called(model))) from error
        except tf.errors.OpError as error:
            if str(scratch) not in str(error.message):
                raise
            raise OutputError(
                f"writing '{output}': saving {_called(model)}: {error.message}; nothing was changed there, make room "
                "or name another place"
            ) from error


def _check_options(options: Mapping[str, Any], export_model: Callable[..., Any]) -> None:
    there = [
        name
        for name, parameter in inspect.signature(export_model).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for name in options:
        if name not in there:
            raise TypeError(f"export_saved_model has no option {name!r}; there are {', '.join(there)}.")


def _called(model: Any) -> str:
    name = getattr(model, "name", None) or getattr(model, "__name__", None)
    return f"{type(model).__name__} '{name}'" if isinstance(name, str) else f"the {type(model).__name__}"


# ---- Ranks -----------------------------------------------------------------------------------------------------------


def _check_rank(model: Any) -> None:
    """Raises where this process has not all that is to be served, or is not the one to write it."""
    if ranks.found().size == 1:
        return
    spread = sorted({part.name for table in _tables_of(model) for part in table._kv_parts if part.ranks > 1})
    if spread:
        raise ValueError(
            f"{_called(model)} looks up key-value variables that are spread over {ranks.size()} ranks "
            f"({', '.join(spread)}), and each rank has its own rows only. Save it with sok.Checkpoint on all ranks; "
            "then, in one process without horovodrun, make the model, restore that, and export it."
        )
    if ranks.rank() != 0:
        raise ValueError(
            f"export_saved_model was called on rank {ranks.rank()}, and one process writes a model: call it on rank 0 "
            "only, as tf.saved_model.save."
        )


def _tables_of(model: Any) -> Iterator[Any]:
    """The tables that can be seen from a model before it is traced."""
    if session_model.is_session(model):
        yield from session_model.tables(model)
    elif isinstance(model, _FUNCTIONS):
        yield from (table for value in _seen_by(model) for table in _trackables(value) if hasattr(table, "_kv_parts"))
    else:
        yield from (table for table in _trackables(model) if hasattr(type(table), "_kv_parts"))


def _trackables(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in _trackables(item)]
    if isinstance(value, dict):
        return [one for item in value.values() for one in _trackables(item)]
    if not isinstance(value, tf.__internal__.tracking.Trackable):
        return []
    return list(tf.train.TrackableView(value).descendants())


# ---- Saving ----------------------------------------------------------------------------------------------------------


def _save(model: Any, folder: Path, signatures: Any, inputs: Any, outputs: Any, input_signature: Any) -> None:
    if session_model.is_session(model):
        session_model.save(model, folder, _of_session(signatures, inputs, outputs))
        return
    if inputs is not None or outputs is not None:
        raise TypeError(
            f"inputs and outputs are the tensors of a session, and {_called(model)} is none: name functions as "
            "signatures."
        )
    keras = _keras_of(model)
    if input_signature is not None and (keras is None or signatures is not None):
        raise TypeError("input_signature is for a Keras model without signatures: a tf.function has one of its own.")
    if keras is not None and not model.built:
        raise ValueError(
            f"{_called(model)} was never built, so its inputs are not known: call it on data once, or train it, before "
            "it is exported."
        )
    if keras is not None and signatures is None:
        _keras_export(model, folder, input_signature)
    elif isinstance(model, _FUNCTIONS):
        if signatures is not None:
            raise TypeError(
                "A function is its own signature: leave signatures out, or give a dictionary and its module."
            )
        tf.saved_model.save(_holding_captures(model), str(folder), signatures={_DEFAULT: model})
    elif isinstance(model, tf.__internal__.tracking.Trackable):
        token = signatures_are_named.set(signatures is not None)
        try:
            tf.saved_model.save(model, str(folder), signatures=signatures)
        finally:
            signatures_are_named.reset(token)
    else:
        raise TypeError(
            f"export_saved_model takes a Keras model, a tf.Module, a tf.function or a session of TensorFlow 1, got "
            f"{type(model).__name__}."
        )
    _check_signatures(model, folder)


def _check_fed(model: Any, signatures: Any, outputs: Any) -> None:
    if not session_model.is_session(model) or signatures is not None or not outputs:
        raise TypeError("feed and read_only are for a session of TensorFlow 1 with inputs and outputs.")


def _of_session(signatures: Any, inputs: Any, outputs: Any) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    found = dict(signatures or {})
    if inputs is not None or outputs is not None:
        found[_DEFAULT] = (inputs or {}, outputs or {})
    if not found or not all(len(given) == 2 and given[1] for given in found.values()):
        raise ValueError(
            "Of a session, say what is served: inputs={name: placeholder} and outputs={name: tensor}, or signatures="
            "{name: (inputs, outputs)}."
        )
    return found


def _check_signatures(model: Any, folder: Path) -> None:
    from kvtools.model_requests import serving_graph

    if all(name.startswith(_INTERNAL) for name in serving_graph(folder).signatures):
        raise ValueError(
            f"{_called(model)} has no signature that could be served: name one, signatures={{'serving_default': "
            "model.serve}, a tf.function with an input_signature."
        )


def _keras_of(model: Any) -> Any:
    """The Keras that a model is of; None for what is no model of Keras."""
    for name in ("keras", "tf_keras"):
        keras = sys.modules.get(name)
        if keras is not None and isinstance(model, keras.Model):
            return keras
    return None


def _warn_of_padding(model: Any) -> None:
    """Keras 3 exports ragged and sparse inputs as dense ones, and says nothing."""
    for reference in getattr(model, "inputs", None) or ():
        kind = next((kind for kind in ("ragged", "sparse") if getattr(reference, kind, False) is True), None)
        said = f"is {kind} in the model" if kind else f"the model was called on {given_as(reference)} ids for"
        layer = first_holder(reference) if kind or given_as(reference) else None
        parts = [] if layer is None else [part for table in held_by(layer) for part in table._kv_parts[:1]]
        unpadded = [repr(part.partitioned_name or part.name) for part in parts if part.policies.padding_key is None]
        if unpadded:
            _log.warning(
                "%s is exported with a dense input '%s', which %s: lists of different lengths have "
                "to be padded, and for %s padding is an id like any other, which counts in a mean. Give the table a "
                "padding_id before it is trained; or export, as signatures=, a function that makes the ragged tensor "
                "of values and row lengths.",
                _called(model),
                reference.name,
                said,
                ", ".join(unpadded),
            )


def _keras_export(model: Any, folder: Path, input_signature: Any) -> None:
    # It prints what it has written, and where.
    options: dict[str, Any] = {"verbose": False} if "verbose" in inspect.signature(model.export).parameters else {}
    if input_signature is not None:
        options["input_signature"] = _named_by_keys(input_signature)
    _warn_of_padding(model)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model.export(str(folder), **options)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        # Keras 3 keeps the shapes that a subclassed model was called with, and no types.
        shapes = getattr(model, "_build_shapes_dict", None)
        took_for = getattr(model, "input_dtype", None)
        told = input_signature is not None or getattr(model, "inputs", None)
        if told or not shapes or str(took_for) not in str(error):
            raise
        raise TypeError(
            f"{_called(model)} does not take {took_for}, which Keras exports the inputs of a subclassed model as: it "
            "keeps their shapes only. Say here what they are, each with its dtype: "
            f"input_signature=[{', '.join(_spec(shape) for shape in shapes.values())}]; or name "
            "signatures={'serving_default': function}, a tf.function with an input_signature."
        ) from error


def _named_by_keys(specs: Any, name: str | None = None) -> Any:
    """Specs of inputs, of which those without a name get their key in a dictionary: the export would number them."""
    if isinstance(specs, Mapping):
        return {key: _named_by_keys(spec, key) for key, spec in specs.items()}
    if type(specs) in (list, tuple):
        return type(specs)(_named_by_keys(spec) for spec in specs)
    if name is None or getattr(specs, "name", name) is not None:
        return specs
    if isinstance(specs, tf.TensorSpec):
        return tf.TensorSpec(specs.shape, specs.dtype, name)
    named = copy.copy(specs)
    named.name = name
    return named


def _spec(shapes: Any, name: str = "") -> str:
    """How the inputs of these shapes would be written, of integers and any number of samples."""
    if isinstance(shapes, Mapping):
        return "{" + ", ".join(f"'{key}': {_spec(shape, key)}" for key, shape in shapes.items()) + "}"
    if all(size is None or isinstance(size, int) for size in shapes):
        named = f", name='{name}'" if name else ""
        return f"keras.InputSpec(shape={(None, *shapes[1:])}, dtype='int64'{named})"
    return "[" + ", ".join(map(_spec, shapes)) + "]"


def _holding_captures(function: Any) -> tf.Module:
    """A module that holds the variables and resources which a function uses; TensorFlow saves no others."""
    if getattr(function, "input_signature", None) is None and not hasattr(function, "captured_inputs"):
        raise ValueError(
            f"{_called(function)} has no input_signature, so its inputs are not known: give tf.function one, or pass "
            "function.get_concrete_function(...)."
        )
    graph = _graph_of(function)
    captured = {id(outer) for outer, inner in graph.captures if inner.dtype == tf.resource}
    module = tf.Module()
    module.held = []
    held: set[int] = set()
    for owner in (*graph.variables, *(one for value in _seen_by(function) for one in _trackables(value))):
        resources = {id(handle) for handle in _handles(owner)} & captured
        # A table in parts is saved as a whole, which may come after its parts, or not be in reach.
        if resources - held or (resources and len(getattr(owner, "_kv_parts", ())) > 1):
            held |= resources
            module.held.append(owner)
    if captured - held:
        raise ValueError(
            f"{_called(function)} uses resources that nothing in its reach holds: pass the object that holds them, and "
            "signatures={'serving_default': function}."
        )
    wholes = {id(part) for owner in module.held for part in getattr(owner, "_kv_parts", ()) if part is not owner}
    alone = [owner for owner in module.held if isinstance(owner, KvVariable) and id(owner) not in wholes]
    module.wholes = [*put_together(alone)]
    return module


def _graph_of(function: Any) -> Any:
    if hasattr(function, "captured_inputs"):
        return function.graph
    # A function of its own, as it is saved: in the cache of the one that trains a trace for serving has no place.
    with save_context.save_context(tf.saved_model.SaveOptions()):
        traced = tf.function(function.python_function, input_signature=function.input_signature)
        return traced.get_concrete_function().graph


def _handles(owner: Any) -> list[Any]:
    parts = getattr(owner, "_kv_parts", None)
    if parts is not None:
        return [part.handle for part in parts]
    found = [getattr(owner, name, None) for name in ("handle", "resource_handle")]
    return [handle for handle in found if handle is not None]


def _seen_by(function: Any) -> Iterator[Any]:
    """What a function refers to: the object that it is a method of, and the variables of its scopes."""
    python = getattr(function, "python_function", None)
    while python is not None:
        owner = getattr(python, "__self__", None)
        if owner is not None:
            target = getattr(owner, "weakrefself_target__", None)
            yield target() if target is not None else owner
        plain = getattr(python, "__func__", python)
        for cell in getattr(plain, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # not set yet
                yield cell.cell_contents
        code = getattr(plain, "__code__", None)
        if code is not None:
            yield from (plain.__globals__[name] for name in code.co_names if name in plain.__globals__)
        python = getattr(python, "__wrapped__", None)
