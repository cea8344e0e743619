"""`sok.DynamicVariable`: a key-value table spread over the ranks, and what is done with its local rows."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin import ranks
from tfplugin.get_kv_variable import add_to_collections
from tfplugin.initializers import KvInitializer, resolve
from tfplugin.keys import KEY_DTYPES
from tfplugin.kv_variable import VALUE_DTYPES, KvVariable
from tfplugin.policies import resolve as resolve_policies
from tfplugin.ranks import step
from tfplugin.sok.optimizer_slots import TableSlot
from tfplugin.sok.placement import ModelParallel, owner_of_mode
from tfplugin.sok.static_rows import StaticRows

_numbers = itertools.count()

#: What `evict_strategy` may be, and the table engine's name for it.
EVICTION = {"kLru": "lru", "lru": "lru", "kLfu": "lfu", "lfu": "lfu", "kCustomized": "custom", "custom": "custom"}
#: Options of SparseOperationKit's hash tables that there is nothing to do for here: tables grow by themselves.
IGNORED = ("max_hbm_for_vectors", "max_load_factor", "max_bucket_size", "block_size", "device_id", "io_by_cpu")


class DynamicVariable(StaticRows, KvVariable, ModelParallel):
    """A key-value table over all ranks: key -> row of `dimension` values. This object holds the rows of this rank.

    `lookup_sparse` and `all2all_dense_embedding` find each key on the rank that owns it: ``key floor-mod size``, or the
    one rank that `mode` names. ``tf.nn.embedding_lookup`` looks keys up, and inserts them, on this rank. Every key
    value is legal.

    Args:
      dimension: width of a row.
      initializer: ``"random"`` (uniform in [-0.05, 0.05); default), ``"normal"`` (mean 0, deviation 1), ``"uniform"``
        (in [0, 1)), ``"ones"``, ``"zeros"``, a number as a string or not, or any initializer of TensorFlow or Keras.
        What a key starts from depends on the key, the name and the seed: not on the rank nor the order.
      var_type: ``"hbm"`` (default): the table grows as it needs; ``"hybrid"``: as well, unless max_capacity bounds it.
        On the CPU both are in host memory.
      name: the same on all ranks. Default: numbered.
      constraint, trainable: as for ``tf.Variable``; the constraint sees the rows of a batch.
      key_type: tf.int64 (default), tf.int32 or tf.uint64.
      dtype: tf.float32 (default), tf.float16, tf.bfloat16 or tf.float64.
      mode: ``"distributed"`` (default) or ``"localized:#"`` with the number of a rank.
      init_capacity: rows of this rank to make room for at once.
      max_capacity: with ``"hybrid"``, and no other: the most rows that this rank keeps; further ones evict others.
      evict_strategy: with max_capacity, and no other: ``"kLru"`` (default), ``"kLfu"``, or ``"kCustomized"`` (by
        `set_scores`).
      filter_ratio: the share of new keys that `lookup_sparse` admits where it is asked to filter.
      expiry, expire_every, expire_on_save: which rows go, and when, as for `tfplugin.get_kv_variable`; each rank
        expires its own, and `KeepTop` is for each rank.
      enter_threshold, admission, padding_key: as for `tfplugin.get_kv_variable`, of every lookup. Each rank counts its
        own keys; a key that several ranks look up in a step comes once from each.
      max_hbm_for_vectors, max_load_factor, max_bucket_size, block_size, device_id, io_by_cpu: accepted; they tune hash
        tables that are not used here.

    Raises:
      ValueError: an option that there is not, or out of its range.
      TypeError: a dtype that tables do not have.

    Example:
      >>> v = sok.DynamicVariable(dimension=3, initializer="13")
      >>> tf.nn.embedding_lookup(v, tf.constant([0, 1, 2**40], tf.int64)).numpy()[0]
      array([13., 13., 13.], dtype=float32)
      >>> v.size.numpy()
      array([3, 3])
    """

    _optimizer_wrapper = "sok.OptimizerWrapper"
    _trained_by_keras = False
    _how_to_train = (
        "Train it by sok.OptimizerWrapper(optimizer) in a training loop, or the model's train_step, of your own: "
        "sok.filter_variables(model.trainable_variables) has it."
    )

    def __init__(
        self,
        dimension: int,
        initializer: Any = None,
        var_type: str | None = None,
        name: str | None = None,
        constraint: Any = None,
        trainable: bool = True,
        key_type: Any = None,
        dtype: Any = None,
        mode: str | None = None,
        **options: Any,
    ) -> None:
        name = f"sok_dynamic_Variable_{next(_numbers)}" if name is None else name
        what = f"sok.DynamicVariable '{name}'"
        var_type = "hbm" if var_type is None else var_type
        if var_type not in ("hbm", "hybrid"):
            raise ValueError(f"{what}: var_type must be 'hbm' or 'hybrid', got {var_type!r}.")
        if isinstance(dimension, bool) or int(dimension) < 1:
            raise ValueError(f"{what}: dimension must be 1 or more, got {dimension!r}.")
        key_dtype = _dtype(key_type, tf.int64, KEY_DTYPES, f"{what}: key_type")
        value_dtype = _dtype(dtype, tf.float32, VALUE_DTYPES, f"{what}: dtype")
        self._backend_type = var_type
        self._mode = mode
        self._initializer_given = initializer
        self._config = dict(options)
        self.owner = owner_of_mode(mode, what)
        self.world = ranks.known()
        self.num_gpus = self.world.size
        #: The most rows that a lookup over the ranks may leave this one with; -1 for any number.
        self.row_limit = -1
        self.filter_ratio = _option(options, "filter_ratio", 1.0, what)
        if not 0 <= self.filter_ratio <= 1:
            raise ValueError(f"{what}: filter_ratio must be 0 to 1, got {self.filter_ratio}.")
        capacity_hint = int(_option(options, "init_capacity", 0, what))
        max_capacity = int(_option(options, "max_capacity", 0, what))
        if max_capacity and var_type != "hybrid":
            raise ValueError(
                f"{what}: max_capacity={max_capacity} bounds a table of var_type='hybrid', and one of "
                f"'{var_type}' grows as it needs: say var_type='hybrid', or leave max_capacity out."
            )
        strategy = options.pop("evict_strategy", None)
        if strategy is not None and strategy not in EVICTION:
            raise ValueError(f"{what}: evict_strategy must be one of {sorted(EVICTION)}, got {strategy!r}.")
        if strategy is not None and not max_capacity:
            raise ValueError(
                f"{what}: evict_strategy={strategy!r} says which rows go, and nothing says how many stay: say "
                "var_type='hybrid' and a max_capacity, or leave evict_strategy out."
            )
        policies = resolve_policies(
            name,
            key_dtype,
            enter_threshold=options.pop("enter_threshold", 0),
            admission=options.pop("admission", None),
            padding_key=options.pop("padding_key", None),
            expiry=options.pop("expiry", None),
            expire_every=options.pop("expire_every", 0),
            expire_on_save=options.pop("expire_on_save", False),
            max_capacity=max_capacity,
        )
        for ignored in IGNORED:
            options.pop(ignored, None)
        if options:
            raise ValueError(f"{what}: no such option: {', '.join(sorted(options))}.")
        bounds = (
            {"max_capacity": max_capacity, "eviction": EVICTION[strategy or "kLru"]}
            if self._is_bounded(max_capacity)
            else {}
        )
        super().__init__(
            name,
            int(dimension),
            key_dtype,
            value_dtype,
            _initializer(initializer, name, int(dimension), value_dtype),
            trainable=trainable,
            constraint=constraint,
            capacity_hint=min(capacity_hint, max_capacity) if bounds else capacity_hint,
            # A localized one is whole, in one place.
            part=ranks.rank() if self.owner is None else 0,
            parts=ranks.size() if self.owner is None else 1,
            policies=policies,
            **bounds,
        )
        add_to_collections(self, None, trainable)

    @property
    def holds_rows(self) -> bool:
        """Whether this rank owns any keys."""
        return self.owner is None or self.owner == ranks.rank()

    @property
    def ranks(self) -> int:
        """How many ranks hold rows of the whole, or could."""
        return self.num_gpus

    def _is_bounded(self, max_capacity: int) -> bool:
        return self._backend_type == "hybrid" and max_capacity > 0

    # ---- What SparseOperationKit's variable has ----------------------------------------------------------------------

    @property
    def size(self) -> tf.Tensor:  # type: ignore[override]
        """[rows of this rank, dimension]: int64."""
        rows = super().size()
        return tf.stack([rows, tf.constant(self.dim, tf.int64)])

    @property
    def indices(self) -> tf.Tensor:
        """The keys of this rank [N], in the order of `values`."""
        return self.export()[0]

    @property
    def values(self) -> tf.Tensor:
        """The rows of this rank [N, dimension]."""
        return self.export()[1]

    @property
    def dimension(self) -> int:
        """Width of a row."""
        return self.dim

    @property
    def key_type(self) -> tf.DType:
        """Of the keys."""
        return self.key_dtype

    @property
    def handle_dtype(self) -> tf.DType:
        """Of the values."""
        return self.dtype

    @property
    def backend_type(self) -> str:
        """``"hbm"`` or ``"hybrid"``."""
        return self._backend_type

    @property
    def config_dict(self) -> dict[str, Any]:
        """The options that were given."""
        return dict(self._config)

    @property
    def initializer_str(self) -> Any:
        """The initializer as it was given."""
        return self._initializer_given

    @property
    def mode(self) -> str | None:
        """As it was given."""
        return self._mode

    @property
    def target_gpu(self) -> int:
        """The rank that holds all keys; -1 where the ranks share them."""
        return -1 if self.owner is None else self.owner

    def key_map(self, indices: Any) -> Any:
        """The keys: rows go by key on every rank."""
        return indices

    def scatter_add(self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Adds rows to those of this rank; a missing key starts from its initial value."""
        del use_locking
        return self.accumulate(*_slices(sparse_delta, "scatter_add", self), name=name)

    def scatter_sub(self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Takes rows from those of this rank; a missing key starts from its initial value."""
        del use_locking
        keys, rows = _slices(sparse_delta, "scatter_sub", self)
        return self.accumulate(keys, -rows, name=name)

    def scatter_update(self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Writes rows of this rank, inserting keys that are not there."""
        del use_locking
        return self.upsert(*_slices(sparse_delta, "scatter_update", self), name=name)

    def __repr__(self) -> str:
        return f"<sok.DynamicVariable '{self.name}' shape={self.shape} dtype={self.dtype.name}>"


def _dtype(given: Any, default: tf.DType, allowed: Sequence[tf.DType], what: str) -> tf.DType:
    dtype = default if given is None else tf.as_dtype(given)
    if dtype not in allowed:
        raise TypeError(f"{what} must be one of {', '.join(one.name for one in allowed)}, got {dtype.name}.")
    return dtype


def _option(options: dict[str, Any], name: str, default: float, what: str) -> float:
    value = options.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or value < 0:
        raise ValueError(f"{what}: {name} must be a number of 0 or more, got {value!r}.")
    return value


def _initializer(given: Any, name: str, dim: int, dtype: tf.DType) -> KvInitializer:
    """An initializer from what SparseOperationKit takes, or any that `get_kv_variable` takes."""
    if given is None or given in ("", "random") if isinstance(given, (str, type(None))) else False:
        return resolve(None, name, dim, dtype)
    if isinstance(given, str):
        native = {"normal": ("normal", 0.0, 1.0), "uniform": ("uniform", 0.0, 1.0)}.get(given)
        if native is not None:
            return KvInitializer(*native, resolve(None, name, dim, dtype).seed)
        try:
            return resolve(float(given), name, dim, dtype)
        except ValueError:
            pass
    return resolve(given, name, dim, dtype)


def _slices(delta: Any, method: str, variable: DynamicVariable) -> tuple[tf.Tensor, tf.Tensor]:
    if not isinstance(delta, tf.IndexedSlices):
        raise TypeError(f"{method} of '{variable.name}' wants tf.IndexedSlices, got {type(delta).__name__}.")
    return delta.indices, tf.convert_to_tensor(delta.values, variable.dtype)


def _dynamic(variable: Any, caller: str) -> DynamicVariable:
    if not isinstance(variable, DynamicVariable):
        raise TypeError(f"sok.{caller} wants a sok.DynamicVariable, got {type(variable).__name__}.")
    return variable


def export(var: DynamicVariable | TableSlot) -> tuple[tf.Tensor, tf.Tensor]:
    """All keys [N] and rows [N, dimension] of this rank, in no particular order; also of what an optimizer keeps.

    Example:
      >>> indices, values = sok.export(v)
      >>> indices, momenta = sok.export(optimizer.get_slot(v, "momentum"))
    """
    return var.export() if isinstance(var, TableSlot) else _dynamic(var, "export").export()


def assign(var: DynamicVariable | TableSlot, indices: Any, values: Any) -> Any:
    """Writes rows of this rank, inserting keys that are not there; other rows stay. Of equal keys the last wins.

    Args:
      var: the variable, or what an optimizer keeps for it (`OptimizerWrapper.get_slot`).
      indices: keys [N].
      values: rows [N, dimension].

    Returns:
      The variable; in a graph, the op that writes.

    Example:
      >>> _ = sok.assign(v, [1, 2], tf.ones([2, 3]))
    """
    variable = var.variable if isinstance(var, TableSlot) else _dynamic(var, "assign")
    width = var.spec.width if isinstance(var, TableSlot) else variable.dim
    keys = variable.keys_tensor(indices)
    rows = tf.convert_to_tensor(values, variable.dtype)
    if rows.shape.rank not in (None, 2) or not keys.shape.concatenate([width]).is_compatible_with(rows.shape):
        raise ValueError(
            f"sok.assign to '{var.name}' wants indices [N] and values [N, {width}], got {keys.shape} and {rows.shape}."
        )
    op = var.assign(keys, rows) if isinstance(var, TableSlot) else variable.upsert(keys, rows)
    return var if op is None or tf.executing_eagerly() else op


def sparse_read_and_evict(
    var: DynamicVariable, indices: Any, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Rows of keys on this rank, and what had to go to make room for them.

    Args:
      var: a variable of var_type ``"hybrid"`` with max_capacity.
      indices: keys of any shape, dense or ragged.
      name: of the op.

    Returns:
      Rows [*indices.shape, dimension] (ragged where indices are), with a gradient; the evicted keys [E]; their rows
      [E, dimension].

    Example:
      >>> embeddings, evicted_keys, evicted_values = sok.sparse_read_and_evict(v, indices)
    """
    variable = _dynamic(var, "sparse_read_and_evict")
    if not variable.max_capacity:
        raise ValueError(
            f"sok.sparse_read_and_evict: '{variable.name}' never evicts: make it with var_type='hybrid' and a "
            "max_capacity."
        )
    if isinstance(indices, tf.RaggedTensor):
        rows, keys, evicted = variable.sparse_read_and_evict(indices.flat_values, name=name)
        return indices.with_flat_values(rows), keys, evicted
    read: tuple[tf.Tensor, tf.Tensor, tf.Tensor] = variable.sparse_read_and_evict(indices, name=name)
    return read


def incremental_model_dump(
    sok_vars: Any, time_threshold: Any, sess: tf.compat.v1.Session | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and rows, of all ranks, that training has touched since a time. Call it on every rank.

    A bounded variable (``"hybrid"`` with max_capacity and ``"kLru"``) knows the last use of a row to the microsecond.
    Others know the second of the last update: rows of that same second count as touched.

    Args:
      sok_vars: one `DynamicVariable`, or several.
      time_threshold: a ``datetime.datetime`` (without a time zone: UTC) or seconds since 1970; one for all, or one for
        each variable.
      sess: a session, in graph mode. Default: the default session.

    Returns:
      Lists with the keys [N] and the rows [N, dimension] of each variable.

    Raises:
      TypeError: something that is no `DynamicVariable`, or no time.
      ValueError: a number of thresholds other than one or that of the variables.
      RankError: another rank failed.

    Example:
      >>> before = datetime.datetime.now(datetime.timezone.utc)
      >>> # ... train ...
      >>> keys, values = sok.incremental_model_dump([v], before)
    """
    with step("sok.incremental_model_dump"):
        variables = [_dynamic(v, "incremental_model_dump") for v in _listed(sok_vars)]
        times = _listed(time_threshold)
        if len(times) not in (1, len(variables)):
            raise ValueError(
                f"sok.incremental_model_dump: got {len(variables)} variables and {len(times)} thresholds; give one for "
                "all or one for each."
            )
        local = []
        for variable, since in zip(variables, times * len(variables) if len(times) == 1 else times, strict=True):
            touched = variable.export_since(_seconds(since))
            local.append(_values(touched, sess))
    ranks.check_same([variable.describe() for variable in variables], "sok.incremental_model_dump")
    keys, rows = [], []
    for one in local:
        parts = ranks.current().allgather(one)
        keys.append(np.concatenate([part[0] for part in parts]))
        rows.append(np.concatenate([part[1] for part in parts]))
    return keys, rows


def _values(tensors: Sequence[tf.Tensor], sess: tf.compat.v1.Session | None) -> Any:
    if tf.executing_eagerly():
        return tuple(tensor.numpy() for tensor in tensors)
    session = sess or tf.compat.v1.get_default_session()
    if session is None:
        raise ValueError("sok.incremental_model_dump: a graph needs a session: give sess=, or make one the default.")
    return session.run(tensors)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _seconds(time: Any) -> float:
    if isinstance(time, datetime.datetime):
        return (time if time.tzinfo else time.replace(tzinfo=datetime.timezone.utc)).timestamp()
    if isinstance(time, (int, float)) and not isinstance(time, bool):
        return float(time)
    raise TypeError(
        f"sok.incremental_model_dump: a threshold must be a datetime.datetime or seconds since 1970, got {time!r}."
    )
