"""`tfplugin.dynamic_embedding.keras` for models of ``tf_keras``, in programs that import that beside Keras 3."""

from tfplugin.dynamic_embedding.keras import models
from tfplugin.dynamic_embedding.tf_keras import callbacks, layers

__all__ = ["callbacks", "layers", "models"]
