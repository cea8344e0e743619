from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvtools.dialects.bundle import Bundle, BundleWriter
from kvtools.errors import BadInputError, CorruptFileError

Save = Callable[..., Path]
ALL_DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def equal(got: np.ndarray, expected: np.ndarray) -> bool:
    return got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("slices", [1, 7])
def test_reads_what_tensorflow_saved(save: Save, tmp_path: Path, shards: int, slices: int) -> None:
    rng = np.random.default_rng(1)
    arrays = {f"t/{name}": (rng.normal(size=(29, 3)) * 50).astype(dtype_of(name)) for name in ALL_DTYPES}
    arrays["one_dimension"] = np.arange(40)
    arrays["three_dimensions"] = rng.normal(size=(11, 2, 5))
    bundle = Bundle(save(tmp_path / "a", {**arrays, "text": "héllo"}, shards=shards, slices=slices))
    rows = rng.integers(0, 11, 20)
    for name, array in arrays.items():
        tensor = bundle.tensor(name)
        assert equal(tensor.read(), array)
        assert equal(np.concatenate(list(tensor.chunks(4))), array)
        assert equal(tensor.read(3, 9), array[3:9])
        assert equal(tensor.take(rows), array[rows])
        assert equal(tensor.take(np.empty(0, np.int64)), array[:0])
        assert bundle.nbytes(name) == array.nbytes
    assert bundle.strings("text") == ["héllo".encode()]


def test_strings(save: Save, tf: Any, tmp_path: Path) -> None:
    texts = [b"", b"a", b"\xff\x00", b"x" * 1000]
    bundle = Bundle(
        save(tmp_path / "a", {"t": np.array(texts, object).reshape(2, 2), "none": tf.zeros([0], tf.string)})
    )
    assert bundle.strings("t") == texts
    assert bundle.strings("none") == []


def test_scalars_and_empty_tensors(save: Save, tmp_path: Path) -> None:
    bundle = Bundle(save(tmp_path / "a", {"s": np.float32(3), "e": np.zeros((0, 5)), "w": np.zeros((4, 0))}))
    assert bundle.tensor("s").read().item() == 3
    assert bundle.tensor("e").read().shape == (0, 5)
    assert bundle.tensor("w").take(np.array([1, 2])).shape == (2, 0)
    assert list(bundle.tensor("e").chunks(10)) == []


def test_tensorflow_reads_what_we_write(tf: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    arrays = {f"t/{name}": (rng.normal(size=(29, 3)) * 50).astype(dtype_of(name)) for name in ALL_DTYPES}
    arrays |= {f"many/{number}": np.arange(number % 5) for number in range(500)}
    with BundleWriter(tmp_path / "a") as writer:
        for name, array in arrays.items():
            writer.begin(name, array.dtype, array.shape[1:])
            for start in range(0, len(array), 10):
                writer.append(array[start : start + 10])
            writer.end()
        writer.string("text", b"x" * 300)
    reader = tf.train.load_checkpoint(str(tmp_path / "a"))
    for name, array in arrays.items():
        assert equal(np.asarray(reader.get_tensor(name)), array)
    assert reader.get_tensor("text") == b"x" * 300


def test_big_endian(tmp_path: Path) -> None:
    """Nobody writes these on today's machines: our own file, its bytes and its header turned round."""
    from kvtools.dialects.bundle.index_table import read_table, table_bytes
    from kvtools.dialects.bundle.records import BundleHeader, encode_header

    values = np.array([[1.5, -2.0]], np.float32)
    with BundleWriter(tmp_path / "a") as writer:
        writer.begin("v", np.dtype(np.float32), (2,))
        writer.append(values.byteswap())
        writer.end()
    records = {**read_table(tmp_path / "a.index"), b"": encode_header(BundleHeader(big_endian=True))}
    (tmp_path / "a.index").write_bytes(table_bytes(sorted(records.items())))
    tensor = Bundle(tmp_path / "a").tensor("v")
    assert equal(tensor.read(), values)
    assert equal(tensor.take(np.array([0])), values)


def test_appending_another_type_or_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected float32 rows"), BundleWriter(tmp_path / "a") as writer:
        writer.begin("v", np.dtype(np.float32), (2,))
        writer.append(np.zeros((1, 3), np.float32))
    assert not (tmp_path / "a.index").exists()


class TestDamage:
    """On the checkpoint kept in the repository, so without TensorFlow."""

    @pytest.fixture
    def prefix(self, sample_path: Path) -> Path:
        return sample_path / "model.ckpt-7"

    @pytest.fixture
    def data(self, prefix: Path) -> Path:
        return Path(f"{prefix}.data-00000-of-00001")

    def test_truncated_data_file(self, prefix: Path, data: Path) -> None:
        data.write_bytes(data.read_bytes()[:-1])
        with pytest.raises(CorruptFileError, match=r"data-00000-of-00001' is truncated: got 2298 .* at least 2299"):
            Bundle(prefix)

    def test_missing_data_file(self, prefix: Path, data: Path) -> None:
        data.unlink()
        with pytest.raises(BadInputError, match=r"data-00000-of-00001' is missing"):
            Bundle(prefix)

    def test_longer_data_file_is_accepted(self, prefix: Path, data: Path) -> None:
        data.write_bytes(data.read_bytes() + bytes(8))
        Bundle(prefix)

    def test_flipped_bit_in_rows(self, prefix: Path, data: Path) -> None:
        tensor = Bundle(prefix).tensor("dense/kernel")
        damaged = bytearray(data.read_bytes())
        damaged[tensor.segments[0].offset] ^= 1
        data.write_bytes(bytes(damaged))
        tensor = Bundle(prefix).tensor("dense/kernel")
        list(tensor.chunks(1, verify=False))
        with pytest.raises(CorruptFileError, match=r"'dense/kernel' from .*data-00000-of-00001': checksum mismatch"):
            list(tensor.chunks(1))

    def test_flipped_bit_anywhere_in_a_string(self, prefix: Path, data: Path) -> None:
        bundle = Bundle(prefix)
        entry = bundle.entries["user_emb-kvmeta"]
        whole = data.read_bytes()
        for offset in range(entry.offset, entry.offset + entry.size):
            damaged = bytearray(whole)
            damaged[offset] ^= 4
            data.write_bytes(bytes(damaged))
            with pytest.raises(CorruptFileError, match=r"data-00000-of-00001'"):
                Bundle(prefix).strings("user_emb-kvmeta")

    def test_slices_with_a_hole(self, tf: Any, tmp_path: Path) -> None:
        tf.raw_ops.SaveV2(
            prefix=str(tmp_path / "a"),
            tensor_names=["v"] * 2,
            shape_and_slices=["10 2 0,3:-", "10 2 5,5:-"],
            tensors=[tf.zeros([3, 2]), tf.zeros([5, 2])],
        )
        with pytest.raises(CorruptFileError, match="leave out or repeat rows between 3 and 5"):
            Bundle(tmp_path / "a").tensor("v")

    def test_slices_across_columns(self, tf: Any, tmp_path: Path) -> None:
        tf.raw_ops.SaveV2(
            prefix=str(tmp_path / "a"),
            tensor_names=["v"] * 2,
            shape_and_slices=["4 4 -:0,2", "4 4 -:2,2"],
            tensors=[tf.zeros([4, 2])] * 2,
        )
        bundle = Bundle(tmp_path / "a")
        assert bundle.nbytes("v") == 64
        with pytest.raises(BadInputError, match="slices of whole rows"):
            bundle.tensor("v")

    def test_unknown_tensor_and_wrong_kind(self, prefix: Path) -> None:
        bundle = Bundle(prefix)
        with pytest.raises(BadInputError, match="no such tensor"):
            bundle.tensor("nope")
        with pytest.raises(BadInputError, match="got type string, expected numbers"):
            bundle.tensor("user_emb-kvmeta")
        with pytest.raises(BadInputError, match="got type int32, expected string"):
            bundle.strings("user_emb-keys")
