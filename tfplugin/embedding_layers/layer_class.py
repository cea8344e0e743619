"""Classes that are made for each Keras, of one code."""

from __future__ import annotations

from typing import Any


def layer_class(
    keras: Any, package: str, module: str, name: str, bases: tuple[type, ...], doc: str | None, **attributes: Any
) -> Any:
    """A class that `keras` knows how to make again.

    Args:
      keras: ``keras`` or ``tf_keras``; also what ``tf.keras`` is.
      package: the name that files have before that of the class.
      module: where the class will be found.
      name, bases, doc: of the class.
      attributes: more of the class; `_keras` is one in any case.
    """
    made = type(name, bases, {"__doc__": doc, "__module__": module, "_keras": keras, **attributes})
    return keras.utils.register_keras_serializable(package)(made)
