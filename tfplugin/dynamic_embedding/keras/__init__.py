"""Layers, saving and callbacks for models of ``tf.keras`` with dynamic embedding variables."""

from tfplugin.dynamic_embedding.keras import layers

__all__ = ["layers"]
