"""`lookup_many`: lookups of many tables in one call, and in as few ops as there are kinds of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfplugin import training_mode
from tfplugin.fused_lookup import can_fuse, gather_many, pool_many
from tfplugin.keys import keys_to_tensor
from tfplugin.kv_variable import KvVariable, checked_output_dtype
from tfplugin.lookup import COMBINERS, parts_of, pooled_ids, pooled_lookup
from tfplugin.partitioned_kv_variable import PartitionedKvVariable

_CALLER = "lookup_many"


def _one_each(values: Any, count: int, what: str, single: tuple[type, ...]) -> list[Any]:
    if values is None or isinstance(values, single):
        return [values] * count
    if len(values) != count:
        raise ValueError(f"{_CALLER}: got {count} variables and {len(values)} {what}; give one for each.")
    return list(values)


@tf.autograph.experimental.do_not_convert
def lookup_many(
    variables: Sequence[KvVariable | PartitionedKvVariable],
    ids: Sequence[Any],
    *,
    weights: Sequence[Any] | None = None,
    combiners: str | Sequence[str | None] | None = None,
    training: bool | None = None,
    name: str | None = None,
    output_dtype: Any = None,
) -> list[Any]:
    """Looks up many tables at once: one op, and one for the gradient, for all that can share it.

    Tables share an op where they have device, key dtype and value dtype in common and are all looked up plainly or all
    pooled; dims and numbers of parts may differ. The op works on all of them in parallel. Results and gradients are
    those of one lookup after the other, except that a table whose result is not used gets a gradient of zeros where the
    results of others are used.

    Args:
      variables: key-value variables, partitioned or not. One may come several times.
      ids: what to look up in each: a dense tensor or a RaggedTensor of any shape for a plain lookup; a SparseTensor or
        a RaggedTensor of shape [batch, None] for a pooled one.
      weights: for each pooled lookup None or what `ids` is, of floats. Default: none have any.
      combiners: ``"sum"``, ``"mean"``, ``"sqrtn"``, or None for a plain lookup: one for all, or one for each.
      training: as for `KvVariable.sparse_read`.
      name: of the op.
      output_dtype: of all rows, as for `KvVariable.sparse_read`; default: those of the variables. Pooled lookups give
        that of the variable only.

    Returns:
      A list in the order of `variables`: for a plain lookup ``[*ids.shape, dim]`` (ragged where ids are), for a pooled
      one ``[batch, dim]``, as of ``tf.nn.embedding_lookup`` and ``tf.nn.embedding_lookup_sparse``.

    Raises:
      ValueError: lists of different lengths, an unknown combiner, weights of a plain lookup, or an `output_dtype` that
        a lookup cannot give.
      TypeError: ids that do not fit the lookup or the table's keys.

    Example:
      >>> user = tfplugin.get_kv_variable("user", embedding_dim=8)
      >>> item = tfplugin.get_kv_variable("item", embedding_dim=16)
      >>> u, i = tfplugin.lookup_many(
      ...     [user, item], [tf.constant([7, -1]), tf.ragged.constant([[1, 2], [3]])], combiners=[None, "mean"])
      >>> u.shape, i.shape
      (TensorShape([2, 8]), TensorShape([2, 16]))
    """
    variables = list(variables)
    for variable in variables:
        if not isinstance(variable, (KvVariable, PartitionedKvVariable)):
            raise TypeError(f"{_CALLER}: variables must be key-value variables, got {type(variable).__name__}.")
    count = len(variables)
    all_ids = _one_each(list(ids), count, "ids", ())
    all_weights = _one_each(weights, count, "weights", ())
    all_combiners = _one_each(combiners, count, "combiners", (str,))
    train = training_mode.is_training(training)

    results: list[Any] = [None] * count
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (variable, combiner) in enumerate(zip(variables, all_combiners, strict=True)):
        if combiner not in (None, *COMBINERS):
            raise ValueError(f"{_CALLER}: combiner must be None or one of {COMBINERS}, got {combiner!r}.")
        if combiner is None and all_weights[i] is not None:
            raise ValueError(f"{_CALLER}: weights for '{variable.name}', which has no combiner to use them.")
        parts = parts_of(variable)
        wanted = checked_output_dtype(output_dtype, parts, variable.name.removesuffix(":0"))
        if combiner is not None and wanted != variable.dtype:
            raise ValueError(
                f"{_CALLER}: pooled rows of '{variable.name}' come as {variable.dtype.name}, not as {wanted.name}. "
                f"Leave output_dtype out, and tf.cast them to {wanted.name}; or look them up plainly, and pool them "
                "yourself."
            )
        if can_fuse(parts, train):
            device = "" if parts[0]._eager else parts[0].device
            kind = (device, variable.key_dtype, variable.dtype, wanted, combiner is None)
            groups.setdefault(kind, []).append(i)
        elif combiner is None:
            results[i] = _plain(
                all_ids[i], lambda keys, v=variable: v.sparse_read(keys, training=train, output_dtype=output_dtype)
            )
        else:
            pooled = pooled_ids(variable, all_ids[i], all_weights[i], _CALLER)
            results[i] = pooled_lookup(variable, pooled, combiner, None, None, train)

    for (*_, wanted, plain), members in groups.items():
        tables = [parts_of(variables[i]) for i in members]
        if plain:
            keys = [_plain(all_ids[i], lambda k, v=variables[i]: _keys(k, v)) for i in members]
            flat = [one.flat_values if isinstance(one, tf.RaggedTensor) else one for one in keys]
            rows = gather_many(tables, flat, train, name=name, output_dtype=wanted)
            for i, one, found in zip(members, keys, rows, strict=True):
                results[i] = one.with_flat_values(found) if isinstance(one, tf.RaggedTensor) else found
        else:
            pooled = [pooled_ids(variables[i], all_ids[i], all_weights[i], _CALLER) for i in members]
            rows = pool_many(tables, pooled, [all_combiners[i] for i in members], train, name)
            for i, found in zip(members, rows, strict=True):
                results[i] = found
    return results


def _keys(keys: Any, variable: KvVariable | PartitionedKvVariable) -> tf.Tensor:
    return keys_to_tensor(keys, variable.key_dtype, variable.name)


def _plain(ids: Any, lookup: Any) -> Any:
    """`lookup` of dense ids, or of the flat values of ragged ones."""
    return ids.with_flat_values(lookup(ids.flat_values)) if isinstance(ids, tf.RaggedTensor) else lookup(ids)
