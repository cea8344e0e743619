"""Ask an exported SavedModel with plain TensorFlow: no custom op, no kvtools, no tfplugin.

python examples/stock_predict.py MODEL INPUTS.npz OUTPUTS.npz

INPUTS.npz holds an array for each input of the model's signature `serving_default`; OUTPUTS.npz gets its outputs.
"""

import sys

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow as tf

model, inputs_file, outputs_file = sys.argv[1:]
loaded = tf.saved_model.load(model)
with np.load(inputs_file) as inputs:
    outputs = loaded.signatures["serving_default"](**{name: tf.constant(inputs[name]) for name in inputs})
np.savez(outputs_file, **{name: tensor.numpy() for name, tensor in outputs.items()})
assert not {"tfplugin", "kvtools"} & sys.modules.keys()
print(f"TensorFlow {tf.__version__}, and nothing of kvtools: {len(inputs)} inputs, {len(outputs)} output")
