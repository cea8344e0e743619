"""Increments of TFPlus and DeepRec, written by hand from the published layouts, put into their full checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.chain import ChainError
from kvtools.chain_fold import apply_increments
from kvtools.cli.main import main
from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, KvtoolsError
from kvtools.export import export_saved_model
from kvtools.migrate import write_tables
from kvtools.server.store import TableStore
from kvtools.verify import verify

from .test_deeprec import increment as deeprec_increment
from .test_deeprec import variable as deeprec_full
from .test_tfplus import DAY
from .test_tfplus import variable as tfplus

Save = Callable[..., Path]


def values_of(table: TableReader) -> dict[int, float]:
    """The first number of each row."""
    found: dict[int, float] = {}
    for chunk in table.chunks(ALL_COLUMNS):
        assert chunk.values is not None
        found.update(zip(chunk.keys.tolist(), chunk.values[:, 0].tolist(), strict=True))
    return found


def day(*freqs: int) -> np.ndarray[Any, Any]:
    return np.array([DAY << 16 | freq for freq in freqs], np.uint32)


def save_tfplus(save: Save, folder: Path) -> list[Path]:
    full = tfplus("emb", [1, 2, 3, 4, 5], freqs=day(1, 1, 1, 1, 1), increment=False, blacklist=[6, 7])
    full |= tfplus("emb/GroupAdam", [1, 2, 3, 4, 5], freqs=day(1, 1, 1, 1, 1), increment=False)
    # 2 changed, 6 is off the blacklist again, 3 went, 4 is banned
    first = tfplus("emb", [2, 6], freqs=day(8, 3), factor=10.0, increment=True, deleted=[3], blacklist=[4])
    first |= tfplus("emb/GroupAdam", [2, 6], freqs=day(8, 3), factor=10.0, increment=True, deleted=[3])
    # 3 came again, 7 went from the blacklist by being deleted
    second = tfplus("emb", [3], freqs=day(1), factor=100.0, increment=True, deleted=[7, 5])
    second |= tfplus("emb/GroupAdam", [3], freqs=day(1), factor=100.0, increment=True)
    bias = [{"bias": np.float32([number])} for number in (0, 1, 2)]
    return [
        save(folder / name, tensors | beside)
        for name, tensors, beside in zip(
            ("model.ckpt-100", "model.ckpt-110", "model.ckpt-120"), (full, first, second), bias, strict=True
        )
    ]


def test_deltas_of_tfplus_with_deleted_and_banned_keys(save_plain: Save, tmp_path: Path) -> None:
    base, *deltas = save_tfplus(save_plain, tmp_path)
    account, (merged,) = apply_increments(base, deltas, tmp_path / "out")
    assert account.lossless and account.dialect == "tfplus" and merged.rows == 4
    checkpoint = open_checkpoint(tmp_path / "out")
    table = checkpoint.table("emb")
    assert values_of(table) == {1: 1, 2: 20, 3: 300, 6: 60}
    assert table.extra("blacklist").tolist() == [4]
    assert "increment" not in table.schema.metadata and "deleted_keys" not in [e.name for e in table.schema.extras]
    (chunk,) = table.chunks(ALL_COLUMNS)
    freqs = dict(zip(chunk.keys.tolist(), chunk.freqs.tolist(), strict=True))  # type: ignore[union-attr]
    assert freqs == {1: 1, 2: 8, 3: 1, 6: 3}
    assert chunk.slots["GroupAdam"][chunk.keys == 2][0, 0] == 20
    (bias,) = checkpoint.read_variable("bias")
    assert bias.tolist() == [2]
    assert not [finding for finding in verify(str(tmp_path / "out")).findings if finding.severity == "error"]


def test_merge_takes_a_base_and_its_deltas_so(save_plain: Save, tmp_path: Path) -> None:
    paths = [str(path) for path in save_tfplus(save_plain, tmp_path)]
    assert main(["merge", *paths, str(tmp_path / "out")]) == 0
    assert values_of(open_checkpoint(tmp_path / "out").table("emb")) == {1: 1, 2: 20, 3: 300, 6: 60}


def test_increments_merged_without_a_base_are_an_increment(save_plain: Save, tmp_path: Path) -> None:
    base, first, second = save_tfplus(save_plain, tmp_path)
    both = tmp_path / "both-120"
    assert main(["merge", str(first), str(second), str(both)]) == 0
    table = open_checkpoint(both, OpenOptions(increments=True)).table("emb")
    assert table.schema.metadata["increment"] and sorted(table.extra("deleted_keys").tolist()) == [3, 5, 7]
    apply_increments(base, [both], tmp_path / "out")
    assert values_of(open_checkpoint(tmp_path / "out").table("emb")) == {1: 1, 2: 20, 3: 300, 6: 60}


def test_increments_of_deeprec_that_change_rows_of_one_dense_variable(
    save_plain: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for number, more in enumerate(({}, {"w-sparse_incr_keys": np.array([3])}, {"w-sparse_incr_keys": np.array([0])})):
        rows = {"w-sparse_incr_values": np.float32([[70, 71]])} if more else {}
        name = f"incr.ckpt-{110 + number}"
        paths.append(str(save_plain(tmp_path / name, {**deeprec_increment("emb/part_0", [4]), **more, **rows})))
    assert main(["merge", *paths, str(tmp_path / "out")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "both are increments with changed rows of the dense variable 'w'" in said and not list(tmp_path.glob("out*"))
    assert main(["merge", *paths[:2], str(tmp_path / "out")]) == 0


def test_disorder_and_what_is_no_increment_are_refused(save_plain: Save, tmp_path: Path) -> None:
    base, first, second = save_tfplus(save_plain, tmp_path)
    with pytest.raises(ChainError, match="disorder: it is of step 110, and 120 came before it"):
        apply_increments(base, [second, first], tmp_path / "out")
    with pytest.raises(BadInputError, match="is no increment but whole"):
        apply_increments(base, [base], tmp_path / "out")
    with pytest.raises(BadInputError, match="is an increment itself"):
        apply_increments(first, [second], tmp_path / "out")
    other = save_plain(tmp_path / "other-130", tfplus("user", [1], freqs=day(1), increment=True))
    with pytest.raises(BadInputError, match="table 'user', which the checkpoint has not"):
        apply_increments(base, [other], tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_increments_are_neither_exported_nor_served(save_plain: Save, tmp_path: Path) -> None:
    _, first, _ = save_tfplus(save_plain, tmp_path)
    with pytest.raises(BadInputError, match=r"exporting .*table 'emb' is an increment.*kvtools apply"):
        export_saved_model(open_checkpoint(first), tmp_path / "model")
    with pytest.raises(BadInputError, match=r"serving .*table 'emb' is an increment.*kvtools apply"):
        TableStore(first, cache=tmp_path / "cache")
    assert main(["inspect", str(first)]) == 0
    assert main(["migrate", str(first), str(tmp_path / "moved"), "--to", "tfra", "--strict"]) == 3
    options = WriteOptions(dry_run=True)
    account = write_tables(open_checkpoint(first).select([]), tmp_path / "moved", "tfra", options=options)
    assert any("that it is an increment" in loss for loss in account.tables[0].losses)


def test_increments_of_deeprec_and_the_changed_rows_of_dense_variables(save_plain: Save, tmp_path: Path) -> None:
    full = deeprec_full("emb/part_0", [2, 4, 6], filtered=[8, 10]) | deeprec_full("emb/part_0/Adam", [2, 4, 6])
    full |= deeprec_full("emb/part_1", [1001, 3]) | deeprec_full("emb/part_1/Adam", [1001, 3])
    full |= {"w": np.arange(8, dtype=np.float32).reshape(4, 2), "global_step": np.array(100), "bias": np.float32([1])}
    first = deeprec_increment("emb/part_0", [4, 8]) | deeprec_increment("emb/part_0/Adam", [4, 8])
    first |= deeprec_increment("emb/part_1", []) | deeprec_increment("emb/part_1/Adam", [])
    for name in ("emb/part_0", "emb/part_0/Adam"):
        first[f"{name}-sparse_incr_values"] = first[f"{name}-sparse_incr_values"] + 1000
    first |= {"w-sparse_incr_keys": np.array([3, 0]), "w-sparse_incr_values": np.float32([[70, 71], [10, 11]])}
    first |= {"global_step": np.array(110)}
    base = save_plain(tmp_path / "model.ckpt-100", full)
    incr = save_plain(tmp_path / "incr.ckpt-110", first)
    account, _ = apply_increments(base, [incr], tmp_path / "out")
    assert account.losses == (
        "rows that training removed since the full checkpoint: DeepRec's increments do not say which, they stay",
    )
    checkpoint = open_checkpoint(tmp_path / "out")
    table = checkpoint.table("emb")
    assert (checkpoint.dialect, table.parts, "increment" in table.schema.metadata) == ("deeprec", 2, False)
    assert values_of(table) == {2: 2, 4: 1004, 6: 6, 8: 1008, 1001: 1001 % 97, 3: 3}
    assert table.extra("filtered_keys").tolist() == [10]  # 8 has a row by now
    assert {variable.name for variable in checkpoint.variables} == {"w", "global_step", "bias"}
    assert np.concatenate(list(checkpoint.read_variable("w"))).tolist() == [[10, 11], [2, 3], [4, 5], [70, 71]]
    assert [int(step) for step in checkpoint.read_variable("global_step")] == [110]
    assert not [finding for finding in verify(str(tmp_path / "out")).findings if finding.severity == "error"]


def test_an_increment_of_dense_rows_of_another_model_is_refused(save_plain: Save, tmp_path: Path) -> None:
    base = save_plain(tmp_path / "model.ckpt-1", deeprec_full("emb", [2]) | {"w": np.zeros((2, 2), np.float32)})
    rows = {"w-sparse_incr_keys": np.array([5]), "w-sparse_incr_values": np.zeros((1, 2), np.float32)}
    incr = save_plain(tmp_path / "incr.ckpt-2", deeprec_increment("emb", [2]) | rows)
    with pytest.raises(KvtoolsError, match="do not fit it"):
        apply_increments(base, [incr], tmp_path / "out")
    other = {"v-sparse_incr_keys": np.array([0]), "v-sparse_incr_values": np.zeros((1, 2), np.float32)}
    incr = save_plain(tmp_path / "incr.ckpt-3", deeprec_increment("emb", [2]) | other)
    with pytest.raises(BadInputError, match="dense variable 'v', which it has not"):
        apply_increments(base, [incr], tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
