"""The tables of layers: made of what a layer is told, and told again as a config."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.embedding_layers.layer_ids import COMBINERS, Reading
from tfplugin.get_kv_variable import get_kv_variable
from tfplugin.initializers import KvInitializer
from tfplugin.kv_variable import VALUE_DTYPES
from tfplugin.policies import Policies
from tfplugin.spilling import checked_spill
from tfplugin.string_hash import string_keys

_KEY_DTYPES = ("int64", "int32", "uint64", "string")


@dataclasses.dataclass
class TableOptions:
    """What layers are told of a table; see `Embedding`.

    Attributes:
      dim, combiner, mask_zero, padding_id, initializer, regularizer, constraint, optimizer: as of the layers; those
        that Keras has names for may be names, objects or configs.
      max_capacity, eviction, admission, expiry, expire_every, expire_on_save, max_hbm, max_memory, spill,
        capacity_hint, parts, key_dtype: of the variable.
    """

    dim: int
    combiner: str | None = None
    mask_zero: bool = False
    padding_id: Any = None
    initializer: Any = "uniform"
    regularizer: Any = None
    constraint: Any = None
    max_capacity: int | None = None
    eviction: str | None = None
    admission: Any = None
    expiry: Any = None
    expire_every: int = 0
    expire_on_save: bool = False
    max_hbm: int | None = None
    max_memory: int | None = None
    spill: str | None = None
    capacity_hint: int = 0
    parts: int | None = None
    key_dtype: Any = "int64"
    optimizer: Any = None

    @property
    def strings(self) -> bool:
        """Whether ids are strings."""
        return bool(self.key_dtype == "string")

    def resolved(self, keras: Any, what: str) -> TableOptions:
        """The same with objects of a Keras in the place of names and configs.

        Raises:
          ValueError, TypeError: an argument that makes no sense.
        """
        if isinstance(self.dim, bool) or not _is_whole(self.dim) or self.dim < 1:
            raise ValueError(f"{what}: the width of a row (dim, embedding_dim) must be 1 or more, got {self.dim!r}.")
        if self.combiner not in (None, *COMBINERS):
            raise ValueError(
                f"{what}: combiner must be None or one of {COMBINERS}, got {self.combiner!r}. (A table has no "
                "vocabulary: the first argument is the width of a row, as in Embedding(16).)"
            )
        if self.parts is not None and (not _is_whole(self.parts) or self.parts < 1):
            raise ValueError(f"{what}: parts must be a number of parts, 1 or more; got {self.parts!r}.")
        admission, expiry = _policies(self.admission, self.expiry)
        max_memory, spill = checked_spill(self.max_memory, self.spill, what)
        return dataclasses.replace(
            self,
            dim=int(self.dim),
            key_dtype=_key_dtype(self.key_dtype, what),
            mask_zero=_said(self.mask_zero, "mask_zero", what),
            padding_id=_padding(self.padding_id),
            initializer=_initializer(keras, self.initializer),
            regularizer=_regularizer(keras, self.regularizer, what),
            constraint=_constraint(keras, self.constraint, what),
            optimizer=_optimizer(keras, self.optimizer, what),
            admission=admission,
            expiry=expiry,
            max_memory=max_memory,
            spill=spill,
        )

    def make(self, name: str, dtype: Any, what: str) -> Any:
        """The table, under that name."""
        if tf.as_dtype(dtype) not in VALUE_DTYPES:
            raise TypeError(
                f"{what}: rows are of {', '.join(d.name for d in VALUE_DTYPES)}, and the dtype policy wants "
                f"{tf.as_dtype(dtype).name}."
            )
        padding = self.padding_id
        if isinstance(padding, (str, bytes)) and self.key_dtype not in ("string", "int64"):
            raise TypeError(f"{what}: padding_id={padding!r} is a string, and the keys are {self.key_dtype}.")
        if isinstance(padding, (str, bytes)):
            with tf.init_scope():
                padding = int(string_keys(tf.constant(padding)))
        return get_kv_variable(
            name,
            embedding_dim=self.dim,
            key_dtype=tf.as_dtype("int64" if self.strings else self.key_dtype),
            value_dtype=tf.as_dtype(dtype),
            initializer=self.initializer,
            constraint=self.constraint,
            max_capacity=self.max_capacity or 0,
            eviction=self.eviction,
            max_hbm=self.max_hbm,
            max_memory=self.max_memory,
            spill=self.spill,
            capacity_hint=self.capacity_hint,
            partitioner=None if self.parts is None else tf.compat.v1.fixed_size_partitioner(self.parts),
            admission=self.admission,
            padding_key=padding,
            expiry=self.expiry,
            expire_every=self.expire_every,
            expire_on_save=self.expire_on_save,
        )

    def reading(self, what: str, table: Any, longest: int | None = None) -> Reading:
        """How ids are looked up in the table."""
        padding = 0 if self.mask_zero and self.padding_id is None else self.padding_id
        return Reading(what, table, self.combiner, self.strings, padding, longest)

    def config(self, keras: Any, what: str) -> dict[str, Any]:
        """Plain data, of which `resolved` makes the same again."""
        said = Policies(self.admission, expiry=_listed(self.expiry)).to_json()
        policies = json.loads(said) if said else {}
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.padding_id, bytes):  # which JSON has not
            config["padding_id"] = self.padding_id.decode("utf-8", "surrogateescape")
        config |= {
            "initializer": _initializer_config(keras, self.initializer, what),
            "regularizer": keras.regularizers.serialize(self.regularizer) if self.regularizer else None,
            "constraint": keras.constraints.serialize(self.constraint) if self.constraint else None,
            "optimizer": _optimizer_config(keras, self.optimizer, what),
            "admission": policies.get("admission"),
            "expiry": policies.get("expiry"),
        }
        return config


def _padding(padding: Any) -> Any:
    """The padding id of a config, where bytes are text: those that are no UTF-8 are bytes again."""
    if not isinstance(padding, str):
        return padding
    told = padding.encode("utf-8", "surrogateescape")
    return padding if told == padding.encode("utf-8", "replace") else told


def _is_whole(value: Any) -> bool:
    try:
        return int(value) == value
    except (TypeError, ValueError, OverflowError):
        return False


def _listed(expiry: Any) -> tuple[Any, ...]:
    return () if expiry is None else tuple(expiry) if isinstance(expiry, (list, tuple)) else (expiry,)


def _policies(admission: Any, expiry: Any) -> tuple[Any, Any]:
    """The policies that a config has, or those that were given."""
    if isinstance(admission, dict):
        admission = Policies.from_json(json.dumps({"admission": admission})).admission
    if isinstance(expiry, (list, tuple)) and all(isinstance(one, dict) for one in expiry):
        expiry = Policies.from_json(json.dumps({"expiry": list(expiry)})).expiry
    return admission, expiry or None


def _key_dtype(dtype: Any, what: str) -> str:
    try:
        name = "int64" if dtype is int else "string" if dtype is str else tf.as_dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in _KEY_DTYPES:
        raise TypeError(f"{what}: key_dtype must be one of {_KEY_DTYPES}, got {name}.")
    return name


def _initializer(keras: Any, given: Any) -> Any:
    if given is None or isinstance(given, (bool, int, float, np.ndarray, KvInitializer)) or tf.is_tensor(given):
        return given
    if isinstance(given, list):
        return np.asarray(given)
    if isinstance(given, dict) and set(given) == {"kind", "a", "b", "seed"}:
        return KvInitializer(**given)
    return keras.initializers.get(given)


def _initializer_config(keras: Any, initializer: Any, what: str) -> Any:
    if initializer is None or isinstance(initializer, (bool, int, float)):
        return initializer
    if isinstance(initializer, KvInitializer):
        if initializer.rows is not None:
            raise ValueError(f"{what}: its initializer has rows that no config holds: give it as an array.")
        return json.loads(initializer.to_json())
    if isinstance(initializer, np.ndarray) or tf.is_tensor(initializer):
        return np.asarray(initializer).tolist()
    return keras.initializers.serialize(initializer)


def _said(value: Any, argument: str, what: str) -> bool:
    if not isinstance(value, (bool, np.bool_, int)) or value not in (0, 1):
        raise ValueError(f"{what}: {argument} must be True or False, got {value!r}.")
    return bool(value)


def _regularizer(keras: Any, given: Any, what: str) -> Any:
    made = keras.regularizers.get(given)
    if made is not None and not callable(made):  # tf_keras gives names back that it does not know
        raise ValueError(f"{what}: {given!r} is no regularizer of {keras.__name__}.")
    return made


def _constraint(keras: Any, given: Any, what: str) -> Any:
    """A constraint that can be applied to some rows of a table."""
    made = keras.constraints.get(given)
    axes = getattr(made, "axis", 1)
    down = 0 in axes if isinstance(axes, (list, tuple)) else axes == 0
    if type(made).__name__ == "RadialConstraint" or down:
        raise ValueError(
            f"{what}: {type(made).__name__} looks down the rows of a whole matrix (axis=0), and a step of a table has "
            "the rows that it changed. Give it axis=1, for the norm of each row."
        )
    return made


def _optimizer(keras: Any, given: Any, what: str) -> Any:
    if isinstance(given, (str, dict)):
        return keras.optimizers.get(copy.deepcopy(given))  # Keras changes the config that it is given
    if given is not None and (isinstance(given, type) or not callable(getattr(given, "apply_gradients", None))):
        raise TypeError(
            f"{what}: optimizer must be a name, an optimizer of {keras.__name__} or one of tfplugin.optimizers, got "
            f"{f'the class {given.__name__}: make one of it' if isinstance(given, type) else repr(given)}."
        )
    return given


def _optimizer_config(keras: Any, optimizer: Any, what: str) -> Any:
    if optimizer is None:
        return None
    legacy = getattr(getattr(keras.optimizers, "legacy", None), "Optimizer", keras.optimizers.Optimizer)
    if not isinstance(optimizer, (keras.optimizers.Optimizer, legacy)):
        raise ValueError(
            f"{what}: its optimizer {type(optimizer).__name__} is none of {keras.__name__}'s, of which alone a config "
            "says how to make them again."
        )
    return keras.optimizers.serialize(optimizer)
