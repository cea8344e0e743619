"""Optimizers for key-value variables: any TensorFlow or Keras optimizer, on the rows that a step touched."""

from tfplugin.optimizers.explanation import Explanation, explain
from tfplugin.optimizers.wrapper import OptimizerWrapper

__all__ = ["Explanation", "OptimizerWrapper", "explain"]
