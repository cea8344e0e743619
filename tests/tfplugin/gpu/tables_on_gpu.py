"""A pytest plug-in: tests of key-value variables run as they are, and their tables are on a GPU.

The GPU is the CPU (cpu_as_gpu.cc, whose library ``KVTOOLS_CPU_AS_GPU`` names), so everything else stays on the CPU:
TensorFlow's own GPU kernels want a real one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import tensorflow as tf
from tensorflow.python.framework import device as tf_device
from tensorflow.python.framework import load_library
from tensorflow.python.framework import ops as tf_ops

load_library.load_pluggable_device_library(os.environ["KVTOOLS_CPU_AS_GPU"])

tf.device("/device:CPU:0").__enter__()

from kvtools import _device_table  # noqa: E402
from tfplugin import kv_variable, placement  # noqa: E402

_device_table.stand_in_for_gpus()

wanted_device = placement.table_device


def _on_the_gpu(device: str | None) -> str:
    spec = tf_device.DeviceSpec.from_string(wanted_device(device))
    return spec.replace(device_type="GPU", device_index=0).to_string()


placement.table_device = _on_the_gpu

# Eager steps that would run wherever TensorFlow likes: on the GPU.
_op_device = kv_variable.KvVariable._op_device
kv_variable.KvVariable._op_device = lambda self: "/device:CPU:0" if self._eager else _op_device(self)

_make_graph = tf_ops.Graph.__init__


def _make_graph_on_the_cpu(graph: tf.Graph) -> None:
    _make_graph(graph)
    graph._add_device_to_stack(lambda op: op.device if op.type.startswith("Kv") and op.device else "/device:CPU:0")


tf_ops.Graph.__init__ = _make_graph_on_the_cpu


def plain_graph() -> tf.Graph:
    """One that TensorFlow places as it likes."""
    graph = tf.Graph()
    graph._device_function_stack.pop_obj()
    return graph


# Nothing else goes to the GPU for being colocated with a table, as an optimizer's scalars and its own ops do.
for _place in (tf_ops, tf_ops.Graph):  # in eager mode, in graphs
    _place.colocate_with = lambda *args, **kwargs: contextlib.nullcontext()
    _place._colocate_with_for_gradient = lambda *args, **kwargs: contextlib.nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skips what runs a GPU kernel of TensorFlow's own, as optimizers in eager mode do with their scalars."""
    try:
        return (yield)
    except Exception as error:
        if "cuLaunchKernel" in str(error):
            pytest.skip("runs a CUDA kernel of TensorFlow's")
        raise
