"""Checkpoints exchanged with TFRA 0.8.1 itself, both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError
from kvtools.migrate import write_tables
from kvtools.partition import owners

pytestmark = pytest.mark.thorough

Run = Callable[..., None]


@dataclass(frozen=True)
class Written:
    """What TFRA wrote, and what it says is in it."""

    folder: Path
    expected: dict[str, np.ndarray]

    @property
    def rule(self) -> str:
        """By which rule this TFRA looks for int64 keys: it depends on how its TensorFlow was built."""
        return "low_31_bits" if self.expected["cuda"] else "floor_mod"

    def tables(self, case: str) -> dict[str, dict[str, dict[int, bytes]]]:
        """The rows of a case by table, column and key."""
        found: dict[str, dict[str, dict[int, bytes]]] = {}
        for name, keys in self.expected.items():
            if name.startswith(f"{case}|") and name.endswith("|keys"):
                _, table, column, _ = name.split("|")
                found.setdefault(table, {})[column] = by_key(keys, self.expected[name.replace("|keys", "|values")])
        return found


def by_key(keys: np.ndarray, values: np.ndarray) -> dict[int, bytes]:
    assert len(set(keys.tolist())) == len(keys)
    return {int(key): row.tobytes() for key, row in zip(keys, values, strict=True)}


def columns_of(table: TableReader) -> dict[str, dict[int, bytes]]:
    found: dict[str, dict[int, bytes]] = {"values": {}}
    for chunk in table.chunks(ALL_COLUMNS):
        assert chunk.values is not None
        columns = {"values": chunk.values, **{f"slot:{name}": slot for name, slot in chunk.slots.items()}}
        columns |= {name: column for name in ("freqs", "versions") if (column := getattr(chunk, name)) is not None}
        for name, column in columns.items():
            found.setdefault(name, {}).update(by_key(chunk.keys, column))
    return found


@pytest.fixture(scope="session")
def written(tfra: Run, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written-by-tfra")
    tfra("write.py", folder)
    with np.load(folder / "expected.npz") as file:
        return Written(folder, dict(file))


def test_a_checkpoint_of_the_v1_saver_is_read_exactly(written: Written) -> None:
    checkpoint = open_checkpoint(written.folder / "name_based")
    expected = written.tables("name_based")
    assert sorted(checkpoint.tables) == sorted(expected)
    for name, columns in expected.items():
        read = columns_of(checkpoint.table(name))
        assert read.keys() == columns.keys()
        assert read["values"] == columns["values"]
        for column in columns.keys() - {"values"}:
            # Where the slot's own table has no such key, its row is zeros.
            assert {key: row for key, row in read[column].items() if key in columns[column]} == columns[column]
            assert not any(b"".join(row for key, row in read[column].items() if key not in columns[column]))
    assert checkpoint.table("deep/a_emb").schema.partition == written.rule
    assert checkpoint.table("b/emb").schema.partition == "floor_mod"
    rows = len(expected["deep/a_emb"]["values"])
    told = {finding.message.split(" keys")[0] for finding in checkpoint.table("deep/a_emb").check()}
    assert told == {f"{what} has no row for 1 of {rows}" for what in ("slot MyAdam.m", "slot MyAdam.v", "freqs")}
    dense = next(checkpoint.read_variable("dense"))
    np.testing.assert_array_equal(dense, written.expected["name_based|dense"])


def test_all_types_and_an_empty_table_are_read_exactly(written: Written) -> None:
    checkpoint = open_checkpoint(written.folder / "types")
    expected = written.tables("types")
    assert sorted(checkpoint.tables) == sorted([*expected, "strings"])
    for name, columns in expected.items():
        assert columns_of(checkpoint.table(name)) == columns
        if "_" in name:
            assert f"{checkpoint.table(name).schema.key_dtype}_{checkpoint.table(name).schema.value_dtype}" == name
    empty = checkpoint.table("empty").schema
    assert (empty.dim, empty.part_rows) == (5, (0, 0))
    with pytest.raises(BadInputError, match="hash the strings"):
        list(checkpoint.table("strings").chunks())


@pytest.mark.parametrize("case", ["keras", "legacy", "saved_model"])
def test_object_based_checkpoints_and_saved_models_are_read_exactly(case: str, written: Written) -> None:
    checkpoint = open_checkpoint(written.folder / case)
    expected = written.tables(case)
    assert checkpoint.dialect == "tfra" and sorted(checkpoint.tables) == sorted(expected)
    for name, columns in expected.items():
        assert columns_of(checkpoint.table(name)) == columns


@pytest.mark.parametrize(
    ("case", "parts", "options"),
    [
        ("beside", 2, OpenOptions()),
        ("direct", 2, OpenOptions(key_dtype="int64", value_dtype="float32", dim=4)),
        ("ranks", 4, OpenOptions()),
        ("half", 1, OpenOptions(value_dtype="float16")),
    ],
)
def test_folders_of_table_files_are_read_exactly(case: str, parts: int, options: OpenOptions, written: Written) -> None:
    checkpoint = open_checkpoint(written.folder / case, options)
    expected = written.tables(case)
    assert checkpoint.dialect == "tfra_files" and sorted(checkpoint.tables) == sorted(expected)
    for name, columns in expected.items():
        assert columns_of(checkpoint.table(name)) == columns
        assert checkpoint.table(name).parts == parts
    assert [variable.shape for variable in checkpoint.variables] == ([(2,)] if case == "beside" else [])


def test_files_of_string_keys_are_refused(written: Written) -> None:
    with pytest.raises(BadInputError, match="its keys are strings"):
        open_checkpoint(written.folder / "strings")


def ours(save_plain: Any, make_sample: Any, table_tensors: Any, path: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """A checkpoint of tfplugin with two variables under Adam."""
    samples = {name: make_sample(name, rows=200, seed=seed) for seed, name in enumerate(("ads/emb", "users/emb"))}
    saved: dict[str, Any] = {"beta1_power": np.array([0.9], np.float32), "beta2_power": np.array([0.999], np.float32)}
    for sample in samples.values():
        sample.freqs //= 2  # TFRA counts in int32
        sample.versions = None
        saved |= table_tensors(sample, 2)
    path = save_plain(path, {k: v.reshape(()) if "power" in k else v for k, v in saved.items()})
    return open_checkpoint(path), samples


@pytest.fixture(scope="session")
def keys_to_look_up() -> np.ndarray:
    return np.array([-(2**63), 2**63 - 1, 0, -1, -7, 1, 3, 424242], np.int64)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_v1_saver_restores_what_was_written_for_it_and_trains_on(
    parts: int,
    written: Written,
    tfra: Run,
    keys_to_look_up: np.ndarray,
    tmp_path: Path,
    save_plain: Any,
    make_sample: Any,
    table_tensors: Any,
) -> None:
    source, samples = ours(save_plain, make_sample, table_tensors, tmp_path / "source")
    options = WriteOptions(partition=written.rule)
    account = write_tables(
        source.select([]), tmp_path / "model.ckpt", "tfra", beside=source, parts=parts, options=options
    )
    assert any("initializer" in loss for loss in account.tables[0].losses)
    np.save(tmp_path / "keys.npy", keys_to_look_up)
    tfra("load_name_based.py", tmp_path / "model.ckpt", parts, tmp_path / "keys.npy", tmp_path / "out.npz")
    loaded = np.load(tmp_path / "out.npz")
    for name, sample in samples.items():
        scope = name.split("/")[0]
        columns = {"values": sample.values, "m": sample.slots["Adam.m"], "v": sample.slots["Adam.v"]}
        if scope == "ads":
            columns["freqs"] = sample.freqs.astype(np.int32)[:, None]
        for column, array in columns.items():
            read = by_key(loaded[f"{scope}|{column}|keys"], loaded[f"{scope}|{column}|values"])
            assert read == by_key(sample.keys, array)
        rows = sample.rows()
        np.testing.assert_array_equal(loaded[f"{scope}|exists"], [True] * 7 + [False])
        np.testing.assert_array_equal(loaded[f"{scope}|looked_up"][:7], [rows[int(k)] for k in keys_to_look_up[:7]])
        # One step of Adam with a gradient of one, from the slots that were restored.
        at = {int(key): i for i, key in enumerate(sample.keys)}
        m, v = (sample.slots[slot][[at[int(k)] for k in keys_to_look_up[:7]]] for slot in ("Adam.m", "Adam.v"))
        with np.errstate(invalid="ignore"):
            step = 0.1 * np.sqrt(1 - 0.999) / (1 - 0.9)
            after = loaded[f"{scope}|looked_up"][:7] - step * (0.9 * m + 0.1) / (np.sqrt(0.999 * v + 0.001) + 1e-8)
        np.testing.assert_allclose(loaded[f"{scope}|trained"][:7], after, rtol=2e-3)
        assert loaded[f"{scope}|size"] == 201


def test_tfra_loads_folders_and_object_based_checkpoints_that_were_written_for_it(
    written: Written,
    tfra: Run,
    keys_to_look_up: np.ndarray,
    tmp_path: Path,
    save_plain: Any,
    make_sample: Any,
    table_tensors: Any,
) -> None:
    source, samples = ours(save_plain, make_sample, table_tensors, tmp_path / "source")
    options = WriteOptions(partition=written.rule)
    account = write_tables(source.select([]), tmp_path / "files", "tfra_files", beside=source, parts=2, options=options)
    assert not account.lossless and "dense variables" in account.losses[0]
    # An object-based checkpoint of TFRA's stays one, with another number of parts than its object graph knew.
    legacy = open_checkpoint(written.folder / "legacy")
    write_tables(legacy.select([]), tmp_path / "object", "tfra", beside=legacy, parts=4, options=options)
    np.save(tmp_path / "keys.npy", keys_to_look_up)
    tfra("load_files.py", tmp_path / "files", tmp_path / "object", tmp_path / "keys.npy", tmp_path / "out.npz")
    loaded = np.load(tmp_path / "out.npz")
    ads = samples["ads/emb"]
    expected = {"slot": ads.slots["Adam.m"], **dict.fromkeys(("same", "devices_1", "devices_3"), ads.values)}
    for case, array in expected.items():
        assert by_key(loaded[f"{case}|keys"], loaded[f"{case}|values"]) == by_key(ads.keys, array)
        assert loaded[f"{case}|exists"].tolist() == [True] * 7 + [False]
    restored = by_key(loaded["object|keys"], loaded["object|values"])
    assert restored == written.tables("legacy")["legacy/emb"]["values"]
    known = [int(key) in restored for key in keys_to_look_up]
    assert loaded["object|exists"].tolist() == known and sum(known) == 7


def test_what_tfra_wrote_and_kvtools_rewrote_is_the_same(written: Written, tmp_path: Path) -> None:
    source = open_checkpoint(written.folder / "name_based")
    write_tables(source.select([]), tmp_path / "again", "tfra", beside=source)
    again = open_checkpoint(tmp_path / "again")
    assert sorted(again.tables) == sorted(source.tables)
    assert [variable.name for variable in again.variables] == [variable.name for variable in source.variables]
    for name, table in source.tables.items():
        assert columns_of(again.table(name)) == columns_of(table)
        assert again.table(name).schema.part_rows == table.schema.part_rows
        assert again.table(name).schema.metadata == table.schema.metadata
        for chunk in again.table(name).chunks():
            owner = owners(chunk.keys, table.parts, table.schema.partition or "floor_mod")
            assert (owner == chunk.part).all()


def test_bfloat16_is_read_as_such(written: Written) -> None:
    table = open_checkpoint(written.folder / "types").table("int32_bfloat16")
    assert next(iter(table.chunks())).values.dtype == ml_dtypes.bfloat16  # type: ignore[union-attr]
