"""State dicts: files that PyTorch, TorchRec and FBGEMM wrote (tests/data/make_torch.py), and hostile ones."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import round_trip
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.dialect import Source
from kvtools.dialects.torch import sniff
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError
from kvtools.inspect import describe
from kvtools.migrate import write_tables

Make = Callable[..., Any]
DATA = Path(__file__).parents[1] / "data" / "torch"
BAGS = "sparse_arch.embedding_bag_collection.embedding_bags"
TABLES = {f"{BAGS}.t_cat_0.weight": (12, 4), f"{BAGS}.t_cat_1.weight": (7, 8), f"{BAGS}.t_cat_2.weight": (10, 16)}


def check_table(table: Any, values: np.ndarray) -> None:
    """Check that a table is a matrix, however it is read."""
    np.testing.assert_array_equal(table.all_keys(), np.arange(len(values)))
    for rows in (1, 3, None):
        np.testing.assert_array_equal(np.concatenate([chunk.values for chunk in table.chunks(rows=rows)]), values)
    some = np.array([len(values) - 1, 0, len(values) // 2])
    np.testing.assert_array_equal(table.take(some).values, values[some])


class TestRead:
    """What others wrote."""

    def test_a_state_dict(self) -> None:
        checkpoint = open_checkpoint(DATA / "state_dict.pt")
        expected = np.load(DATA / "training.npz")
        assert checkpoint.dialect == "torch"
        assert {name: (table.rows, table.dim) for name, table in checkpoint.tables.items()} == TABLES
        for name, table in checkpoint.tables.items():
            check_table(table, expected[f"model.{name}"])
            assert table.schema.checksums == "CRC-32" and "row numbers" in table.schema.notes[0]
        assert [variable.name for variable in checkpoint.variables] == ["over_arch.weight", "over_arch.bias"]
        (bias,) = checkpoint.read_variable("over_arch.bias")
        np.testing.assert_array_equal(bias, expected["model.over_arch.bias"])

    def test_an_optimizers_state_beside_the_model(self) -> None:
        checkpoint = open_checkpoint(DATA / "training.pt")
        expected = np.load(DATA / "training.npz")
        assert list(checkpoint.tables) == [f"model.{name}" for name in TABLES]
        for number, (name, table) in enumerate(checkpoint.tables.items()):
            check_table(table, expected[name])
            assert table.slots == ("exp_avg", "exp_avg_sq")
            for slot, rows in table.to_numpy().slots.items():
                np.testing.assert_array_equal(rows, expected[f"optimizer.state.{number}.{slot}"])
        names = {variable.name for variable in checkpoint.variables}
        assert {"model.over_arch.weight", "optimizer.state.0.step", "optimizer.state.3.exp_avg"} <= names
        assert "optimizer.state.0.exp_avg" not in names

    def test_every_type_and_every_kind_of_view(self) -> None:
        checkpoint = open_checkpoint(DATA / "odd.pt")
        expected = np.load(DATA / "odd.npz")
        for name, table in checkpoint.tables.items():
            if name == "emb.bfloat16":
                np.testing.assert_array_equal(table.to_numpy().values.astype(np.float64), expected["emb.float64"])
            elif name == "emb.empty":
                assert (table.rows, table.dim) == (0, 4)
            else:
                check_table(table, expected[name])
        assert {"emb.rows", "emb.columns", "emb.transposed", "emb.parameter"} < checkpoint.tables.keys()
        for variable in checkpoint.variables:
            if variable.name == "float8":
                assert variable.dtype == "float8_e4m3fn"
                with pytest.raises(BadInputError, match="its type is float8_e4m3fn"):
                    list(checkpoint.read_variable("float8"))
            else:
                (array,) = checkpoint.read_variable(variable.name)
                np.testing.assert_array_equal(array, expected[variable.name])
                assert array.shape == variable.shape == expected[variable.name].shape

    def test_a_file_without_checksums(self) -> None:
        table = open_checkpoint(DATA / "without_checksums.pt").table("emb.weight")
        check_table(table, np.arange(24, dtype=np.float32).reshape(6, 4))
        assert table.schema.checksums is None

    def test_tables_that_fbgemm_keeps_in_one_tensor(self) -> None:
        checkpoint = open_checkpoint(DATA / "fbgemm.pt")
        expected = np.load(DATA / "fbgemm.npz")
        assert list(checkpoint.tables) == ["table_0", "table_1", "table_2"]
        for number, table in enumerate(checkpoint.tables.values()):
            check_table(table, expected[f"{number}.weight"])
            np.testing.assert_array_equal(table.to_numpy().slots["momentum1"], expected[f"{number}.0"])

    @pytest.mark.parametrize("path", ["sharded", "sharded/.metadata", "sharded/__1_0.distcp"])
    def test_tables_sharded_by_rows_and_columns(self, path: str) -> None:
        checkpoint = open_checkpoint(DATA / path)
        expected = np.load(DATA / "sharded.npz")
        assert list(checkpoint.tables) == [f"model.{name}" for name in TABLES]
        for name, table in checkpoint.tables.items():
            check_table(table, expected[name])
            bare = name.removeprefix("model.")
            momentum = expected[f"optimizer.state.{bare}.{bare.split('.')[-2]}.momentum1"]
            slot = table.to_numpy().slots["momentum1"]
            np.testing.assert_array_equal(slot, momentum.reshape(-1, table.rows).T)
        assert slot.shape == (10, 2)  # one number for each row and half of it
        weight = np.concatenate(list(checkpoint.read_variable("model.over_arch.weight")))
        np.testing.assert_array_equal(weight, expected["model.over_arch.weight"])

    def test_several_files_with_an_index(self, tmp_path: Path) -> None:
        shutil.copy(DATA / "state_dict.pt", tmp_path / "pytorch_model-00001-of-00002.bin")
        shutil.copy(DATA / "without_checksums.pt", tmp_path / "pytorch_model-00002-of-00002.bin")
        names = {name: "pytorch_model-00001-of-00002.bin" for name in TABLES}
        names["emb.weight"] = "pytorch_model-00002-of-00002.bin"
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(str({"weight_map": names}).replace("'", '"'))
        assert list(open_checkpoint(tmp_path).tables) == ["emb.weight", *TABLES]
        index.write_text(str({"weight_map": {**names, "gone": names["emb.weight"]}}).replace("'", '"'))
        with pytest.raises(CorruptFileError, match="has no tensor 'gone'"):
            open_checkpoint(tmp_path)
        (tmp_path / names["emb.weight"]).unlink()
        with pytest.raises(BadInputError, match=r"there is no 'pytorch_model-00002-of-00002.bin'"):
            open_checkpoint(tmp_path)

    def test_a_process_elsewhere_opens_a_table_again(self) -> None:
        for path in ("training.pt", "sharded"):
            for table in open_checkpoint(DATA / path).tables.values():
                again = pickle.loads(pickle.dumps(table))
                np.testing.assert_array_equal(again.to_numpy().values, table.to_numpy().values)


class TestWritten:
    """What kvtools writes."""

    def test_every_kind_of_table_comes_back_to_the_byte(self, tmp_path: Path) -> None:
        tables = [round_trip.table(f"{key}/{value}", 23, 3, key, value) for key, value in round_trip.TYPES[::3]]
        tables += [round_trip.table(name, rows=5) for name in round_trip.NAMES]
        checkpoint = round_trip.write_and_open(tables, tmp_path / "out.pt", "torch")
        for table in tables:
            round_trip.check_same(checkpoint.table(table.schema.name), table)

    @pytest.mark.parametrize("source", ["state_dict.pt", "training.pt", "sharded"])
    def test_a_model_keeps_its_names_and_dense_variables(self, tmp_path: Path, source: str) -> None:
        one = open_checkpoint(DATA / source)
        account = write_tables(one.select([]), tmp_path / "out.pt", "torch", beside=one, verify=True)
        assert account.lossless
        two = open_checkpoint(tmp_path / "out.pt")
        assert list(two.tables) == list(one.tables)
        assert {variable.name: variable.shape for variable in two.variables} == {
            variable.name: variable.shape for variable in one.variables
        }
        for variable in one.variables:
            for a, b in zip(one.read_variable(variable.name), two.read_variable(variable.name), strict=True):
                assert a.dtype == b.dtype and np.array_equal(a, b)
        assert set(TABLES) <= {name.removeprefix("model.") for name in tensors_of(tmp_path / "out.pt")}

    def test_two_runs_write_the_same_bytes(self, tmp_path: Path, make_table: Make) -> None:
        for name in ("a", "b"):
            write_tables([make_table("emb", rows=500, parts=3)], tmp_path / f"{name}.pt", "torch")
        assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()

    def test_a_flipped_byte_is_found(self, tmp_path: Path, make_table: Make) -> None:
        table = make_table("emb", rows=100)
        write_tables([table], tmp_path / "a.pt", "torch")
        data = bytearray((tmp_path / "a.pt").read_bytes())
        data[data.index(table.values.tobytes()) + 5] ^= 1
        (tmp_path / "a.pt").write_bytes(data)
        with pytest.raises(CorruptFileError, match="checksum mismatch"):
            list(open_checkpoint(tmp_path / "a.pt").table("emb").chunks())

    def test_a_directory_that_names_another_member_is_refused(self, tmp_path: Path, make_table: Make) -> None:
        write_tables([make_table("emb", rows=10)], tmp_path / "a.pt", "torch")
        data = bytearray((tmp_path / "a.pt").read_bytes())
        data[data.rindex(b"kvtools.json")] ^= 1
        (tmp_path / "a.pt").write_bytes(data)
        with pytest.raises(CorruptFileError, match=r"jvtools\.json' is called .* where it lies; .* damaged"):
            open_checkpoint(tmp_path / "a.pt")

    def test_pytorch_opens_it(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        tables = [round_trip.table(f"{key}/{value}", 23, 3, key, value) for key, value in round_trip.TYPES[::3]]
        write_tables(tables, tmp_path / "out.pt", "torch")
        for mmap in (False, True):
            saved = torch.load(tmp_path / "out.pt", weights_only=True, mmap=mmap)
            for table in tables:
                values = saved[f"{table.schema.name}.values"]
                assert values.view(torch.uint8).numpy().tobytes() == table.to_numpy().values.tobytes()
                assert saved[f"{table.schema.name}.keys"].numpy().tobytes() == table.all_keys().tobytes()


def tensors_of(path: Path) -> dict[str, tuple[Any, ...]]:
    """Read a file with Python's own unpickler, as PyTorch's own would: names and shapes."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return {
                "torch._utils._rebuild_tensor_v2": lambda storage, start, shape, *_: shape,
                "torch._utils._rebuild_tensor_v3": lambda storage, start, shape, *_: shape,
                "collections.OrderedDict": OrderedDict,
            }.get(f"{module}.{name}", f"{module}.{name}")

        def persistent_load(self, pid: Any) -> Any:
            return pid

    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        shapes = Unpickler(io.BytesIO(archive.read("archive/data.pkl"))).load()
    assert isinstance(shapes, dict)
    return shapes


def archive(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None, **members: bytes) -> Path:
    """Write a file as `torch.save` does, around any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", pickled)
        for name, data in {**members, **{f"data/{key}": data for key, data in (storages or {}).items()}}.items():
            file.writestr(f"a/{name}", data)
    return path


def state_dict(shape: Any = (3, 2), stride: Any = (2, 1), start: int = 0, storage: str = "FloatStorage") -> bytes:
    """The pickle of one tensor, "emb", on storage 0."""

    class Named:
        """Something that a pickle names, called with arguments."""

        def __init__(self, name: str, *arguments: Any) -> None:
            self.name = name
            self.arguments = arguments

    def pickled(value: Any) -> bytes:
        if isinstance(value, Named):
            return b"c" + value.name.replace(".", "\n").encode() + b"\n" + pickled(value.arguments) + b"R"
        if isinstance(value, tuple):
            return b"(" + b"".join(map(pickled, value)) + b"t"
        return pickle.dumps(value, 2)[2:-1]

    named = "torch\n" + storage + "\n"
    identity = b"(" + pickled("storage") + b"c" + named.encode() + b"".join(map(pickled, ("0", "cpu", 6))) + b"tQ"
    rest = b"".join(map(pickled, (start, shape, stride, False, None)))
    return b"\x80\x02}" + pickled("emb") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + identity + rest + b"tRs."


SIX = {"0": np.arange(6, dtype=np.float32).tobytes()}


class Harmful:
    """What runs when it is unpickled."""

    def __init__(self, what: Any, *arguments: Any) -> None:
        self.what = what
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return self.what, self.arguments


class TestRefused:
    """Files that are damaged, or mean harm: nothing that they name runs, and each is an error that says what it is."""

    @pytest.mark.parametrize("protocol", range(2, 6))
    @pytest.mark.parametrize(
        ("harm", "name"),
        [
            (Harmful(os.system, "touch harmed"), "posix.system"),
            (Harmful(eval, "open('harmed', 'w')"), "eval"),
            (Harmful(getattr, "text", "upper"), "getattr"),
            (Harmful(print, "x"), "print"),
            (Harmful(Path, "x"), "pathlib"),
        ],
    )
    def test_what_a_pickle_names_is_not_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Any, name: str, protocol: int
    ) -> None:
        monkeypatch.chdir(tmp_path)
        archive(tmp_path / "a.pt", pickle.dumps({"emb": harm}, protocol))
        with pytest.raises(BadInputError, match=rf"it names '[\w.]*{name}.*is not run here"):
            open_checkpoint(tmp_path / "a.pt")
        assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
        folder = shutil.copytree(DATA / "sharded", tmp_path / "sharded")
        (folder / ".metadata").write_bytes(pickle.dumps(harm, protocol))
        with pytest.raises(KvtoolsError):
            open_checkpoint(folder)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "sharded"]

    @pytest.mark.parametrize(
        ("file", "match"),
        [
            ("before_1_6.pt", "layout of PyTorch before 1.6, .* load it with PyTorch and save it again"),
            ("whole_model.pt", "names '__main__.Model', .* save the model's state dict by itself"),
            ("sharded_tensors.pt", "sharded over ranks, .* torch.distributed.checkpoint.save, whose folders are read"),
        ],
    )
    def test_what_pytorch_writes_beside_state_dicts(self, file: str, match: str) -> None:
        assert sniff(Source(str(DATA / file)))
        with pytest.raises(BadInputError, match=match):
            open_checkpoint(DATA / file)

    def test_torchscript(self, tmp_path: Path) -> None:
        archive(tmp_path / "a.pt", state_dict(), SIX, **{"constants.pkl": b"x"})
        with pytest.raises(BadInputError, match="TorchScript program"):
            open_checkpoint(tmp_path / "a.pt")

    def test_the_helper_makes_what_opens(self, tmp_path: Path) -> None:
        archive(tmp_path / "a.pt", state_dict(), SIX)
        check_table(open_checkpoint(tmp_path / "a.pt").table("emb"), np.arange(6, dtype=np.float32).reshape(3, 2))

    @pytest.mark.parametrize(
        ("shape", "stride", "start"),
        [
            ((4, 2), (2, 1), 0),
            ((3, 2), (2, 1), 1),
            ((3, 2), (3, 1), 0),
            ((10**12, 4), (0, 0), 0),
            ((3, 2), (-2, 1), 5),
            ((3, 2), (2,), 0),
            ((-3, -2), (2, 1), 0),
            ((2**40, 2**40), (1, 1), 0),
            ((10**15, 10**15, 10**15), (0, 0, 0), 0),
            ((3, 2), (2, 1), 2**62),
            ((3, "2"), (2, 1), 0),
            (None, (2, 1), 0),
        ],
    )
    def test_a_tensor_that_is_not_inside_its_storage(self, tmp_path: Path, shape: Any, stride: Any, start: int) -> None:
        archive(tmp_path / "a.pt", state_dict(shape, stride, start), SIX)
        with pytest.raises(CorruptFileError):
            open_checkpoint(tmp_path / "a.pt")

    def test_a_storage_that_is_not_there(self, tmp_path: Path) -> None:
        archive(tmp_path / "a.pt", state_dict())
        with pytest.raises(CorruptFileError, match="data/0"):
            open_checkpoint(tmp_path / "a.pt")

    def test_a_byteorder_of_its_own(self, tmp_path: Path) -> None:
        big = {"0": np.arange(6, dtype=">f4").tobytes()}
        archive(tmp_path / "a.pt", state_dict(), big, byteorder=b"big")
        check_table(open_checkpoint(tmp_path / "a.pt").table("emb"), np.arange(6, dtype=np.float32).reshape(3, 2))
        archive(tmp_path / "a.pt", state_dict(), big, byteorder=b"middle")
        with pytest.raises(CorruptFileError, match="byteorder"):
            open_checkpoint(tmp_path / "a.pt")

    def test_a_compressed_archive(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("a/data.pkl", bytes(10_000_000))
        with pytest.raises(BadInputError, match="compressed or encrypted"):
            open_checkpoint(tmp_path / "a.pt")

    @pytest.mark.parametrize(
        "pickled",
        [
            b"",
            b"\x80",
            b"\x80\x02",
            b".",
            b"\x80\x02t.",
            b"\x80\x02(.",
            b"\x80\x02}(u",
            b"\x80\x02Ks.",
            b"\x80\x02]K\x01s.",
            b"\x80\x02j\xff\xff\xff\x7f.",
            b"\x80\x02)\x81.",
            b"\x80\x02X\xff\xff\xff\xff.",
            b"\x80\x02\x8b\xff\xff\xff\x7f.",
            b"\x80\x02" + b")" + b"\x85" * 200_000 + b".",
            b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.",
            b"\x80\x02]r\xff\xff\xff\x7f.",
            b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
            b"\x80\x02ctorch\nSize\n)R.",
            b"\x80\x02ctorch\nfloat32\n)R.",
            b"\x80\x02X\x01\x00\x00\x00aX\x01\x00\x00\x00b\x93.",
            b"I" + b"9" * 100_000 + b"\n.",
        ],
        ids=range(21),
    )
    def test_pickles_that_are_none(self, tmp_path: Path, pickled: bytes) -> None:
        archive(tmp_path / "a.pt", pickled)
        with pytest.raises(KvtoolsError):
            open_checkpoint(tmp_path / "a.pt")

    def test_dicts_in_dicts_are_not_walked_for_ever(self, tmp_path: Path) -> None:
        nested: dict[str, Any] = {}
        cycle = {"a": nested, "b": nested}
        nested["c"] = cycle
        archive(tmp_path / "a.pt", pickle.dumps(cycle, 2))
        with pytest.raises(CorruptFileError, match="nested too deep"):
            open_checkpoint(tmp_path / "a.pt")

    @pytest.mark.parametrize("file", ["state_dict.pt", "odd.pt", "fbgemm.pt"])
    @pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.95, 0.999])
    def test_truncated(self, tmp_path: Path, file: str, keep: float) -> None:
        data = (DATA / file).read_bytes()
        (tmp_path / "a.pt").write_bytes(data[: int(len(data) * keep)])
        with pytest.raises(KvtoolsError, match="the archive is damaged, copy it again" if keep else None):
            open_checkpoint(tmp_path / "a.pt")

    def test_no_matrix(self, tmp_path: Path) -> None:
        archive(tmp_path / "a.pt", pickle.dumps({"epoch": 3}, 2))
        with pytest.raises(BadInputError, match=r"none of its tensors .there are none. can be a table"):
            open_checkpoint(tmp_path / "a.pt")


class TestShardedRefused:
    """A folder of `torch.distributed.checkpoint` that is not whole."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return shutil.copytree(DATA / "sharded", tmp_path / "sharded")

    def test_a_missing_file(self, folder: Path) -> None:
        (folder / "__1_0.distcp").unlink()
        with pytest.raises(BadInputError, match=r"__1_0.distcp': .*copy every file"):
            open_checkpoint(folder)

    def test_a_truncated_file(self, folder: Path) -> None:
        os.truncate(folder / "__1_0.distcp", 3000)
        with pytest.raises(CorruptFileError, match="got 3000 bytes, expected"):
            open_checkpoint(folder)

    def test_a_file_of_another_checkpoint(self, folder: Path) -> None:
        shutil.copy(folder / "__1_0.distcp", folder / "__0_0.distcp")
        checkpoint = open_checkpoint(folder)
        with pytest.raises(KvtoolsError):
            for table in checkpoint.tables.values():
                list(table.chunks())

    @pytest.mark.parametrize("path", [b"../../../x", b"/etc/passwd"])
    def test_a_file_elsewhere(self, folder: Path, path: bytes) -> None:
        data = (folder / ".metadata").read_bytes()
        name = b"\x8c" + struct.pack("<B", 12) + b"__0_0.distcp"
        assert name in data
        changed = data.replace(name, b"\x8c" + struct.pack("<B", len(path)) + path)
        (folder / ".metadata").write_bytes(_without_frames(changed))
        with pytest.raises(CorruptFileError, match="expected a file of the folder itself"):
            open_checkpoint(folder)

    def test_a_shard_that_is_missing(self, folder: Path) -> None:
        data = (folder / ".metadata").read_bytes()
        # The second block of rows begins at row 6 of 12: say that it has 5.
        at = data.index(b"K\x06K\x04\x86")
        (folder / ".metadata").write_bytes(data[:at] + b"K\x05K\x04\x86" + data[at + 5 :])
        with pytest.raises(CorruptFileError, match="shards overlap, or leave a gap"):
            open_checkpoint(folder)


def _without_frames(data: bytes) -> bytes:
    """Take the frames out of a pickle, whose lengths would be wrong."""
    kept = bytearray(data)
    for opcode, _, position in reversed(list(_opcodes(data))):
        if opcode == "FRAME":
            del kept[position : position + 9]
    return bytes(kept)


def _opcodes(data: bytes) -> Any:
    try:
        for opcode, argument, position in pickletools.genops(data):
            yield opcode.name, argument, position
    except ValueError:
        return


def use(path: Path) -> None:
    """Do all that the tools do with a checkpoint; only our own errors may come."""
    try:
        checkpoint = open_checkpoint(path)
        describe(checkpoint)
        for table in checkpoint.tables.values():
            for chunk in table.chunks(rows=3):
                assert chunk.values is not None and len(chunk.keys) == len(chunk.values)
    except KvtoolsError:
        pass


EDITS = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(edits=EDITS, file=st.sampled_from(["state_dict.pt", "training.pt", "odd.pt", "fbgemm.pt"]))
def test_any_byte_damaged(tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], file: str) -> None:
    data = bytearray((DATA / file).read_bytes())
    for position, value in edits:
        data[position % len(data)] = value
    path = tmp_path_factory.mktemp("damaged") / "a.pt"
    path.write_bytes(data)
    use(path)


@settings(deadline=None, max_examples=60)
@given(edits=EDITS)
def test_any_byte_of_a_pickle_damaged(tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    with zipfile.ZipFile(DATA / "odd.pt") as saved:
        pickled = bytearray(saved.read("odd/data.pkl"))
        storages = {name.rpartition("/")[2]: saved.read(name) for name in saved.namelist() if "/data/" in name}
    metadata = bytearray((DATA / "sharded" / ".metadata").read_bytes())
    for position, value in edits:
        pickled[position % len(pickled)] = value
        metadata[position % len(metadata)] = value
    use(archive(folder / "a.pt", bytes(pickled), storages))
    shutil.copytree(DATA / "sharded", folder / "sharded")
    (folder / "sharded" / ".metadata").write_bytes(metadata)
    use(folder / "sharded")
