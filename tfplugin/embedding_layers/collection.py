"""`EmbeddingCollection`: many features, of tables that they may share, in one lookup."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.util import nest

from tfplugin.embedding_layers.built_by_shape import as_ids
from tfplugin.embedding_layers.configs import FeatureConfigFields
from tfplugin.embedding_layers.embedding import output_spec
from tfplugin.embedding_layers.keras_inputs import refuse_other_keras
from tfplugin.embedding_layers.layer_ids import Lookup, Reading, lookup_of, output_shape
from tfplugin.embedding_layers.layer_tables import TableOptions
from tfplugin.embedding_layers.penalties import add_penalty
from tfplugin.embedding_layers.read_rows import cast, read, read_regularized, trains


class _Features:
    """The features of a collection, in the structure that it was given: not for Keras to look into.

    Attributes:
      structure: nested dictionaries, lists and tuples of `FeatureConfig` s.
      all: the features, in the order of ``tf.nest.flatten``.
      options: what each table is made with, by its name.
    """

    def __init__(self, structure: Any, what: str) -> None:
        self.structure = structure
        self.all = tf.nest.flatten(structure)
        for feature in self.all:
            if not isinstance(feature, FeatureConfigFields):
                raise TypeError(
                    f"{what}: feature_configs must be FeatureConfigs of tfplugin, in dictionaries, lists and tuples; "
                    f"got {type(feature).__name__}."
                )
        if not self.all:
            raise ValueError(f"{what}: feature_configs has no feature.")
        names = [feature.name for feature in self.all]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{what}: two features of the name '{twice[0]}'.")
        configs: dict[str, Any] = {}
        for feature in self.all:
            there = configs.setdefault(feature.table.name, feature.table)
            if there is not feature.table and there.get_config() != feature.table.get_config():
                raise ValueError(
                    f"{what}: two tables of the name '{there.name}' that are not the same: features that share a table "
                    "have one TableConfig."
                )
        self.options = {name: config.options() for name, config in configs.items()}

    def options_of(self, feature: Any) -> TableOptions:
        """What the table of a feature is made with."""
        return self.options[feature.table.name]

    def flat(self, values: Any, of: str, what: str) -> list[Any]:
        """What there is for each feature in values of the same structure.

        Raises:
          ValueError: another structure.
        """
        try:
            found: list[Any] = nest.flatten_up_to(self.structure, values, check_types=False)
        except (TypeError, ValueError) as error:
            names = tf.nest.map_structure(lambda feature: feature.name, self.structure)
            raise ValueError(
                f"{what}: {of} must have the structure of its feature_configs, {names}; got {_outline(values)}. "
                f"({error})"
            ) from error
        return found

    def pack(self, values: list[Any]) -> Any:
        """Values of the features, in the structure."""
        return tf.nest.pack_sequence_as(self.structure, values)


def _outline(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _outline(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_outline(value) for value in values]
    return type(values).__name__


class EmbeddingCollectionLayer:
    """What `EmbeddingCollection` is beside a Layer."""

    #: The Keras of the layer, and its configs.
    _keras: Any = None
    _feature_config: Any = None
    _table_config: Any = None

    def __init__(
        self,
        feature_configs: Any,
        *,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        # Ids are not cast to the dtype of the rows.
        super().__init__(name=name, trainable=trainable, dtype=dtype, autocast=False, **kwargs)  # type: ignore[call-arg]
        what = f"Layer '{self.name}'"  # type: ignore[has-type]
        self._features = _Features(feature_configs, what)
        #: By their names.
        self.tables = {
            name: options.make(name, self.variable_dtype, what)  # type: ignore[attr-defined]
            for name, options in self._features.options.items()
        }
        #: Those of tables that have one of their own.
        self.optimizers = {
            name: options.optimizer for name, options in self._features.options.items() if options.optimizer is not None
        }
        self.supports_masking = False
        self.supports_jit = False  # Keras 3: XLA has no tables

    # ---- What it is --------------------------------------------------------------------------------------------------

    @property
    def feature_configs(self) -> Any:
        """The features, in the structure that was given."""
        return self._features.structure

    def table_optimizer(self, table: Any) -> Any:
        """The optimizer that updates a table in ``fit`` instead of the model's; None: the model's does."""
        return next((self.optimizers.get(name) for name, own in self.tables.items() if own is table), None)

    @property
    def regularized_tables(self) -> list[Any]:
        """The tables whose rows a regularizer looks at in each call."""
        return [self.tables[name] for name, options in self._features.options.items() if options.regularizer]

    def _reading(self, feature: Any) -> Reading:
        longest = feature.input_shape[-1] if feature.input_shape is not None and len(feature.input_shape) > 1 else None
        what = f"Feature '{feature.name}' of layer '{self.name}'"  # type: ignore[attr-defined]
        return self._features.options_of(feature).reading(what, self.tables[feature.table.name], longest)

    # ---- Calls -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of any layer."""
        refuse_other_keras(self, args, kwargs)
        # Keras asks every leaf of its arguments for its shape (3.12 does so of None, too), and an empty tuple has none.
        args = (*args[:1], *map(_without_none, args[1:2]), *args[2:])
        if "weights" in kwargs:
            kwargs["weights"] = _without_none(kwargs["weights"])
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def call(self, inputs: Any, weights: Any = None, training: Any = None) -> Any:
        """The rows of all features.

        Args:
          inputs: in the structure of the features, ids as of `Embedding`.
          weights: None, or in the same structure None or weights as of `Embedding`.
          training: as of `Embedding`.
        """
        return self._rows(inputs, weights, training)

    @tf.autograph.experimental.do_not_convert
    def _rows(self, inputs: Any, weights: Any, training: Any) -> Any:
        train = trains(self, training)
        lookups = self._lookups(inputs, weights)
        rows: list[Any] = [None] * len(lookups)
        together = []
        for i, (feature, lookup) in enumerate(zip(self._features.all, lookups, strict=True)):
            regularizer = self._features.options_of(feature).regularizer
            if regularizer is None:
                together.append(i)
            else:
                rows[i], penalty = read_regularized(lookup, regularizer, train)
                add_penalty(self, penalty)
        if together:
            for i, found in zip(together, read([lookups[i] for i in together], train), strict=True):
                rows[i] = found
        for feature, found in zip(self._features.all, rows, strict=True):
            _check_shape(feature, found.shape, "output", feature.output_shape, self.name)  # type: ignore[attr-defined]
        return self._features.pack([cast(found, self.compute_dtype) for found in rows])  # type: ignore[attr-defined]

    def _lookups(self, inputs: Any, weights: Any) -> list[Lookup]:
        what = f"Layer '{self.name}'"  # type: ignore[attr-defined]
        ids = self._features.flat(inputs, "inputs", what)
        every = [None] * len(ids) if weights is None else self._features.flat(weights, "weights", what)
        every = [None if isinstance(one, tuple) and not one else one for one in every]
        lookups = []
        for feature, one, of_one in zip(self._features.all, ids, every, strict=True):
            if not isinstance(one, tf.RaggedTensor):  # of which longer rows are cut
                _check_shape(feature, one.shape, "input", feature.input_shape, self.name)  # type: ignore[attr-defined]
            reading = self._reading(feature)
            lookups.append(lookup_of(as_ids(one, reading), of_one, reading))
        return lookups

    def _flat_shapes(self, input_shape: Any) -> list[tuple[int | None, ...]]:
        shapes = self._features.flat(input_shape, "input_shape", f"Layer '{self.name}'")  # type: ignore[attr-defined]
        return [
            output_shape(shape, self._reading(feature))
            for feature, shape in zip(self._features.all, shapes, strict=True)
        ]

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of each output, in the structure of the features."""
        return self._features.pack(self._flat_shapes(input_shape))

    def compute_output_spec(self, inputs: Any, weights: Any = None, training: Any = None) -> Any:
        """What Keras 3 has of the outputs before there are any."""
        del weights, training
        specs = []
        ids = self._features.flat(inputs, "inputs", f"Layer '{self.name}'")  # type: ignore[attr-defined]
        for feature, one in zip(self._features.all, ids, strict=True):
            if not getattr(one, "ragged", False):
                _check_shape(feature, one.shape, "input", feature.input_shape, self.name)  # type: ignore[attr-defined]
            spec = output_spec(self._keras, one, self._reading(feature), self.compute_dtype)  # type: ignore[attr-defined]
            _check_shape(feature, spec.shape, "output", feature.output_shape, self.name)  # type: ignore[attr-defined]
            specs.append(spec)
        return self._features.pack(specs)

    # ---- Making it again ---------------------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the layer again, without its rows."""
        config = super().get_config()  # type: ignore[misc]
        tables = {feature.table.name: feature.table.get_config() for feature in self._features.all}
        return {**config, "tables": tables, "feature_configs": _told(self._features.structure)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The layer that `get_config` told of."""
        config = dict(config)
        tables = {name: cls._table_config.from_config(told) for name, told in config.pop("tables").items()}
        config["feature_configs"] = cls._heard(config["feature_configs"], tables)
        return super().from_config(config)  # type: ignore[misc]

    @classmethod
    def _heard(cls, told: dict[str, Any], tables: dict[str, Any]) -> Any:
        """The features that `_told` told of."""
        if "feature" in told:
            feature = told["feature"]
            return cls._feature_config(**{**feature, "table": tables[feature["table"]]})
        if "dict" in told:
            return {key: cls._heard(value, tables) for key, value in told["dict"].items()}
        values = [cls._heard(value, tables) for value in told.get("list", told.get("tuple"))]
        return tuple(values) if "tuple" in told else values


def _without_none(weights: Any, *, inside: bool = False) -> Any:
    """The structure of weights with an empty tuple for each None within it.

    >>> _without_none([None, 2.0]), _without_none(None)
    ([(), 2.0], None)
    """
    if isinstance(weights, dict):
        return {key: _without_none(one, inside=True) for key, one in weights.items()}
    if type(weights) in (list, tuple):
        return type(weights)(_without_none(one, inside=True) for one in weights)
    return () if weights is None and inside else weights


def _told(structure: Any) -> dict[str, Any]:
    """Features as plain data; tables by their names."""
    if isinstance(structure, FeatureConfigFields):
        return {"feature": {**structure.get_config(), "table": structure.table.name}}
    if isinstance(structure, dict):
        return {"dict": {key: _told(value) for key, value in structure.items()}}
    return {"tuple" if isinstance(structure, tuple) else "list": [_told(value) for value in structure]}


def _check_shape(feature: Any, shape: Any, which: str, wanted: Any, layer: str) -> None:
    """Raises ValueError where the shape is not what the feature says. Batches may be of any size."""
    if wanted is None:
        return
    found = tf.TensorShape(shape)
    if not found[1:].is_compatible_with(tf.TensorShape(tuple(wanted))[1:]) or found.rank not in (None, len(wanted)):
        raise ValueError(
            f"Feature '{feature.name}' of layer '{layer}': its {which} is of shape {found}, and {which}_shape says "
            f"{tuple(wanted)}."
        )
