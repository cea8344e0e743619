"""What is prepared of a request's head: what it asks for, and which values in it may differ from request to request.

Heads that differ in such values only are of one shape, and are answered by one `PreparedLookup`
(kernels/src/serving/prepared_lookup.h). Here these are made, of who may ask and of what is served in an epoch of the
catalog.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from kvtools._snapshot import Epoch, PreparedLookup, RecentKeys, Table, Tally
from kvtools.lookup_frame import MISSING
from kvtools.server.catalog import Catalog, ServedVersion
from kvtools.server.observer import SEVERAL, Observer, Tallied
from kvtools.server.request import RequestError
from kvtools.server.request_ids import HEADER, MADE
from kvtools.server.settings import Settings

if TYPE_CHECKING:  # what the protocols of others need is imported when the first of their requests comes
    from kvtools.server.signatures import Signature

#: One that makes more numbers is not worth preparing: it lets go of the GIL, and what is prepared is answered with it.
MOST_NUMBERS = 4_095


class What(IntEnum):
    """What is looked up; as in prepared_lookup.h."""

    LOOKUP = 0
    FRAME = 1
    PREDICT = 2
    INFER = 3


class Hole(IntEnum):
    """What may differ at a place; as in head_template.h."""

    KEY = 0
    LENGTH = 1
    JSON_LENGTH = 2
    REQUEST_ID = 3
    TEXT = 4


#: Headers whose values may differ from request to request of one client.
HOLES = {
    "content-length": Hole.LENGTH,
    "inference-header-content-length": Hole.JSON_LENGTH,
    HEADER: Hole.REQUEST_ID,
    "traceparent": Hole.TEXT,
    "tracestate": Hole.TEXT,
}
Holes = Sequence[tuple[int, int, int]]


@dataclass(slots=True)
class Shape:
    """What heads have in common that differ in their holes only."""

    prepared: PreparedLookup | None = None


def shape_of(head: bytes, holes: Holes) -> bytes:
    """Return `head` without what is in its holes, by which shapes are told from each other.

    >>> shape_of(b"length: 17.", [(8, 10, Hole.LENGTH)])
    b'length: \\x01.'
    """
    parts, last = [], 0
    for begin, end, kind in holes:
        parts += [head[last:begin], b"%c" % kind]
        last = end
    return b"".join([*parts, head[last:]])


@dataclass(frozen=True, slots=True)
class Inference:
    """A lookup in a protocol of others, but for its body. `version` and `label` are "" where none is named."""

    kind: Literal["predict", "infer"]
    model: str
    version: str = ""
    label: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def prepare(
    catalog: Catalog, settings: Settings, observer: Observer, asked: Inference, head: bytes, holes: Holes
) -> PreparedLookup | None:
    """Return what answers `asked` as long as it is valid, or None: nothing does."""
    from kvtools.server.protocol_error import ProtocolError

    if settings.missing == "default":  # which is of the table's own type there
        return None
    epoch = catalog.epoch  # before what is looked at in it
    try:
        observer.authorize(asked.headers, ())
        served, own = _found(catalog, asked)
        observer.authorize_model(asked.headers, served.model)
    except (ProtocolError, RequestError):
        return None
    if not served.store.warm:
        return None
    tables = list(_tables(observer, served, own, asked))
    if not tables:
        return None
    about = b""
    if asked.kind == "infer":
        from pydantic_core import to_json

        about = to_json({"model_name": asked.model, "model_version": str(served.number)})[:-1]
    return PreparedLookup(
        epoch,
        What.INFER if asked.kind == "infer" else What.PREDICT,
        head,
        holes,
        tables,
        False,
        False,
        MISSING.index(settings.missing),
        settings.max_keys,
        min(MOST_NUMBERS, settings.max_values),
        served.number,
        MADE,
        None,
        about,
    )


def prepare_frame(
    epoch: Epoch,
    settings: Settings,
    observer: Observer,
    headers: Mapping[str, str],
    version: ServedVersion,
    missing: str,
    head: bytes,
    holes: Holes,
) -> PreparedLookup | None:
    """Return what answers frames for the tables of `version`, of `epoch`, or None: nothing does."""
    several = observer.tally(Tallied("http", "tables", SEVERAL, version.model))
    tables: list[tuple[bytes, Table, Tally, RecentKeys | None]] = []
    for name, stored in version.store.tables.items():
        tally = observer.tally(Tallied("http", "tables", name, version.model))
        if tally is None or stored.table is None:
            continue
        try:
            observer.authorize(headers, (name,))
        except RequestError:
            continue
        tables.append((name.encode(), stored.table, tally, version.recent.get(name)))
    if several is None or not tables:
        return None
    return PreparedLookup(
        epoch,
        What.FRAME,
        head,
        holes,
        tables,
        True,
        True,
        MISSING.index(missing),
        settings.max_keys,
        min(MOST_NUMBERS, settings.max_values),
        version.number,
        MADE,
        several,
    )


def _found(catalog: Catalog, asked: Inference) -> tuple[ServedVersion, str]:
    """Return the version that is asked, and the signature that the model's name stands for ('' for none)."""
    if asked.kind == "infer":
        from kvtools.server.inference_protocol import find_model

        return find_model(catalog, asked.model, asked.version)
    from kvtools.server.protocol_routes import version_number
    from kvtools.server.signatures import served_version

    number = version_number(asked.version or None)
    return served_version(catalog, asked.model, number=number, label=asked.label or None), ""


def _tables(
    observer: Observer, served: ServedVersion, own: str, asked: Inference
) -> Iterator[tuple[bytes, Table, Tally, RecentKeys | None]]:
    """Yield the signatures that may be asked for, by the names that a request may give them."""
    from kvtools.server.signatures import DEFAULT, TableSignature, signatures

    known = signatures(served)
    names: dict[str, Signature] = dict(known)
    if own:
        names = {"": known[own]}
    elif DEFAULT in known:
        names[""] = known[DEFAULT]
    for name, signature in names.items():
        if not isinstance(signature, TableSignature) or signature.table.table is None or signature.dtype != "float32":
            continue
        table = signature.table.schema.name
        try:
            observer.authorize(asked.headers, (table,))
        except RequestError:
            continue
        tally = observer.tally(Tallied("http", asked.kind, table, served.model, served.number, signature.name))
        if tally is not None:
            yield name.encode(), signature.table.table, tally, signature.recent
