"""The layers of sok as layers of ``tf_keras``, for programs that import that beside Keras 3."""

import tf_keras

from tfplugin.sok.all2all_layer import all2all_layer_of
from tfplugin.sok.distributed_embedding import distributed_embedding_of

All2AllDenseEmbedding = all2all_layer_of(tf_keras)
DistributedEmbedding = distributed_embedding_of(tf_keras)
