"""Which dialect a checkpoint is taken for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtools.dialects.detect import dialects, open_checkpoint
from kvtools.dialects.dialect import Source

DATA = Path(__file__).parents[1] / "data"
SAMPLES = {"sample": "tfplugin", "tfplus": "tfplus", "deeprec": "deeprec"}


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_bundle_is_of_one_dialect_only(sample: str) -> None:
    source = Source(str(DATA / sample))
    taking = {name for name, dialect in dialects().items() if dialect.sniff(source)}
    assert taking == {SAMPLES[sample], "tensorflow"}
    assert open_checkpoint(DATA / sample).dialect == SAMPLES[sample]
