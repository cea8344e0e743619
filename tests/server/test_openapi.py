"""Requests made from the OpenAPI document: none is a fault of the server, and each answer is as documented.

`model` and `version` are mostly those that are there, as few requests would come far otherwise. A few requests for
each path are made always, and many in the thorough tests.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")
import hypothesis
import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance, unsupported_method

from kvtools.server.app import create_app
from kvtools.server.catalog import static_catalog
from kvtools.server.lookups import Lookups
from kvtools.server.settings import Settings
from kvtools.server.telemetry import Telemetry

SAMPLE = Path(__file__).parent.parent / "data" / "sample"
THERE = {"model": ["default", "ads_emb", "user_emb"], "version": ["1"], "label": ["stable"]}
SIGNATURES = ["ads_emb", "empty_emb", "user_emb"]

catalog, settings = static_catalog(SAMPLE), Settings()
catalog.publish(replace(catalog.model(), labels={"stable": 1}))
app = create_app(catalog, settings, lookups=Lookups(catalog, settings, Telemetry(catalog, settings)))
# What is against the schema may be refused for its size, too: a tensor's shape is looked at before the rest.
REFUSED = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]
config = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}})
schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config)
few = hypothesis.settings(max_examples=5, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
many = hypothesis.settings(few, max_examples=150)
ours = schema.include(path_regex="^/v1/tables")
theirs = schema.include(path_regex="^/(v1/models|v2)")


@ours.parametrize()
@hypothesis.settings(few, max_examples=12)
@pytest.mark.filterwarnings("ignore:Skipped test cases with unsupported payload media types")
def test_lookups_are_as_documented(case: Any) -> None:
    case.call_and_validate()


def ask(case: Any) -> None:
    # What is drawn once more depends on what was drawn, so that a failure can be made again.
    draw = random.Random(repr((case.path_parameters, case.body)))
    for name in case.path_parameters or {}:
        if draw.random() < 0.75:
            case.path_parameters[name] = draw.choice(THERE[name])
    if isinstance(case.body, dict) and isinstance(case.body.get("signature_name"), str) and draw.random() < 0.5:
        case.body["signature_name"] = draw.choice(SIGNATURES)
    but = [positive_data_acceptance]  # what a model can be asked is told by its metadata, not by a schema
    if case.path.startswith("/v1/models"):
        but.append(unsupported_method)  # TensorFlow Serving has 400, "Malformed request"
    case.call_and_validate(excluded_checks=but)


@theirs.parametrize()
@few
def test_the_protocols_of_others_are_as_documented(case: Any) -> None:
    ask(case)


@pytest.mark.thorough
@theirs.parametrize()
@many
def test_many_requests_in_the_protocols_of_others_are_as_documented(case: Any) -> None:
    ask(case)
