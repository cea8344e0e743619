"""Which rank this process is, how the ranks talk and agree: over Horovod, or not at all where there is only one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops as tf_ops

from tfplugin import shared_exchange
from tfplugin.ops import raw

#: Horovod's launcher sets it in elastic runs.
ELASTIC = "HOROVOD_ELASTIC"


def is_elastic() -> bool:
    """Whether this is a rank of an elastic run of Horovod, which goes on with others where ranks end or begin."""
    return os.environ.get(ELASTIC, "0") != "0"


class _World:
    """The ranks from one ``hvd.init()`` to the next."""

    has_ended = False

    def __init__(self) -> None:
        self._in_graphs: tf.Variable | None = None
        if is_elastic():
            with tf.init_scope():
                if tf.executing_eagerly():
                    self._in_graphs = tf.Variable(False, trainable=False, name="ranks_have_changed")

    def end(self) -> None:
        """There are other ranks now, and what was made for these is theirs no longer."""
        self.has_ended = True
        if self._in_graphs is not None:
            self._in_graphs.assign(True)

    def refusal(self) -> tuple[tf.Tensor, str] | None:
        """What lookups of these ranks refuse when they are run, also by functions that were traced for them.

        Whether they have ended, and the message; None where they cannot.
        """
        return None if self._in_graphs is None else (self._in_graphs.read_value(), CHANGED)


class SingleRank(_World):
    """One process: nothing is sent anywhere."""

    rank = 0
    size = 1

    def connect(self) -> None:
        """See `HorovodRanks.connect`."""

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """What the others sent, and how much each did; see `HorovodRanks.alltoall`."""
        del name
        return tf.identity(tensor), splits

    alltoall_in_place = alltoall

    def allgather(self, values: Any) -> list[Any]:
        """What every rank gave, by rank."""
        return [values]


class HorovodRanks(_World):
    """The processes that ``horovodrun`` started."""

    def __init__(self, hvd: Any) -> None:
        super().__init__()
        self._hvd = hvd
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self._shares_memory: bool | None = None
        self._process = os.getpid()

    def refuse_fork(self) -> None:
        """Raises in a fork, which has no threads and no connections, and would wait for ever.

        Raises:
          RuntimeError: this process was forked from the rank.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"This process was forked from rank {self.rank} and has no exchange with the other ranks: look up in "
                "the rank itself, or start the process by itself (multiprocessing's 'spawn')."
            )

    def connect(self) -> None:
        """Has the ranks share memory where they can: the first call, which all of them make. Others do nothing.

        Those of an elastic run do not, and exchange nothing here: a rank that comes later calls it while the others
        wait for what they have in common. And what a rank has sent in a step that begins again on other ranks would be
        taken for the next.
        """
        if self._shares_memory is None:
            self._shares_memory = not is_elastic() and shared_exchange.connect(self.rank, self.size, self.allgather)

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends ``splits[r]`` rows of `tensor` to each rank r, in order. Has a gradient.

        Args:
          tensor: [sum of splits, ...].
          splits: [size], tf.int32.
          name: the same on all ranks, and of no other exchange under way at that time.

        Returns:
          The rows received, those of rank 0 first, and how many came from each rank.
        """
        shares = self._shares(tensor)
        # The transport is the host's: a device scope around the lookup is not about it.
        with tf.device("CPU:0"):
            if shares:
                received, received_splits = raw.kv_shared_alltoall(
                    tensor, splits, exchange=name or "alltoall", ranks=self.size
                )
            elif tensor.dtype == tf.bfloat16:  # which Horovod does not know
                received, received_splits = self._hvd.alltoall(_bits_as(tf.float16, tensor), splits=splits, name=name)
                received = _bits_as(tf.bfloat16, received)
            else:
                received, received_splits = self._hvd.alltoall(tensor, splits=splits, name=name)
        received.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
        received_splits.set_shape([self.size])
        return received, received_splits

    def alltoall_in_place(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """As `alltoall`, for the ops that read what comes where it lies, which is then a tf.variant.

        That is so where ranks share memory. What the others sent stays with them as long as that tensor is there.
        """
        if not self._shares(tensor):
            return self.alltoall(tensor, splits, name)
        with tf.device("CPU:0"):
            received: tuple[tf.Tensor, tf.Tensor] = raw.kv_shared_exchange(
                tensor, splits, exchange=name or "alltoall", ranks=self.size
            )
        return received

    def _shares(self, tensor: tf.Tensor) -> bool:
        """Whether this tensor goes through memory that the ranks share."""
        self.connect()
        return bool(self._shares_memory) and tensor.dtype in shared_exchange.DTYPES

    def allgather(self, values: Any) -> list[Any]:
        """What every rank gave, by rank: any objects that pickle. At once, also while a graph is being made."""
        with context.eager_mode():
            gathered: list[Any] = self._hvd.allgather_object(values)
        return gathered


def _bits_as(dtype: tf.DType, tensor: tf.Tensor) -> tf.Tensor:
    """As another type of 16 bits, and its gradient back: sums of gradients, of what is read twice, are of the type."""

    @tf.custom_gradient
    def cast(bits: tf.Tensor) -> Any:
        return tf.bitcast(bits, dtype), lambda grad: _bits_as(bits.dtype, grad)

    cast_bits: tf.Tensor = cast(tensor)
    return cast_bits


Ranks = SingleRank | HorovodRanks

_current: Ranks | None = None


#: How to go on where there are other ranks than before.
ANEW = "Make the variables anew after sok.init(), and restore what sok.Checkpoint saved."
#: What is said where functions were traced, or variables made, before.
CHANGED = f"Horovod was started again, with other ranks. {ANEW[:-1]}: within the function that hvd.elastic.run runs."


class RankError(RuntimeError):
    """Another rank failed; the message says which, and how."""


def find() -> Ranks:
    """Finds out which rank this process is, and keeps it: what `current` gives from then on.

    Raises:
      RuntimeError: ``hvd.init()`` has not been called, or the process was started by ``horovodrun`` and Horovod is not
        installed.
    """
    hvd = _horovod()
    if hvd is None:
        return keep(SingleRank())
    if not hvd.is_initialized():
        raise RuntimeError("Horovod is not initialized: call hvd.init() first.")
    if hvd.size() == 1:
        return keep(SingleRank())
    if isinstance(_current, HorovodRanks) and (_current.rank, _current.size) == (hvd.rank(), hvd.size()):
        return _current  # with its connections
    return keep(HorovodRanks(hvd))


def keep(found: Ranks) -> Ranks:
    """Makes these the ranks of this program."""
    global _current
    _current = found
    return found


def _horovod() -> Any:
    """Horovod for TensorFlow, or None where it is not installed and not needed."""
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        if launched_ranks() > 1:
            raise RuntimeError(
                f"This process is one of {launched_ranks()} that horovodrun started, but Horovod does not import here "
                f"({error}): run `kvtools setup-horovod` in this environment."
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
    """The ranks that `find` found, to exchange with; a single one where it was not called and there can be no other.

    Raises:
      RuntimeError: there are several processes and `find` has not been called; this one was forked from a rank.
    """
    world = known()
    if isinstance(world, HorovodRanks):
        world.refuse_fork()
    return world


def start_anew() -> None:
    """Horovod was started again: the ranks that `find` found are over, and it finds others."""
    global _current
    if _current is not None:
        _current.end()
        _current = None
        find()


def known() -> Ranks:
    """As `current`, in a fork of a rank, too.

    Raises:
      RuntimeError: there are several processes and `find` has not been called.
    """
    if _current is not None:
        return _current
    if launched_ranks() > 1:
        raise RuntimeError(
            f"This process is one of {launched_ranks()} ranks: call hvd.init() and sok.init() before using variables."
        )
    return SingleRank()


def found() -> Ranks:
    """As `current`, and finds the ranks where nobody has, for programs that know ``hvd.init()`` only.

    Raises:
      RuntimeError: there are several processes, and ``hvd.init()`` has not been called.
    """
    if _current is None and (launched_ranks() > 1 or horovod_size() > 0):
        return find()
    return current()


def horovod_size() -> int:
    """Number of processes that Horovod has, whether or not anybody has called `find`; 0 where it does not run."""
    hvd = sys.modules.get("horovod.tensorflow")
    return int(hvd.size()) if hvd is not None and hvd.is_initialized() else 0


def rank() -> int:
    """Number of this process, from 0; in a fork of a rank, the rank's."""
    return known().rank


def size() -> int:
    """Number of processes."""
    return known().size


# ---- Agreement: all ranks call these together ------------------------------------------------------------------------


def agree(doing: str, error: BaseException | None, so: str = "so on none it is done") -> None:
    """Waits for all ranks and raises on every one of them where `error` is given on any.

    The rank with the error raises that; the others a `RankError` that tells of it.

    Args:
      doing: what the message begins with.
      error: what went wrong on this rank; None: nothing.
      so: what follows from it, for the message.

    Raises:
      RankError: see above.
    """
    said = current().allgather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [f"rank {number}: {text}" for number, text in enumerate(said) if text is not None]
    if failed:
        raise RankError(f"{doing} failed on {len(failed)} of {len(said)} ranks, {so}. {'; '.join(failed)}")


@contextlib.contextmanager
def step(doing: str, so: str = "so on none it is done") -> Iterator[None]:
    """Work that each rank does on its own. Where it fails on one rank it raises on all; see `agree`.

    Raises:
      RankError: it failed on another rank.

    Example:
      >>> with ranks.step("saving 'model'"):
      ...     write_own_rows()
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        error = failure
    agree(doing, error, so)


def check_same(mine: Sequence[Any], doing: str, what: str = "variables") -> None:
    """Raises, on all ranks, where they do not have the same things in the same order.

    Args:
      mine: what this rank has; what can be compared, sent and printed.
      doing: what the message begins with.
      what: they are.

    Raises:
      ValueError: naming the first thing that differs, and the two ranks.
    """
    said = current().allgather(list(mine))
    for number, theirs in enumerate(said):
        if theirs != said[0]:
            here, there = _first_difference(said[0], theirs)
            raise ValueError(
                f"{doing}: every rank must call it with the same {what}, in the same order; rank 0 has {here}, rank "
                f"{number} {there}."
            )


def _first_difference(here: list[Any], there: list[Any]) -> tuple[str, str]:
    place = next((n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    one, other = (str(things[place]) if place < len(things) else f"only {place}" for things in (here, there))
    return one, other


# ---- Exchanges -------------------------------------------------------------------------------------------------------


def numbers_of_all(mine: tf.Tensor, name: str) -> tf.Tensor:
    """What every rank gave, by rank: [ranks, n] of [n] numbers. All ranks call it, with the same `name` and n."""
    world = current()
    count = mine.shape[0]
    with tf.device("CPU:0"):
        received, _ = world.alltoall(tf.tile(mine, [world.size]), tf.fill([world.size], count), name)
        return tf.reshape(received, [world.size, count])


def exchange_name(kind: str, names: Sequence[str] = ()) -> str:
    """A name for an exchange: the same on every rank that runs the same program, and used once in a graph.

    Eager code runs one exchange at a time, so that names may come again, which lets Horovod remember what it has
    negotiated.
    """
    base = ".".join(["sok", kind, *names])
    if tf.executing_eagerly():
        return base
    return str(tf_ops.get_default_graph().unique_name(base.replace(":", "_"), mark_as_used=True))
