"""The life of the versions of a model: found, loaded beside the old one, served, let go.

One thread per process does this for all models (`Versions`). At every look it lists what lies on disk
(`version_folder.py`), lets the model's policy choose (`version_policy.py`), and for what is chosen and not served yet:

1. waits until its files have stayed as they are for one poll, unless the file itself tells whether it is whole;
2. opens it, compares every checksum, brings it into memory, touches the rows asked for lately (`version_loader.py`);
3. publishes it in the catalog: from then on requests get it;
4. only then lets go of the versions that are not chosen any more. Their files are unmapped when the last request that
   took one of them is done.

Where no version is served yet, requests wait: the first one is served at once, and verified as it is used, until the
thread has verified all of it. If it is damaged, an older one is loaded the same way, and takes its place.

A version that cannot be loaded is named in the log and in its status, what was served stays, and it is tried again when
its files change. A version with a label is served, whatever the policy says. If a folder cannot be read, or has no
version any more, the last one goes on being served: a share that is gone for a minute shall not end the service.
A look comes every `poll` seconds, at SIGHUP, and when a lookup finds that the file it reads was cut, written over or
damaged; every second while a model has no version at all. Every second the files that are mapped are asked whether
they were written to since they were opened: one that was is compared with its checksums again, on use and as a whole,
and leaves service if they differ.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError, CorruptFileError, one_line
from kvtools.server.catalog import (
    Catalog,
    ServedModel,
    ServedVersion,
    UnknownModelError,
    UnknownVersionError,
    VersionStatus,
)
from kvtools.server.host_paths import without_folders
from kvtools.server.recent_keys import RecentKeys
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings
from kvtools.server.sources import ModelSource, SharedSources
from kvtools.server.store import TableStore
from kvtools.server.version_folder import (
    FoundVersion,
    Stamp,
    is_folder_of_versions,
    left_behind,
    passed_over,
    single_version,
    versions_in,
)
from kvtools.server.version_loader import StoppedError, VersionLoader, broken, described

log = logging.getLogger("kvtools.serve")

_WATCHED_EVERY = 1.0  # s: files that are served, for being written to
_SETTLED_WITHOUT_POLL = 1.0  # how long files must have been left alone where no poll says it, in s
_AFTER_FAILURE = 1.0  # s
_KEPT_ENDED = 16  # versions that have ended stay in the status, the last ones of them
_LONGEST_STOP = 2.0  # s
_SAME_TABLES_SAID = 5
_FAULTS_OF_FILES = ("DATA_LOSS", "INVALID_ARGUMENT", "INTERNAL")


@dataclass
class _Model:
    """What is known of a model; only the thread of `Versions` changes it, `source` aside."""

    source: ModelSource
    served: dict[int, tuple[ServedVersion, Stamp]] = field(default_factory=dict)
    bad: dict[int, tuple[Stamp, str, str]] = field(default_factory=dict)  # stamp, error code, message
    logged: dict[int, str] = field(default_factory=dict)  # the messages of `bad` with the paths of the host
    seen: dict[int, Stamp] = field(default_factory=dict)  # at the last look
    waiting: dict[int, str] = field(default_factory=dict)  # found and not tried yet: why
    loading: int | None = None
    leaving: dict[int, list[weakref.ref[TableStore]]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    unfinished: set[int] = field(default_factory=set)  # served, and not verified or not in memory yet
    recent: dict[str, RecentKeys] = field(default_factory=dict)
    in_folder: bool = False  # its path was seen to be a folder of versions, and stays one when they are gone
    passed_over: set[str] = field(default_factory=set)  # names in its folder that were told to be no versions
    loads: int = 0
    failures: int = 0
    said: str = ""  # the last trouble with the folder itself

    def is_damaged(self, number: int) -> bool:
        """Whether what is served as `number` has turned out bad: not another file, which lies in its place now."""
        return number in self.bad and self.bad[number][0] == self.served[number][1]

    @property
    def is_of_another_path(self) -> bool:
        """Whether what is served as a version of it lies elsewhere: at the path that it had before a request changed
        that, as nothing at the new one can be served."""
        path = Path(self.source.path)
        return any(path not in (version.path, version.path.parent) for version, _ in self.served.values())


@dataclass(eq=False)
class _Reload:
    """Models that are to be served, and no others; `done` is told how that went."""

    names: frozenset[str]
    done: Future[dict[str, str]] = field(default_factory=Future)
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # what the other workers know it by


class Versions:
    """Loads what `sources` name into `catalog`, then keeps it up to date in a thread of its own.

    Raises from `start`:
        BadInputError: a model has no version that can be served, and `settings.wait` is not set.

    Example:
        ```python
        catalog = Catalog()
        versions = Versions(catalog, [ModelSource("default", "models/ctr")], Settings(poll=10))
        versions.start()
        ...
        versions.stop()
        ```
    """

    def __init__(
        self,
        catalog: Catalog,
        sources: Sequence[ModelSource],
        settings: Settings,
        options: OpenOptions | None = None,
    ) -> None:
        self._catalog = catalog
        catalog.changes = self
        self._settings = settings
        self._shared = SharedSources(settings.shared) if settings.shared else None
        if self._shared and (changed := self._shared.changed()) is not None:
            sources = changed  # a worker that begins after a change
        self._models = {source.name: _Model(source) for source in sources}
        self._changing = threading.Lock()  # what `_models` holds, and publishing it
        # Simple queues may be used from finalizers and signal handlers: their `put` is reentrant.
        self._messages: queue.SimpleQueue[_Reload | str] = queue.SimpleQueue()
        self._reload = ""  # the last one that this worker was asked for
        self._stop = threading.Event()
        self._loader = VersionLoader(settings, options, self._shared, self._stop)
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)
        self._started = False
        self._looked = 0.0  # when, by `time.monotonic`
        self._same_tables: dict[str, list[str]] = {}
        self._bad_at_start: list[tuple[_Model, int, str]] = []  # number and what is wrong
        for model in self._models.values():
            self._publish(model)

    # What others may ask for, from any thread.

    def start(self) -> None:
        """Load the newest version of every model, then go on in the background."""
        self.load()
        self.go_on()

    def go_on(self) -> None:
        """Go on in the background, after `load`: verify the rest of what is served, look for new versions."""
        self._thread.start()

    def load(self) -> None:
        """Load the newest version of every model, so far that it can be served: the rest is for the background."""
        for name in list(self._models):
            self._look(name)
        if self._settings.poll is not None and any(model.waiting for model in self._unserved()):
            self._stop.wait(self._settings.poll)  # a first version that is just being written
            for name in list(self._models):
                self._look(name)
        self._started = True
        unserved = self._unserved()
        fails = bool(unserved) and not self._settings.wait
        for model, number, message in self._bad_at_start:
            # What the error below says, or the warning, is said once.
            if not (model in unserved[: 1 if fails else None] and number == max(model.bad, default=None)):
                self._say_first(logging.ERROR, _bad_line(model, number, message))
        self._bad_at_start.clear()
        if fails:
            raise BadInputError(f"serving '{unserved[0].source.path}': {self._why_none(unserved[0], paths=True)}")
        for model in unserved:
            line = f"model '{model.source.name}': {self._why_none(model, paths=True)}; waiting for a version"
            self._say_first(logging.WARNING, line)
        self._say_same_tables()

    def look(self) -> None:
        """Look for new versions of every model once, in this thread: for where there is no other."""
        self._look_at_all()

    def _look_at_all(self, *, last: bool = True) -> None:
        """Look for new versions of every model; where that is not the `last` step, some models may go yet."""
        if self._shared and (changed := self._shared.changed()) is not None:
            self._take(changed)
        for name in list(self._models):
            try:
                self._look(name)
            except Exception:  # a fault of ours shall not end all swaps to come
                log.exception("model '%s': looking for versions failed", name)
        if last:
            self._say_same_tables()
        for state in list(self._models.values()):  # what was written to is compared again
            state.unfinished |= {number for number, (version, _) in state.served.items() if _was_written(version)}
        self._finish()

    def look_soon(self) -> None:
        """Look for new versions now. May be called in a signal handler."""
        self._messages.put("look")

    def stop(self) -> None:
        """End the thread, or leave it to itself where it is making a snapshot; what is served stays."""
        self._stop.set()
        self._messages.put("stop")
        if self._thread.is_alive():
            self._thread.join(_LONGEST_STOP)

    def sources(self) -> list[ModelSource]:
        """Return what is to be served now."""
        return [model.source for model in self._models.values()]

    def set_label(self, model: str, label: str, number: int | None) -> None:
        """Give `label` to version `number` of a model, from the next request on; None takes it away.

        Raises:
            UnknownModelError, UnknownVersionError: there is none such now, or no such label to take away.
            RequestError: the other workers cannot be told, or the model follows a chain; nothing was changed.
        """
        self._catalog.model(model)
        if model in self._catalog.follows:
            raise RequestError(400, "follows", f"model '{model}' follows a chain, which has one version and no labels")
        if number is not None:
            self._catalog.version(model, number=number)
        with self._change(), self._changing:
            state = self._models.get(model)
            if state is None:  # taken away at this moment
                raise UnknownModelError(f"there is no model '{model}'")
            if number is None and label not in state.source.labels:
                raise UnknownVersionError(f"model '{model}' has no label '{label}'")
            labels = {name: at for name, at in state.source.labels.items() if name != label}
            if number is not None:
                labels[label] = number
            changed = replace(state.source, labels=labels)
            self._share([changed if each is state else each.source for each in self._models.values()])
            state.source = changed
            self._publish(state)
        log.info("model '%s': label '%s' is %s", model, label, f"version {number}" if number else "taken away")
        self.look_soon()  # a version that only its label kept leaves

    def reload(self, sources: Sequence[ModelSource]) -> Future[dict[str, str]]:
        """Serve `sources` from now on, and no other model.

        Returns what will be, when all are loaded or have failed, a message for each model that has no version of its
        source: one that had another path before goes on with what lies there, until there is one. Only where there is
        no such message are other models let go of; otherwise they go on being served, until they are named or another
        list is. Raises
        `RequestError` if the other workers cannot be told, or a model has the name of one that follows a chain, which
        stay; nothing was changed then.
        """
        for source in sources:
            if source.name in self._catalog.follows:
                raise RequestError(400, "follows", f"model '{source.name}' follows a chain; name this one otherwise")
        named = {source.name for source in sources}
        with self._change():
            with self._changing:
                others = [model.source for name, model in self._models.items() if name not in named]
                reload = _Reload(frozenset(named))
                self._share([*sources, *others], reload.token)
                self._reload = reload.token
            self._take([*sources, *others])
        self._messages.put(reload)
        return reload.done

    def _finish_reload(self, reload: _Reload) -> None:
        """Say how a reload went, after a look; where all that it names is served, let go of all other models."""
        failed = {
            model.source.name: self._why_none(model)
            for name, model in self._models.items()
            if name in reload.names and (not model.served or model.is_of_another_path)
        }
        if not failed:
            with self._change():
                if reload.token == (self._shared.reload if self._shared else self._reload):  # a later one knows better
                    with self._changing:
                        kept = [model.source for name, model in self._models.items() if name in reload.names]
                        if len(kept) < len(self._models):
                            self._share(kept)
                    self._take(kept)
        self._say_same_tables()
        reload.done.set_result(failed)

    def _take(self, sources: Sequence[ModelSource]) -> None:
        with self._changing:
            kept = {}
            for source in sources:
                state = self._models.get(source.name)
                if state is None or state.source.path != source.path:
                    state = _Model(source, served=dict(state.served) if state else {})
                state.source = source
                kept[source.name] = state
            gone = self._models.keys() - kept.keys()
            self._models = kept
            for name in gone:
                self._catalog.remove(name)
                log.info("model '%s' is let go: it is not among those that are to be served now", name)

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Change what is served, one worker at a time: on top of what the others changed, which is taken over first."""
        with self._shared.change() if self._shared else contextlib.nullcontext() as changed:
            if changed is not None:
                self._take(changed)
            yield

    def _share(self, sources: Sequence[ModelSource], reload: str = "") -> None:
        if self._shared:
            self._shared.write(sources, reload)

    # The thread.

    def _run(self) -> None:
        with self._going_on():
            self._finish()
        self._looked = time.monotonic()
        while not self._stop.is_set():
            with self._going_on():
                self._wait_and_look()

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Have the thread go on after a fault of ours, which shall not end all swaps to come: it looks again soon."""
        try:
            yield
        except Exception:
            log.exception("looking for versions failed")
            self._stop.wait(_AFTER_FAILURE)
            self.look_soon()

    def _wait_and_look(self) -> None:
        poll = self._settings.poll
        if poll is None and any(self._unserved()):  # nothing answers: what helps shall be found by itself
            poll = _SETTLED_WITHOUT_POLL
        left = float("inf") if poll is None else self._looked + poll - time.monotonic()
        message: _Reload | str
        try:
            message = self._messages.get(timeout=max(0.0, min(left, _WATCHED_EVERY)))
        except queue.Empty:
            if left > _WATCHED_EVERY and not self._is_any_written() and not self._is_any_unfinished():
                return
            message = "look"
        if message == "stop":
            return
        if message == "gone":
            with self._changing:
                for model in self._models.values():
                    self._publish(model)
            return
        try:
            self._look_at_all(last=not isinstance(message, _Reload))
            if isinstance(message, _Reload):
                self._finish_reload(message)
        except Exception as error:
            if isinstance(message, _Reload):
                message.done.set_exception(error)
            raise
        finally:
            self._looked = time.monotonic()
        if message == "look" and self._settings.poll is None and any(model.waiting for model in self._models.values()):
            self._stop.wait(_SETTLED_WITHOUT_POLL)
            self.look_soon()

    def _look(self, name: str) -> None:
        """Bring one model to what lies on disk now."""
        state = self._models.get(name)
        if state is None:  # it was taken away meanwhile
            return
        try:
            found = self._find(state)
        except OSError as error:
            self._say(state, f"its folder cannot be read: {error.strerror or error}")
            return
        if not found and state.served:
            if state.is_of_another_path:
                self._say(state, "its path has no version; what was served before goes on being served")
            else:
                self._say(state, "its folder has no version any more; the last one goes on being served")
            return
        by_number = {version.number: version for version in found}
        state.bad = {number: entry for number, entry in state.bad.items() if number in by_number}
        state.waiting = {}
        source = state.source
        chosen = source.policy.choose(by_number, lambda number: self._usable(state, by_number[number]))
        labelled = [number for number in {*source.labels.values()} - {*chosen} if number in by_number]
        chosen += [number for number in labelled if self._usable(state, by_number[number])]
        for number in source.policy.numbers:
            if number not in by_number:
                state.bad[number] = ((), "NOT_FOUND", "there is no such version in the model's folder")
                state.logged.pop(number, None)
        self._say(state, _trouble(state, by_number, chosen))
        state.seen = {version.number: version.stamp for version in found}
        with self._changing:
            if chosen:
                for number in [number for number in state.served if number not in chosen]:
                    self._let_go(state, number)
            self._publish(state)

    def _find(self, state: _Model) -> list[FoundVersion]:
        path = state.source.path
        if state.in_folder or is_folder_of_versions(path):
            state.in_folder = True
            for name, why in passed_over(path).items():
                if name not in state.passed_over:
                    state.passed_over.add(name)
                    line = f"model '{state.source.name}': '{name}' in its folder is no version: {why}"
                    self._say_first(logging.WARNING, line)
            for name in left_behind(path):
                if name not in state.passed_over:
                    state.passed_over.add(name)
                    line = (
                        f"model '{state.source.name}': '{name}' in its folder is no version, and nothing was written to"
                        " it for an hour: its writer was killed, as it seems; remove it"
                    )
                    self._say_first(logging.WARNING, line)
            return versions_in(path)
        return single_version(path)  # none where the folder is empty: versions will come to it

    def _usable(self, state: _Model, found: FoundVersion) -> bool:
        """Tell whether a version can be served, after loading it where it is not yet."""
        number = found.number
        served = state.served.get(number)
        bad = state.bad.get(number)
        if bad and bad[0] and bad[0] == found.stamp:
            return served is not None and served[1] != found.stamp
        if served and served[1] == found.stamp and served[0].store.intact:
            return True
        settled = self._settled(state, found)
        if found.problem and not settled:  # an empty folder: somebody may be about to fill it
            state.waiting[number] = "waiting until its files stay as they are"
            return served is not None
        if found.problem:
            self._mark_bad(state, found, "INVALID_ARGUMENT", found.problem)
            return served is not None
        if not settled and not found.whole_when_there:
            state.waiting[number] = "waiting until its files stay as they are"
            return served is not None
        started = time.monotonic()
        state.loading = number
        with self._changing:
            self._publish(state)
        try:
            version = self._load(state, found)
        except Exception as error:
            state.loading = None
            if self._stop.is_set():
                return served is not None
            if served and not state.is_damaged(number) and (why := self._loader.damage(served[0].store)):
                served = None  # what lay there before was written over, and its rows are gone with it
                with self._changing:
                    self._let_go(state, number)
                log.error("model '%s': version %d is taken out of service: %s", state.source.name, number, why)
            usable = served is not None and not state.is_damaged(number)
            if settled:
                self._mark_bad(state, found, *described(error))
            else:
                state.waiting[number] = "waiting until its files stay as they are"
            return usable
        state.loading = None
        with self._changing:
            if served:
                self._let_go(state, number)
            state.served[number] = version, found.stamp
            state.bad.pop(number, None)
            state.loads += 1
            self._publish(state)
        tables = version.store.tables.values()
        # A whole model, which TensorFlow runs, tells of no tables.
        what = f"{sum(table.schema.rows for table in tables):,} rows" if tables else "the whole model"
        seconds = time.monotonic() - started
        if self._started:
            line = "model '%s': version %d is served: %s, after %.1f s"
            log.info(line, version.model, number, what, seconds)
        return True

    def _settled(self, state: _Model, found: FoundVersion) -> bool:
        poll = self._settings.poll
        if poll is None and not self._started:
            return True  # it was named to be served now
        quiet = _SETTLED_WITHOUT_POLL if poll is None else poll
        return not found.stamp or state.seen.get(found.number) == found.stamp or time.time() - found.changed >= quiet

    def _load(self, state: _Model, found: FoundVersion) -> ServedVersion:
        # Where nothing sound is served, requests wait for it already.
        waited_for = not self._started or all(state.is_damaged(number) for number in state.served)
        version = self._loader.load(state.source.name, found, state.recent, at_once=waited_for)
        version.store.file.on_change = self.look_soon
        if waited_for:
            state.unfinished.add(found.number)
        return version

    def _finish(self) -> None:
        """Verify and bring into memory what is served without that; what is damaged is taken out of service."""
        for state in list(self._models.values()):
            again = set()
            while state.unfinished and not self._stop.is_set():
                number = max(state.unfinished)
                state.unfinished.discard(number)
                if number not in state.served:
                    continue
                version, stamp = state.served[number]
                try:
                    self._loader.finish(version.store)
                except StoppedError:
                    return
                except Exception as error:
                    if isinstance(error, CorruptFileError) and version.store.discard():
                        log.warning("%s; it was in the cache, and is made again", error)
                        state.served[number] = version, ()  # another file than what lies there: it is loaded anew
                        del version
                        self._look(state.source.name)
                        continue
                    found = FoundVersion(number, str(version.path), stamp, 0)
                    del version
                    self._mark_bad(state, found, *described(error))
                    if not state.is_damaged(number):  # no memory, no space: at the next look
                        again.add(number)
                        continue
                    self._look(state.source.name)  # an older one may do
                    with self._changing:
                        if number in state.served and state.is_damaged(number):
                            self._let_go(state, number)
                else:
                    if number in state.bad and not state.bad[number][0]:
                        del state.bad[number]
            state.unfinished |= again
            with self._changing:
                self._publish(state)

    def _is_any_written(self) -> bool:
        """Tell whether a file that is served was cut, or written to, since it was last compared with its checksums."""
        served = [version for state in list(self._models.values()) for version, _ in state.served.values()]
        return any(_was_written(version) for version in served)

    def _is_any_unfinished(self) -> bool:
        """Tell whether a version that is served could not be verified, or brought into memory, when that was tried."""
        return any(state.unfinished for state in list(self._models.values()))

    # What is known, and what is told of it.

    def _let_go(self, state: _Model, number: int) -> None:
        store = state.served.pop(number)[0].store
        messages = self._messages
        weakref.finalize(store, messages.put, "gone").atexit = False
        state.leaving.setdefault(number, []).append(weakref.ref(store))
        log.info("model '%s': version %d is let go", state.source.name, number)

    def _mark_bad(self, state: _Model, found: FoundVersion, code: str, message: str) -> None:
        # What may be the machine's fault (no memory, no space, no permission) is tried again at the next look.
        before = state.bad.get(found.number)
        stamp = found.stamp if code in _FAULTS_OF_FILES else ()
        state.bad[found.number] = stamp, code, without_folders(one_line(message), found.path)
        state.logged[found.number] = one_line(message)
        if before and before[1:] == state.bad[found.number][1:] and before[0] == stamp:
            return  # told before
        state.failures += 1
        if self._started:
            log.error("%s", _bad_line(state, found.number, message))
        else:
            self._bad_at_start.append((state, found.number, message))

    def _say_first(self, level: int, line: str) -> None:
        """Say at the start what all workers find: one of them says it."""
        if self._shared is None or self._shared.says_first(line):
            log.log(level, "%s", line)

    def _say_same_tables(self) -> None:
        """Say which tables cannot be asked for by their name alone."""
        same = self._catalog.same_tables()
        if same == self._same_tables:
            return
        self._same_tables = same
        for table, models in itertools.islice(same.items(), _SAME_TABLES_SAID):
            there = ", ".join(f"'{model}'" for model in models)
            line = f"there is a table '{table}' in the models {there}: requests have to name one, such as"
            self._say_first(logging.WARNING, f"{line} ?model={models[0]}")
        if len(same) > _SAME_TABLES_SAID:
            self._say_first(logging.WARNING, f"so it is with {len(same) - _SAME_TABLES_SAID} more tables")

    def _say(self, state: _Model, trouble: str) -> None:
        if trouble and trouble != state.said:
            log.warning("model '%s': %s", state.source.name, trouble)
        state.said = trouble

    def _publish(self, state: _Model) -> None:
        """Make the catalog show `state`; the caller holds `_changing`."""
        if self._models.get(state.source.name) is not state:
            return  # another source has taken its name
        statuses: dict[int, VersionStatus] = {}
        for number in state.ended[-_KEPT_ENDED:]:
            statuses[number] = VersionStatus(number, "END")
        for number, stores in list(state.leaving.items()):
            state.leaving[number] = left = [store for store in stores if store() is not None]
            if left:
                statuses[number] = VersionStatus(number, "UNLOADING")
            else:
                del state.leaving[number]
                state.ended = [*(other for other in state.ended if other != number), number][-_KEPT_ENDED:]
                statuses[number] = VersionStatus(number, "END")
        bad = dict(state.bad)  # the thread goes on changing it
        for number, (_, code, message) in bad.items():
            statuses[number] = VersionStatus(number, "END", code, message)
        for number, message in dict(state.waiting).items():
            statuses[number] = VersionStatus(number, "START", "OK", message)
        for number in state.served:
            code, message = bad[number][1:] if number in bad else ("OK", "")
            statuses[number] = VersionStatus(number, "AVAILABLE", code, message)
        if state.loading is not None and state.loading not in state.served:
            statuses[state.loading] = VersionStatus(state.loading, "LOADING")
        versions = tuple(state.served[number][0] for number in sorted(state.served))
        self._catalog.publish(
            ServedModel(
                state.source.name,
                versions,
                dict(state.source.labels),
                tuple(statuses[number] for number in sorted(statuses)),
                state.loads,
                state.failures,
            )
        )

    def _unserved(self) -> list[_Model]:
        return [model for model in self._models.values() if not model.served]

    def _why_none(self, state: _Model, *, paths: bool = False) -> str:
        """Return why no version is served; with `paths` of the host and what options help, for who runs the server."""
        if state.bad:
            number = max(state.bad)
            message = state.logged.get(number) if paths else None
            return f"version {number}: {message or state.bad[number][2]}"
        if state.waiting:
            return f"version {max(state.waiting)} is still being written"
        if state.said:
            return state.said
        found = "there is no version in this folder (a folder or snapshot whose name is a number)"
        try:
            for name, why in list(passed_over(state.source.path).items())[:1]:
                found += f"; '{name}' is none: {why}"
        except (FileNotFoundError, NotADirectoryError):
            found = "there is nothing at its path"
        except OSError as error:
            found = f"what is at its path cannot be read: {error.strerror}"
        return f"{found}; --wait waits for one" if paths and not self._settings.wait else found


def _was_written(version: ServedVersion) -> bool:
    return bool(broken(version.store)) or version.store.verifies_on_use


def _bad_line(state: _Model, number: int, message: str) -> str:
    if number in state.served and state.is_damaged(number):
        rest = "it is taken out of service"
    elif stays := ", ".join(map(str, sorted(state.served))):
        rest = f"version {stays} stays" if len(state.served) == 1 else f"versions {stays} stay"
    else:
        rest = "no other version is served"
    return f"model '{state.source.name}': version {number} cannot be served: {one_line(message)} ({rest})"


def _trouble(state: _Model, by_number: Mapping[int, FoundVersion], chosen: Sequence[int]) -> str:
    """Return what is not as whoever runs the server will expect, though the folder can be read; empty if all is."""
    gone = sorted(number for number in state.served if number not in by_number)
    if gone and not chosen and not state.waiting:
        return f"version {gone[-1]} is gone from its folder, where no other can be served; it goes on being served"
    for label, number in state.source.labels.items():
        if number not in by_number and number not in state.served:
            return f"label '{label}' names version {number}, which is not in its folder"
    for number in state.source.policy.numbers:
        if number not in by_number:
            return f"version {number} is to be served, and is not in its folder"
    return ""
