"""Embedding layers for ``tf.keras``. Those for ``tf_keras`` beside Keras 3: `tfplugin.dynamic_embedding.tf_keras`."""

import tensorflow as _tf

from tfplugin.dynamic_embedding.keras.layers.layers_of import layers_of as _layers_of
from tfplugin.dynamic_embedding.keras.layers.reduce_pooling import reduce_pooling

_layers = _layers_of(_tf.keras, __name__)
Embedding = BasicEmbedding = _layers.Embedding
SquashedEmbedding = _layers.SquashedEmbedding
FieldWiseEmbedding = _layers.FieldWiseEmbedding
HvdAllToAllEmbedding = _layers.HvdAllToAllEmbedding
LayerNormalization = _tf.keras.layers.LayerNormalization

__all__ = [
    "BasicEmbedding",
    "Embedding",
    "FieldWiseEmbedding",
    "HvdAllToAllEmbedding",
    "LayerNormalization",
    "SquashedEmbedding",
    "reduce_pooling",
]
