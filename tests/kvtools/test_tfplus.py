"""The dialect of TFPlus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtools
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError, CheckFailedError, CorruptFileError
from kvtools.migrate import write_tables
from kvtools.partition import owners

Make = Callable[..., Any]
Save = Callable[..., Path]

SAMPLE = Path(__file__).parents[1] / "data" / "tfplus"
SLOT_LOST = "initial values of slot GroupAdam: no more than one number is kept of them"
DAY = 20_500
SIX = {"keys", "values", "init_table", "blacklist", "freq_keys", "freq_values"}
EIGHT = SIX | {"need_full_import", "delete_keys"}


def variable(
    name: str,
    keys: list[int] | np.ndarray,
    *,
    dim: int = 4,
    factor: float = 1.0,
    freq_keys: list[int] | None = None,
    freqs: np.ndarray | None = None,
    blacklist: list[int] | None = None,
    initial: np.ndarray | None = None,
    increment: bool | None = None,
    deleted: list[int] | None = None,
    key_dtype: str = "int64",
) -> dict[str, np.ndarray]:
    """The tensors of one variable; the frequency of a key is its lowest byte, unless `freqs` says otherwise."""
    keys = np.array(keys, key_dtype)
    counted = np.array(keys if freq_keys is None else freq_keys, key_dtype)
    tensors = {
        "keys": keys,
        "values": rows_of(keys, dim, factor),
        "init_table": np.zeros((0, dim), np.float32) if initial is None else initial,
        "blacklist": np.array(blacklist or [], key_dtype),
        "freq_keys": counted,
        "freq_values": (counted & 255).astype(np.uint16) if freqs is None else freqs,
    }
    if increment is not None:
        tensors["need_full_import"] = np.array([not increment])
        tensors["delete_keys"] = np.array(deleted or [], key_dtype)
    return {f"{name}:0-{suffix}": array for suffix, array in tensors.items()}


def rows_of(keys: np.ndarray, dim: int = 4, factor: float = 1.0) -> np.ndarray:
    return (factor * (keys.astype(np.float64) % 97)[:, None] + np.arange(dim)).astype(np.float32)


def only_table(path: Path, **options: Any) -> TableReader:
    checkpoint = open_checkpoint(path, OpenOptions(**options))
    assert checkpoint.dialect == "tfplus"
    (table,) = checkpoint.tables.values()
    return table


def by_key(table: TableReader, column: Callable[[Any], np.ndarray]) -> dict[int, bytes]:
    return {
        int(key): row.tobytes()
        for chunk in table.chunks(ALL_COLUMNS, rows=7)
        for key, row in zip(chunk.keys, column(chunk), strict=True)
    }


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    bundle = Bundle(path)
    return {name: bundle.tensor(name).read() for name in bundle.entries}


def test_sample_in_the_published_layout() -> None:
    expected = np.load(SAMPLE / "expected.npz")
    keys = expected["keys"].tolist()
    table = only_table(SAMPLE)
    schema = table.schema
    assert (schema.name, schema.part_rows, schema.dim) == ("test/kv_embedding", (208, 184, 208), 8)
    assert [(slot.name, slot.width, slot.dtype) for slot in schema.slots] == [("GroupAdam", 24, "float32")]
    assert (schema.freq_dtype, schema.version_dtype, schema.partition) == ("uint16", None, "floor_mod")
    for name, column in {
        "values": lambda chunk: chunk.values,
        "slot": lambda chunk: chunk.slots["GroupAdam"],
        "freq": lambda chunk: chunk.freqs,
    }.items():
        assert by_key(table, column) == {key: row.tobytes() for key, row in zip(keys, expected[name], strict=True)}
    for chunk in table.chunks():
        np.testing.assert_array_equal(owners(chunk.keys, 3, "floor_mod"), chunk.part)
    initial = table.extra("initial_values")
    np.testing.assert_array_equal(
        initial, tensors_of(SAMPLE / "model.ckpt-1200")["test/kv_embedding/part_0:0-init_table"]
    )
    assert [variable.name for variable in open_checkpoint(SAMPLE).variables] == ["dense/kernel", "global_step"]
    assert list(table.check()) == []


def test_sample_written_again_has_the_same_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(SAMPLE)
    account = write_tables(list(checkpoint.tables.values()), tmp_path / "out", "tfplus", beside=checkpoint)
    assert account.losses == () and account.tables[0].losses == (SLOT_LOST,)
    before, after = tensors_of(SAMPLE / "model.ckpt-1200"), tensors_of(tmp_path / "out")
    assert set(before) == set(after)
    for name, tensor in before.items():
        if name.endswith("GroupAdam:0-init_table"):
            continue  # of a slot, no more than one number is kept
        assert tensor.dtype == after[name].dtype
        np.testing.assert_array_equal(tensor, after[name], err_msg=name)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_initial_values_of_each_part_are_kept_or_said_to_be_lost(tmp_path: Path, parts: int) -> None:
    checkpoint = open_checkpoint(SAMPLE)
    before = tensors_of(SAMPLE / "model.ckpt-1200")
    drawn = [before[f"test/kv_embedding/part_{part}:0-init_table"] for part in range(3)]
    assert len({rows.tobytes() for rows in drawn}) == 3
    account = write_tables(checkpoint.select([]), tmp_path / "out", "tfplus", parts=parts)
    after = tensors_of(tmp_path / "out")
    lost = "initial values of parts 1, 2: new rows of all parts start from those of one"
    kept = parts > 2  # a fourth part is new: it gets those of the first
    assert account.tables[0].losses == ((SLOT_LOST,) if kept else (lost, SLOT_LOST))
    for part in range(parts):
        expected = drawn[part] if kept and part < 3 else drawn[0]
        np.testing.assert_array_equal(after[f"test/kv_embedding/part_{part}:0-init_table"], expected)
    moved = write_tables(checkpoint.select([]), tmp_path / "moved", "tfplugin")
    assert lost in moved.tables[0].losses and not moved.lossless
    for part in range(3):
        written = Bundle(tmp_path / "moved").tensor(f"test/kv_embedding/part_{part}-init").read()
        np.testing.assert_array_equal(written, drawn[0])


@pytest.mark.parametrize("to", ["tfplus", "tfplugin", "npz", "hdf5", "sok"])
def test_initial_values_of_a_slot_that_are_not_one_number_are_said_to_be_lost(tmp_path: Path, to: str) -> None:
    source = open_checkpoint(SAMPLE).table("test/kv_embedding")
    suffix = {"npz": ".npz", "hdf5": ".h5"}.get(to, "")
    account = write_tables([source], tmp_path / f"out{suffix}", to)
    # A dialect whose slots are all as wide as the value leaves the slot out as a whole, or has none.
    whole = any(loss.startswith(("slot GroupAdam:", "optimizer slots GroupAdam:")) for loss in account.tables[0].losses)
    assert (SLOT_LOST in account.tables[0].losses) != whole
    with pytest.raises(CheckFailedError, match="slot"):
        write_tables([source], tmp_path / f"strict{suffix}", to, strict=True)


@pytest.mark.parametrize(("second", "number"), [(0.5, 0.5), (0.25, None)])
def test_initial_values_of_a_slot_are_one_number_if_they_are_in_all_parts(
    save_plain: Save, tmp_path: Path, second: float, number: float | None
) -> None:
    tensors = tensors_of(SAMPLE / "model.ckpt-1200")
    for part, value in enumerate((0.5, second, 0.5)):
        name = f"test/kv_embedding/part_{part}/GroupAdam:0-init_table"
        tensors[name] = np.full((5 + part, 24), value, np.float32)
    table = only_table(save_plain(tmp_path / "a", tensors))
    begins = {"init": "rows"} if number is None else {"init": "constant", "constant": number}
    assert table.schema.metadata["slots"] == {"GroupAdam": {"name": "GroupAdam", **begins}}
    account = write_tables([table], tmp_path / "b", "tfplus")
    assert account.tables[0].losses == ((SLOT_LOST,) if number is None else ())
    again = tensors_of(tmp_path / "b")
    for part in range(3):
        kept = again[f"test/kv_embedding/part_{part}/GroupAdam:0-init_table"]
        assert kept.tolist() == ([] if number is None else [[number] * 24])


def test_parts_whose_initial_values_are_the_same_have_one_array(tmp_path: Path) -> None:
    source = open_checkpoint(SAMPLE).table("test/kv_embedding")
    write_tables([source], tmp_path / "a", "tfplugin")
    write_tables(kvtools.open(tmp_path / "a").select([]), tmp_path / "b", "tfplus")
    again = open_checkpoint(tmp_path / "b").table("test/kv_embedding")
    assert [extra.name for extra in again.schema.extras] == ["initial_values"]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16", "float64"])
def test_dtypes_and_parts(
    make_table: Make, same_rows: Make, tmp_path: Path, parts: int, key_dtype: str, value_dtype: str
) -> None:
    table = make_table(
        key_dtype=key_dtype, value_dtype=value_dtype, slots=("GroupAdam",), slot_width=12, freq_dtype="uint16"
    )
    write_tables([table], tmp_path / "out", "tfplus", parts=parts)
    for memory in (1 << 20, 1):
        same_rows(only_table(tmp_path / "out", memory=memory), table, rows=7, any_order=True)


KEYS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9), unique=True, max_size=40)


@settings(max_examples=40, deadline=None)
@given(KEYS, st.integers(1, 7), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    make_table: Make,
    same_rows: Make,
    keys: list[int],
    parts: int,
    freqs: bool,
    days: bool,
    slots: bool,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("round")
    table = make_table(
        own_keys=np.array(keys, np.int64),
        rows=len(keys),
        slots=("Adam", "Adam_1") if slots else (),
        freq_dtype="uint16" if freqs or days else None,
        version_dtype="uint16" if days else None,
        version_unit="days",
        seed=seed,
    )
    account = write_tables([table], folder / "out", "tfplus", parts=parts)
    assert account.lossless
    got = only_table(folder / "out")
    assert got.schema.parts == parts
    assert list(got.check()) == []
    if keys:
        same_rows(got, table, any_order=True)
    assert got.schema.rows == len(keys)


def test_tensors_that_a_restore_asks_for(make_table: Make, tmp_path: Path) -> None:
    table = make_table(slots=("GroupAdam",), slot_width=12, freq_dtype="uint16")
    write_tables([table], tmp_path / "plain", "tfplus", parts=2)
    tensors = tensors_of(tmp_path / "plain")
    names = [f"scope/emb/part_{part}{slot}" for part in range(2) for slot in ("", "/GroupAdam")]
    assert set(tensors) == {f"{name}:0-{suffix}" for name in names for suffix in SIX}
    for name in names:
        width = 12 if name.endswith("GroupAdam") else 4
        assert tensors[f"{name}:0-init_table"].shape == (0, width)
        assert tensors[f"{name}:0-freq_values"].dtype == np.uint16
        assert tensors[f"{name}:0-blacklist"].dtype == np.int64
        np.testing.assert_array_equal(tensors[f"{name}:0-keys"], tensors[f"{name}:0-freq_keys"])
        np.testing.assert_array_equal(
            tensors[f"{name}:0-keys"], tensors[f"{name.removesuffix('/GroupAdam')}:0-keys"], "slots have the same order"
        )


def test_days_come_with_the_tensors_of_delta_export(make_table: Make, tmp_path: Path) -> None:
    table = make_table(slots=(), freq_dtype="uint16", version_dtype="uint16", version_unit="days")
    write_tables([table], tmp_path / "out", "tfplus")
    tensors = tensors_of(tmp_path / "out")
    assert set(tensors) == {f"scope/emb:0-{suffix}" for suffix in EIGHT}
    counts = tensors["scope/emb:0-freq_values"]
    assert counts.dtype == np.uint32
    np.testing.assert_array_equal(counts & 0xFFFF, table.freqs)
    np.testing.assert_array_equal(counts >> 16, table.versions)
    assert tensors["scope/emb:0-need_full_import"].tolist() == [True]


def test_seconds_become_days_and_rows_without_frequency_count_one(make_table: Make, tmp_path: Path) -> None:
    table = make_table(slots=(), version_dtype="uint32", version_unit="seconds")
    account = write_tables([table], tmp_path / "out", "tfplus")
    assert "days" in account.tables[0].losses[0]
    got = only_table(tmp_path / "out")
    assert got.schema.version_unit == "days"
    (chunk,) = got.chunks()
    np.testing.assert_array_equal(chunk.versions, table.versions // 86_400)
    np.testing.assert_array_equal(chunk.freqs, 1)


def test_table_without_counters_reads_as_one(make_table: Make, tmp_path: Path) -> None:
    write_tables([make_table(slots=())], tmp_path / "out", "tfplus", parts=3)
    tensors = tensors_of(tmp_path / "out")
    assert set(tensors) == {f"scope/emb/part_{part}:0-{suffix}" for part in range(3) for suffix in SIX}
    assert only_table(tmp_path / "out").schema.freq_dtype is None


@pytest.mark.parametrize("parts", [1, 3])
def test_tensorflow_reads_what_was_written(tf: Any, make_table: Make, tmp_path: Path, parts: int) -> None:
    table = make_table(slots=("Adam",), freq_dtype="uint16", extras={"blacklist": np.array([5, 6, -7])})
    write_tables([table], tmp_path / "out", "tfplus", parts=parts)
    reader = tf.train.load_checkpoint(str(tmp_path / "out"))
    ours = tensors_of(tmp_path / "out")
    shapes = reader.get_variable_to_shape_map()
    assert set(shapes) == set(ours)
    for name, array in ours.items():
        np.testing.assert_array_equal(reader.get_tensor(name), array)


def test_frequencies_of_more_keys_in_another_order(save_plain: Save, tmp_path: Path) -> None:
    keys = np.random.default_rng(0).permutation(np.arange(-500, 500))
    counted = np.random.default_rng(1).permutation(np.arange(-900, 900)).tolist()
    path = save_plain(tmp_path / "a", variable("emb", keys, freq_keys=counted))
    for memory in (1 << 20, 20_000):
        table = only_table(path, memory=memory)
        got = np.concatenate([chunk.freqs for chunk in table.chunks(rows=64)])
        np.testing.assert_array_equal(got, (keys & 255).astype(np.uint16))
    (finding,) = table.check()
    assert (finding.severity, finding.check) == ("info", "slot-keys")
    assert "freqs has 800 rows" in finding.message


def test_days_in_the_upper_half_of_frequencies(save_plain: Save, tmp_path: Path) -> None:
    counts = np.array([DAY << 16 | 65535, 3, DAY + 1 << 16], np.uint32)
    path = save_plain(tmp_path / "a", variable("emb", [2**63 - 1, -(2**63), -1], freqs=counts, increment=False))
    table = only_table(path)
    assert (table.schema.version_dtype, table.schema.version_unit) == ("uint16", "days")
    (chunk,) = table.chunks()
    assert chunk.freqs.tolist() == [65535, 3, 0]
    assert chunk.versions.tolist() == [DAY, 0, DAY + 1]
    taken = table.take(np.array([2, 0]), ALL_COLUMNS)
    assert (taken.freqs.tolist(), taken.versions.tolist()) == ([0, 65535], [DAY + 1, DAY])


def test_increment_with_deleted_keys_goes_to_the_parts_that_own_them(save_plain: Save, tmp_path: Path) -> None:
    freqs = {part: np.array([DAY << 16 | 7], np.uint32) for part in range(2)}
    tensors = variable("emb/part_0", [4], freqs=freqs[0], increment=True, deleted=[8, -2])
    tensors |= variable("emb/part_1", [-1], freqs=freqs[1], increment=True, deleted=[9], blacklist=[3])
    table = only_table(save_plain(tmp_path / "a", tensors))
    assert table.schema.metadata == {"increment": True}
    assert any("increment" in note for note in table.schema.notes)
    assert table.extra("deleted_keys").tolist() == [8, -2, 9]
    assert table.extra("blacklist").tolist() == [3]
    account = write_tables([table], tmp_path / "out", "tfplus", parts=3)
    assert account.lossless
    after = tensors_of(tmp_path / "out")
    assert [after[f"emb/part_{part}:0-delete_keys"].tolist() for part in range(3)] == [[9], [-2], [8]]
    assert [after[f"emb/part_{part}:0-blacklist"].tolist() for part in range(3)] == [[3], [], []]
    assert all(after[f"emb/part_{part}:0-need_full_import"].tolist() == [False] for part in range(3))
    assert after["emb/part_2:0-freq_values"].dtype == np.uint32


def test_saved_for_inference_only(save_plain: Save, tmp_path: Path) -> None:
    tensors = {n: a for n, a in variable("emb", [1, 2]).items() if n.split("-")[1] in ("keys", "values", "init_table")}
    table = only_table(save_plain(tmp_path / "a", tensors))
    assert (table.schema.freq_dtype, table.schema.extras, table.schema.rows) == (None, (), 2)


def test_part_names_of_one_part_are_kept(save_plain: Save, tmp_path: Path) -> None:
    table = only_table(save_plain(tmp_path / "a", variable("emb/part_0", [1, 2])))
    assert table.schema.name == "emb"
    write_tables([table], tmp_path / "out", "tfplus")
    assert "emb/part_0:0-keys" in tensors_of(tmp_path / "out")


def test_initial_number_of_a_slot_is_kept(save_plain: Save, tmp_path: Path) -> None:
    tensors = variable("emb", [1, 2]) | variable("emb/Adagrad", [1, 2], initial=np.full((5, 4), 0.1, np.float32))
    table = only_table(save_plain(tmp_path / "a", tensors))
    slots = {"Adagrad": {"name": "Adagrad", "init": "constant", "constant": float(np.float32(0.1))}}
    assert table.schema.metadata["slots"] == slots
    write_tables([table], tmp_path / "ours", "tfplugin")
    ours = open_checkpoint(tmp_path / "ours").table("emb")
    assert ours.schema.metadata["slots"]["Adagrad"]["constant"] == slots["Adagrad"]["constant"]
    write_tables([ours], tmp_path / "back", "tfplus")
    np.testing.assert_array_equal(
        tensors_of(tmp_path / "back")["emb/Adagrad:0-init_table"], np.full((1, 4), 0.1, np.float32)
    )


def test_slots_and_tables_without_parts_are_told_apart(save_plain: Save, tmp_path: Path) -> None:
    tensors = variable("user", [1, 2, 3]) | variable("user/Adam", [1, 2], dim=8) | variable("user/emb", [4, 5])
    tensors |= (
        variable("user/emb/Adam_1", [4]) | variable("user/city", [4, 5], dim=3) | variable("user/Other", [1], dim=3)
    )
    checkpoint = open_checkpoint(save_plain(tmp_path / "a", tensors))
    assert {name: table.slots for name, table in checkpoint.tables.items()} == {
        "user": ("Adam",),
        "user/Other": (),
        "user/city": (),
        "user/emb": ("Adam_1",),
    }


def test_slot_rows_of_other_keys_are_zeros_and_findings(save_plain: Save, tmp_path: Path) -> None:
    tensors = variable("emb/part_0", [2, 4, 6]) | variable("emb/part_0/Adam", [6, 2, 8], factor=2)
    table = only_table(save_plain(tmp_path / "a", tensors))
    (chunk,) = table.chunks()
    expected = rows_of(np.array([2, 4, 6]), factor=2)
    expected[1] = 0
    np.testing.assert_array_equal(chunk.slots["Adam"], expected)
    assert [(finding.severity, finding.check) for finding in table.check()] == [("warning", "slot-keys")] * 2
    (said,) = write_tables([table], tmp_path / "out", "tfplus").tables
    assert "slot Adam has 1 rows whose keys the table has not, or has twice" in said.losses
    assert "slot Adam has no row for 1 of 3 keys (4); they became zeros" in said.changes


@pytest.mark.parametrize(
    ("lists", "check"),
    [({"blacklist": [9, 4]}, "blacklist"), ({"increment": True, "deleted": [4, 9]}, "deleted-keys")],
)
def test_key_that_is_listed_as_not_there(
    save_plain: Save, tmp_path: Path, lists: Mapping[str, Any], check: str
) -> None:
    tensors = variable("emb", [2, 4], freqs=np.array([1, 1], np.uint32), **lists)
    (finding,) = only_table(save_plain(tmp_path / "a", tensors)).check()
    assert (finding.severity, finding.check) == ("error", check)
    assert "(4)" in finding.message


def broken(change: Callable[[dict[str, np.ndarray]], Any]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for part in range(3):
        tensors |= variable(f"emb/part_{part}", [part, part + 3], increment=False, freqs=np.array([1, 1], np.uint32))
        tensors |= variable(f"emb/part_{part}/Adam", [part, part + 3])
    change(tensors)
    return tensors


def without(prefix: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def with_(**arrays: Any) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({f"emb/part_1:0-{suffix}": array for suffix, array in arrays.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("emb/part_1:0-"), "part 1 is missing"),
        (without("emb/part_1/Adam"), "part 1 lacks slot 'Adam'"),
        (without("emb/part_2:0-freq_keys"), "None and 2 rows"),
        (with_(values=np.zeros((1, 4), np.float32)), r"shape \[1, 4\], expected \[2, any\]"),
        (
            with_(values=np.zeros((2, 5), np.float32), init_table=np.zeros((0, 5), np.float32)),
            r"rows of \[5\] in part 1",
        ),
        (with_(values=np.zeros((2, 4))), "float64 rows"),
        (with_(values=np.zeros((2, 4), np.int32)), "of type int32"),
        (with_(values=np.zeros(2, np.float32)), r"shape \[2\]"),
        (with_(values=np.zeros((2, 0), np.float32)), r"shape \[2, 0\]"),
        (with_(keys=np.zeros(2, np.float32)), "of type float32"),
        (with_(keys=np.zeros((2, 1), np.int64)), r"shape \[2, 1\]"),
        (with_(freq_keys=np.zeros(3, np.int64)), "3 and 2 rows"),
        (with_(freq_values=np.zeros(2, np.int64)), "of type int64"),
        (with_(blacklist=np.zeros((1, 2), np.int64)), r"shape \[1, 2\]"),
        (with_(blacklist=np.zeros(1, np.int32)), "of type int32"),
        (with_(init_table=np.zeros((3, 5), np.float32)), r"shape \[3, 5\]"),
        (with_(need_full_import=np.zeros(2, bool)), r"shape \[2\], expected \[1\]"),
        (with_(need_full_import=np.zeros(1, bool)), "some of a full checkpoint"),
        (with_(delete_keys=np.zeros(1, np.float32)), "of type float32"),
        (lambda tensors: tensors.update(variable("emb", [7])), "with parts and without"),
    ],
)
def test_broken_checkpoints_are_named(
    save_plain: Save, tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None], message: str
) -> None:
    path = save_plain(tmp_path / "a", broken(change) | variable("good", [1]))
    with pytest.raises(BadInputError, match=message) as caught:
        open_checkpoint(path)
    assert "emb" in str(caught.value)
    checkpoint = open_checkpoint(path, OpenOptions(lenient=True))
    assert set(checkpoint.tables) <= {"good", "emb"}
    assert "good" in checkpoint.tables
    assert "emb" in checkpoint.broken


def test_damaged_rows_of_a_joined_slot_are_told(save_plain: Save, tmp_path: Path) -> None:
    tensors = variable("emb/part_0", [2, 4, 6]) | variable("emb/part_0/Adam", [6, 4, 2], factor=2)
    path = save_plain(tmp_path / "a", tensors)
    data = Path(f"{path}.data-00000-of-00001")
    content = bytearray(data.read_bytes())
    at = bytes(content).index(tensors["emb/part_0/Adam:0-values"].tobytes())
    content[at] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptFileError, match="emb/part_0/Adam:0-values"):
        list(only_table(path).chunks())


def test_initial_values_of_another_width_are_refused(make_table: Make, tmp_path: Path) -> None:
    table = make_table(slots=(), extras={"initial_values": np.zeros((3, 5), np.float32)})
    with pytest.raises(BadInputError, match=r"rows of \[5\], expected \[4\]"):
        write_tables([table], tmp_path / "out", "tfplus")
    assert not list(tmp_path.iterdir())
