"""The states of a model's versions, as TensorFlow Serving's ModelService tells them."""

from __future__ import annotations

from kvtools.server.catalog import Catalog, UnknownModelError, VersionStatus
from kvtools.server.protocol_error import ProtocolError, invalid


def model_statuses(
    catalog: Catalog, model: str, *, number: int | None = None, label: str | None = None
) -> list[VersionStatus]:
    """Return the state of one version (`number`, or that of `label`) or of all; raises a `ProtocolError`."""
    try:
        statuses = catalog.status(model)
        labels = catalog.labels(model)
    except UnknownModelError:
        statuses, labels = [], {}
    if label is not None and label not in labels:
        raise invalid(f"Unrecognized servable version label: {label}")
    if label is not None:
        number = labels[label]
    if number is not None:
        statuses = [status for status in statuses if status.number == number]
        if not statuses:
            raise ProtocolError("NOT_FOUND", f"Could not find version {number} of model {model}")
    if not statuses:
        raise ProtocolError("NOT_FOUND", f"Could not find any versions of model {model}")
    return statuses
