"""What importing tfplugin changes in TensorFlow, and that `uninstall` takes all of it back."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.checkpoint import functional_saver, restore
from tensorflow.python.eager import wrap_function
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_state
from tensorflow.python.training import optimizer, saver
from tensorflow.python.util import dispatch

import tfplugin
import tfplugin.dynamic_embedding

v1 = tf.compat.v1


def _state():
    return (
        optimizer.Optimizer.apply_gradients,
        saver.BaseSaverBuilder._AddSaveOps,
        saver.BaseSaverBuilder._AddRestoreOps,
        functional_saver.MultiDeviceSaver.restore,
        restore.CheckpointPosition.bind_object,
        wrap_function._lift_unlifted_variables,
        control_flow_state._ControlFlowState.ZerosLikeV1WhileLoop,
        ops.gradient_registry.lookup("Switch"),
        tf.nn.embedding_lookup,
        v1.nn.embedding_lookup_sparse,
        tf.nn.safe_embedding_lookup_sparse,
        tf.gather,
        {api: set(targets) for api, targets in dispatch._TYPE_BASED_DISPATCH_SIGNATURES.items() if targets},
    )


@pytest.fixture
def uninstalled():
    tfplugin.uninstall()
    yield
    tfplugin.install()


def test_uninstall_leaves_tensorflow_as_a_process_without_tfplugin_has_it(tmp_path):
    code = """
import tensorflow as tf
import tensorflow.compat.v1, tensorflow.compat.v2
import tf_keras
from keras.src.saving import saving_lib
from tf_keras.src.saving import saving_lib as tf_keras_saving_lib
from tensorflow.python.checkpoint import functional_saver, restore
from tensorflow.python.eager import wrap_function
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_state
from tensorflow.python.training import optimizer, saver
from tensorflow.python.util import dispatch
def state():
    out = {op: id(ops.gradient_registry.lookup(op)) for op in ("Switch", "Merge")}
    for owner in (tf, tf.compat.v1, tf.compat.v2, tf.nn, tf.compat.v1.nn):
        out |= {(id(owner), name): id(getattr(owner, name)) for name in dir(owner) if not name.startswith("__")}
    checkpoints = (functional_saver.MultiDeviceSaver, restore.CheckpointPosition)
    graphs = (wrap_function, control_flow_state._ControlFlowState)
    for owner in (optimizer.Optimizer, saver.BaseSaverBuilder, *checkpoints, *graphs):
        out |= {(id(owner), name): id(value) for name, value in vars(owner).items()}
    archives = (*type(tf.keras.export.ExportArchive()).__mro__, *tf_keras.export.ExportArchive.__mro__)
    for owner in (*tf.keras.Model.__mro__, *tf_keras.Model.__mro__, saving_lib, tf_keras_saving_lib, *archives):
        out |= {(id(owner), name): id(value) for name, value in vars(owner).items() if callable(value)}
    for api, targets in dispatch._TYPE_BASED_DISPATCH_SIGNATURES.items():
        out |= {(id(api), id(target)): len(signatures) for target, signatures in targets.items()}
    return out
state()  # what is lazily loaded
before = state()
import tfplugin
during = state()
tfplugin.uninstall()
after = state()
print(during != before, {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True set()"


@pytest.mark.thorough
def test_the_attribute_is_on_every_way_to_import_tensorflow(tmp_path):
    code = """
import tfplugin
import tensorflow, tensorflow.compat.v1, tensorflow.compat.v2
from tensorflow.compat import v1
for module in (tensorflow, tensorflow.compat.v1, tensorflow.compat.v2, v1):
    assert module.get_kv_variable is tfplugin.get_kv_variable, module
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_install_twice_is_install_once():
    before = _state()
    tfplugin.install()
    assert _state()[:-1] == before[:-1]
    tfplugin.uninstall()
    tfplugin.uninstall()
    assert not hasattr(tf, "get_kv_variable")
    tfplugin.install()
    assert tf.get_kv_variable is tfplugin.get_kv_variable


def test_the_package_may_be_loaded_again():
    for module in (tfplugin, tfplugin.dynamic_embedding):
        assert importlib.reload(module) is module
    assert tf.get_kv_variable is tfplugin.get_kv_variable


def test_a_saver_without_the_hooks_says_so(uninstalled, session, tmp_path):
    table = tfplugin.get_kv_variable("t", embedding_dim=2)
    with pytest.raises(Exception, match=r"tfplugin|Key-value|resource"):
        v1.train.Saver([table]).save(session, str(tmp_path / "model"))


def test_ragged_lookups_of_dense_tables_are_tensorflows_own():
    dense = tf.constant([[1.0], [2.0]])
    ids = tf.ragged.constant([[1], [0, 1]], dtype=tf.int64)
    np.testing.assert_array_equal(v1.nn.embedding_lookup(dense, ids).values, [[2], [1], [2]])
    np.testing.assert_array_equal(v1.nn.embedding_lookup_sparse(dense, ids, None, combiner="sum"), [[2], [3]])
    np.testing.assert_array_equal(v1.nn.safe_embedding_lookup_sparse(dense, ids), [[2], [1.5]])


def test_stock_variables_train_and_save_as_without_tfplugin(tmp_path):
    def train(folder):
        with tf.Graph().as_default(), v1.Session() as session:
            table = v1.get_variable("t", initializer=tf.ones([4, 2]), use_resource=True)
            step = v1.train.get_or_create_global_step()
            ids = tf.SparseTensor([[0, 0], [1, 0]], tf.constant([1, 2], tf.int64), [2, 1])
            loss = tf.reduce_sum(v1.nn.safe_embedding_lookup_sparse(table, ids))
            op = v1.train.AdamOptimizer(0.1).minimize(loss, global_step=step)
            saver = v1.train.Saver()
            session.run(v1.global_variables_initializer())
            session.run(op)
            path = saver.save(session, str(folder / "model"))
            names = sorted(node.name for node in session.graph.as_graph_def().node)
        reader = tf.train.load_checkpoint(path)
        return names, {name: reader.get_tensor(name).tolist() for name in reader.get_variable_to_shape_map()}

    installed = train(tmp_path / "a")
    tfplugin.uninstall()
    try:
        assert train(tmp_path / "b") == installed
    finally:
        tfplugin.install()
