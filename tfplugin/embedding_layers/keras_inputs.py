"""Inputs of models of one Keras in layers of the other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def refuse_other_keras(layer: Any, args: Any, kwargs: Any) -> None:
    """Raises TypeError where a layer is called with what stands for an input in a model of the other Keras."""
    own = layer._keras.__name__
    for one in tf.nest.flatten((args, kwargs)):
        if type(one).__name__.endswith("KerasTensor"):
            other = type(one).__module__.partition(".")[0]
            if other != own:
                module = "tfplugin.tf_keras" if other == "tf_keras" else "tfplugin.keras"
                raise TypeError(
                    f"Layer '{layer.name}' is one of {own}, and was given an input of {other}: take {module}."
                    f"{type(layer).__name__}."
                )
