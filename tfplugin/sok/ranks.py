"""Which rank this process is, and how the ranks talk: over Horovod, or not at all where there is only one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops


class SingleRank:
    """One process: nothing is sent anywhere."""

    rank = 0
    size = 1

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """What the others sent, and how much each did; see `HorovodRanks.alltoall`."""
        del name
        return tf.identity(tensor), splits

    def allgather(self, values: Any) -> list[Any]:
        """What every rank gave, by rank."""
        return [values]


class HorovodRanks:
    """The processes that ``horovodrun`` started."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends ``splits[r]`` rows of `tensor` to each rank r, in order. Has a gradient.

        Args:
          tensor: [sum of splits, ...].
          splits: [size], tf.int32.
          name: the same on all ranks, and of no other exchange under way at that time.

        Returns:
          The rows received, those of rank 0 first, and how many came from each rank.
        """
        # The transport is the host's: a device scope around the lookup is not about it.
        with tf.device("CPU:0"):
            received, received_splits = self._hvd.alltoall(tensor, splits=splits, name=name)
        received.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
        received_splits.set_shape([self.size])
        return received, received_splits

    def allgather(self, values: Any) -> list[Any]:
        """What every rank gave, by rank: any objects that pickle. Eager only."""
        gathered: list[Any] = self._hvd.allgather_object(values)
        return gathered


Ranks = SingleRank | HorovodRanks

_current: Ranks | None = None


class RankError(RuntimeError):
    """Another rank failed; the message says which, and how."""


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool | None = None) -> None:
    """Finds out which rank this process is. Call it after ``hvd.init()``; calling it again is harmless.

    Without Horovod, in a process that was not started by ``horovodrun``, everything works as a single rank.

    Args:
      comm_tool: ``"horovod"``.
      use_legacy_optimizer: accepted for code written for SparseOperationKit, which replaces ``tf.keras.optimizers``
        where it is True. Nothing is replaced here, and every Keras optimizer works.

    Raises:
      ValueError: another comm_tool.
      RuntimeError: ``hvd.init()`` has not been called, or the process was started by ``horovodrun`` and Horovod is not
        installed.

    Example:
      >>> import horovod.tensorflow as hvd
      >>> hvd.init()
      >>> sok.init()
    """
    del use_legacy_optimizer
    if comm_tool != "horovod":
        raise ValueError(f"sok.init: comm_tool must be 'horovod', got {comm_tool!r}.")
    global _current
    hvd = _horovod()
    if hvd is None:
        _current = SingleRank()
        return
    if not hvd.is_initialized():
        raise RuntimeError("sok.init: Horovod is not initialized: call hvd.init() first, then sok.init().")
    _current = HorovodRanks(hvd) if hvd.size() > 1 else SingleRank()


def _horovod() -> Any:
    """Horovod for TensorFlow, or None where it is not installed and not needed."""
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        if launched_ranks() > 1:
            raise RuntimeError(
                f"sok: this process is one of {launched_ranks()} that horovodrun started, but Horovod does not import "
                f"here ({error}): run `kvtools setup-horovod` in this environment."
            ) from error
        return None
    return hvd


def launched_ranks() -> int:
    """How many processes ``horovodrun`` (or MPI, on Horovod's behalf) says that it started."""
    for variable in ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        value = os.environ.get(variable, "")
        if value.isdigit():
            return int(value)
    return 1


def current() -> Ranks:
    """The ranks that `init` found; a single one where it was not called and there can be no other.

    Raises:
      RuntimeError: there are several processes and `init` has not been called.
    """
    if _current is not None:
        return _current
    if launched_ranks() > 1:
        raise RuntimeError(
            f"sok: this process is one of {launched_ranks()}: call hvd.init() and sok.init() before using variables."
        )
    return SingleRank()


def found() -> Ranks:
    """As `current`, and finds the ranks where nobody has, for programs that know ``hvd.init()`` only.

    Raises:
      RuntimeError: there are several processes, and ``hvd.init()`` has not been called.
    """
    if _current is None and launched_ranks() > 1:
        init()
    return current()


def rank() -> int:
    """Number of this process, from 0."""
    return current().rank


def size() -> int:
    """Number of processes."""
    return current().size


def agree(doing: str, error: BaseException | None) -> None:
    """Waits for all ranks and raises on every one of them where `error` is given on any. Eager only.

    The rank with the error raises that; the others a `RankError` that tells of it.

    Raises:
      RankError: see above.
    """
    said = current().allgather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [(number, text) for number, text in enumerate(said) if text is not None]
    if failed:
        told = "; ".join(f"rank {number}: {text}" for number, text in failed)
        raise RankError(f"{doing} failed on {len(failed)} of {len(said)} ranks, so on none it is done. {told}")


def owner_of_mode(mode: str | None, what: str) -> int | None:
    """The rank that holds a variable of this `mode`; None where all ranks share it.

    Raises:
      ValueError: not ``None``, ``"distributed"`` or ``"localized:#"``, or a rank that there is not.
    """
    if mode is None or mode == "distributed":
        return None
    prefix, colon, number = str(mode).partition(":")
    if prefix != "localized" or not colon or not number.isdigit():
        raise ValueError(
            f"{what}: mode must be 'distributed' or 'localized:#' with the number of a rank, got {mode!r}."
        )
    owner = int(number)
    if owner >= size():
        ranks = "only rank 0" if size() == 1 else f"ranks 0 to {size() - 1}"
        raise ValueError(f"{what}: mode {mode!r} names rank {owner}, but there are {ranks}.")
    return owner


def unique_name(kind: str, names: Sequence[str] = ()) -> str:
    """A name for an exchange: the same on every rank that runs the same program, and used once in a graph.

    Eager code runs one exchange at a time, so that names may come again, which lets Horovod remember what it has
    negotiated.
    """
    base = ".".join(["sok", kind, *names])
    if tf.executing_eagerly():
        return base
    return str(tf_ops.get_default_graph().unique_name(base.replace(":", "_"), mark_as_used=True))
