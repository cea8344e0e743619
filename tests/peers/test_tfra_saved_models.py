"""SavedModels of TFRA exported without TFRA: its demos' models and all its lookups, with the answers that it gives.

`tests/peers/tfra/saved_models.py` trains, saves and asks them in TFRA's environment.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.dialects.detect import open_checkpoint
from kvtools.export_model import ModelExport, export_model
from kvtools.stock_model.stock_ops import foreign_nodes

pytestmark = pytest.mark.thorough

#: The demo that each is built as, and the tables that its export has.
MODELS = {
    "keras_train": ("movielens-1m-keras, as it is trained", {"user_embedding-parameter", "movie_embedding-parameter"}),
    "keras_export": ("movielens-1m-keras, as it is served", {"user_embedding-parameter", "movie_embedding-parameter"}),
    "field_wise": ("amazon-video-games-keras-eager", {"fields-parameter"}),
    "horovod": ("movielens-1m-keras-with-horovod", {"dense_channel-parameter", "sparse_channel-parameter"}),
    "estimator": ("movielens-100k-estimator", {"user_dynamic_embeddings", "moive_dynamic_embeddings"}),
    "shadows": ("all lookups in functions", {"users", "items", "policy", "wide", "half"}),
    "graph": ("all lookups in a graph", {"users", "items", "policy", "wide", "half"}),
}

Answers = Mapping[str, list[Mapping[str, np.ndarray]]]


@pytest.fixture(scope="module")
def models(tfra: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model that TFRA saved: `model`, and what it was asked."""
    folder = tmp_path_factory.mktemp("saved-by-tfra")
    tfra("saved_models.py", folder)
    return folder


@pytest.fixture(scope="module")
def exports(models: Path) -> dict[str, ModelExport]:
    return {
        name: export_model(open_checkpoint(str(models / name / "model")), models / name / "export") for name in MODELS
    }


@pytest.fixture(scope="module")
def asked(models: Path) -> dict[str, list[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]]]:
    return {name: pickle.loads((models / name / "asked.pickle").read_bytes()) for name in MODELS}


@pytest.fixture(scope="module")
def answers(ask: Callable[..., Answers], exports: Any, asked: Any, models: Path) -> tuple[Answers, Answers]:
    """What stock TensorFlow 2.16 and the TensorFlow of this process answer."""
    requests = {str(models / name / "export"): [(one, fed) for one, fed, _ in asked[name]] for name in MODELS}
    return ask(requests, "2.16"), ask(requests, "this")


@pytest.mark.parametrize("name", MODELS)
def test_exports_answer_as_tfra(
    name: str, exports: Any, asked: Any, answers: tuple[Answers, Answers], models: Path
) -> None:
    path = models / name / "export"
    assert {table.name for table in exports[name].tables} == MODELS[name][1]
    steps = ["1 dense variable, 8 bytes: nothing that is served uses it"] if name == "estimator" else []
    assert exports[name].left_out == steps and exports[name].warnings == []
    assert not list(foreign_nodes((path / "saved_model.pb").read_bytes()))
    older, here = (found[str(path)] for found in answers)
    assert sum(len(next(iter(fed.values()))) for _, fed, _ in asked[name]) >= 10_000
    for (_, _, expected), old, new in zip(asked[name], older, here, strict=True):
        assert expected.keys() == old.keys() == new.keys()
        for output, values in expected.items():
            # TFRA runs in this TensorFlow 2.16: to the bit. Another one has other kernels of dense layers.
            assert (values.dtype, values.shape, values.tobytes()) == (
                old[output].dtype,
                old[output].shape,
                old[output].tobytes(),
            ), output
            np.testing.assert_allclose(new[output], values, rtol=1e-5, atol=1e-6, err_msg=output)


def test_the_requests_hit_and_miss(asked: Any) -> None:
    """Of a lookup that tells: some keys are there, and some are not."""
    there = np.concatenate([answers["there"] for name, _, answers in asked["shadows"] if name == "plain"])
    assert 0.5 < there.mean() < 0.9
