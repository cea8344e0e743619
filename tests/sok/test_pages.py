"""The examples of the API pages as programs of their own, with only the import changed: they print what the pages say.

What the pages show for 2 GPUs is in `collective/check_pages.py`, too, with every number compared.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from ranks import launch_on_ranks

NEW, OLD = "import tfplugin.sok as sok", "from tfplugin.sok import experiment as sok"

DYNAMIC_VARIABLE = """
import numpy as np
import tensorflow as tf
{horovod}{imports}

v = sok.DynamicVariable(dimension=3, initializer="13")
print("v.shape:", v.shape)
print("v.size:", v.size)

indices = tf.convert_to_tensor([0, 1, 2**40], dtype=tf.int64)

embedding = tf.nn.embedding_lookup(v, indices)
print("embedding:", embedding)
print("v.shape:", v.shape)
print("v.size:", v.size)
"""

OPTIMIZER_WRAPPER = """
import numpy as np
import tensorflow as tf
{horovod}{imports}

v = sok.DynamicVariable(dimension=3, {var_type}initializer="13")

indices = tf.convert_to_tensor([0, 1, 2**40], dtype=tf.int64)

with tf.GradientTape() as tape:
    embedding = tf.nn.embedding_lookup(v, indices)
    print("embedding:", embedding)
    loss = tf.reduce_sum(embedding)

grads = tape.gradient(loss, [v])

optimizer = tf.keras.optimizers.SGD(learning_rate=1.0)
optimizer = sok.OptimizerWrapper(optimizer)
optimizer.apply_gradients(zip(grads, [v]))

embedding = tf.nn.embedding_lookup(v, indices)
print("embedding:", embedding)
"""

VARIABLES = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd
{imports}

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")  # nopep8
sok.init()

v = sok.Variable(np.arange(4 * 3).reshape(4, 3), dtype=tf.float32)
print("GPU%d output: %s %s" % (hvd.rank(), v.shape, v.numpy().tolist()))
v = sok.Variable(
    np.arange(5 * 3).reshape(5, 3), dtype=tf.float32, mode="localized:0"
)
print("GPU%d has of the localized one: %s" % (hvd.rank(), v.shape))
"""


def _printed(folder: Path, source: str, ranks: int = 1) -> str:
    script = folder / "example.py"
    script.write_text(source)
    run = launch_on_ranks(ranks, script)
    assert run.returncode == 0, run.stdout
    return run.stdout


def _horovod() -> str:
    return "import horovod.tensorflow as hvd\n" if importlib.util.find_spec("horovod") else ""


def _embeddings(printed: str) -> list[list[float]]:
    tensors = re.findall(r"embedding: tf\.Tensor\((.*?), shape=\(3, 3\)", printed, re.DOTALL)
    return [[float(number) for number in re.findall(r"[-\d.]+", tensor)] for tensor in tensors]


@pytest.mark.thorough
@pytest.mark.parametrize("imports", [NEW, OLD], ids=["sok", "experiment"])
def test_dynamic_variable_example(imports: str, tmp_path: Path) -> None:
    printed = _printed(tmp_path, DYNAMIC_VARIABLE.format(imports=imports, horovod=_horovod()))
    assert printed.count("v.shape: (None, 3)") == 2
    assert re.findall(r"v\.size: tf\.Tensor\(\[(\d) 3\]", printed) == ["0", "3"]
    assert _embeddings(printed) == [[13.0] * 9]


@pytest.mark.parametrize(("imports", "var_type"), [(NEW, 'var_type="hbm", '), (OLD, "")], ids=["sok", "experiment"])
def test_optimizer_wrapper_example(imports: str, var_type: str, tmp_path: Path) -> None:
    source = OPTIMIZER_WRAPPER.format(imports=imports, var_type=var_type, horovod=_horovod())
    assert _embeddings(_printed(tmp_path, source)) == [[13.0] * 9, [12.0] * 9]


@pytest.mark.thorough
def test_variable_examples_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("horovod", reason="Horovod is not installed: run `make setup-horovod`")
    printed = _printed(tmp_path, VARIABLES.format(imports=OLD), ranks=2)
    assert "GPU0 output: (2, 3) [[0.0, 1.0, 2.0], [6.0, 7.0, 8.0]]" in printed
    assert "GPU1 output: (2, 3) [[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]]" in printed
    assert "GPU0 has of the localized one: (5, 3)" in printed
    assert "GPU1 has of the localized one: (0, 3)" in printed
