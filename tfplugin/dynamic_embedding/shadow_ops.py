"""Lookups through an object that stays: for eager code, `tf.function` and modules."""

from tfplugin.dynamic_embedding.hvd_variable import HvdVariable
from tfplugin.dynamic_embedding.shadow_variable import (
    ShadowVariable,
    embedding_lookup,
    embedding_lookup_unique,
    embedding_lookup_unique_base,
)

__all__ = [
    "HvdVariable",
    "ShadowVariable",
    "embedding_lookup",
    "embedding_lookup_unique",
    "embedding_lookup_unique_base",
]
