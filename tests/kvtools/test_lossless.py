from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from kvtools.dialects.detect import dialect_named
from kvtools.dialects.dialect import Dialect
from kvtools.lossless import Move, describe_dialect, move, moves, said, with_tables


def holding(**changes: Any) -> Dialect:
    """The layout of tfplugin, as if it held something else."""
    dialect = dialect_named("tfplugin")
    return dataclasses.replace(dialect, name="other", holds=dataclasses.replace(dialect.holds, **changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"slots": False}, "all but slots"),
        ({"slot_width_is_dim": True}, "all but slots of another width than the value"),
        ({"freq_dtypes": ()}, "all but frequencies"),
        ({"freq_dtypes": ("int32",)}, "only frequencies that int32 has"),
        ({"freq_dtypes": ("int64",)}, ""),
        ({"version_dtypes": ()}, "all but versions"),
        ({"version_units": ("steps",)}, "all but versions that count seconds, versions of an unknown unit"),
        ({"version_units": None}, ""),
        ({"version_units": ("days", "steps", "unknown")}, "only versions without the time of day"),
        (
            {"extras": frozenset()},
            "all but initial values, filtered keys, filtered freqs, deleted keys, admission filters",
        ),
        ({"extras": None, "metadata": None}, ""),
        (
            {"metadata": frozenset()},
            "all but initial values of slots, admission filters, the initializer, "
            "policies (admission, expiry, padding key, the step of versions)",
        ),
        ({"slot_inits": frozenset()}, "all but initial values of slots"),
        ({"slot_inits": frozenset({"constant"})}, "all but slots that begin as the value"),
        ({"slot_inits": frozenset(), "slots": False}, "all but slots"),
        ({"variables": False}, "all but dense variables"),
        ({"key_dtypes": ("int64",)}, "only uint64 keys that int64 has"),
        ({"value_dtypes": ("float32",)}, "cast first: float64 values, int32 values, int64 values, bool values"),
        ({"many_parts": False, "partition": "mod_1000"}, ""),
        ({"slots": False, "variables": False}, "all but slots, dense variables"),
    ],
    ids=str,
)
def test_what_a_move_leaves_out(changes: dict[str, Any], expected: str) -> None:
    one = move(dialect_named("tfplugin"), holding(**changes))
    assert one.left_out[-1] == "eviction scores"
    one = dataclasses.replace(one, left_out=one.left_out[:-1])
    assert said(one) == (expected or "**everything**")
    assert one.lossless == (expected == "")


def test_every_pair_has_its_move() -> None:
    known = with_tables()
    pairs = [(a, b) for a, b in itertools.product(known, known) if a != b and known[b].write]
    assert [(one.source, one.target) for one in moves()] == pairs
    assert all(isinstance(one, Move) for one in moves())


def test_the_description_is_ready_for_json() -> None:
    record = describe_dialect(dialect_named("tfplugin"))
    of_parts = ["admission_filter_<part>", "deleted_keys", "eviction_scores_<part>"]
    extras = [*of_parts, "filtered_freqs", "filtered_keys", "initial_values"]
    assert record["writes"] and record["holds"]["extras"] == extras
    assert "tensorflow" not in with_tables()
