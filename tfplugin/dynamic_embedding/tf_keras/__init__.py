"""`tfplugin.dynamic_embedding.keras` for models of ``tf_keras``, in programs that import that beside Keras 3."""

import tf_keras as _tf_keras

from tfplugin.dynamic_embedding.keras import models
from tfplugin.dynamic_embedding.optimizer import register_optimizers as _register_optimizers
from tfplugin.dynamic_embedding.tf_keras import callbacks, layers

__all__ = ["callbacks", "layers", "models"]

_register_optimizers(_tf_keras)
