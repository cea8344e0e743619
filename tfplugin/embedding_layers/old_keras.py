"""Says once that a Keras 3 is too old for tables."""

from __future__ import annotations

import warnings
from typing import Any

from kvtools.keras_version import UPGRADE, too_old


def warn_of_old_keras(keras: Any, module: str) -> None:
    """Warns where ``keras`` is a Keras 3 that is too old. `module` asks as it is imported."""
    said = too_old(keras.__version__)
    if said and keras.__version__.startswith("3."):
        warnings.warn(f"{module}: {said}: {UPGRADE}", stacklevel=2)
