"""Layers, saving and callbacks for models of ``tf.keras`` with dynamic embedding variables."""

import tensorflow as _tf

from tfplugin.dynamic_embedding.keras import callbacks, layers, models
from tfplugin.dynamic_embedding.optimizer import register_optimizers as _register_optimizers

__all__ = ["callbacks", "layers", "models"]

_register_optimizers(_tf.keras)
