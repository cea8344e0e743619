"""Look up ids in an exported SavedModel with plain TensorFlow: no custom op, no kvtools, no tfplugin.

python examples/stock_lookup.py MODEL IDS.npz VECTORS.npz

IDS.npz holds one int64 array per signature; VECTORS.npz gets the vectors under the same names.
"""

import sys

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow as tf

model, ids_file, vectors_file = sys.argv[1:]
loaded = tf.saved_model.load(model)
with np.load(ids_file) as ids:
    vectors = {name: loaded.signatures[name](ids=tf.constant(ids[name]))["embeddings"].numpy() for name in ids}
np.savez(vectors_file, **vectors)
assert "tfplugin" not in sys.modules
