"""Train and inference mode: whether a lookup is something that optimizers can train."""

from __future__ import annotations


class ModelMode:
    """The mode of this process. `CURRENT_SETTING` is one of the other two."""

    TRAIN = "train"
    INFERENCE = "inference"
    CURRENT_SETTING = TRAIN


def enable_train_mode() -> None:
    """Makes lookups from here on trainable: the default."""
    ModelMode.CURRENT_SETTING = ModelMode.TRAIN


def enable_inference_mode() -> None:
    """Makes lookups from here on plain reads, which any number of threads may do at once."""
    ModelMode.CURRENT_SETTING = ModelMode.INFERENCE


def get_model_mode() -> str:
    """``"train"`` or ``"inference"``."""
    return ModelMode.CURRENT_SETTING
