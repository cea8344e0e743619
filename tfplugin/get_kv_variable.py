"""`get_kv_variable`: key-value variables under `tf.variable_scope`, with reuse and partitioners."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import func_graph
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import variable_scope

from tfplugin import placement
from tfplugin.eviction import checked_capacity, checked_rows
from tfplugin.initializers import KvInitializer, resolve
from tfplugin.keys import KEY_DTYPES
from tfplugin.kv_variable import VALUE_DTYPES, KvVariable
from tfplugin.partitioned_kv_variable import PartitionedKvVariable
from tfplugin.policies import Admission, EvictionPolicy, Policies
from tfplugin.policies import resolve as resolve_policies
from tfplugin.spilling import checked_spill

#: The module whose functions a `tf.function` has in the stack of creators while it is traced.
_FUNCTIONS = polymorphic_function.__name__

_GRAPH_ATTRIBUTE = "_tfplugin_kv_variables"

#: The ops that make variables, and what those are.
_VARIABLE_OPS = {"KvTableHandle": "table", "VarHandleOp": "dense variable", "VariableV2": "dense variable"}


def _store() -> dict[str, Any]:
    """Variables by name, one store a graph. In eager mode every call makes a new variable, as TensorFlow's own do."""
    if context.executing_eagerly():
        return {}
    # Not a collection: those are written into MetaGraphs.
    graph = tf_ops.get_default_graph()
    if not hasattr(graph, _GRAPH_ATTRIBUTE):
        setattr(graph, _GRAPH_ATTRIBUTE, {})
    return getattr(graph, _GRAPH_ATTRIBUTE)


def _check_free(name: str) -> None:
    """Refuses a name that another variable of the graph has, whole or in parts: this one would be saved by another."""
    if context.executing_eagerly():
        return
    dense = variable_scope._get_default_variable_store()
    if name in dense._vars or name in dense._partitioned_vars:
        raise ValueError(
            f"Key-value variable {name}: there is a dense variable of that name already, of "
            "tf.compat.v1.get_variable. Give one of them another name."
        )
    if (kind := _kind_in_graph(name)) is not None:
        raise ValueError(
            f"Key-value variable {name}: there is a {kind} of that name in the graph already, which "
            "get_kv_variable has not made here. Give one of them another name."
        )


def _kind_in_graph(name: str) -> str | None:
    """What kind of variable has a name in the graph, whole or in parts; None: the name is free."""
    for taken in (name, f"{name}/part_0"):
        try:
            kind = _VARIABLE_OPS.get(tf_ops.get_default_graph().get_operation_by_name(taken).type)
        except KeyError:
            continue
        if kind is not None:
            return kind
    return None


def refuse_name_of_table(original: Callable[..., Any], store: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Wraps what `tf.compat.v1.get_variable` makes or finds a dense variable by: a name that a table has is an error.

    TensorFlow would make another variable, called ``<name>_1``, whatever the scope says of reuse.
    """
    if not context.executing_eagerly():
        with tf_ops.init_scope():
            if not context.executing_eagerly() and _kind_in_graph(name) == "table":
                raise ValueError(
                    f"Variable {name}: there is a key-value variable of that name already. One that "
                    "tf.get_kv_variable made it gives again, under reuse. Otherwise give one of them another name."
                )
    return original(store, name, *args, **kwargs)


def tables_of_graph() -> dict[str, Any]:
    """The variables of the default graph, by name; none in eager mode."""
    return dict(_store())


def _key_dtype(dtype: Any, name: str) -> tf.DType:
    try:
        resolved = tf.int64 if dtype is int else tf.as_dtype(dtype)
    except TypeError as error:
        raise TypeError(f"get_kv_variable('{name}'): key_dtype {dtype!r} is not a dtype.") from error
    if resolved not in KEY_DTYPES:
        raise TypeError(
            f"get_kv_variable('{name}'): key_dtype must be one of {[d.name for d in KEY_DTYPES]} (or int), "
            f"got {resolved.name}."
        )
    return resolved


def _value_dtype(dtype: Any, name: str) -> tf.DType:
    resolved = tf.float32 if dtype in (None, float) else tf.as_dtype(dtype)
    if resolved not in VALUE_DTYPES:
        raise TypeError(
            f"get_kv_variable('{name}'): value_dtype must be one of {[d.name for d in VALUE_DTYPES]}, "
            f"got {resolved.name}."
        )
    return resolved


def _row_width(dim: Any, initializer: Any, name: str) -> int | None:
    """The width of rows that a caller asks for: by a number, by a shape, or by rows to start from."""
    asked = dim
    if isinstance(dim, (Sequence, tf.TensorShape)) and not isinstance(dim, str) and len(dim) == 1:
        dim = dim[0]
    if dim is None and asked is None:
        shape = getattr(initializer, "shape", None)
        width = tf.TensorShape(shape).as_list()[-1:] if isinstance(shape, (tuple, tf.TensorShape)) and shape else None
        return width[0] if width else None
    try:
        width_given = None if isinstance(dim, bool) else int(dim)
    except (TypeError, ValueError):
        width_given = None
    if width_given is None or width_given < 1 or width_given != dim:
        raise ValueError(f"get_kv_variable('{name}'): embedding_dim must be 1 or more, a whole number; got {asked!r}.")
    return width_given


def _part_count(partitioner: Callable[..., Any] | None, name: str, rows: int, dim: int, dtype: tf.DType) -> int | None:
    if partitioner is None:
        return None
    if not callable(partitioner):
        raise TypeError(
            f"get_kv_variable('{name}'): partitioner must be one of TensorFlow, such as "
            f"tf.compat.v1.fixed_size_partitioner(2), got {partitioner!r}."
        )
    counts = partitioner(shape=tf.TensorShape([rows, dim]), dtype=dtype)
    if not isinstance(counts, Sequence) or len(counts) != 2 or counts[0] < 1:
        raise ValueError(f"get_kv_variable('{name}'): the partitioner gave {counts!r}, expected [parts, 1].")
    if counts[1] != 1:
        raise ValueError(
            f"get_kv_variable('{name}'): the partitioner splits dimension 1 into {counts[1]}; a key-value variable is "
            "split by key only: use axis=0."
        )
    return int(counts[0])


#: By what a `tf.function` has among a graph's creators of variables: the tables that its traces made, and in which.
_made_in: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _check_first_trace(name: str, graph: Any) -> None:
    """Raises for a table that another trace of a `tf.function` has made, whose rows this one would not know."""
    creators = [
        creator for _, creator in graph._variable_creator_stack if getattr(creator, "__module__", "") == _FUNCTIONS
    ]
    while isinstance(graph.outer_graph, func_graph.FuncGraph):
        graph = graph.outer_graph
    for creator in creators:
        made = _made_in.setdefault(creator, {}).setdefault(name, weakref.ref(graph))()
        if made is None:
            _made_in[creator][name] = weakref.ref(graph)
        elif made is not graph:
            raise ValueError(
                f"get_kv_variable('{name}') in a tf.function makes a new table each time that the function is traced, "
                "as now, and the rows of the one before are not in it: make the table once, outside of the function."
            )


@tf.autograph.experimental.do_not_convert
def get_kv_variable(
    name: str,
    embedding_dim: int | Sequence[int] | None = None,
    key_dtype: Any = tf.int64,
    value_dtype: Any = tf.float32,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool | None = None,
    collections: Sequence[str] | None = None,
    partitioner: Callable[..., Any] | None = None,
    constraint: Any = None,
    capacity_hint: int = 0,
    max_capacity: int = 0,
    eviction: str | None = None,
    max_hbm: int | None = None,
    enter_threshold: int = 0,
    *,
    max_memory: int | None = None,
    spill: str | os.PathLike[str] | None = None,
    admission: Admission | None = None,
    padding_key: int | None = None,
    expiry: EvictionPolicy | Sequence[EvictionPolicy] | None = None,
    expire_every: int = 0,
    expire_on_save: bool = False,
) -> KvVariable | PartitionedKvVariable:
    """Gets a key-value variable of this name, or makes it. Follows `tf.compat.v1.variable_scope`: prefix, reuse,
    default initializer, regularizer and partitioner.

    Args:
      name: of the variable.
      embedding_dim: width of a row, also as ``[dim]``. May be left out when an existing variable is reused, or where
        `initializer` is a Tensor or an array of known width.
      key_dtype: tf.int64 (also as ``int``), tf.int32 or tf.uint64.
      value_dtype: tf.float32, tf.float16, tf.bfloat16 or tf.float64.
      initializer: what a key starts from: None (uniform in [-0.05, 0.05)), a number, an initializer, or a Tensor of
        shape [dim] or [M, dim]. It is a function of the key and a seed, so the order of keys does not matter. See
        `tfplugin.initializers`.
      regularizer: function of the rows a training lookup gave; in graph mode its result joins the collection
        REGULARIZATION_LOSSES.
      trainable: as for tf.Variable.
      collections: graph collections to join; default GLOBAL_VARIABLES. TRAINABLE_VARIABLES is added when trainable.
      partitioner: any TensorFlow partitioner along axis 0. Keys go to part ``key floor-mod parts``. Under
        ``tf.distribute.ParameterServerStrategy`` the default is a part for each server, and parts go to them in turns.
      constraint: function of rows, applied after each update to the rows it touched.
      capacity_hint: rows to make room for at once, and the first dimension that partitioners see.
      max_capacity: the most rows that a batch leaves behind; 0: any number. Further rows evict others, but not those of
        their own batch; a training lookup of more different keys than that is an error. With a partitioner it is for
        all parts together: each gets its share, rounded up.
      eviction: which rows of a variable with a `max_capacity` go first: ``"lru"``, the default, those that training
        looked up or wrote least recently; ``"lfu"``, least often; ``"custom"``, those of the lowest score that
        `KvVariable.set_scores` gave; ``"epoch_lru"`` and ``"epoch_lfu"``, those last touched in the lowest epoch
        (`KvVariable.set_epoch`), and of one epoch least recently or least often.
      max_hbm: of a variable on a GPU, the bytes of its memory that rows may take, slots included; rows beyond lie in
        pinned host memory, and those that are touched often change places with others. With a partitioner it is for
        each part. None: no bound.
      max_memory: bytes of memory that rows may take, slots included; those that training writes least lie in a file
        beyond. With a partitioner it is for all parts together: each gets its share. None: all rows are in memory.
      spill: the folder of that file, on a local disk of the machine that has the variable. The file is scratch, without
        a name: it goes with the variable, or with its process. Goes with `max_memory`.
      enter_threshold: of how many training lookups a key gets its row with the last; 0 and 1: with the first. The same
        as ``admission=tfplugin.policies.CountAdmission(enter_threshold)``. Until then a lookup gives its initial value,
        and no optimizer sees it.
      admission: which keys get a row otherwise: one of `tfplugin.policies`' classes.
      padding_key: a key that never gets a row: lookups give zeros for it, and updates and imports leave it out.
      expiry: which rows go: one or several of `tfplugin.policies`' `ExpireAfterSteps`, `ExpireAfterSeconds`,
        `ExpireBelowNorm`, `ExpireBelowFrequency` and `KeepTop`. An age is a hard bound: no lookup gives a row past it,
        and a key that comes back gets a new row. `KvVariable.evict` evicts on demand.
      expire_every: in about how many updates the policies come round once, beside training, a few rows with each
        update; less often where that would take more than a fiftieth of the time. 0: rows past their age stay in
        memory until they are written, saved or evicted on demand.
      expire_on_save: whether the rows of all policies go before each save. Rows past their age are never saved.

    Returns:
      A `KvVariable`, or a `PartitionedKvVariable` where there is a partitioner.

    In eager mode every call makes a new variable, as `tf.compat.v1.get_variable` does: keep the object.

    Raises:
      ValueError: the name exists and reuse is off, does not exist and reuse is on, or is that of a variable that was
        made otherwise; a wrong dim; a partitioner along another axis, or for another number of parts than there are; an
        impossible max_capacity, capacity_hint, eviction, max_hbm or max_memory; an eviction without a max_capacity, a
        max_memory without a spill or the other way around; policies that are out of range or contradict each other.
      TypeError: a dtype that tables do not have.

    Example:
      >>> with tf.compat.v1.variable_scope("tower", reuse=tf.compat.v1.AUTO_REUSE):
      ...     v = tf.get_kv_variable("ad", embedding_dim=16,
      ...                            partitioner=tf.compat.v1.fixed_size_partitioner(4))
    """
    scope = variable_scope.get_variable_scope()
    full_name = f"{scope.name}/{name}" if scope.name else name
    embedding_dim = _row_width(embedding_dim, initializer, full_name)
    initializer = scope.initializer if initializer is None else initializer
    regularizer = scope.regularizer if regularizer is None else regularizer
    partitioner = scope.partitioner if partitioner is None else partitioner
    constraint = getattr(scope, "constraint", None) if constraint is None else constraint
    trainable = True if trainable is None else trainable
    key = _key_dtype(key_dtype, full_name)
    value = _value_dtype(value_dtype, full_name)
    max_capacity = checked_capacity(max_capacity, eviction or "lru", full_name)
    if eviction is not None and max_capacity == 0:
        raise ValueError(
            f"Key-value variable '{full_name}': eviction={eviction!r} says which rows go, and nothing says how many "
            "stay: give max_capacity=, a number of rows."
        )
    eviction = eviction or "lru"
    capacity_hint = checked_rows(capacity_hint, "capacity_hint", full_name)
    max_memory, spill = checked_spill(max_memory, spill, f"Key-value variable '{full_name}'")
    policies = resolve_policies(
        full_name,
        key,
        enter_threshold=enter_threshold,
        admission=admission,
        padding_key=padding_key,
        expiry=expiry,
        expire_every=expire_every,
        expire_on_save=expire_on_save,
        max_capacity=max_capacity,
    )

    function = tf_ops.get_default_graph() if tf_ops.inside_function() else None
    with tf_ops.init_scope():
        store = _store()
        found = store.get(full_name)
        if found is not None and scope.reuse:
            _check_same(found, full_name, embedding_dim, key, value)
            _check_same_parts(found, full_name, partitioner, capacity_hint)
            _check_same_bound(found, full_name, max_capacity, eviction)
            _check_same_policies(found, full_name, policies)
            return found
        if found is not None:
            raise ValueError(
                f"Key-value variable {full_name} already exists. Did you mean to set reuse=True or "
                "reuse=tf.compat.v1.AUTO_REUSE in its variable_scope?"
            )
        if scope.reuse is True:
            raise ValueError(
                f"Key-value variable {full_name} does not exist, or was not created with get_kv_variable. Did you mean "
                "to set reuse=tf.compat.v1.AUTO_REUSE in its variable_scope?"
            )
        _check_free(full_name)
        if function is not None and context.executing_eagerly():
            _check_first_trace(full_name, function)
        if embedding_dim is None:
            raise ValueError(f"get_kv_variable('{full_name}'): embedding_dim is needed to make a new variable.")

        dim = int(embedding_dim)
        init = resolve(initializer, full_name, dim, value)
        if partitioner is None and placement.parameter_servers() > 1:
            partitioner = tf.compat.v1.fixed_size_partitioner(placement.parameter_servers())
        rows = capacity_hint or placement.NOMINAL_ROWS
        parts = _part_count(partitioner, full_name, rows, dim, value)
        if init.rows is not None and parts is not None:
            init = _shared_rows(init)

        def make(part_name: str, part: int, of: int) -> KvVariable:
            with placement.on_next_parameter_server(part_name):
                variable = KvVariable(
                    part_name,
                    dim,
                    key,
                    value,
                    init,
                    regularizer=regularizer,
                    trainable=trainable,
                    constraint=constraint,
                    capacity_hint=-(-capacity_hint // of),
                    max_capacity=-(-max_capacity // of),
                    eviction=eviction,
                    max_hbm=max_hbm,
                    max_memory=None if max_memory is None else -(-max_memory // of),
                    spill=spill,
                    policies=policies.of_part(of),
                    part=part,
                    parts=of,
                    parts_beside=-(-of // max(1, placement.parameter_servers())),
                    partitioned_name=None if parts is None else full_name,
                )
            add_to_collections(variable, collections, trainable)
            return variable

        made: KvVariable | PartitionedKvVariable
        if parts is None:
            made = make(full_name, 0, 1)
        else:
            made = PartitionedKvVariable(
                full_name, [make(f"{full_name}/part_{i}", i, parts) for i in range(parts)], partitioned_for=rows
            )
            placement.tell_neighbours(list(made))
        store[full_name] = made
    return made


def _shared_rows(init: KvInitializer) -> KvInitializer:
    """One sample for all parts: a key starts from the same row whatever part it is in."""
    sampled: dict[Any, tf.Tensor] = {}

    def rows() -> tf.Tensor:
        graph = tf_ops.get_default_graph()
        if graph not in sampled:
            assert init.rows is not None
            sampled[graph] = init.rows()
        return sampled[graph]

    return KvInitializer(init.kind, init.a, init.b, init.seed, rows)


def add_to_collections(variable: KvVariable, collections: Sequence[str] | None, trainable: bool) -> None:
    """In a graph, puts a variable where ``tf.compat.v1.global_variables()`` and the like find it."""
    if context.executing_eagerly():
        return
    keys = list(collections) if collections is not None else [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES]
    if trainable and tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES not in keys:
        keys.append(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
    tf_ops.add_to_collections(keys, variable)


def _check_same(found: Any, name: str, dim: int | None, key_dtype: tf.DType, value_dtype: tf.DType) -> None:
    if dim is not None and int(dim) != found.dim:
        raise ValueError(
            f"Trying to share key-value variable {name}, but specified embedding_dim {dim} and found {found.dim}."
        )
    for what, wanted, have in (("key_dtype", key_dtype, found.key_dtype), ("value_dtype", value_dtype, found.dtype)):
        if wanted != have:
            raise ValueError(
                f"Trying to share key-value variable {name}, but specified {what} {wanted.name} and found {have.name}."
            )


def _check_same_parts(found: Any, name: str, partitioner: Callable[..., Any] | None, capacity_hint: int) -> None:
    # What the partitioner was told the first time, where nothing else is said.
    hint = found.partitioned_for if isinstance(found, PartitionedKvVariable) else found.capacity_hint
    parts = _part_count(partitioner, name, capacity_hint or hint or placement.NOMINAL_ROWS, found.dim, found.dtype)
    if parts is not None and parts != len(found._kv_parts):  # None: not said
        raise ValueError(
            f"Trying to share key-value variable {name}, but specified a partitioner that gives {parts} parts, and "
            f"found {len(found._kv_parts)}. Give it the partitioner that it was made with, or none."
        )


def _check_same_bound(found: Any, name: str, max_capacity: int, eviction: str) -> None:
    if max_capacity == 0:  # not said
        return
    parts = list(found) if isinstance(found, PartitionedKvVariable) else [found]
    if parts[0].max_capacity != -(-max_capacity // len(parts)) or parts[0].eviction != eviction:
        raise ValueError(
            f"Trying to share key-value variable {name}, but specified max_capacity {max_capacity} and eviction "
            f"{eviction!r}, and found {found.max_capacity} and {found.eviction!r}."
        )


def _check_same_policies(found: Any, name: str, policies: Policies) -> None:
    if policies == Policies() or policies.of_part(len(found._kv_parts)) == found.policies:  # the first: not said
        return
    raise ValueError(
        f"Trying to share key-value variable {name}, but specified policies {policies.to_json()} and found "
        f"{found.policies.to_json() or 'none'}."
    )
