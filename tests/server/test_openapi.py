"""Requests made from the OpenAPI document: none is a fault of the server, and each answer is as documented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")
import hypothesis
import schemathesis

from kvtools.server.app import create_app
from kvtools.server.catalog import static_catalog

SAMPLE = Path(__file__).parent.parent / "data" / "sample"


schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(static_catalog(SAMPLE)))
schema = schema.include(path_regex="^/v1/tables")


@schema.parametrize()
@hypothesis.settings(max_examples=12, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@pytest.mark.filterwarnings("ignore:Skipped test cases with unsupported payload media types")
def test_lookups_are_as_documented(case: Any) -> None:
    case.call_and_validate()
