"""A user's two models, in a graph and in eager mode. They are told from which package `dynamic_embedding` comes.

Both packages train it on the same data, each in its own process: what it does must not depend on which.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
KEYS = np.array([-(2**63), -(2**40), -7, -1, 0, 1, 2, 3, 5, 2**31, 2**40 + 1, 2**63 - 1, *range(100, 120)])
DIM = 4
#: What numbers TFRA's tables hold on CPUs.
TYPES = {
    "int64": ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8"),
    "int32": ("float32", "float64", "bfloat16", "int32"),
}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a step, each once, and a number for each of their rows: the gradients differ by key and by step."""
    random = np.random.default_rng(step)
    new = np.array([1000 + step, -1000 - step])
    ids = np.concatenate([random.permutation(KEYS)[:20], new])
    return ids, random.normal(size=(len(ids), DIM)).astype(np.float32)


def initial_rows() -> np.ndarray:
    """Rows for the keys, so that no initializer decides what is trained."""
    return np.random.default_rng(99).normal(size=(len(KEYS), DIM)).astype(np.float32)


def typed(de: Any, devices: int, fill: bool) -> dict[str, Any]:
    """A variable for each pair of types, by their names; with rows that each of them holds exactly, or empty."""
    found = {}
    for key_dtype, value_dtypes in TYPES.items():
        keys = KEYS if key_dtype == "int64" else KEYS[12:] * -1000
        for value_dtype in value_dtypes:
            name = f"{key_dtype}_{value_dtype}"
            found[name] = de.Variable(
                getattr(tf, key_dtype), getattr(tf, value_dtype), dim=3, name=name, devices=["/CPU:0"] * devices
            )
            if fill:
                rows = np.random.default_rng(1).integers(-100, 100, (len(keys), 3))
                found[name].upsert(tf.constant(keys, key_dtype), tf.cast(rows, value_dtype))
    return found


def bits(values: Any) -> np.ndarray:
    """Numbers as arrays of NumPy's own types: bfloat16 as its bits."""
    values = np.asarray(values)
    return values.view(np.uint16) if values.dtype.name == "bfloat16" else values


def kv_creator(de: Any, files: bool) -> Any:
    """What puts tables into files beside a checkpoint, or nothing."""
    return de.CuckooHashTableCreator(saver=de.FileSystemSaver()) if files else None


class GraphModel:
    """Three tables under three optimizers of tf.compat.v1.train, and a dense variable. Made in a graph of its own."""

    def __init__(self, de: Any, devices: int, files: bool = False) -> None:
        v1.enable_resource_variables()
        self.ids = v1.placeholder(tf.int64, [None])
        self.factors = v1.placeholder(tf.float32, [None, DIM])
        self.dense = v1.get_variable("dense", initializer=np.float32([1, 2, 3, 4]))
        made = {
            "tower/ad": (v1.train.AdamOptimizer(0.1), de.FrequencyRestrictPolicy),
            "user": (v1.train.AdagradOptimizer(0.1, initial_accumulator_value=0.5), de.TimestampRestrictPolicy),
            "item": (v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01), None),
        }
        self.variables, self.optimizers, steps = {}, {}, []
        for name, (optimizer, policy) in made.items():
            scope, _, last = name.rpartition("/")
            with v1.variable_scope(scope or v1.get_variable_scope()):
                variable = de.get_variable(
                    last,
                    dim=DIM,
                    devices=["/CPU:0"] * devices,
                    initializer=0.25,
                    restrict_policy=policy,
                    kv_creator=kv_creator(de, files),
                )
            rows, trainable = de.embedding_lookup(variable, self.ids, name=f"{last}_rows", return_trainable=True)
            loss = tf.reduce_sum(rows * self.factors + rows * rows / 2)
            trained = [trainable]
            if name == "tower/ad":
                loss += tf.reduce_sum(rows * self.dense)
                trained.append(self.dense)
            self.variables[name], self.optimizers[name] = variable, de.DynamicEmbeddingOptimizer(optimizer)
            steps.append(self.optimizers[name].minimize(loss, var_list=trained))
        self.step = tf.group(*steps)
        self.initial = [v.upsert(tf.constant(KEYS), tf.constant(initial_rows())) for v in self.variables.values()]
        self.exports = {f"{table}|{column}": v.export() for (table, column), v in self.tables().items()}
        # TFRA's v1.train.Saver leaves the files out.
        self.saver = de.train.DEHvdSaver() if files else v1.train.Saver()
        self.session = v1.Session()
        self.session.run(v1.global_variables_initializer())

    def tables(self) -> dict[tuple[str, str], Any]:
        """The variables, their slots and their status, by variable and what of it they are."""
        found = {}
        for name, variable in self.variables.items():
            found[name, "values"] = variable
            for slot in variable.get_slot_variables(self.optimizers[name]):
                found[name, slot.name.rpartition("/")[2]] = slot
            if variable.restrict_policy is not None:
                found[name, "status"] = variable.restrict_policy.status
        return found

    def fill(self) -> None:
        """Gives the keys their first rows."""
        self.session.run(self.initial)

    def train(self, steps: range) -> None:
        """Takes these steps."""
        for step in steps:
            ids, factors = batch(step)
            self.session.run(self.step, {self.ids: ids, self.factors: factors})

    def state(self) -> dict[str, np.ndarray]:
        """All that a checkpoint holds: keys and values of each table, and the dense variable."""
        found = {"dense": self.session.run(self.dense)}
        for name, (keys, values) in self.session.run(self.exports).items():
            found[f"{name}|keys"], found[f"{name}|values"] = keys, values
        return found


class EagerModel(tf.Module):
    """Tables under optimizers of Keras, with shadow variables. `optimizers` make them: for "user" and for "item"."""

    def __init__(self, de: Any, devices: int, optimizers: dict[str, Any], files: bool = False) -> None:
        super().__init__()
        self._de = de
        self.user, self.item = (
            de.Variable(
                name=name,
                dim=DIM,
                devices=["/CPU:0"] * devices,
                initializer=0.25,
                restrict_policy=policy,
                kv_creator=kv_creator(de, files),
            )
            for name, policy in (("tower/user", de.FrequencyRestrictPolicy), ("tower/item", None))
        )
        self.user_rows = de.shadow_ops.ShadowVariable(self.user, name="user_rows")
        self.item_rows = de.shadow_ops.ShadowVariable(self.item, name="item_rows")
        self.optimizers = {name: de.DynamicEmbeddingOptimizer(made) for name, made in optimizers.items()}
        self.checkpoint = tf.train.Checkpoint(
            model=self, **{f"{name}_optimizer": o for name, o in self.optimizers.items()}
        )
        for name, optimizer in self.optimizers.items():
            if hasattr(optimizer, "build"):
                optimizer.build([getattr(self, f"{name}_rows")])

    def fill(self) -> None:
        """Gives the keys their first rows."""
        for name in ("user", "item"):
            getattr(self, name).upsert(tf.constant(KEYS), tf.constant(initial_rows()))

    def train(self, steps: range) -> None:
        """Takes these steps."""
        for step in steps:
            ids, factors = (tf.constant(array) for array in batch(step))
            for name, optimizer in self.optimizers.items():
                shadow = getattr(self, f"{name}_rows")
                with tf.GradientTape() as tape:
                    rows = self._de.shadow_ops.embedding_lookup(shadow, ids)
                    loss = tf.reduce_sum(rows * factors + rows * rows / 2)
                optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])

    def tables(self) -> dict[tuple[str, str], Any]:
        """As of `GraphModel`."""
        found = {}
        for name, optimizer in self.optimizers.items():
            variable, shadow = getattr(self, name), getattr(self, f"{name}_rows")
            found[name, "values"] = variable
            slots = shadow._optimizer_vars.value if hasattr(shadow, "_optimizer_vars") else None
            for slot in variable.get_slot_variables(optimizer) if slots is None else slots:
                found[name, slot.name.rpartition("/")[2]] = slot
            if variable.restrict_policy is not None:
                found[name, "status"] = variable.restrict_policy.status
        return found

    def state(self) -> dict[str, np.ndarray]:
        """As of `GraphModel`."""
        found = {}
        for (table, column), variable in self.tables().items():
            keys, values = variable.export()
            found[f"{table}|{column}|keys"], found[f"{table}|{column}|values"] = keys.numpy(), values.numpy()
        return found
