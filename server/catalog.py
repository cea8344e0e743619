"""What is served now: models, their versions and labels.

Whoever answers a request takes one `ServedVersion` at its start and keeps it to its end. Nothing here is changed in
place: a model is replaced as a whole, by assigning one attribute, so readers take no lock and see either the old state
or the new one. The files of a version are unmapped when the last reader lets go of it, which Python's references count.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy.typing as npt

from kvtools._snapshot import Epoch
from kvtools.errors import BadInputError, UnknownTableError
from kvtools.server.recent_keys import RecentKeys
from kvtools.server.sources import ModelSource
from kvtools.server.store import TableStore

DEFAULT_MODEL = "default"
State = Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END"]


class UnknownModelError(BadInputError):
    """A model was named that is not served."""


class UnknownVersionError(BadInputError):
    """A version or label was named that its model does not have now, or the model has none at all."""


class AmbiguousTableError(BadInputError):
    """A table was asked for by its name alone, and several models have one of this name."""


class OtherExportError(BadInputError):
    """Rows of an export in two halves were asked for, and no version that is served has them."""


class NoVersionError(UnknownVersionError):
    """A model has no version at all now: it is loaded still, or what it had turned out bad. Another server may do."""


@dataclass(frozen=True)
class ServedVersion:
    """One version of a model: immutable, for any number of threads.

    `recent` has, per table, a sample of the keys asked for: who answers lookups notes some of them there, by `note`.
    """

    model: str
    number: int
    path: Path
    store: TableStore
    recent: Mapping[str, RecentKeys] = field(default_factory=dict, compare=False)

    @property
    def away(self) -> str:
        """Why its rows, which other servers have, cannot be had now; empty if they can, or are here."""
        return getattr(self.store, "away", "")

    def note(self, table: str, keys: npt.NDArray[Any]) -> None:
        """Remember some of `keys` [n] of `table`: their rows are touched in the next version before it is served."""
        if recent := self.recent.get(table):
            recent.note(keys)


@dataclass(frozen=True)
class VersionStatus:
    """Where a version is in its life, in the words of TensorFlow Serving's `ModelVersionStatus`.

    `error_code` is a name of `google.rpc.Code` ("OK", "UNKNOWN", "NOT_FOUND", ...); `error_message` has no path of the
    host in it.
    """

    number: int
    state: State
    error_code: str = "OK"
    error_message: str = ""


@dataclass(frozen=True)
class ServedModel:
    """A model as it is served: versions ascending, labels to version numbers, and the life of every version known.

    `loads` and `failures` count the versions that were loaded, and those that could not be, since the start.
    """

    name: str
    versions: tuple[ServedVersion, ...] = ()
    labels: Mapping[str, int] = field(default_factory=dict)
    statuses: tuple[VersionStatus, ...] = ()
    loads: int = 0
    failures: int = 0


@dataclass(frozen=True)
class FollowStatus:
    """How a model follows its chain: what is served, what is refused, and what lies over the file.

    `moment` is that of the last member that is served, and `behind` is since when a newer one has been waiting, both
    Unix time; `seconds` how long it took from the moment of the last increment until it was served.
    """

    sequence: int | None = None
    moment: float = 0.0
    behind: float | None = None
    seconds: float = 0.0
    applied: int = 0
    refused: tuple[tuple[str, int], ...] = ()
    trouble: str = ""
    rows_over: int = 0
    bytes_over: int = 0
    folds: int = 0

    @property
    def lag(self) -> float:
        """For how many seconds something newer has been waiting; 0 where all that there is is served."""
        return 0.0 if self.behind is None else max(0.0, time.time() - self.behind)


class Changes(Protocol):
    """What may be changed while the server runs: `Versions`, where there is one."""

    def look_soon(self) -> None:
        """Look for new versions now, in the background."""

    def sources(self) -> list[ModelSource]:
        """Return what is to be served now."""

    def set_label(self, model: str, label: str, number: int | None) -> None:
        """Give a label to a version that is served; None takes it away."""

    def reload(self, sources: Sequence[ModelSource]) -> Future[dict[str, str]]:
        """Serve these models and no other; the result tells, when it is done, what is wrong with which."""


class Follows(Protocol):
    """Who keeps a model as new as its chain: `kvtools.server.follower.Follower`."""

    @property
    def status(self) -> FollowStatus:
        """Return how far it is."""

    def look_soon(self) -> None:
        """Look for something newer now, in the background."""


class Catalog:
    """The models served. Reading is for any thread; `publish` and `remove` are for whoever loads versions.

    Example:
        ```python
        catalog = static_catalog("exported")
        served = catalog.version()
        embeddings, found = served.store.table("user_emb").lookup(keys)
        ```
    """

    def __init__(self, models: Iterable[ServedModel] = ()) -> None:
        self._models: Mapping[str, ServedModel] = MappingProxyType({model.name: model for model in models})
        self._had: Mapping[str, frozenset[str]] = {}
        self._writing = threading.Lock()
        self.epoch = Epoch()
        """What is prepared from the state of now, by who takes this before the state, is of no use after it."""
        self.follows: dict[str, Follows] = {}
        """The models that are served from chains, and how they follow them."""
        self.draining = False
        """Set when the server is told to end: it is alive, and not ready any more."""
        self.changes: Changes | None = None
        """What changes labels and models while the server runs; None: they stay as they are."""

    def names(self) -> list[str]:
        """Return the names of the models, in the order in which they were named."""
        return list(self._models)

    def model(self, name: str | None = None) -> ServedModel:
        """Return the state of a model; None: of the first one. Raises `UnknownModelError`."""
        models = self._models
        if name is None and models:
            return next(iter(models.values()))
        try:
            return models[name or DEFAULT_MODEL]
        except KeyError:
            raise UnknownModelError(f"there is no model '{name or DEFAULT_MODEL}'") from None

    def version(
        self, model: str | None = None, *, number: int | None = None, label: str | None = None
    ) -> ServedVersion:
        """Return a version of a model (None: of the first one): `number`, or that of `label`, or the latest.

        Raises:
            UnknownModelError, UnknownVersionError: there is none such now.
            NoVersionError: an `UnknownVersionError`, where the latest was asked for and there is none.
        """
        served = self.model(model)
        if label is not None:
            try:
                number = served.labels[label]
            except KeyError:
                raise UnknownVersionError(f"model '{served.name}' has no label '{label}'") from None
        if number is None:
            if served.versions:
                return served.versions[-1]
            raise NoVersionError(f"model '{served.name}' has no version that can be served")
        for version in served.versions:
            if version.number == number:
                return version
        raise UnknownVersionError(f"model '{served.name}' has no version {number}")

    def model_of(self, tables: Sequence[str] = (), model: str | None = None) -> str | None:
        """Return which model lookups in `tables` are for: `model`, or where several are served, the one that has them.

        None: the first one, as there is no other, or no table is named.

        Raises:
            UnknownModelError: there is no such model.
            AmbiguousTableError: several models have a table of this name, or the tables are not of one model.
            UnknownTableError: no model has the table.
            NoVersionError: no model that has a version has the table, and there is one without.
        """
        models = self._models
        if model is not None:
            if model not in models:
                raise UnknownModelError(f"there is no model '{model[:200]}'; there are {_listed(models)}")
            return model
        if len(models) < 2 or not tables:
            return None
        found = {table: self._model_with(table, models) for table in tables}
        (first, one), *others = found.items()
        for table, other in others:
            if other != one:
                raise AmbiguousTableError(
                    f"table '{first[:200]}' is of model '{one}' and table '{table[:200]}' of model '{other}', and one"
                    " request is answered by one model: ask for each by itself"
                )
        return one

    def choose(self, tables: Sequence[str] = (), model: str | None = None) -> ServedVersion:
        """Return the latest version of the model that lookups in `tables` are for; see `model_of` and `version`."""
        name = self.model_of(tables, model)
        return self.version() if name is None else self.version(name)

    def of_export(self, export: str, model: str | None = None) -> ServedVersion:
        """Return the version, of `model` or of any, whose tables are of this export.

        Raises:
            UnknownModelError: there is no such model.
            OtherExportError: none is.
        """
        models = [self.model(model)] if model is not None else list(self._models.values())
        for served in models:
            for version in reversed(served.versions):
                if getattr(version.store, "export", None) == export:
                    return version
        raise OtherExportError(
            f"the rows of export '{export[:64]}' were asked for, and no version that is served has them; serve it"
            " beside the other, as --versions 'latest 2' does, or ask another server"
        )

    def same_tables(self) -> dict[str, list[str]]:
        """Return the names of tables that several models have, each with those models."""
        having: dict[str, list[str]] = {}
        for model in self._models.values():
            for table in self._tables_of(model):
                having.setdefault(table, []).append(model.name)
        return {table: models for table, models in having.items() if len(models) > 1}

    def versions(self, model: str | None = None) -> list[ServedVersion]:
        """Return the versions of a model that are served, ascending."""
        return list(self.model(model).versions)

    def labels(self, model: str | None = None) -> dict[str, int]:
        """Return the labels of a model, each with the number of its version."""
        return dict(self.model(model).labels)

    def status(self, model: str | None = None) -> list[VersionStatus]:
        """Return where each version of a model is in its life, those that could not be loaded included."""
        return list(self.model(model).statuses)

    def publish(self, model: ServedModel) -> None:
        """Make `model` what is served under its name, from the next request on."""
        with self._writing:
            self._replace({**self._models, model.name: model})

    def remove(self, name: str) -> None:
        """Stop serving a model; requests that have taken a version of it go on to their end."""
        with self._writing:
            self._replace({key: model for key, model in self._models.items() if key != name})

    def renew(self) -> None:
        """Begin a new epoch: who may ask for what is another now."""
        with self._writing:
            self._replace(self._models)

    def _replace(self, models: Mapping[str, ServedModel]) -> None:
        # What was prepared ends before there is anything newer, so that no answer is older than one before it.
        self.epoch.end()
        self._had = {
            name: frozenset(self._tables_of(self._models[name]))
            for name, model in models.items()
            if not model.versions and name in self._models
        }
        self._models = MappingProxyType(dict(models))
        self.epoch = Epoch()

    def _tables_of(self, model: ServedModel) -> Collection[str]:
        """Return the tables of a model; of one without a version those that it had, which another's do not replace."""
        return model.versions[-1].store.tables if model.versions else self._had.get(model.name, ())

    def _model_with(self, table: str, models: Mapping[str, ServedModel]) -> str:
        having = [name for name, model in models.items() if table in self._tables_of(model)]
        if len(having) == 1:
            return having[0]
        if having:
            raise AmbiguousTableError(
                f"there is a table '{table[:200]}' in the models {_listed(having)}: name the one that is meant in the"
                f" URL, such as ?model={having[0]}"
            )
        for name, model in models.items():
            if not model.versions:  # it may have the table
                raise NoVersionError(f"model '{name}' has no version that can be served")
        raise UnknownTableError(f"there is no table '{table[:200]}'; GET /v1/tables lists the tables")

    @property
    def live(self) -> bool:
        """Whether the process answers at all."""
        return True

    @property
    def ready(self) -> bool:
        """Whether every model has a version that answers."""
        return not self.unready()

    @property
    def warm(self) -> bool:
        """Whether what is served is in memory, as far as it fits: no lookup waits for the disk."""
        models = self._models.values()
        stores = [version.store for model in models for version in model.versions]
        # Rows in Redis are never brought into memory: of these, what is in front counts.
        return self.ready and all(getattr(store, "front_warm", store.warm) for store in stores)

    def unready(self) -> str:
        """Return what keeps the server from being ready, in a sentence; empty if nothing does."""
        models = self._models
        if self.draining:
            return "the server is ending"
        if not models:
            return "no model is served yet"
        for model in models.values():
            if not model.versions:
                errors = [status for status in model.statuses if status.error_message]
                because = f": version {errors[-1].number}: {errors[-1].error_message}" if errors else " yet"
                return f"model '{model.name}' has no version that can be served{because}"
            if not model.versions[-1].store.intact:
                number = model.versions[-1].number
                return f"model '{model.name}': the file of version {number} was cut or written over; it is loaded anew"
            if away := model.versions[-1].away:
                return f"model '{model.name}': its rows are elsewhere: {' '.join(away.split())}"
        return ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def static_catalog(
    source: str | os.PathLike[str] | TableStore, *, name: str = DEFAULT_MODEL, number: int = 1
) -> Catalog:
    """Return a catalog of one model of one version, over a store or what a store can be opened on."""
    store = TableStore(source) if isinstance(source, str | os.PathLike) else source
    recent = {table: RecentKeys() for table in store.tables}
    version = ServedVersion(name, number, Path(store.path), store, recent)
    return Catalog([ServedModel(name, (version,), {}, (VersionStatus(number, "AVAILABLE"),))])
