"""``import tfplugin.tfra as tfra`` for code that says ``tfra.dynamic_embedding``."""

from tfplugin import dynamic_embedding

__all__ = ["dynamic_embedding"]
