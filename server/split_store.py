"""Models in two halves (`kvtools export --split`): requests are answered by looking rows up, then by the dense part.

TensorFlow runs the dense part: it computes ids where they are no input as it is, and the answer. The rows come from the
snapshot beside it, or, with `--rows-from`, from other servers, which are asked for rows of the same export and of no
other. Both halves are one store, so a version has both or none of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.client import Client, ClientError, SplitModel, UnavailableError
from kvtools.client.errors import CA_FILE, MORE_TIME
from kvtools.client.split_rows import distinct_keys, rows_of_keys
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import numpy_dtype
from kvtools.errors import BadInputError, KvtoolsError, MissingDependencyError, UsageError, one_line
from kvtools.model_digest import check_files
from kvtools.server.answer import TableCount
from kvtools.server.protocol_error import ProtocolError, invalid, of_request
from kvtools.server.recent_keys import RecentKeys
from kvtools.server.request import RequestError
from kvtools.server.saved_models import SavedModelStore
from kvtools.server.settings import Settings
from kvtools.server.signatures import STRING, Array, Signature, TensorSpec
from kvtools.server.store import StoredTable, TableStore
from kvtools.split_manifest import SplitLookup, SplitSignature, SplitTensor

API_KEY = "KVTOOLS_SERVE_ROWS_FROM_API_KEY"
"""The variable of the environment with the access key for servers of rows."""
CA_OPTION = "--rows-from-ca "
"""The option of the command line with the certificates to trust there, before its value."""

_LOG = logging.getLogger("kvtools.serve")

_WATCH_EVERY = 1.0  # s
_WATCH_LIMIT = 2.0
_HEDGE = 0.25  # s without an answer, after which another replica is asked, too
_AWAY_LIMIT = 0.5  # for a request's rows while a server is known not to answer

Rows = list[tuple[Array, Array]]
LookUp = Callable[[SplitSignature, Sequence[Array], Settings], Rows]
"""Gives, for the keys of each lookup, their rows [*shape, dim] and whether each was found [*shape]."""


@dataclass(frozen=True)
class WholeSignature:
    """A signature of a model in two halves, asked as if it were whole. `dense` are the signatures of the dense part, or
    says why they cannot be asked."""

    of: SplitSignature
    dense: Mapping[str, Signature] | str = field(repr=False)
    look_up: LookUp = field(repr=False)
    method_name: str = "tensorflow/serving/predict"

    @property
    def name(self) -> str:
        """Its name in the model."""
        return self.of.name

    @cached_property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """What the model takes."""
        return _specs(self.of.inputs)

    @cached_property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """What it gives."""
        return _specs(self.of.outputs)

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """The tables that are looked up in."""
        return tuple(dict.fromkeys(lookup.table.name for lookup in self.of.lookups))

    def takes(self, name: str, dtype: np.dtype[Any]) -> bool:
        """An input has the one type that the signature says."""
        return bool(dtype == self.inputs[name].dtype)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str], settings: Settings) -> dict[str, Array]:
        """Compute ids, look them up, and run the dense part."""
        return self.run_and_count(inputs, outputs, settings, [])

    def run_and_count(
        self,
        inputs: Mapping[str, Array],
        outputs: Sequence[str],
        settings: Settings,
        counts: list[TableCount],
        model: str = "",
    ) -> dict[str, Array]:
        """Answer, and add to `counts` what was looked up."""
        if isinstance(self.dense, str):
            raise ProtocolError("FAILED_PRECONDITION", self.dense, status=503)
        ids: Mapping[str, Array] = {}
        if self.of.needs_ids:
            assert self.of.ids_signature is not None
            wanted = [lookup.ids for lookup in self.of.lookups if lookup.ids_input is None]
            given = {name: inputs[name] for name in self.of.ids_inputs}
            ids = self.dense[self.of.ids_signature].run(given, wanted, settings)
        try:
            keys = self.of.keys(inputs, ids)
        except UsageError as error:
            raise invalid(one_line(str(error))) from None
        for lookup, own in zip(self.of.lookups, keys, strict=True):
            if own.size * lookup.table.dim > settings.max_values:
                raise ProtocolError(
                    "INVALID_ARGUMENT",
                    f"got {own.size} ids of table '{lookup.table.name}', of {lookup.table.dim} numbers each, expected"
                    f" at most {settings.max_values} numbers; send several requests",
                    status=413,
                )
        rows = self.look_up(self.of, keys, settings)
        for lookup, (_, found) in zip(self.of.lookups, rows, strict=True):
            counts.append(TableCount(lookup.table.name, found.size, found.size - int(np.count_nonzero(found)), model))
        return self.dense[self.name].run(self.of.dense_request(inputs, rows), outputs, settings)


def open_split(
    path: str | os.PathLike[str],
    rows_from: Sequence[Sequence[str]] = (),
    *,
    ca: Path | None = None,
    progress: Progress | None = None,
) -> Any:
    """Open a model in two halves; `rows_from` are the URLs of the servers of its rows, of each shard, if not here.

    `ca` has the certificates to trust there, in place of the system's.
    """
    return DenseStore(path, rows_from, ca) if rows_from else SplitStore(path, progress=progress)


class SplitStore(TableStore):
    """A model in two halves, both of them here: tables, and signatures that look them up.

    Without TensorFlow it has its tables alone, and the signatures say why they cannot be asked.

    Raises:
        BadInputError: the halves do not belong together, or one of them cannot be read.
        CorruptFileError: manifest or snapshot are damaged.

    Example:
        ```python
        store = SplitStore("models/7")
        store.model_signatures({})["serving_default"].run({"user_id": ids}, ["click"], Settings())
        ```
    """

    def __init__(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
        model = SplitModel.read(path)
        super().__init__(model.snapshot, progress=progress)
        self.path = model.folder
        self.dialect = "split"
        if self.fingerprint != model.fingerprint or self.export != model.export:
            raise BadInputError(
                f"serving '{self.path}': '{model.snapshot.name}' is not the snapshot that was exported with"
                " the rest of it; copy the folder as a whole"
            )
        for name, table in model.tables.items():
            own = self.tables.get(name)
            if own is None or (own.schema.key_dtype, own.schema.dim) != (table.key_dtype, table.dim):
                raise BadInputError(
                    f"serving '{self.path}': '{model.snapshot.name}' has no table '{name}' of {table.key_dtype} keys"
                    f" and {table.dim} numbers, which the manifest says; export the model again"
                )
        self.fingerprint = _fingerprint(model)
        self._model = model
        self._dense: Mapping[str, Signature] | str
        try:
            check_files(model.dense, model.manifest)
            self._dense = SavedModelStore(model.dense).signatures
        except MissingDependencyError as error:
            self._dense = (
                "the dense part of this model is run by TensorFlow, which is not installed where it is served; its"
                " tables can be looked up"
            )
            _LOG.warning("%s; its tables are served, and nothing else of it", one_line(str(error)))

    def model_signatures(self, recent: Mapping[str, RecentKeys]) -> dict[str, Signature]:
        """Return the signatures of the model, by name; they note in `recent` some of the keys that they look up."""
        # Of tables, and not of the store, which would never go otherwise.
        return _signatures(self._model, self._dense, _rows_of(self.tables, recent))

    def discard(self) -> bool:
        """Return that nothing was made for it."""
        return False


class DenseStore(SavedModelStore):
    """The dense part of a model in two halves; its rows come from other servers, of which `shards` has the URLs.

    `ca` has the certificates to trust there, in place of the system's.

    Raises:
        MissingDependencyError: TensorFlow is not installed.
        BadInputError: a server has another table than the model has.
        kvtools.client.ClientError: the servers do not answer, or one of them has rows of another export, or of another
            shard than the one in whose place it stands.
    """

    def __init__(self, path: str | os.PathLike[str], shards: Sequence[Sequence[str]], ca: Path | None = None) -> None:
        model = SplitModel.read(path)
        check_files(model.dense, model.manifest)
        given: dict[str, Any] = {"shards": shards, "export": model.export, "api_key": os.environ.get(API_KEY)}
        given["ca_file"] = ca
        with _as_option():
            client = Client(**given, hedge=_HEDGE)
            hasty = Client(**given, hedge=_HEDGE, timeout=_AWAY_LIMIT)
            for each in (client, hasty):
                weakref.finalize(self, each.close)
            servers = _RowServers(model, Client(**given, timeout=_WATCH_LIMIT, retries=0))
            weakref.finalize(self, servers.close)
            client.tables()  # with the patience of lookups
            servers.look()
        if servers.away:
            raise UnavailableError(servers.away)
        super().__init__(model.dense)
        self.path = model.folder
        self.fingerprint = _fingerprint(model)
        self.reads = tuple(model.tables)
        self.signatures = _signatures(  # type: ignore[assignment]
            model, self.signatures, _rows_from(client, hasty, servers)
        )
        self._servers = servers
        servers.watch()

    @property
    def away(self) -> str:
        """Why rows cannot be had now, in a sentence; empty if they can."""
        return self._servers.away


class _RowServers:
    """Looks again and again whether the servers of a model's rows have them; `away` says why they do not."""

    def __init__(self, model: SplitModel, client: Client) -> None:
        self.away = ""
        self._model = model
        self._client = client
        self._soon = threading.Event()
        self._ended = False
        self._watched = False

    def look(self) -> None:
        """Ask all of them; raises `BadInputError` or `ClientError` where one has other rows than it should have."""
        listings, away = self._client.check()
        self.away = _in_our_words(away)
        for listing in listings:
            for name, table in self._model.tables.items():
                own = listing.tables.get(name)
                if own is None or (own.key_dtype, own.dim) != (table.key_dtype, table.dim):
                    raise BadInputError(
                        f"serving '{self._model.folder}': the servers of its rows have no table '{name}' of"
                        f" {table.key_dtype} keys and {table.dim} numbers; see --rows-from"
                    )

    def watch(self) -> None:
        """Look from now on, until `close`."""
        self._watched = True
        threading.Thread(target=self._watch, name="kvtools servers of rows", daemon=True).start()

    def look_soon(self) -> None:
        """Look now: a lookup had no answer."""
        self._soon.set()

    def close(self) -> None:
        """Look no more."""
        self._ended = True
        self._soon.set()
        if not self._watched:
            self._client.close()

    def _watch(self) -> None:
        while not self._ended:
            self._soon.wait(_WATCH_EVERY)
            self._soon.clear()
            before = self.away
            try:
                with _as_option():
                    self.look()
            except KvtoolsError as error:
                self.away = str(error)
            except Exception:  # a fault of ours shall not end all looks to come
                _LOG.exception("looking for the rows of '%s' failed", self._model.folder)
            if self._ended:
                break
            if self.away and not before:
                _LOG.warning("the rows of '%s' are elsewhere: %s", self._model.folder, one_line(self.away))
            elif before and not self.away:
                _LOG.info("the rows of '%s' are there again", self._model.folder)
        self._client.close()


@contextlib.contextmanager
def _as_option() -> Iterator[None]:
    """Have errors of the client name options of the command line in place of its own."""
    try:
        yield
    except KvtoolsError as error:
        error.args = (_in_our_words(str(error)), *error.args[1:])
        raise


def _in_our_words(text: str) -> str:
    return text.replace(CA_FILE, CA_OPTION).replace(MORE_TIME, "; see whether it hangs, or has too much to do")


def _fingerprint(model: SplitModel) -> str:
    return hashlib.sha256(f"{model.export} {model.fingerprint}".encode()).hexdigest()


def _signatures(model: SplitModel, dense: Mapping[str, Signature] | str, look_up: LookUp) -> dict[str, Signature]:
    found: dict[str, Signature] = {}
    for name, one in model.signatures.items():
        wanted = [name] if one.ids_signature is None else [name, one.ids_signature]
        if isinstance(dense, str) or all(each in dense for each in wanted):  # those with sparse tensors are left out
            found[name] = WholeSignature(one, dense, look_up)
    return found


def _rows_of(tables: Mapping[str, StoredTable], recent: Mapping[str, RecentKeys]) -> LookUp:
    def look_up(signature: SplitSignature, keys: Sequence[Array], settings: Settings) -> Rows:
        return [_look_up(lookup, own) for lookup, own in zip(signature.lookups, keys, strict=True)]

    def _look_up(lookup: SplitLookup, keys: Array) -> tuple[Array, Array]:
        name = lookup.table.name
        flat = np.require(keys, None, ["C", "A"]).reshape(-1)  # what lies in a message may be at odd addresses
        try:
            values, found = tables[name].lookup(flat)
        except RequestError as error:
            raise of_request(error) from None
        if noted := recent.get(name):
            noted.note(flat)
        return values.reshape(*keys.shape, lookup.table.dim), found.reshape(keys.shape)

    return look_up


def _rows_from(client: Client, hasty: Client, servers: _RowServers) -> LookUp:
    """Return what asks `client` for rows, or `hasty` where it is known that a server does not answer."""

    def look_up(signature: SplitSignature, keys: Sequence[Array], settings: Settings) -> Rows:
        wanted, places = distinct_keys(signature, keys)
        # Every request that waits takes a thread, of which other models have need, too.
        asked = hasty if servers.away else client
        try:
            with _as_option():
                answers = asked.lookup_many(wanted, missing="zeros") if wanted else {}
        except UnavailableError as error:
            servers.look_soon()
            message = f"the rows of this model are elsewhere: {one_line(str(error))}"
            raise ProtocolError("UNAVAILABLE", message, headers={"Retry-After": "1"}) from None
        except (ClientError, KvtoolsError) as error:
            raise ProtocolError("INTERNAL", f"the rows of this model are elsewhere: {one_line(str(error))}") from None
        return rows_of_keys(signature, keys, places, answers)

    return look_up


def _specs(tensors: Sequence[SplitTensor]) -> dict[str, TensorSpec]:
    return {one.name: TensorSpec(_dtype(one.dtype), one.shape) for one in tensors}


def _dtype(name: str) -> np.dtype[Any]:
    return STRING if name == "string" else numpy_dtype(name)
