"""`tfplugin.dynamic_embedding.keras` for models of ``tf_keras``, in programs that import that beside Keras 3."""

from tfplugin.dynamic_embedding.tf_keras import layers

__all__ = ["layers"]
