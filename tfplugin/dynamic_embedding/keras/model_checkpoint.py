"""`DEHvdModelCheckpoint`: a ModelCheckpoint of all ranks, as a callback of Keras 3 or tf_keras."""

from __future__ import annotations

import os
from typing import Any

from tfplugin import ranks
from tfplugin.dynamic_embedding.keras.models import de_hvd_save_model
from tfplugin.sok.checkpoint import Checkpoint


class _SavesOnAllRanks:
    """A model that `ModelCheckpoint` is given in place of its own, to save it."""

    def __init__(self, model: Any, signatures: Any, options: Any) -> None:
        self._model = model
        self._signatures = signatures
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: Any, overwrite: bool = True, options: Any = None, **kwargs: Any) -> None:
        del kwargs
        options = options or self._options
        de_hvd_save_model(self._model, filepath, overwrite, signatures=self._signatures, options=options)

    def save_weights(self, filepath: Any, overwrite: bool = True, options: Any = None, **kwargs: Any) -> None:
        del overwrite, kwargs
        Checkpoint(self._model).write(os.fspath(filepath), options or self._options)


class _ModelCheckpoint:
    """What `DEHvdModelCheckpoint` does beside a ModelCheckpoint."""

    _keras_3 = False

    def __init__(self, filepath: Any, *args: Any, signatures: Any = None, options: Any = None, **kwargs: Any) -> None:
        ranks.found()
        self._signatures = signatures
        self._save_options = options
        path = os.fspath(filepath)
        # Keras 3 wants the endings of its own formats.
        weights = kwargs.get("save_weights_only", args[3] if len(args) > 3 else False)
        ending = (".weights.h5" if weights else ".keras") if self._keras_3 else ""
        super().__init__(path + ending, *args, **kwargs)  # type: ignore[call-arg]
        self.filepath = path

    def _save_model(self, epoch: Any, batch: Any, logs: Any) -> None:
        model = self.model  # type: ignore[has-type]
        # Where the ranks have seen other losses, rank 0 says whether this is the best, and what the file is called.
        logs = ranks.current().allgather({name: float(value) for name, value in (logs or {}).items()})[0]
        self.set_model(_SavesOnAllRanks(model, self._signatures, self._save_options))  # type: ignore[attr-defined]
        try:
            super()._save_model(epoch, batch, logs)  # type: ignore[misc]
        finally:
            self.set_model(model)  # type: ignore[attr-defined]


def model_checkpoint_of(keras: Any, module: str) -> Any:
    """The callback for ``tf.keras`` (either kind) or ``tf_keras``. `module` is where it will be found."""
    keras_3 = not hasattr(keras.layers.Layer, "_gather_children_attribute")
    bases = (_ModelCheckpoint, keras.callbacks.ModelCheckpoint)
    return type("DEHvdModelCheckpoint", bases, {"__doc__": _DOC, "__module__": module, "_keras_3": keras_3})


_DOC = """A ``ModelCheckpoint`` for all ranks of Horovod: each has it among its callbacks, and they save together.

    It saves SavedModels by `de_hvd_save_model`; with ``save_weights_only`` checkpoints in TensorFlow's format, which
    ``tf.train.Checkpoint(model).read(filepath)`` restores. On one rank it needs no Horovod.

    Args:
      filepath: of a folder that all ranks share, with the placeholders of ``ModelCheckpoint``; any ending.
      args, kwargs: of ``ModelCheckpoint``. Rank 0's metrics decide.
      signatures: of the SavedModel.
      options: a ``tf.saved_model.SaveOptions``, or with ``save_weights_only`` a ``tf.train.CheckpointOptions``.

    Example:
      >>> model.fit(ids, targets, callbacks=[de.keras.callbacks.DEHvdModelCheckpoint("run/{epoch}")])
    """
