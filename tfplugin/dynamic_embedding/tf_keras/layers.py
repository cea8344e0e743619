"""Embedding layers for ``tf_keras``."""

import tf_keras as _tf_keras

from tfplugin.dynamic_embedding.keras.layers.layers_of import layers_of as _layers_of
from tfplugin.dynamic_embedding.keras.layers.reduce_pooling import reduce_pooling

_layers = _layers_of(_tf_keras, __name__)
Embedding = BasicEmbedding = _layers.Embedding
SquashedEmbedding = _layers.SquashedEmbedding
FieldWiseEmbedding = _layers.FieldWiseEmbedding
HvdAllToAllEmbedding = _layers.HvdAllToAllEmbedding
LayerNormalization = _tf_keras.layers.LayerNormalization

__all__ = [
    "BasicEmbedding",
    "Embedding",
    "FieldWiseEmbedding",
    "HvdAllToAllEmbedding",
    "LayerNormalization",
    "SquashedEmbedding",
    "reduce_pooling",
]
