"""``tfra.dynamic_embedding.data_flow``: TensorFlow's own functions, with TFRA's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

dynamic_partition = tf.dynamic_partition


def dynamic_stitch(indices: Sequence[Any], data: Sequence[Any], use_fast: bool = True, name: str | None = None) -> Any:
    """`tf.dynamic_stitch`. `use_fast` chooses a GPU kernel in TFRA and is accepted."""
    del use_fast
    return tf.dynamic_stitch(indices, data, name=name)
