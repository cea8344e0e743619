"""Embedding layers for Keras 3, on its TensorFlow backend. Those for ``tf_keras``: `tfplugin.tf_keras`."""

import keras as _keras

from tfplugin.embedding_layers.layers_of import layers_of as _layers_of

if _keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"tfplugin.keras: Keras 3 runs on its backend '{_keras.backend.backend()}' here, and tables are TensorFlow's: "
        "set KERAS_BACKEND=tensorflow before keras is imported."
    )

_layers = _layers_of(_keras, __name__)
Embedding = _layers.Embedding
EmbeddingCollection = _layers.EmbeddingCollection
TableConfig = _layers.TableConfig
FeatureConfig = _layers.FeatureConfig
PaddingMask = _layers.PaddingMask  # files of models look for it here

__all__ = ["Embedding", "EmbeddingCollection", "FeatureConfig", "TableConfig"]
