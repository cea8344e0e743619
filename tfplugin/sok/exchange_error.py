"""The message of a rank that cannot look up what the others do."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfplugin import ranks


def error_to_all(text: str) -> tuple[tf.Tensor, tf.Tensor]:
    """What this rank sends to all in place of keys, and how much of it to each: on every rank KvExchangeServe fails.

    The words are those of kernels/include/kvtable/exchange_message.h.
    """
    size, encoded = ranks.size(), text.encode()
    words = np.frombuffer(encoded + bytes(-len(encoded) % 8), np.int64)
    message = np.concatenate([np.array([len(encoded), 0], np.int64), words])
    return tf.constant(np.tile(message, size)), tf.constant(np.full(size, len(message), np.int32))
