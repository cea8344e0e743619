"""A key-value variable in parts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base as trackable
from tensorflow.python.util import dispatch

from tfplugin import async_save, saveable, training_mode
from tfplugin.eviction import scores_tensor
from tfplugin.fused_lookup import can_fuse, gather_many
from tfplugin.keys import keys_to_tensor
from tfplugin.kv_variable import KvVariable, checked_output_dtype, refuse_dense_value
from tfplugin.not_dense import NotDense
from tfplugin.policies import Policies
from tfplugin.row_counts import RowCounts, row_count
from tfplugin.row_expiry import RowExpiry
from tfplugin.scatter import Scatter


@dispatch.register_dispatchable_type
class PartitionedKvVariable(RowCounts, RowExpiry, Scatter, NotDense, trackable.Trackable):
    """A key-value variable in parts: ``name/part_i`` holds the keys with key floor-mod parts == i.

    Iterates over its parts. Everything that takes a `KvVariable` takes it.
    """

    #: See `KvVariable`.
    _trained_by_keras = True
    _how_to_train = KvVariable._how_to_train

    def __init__(self, name: str, parts: Sequence[KvVariable], *, partitioned_for: int = 0) -> None:
        self._name = name
        #: The number of rows that the partitioner was told of; 0: none was asked.
        self.partitioned_for = partitioned_for
        self._parts = list(parts)
        for part in self._parts[1:]:
            part._table = self._parts[0]._table

    @property
    def name(self) -> str:
        """The name of the whole."""
        return self._name

    @property
    def key_dtype(self) -> tf.DType:
        """Of the keys."""
        return self._parts[0].key_dtype

    @property
    def dtype(self) -> tf.DType:
        """Of the values."""
        return self._parts[0].dtype

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self._parts[0].dim

    @property
    def shape(self) -> tf.TensorShape:
        """[None, dim]."""
        return self._parts[0].shape

    def get_shape(self) -> tf.TensorShape:
        """[None, dim]."""
        return self.shape

    @property
    def _kv_parts(self) -> tuple[KvVariable, ...]:
        """The parts."""
        return tuple(self._parts)

    @property
    def trainable(self) -> bool:
        """Whether the parts are trainable."""
        return self._parts[0].trainable

    @property
    def max_capacity(self) -> int:
        """The most rows that a batch leaves behind in all parts together; 0: any number."""
        return sum(part.max_capacity for part in self._parts)

    @property
    def eviction(self) -> str:
        """Which rows of a part go first."""
        return self._parts[0].eviction

    @property
    def policies(self) -> Policies:
        """Which keys get a row, and which rows go."""
        return self._parts[0].policies

    @property
    def initializer(self) -> tf.Operation | None:
        """The op that starts all parts empty (graph mode)."""
        return tf.group(*[part.initializer for part in self._parts]) if not self._parts[0]._eager else None

    def __iter__(self) -> Iterator[KvVariable]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> KvVariable:
        return self._parts[index]

    def as_list(self) -> list[KvVariable]:
        """The parts."""
        return list(self._parts)

    def __repr__(self) -> str:
        return (
            f"<tfplugin.PartitionedKvVariable '{self._name}' {self.key_dtype.name} -> {self.dtype.name}[{self.dim}], "
            f"{len(self._parts)} parts>"
        )

    @tf.autograph.experimental.do_not_convert
    def sparse_read(
        self,
        indices: Any,
        name: str | None = None,
        *,
        training: bool | None = None,
        missing: str = "zeros",
        admission: float = 1.0,
        output_dtype: Any = None,
    ) -> tf.Tensor:
        """Rows of keys, each from the part that owns it; as `KvVariable.sparse_read`."""
        if len(self._parts) == 1:
            return self._parts[0].sparse_read(
                indices, name, training=training, missing=missing, admission=admission, output_dtype=output_dtype
            )
        if missing not in ("zeros", "initial"):
            raise ValueError(f"sparse_read of '{self._name}': missing must be 'zeros' or 'initial', got {missing!r}")
        train = training_mode.is_training(training)
        output_dtype = checked_output_dtype(output_dtype, self._parts, self._name)
        if admission == 1.0 and can_fuse(self._parts, train):
            keys = keys_to_tensor(indices, self.key_dtype, self._name)
            return gather_many([self._parts], [keys], train, missing, name, output_dtype)[0]
        with tf.name_scope(name or "kv_lookup"):
            keys, positions, part_keys = self._by_part(indices)
            rows = [
                part.sparse_read(owned, training=train, missing=missing, admission=admission, output_dtype=output_dtype)
                for part, owned in zip(self._parts, part_keys, strict=True)
            ]
            return self._stitched(keys, positions, rows)

    gather = sparse_read

    def _stitched(self, keys: tf.Tensor, positions: Sequence[tf.Tensor], rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """The parts' rows in the order of `keys`."""
        stitched = tf.dynamic_stitch(list(positions), list(rows))
        out = tf.reshape(stitched, tf.concat([tf.shape(keys), [self.dim]], 0))
        out.set_shape(keys.shape.concatenate([self.dim]))
        return out

    def sparse_read_and_evict(
        self, keys: Any, name: str | None = None, *, training: bool | None = None, admission: float = 1.0
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """As `KvVariable.sparse_read_and_evict`; what the parts evict comes part after part."""
        with tf.name_scope(name or "kv_lookup"):
            keys, positions, part_keys = self._by_part(keys)
            read = [
                part.sparse_read_and_evict(owned, training=training, admission=admission)
                for part, owned in zip(self._parts, part_keys, strict=True)
            ]
            rows, evicted_keys, evicted_rows = zip(*read, strict=True)
            return self._stitched(keys, positions, rows), tf.concat(evicted_keys, 0), tf.concat(evicted_rows, 0)

    def evicted_rows(self) -> tf.Tensor:
        """As `KvVariable.evicted_rows`, of all parts."""
        return tf.add_n([part.evicted_rows() for part in self._parts])

    def expired_rows(self) -> tf.Tensor:
        """As `KvVariable.expired_rows`, of all parts."""
        return tf.add_n([part.expired_rows() for part in self._parts])

    def export_since(self, unix_time: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """As `KvVariable.export_since`, part after part."""
        exported = [part.export_since(unix_time) for part in self._parts]
        return tf.concat([keys for keys, _ in exported], 0), tf.concat([rows for _, rows in exported], 0)

    def set_scores(self, keys: Any, scores: Any) -> tf.Tensor:
        """As `KvVariable.set_scores`."""
        _, positions, part_keys = self._by_part(keys)
        flat = tf.reshape(scores_tensor(scores), [-1])
        return tf.add_n(
            [
                part.set_scores(owned, tf.gather(flat, where))
                for part, where, owned in zip(self._parts, positions, part_keys, strict=True)
            ]
        )

    def size(self, name: str | None = None) -> tf.Tensor:
        """Number of rows in all parts: scalar int64."""
        return row_count(self, name)

    def contains(self, keys: Any) -> tf.Tensor:
        """Whether each key is there: bool, shape of keys."""
        keys, positions, part_keys = self._by_part(keys)
        found = [part.contains(owned) for part, owned in zip(self._parts, part_keys, strict=True)]
        return self._in_places(keys, positions, found)

    def stamps(self, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Frequency and version of keys; as `KvVariable.stamps`."""
        keys, positions, part_keys = self._by_part(keys)
        stamps = [part.stamps(owned) for part, owned in zip(self._parts, part_keys, strict=True)]
        freqs, versions = (self._in_places(keys, positions, list(column)) for column in zip(*stamps, strict=True))
        return freqs, versions

    def zeroed(self, keys: Any) -> tf.Tensor:
        """Whether a group penalty has zeroed the row of each key: bool, shape of keys."""
        keys, positions, part_keys = self._by_part(keys)
        zeroed = [part.zeroed(owned) for part, owned in zip(self._parts, part_keys, strict=True)]
        return self._in_places(keys, positions, zeroed)

    def zeroed_rows(self) -> tf.Tensor:
        """How many rows of all parts a group penalty has zeroed: scalar int64."""
        return tf.add_n([part.zeroed_rows() for part in self._parts])

    def skipped_updates(self) -> tf.Tensor:
        """As `KvVariable.skipped_updates`, of all parts."""
        return tf.add_n([part.skipped_updates() for part in self._parts])

    def memory(self) -> tf.Tensor:
        """As `KvVariable.memory`, of all parts."""
        return tf.add_n([part.memory() for part in self._parts])

    def upsert(self, keys: Any, rows: Any) -> tf.Operation | None:
        """Writes rows, inserting keys that are not there; as `KvVariable.upsert`."""
        return self._write("upsert", keys, rows)

    def accumulate(self, keys: Any, deltas: Any) -> tf.Operation | None:
        """Adds to rows; as `KvVariable.accumulate`."""
        return self._write("accumulate", keys, deltas)

    def _write(self, method: str, keys: Any, rows: Any) -> tf.Operation | None:
        keys, positions, part_keys = self._by_part(keys)
        rows = tf.convert_to_tensor(rows, self.dtype)
        wanted = keys.shape.concatenate([self.dim])
        flat = tf.TensorShape([keys.shape.num_elements(), self.dim])
        if not (rows.shape.is_compatible_with(wanted) or rows.shape.is_compatible_with(flat)):
            raise ValueError(
                f"{method} of key-value variable '{self._name}' wants rows of shape {wanted} for keys of shape "
                f"{keys.shape}, got {rows.shape}."
            )
        rows = tf.reshape(rows, [-1, self.dim])
        return tf.group(
            *[
                getattr(part, f"_{method}")(owned, tf.gather(rows, where))
                for part, where, owned in zip(self._parts, positions, part_keys, strict=True)
            ]
        )

    def remove(self, keys: Any) -> tf.Tensor:
        """Removes keys; returns how many were there: scalar int64."""
        _, _, part_keys = self._by_part(keys)
        return tf.add_n([part.remove(owned) for part, owned in zip(self._parts, part_keys, strict=True)])

    def clear(self) -> tf.Operation | None:
        """Removes all rows."""
        return tf.group(*[part.clear() for part in self._parts])

    def reset_slots(self) -> tf.Operation | None:
        """See `KvVariable.reset_slots`."""
        return tf.group(*[part.reset_slots() for part in self._parts])

    def export(self, slot: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and their rows [N, dim], part after part."""
        exported = [part.export(slot) for part in self._parts]
        return tf.concat([keys for keys, _ in exported], 0), tf.concat([rows for _, rows in exported], 0)

    def __deepcopy__(self, memo: Any) -> PartitionedKvVariable:
        memo[id(self)] = copied = PartitionedKvVariable(self._name, copy.deepcopy(self._parts, memo))
        return copied

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {f"part_{i}": functools.partial(saveable.of_part, part) for i, part in enumerate(self._parts)}

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        async_save.take(self, object_map)

    # In a checkpoint the parts are saved together, so that they restore into any other number; in a SavedModel each
    # is an object of its own, because functions capture its handle.
    def _trackable_children(self, save_type: str = trackable.SaveType.CHECKPOINT, **kwargs: Any) -> dict[str, Any]:
        children = dict(super()._trackable_children(save_type, **kwargs))
        if save_type == trackable.SaveType.SAVEDMODEL:
            children.update({f"part_{i}": part for i, part in enumerate(self._parts)})
        return children

    def _export_to_saved_model_graph(self, object_map: Any, tensor_map: Any, **kwargs: Any) -> list[tf.Tensor]:
        # Parts have been mapped before: they are dependencies, see `_deserialization_dependencies`.
        object_map[self] = PartitionedKvVariable(self._name, [object_map[part] for part in self._parts])
        return []

    def _deserialization_dependencies(self, children: dict[str, Any]) -> dict[str, Any]:
        return {f"part_{i}": part for i, part in enumerate(self._parts)}


def put_together(parts: Sequence[KvVariable]) -> Iterator[PartitionedKvVariable]:
    """The variables that parts, in any order, are all the parts of; parts of others are left out."""
    named: dict[tuple[str, int], list[KvVariable]] = {}
    for part in parts:
        if part.partitioned_name is not None:
            named.setdefault((part.partitioned_name, part.parts), []).append(part)
    for (name, count), group in named.items():
        group.sort(key=lambda part: part.part)
        if [part.part for part in group] == [*range(count)]:
            yield PartitionedKvVariable(name, group)


def flat_variables(variables: Any) -> Any:
    """Variables, or one, as a list that has partitioned ones as their parts; None of None."""
    if variables is None:
        return None
    listed = [variables] if hasattr(variables, "dtype") else variables
    return [part for v in listed for part in (v if isinstance(v, PartitionedKvVariable) else [v])]


tf.register_tensor_conversion_function(PartitionedKvVariable, refuse_dense_value)
