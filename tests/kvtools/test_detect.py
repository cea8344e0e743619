"""Which dialect a checkpoint is taken for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtools.dialects.detect import dialects, open_checkpoint
from kvtools.dialects.dialect import Source

DATA = Path(__file__).parents[1] / "data"
SAMPLES = {
    "sample": "tfplugin",
    "tfplus": "tfplus",
    "deeprec": "deeprec",
    "tfra/v1_adam": "tfra",
    "tfra/object": "tfra",
    "sok": "sok",
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_checkpoint_is_of_one_dialect_only(sample: str) -> None:
    source = Source(str(DATA / sample))
    taking = {name for name, dialect in dialects().items() if dialect.sniff(source)}
    assert taking - {"tensorflow"} == {SAMPLES[sample]}
    assert open_checkpoint(DATA / sample).dialect == SAMPLES[sample]
