"""What the tests of tables in models of Keras share."""

from __future__ import annotations

from typing import Any

import pytest
from keras_pairs import KERASES


@pytest.fixture(params=KERASES)
def both_kerases(request: pytest.FixtureRequest) -> Any:
    """Keras 3, then tf_keras."""
    return KERASES[request.param]
