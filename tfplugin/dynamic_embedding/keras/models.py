"""Saving models with dynamic embedding variables as SavedModels, from one process or from all ranks of Horovod."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfplugin import ranks
from tfplugin.dynamic_embedding.keras.rank_rows import RankRows
from tfplugin.ranks import step
from tfplugin.sok.shared_folder import shared_scratch


def de_save_model(
    model: Any,
    filepath: Any,
    overwrite: bool = True,
    include_optimizer: bool = True,
    signatures: Any = None,
    options: Any = None,
    save_traces: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Saves a model of Keras 3 or tf_keras as a SavedModel, with the rows of its embedding layers and their slots.

    Where there are several ranks, each calls it. Rank 0 writes the model, with the rows that the other ranks have of
    an `HvdAllToAllEmbedding`. What is written is whole: a single process serves it, and any number of ranks restores
    it by ``tf.train.Checkpoint(model).restore(f"{filepath}/variables/variables")``; so does ``model.load_weights`` of
    tf_keras.

    Args:
      model: built.
      filepath: of the folder, which all ranks share; that of rank 0 counts.
      overwrite: whether to write over what is there.
      include_optimizer, save_traces: as for ``model.save`` of tf_keras. A model of Keras 3 is saved with its optimizer.
      signatures, options: as for ``tf.saved_model.save``.
      args, kwargs: not used.

    Raises:
      FileExistsError: there is something, and `overwrite` is False.
      RankError: another rank failed.

    Example:
      >>> de.keras.models.de_save_model(model, "export/1")
    """
    del args, kwargs
    path: str = ranks.found().allgather(os.fspath(filepath))[0]
    doing = f"de_save_model to '{path}'"
    with step(doing):
        if ranks.rank() == 0 and not overwrite and tf.io.gfile.exists(path):
            raise FileExistsError(f"{doing}: there is something; give another path, or overwrite=True.")
        rows = RankRows(model)
    if ranks.size() == 1:
        _save(model, path, include_optimizer, signatures, options, save_traces)
        return
    with shared_scratch(Path(path).parent, doing) as scratch:
        with step(doing):
            rows.write_own(scratch)
        with step(doing):
            if ranks.rank() == 0:
                with rows.of_all_ranks(scratch):
                    _save(model, path, include_optimizer, signatures, options, save_traces)


#: The same: `de_save_model` asks Horovod whether there are several ranks.
de_hvd_save_model = de_save_model
#: TFRA has it by this name, too.
save_model = de_save_model


def _save(model: Any, path: str, include_optimizer: bool, signatures: Any, options: Any, save_traces: bool) -> None:
    if hasattr(type(model), "_gather_children_attribute"):  # tf_keras
        model.save(
            path,
            overwrite=True,
            include_optimizer=include_optimizer,
            save_format="tf",
            signatures=signatures,
            options=options,
            save_traces=save_traces,
        )
    else:
        tf.saved_model.save(model, path, signatures, options)
