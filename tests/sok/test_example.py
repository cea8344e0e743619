"""examples/sok_two_ranks.py: what 2 ranks saved, 3 ranks and one continue, as a run that was never cut would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import launch_on_ranks

pytest.importorskip("horovod", reason="Horovod is not installed: run `make setup-horovod`")
pytestmark = pytest.mark.thorough

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sok_two_ranks.py"


def _run(ranks: int, *arguments: str) -> tuple[float, float]:
    """The last loss and the AUC that the example prints on rank 0."""
    done = launch_on_ranks(ranks, EXAMPLE, "--batch", "600", *arguments)
    assert done.returncode == 0, done.stdout
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: " in done.stdout
    losses = re.findall(r"loss ([\d.]+)", done.stdout)
    return float(losses[-1]), float(re.findall(r"held-out AUC ([\d.]+)", done.stdout)[0])


def test_other_numbers_of_ranks_continue_what_two_saved(tmp_path: Path) -> None:
    _run(2, "--steps", "10", "--save", str(tmp_path))
    uncut = _run(1, "--steps", "15")
    for ranks in (1, 3):
        assert _run(ranks, "--steps", "5", "--restore", str(tmp_path)) == pytest.approx(uncut, abs=3e-4)
