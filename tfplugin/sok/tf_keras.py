"""`All2AllDenseEmbedding` as a layer of ``tf_keras``, for programs that import that beside Keras 3."""

import tf_keras

from tfplugin.sok.all2all_layer import all2all_layer_of

All2AllDenseEmbedding = all2all_layer_of(tf_keras)
