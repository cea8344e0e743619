"""Which dialect a checkpoint is taken for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtools
from kvtools.dialects.detect import dialect_named, dialects, open_checkpoint, writable_dialects
from kvtools.dialects.dialect import Source
from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError, OutputError, UsageError
from kvtools.migrate import write_tables

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


@pytest.mark.parametrize("dialect", [name for name in writable_dialects() if dialect_named(name).output != "url"])
@pytest.mark.parametrize(
    "options", [{"dim": 9}, {"key_dtype": "int128"}, {"key_dtype": "uint64"}, {"value_dtype": "float16"}], ids=str
)
def test_options_that_contradict_the_files_are_refused(tmp_path: Path, dialect: str, options: dict[str, Any]) -> None:
    table = kvtools.table_from_arrays("emb", np.arange(6), np.ones((6, 4), np.float32))
    path = tmp_path / {"hdf5": "a.h5", "npz": "a.npz", "safetensors": "a.safetensors"}.get(dialect, "a")
    write_tables([table], path, dialect)
    agreeing = OpenOptions(dialect, "int64", "float32", 4)
    assert list(open_checkpoint(path, agreeing).tables) == ["emb"]
    if dialect in ("sok-legacy", "tfra_files") and options in ({"key_dtype": "uint64"}, {"value_dtype": "float16"}):
        return  # these record no types: such numbers would have the same sizes
    with pytest.raises((UsageError, BadInputError)):  # a format without types sees that the sizes do not fit
        open_checkpoint(path, OpenOptions(dialect, **options))
    lenient = OpenOptions(dialect, lenient=True, **options)
    try:
        opened = open_checkpoint(path, lenient)
    except UsageError:
        return
    assert (list(opened.tables), list(opened.broken)) == ([], ["emb"])


@pytest.mark.parametrize("name", ["x" * 300, "x" * 252, "/".join(["y" * 200] * 30)], ids=["name", "index", "path"])
def test_a_name_that_is_too_long_is_told(tmp_path: Path, name: str) -> None:
    table = kvtools.table_from_arrays("t", np.arange(2), np.ones((2, 2), np.float32))
    for dialect in writable_dialects():
        if dialect_named(dialect).output == "url" or (len(name) < 255 and dialect_named(dialect).output != "prefix"):
            continue
        with pytest.raises(OutputError, match=r"^writing '.*': File name too long; name another place$"):
            write_tables([table], tmp_path / name, dialect)
    with pytest.raises(BadInputError, match=r"looking for a checkpoint at|File name too long"):
        open_checkpoint(tmp_path / name)
    assert not list(tmp_path.iterdir())
