"""Hugging Face folders: what the safetensors library writes and indexes opens here, and the other way about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import round_trip

import kvtools
from kvtools.dialects.dense_tables import is_table_name
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError
from kvtools.migrate import write_tables

library = pytest.importorskip("safetensors.numpy")

Make = Callable[..., Any]
INDEX = "model.safetensors.index.json"
EMBEDDING = np.arange(24, dtype=np.float32).reshape(6, 4)
TENSORS = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.layers.0.mlp.up_proj.weight": EMBEDDING.T.copy(),
    "model.norm.weight": np.ones(4, np.float16),
    "lm_head.weight": EMBEDDING[::-1].copy(),
}


def save(folder: Path) -> Path:
    """Write a model in two files, as `save_pretrained` does."""
    folder.mkdir()
    files = {name: f"model-{1 + n // 2:05d}-of-00002.safetensors" for n, name in enumerate(TENSORS)}
    for file in set(files.values()):
        own = {name: TENSORS[name] for name in TENSORS if files[name] == file}
        library.save_file(own, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(one.nbytes for one in TENSORS.values())}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("which", ["folder", "index"])
def test_a_sharded_model(tmp_path: Path, which: str) -> None:
    folder = save(tmp_path / "model")
    checkpoint = open_checkpoint(folder if which == "folder" else folder / INDEX)
    assert (checkpoint.dialect, list(checkpoint.tables)) == ("huggingface", ["model.embed_tokens.weight"])
    (chunk,) = checkpoint.table("model.embed_tokens.weight").chunks()
    np.testing.assert_array_equal(chunk.keys, np.arange(6))
    np.testing.assert_array_equal(chunk.values, EMBEDDING)
    assert {variable.name: variable.shape for variable in checkpoint.variables} == {
        name: array.shape for name, array in TENSORS.items() if name != "model.embed_tokens.weight"
    }
    (head,) = checkpoint.read_variable("lm_head.weight")
    np.testing.assert_array_equal(head, TENSORS["lm_head.weight"])


def test_a_small_model_without_an_index(tmp_path: Path) -> None:
    library.save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.dialect, list(checkpoint.tables)) == ("huggingface", ["model.embed_tokens.weight"])
    one = open_checkpoint(tmp_path / "model.safetensors")  # the file by itself: the same tables
    assert (one.dialect, list(one.tables), len(one.variables)) == ("safetensors", list(checkpoint.tables), 3)


def test_where_no_name_tells_every_matrix_is_a_table(tmp_path: Path) -> None:
    library.save_file({"a": EMBEDDING, "b": EMBEDDING, "bias": np.ones(3)}, tmp_path / "model.safetensors")
    assert list(open_checkpoint(tmp_path).tables) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "is_table"),
    [
        ("embedding.weight", True),
        ("transformer.wte.weight", True),
        ("shared.weight", True),
        ("bert.embeddings.word_embeddings.weight", True),
        ("sparse_arch.embedding_bag_collection.embedding_bags.t_cat_0.weight", True),
        ("user_emb", True),
        ("tables/user", True),
        ("lm_head.weight", False),
        ("encoder.layer.0.attention.self.query.weight", False),
        ("time_embedding.linear_1.weight", False),
        ("embeddings.LayerNorm.weight", False),
        ("ember.weight", False),
    ],
)
def test_which_names_are_tables(name: str, is_table: bool) -> None:
    assert is_table_name(name) is is_table


def test_every_kind_of_table_comes_back_to_the_byte(tmp_path: Path) -> None:
    tables = [round_trip.table(f"{key}/{value}", 23, 3, key, value) for key, value in round_trip.TYPES[::3]]
    tables += [round_trip.table(name, rows=5) for name in round_trip.NAMES]
    checkpoint = round_trip.write_and_open(tables, tmp_path / "out", "huggingface")
    for table in tables:
        round_trip.check_same(checkpoint.table(table.schema.name), table)


def test_the_library_opens_what_was_written_and_dense_variables_come_along(tmp_path: Path) -> None:
    source = open_checkpoint(save(tmp_path / "model"))
    account = write_tables(source.select([]), tmp_path / "out", "huggingface", beside=source, verify=True)
    assert account.lossless and account.variables == 3
    record = json.loads((tmp_path / "out" / INDEX).read_text())
    assert record["metadata"]["total_size"] == sum(array.nbytes for array in TENSORS.values())
    assert record["weight_map"].keys() == TENSORS.keys()
    for name, file in record["weight_map"].items():
        np.testing.assert_array_equal(library.load_file(tmp_path / "out" / file)[name], TENSORS[name])


def test_keys_that_are_no_row_numbers_stand_beside_the_values(tmp_path: Path, make_table: Make) -> None:
    table = make_table("emb", slots=())
    write_tables([table], tmp_path / "out", "huggingface")
    files = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert files.keys() == {"emb.keys", "emb.values"}
    np.testing.assert_array_equal(library.load_file(tmp_path / "out" / files["emb.keys"])["emb.keys"], table.keys)


def test_a_flipped_byte_is_found(tmp_path: Path, make_table: Make) -> None:
    write_tables([make_table("emb", rows=100)], tmp_path / "out", "huggingface")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptFileError, match="checksum mismatch"):
        list(open_checkpoint(tmp_path / "out").table("emb").chunks())


class TestRefused:
    """Every way in which a folder can fail to be a model."""

    @pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"weight_map": 1}', b'{"weight_map": {"a": 1}}', b"\xff"])
    def test_no_index(self, tmp_path: Path, text: bytes) -> None:
        (save(tmp_path / "model") / INDEX).write_bytes(text)
        with pytest.raises(CorruptFileError, match=INDEX):
            open_checkpoint(tmp_path / "model")

    @pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "", ".", "a/b.safetensors"])
    def test_files_elsewhere(self, tmp_path: Path, file: str) -> None:
        (save(tmp_path / "model") / INDEX).write_text(json.dumps({"weight_map": {"emb": file}}))
        with pytest.raises(CorruptFileError, match="expected a file of the folder itself"):
            open_checkpoint(tmp_path / "model")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        (save(tmp_path / "model") / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(BadInputError, match=r"there is no 'model-00002-of-00002.safetensors'; copy every file"):
            open_checkpoint(tmp_path / "model")

    def test_a_file_without_its_tensor(self, tmp_path: Path) -> None:
        folder = save(tmp_path / "model")
        library.save_file({"other": EMBEDDING}, folder / "model-00001-of-00002.safetensors")
        with pytest.raises(CorruptFileError, match=r"no tensor 'model.embed_tokens.weight'; the files are not of one"):
            open_checkpoint(folder)

    def test_several_files_and_no_index(self, tmp_path: Path) -> None:
        (save(tmp_path / "model") / INDEX).unlink()
        with pytest.raises(BadInputError, match=f"2 safetensors files .* and no '{INDEX}'"):
            open_checkpoint(tmp_path / "model")

    def test_several_indexes(self, tmp_path: Path) -> None:
        folder = save(tmp_path / "model")
        text = (folder / INDEX).read_text()
        (folder / INDEX).unlink()
        for name in ("model.fp16", "other"):
            (folder / f"{name}.safetensors.index.json").write_text(text)
        with pytest.raises(BadInputError, match="2 indexes"):
            open_checkpoint(folder)
        assert list(open_checkpoint(folder / "other.safetensors.index.json").tables) == ["model.embed_tokens.weight"]

    def test_no_matrix(self, tmp_path: Path) -> None:
        library.save_file({"bias": np.ones(3)}, tmp_path / "model.safetensors")
        with pytest.raises(BadInputError, match="none of its 1 tensors can be a table"):
            open_checkpoint(tmp_path)

    def test_two_tensors_of_one_name(self, tmp_path: Path) -> None:
        rows = np.ones((2, 3), np.float32)
        tables = [kvtools.table_from_arrays(name, np.array([5, 7]), rows) for name in ("a\x01", "a\x02")]
        with pytest.raises(KvtoolsError, match=r"two tensors would be called 'a_.keys'"):
            write_tables(tables, tmp_path / "out", "huggingface")

    def test_options_that_contradict(self, tmp_path: Path) -> None:
        with pytest.raises(KvtoolsError, match="--dim 5, it says 4"):
            open_checkpoint(save(tmp_path / "model"), OpenOptions(dim=5))
