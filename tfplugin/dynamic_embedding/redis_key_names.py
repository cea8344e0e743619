"""String keys of tables in Redis, which has them as they are. Updates go by hashes, and hold the strings meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.dynamic_embedding.table_files import call
from tfplugin.string_hash import string_keys


class RedisKeyNames:
    """The strings of the hashes that updates are at.

    Args:
      name: of the variable, for messages.
      checkpoint: not used: Redis keeps them.
    """

    def __init__(self, name: str, checkpoint: bool = False) -> None:
        del checkpoint
        self._name = name
        self._lock = threading.Lock()
        #: By hash: its string, and how many updates hold it.
        self._held: dict[int, tuple[bytes, int]] = {}

    def hold(self, keys: tf.Tensor) -> tf.Tensor:
        """The hashes of keys, int64 of their shape, whose strings are known until `release`.

        Raises:
          ValueError: two keys have one hash. In a graph, a `tf.errors.OpError`.
        """

        def hold(ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
            with self._lock:
                for at, key in dict(zip(np.ravel(ids).tolist(), np.ravel(keys).tolist(), strict=True)).items():
                    known, count = self._held.get(at, (key, 0))
                    if known != key:
                        raise ValueError(
                            f"Dynamic embedding variable '{self._name}': keys {known!r} and {key!r} share a hash: "
                            "leave one out, or hash keys to numbers of your own."
                        )
                    self._held[at] = (key, count + 1)
            return ids

        held = tf.convert_to_tensor(call(hold, [string_keys(keys), keys], tf.int64), tf.int64)
        held.set_shape(keys.shape)
        return held

    def of(self, ids: np.ndarray) -> np.ndarray:
        """The strings of hashes that are held."""
        with self._lock:
            found = [self._held[at][0] for at in ids.tolist()]
        strings = np.empty(len(found), object)
        strings[:] = found
        return strings

    def release(self, ids: np.ndarray) -> None:
        """Lets go of the strings of an update's hashes, each of which is there once."""
        with self._lock:
            for at in np.unique(ids).tolist():
                key, count = self._held.pop(at)
                if count > 1:
                    self._held[at] = (key, count - 1)

    def note(self, ids: tf.Tensor, keys: tf.Tensor) -> Any:
        """As of `KeyNames`: an update is done. Redis has the strings, so that those it held for this call go."""
        del keys
        return call(self.release, [tf.reshape(ids, [-1])], [])
