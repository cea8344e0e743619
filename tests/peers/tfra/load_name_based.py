"""Restore a name-based checkpoint with tf.compat.v1.train.Saver, look rows up, train on. Runs in TFRA's environment.

python load_name_based.py CHECKPOINT PARTS KEYS.npy OUT.npz
"""

from __future__ import annotations

import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

v1 = tf.compat.v1
v1.disable_eager_execution()
v1.enable_resource_variables()


def main(checkpoint: str, parts: int, keys: np.ndarray, out: str) -> None:
    """Two variables under one Adam, as a user's model has them."""
    ids = v1.placeholder(tf.int64, [None])
    wrappers, losses, variables = [], [], []
    for scope, name in (("ads", "emb"), ("users", "emb")):
        with v1.variable_scope(scope):
            policy = de.FrequencyRestrictPolicy if scope == "ads" else None
            variable = de.get_variable(name, dim=4, devices=["/CPU:0"] * parts, initializer=9.0, restrict_policy=policy)
        rows, wrapper = de.embedding_lookup(variable, ids, name=f"{scope}_rows", return_trainable=True)
        variables.append(variable)
        wrappers.append(wrapper)
        losses.append(tf.reduce_sum(rows))
    optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
    train = optimizer.minimize(tf.add_n(losses), var_list=wrappers)
    looked_up = [variable.lookup(ids, return_exists=True) for variable in variables]
    saver = v1.train.Saver()
    result = {}
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        saver.restore(session, checkpoint)
        for scope, variable, wrapper, found in zip(("ads", "users"), variables, wrappers, looked_up, strict=True):
            tables = {"values": variable}
            tables.update({slot: optimizer.get_slot(wrapper, slot).params for slot in ("m", "v")})
            if variable.restrict_policy is not None:
                tables["freqs"] = variable.restrict_policy.status
            for column, table in tables.items():
                result[f"{scope}|{column}|keys"], result[f"{scope}|{column}|values"] = session.run(table.export())
            values, exists = session.run(found, {ids: keys})
            result[f"{scope}|looked_up"], result[f"{scope}|exists"] = values, exists
        session.run(train, {ids: keys})
        for scope, variable, found in zip(("ads", "users"), variables, looked_up, strict=True):
            result[f"{scope}|trained"], _ = session.run(found, {ids: keys})
            result[f"{scope}|size"] = session.run(variable.size())
    np.savez(out, **result)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), np.load(sys.argv[3]), sys.argv[4])
