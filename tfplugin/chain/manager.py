"""`CheckpointManager`: checkpoints in a chain of whole ones and increments, written beside training."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import numbers
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tensorflow as tf

from kvtools.chain import (
    Member,
    MembersOfFolder,
    Previous,
    Record,
    TableCounts,
    check_bytes,
    fingerprint,
    newest_chain,
    record_of,
)
from kvtools.replace_output import replace_files
from tfplugin import chain_members
from tfplugin.chain.checkpoint_model import CheckpointModel
from tfplugin.chain.kept import Kept, remove_leavings
from tfplugin.chain.saver_model import SaverModel
from tfplugin.chain.tables import ALL, Mark, Moment
from tfplugin.chain.training_loop import callback_of, hook_of
from tfplugin.chain.writer_lock import WriterLock

_log = logging.getLogger("tfplugin")


class _Unsaid(float):
    """A number that nobody has given."""


_DELTA_EVERY = _Unsaid(60.0)


@dataclasses.dataclass(frozen=True)
class _Line:
    """Where a chain has got to: what its next increment follows.

    Attributes:
      chain: its name.
      last: the member that the next one follows.
      full: the number of the newest full.
      marks: by table, where the next increment begins.
      why_broken: why no increment can follow the last member, a full alone; '' where one can.
    """

    chain: str
    last: Previous
    full: int
    marks: Mapping[str, Mark]
    why_broken: str = ""


class CheckpointManager:
    """Saves whole checkpoints now and then, and between them increments: the rows that changed, and the keys that went.

    It has the methods of ``tf.train.CheckpointManager``. A member of the chain is as of one moment between two steps:
    every row with its slots, stamps and scores, and all dense variables. A thread writes it while training goes on.
    The newest full and the increments after it restore what a full of the last moment would have; docs/chain.md says
    how they lie in the folder. One manager at a time may write to a chain: it holds a lock from its first `save` on,
    until `close`, until nobody has it any longer, or until its process ends. One that only restores takes none.

    Args:
      checkpoint: a ``tf.train.Checkpoint`` (eager mode), or a ``tf.compat.v1.train.Saver`` (in sessions).
      directory: of the chain, on a file system. It is made if need be.
      max_to_keep: how many fulls to keep, 1 or more; None: all. An older one goes, with the increments that need it,
        when a newer one is whole.
      full_every: seconds from one full to the next; None: only where an increment cannot be had.
      delta_every: seconds from one increment to the next in `save_if_due`, which the callback and the hook call; None:
        no increments, each checkpoint is a full. Default: 60, or `full_every` where that is less.
      keep_checkpoint_every_n_hours: of the fulls that would go, one in so many hours stays, without increments.
      checkpoint_name: what names of files begin with.
      step_counter: a variable with the number of the step; it goes into the record of each member. Default: the global
        step of a graph.
      checkpoint_interval: steps, by `step_counter`, that have to pass from one checkpoint to the next.
      init_fn: called by `restore_or_initialize` where there is nothing to restore.
      max_removed: how many keys that went each table remembers from one increment to the next. Where there are more, a
        full is written instead.

    Raises:
      ValueError: numbers that make no sense, or something that cannot be in a chain; says which and what to do.
      TypeError: a checkpoint of another kind.

    Example:
      >>> manager = tfplugin.CheckpointManager(tf.train.Checkpoint(model=model), "run", delta_every=1.0)
      >>> manager.restore_or_initialize()
      >>> for batch in batches:
      ...     train(batch)
      ...     manager.save_if_due()
      >>> manager.save()
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: Any,
        max_to_keep: int | None = 3,
        full_every: float | None = 3600.0,
        delta_every: float | None = _DELTA_EVERY,
        *,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        max_removed: int = 1 << 20,
    ) -> None:
        if isinstance(delta_every, _Unsaid) and _is_number(full_every) and full_every < delta_every:
            delta_every = full_every
        _check_numbers(max_to_keep, full_every, delta_every, max_removed)
        _check_name(checkpoint_name)
        if init_fn is not None and not callable(init_fn):
            raise TypeError(
                f"tfplugin.CheckpointManager: init_fn must be a function without arguments, or None, got {init_fn!r}."
            )
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError("tfplugin.CheckpointManager: checkpoint_interval wants a step_counter to count by.")
        text = os.fspath(directory)
        if "://" in text:
            raise ValueError(
                f"tfplugin.CheckpointManager: a chain is written to a file system, where files are renamed and synced, "
                f"got '{text}': write it to a disk and copy it from there, increments before the fulls of their number."
            )
        self._directory = text
        self._folder = Path(text).absolute()
        self._name = checkpoint_name
        self._checkpoint = checkpoint
        self._full_every = full_every
        self._delta_every = delta_every
        self._step_counter = step_counter
        self._checkpoint_interval = checkpoint_interval
        self._last_checkpoint_step: int | None = None
        self._init_fn = init_fn
        if isinstance(checkpoint, tf.train.Checkpoint):
            self._model: CheckpointModel | SaverModel = CheckpointModel(
                checkpoint, delta_every is not None, max_removed
            )
        elif isinstance(checkpoint, tf.compat.v1.train.Saver):
            self._model = SaverModel(checkpoint, delta_every is not None, max_removed)
        else:
            raise TypeError(
                "tfplugin.CheckpointManager wants a tf.train.Checkpoint or a tf.compat.v1.train.Saver, got "
                f"{type(checkpoint).__name__}."
            )
        chain_members.note_folder(self._folder)
        #: What was restored, which objects that are made later may still read.
        self._restored: list[Path] = []
        self._members = MembersOfFolder(self._folder, checkpoint_name)
        self._kept = Kept(self._folder, checkpoint_name, max_to_keep, keep_checkpoint_every_n_hours)
        self._lock = threading.RLock()
        # What follows one another is written by one thread; a full of a moment that has an increment, by another.
        self._line_writer = ThreadPoolExecutor(1, "chain-increments")
        self._full_writer = ThreadPoolExecutor(1, "chain-fulls")
        self._line: _Line | None = None
        self._writing_line: Future[str] | None = None
        self._writing_full: Future[str] | None = None
        self._started: Path | None = None
        self._cleaned = False
        self._writer_lock = WriterLock(self._folder, checkpoint_name)
        #: The newest member that this manager has written or restored. A newer one is another writer's.
        self._newest: Previous | None = None
        #: The newest full that it has written of an increment's moment.
        self._newest_full: Previous | None = None
        self._last_save = -float("inf")
        self._last_full = -float("inf")

    # ---- What tf.train.CheckpointManager has -------------------------------------------------------------------------

    @property
    def directory(self) -> str:
        """As it was given."""
        return str(self._directory)

    @property
    def checkpoint(self) -> Any:
        """As it was given."""
        return self._checkpoint

    @property
    def checkpoint_interval(self) -> int | None:
        """As it was given."""
        return self._checkpoint_interval

    @property
    def checkpoints(self) -> list[str]:
        """The prefixes of all members in the folder, fulls and increments, the oldest first.

        In a process with a manager of the folder `checkpoint.restore` takes any of them: an increment is restored with
        what it goes back to.
        """
        return [str(member.prefix) for member in MembersOfFolder(self._folder, self._name).now()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest member, or None; see `checkpoints`."""
        found = self.checkpoints
        return found[-1] if found else None

    def save(
        self,
        checkpoint_number: Any = None,
        check_interval: bool = True,
        options: tf.train.CheckpointOptions | None = None,
        *,
        session: Any = None,
        step: int | None = None,
    ) -> str | None:
        """Saves what there is now: an increment, or a full where one is due or an increment cannot be had.

        Args:
          checkpoint_number: not taken; members of a chain are numbered by themselves.
          check_interval: as of ``tf.train.CheckpointManager``: whether `checkpoint_interval` is looked at.
          options: with ``enable_async`` it does not wait until all is written; the callbacks in it are called then.
          session: of a Saver; default: the default session.
          step: of training, for the record; default: what `step_counter` says.

        Returns:
          The prefix of the member; None where `checkpoint_interval` says that it is too early.

        Raises:
          RuntimeError: this member, or one before it, could not be written; the cause says why. What is there stays.
            Or another manager, of this process or of another one, writes to the chain, or has written to it since this
            one last did: nothing is written then.
        """
        if checkpoint_number is not None:
            raise ValueError(
                "tfplugin.CheckpointManager numbers the members of a chain by itself, 1, 2, 3, ...: leave "
                "checkpoint_number out. Which step a member is of stands in its record: say step=, or give the "
                "manager a step_counter."
            )
        with self._lock:
            self._settle(wait=True)
            session = self._model.session(session)
            step = self._step_now(session, step)
            if self._too_early(step, check_interval):
                return None
            written = self._start(session, step)
            waits = not (options is not None and options.experimental_enable_async_checkpoint)
            callbacks = list((options.experimental_write_callbacks if options is not None else None) or [])
            if not waits:
                for callback in callbacks:
                    written[0].add_done_callback(_told(callback))
                return str(self._started)
            futures.wait(written)
            # The full of an increment that failed fails for that reason alone: it has nothing of its own to tell.
            failed = next((future for future in written if future.exception() is not None), None)
            for future in written:
                self._forget_future(future)
            paths = [self._result(future) for future in written if failed is None or future is failed]
        for callback in callbacks:
            callback(paths[-1]) if inspect.signature(callback).parameters else callback()
        return paths[-1]

    def restore_or_initialize(self, session: Any = None) -> str | None:
        """Restores the newest full and the increments after it; where there is none, calls `init_fn`.

        All members are checked, to the last checksum, before anything is restored.

        Args:
          session: of a Saver; default: the default session.

        Returns:
          The prefix of the newest member, or None.

        Raises:
          kvtools.chain.ChainError: a member is missing, there twice, out of order or of another chain.
          kvtools.errors.CorruptFileError: a member is damaged.
        """
        with self._lock:
            self._settle(wait=True)
            self.sync()
            chain = newest_chain(self._folder, self._name)
            if not chain:
                if self._init_fn is not None:
                    self._init_fn()
                return None
            session = self._model.session(session)
            for member in chain:
                check_bytes(member)
            self._line = None
            self._newest = Previous(chain[-1].number, fingerprint(chain[-1].prefix))
            self._restored = [member.prefix for member in chain]
            self._model.restore(session, [str(prefix) for prefix in self._restored])
            self._model.look(session, 0)
            self._go_on(session, chain)
            if self._checkpoint_interval is not None:
                self._last_checkpoint_step = self._step_now(session, None)
            return str(chain[-1].prefix)

    def sync(self) -> None:
        """Waits until everything that was cut is written.

        Raises:
          RuntimeError: something could not be written; the cause says why.
        """
        with self._lock:
            self._settle(wait=True)
            full, self._writing_full = self._writing_full, None
            if full is not None:
                self._result(full)

    def close(self) -> None:
        """Waits as `sync` does, and lets another manager write to the chain. The next `save` takes it back.

        Raises:
          RuntimeError: as of `sync`. It is let go all the same.
        """
        with self._lock:
            try:
                self.sync()
            finally:
                pending = [one for one in (self._writing_line, self._writing_full) if one is not None]
                futures.wait(pending)
                self._writer_lock.release()

    # ---- More --------------------------------------------------------------------------------------------------------

    def save_if_due(self, *, session: Any = None, step: int | None = None) -> str | None:
        """Saves if `delta_every` seconds have passed (`full_every` without increments), and does not wait for the disk.

        Call it between steps. While the last increment is still being written it does nothing. An error of the disk
        is logged, and the next increment has what the failed one would have had.

        Args:
          session, step: as of `save`.

        Returns:
          The prefix of the member that is being written, or None.
        """
        if not self.is_due():
            return None
        with self._lock:
            if self._writing_line is not None and not self._writing_line.done():
                return None
            try:
                self._settle(wait=False)
            except RuntimeError as error:
                _log.error("%s", error)
            session = self._model.session(session)
            step = self._step_now(session, step)
            if self._too_early(step, True):
                return None
            self._start(session, step)
            return str(self._started)

    def is_due(self) -> bool:
        """Whether the time has come for `save_if_due`."""
        every = self._full_every if self._delta_every is None else self._delta_every
        return every is not None and time.monotonic() - self._last_save >= every

    def callback(self, keras: Any = None) -> Any:
        """A callback of Keras that saves when it is due, after a batch, and when training ends.

        Args:
          keras: the module: ``tf.keras`` (default), ``keras`` or ``tf_keras``.

        Example:
          >>> manager.restore_or_initialize()
          >>> model.fit(ids, labels, callbacks=[manager.callback()])
        """
        return callback_of(tf.keras if keras is None else keras)(self)

    def hook(self, restore: bool = True) -> Any:
        """A ``SessionRunHook`` that saves when it is due, after a step, and when the session ends.

        Args:
          restore: whether it restores the chain, where there is one, into each session that is made.

        Example:
          >>> manager = tfplugin.CheckpointManager(tf.compat.v1.train.Saver(), "run", delta_every=1.0)
          >>> with tf.compat.v1.train.MonitoredSession(hooks=[manager.hook()]) as session:
          ...     session.run(train)
        """
        return hook_of(self, restore)

    # ---- Cutting -----------------------------------------------------------------------------------------------------

    def _step_now(self, session: Any, step: int | None) -> int | None:
        if step is not None:
            return int(step)
        if self._step_counter is None:
            return self._model.step(session)
        return int(tf.convert_to_tensor(self._step_counter) if session is None else session.run(self._step_counter))

    def _too_early(self, step: int | None, check_interval: bool) -> bool:
        if self._checkpoint_interval is None or step is None:
            return False
        last = self._last_checkpoint_step
        if last is not None and (step == last or (check_interval and step < last + self._checkpoint_interval)):
            return True
        self._last_checkpoint_step = step
        return False

    def _start(self, session: Any, step: int | None) -> list[Future[str]]:
        """Cuts what is due, and has it written. Gives what ends when it is."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._hold()
        found = self._members.now()
        self._check_alone(found)
        if not self._cleaned:
            remove_leavings(self._folder, self._name)
            self._cleaned = True
        line = self._line
        number = max([*(one.number for one in found), 0 if line is None else line.last.sequence]) + 1
        self._model.look(session, number)
        fulls = [one.number for one in found if one.kind == "full"]
        why = self._why_full(session, line, fulls, found)
        now = time.monotonic()
        self._last_save = now
        if self._restored and not self._model.awaits_more():
            self._restored = []
        moment = None
        if line is not None and not why:
            try:
                moment = self._model.moment(session, line.marks, step)
            except tf.errors.FailedPreconditionError:
                # Rows that have expired go just then: they may be more than a table remembers.
                why = self._model.why_no_increment(session, line.marks)
                if not why:
                    raise
        if line is None or moment is None:
            if line is not None and self._delta_every is not None:
                _log.warning("CheckpointManager: '%s-%d' is written whole: %s", self._name, number, why)
            self._last_full = now
            return [self._start_break(session, number, step)]
        due = self._full_every is not None and now - self._last_full >= self._full_every
        due = due and (self._writing_full is None or self._writing_full.done())
        try:
            whole = self._model.moment(session, None, step) if due else None
        except BaseException:
            self._model.give_up(session, moment.cuts)
            raise
        written = [self._start_increment(session, line, number, fulls[-1], moment)]
        if whole is not None:
            self._last_full = now
            written.append(self._start_full(session, line, number, whole, written[0]))
        return written

    def _hold(self) -> None:
        """Sees to it that nobody else writes to the chain."""
        try:
            self._writer_lock.hold()
        except BlockingIOError as error:
            raise RuntimeError(
                f"tfplugin.CheckpointManager of '{self._directory}': {error.strerror} writes to this chain, and two "
                "writers would break it; nothing was saved. End that process, or close() its manager, and then "
                "restore_or_initialize() here; or save to another directory, or under another checkpoint_name."
            ) from error
        except OSError as error:
            raise RuntimeError(f"tfplugin.CheckpointManager of '{self._directory}': {error}") from error

    def _check_alone(self, found: list[Member]) -> None:
        """Raises where somebody else has written to the chain."""
        known = self._newest
        if known is None or not found:
            return
        newest = found[-1]
        if newest.number < known.sequence:
            return
        if newest.number == known.sequence:
            there = {Previous(one.number, fingerprint(one.prefix)) for one in found if one.number == newest.number}
            if there & {known, self._newest_full}:
                return
        raise RuntimeError(
            f"tfplugin.CheckpointManager of '{self._directory}': another writer has put '{newest.prefix.name}' there "
            f"since this manager wrote or restored member {known.sequence}; nothing was saved. End the other writer, "
            "and restore_or_initialize() here, which goes on from what is there; or save to another directory, or "
            "under another checkpoint_name."
        )

    def _why_full(self, session: Any, line: _Line | None, fulls: list[int], found: list[Member]) -> str:
        if line is None:
            return "it is the first of this run"
        if self._delta_every is None:
            return "there are to be no increments"
        if not fulls or fulls[-1] < line.full:
            return f"full {line.full}, which an increment would go back to, is gone"
        if found[-1].number < line.last.sequence:
            return f"member {line.last.sequence}, which an increment would follow, is gone"
        return line.why_broken or self._model.why_no_increment(session, line.marks)

    def _start_break(self, session: Any, number: int, step: int | None) -> Future[str]:
        """A full that goes back to nothing."""
        self._model.begin(session)
        moment = self._model.moment(session, None, step)
        line, write, held = self._line, self._model.writer(session), list(self._restored)
        self._started = self._folder / f"{self._name}-{number}"
        chain = str(uuid.uuid4()) if line is None else line.chain

        def record(counts: dict[str, TableCounts]) -> str:
            previous = None if line is None else line.last
            return Record(chain, number, "full", number, previous, moment.time, moment.step, counts).to_json()

        def work(prefix: Path) -> str:
            mark = self._write(session, moment, prefix, write, record)
            self._newest = Previous(number, mark)
            self._line = _Line(chain, self._newest, number, moment.marks)
            self._model.forget(session, moment.marks)
            self._kept.add(Member(number, "full", prefix), held)
            return str(prefix)

        self._writing_line = self._line_writer.submit(work, self._started)
        return self._writing_line

    def _start_increment(self, session: Any, line: _Line, number: int, full: int, moment: Moment) -> Future[str]:
        write = self._model.writer(session)
        self._started = self._folder / f"{self._name}-{number}.delta"

        def record(counts: dict[str, TableCounts]) -> str:
            return Record(line.chain, number, "delta", full, line.last, moment.time, moment.step, counts).to_json()

        def work(prefix: Path) -> str:
            mark = self._write(session, moment, prefix, write, record)
            self._newest = Previous(number, mark)
            self._line = dataclasses.replace(line, last=self._newest, marks=moment.marks)
            self._model.forget(session, moment.marks)
            return str(prefix)

        self._writing_line = self._line_writer.submit(work, self._started)
        return self._writing_line

    def _start_full(
        self, session: Any, line: _Line, number: int, moment: Moment, increment: Future[str]
    ) -> Future[str]:
        """A full of the moment of an increment, which others may follow before it is written."""
        write, held = self._model.writer(session), list(self._restored)
        path = self._folder / f"{self._name}-{number}"

        def work() -> str:
            try:
                return write_it()
            except BaseException:
                self._last_full = -float("inf")  # it is due again
                raise

        def write_it() -> str:
            if increment.exception() is not None:
                self._model.give_up(session, moment.cuts)
                raise RuntimeError(f"'{path}' was given up, as its increment could not be written")
            previous = Previous(number, fingerprint(increment.result()))

            def record(counts: dict[str, TableCounts]) -> str:
                return Record(line.chain, number, "full", number, previous, moment.time, moment.step, counts).to_json()

            self._newest_full = Previous(number, self._write(session, moment, path, write, record))
            self._kept.add(Member(number, "full", path), held)  # which may remove the increment
            return str(path)

        self._writing_full = self._full_writer.submit(work)
        return self._writing_full

    def _write(self, session: Any, moment: Moment, prefix: Path, write: Any, record: Any) -> str:
        """Writes a member beside its place and puts it there. Gives its fingerprint."""
        begun = False
        try:
            with replace_files(prefix) as staging:
                begun = True
                write(moment, str(staging), record)
        except BaseException:
            if not begun:
                self._model.give_up(session, moment.cuts)
            raise
        return fingerprint(prefix)

    # ---- Waiting -----------------------------------------------------------------------------------------------------

    def _settle(self, wait: bool) -> None:
        """Takes note of what has been written; waits for what follows one another if `wait`."""
        line, full = self._writing_line, self._writing_full
        if full is not None and full.done():
            self._writing_full = None
        if line is not None and (wait or line.done()):
            self._writing_line = None
            self._result(line)
        if self._writing_full is None and full is not None:
            self._result(full)

    def _result(self, future: Future[str]) -> str:
        error = future.exception()
        self._forget_future(future)
        if error is not None:
            raise RuntimeError(f"tfplugin.CheckpointManager of '{self._directory}': {error}") from error
        return future.result()

    def _forget_future(self, future: Future[str]) -> None:
        """An error is told once."""
        for held in ("_writing_line", "_writing_full"):
            if getattr(self, held) is future:
                setattr(self, held, None)

    def _go_on(self, session: Any, chain: list[Member]) -> None:
        """Has the next increment follow what has been restored."""
        record = record_of(chain[-1])
        first = record_of(chain[0])
        if record is None or first is None or self._delta_every is None:
            return
        self._model.begin(session)
        moment = self._model.moment(session, None, None)
        self._model.give_up(session, moment.cuts)
        if ALL in moment.marks.values():
            return
        last = Previous(chain[-1].number, fingerprint(chain[-1].prefix))
        why_broken = self._model.why_not_followed(session, chain[-1], record)
        self._line = _Line(record.chain, last, chain[0].number, moment.marks, why_broken)
        self._last_full = time.monotonic() - max(0.0, time.time() - first.time)


def _told(callback: Callable[..., Any]) -> Callable[[Future[str]], None]:
    def tell(future: Future[str]) -> None:
        if future.exception() is None:
            callback(future.result()) if inspect.signature(callback).parameters else callback()

    return tell


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(
            "tfplugin.CheckpointManager: checkpoint_name is what names of files in the directory begin with, with no "
            f"'/' in it and no '.' before it, got {name!r}: say 'ckpt', and put folders into the directory."
        )


def _check_numbers(
    max_to_keep: int | None, full_every: float | None, delta_every: float | None, max_removed: int
) -> None:
    what = "tfplugin.CheckpointManager"
    if max_to_keep is not None and (not _is_whole(max_to_keep) or max_to_keep < 1):
        raise ValueError(f"{what}: max_to_keep must be 1 or more fulls, or None for all, got {max_to_keep!r}.")
    for name, value in (("full_every", full_every), ("delta_every", delta_every)):
        if value is not None and (not _is_number(value) or not value >= 0):
            raise ValueError(f"{what}: {name} must be 0 or more seconds, or None, got {value!r}.")
    if full_every is not None and delta_every is not None and full_every < delta_every:
        raise ValueError(
            f"{what}: full_every={full_every!r} and delta_every={delta_every!r} contradict each other: increments come "
            "between fulls, so they are at least as frequent. For fulls alone say delta_every=None."
        )
    if not _is_whole(max_removed) or max_removed < 0:
        raise ValueError(f"{what}: max_removed must be 0 or more keys, got {max_removed!r}.")
