"""Write checkpoints of every kind with TFRA itself, and what is in them, for test_tfra.py. Runs in TFRA's environment.

python write.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow_recommenders_addons import dynamic_embedding as de

v1 = tf.compat.v1
KEYS = np.array([-(2**63), -(2**40), -7, -1, 0, 1, 2, 3, 5, 2**31, 2**40 + 1, 2**63 - 1, *range(100, 160)])
CPU = "/CPU:0"
expected: dict[str, np.ndarray] = {}


def expect(case: str, table: str, column: str, keys, values) -> None:
    """Note what a table, or a slot of one, holds; bfloat16 as its bits."""
    values = np.asarray(values)
    expected[f"{case}|{table}|{column}|keys"] = np.asarray(keys)
    expected[f"{case}|{table}|{column}|values"] = values.view(np.uint16) if values.dtype.itemsize == 2 else values


def name_based(folder: Path) -> None:
    """tf.compat.v1.train.Saver: variables of several parts and key types, with slots and status."""
    with tf.Graph().as_default():
        v1.enable_resource_variables()
        with v1.variable_scope("deep"):
            a = de.get_variable(
                "a_emb",
                dim=4,
                devices=[CPU] * 3,
                initializer=v1.random_normal_initializer(),
                restrict_policy=de.FrequencyRestrictPolicy,
            )
        b = de.get_variable("b/emb", key_dtype=tf.int32, dim=8, devices=[CPU] * 2, short_file_name=True)
        c = de.get_variable("c", dim=2, initializer=0.5, restrict_policy=de.TimestampRestrictPolicy)
        dense = v1.get_variable("dense", initializer=np.float32([[1, 2]]))
        ids = v1.placeholder(tf.int64, [None])
        rows, wrappers = [], []
        for variable in (a, b, c):
            found, wrapper = de.embedding_lookup(
                variable,
                tf.cast(ids, variable.key_dtype),
                name="rows_" + variable.name.replace("/", "_"),
                return_trainable=True,
            )
            rows.append(tf.reduce_sum(found * found) + tf.reduce_sum(found))
            wrappers.append(wrapper)
        optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1, name="MyAdam"))
        train = optimizer.minimize(tf.add_n(rows) + tf.reduce_sum(dense**2), var_list=[*wrappers, dense])
        # One slot lacks a row, as where rows came into the table by another way than training.
        more = a.upsert(tf.constant([12345], tf.int64), tf.ones([1, 4]))
        saver = v1.train.Saver()
        (folder / "name_based").mkdir()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(train, {ids: np.random.default_rng(0).permutation(KEYS.astype(np.int32).astype(np.int64))})
            session.run(train, {ids: KEYS[12:]})
            session.run(more)
            saver.save(session, str(folder / "name_based" / "model.ckpt"), global_step=4)
            names = (("deep/a_emb", "MyAdam"), ("b/emb", "Adam"), ("c", "MyAdam"))
            for variable, wrapper, (name, slot_name) in zip((a, b, c), wrappers, names, strict=True):
                expect("name_based", name, "values", *session.run(variable.export()))
                for slot in ("m", "v"):
                    exported = session.run(optimizer.get_slot(wrapper, slot).params.export())
                    expect("name_based", name, f"slot:{slot_name}.{slot}", *exported)
                if variable.restrict_policy is not None:
                    column = "freqs" if variable is a else "versions"
                    expect("name_based", name, column, *session.run(variable.restrict_policy.status.export()))
            expected["name_based|dense"] = session.run(dense)


def types(folder: Path) -> None:
    """Every pair of types that is no string, and an empty table."""
    module = tf.Module()
    pairs = [(tf.int64, t) for t in (tf.float32, tf.float64, tf.int32, tf.int64, tf.int8, tf.float16, tf.bfloat16)]
    pairs += [(tf.int32, t) for t in (tf.float32, tf.float64, tf.int32, tf.bfloat16)]
    for key_dtype, value_dtype in pairs:
        name = f"{key_dtype.name}_{value_dtype.name}"
        variable = de.get_variable(name, key_dtype=key_dtype, value_dtype=value_dtype, dim=3, devices=[CPU] * 2)
        keys = KEYS if key_dtype == tf.int64 else KEYS[12:].astype(np.int32) * -1000
        values = tf.cast(np.random.default_rng(1).integers(-100, 100, (len(keys), 3)), value_dtype)
        variable.upsert(keys, values)
        setattr(module, name, variable)
        expect("types", name, "values", keys, values.numpy())
    module.empty = de.get_variable("empty", dim=5, devices=[CPU] * 2)
    expect("types", "empty", "values", np.empty(0, np.int64), np.empty((0, 5), np.float32))
    module.strings = de.get_variable("strings", key_dtype=tf.string, dim=2)
    module.strings.upsert(tf.constant(["a", "bc"]), tf.ones([2, 2]))
    tf.train.Checkpoint(module=module).write(str(folder / "types" / "ckpt"))


def object_based(folder: Path) -> None:
    """tf.train.Checkpoint, with slots of a Keras optimizer of either kind, and SavedModel."""
    for case, optimizer in (
        ("keras", tf_keras.optimizers.Adam(0.1)),
        ("legacy", tf_keras.optimizers.legacy.Adagrad(0.1)),
    ):
        variable = de.get_variable(f"{case}/emb", dim=4, devices=[CPU] * 3, restrict_policy=de.FrequencyRestrictPolicy)
        shadow = de.shadow_ops.ShadowVariable(variable, name=f"{case}_rows")
        optimizer = de.DynamicEmbeddingOptimizer(optimizer)
        if case == "keras":
            optimizer.build([shadow])

        def loss(shadow=shadow):
            return tf.reduce_sum((de.shadow_ops.embedding_lookup(shadow, tf.constant(KEYS)) - 1.0) ** 2)

        for _ in range(2):
            optimizer.minimize(loss, [shadow])
        module = tf.Module()
        module.variable, module.shadow = variable, shadow
        path = folder / case / "ckpt"
        tf.train.Checkpoint(module=module, optimizer=optimizer).write(str(path))
        expect(case, f"{case}/emb", "values", *variable.export())
        expect(case, f"{case}/emb", "freqs", *variable.restrict_policy.status.export())
        for slot in shadow._optimizer_vars.value:
            label = {"m": "Adam.m", "v": "Adam.v", "accumulator": "Adagrad.accumulator"}[slot.name.split("/")[-1]]
            expect(case, f"{case}/emb", f"slot:{label}", *slot.export())
    model = tf.Module()
    model.variable = variable

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def look_up(ids):
        return model.variable.lookup(ids)

    options = tf.saved_model.SaveOptions(namespace_whitelist=["TFRA"])
    tf.saved_model.save(model, str(folder / "saved_model"), signatures=look_up, options=options)
    expect("saved_model", "legacy/emb", "values", *variable.export())
    expect("saved_model", "legacy/emb", "freqs", *variable.restrict_policy.status.export())


def files(folder: Path) -> None:
    """FileSystemSaver beside a checkpoint, two processes, other types, and a table that saves itself."""
    saver = de.CuckooHashTableCreator(saver=de.FileSystemSaver())
    variable = de.get_variable("in/files", dim=4, devices=[CPU] * 2, kv_creator=saver)
    values = np.random.default_rng(2).normal(size=(len(KEYS), 4)).astype(np.float32)
    variable.upsert(KEYS, values)
    module = tf.Module()
    module.variable = variable
    module.dense = tf.Variable([1.0, 2.0])
    tf.train.Checkpoint(module=module).write(str(folder / "beside" / "ckpt"))
    expect("beside", "in/files", "values", KEYS, values)
    variable.save_to_file_system(str(folder / "direct"), proc_size=1, proc_rank=0)
    expect("direct", "in_files", "values", KEYS, values)
    for rank in range(2):
        one = de.get_variable(f"rank_{rank}", dim=4, devices=[CPU] * 2)
        one.upsert(KEYS[rank::2], values[rank::2])
        names = [f"ranked_mht_{i}of2_rank{rank}_size2" for i in (1, 2)]
        one.save_to_file_system(str(folder / "ranks"), file_name_list=names)
    expect("ranks", "ranked", "values", KEYS, values)
    half = de.get_variable("half", key_dtype=tf.int64, value_dtype=tf.float16, dim=3)
    half.upsert(KEYS, tf.cast(values[:, :3], tf.float16))
    half.tables[0].save_to_file_system(str(folder / "half"))
    expect("half", "half", "values", KEYS, values[:, :3].astype(np.float16))
    strings = de.get_variable("text", key_dtype=tf.string, dim=3)
    strings.upsert(tf.constant(["hello", "x" * 40]), tf.ones([2, 3]))
    strings.save_to_file_system(str(folder / "strings"))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for write in (types, object_based, files, name_based):
        write(folder)
    expected["cuda"] = np.array(tf.test.is_built_with_cuda())
    np.savez(folder / "expected.npz", **expected)
