"""What is no id for the integer inputs of functional models of Keras 3 and tf_keras, in which layers look up tables.

Keras casts what a model is called on to the dtypes of its inputs, and says nothing: a column of ids in which a value is
missing, which pandas keeps as float64, comes as float32 and trains rows of other ids; ids beyond 2^31 for an input of
int32 are cut, and several share a row. A layer sees integers of that dtype only. So it is told here, where an input of
ids leads to a table, and not of other inputs.

Keras 3 also makes a dense tensor of sparse ids for an input that is dense, with zeros or empty strings between them,
which would be ids, too. Layers of ours get them sparse, as those of tf_keras do.

And it takes the values of a dictionary in the order of their names, so that one column more than there are inputs has
each input behind it get the ids of another. They go by their names here, as in tf_keras.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.embedding_layers.built_by_shape import is_building
from tfplugin.embedding_layers.collection import EmbeddingCollectionLayer
from tfplugin.embedding_layers.embedding import EmbeddingLayer, PaddingMask
from tfplugin.keras_hooks import KerasHooks
from tfplugin.keras_models import held_by, is_kept
from tfplugin.wrapped_method import defining_class, wrap_method, wrap_property

#: The inputs of models that are dense, by their layers, and what they were given: "ragged" or "sparse".
_given: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def given_as(reference: Any) -> str | None:
    """Of an input of Keras 3 that is dense: "ragged" or "sparse" where its model was called on such ids."""
    return _given.get(_maker(reference)) if hasattr(reference, "_keras_history") else None


def _check(model: Any, value: Any, reference: Any) -> None:
    """Looks at a `value` for `reference`, an integer input that leads to a table.

    Raises:
      TypeError: `value` has floats.
      tf.errors.InvalidArgumentError: it has integers that the dtype of the input has not; in a graph when that runs.
    """
    dtype = tf.as_dtype(getattr(reference, "dtype", None) or tf.float32)
    if not dtype.is_integer or is_building():
        return
    if not hasattr(value, "dtype") and hasattr(value, "to_numpy"):
        value = value.to_numpy()  # a frame of pandas, whose columns have a dtype each
    got = getattr(value, "dtype", None)
    if got is None:
        return
    floating = _is_floating(got)
    if not floating and not _is_wider(got, dtype):
        return
    layer = first_holder(reference)
    if layer is None:
        return
    told = (
        f"Input '{_maker(reference).name}' of model '{model.name}' has the ids of layer '{layer.name}', as "
        f"{dtype.name}, and got {getattr(got, 'name', got)}"
    )
    if not floating:
        way_out = f"Make the Input with dtype='{getattr(got, 'name', got)}'."
        _check_fits(
            value, dtype, f"{told} with ids beyond that: Keras would cut them, and rows be of other ids. {way_out}"
        )
        return
    raise TypeError(
        f"{told}: Keras would cast it, and floats have lost the digits of large ids. Give the model integers. A column "
        'of pandas in which values are missing is float64: fill them before ids become floats (read the column as "Int'
        '64", then column.fillna(0).to_numpy("int64")). Ids from a matrix of floats are cast in the model, from an '
        "input of floats. A Sequential around the model may cast all that it takes to floats, unless it begins with an "
        f'Input of its own: keras.Input(shape, dtype="{dtype.name}").'
    )


def _check_fits(value: Any, dtype: tf.DType, told: str) -> None:
    numbers = value.flat_values if isinstance(value, tf.RaggedTensor) else value
    numbers = numbers.values if isinstance(numbers, tf.SparseTensor) else numbers
    numbers = numbers.to_numpy() if hasattr(numbers, "to_numpy") else numbers
    if tf.is_tensor(numbers) or isinstance(numbers, np.ndarray):
        numbers = tf.convert_to_tensor(numbers)
        tf.debugging.assert_equal(tf.cast(tf.cast(numbers, dtype), numbers.dtype), numbers, told)


def _is_wider(dtype: Any, than: tf.DType) -> bool:
    """Whether a dtype of TensorFlow, NumPy or pandas is one of integers with more bits."""
    try:
        own = tf.as_dtype(getattr(dtype, "numpy_dtype", dtype))
    except TypeError:
        return False
    return bool(own.is_integer and own.size > than.size)


def _is_floating(dtype: Any) -> bool:
    """Whether a dtype of TensorFlow, NumPy or pandas is one of floats."""
    try:
        return bool(tf.as_dtype(dtype).is_floating)
    except TypeError:  # of pandas, such as Int64 and Float64
        return getattr(dtype, "kind", None) == "f"


def first_holder(reference: Any, nodes: Any = None) -> Any:
    """The first layer with a table that an input reaches, as integers all the way; None if there is none.

    `nodes`: as of `_uses`.
    """
    waiting, seen = [reference], {id(reference)}
    while waiting:
        tensor = waiting.pop(0)
        for layer, outputs in _uses(tensor, nodes):
            layers = layer._flatten_layers() if hasattr(layer, "_flatten_layers") else [layer]
            if any(held_by(one, is_kept) for one in layers):
                return layer
            for output in outputs:
                if id(output) not in seen and tf.as_dtype(output.dtype).is_integer:
                    seen.add(id(output))
                    waiting.append(output)
    return None


def _uses(tensor: Any, nodes: Any = None) -> Iterator[tuple[Any, Sequence[Any]]]:
    """(layer, outputs) of each call on a symbolic tensor: of one of the `nodes` of a model; None: of all models."""
    for node in _maker(tensor)._outbound_nodes:
        if nodes is not None and not any(node is one for one in nodes):
            continue
        is_keras_3 = hasattr(node, "operation")
        inputs = node.arguments.keras_tensors if is_keras_3 else node.keras_inputs
        if any(one is tensor for one in inputs):
            yield node.operation if is_keras_3 else node.layer, tf.nest.flatten(node.outputs)


def _maker(tensor: Any) -> Any:
    """The layer, or operation of Keras 3, that has made a symbolic tensor of a model."""
    history = tensor._keras_history
    return history.operation if hasattr(history, "operation") else history.layer


def _stays_sparse(model: Any, value: Any, reference: Any) -> bool:
    """Whether a `value` for a dense input is sparse, and goes to layers of ours as it is.

    Raises:
      TypeError: it has sparse ids that something else takes before they are looked up, or as well.
    """
    if not isinstance(value, tf.SparseTensor) or reference.sparse:
        return False
    nodes = [node for depth in model._nodes_by_depth.values() for node in depth]
    takers = [layer for layer, _ in _uses(reference, nodes)]
    as_it_is = (EmbeddingLayer, EmbeddingCollectionLayer, PaddingMask)
    # A model in the model comes here itself.
    known = all(isinstance(one, as_it_is) or hasattr(one, "_convert_inputs_to_tensors") for one in takers)
    if takers and known and value.shape.rank == len(reference.shape):
        return True
    dtype = tf.as_dtype(reference.dtype)
    layer = first_holder(reference, nodes) if dtype.is_integer or dtype == tf.string else None
    if isinstance(layer, as_it_is[:2]) and not _is_padding(layer, dtype):
        raise TypeError(
            f"Input '{_maker(reference).name}' of model '{model.name}' has the ids of layer '{layer.name}', is dense, "
            f"and got a SparseTensor: Keras would fill it with {'empty strings' if dtype == tf.string else 'zeros'}, "
            "which are ids like any other. Make the Input with sparse=True; or give the model "
            "tf.sparse.to_dense(ids, default_value=padding), and the layer a padding_id."
        )
    return False


def _is_padding(layer: Any, dtype: tf.DType) -> bool:
    """Whether what Keras fills sparse ids with is padding to all tables of a layer of ours."""
    tables = [layer.options] if isinstance(layer, EmbeddingLayer) else layer._features.options.values()
    fillers = (0, "", b"") if dtype == tf.string else (0,)
    return all((0 if one.mask_zero and one.padding_id is None else one.padding_id) in fillers for one in tables)


def _convert(original: Callable[..., Any], model: Any, flat_inputs: Any) -> Any:
    """``_convert_inputs_to_tensors`` of Keras 3."""
    sparse = {}
    for place, (value, reference) in enumerate(zip(flat_inputs, model._inputs, strict=False)):
        _check(model, value, reference)
        if _stays_sparse(model, value, reference):
            dtype = tf.as_dtype(reference.dtype)
            sparse[place] = value if value.dtype == dtype else tf.cast(value, dtype)
        if place in sparse or isinstance(value, tf.RaggedTensor):
            _given[_maker(reference)] = "sparse" if place in sparse else "ragged"
    # Keras converts something else in their places.
    dense = [
        tf.zeros([], reference.dtype) if place in sparse else value
        for place, (value, reference) in enumerate(zip(flat_inputs, model._inputs, strict=False))
    ]
    return [sparse.get(place, value) for place, value in enumerate(original(model, dense if sparse else flat_inputs))]


def _standardize(original: Callable[..., Any], model: Any, inputs: Any) -> Any:
    """``_standardize_inputs`` of Keras 3."""
    if isinstance(inputs, Mapping) and any(held_by(layer, is_kept) for layer in model._flatten_layers()):
        inputs = _by_name(inputs, model._inputs_struct)
    return original(model, inputs)


def _by_name(inputs: Any, structure: Any) -> Any:
    """What a model is called on without the values of dictionaries that it has no inputs for."""
    if isinstance(inputs, Mapping) and isinstance(structure, dict) and inputs.keys() >= structure.keys():
        return {name: _by_name(inputs[name], below) for name, below in structure.items()}
    return inputs


def _input_dtype(getter: Callable[[Any], Any], model: Any) -> Any:
    """``input_dtype`` of a `Sequential` of Keras 3, to which its call casts floats before anybody sees them.

    Where they are ids for a table, they stay floats.
    """
    dtype = getter(model)
    functional = getattr(model, "_functional", None)
    if functional is None or not tf.as_dtype(dtype).is_integer or first_holder(functional._inputs[0]) is None:
        return dtype
    return model.compute_dtype


def _conform(original: Callable[..., Any], model: Any, tensor: Any, ref_input: Any) -> Any:
    """``_conform_to_reference_input`` of tf_keras."""
    _check(model, tensor, ref_input)
    return original(model, tensor, ref_input)


# ---- Installing ------------------------------------------------------------------------------------------------------


def _changes(keras: Any) -> Iterator[Callable[[], None]]:
    """Wraps what a Keras has."""
    if keras.__name__ == "tf_keras":
        owner, method, replacement = keras.Sequential, "_conform_to_reference_input", _conform
    else:
        module = importlib.import_module(f"{keras.Model.__module__.rpartition('.')[0]}.functional")
        owner, method, replacement = module.Functional, "_convert_inputs_to_tensors", _convert
        if defining_class(owner, "_standardize_inputs") is not None:
            yield wrap_method(defining_class(owner, "_standardize_inputs"), "_standardize_inputs", _standardize)
        if "input_dtype" in vars(keras.Sequential):
            yield wrap_property(keras.Sequential, "input_dtype", _input_dtype)
    defined_in = defining_class(owner, method)
    if defined_in is not None:
        yield wrap_method(defined_in, method, replacement)


_hooks = KerasHooks(_changes)
install, uninstall = _hooks.install, _hooks.uninstall
