"""What the tests of tables in models of Keras share."""

from __future__ import annotations

from typing import Any

import pytest
import tf_keras
from keras_pairs import KERASES

import tfplugin


@pytest.fixture(params=KERASES)
def both_kerases(request: pytest.FixtureRequest) -> Any:
    """Keras 3, then tf_keras."""
    return KERASES[request.param]


@pytest.fixture
def layers(both_kerases: Any) -> Any:
    """Our layers for that Keras."""
    return tfplugin.tf_keras if both_kerases is tf_keras else tfplugin.keras
