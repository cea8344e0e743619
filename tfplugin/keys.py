"""Keys of lookups and writes as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

KEY_DTYPES = (tf.int64, tf.int32, tf.uint64)


def refuse_keras_input(keys: Any, variable: str) -> None:
    """Raises TypeError for what stands for the ids of a tf_keras model while it is put together.

    TensorFlow would make the op that reads the rows a layer of the model, and nothing would train or save the table.
    """
    if type(keys).__name__.endswith("KerasTensor"):
        raise TypeError(
            f"{variable} was given the input of a Keras model, outside of the model's layers: what looks ids up there "
            "is no part of the model, and nothing would train or save the rows. Look them up in the call of a layer of "
            "the same Keras. (Layers of tf_keras are in tfplugin.dynamic_embedding.tf_keras and tfplugin.sok.tf_keras, "
            "unless TF_USE_LEGACY_KERAS=1 makes tf.keras that.)"
        )


def constant_keys(keys: Any, key_dtype: tf.DType) -> tf.Tensor:
    """Numbers that are no array yet, such as a list, as a Tensor of `key_dtype`, any shape.

    In a graph TensorFlow would round those of uint64 and wrap what the type does not hold: they would be other keys.

    Raises:
      OverflowError: one that is out of the type's range.
      TypeError, ValueError: TensorFlow's own, of what are no integers.
    """
    if not key_dtype.is_integer:
        return tf.convert_to_tensor(keys, key_dtype)
    try:
        numbers = np.asarray(keys)
        if numbers.dtype.kind not in "iu":  # of integers that none of its types has all of, NumPy makes floats
            numbers = np.asarray(keys, object)
    except (NotImplementedError, TypeError, ValueError):  # with tensors of a graph, or lists of several lengths
        return tf.convert_to_tensor(keys, key_dtype)
    if numbers.dtype.kind == "O" and not all(isinstance(number, (int, np.integer)) for number in numbers.flat):
        return tf.convert_to_tensor(keys, key_dtype)
    dtype = np.dtype(key_dtype.as_numpy_dtype)
    for number in (int(numbers.min()), int(numbers.max())) if numbers.size else ():
        if not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
            raise OverflowError(f"{number} is out of the range of {key_dtype.name}")
    return tf.convert_to_tensor(numbers.astype(dtype))


def keys_to_tensor(keys: Any, key_dtype: tf.DType, name: str) -> tf.Tensor:
    """Keys as a Tensor of `key_dtype`: integers that are not tensors yet, and int32 where the keys are int64."""
    if isinstance(keys, tf_ops.EagerTensor) and keys.dtype == key_dtype:
        return keys
    refuse_keras_input(keys, f"Key-value variable '{name}'")
    if isinstance(keys, (tf.SparseTensor, tf.compat.v1.SparseTensorValue, tf.RaggedTensor)):
        raise TypeError(
            f"Key-value variable '{name}' takes ids as a dense tensor here, got a {type(keys).__name__}: pass it to "
            "tf.nn.embedding_lookup_sparse, or pass its values."
        )
    if not tf.is_tensor(keys):
        dtype = getattr(keys, "dtype", None)
        if dtype is None:
            try:
                return constant_keys(keys, key_dtype)
            except (TypeError, ValueError, OverflowError) as error:
                strings = any(isinstance(key, str | bytes) for key in np.asarray(keys, object).reshape(-1)[:1])
                how = f"; {how_to_convert(tf.string, key_dtype)}" if strings else "."
                raise TypeError(
                    f"Key-value variable '{name}' has {key_dtype.name} keys: {keys!r:.80} does not convert"
                    f" ({error}){how}"
                ) from error
        keys = tf.convert_to_tensor(keys)
    if keys.dtype == key_dtype:
        return keys
    if keys.dtype == tf.int32 and key_dtype == tf.int64:
        return tf.cast(keys, tf.int64)
    raise TypeError(
        f"Key-value variable '{name}' has {key_dtype.name} keys, got ids of {keys.dtype.name}: "
        f"{how_to_convert(keys.dtype, key_dtype)}"
    )


def how_to_convert(dtype: tf.DType, key_dtype: tf.DType) -> str:
    """What to do about ids of another dtype: the end of an error's message."""
    name = key_dtype.name
    if dtype.is_floating:
        return (
            "floats have lost the digits of large ids, and a cast does not bring them back. Keep ids "
            f"{name} from where they are read, and give a model of Keras {name} inputs: "
            f'keras.Input(shape, dtype="{name}"), or model.export(path, '
            f'input_signature=[keras.InputSpec(shape=(None, 3), dtype="{name}")]), which without it takes the inputs '
            "of a subclassed model for float32."
        )
    if key_dtype == tf.string:
        return "convert them with tf.strings.as_string(ids)."
    if key_dtype == tf.int32 and dtype in (tf.int64, tf.uint32, tf.uint64):
        return (
            "cast them with tf.cast(ids, tf.int32) if none is 2^31 or more in size, for a cast gives such ids the rows "
            "of others; or make the table with key_dtype=tf.int64."
        )
    if dtype == tf.string and key_dtype == tf.int64:
        return "hash them as layers of strings do: tfplugin.string_keys(strings)."
    hashed = " after hashing (tf.strings.to_hash_bucket_fast)" if dtype == tf.string else ""
    return f"cast them with tf.cast(ids, tf.{name}){hashed}."
