"""Layers, saving and callbacks for models of ``tf.keras`` with dynamic embedding variables."""

from tfplugin.dynamic_embedding.keras import callbacks, layers, models

__all__ = ["callbacks", "layers", "models"]
