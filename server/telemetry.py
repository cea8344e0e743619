"""The observer of a server that runs: keys are asked, answers counted and logged."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from kvtools._snapshot import Spin, Tally
from kvtools.errors import KvtoolsError
from kvtools.server.access_keys import AccessKeys, read_access_keys
from kvtools.server.access_log import AccessLog
from kvtools.server.catalog import Catalog
from kvtools.server.metrics import Metrics
from kvtools.server.observer import Answered, Inferences, Observer, Tallied
from kvtools.server.settings import Settings
from kvtools.server.sources import SharedSources

log = logging.getLogger("kvtools.serve")


class Telemetry(Observer):
    """Made once for each process. Raises `BadInputError` if the keys cannot be read or the log not be written."""

    def __init__(self, catalog: Catalog, settings: Settings) -> None:
        super().__init__()
        self._catalog = catalog
        self._settings = settings
        self._keys: AccessKeys | None = read_access_keys(settings.api_keys)
        self._counted = Metrics(catalog, settings.shared)
        self._count = self._counted.counts.count
        self._failing = False
        self._log = None if settings.access_log is None else AccessLog(settings.access_log)

    def authorize(self, headers: Mapping[str, str], tables: Iterable[str]) -> None:
        """Let in who has a key for `tables`; everybody, where no keys were given."""
        if self._keys is not None:
            self._keys.authorize(headers, tables)

    def authorize_model(self, headers: Mapping[str, str], model: str | None) -> None:
        """Let in who has a key for `model`; None: for the first one."""
        if self._keys is not None and (model is not None or self._keys.by_model):
            first = self._catalog.names()[:1] if model is None else [model]
            self._keys.authorize(headers, model=first[0] if first else None)

    def authorize_unknown(self, headers: Mapping[str, str], model: str) -> None:
        """Let in who has a key for all tables, or one that names `model`."""
        if self._keys is not None:
            self._keys.authorize_unknown(headers, model)

    def authorize_change(self, headers: Mapping[str, str]) -> None:
        """Let in who has a key for administration."""
        if self._keys is not None:
            self._keys.authorize(headers, admin=True)

    def metrics(self) -> str:
        """Return what all workers have counted."""
        return self._counted.text()

    def inferences(self) -> Mapping[tuple[str, int, str], Inferences]:
        """Return what was asked of models in the protocols of others, of all workers."""
        return self._counted.inferences()

    def tally(self, counted: Tallied) -> Tally | None:
        """Return what counts lookups of a table; None where each has a line in the log."""
        return None if self._log is not None else self._counted.tally(counted)

    def on_spin(self, spin: Spin) -> None:
        """Have the time counted for which `spin` looks for requests."""
        self._counted.add_spin(spin)

    def on_answer(self, answered: Answered) -> None:
        """Count an answer, and have it logged."""
        self._count(answered)
        if self._log is not None:
            self._log.add(answered, self._keys)

    def tick(self) -> None:
        """Tell the other workers what was counted; for every second."""
        try:
            self._counted.publish()
            self._failing = False
        except OSError as error:
            if not self._failing:
                where = self._settings.shared
                log.error("the other workers cannot be told what this one counts: '%s': %s", where, error.strerror)
            self._failing = True

    def reload(self) -> None:
        """Read the keys anew, and begin a new file of the log if the old one was moved. Bad keys change nothing."""
        if self._log is not None:
            self._log.reopen()
        try:
            keys = read_access_keys(self._settings.api_keys)
        except KvtoolsError as error:
            log.error("%s; the keys stay as they are", error)
            return
        if keys is None and self._keys is not None:
            log.error("there are no keys any more; the keys stay as they are")
            return
        self._keys = keys
        self._catalog.renew()
        self.check_keys()

    def check_keys(self) -> None:
        """Say in the log which keys are for tables or models that are not served, such as misspelled ones."""
        names = self._catalog.names()
        versions = [version for name in names for version in self._catalog.versions(name)]
        waiting = len({version.model for version in versions}) < len(names)
        if self._keys is None or waiting:  # whose tables are not known yet
            return
        shared = self._settings.shared
        tables: set[str] = set()
        unknown: set[str] = set()
        for version in versions:
            read = getattr(version.store, "reads", tuple(version.store.tables))
            tables.update(read or ())
            if read is None:
                unknown.add(version.model)
        for line in self._keys.unmatched(tables, names, unknown):
            if shared is None or SharedSources(shared).says_first(line):
                log.warning("%s", line)

    def close(self) -> None:
        """Write what is not written yet."""
        self.tick()
        if self._log is not None:
            self._log.close()
