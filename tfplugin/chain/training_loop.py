"""A chain that is written as Keras, or a monitored session, trains."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

v1 = tf.compat.v1


class _SavesBetweenBatches:
    """What the callback does beside a Callback."""

    #: Logs need not be turned into numbers for it.
    _supports_tf_logs = True

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self.manager = manager

    def _step(self) -> int | None:
        if self.manager._step_counter is not None:
            return None  # which it asks itself
        iterations = getattr(getattr(self.model, "optimizer", None), "iterations", None)  # type: ignore[attr-defined]
        return None if iterations is None else int(tf.convert_to_tensor(iterations))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves when it is due."""
        del batch, logs
        if self.manager.is_due():
            self.manager.save_if_due(step=self._step())

    def on_train_end(self, logs: Any = None) -> None:
        """Saves, waits until it is written, and lets go of the folder."""
        del logs
        self.manager.save(check_interval=False, step=self._step())
        self.manager.close()


def callback_of(keras: Any) -> Any:
    """The class of the callback for a Keras."""
    return type("ChainCallback", (_SavesBetweenBatches, keras.callbacks.Callback), {"__module__": __name__})


class _SavesBetweenSteps(v1.train.SessionRunHook):
    """What `hook` of a manager gives."""

    def __init__(self, manager: Any, restore: bool) -> None:
        self._manager = manager
        self._restore = restore

    def after_create_session(self, session: Any, coord: Any) -> None:
        del coord
        if self._restore:
            self._manager.restore_or_initialize(session=session)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        del run_values
        self._manager.save_if_due(session=run_context.session)

    def end(self, session: Any) -> None:
        self._manager.save(check_interval=False, session=session)
        self._manager.close()


def hook_of(manager: Any, restore: bool) -> v1.train.SessionRunHook:
    """A hook that saves when it is due."""
    return _SavesBetweenSteps(manager, restore)
