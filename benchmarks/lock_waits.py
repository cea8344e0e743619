"""Lookups and steps of many threads on one table: what was measured, the goals, and what a model makes of it."""

from __future__ import annotations

from typing import Any

import lock_model
from engine import lock_benchmark

BESIDE_A_WRITER = 0.9  # of the speed alone


def locks(rounds: int) -> dict[str, Any]:
    """Measure, and let the model say the same; then what it says of wider machines."""
    points = ",".join(f"{readers}+{writers}" for readers, writers in lock_model.VALIDATED)
    measured = lock_benchmark(points, rounds=rounds)
    beside = next(point for point in measured["points"] if (point["readers"], point["writers"]) == (1, 1))
    costs = lock_model.measured_costs(measured, 8, 1)
    validated, predicted = lock_model.validate(measured), lock_model.predict(costs)
    ratio = beside["reads_to_alone"]
    return {
        "measured": measured,
        "model": validated,
        "wider_machines": predicted,
        "page": lock_model.markdown(validated, predicted, costs),
        "ratios": [
            {
                "of": "beside one writer",
                "to": "alone",
                "ratio": ratio,
                "at_least": BESIDE_A_WRITER,
                "reached": ratio >= BESIDE_A_WRITER,
            }
        ],
    }
