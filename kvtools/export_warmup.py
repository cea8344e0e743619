"""The requests that an exported model brings along for servers to warm up by; see `kvtools.warmup`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvtools.check_model import answers_of
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.savedmodel import MANIFEST
from kvtools.model_requests import IdSource, KnownIds, Request, sampled_keys, serving_graph, signature_inputs
from kvtools.remote.stored import read_bytes
from kvtools.tensorflow_error import reason
from kvtools.warmup import WARMUP_FILE, Refusal, RequestFile, check_count, random_requests, write_requests


class Warmup:
    """Requests for servers to warm up by: a number of random ones, or those of a file.

    Args:
        wanted: how many random requests to make of each signature, with keys that the export has; or the file, of which
            the form is looked at here.

    Attributes:
        requests: how many were written.
        notes: what there is to say of them.

    Raises:
        UsageError: there can be no such number of requests.
        BadInputError: the file is not there, or of no form that is known.

    Example:
        ```python
        warmup = Warmup(10)
        export_model(checkpoint, Path("models/1"), warmup=warmup)
        print(warmup.requests)
        ```
    """

    def __init__(self, wanted: int | Path) -> None:
        if isinstance(wanted, int):
            check_count(wanted)
        self._wanted = wanted if isinstance(wanted, int) else RequestFile(wanted)
        self.requests = 0
        self.notes: list[str] = []

    def given(self, folder: Path) -> list[tuple[str, Request]]:
        """Return the requests of the file, each with its signature of an exported model; none without a file."""
        if isinstance(self._wanted, int):
            return []
        signatures = signature_inputs(serving_graph(folder))
        return [(request.signature, request.inputs) for request in self._wanted.requests(signatures)]

    def add(self, folder: Path, *, ask: bool = False) -> None:
        """Write the requests into an exported model.

        Args:
            folder: the model's.
            ask: have TensorFlow run the model, and write no request that it refuses.

        Raises:
            BadInputError: a request of the file fits no signature, or is refused.
        """
        signatures = signature_inputs(serving_graph(folder))
        refusal = _refusal(folder) if ask else None
        if isinstance(self._wanted, int):
            export = open_checkpoint(folder)
            source = _ids(folder, export, np.random.default_rng(0))
            records, self.notes = random_requests(signatures, self._wanted, source, refusal)
        else:
            records = self._wanted.records(signatures, refusal)
        write_requests(folder / WARMUP_FILE, records)
        self.requests = len(records)


def _ids(folder: Path, export: Checkpoint, random: np.random.Generator) -> Callable[[str], IdSource]:
    """Ids for the inputs of each signature: keys of its table, where it is one's, otherwise of all."""
    manifest = json.loads(read_bytes(folder / MANIFEST))
    tables = {entry["signature"]: entry["name"] for entry in manifest["tables"] if entry.get("signature")}
    known: dict[str, IdSource] = {}

    def of(signature: str) -> IdSource:
        name = tables.get(signature, "")
        if name not in known:
            readers = [export.tables[name]] if name else [*export.tables.values()]
            known[name] = KnownIds(sampled_keys(readers), random)
        return known[name]

    return of


def _refusal(folder: Path) -> Refusal:
    answers = answers_of(folder)

    def refusal(signature: str, request: Request) -> str:
        try:
            answers(signature)(request)
        except Exception as error:  # of whatever operation
            return reason(error)[:300]
        return ""

    return refusal
