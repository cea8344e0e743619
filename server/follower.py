"""A model that is served from a chain of checkpoints, and is as new as the chain.

Two threads for each chain. One looks for members (`kvtools.follow.ChainWalk`), lays the rows of each increment over
what is served (`followed_store.py`) and publishes the result in the catalog as another version, whose number is the
increment's: a request gets one version, whole. The other, of the lowest priority, verifies the file below, brings it
into memory, and writes a new file (`fold.py`) when much lies over the old one; the first thread then goes on over that.

What may not be applied is refused with a name, counted, and told in the log once; what was served stays. A newer full
checkpoint is loaded beside what is served, and takes its place. At the start the newest file that was folded is taken,
where the chain goes on from it, or the newest full.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from kvtools.chain import ChainError, Member, fingerprint, members, record_of
from kvtools.dialects.chunk import KEYS_AND_VALUES
from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, OutputError, one_line
from kvtools.follow import ChainWalk, Position, Step
from kvtools.increment import read_increment
from kvtools.server.catalog import Catalog, FollowStatus, ServedModel, ServedVersion, VersionStatus
from kvtools.server.fold import Fold, folds_of, make_fold, only_one, remove_older
from kvtools.server.followed_store import FollowedStore
from kvtools.server.host_paths import without_folders
from kvtools.server.recent_keys import RecentKeys
from kvtools.server.settings import Settings
from kvtools.server.snapshot_cache import folder_of
from kvtools.server.sources import SharedSources
from kvtools.server.store import TableStore
from kvtools.server.version_folder import FoundVersion
from kvtools.server.version_loader import ChangingFileError, StoppedError, VersionLoader, broken

log = logging.getLogger("kvtools.serve")

_POLL = 0.1  # s
_LONGEST_STOP = 2.0  # s
_FOLDED_FROM = 16 << 20  # bytes over a file, at the least, before it is worth another one
_FOLDED_SHARE = 8  # or this part of the file
_AFTER_FAILURE = 60.0  # s


class Follower:
    """Serves the chain in `folder` as `model`, from `load` on; `go_on` keeps it up to date until `stop`.

    Raises from `load`:
        BadInputError: nothing can be served, and `settings.wait` is not set.
        OutputError: the cache cannot be written.
    """

    def __init__(
        self,
        catalog: Catalog,
        model: str,
        folder: Path,
        settings: Settings,
        options: OpenOptions | None = None,
        shared: SharedSources | None = None,
    ) -> None:
        self.model = model
        self._status = FollowStatus()
        self._catalog = catalog
        self._folder = folder
        self._settings = settings
        self._stop = threading.Event()
        self._loader = VersionLoader(settings, options, shared, self._stop)
        self._walk = ChainWalk(folder, on_refused=self._tell)
        self._store: FollowedStore | None = None
        self._recent: dict[str, RecentKeys] = {}
        self._wake = threading.Event()  # for the thread that applies
        self._work = threading.Event()  # for the one that folds
        self._newer: tuple[TableStore, Fold] | Exception | None = None  # of the one for the other
        self._folding: int = -1  # what is being folded: levels up to there are not merged with newer ones
        self._applied = self._folds = self._loads = 0
        self._seconds = 0.0
        self._said = ""
        self._trouble = ""
        self._threads = [
            threading.Thread(target=self._follow, name=f"follow {model}", daemon=True),
            threading.Thread(target=self._keep, name=f"fold {model}", daemon=True),
        ]
        catalog.follows[model] = self
        catalog.publish(ServedModel(model))

    # What others ask for, from any thread.

    @property
    def status(self) -> FollowStatus:
        """How far it is."""
        return self._status

    def load(self) -> None:
        """Load what there is now: a file, and all increments after it."""
        self._cache = folder_of(self._settings.cache)
        self._begin()
        self._go_along()
        if self._store is None and not self._settings.wait:
            raise BadInputError(f"following '{self._folder}': {self._why_none()}")
        if self._store is None:
            why = self._trouble or self._said or "there is no full checkpoint in this folder"
            log.warning("model '%s': %s; waiting for it", self.model, why)

    def go_on(self) -> None:
        """Follow from now on, in the background."""
        self._work.set()
        for thread in self._threads:
            thread.start()

    def look_soon(self) -> None:
        """Look for something newer now. May be called in a signal handler."""
        self._wake.set()

    def stop(self) -> None:
        """End; what is served stays."""
        self._stop.set()
        self._wake.set()
        self._work.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_LONGEST_STOP)

    # The thread that applies.

    def _follow(self) -> None:
        poll = self._settings.poll or _POLL
        while not self._stop.is_set():
            try:
                self._look()
            except Exception:  # a fault of ours shall not end all that is to come
                log.exception("model '%s': following its chain failed", self.model)
                self._stop.wait(1.0)
            self._wake.wait(poll)
            self._wake.clear()

    def _look(self) -> None:
        newer, self._newer = self._newer, None
        if isinstance(newer, Exception) or (self._store is not None and broken(self._store)):
            self._begin_anew(newer if isinstance(newer, Exception) else None)
        elif newer is not None:
            self._go_over_to(*newer)
        if self._store is not None and self._store.base.verifies_on_use:
            self._work.set()  # its file was written to, or is not verified yet
        self._go_along()

    def _go_along(self) -> None:
        """Apply what there is, and publish it: at the start all at once, and then each increment."""
        try:
            while not self._stop.is_set() and (step := self._walk.next()) is not None:
                self._take(step)
            self._say(one_line(self._walk.gone))
        except BadInputError as error:
            self._say(one_line(str(error)))
        self._tell_status()
        if self._store is not None and not self._catalog.versions(self.model):
            self._publish()

    def _take(self, step: Step) -> None:
        started = time.monotonic()
        self._tell_status()
        try:
            if step.member.kind == "full" or self._store is None:
                self._load_full(step)
            else:
                assert step.record is not None
                increment = read_increment(step.member, step.record, step.fingerprint, KEYS_AND_VALUES)
                self._store = self._store.with_increment(increment, self._folding)
                self._applied += 1
        except StoppedError:
            return
        except ChainError as error:
            self._walk.refuse(step.member, error)
            return
        except (KvtoolsError, ValueError, OSError, MemoryError) as error:
            self._walk.refuse(step.member, error)
            return
        self._walk.took(step)
        if step.member.kind == "full":
            seconds = time.monotonic() - started
            log.info("model '%s': full %d is served, after %.1f s", self.model, step.member.number, seconds)
        if self._threads[0].is_alive() or self._catalog.versions(self.model):
            self._publish()
            self._seconds = max(0.0, time.time() - step.position.time) if step.position.time else 0.0
            self._tell_status()
        self._work.set()

    def _load_full(self, step: Step) -> None:
        found = FoundVersion(step.member.number, str(step.member.prefix), (), 0)
        version = self._loader.load(self.model, found, self._recent, at_once=self._store is None)
        self._use(version.store, step.position, step.fingerprint)

    def _use(self, base: TableStore, position: Position, mark: str) -> None:
        before = self._store
        base.file.on_change = self.look_soon
        self._store = FollowedStore(base, position.sequence, position.sequence, self._folder, mark)
        self._loads += 1
        if before is not None and before.base.path != base.path:
            before.discard()

    def _begin(self) -> None:
        """Take the newest file that was folded, if the chain goes on from it and no full is nearer to its end."""
        found = members(self._folder)
        for fold in folds_of(self._cache, self._folder):
            if not _goes_on_from(found, fold.position):
                continue
            fulls = [member.number for member in found if member.kind == "full"]
            if not _reaches(found, fold.position.sequence, max(fulls, default=0)):
                continue  # the full is newer, and nothing leads to it from here
            try:
                at = FoundVersion(fold.position.sequence, str(fold.path), (), 0)
                version = self._loader.load(self.model, at, self._recent, at_once=True)
            except (KvtoolsError, OSError) as error:
                log.warning("model '%s': %s; it is begun from a full", self.model, one_line(str(error)))
                fold.path.unlink(missing_ok=True)
                continue
            self._use(version.store, fold.position, ",".join(sorted(fold.position.follows)))
            self._walk.resume(fold.position)
            log.info("model '%s': goes on from increment %d", self.model, fold.position.sequence)
            return

    def _begin_anew(self, error: Exception | None) -> None:
        """Load another file: the one that is served was damaged, cut or written over."""
        store = self._store
        assert store is not None
        log.error(
            "model '%s': what is served is loaded anew: %s",
            self.model,
            one_line(str(error)) if error else "its file was cut or written over",
        )
        store.base.discard()
        if (file := store.base.snapshot.path).parent == self._cache:
            file.unlink(missing_ok=True)
        self._walk = ChainWalk(self._folder, refused=self._walk.refused, on_refused=self._tell)
        self._begin()

    def _go_over_to(self, base: TableStore, fold: Fold) -> None:
        store = self._store
        if store is None or not store.base_sequence < fold.position.sequence <= store.sequence:
            return  # a full has come meanwhile
        base.file.on_change = self.look_soon
        self._store = store.on(base, fold.position.sequence)
        self._folds += 1
        self._publish()
        if store.base.path != base.path:
            store.discard()
        log.info(
            "model '%s': increments up to %d are in a file, %s rows lie over it",
            self.model,
            fold.position.sequence,
            f"{self._store.rows_over:,}",
        )

    # The thread that folds.

    def _keep(self) -> None:
        finished: TableStore | None = None
        damaged: TableStore | None = None
        while not self._stop.is_set():
            self._work.wait()
            self._work.clear()
            store, position = self._store, self._walk.position
            if store is None or position is None or self._stop.is_set():
                continue
            try:
                if store.base is not damaged and (finished is not store.base or store.base.verifies_on_use):
                    self._loader.finish(store.base)
                    finished = store.base
                    self._work.set()
                elif position.sequence == store.sequence and _is_worth_folding(store):
                    self._fold(store, position)
            except StoppedError:
                return
            except OutputError as error:
                log.warning("model '%s': %s", self.model, one_line(str(error)))
                self._stop.wait(_AFTER_FAILURE)
                self._work.set()
            except CorruptFileError as error:
                self._newer = error
                finished = damaged = store.base
                self._wake.set()
            except (BadInputError, ChangingFileError):
                # Another process has a newer file already, and has removed this one; or this one is being written to.
                self._stop.wait(1.0)
                self._work.set()
            except Exception:
                log.exception("model '%s': folding increments failed", self.model)
                self._stop.wait(_AFTER_FAILURE)
                self._work.set()

    def _fold(self, store: FollowedStore, position: Position) -> None:
        with only_one(self._cache, self._folder) as mine:
            fold: Fold | None = next(iter(folds_of(self._cache, self._folder)), None)
            if fold is None or not store.base_sequence < fold.position.sequence <= store.sequence:
                if not mine:
                    self._stop.wait(1.0)  # another process makes it
                    self._work.set()
                    return
                self._folding = position.sequence
                try:
                    fold = make_fold(store, position, self._cache, self._folder, lambda: not self._stop.is_set())
                finally:
                    self._folding = -1
                if fold is None:
                    raise StoppedError
            elif fold.position.chain != position.chain:
                fold.path.unlink(missing_ok=True)
                return
            base = fold.open()
            try:
                base.verify_on_use()
                self._loader.finish(base)
            except CorruptFileError:
                fold.path.unlink(missing_ok=True)
                raise
            if mine:
                remove_older(self._cache, self._folder, fold)
        self._newer = (base, fold)
        self._wake.set()
        while self._newer is not None and not self._stop.wait(0.05):  # until it is served, there is nothing to fold
            pass

    # What is told.

    def _publish(self) -> None:
        store = self._store
        assert store is not None
        recent = {name: self._recent.setdefault(name, RecentKeys()) for name in store.tables}
        version = ServedVersion(self.model, store.sequence, self._folder, store, recent)
        status = VersionStatus(store.sequence, "AVAILABLE")
        refused = sum(self._walk.refused.values())
        self._catalog.publish(ServedModel(self.model, (version,), {}, (status,), self._loads, refused))

    def _tell_status(self) -> None:
        store, walk = self._store, self._walk
        self._status = FollowStatus(
            None if store is None else store.sequence,
            0.0 if walk.position is None else walk.position.time,
            walk.behind,
            self._seconds,
            self._applied,
            tuple(sorted(walk.refused.items())),
            without_folders(self._said or walk.trouble, str(self._folder)),
            0 if store is None else store.rows_over,
            0 if store is None else store.bytes_over,
            self._folds,
        )

    def _tell(self, error: ChainError) -> None:
        stays = "nothing is served" if self._store is None else f"{self._store.sequence} stays"
        self._trouble = str(error)
        log.error("model '%s': refused (%s): %s (%s)", self.model, error.reason, one_line(str(error)), stays)
        if self._catalog.versions(self.model):
            self._publish()  # which says how many were refused

    def _say(self, trouble: str) -> None:
        beginning = self._store is None and not self._threads[0].is_alive()  # `load` says it
        if trouble and trouble != self._said and not beginning:
            log.warning("model '%s': %s", self.model, trouble)
        self._said = trouble

    def _why_none(self) -> str:
        if self._trouble:
            return self._trouble
        if self._said:
            return f"{self._said}; --wait waits for it"
        return "there is no full checkpoint in this folder; --wait waits for one"


def _is_worth_folding(store: FollowedStore) -> bool:
    return store.bytes_over > max(_FOLDED_FROM, store.snapshot.bytes // _FOLDED_SHARE)


def _goes_on_from(found: list[Member], position: Position) -> bool:
    """Tell whether the chain in a folder is still the one that a position is of."""
    here = [member for member in found if member.number == position.sequence]
    try:
        if here:
            return any(_is_of(member, position) for member in here)
        # What is before the newest full may have been removed: the next increment says what it follows.
        for member in found:
            if member.number == position.sequence + 1 and member.kind == "delta":
                previous = None if (record := record_of(member)) is None else record.previous
                return previous is not None and previous.fingerprint in position.follows
    except KvtoolsError:
        pass
    return False


def _is_of(member: Member, position: Position) -> bool:
    """Tell whether a member is the one that a position is of, or the full of its moment."""
    if fingerprint(member.prefix) in position.follows:
        return True
    previous = None if (record := record_of(member)) is None else record.previous
    return member.kind == "full" and previous is not None and previous.fingerprint in position.follows


def _reaches(found: list[Member], sequence: int, number: int) -> bool:
    """Tell whether increments lead from `sequence` to `number`."""
    increments = {member.number for member in found if member.kind == "delta"}
    return all(each in increments for each in range(sequence + 1, number + 1))
