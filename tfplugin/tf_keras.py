"""Embedding layers for ``tf_keras``. Those for Keras 3: `tfplugin.keras`."""

import tf_keras as _tf_keras

from tfplugin.embedding_layers.layers_of import layers_of as _layers_of

_layers = _layers_of(_tf_keras, __name__)
Embedding = _layers.Embedding
EmbeddingCollection = _layers.EmbeddingCollection
TableConfig = _layers.TableConfig
FeatureConfig = _layers.FeatureConfig

__all__ = ["Embedding", "EmbeddingCollection", "FeatureConfig", "TableConfig"]
