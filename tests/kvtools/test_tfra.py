from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.array_table import table_from_arrays
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.chunk import ALL_COLUMNS, Chunk, Columns
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.migrate import write_tables
from kvtools.partition import owners

SavePlain = Callable[..., Path]
TFRA = Path(__file__).parents[1] / "data" / "tfra"


def whole(table: TableReader) -> Chunk:
    chunks = list(table.chunks(ALL_COLUMNS))
    assert [chunk.part for chunk in chunks] == sorted(chunk.part for chunk in chunks)
    column = lambda of: None if of(chunks[0]) is None else np.concatenate([of(c) for c in chunks])  # noqa: E731
    if not chunks:
        return Chunk(np.empty(0, table.key_dtype))
    return Chunk(
        np.concatenate([chunk.keys for chunk in chunks]),
        column(lambda c: c.values),
        {name: np.concatenate([chunk.slots[name] for chunk in chunks]) for name in chunks[0].slots},
        column(lambda c: c.freqs),
        column(lambda c: c.versions),
    )


def rows(keys: np.ndarray, values: np.ndarray) -> dict[int, bytes]:
    assert len(set(keys.tolist())) == len(keys)
    return {int(key): value.tobytes() for key, value in zip(keys, values, strict=True)}


def slot_tensors(prefix: str, parts: int = 2) -> dict[int, bytes]:
    bundle = Bundle(TFRA / "v1_adam" / "model.ckpt-20")
    found: dict[int, bytes] = {}
    for i in range(1, parts + 1):
        found |= rows(
            bundle.tensor(f"{prefix}_mht_{i}of{parts}-keys").read(),
            bundle.tensor(f"{prefix}_mht_{i}of{parts}-values").read(),
        )
    return found


def test_a_v1_checkpoint_is_one_table_with_its_slots_and_the_dense_variables() -> None:
    checkpoint = open_checkpoint(TFRA / "v1_adam")
    expected = np.load(TFRA / "expected_v1_adam.npz")
    assert checkpoint.dialect == "tfra" and list(checkpoint.tables) == ["tower/ad_emb"]
    table = checkpoint.table("tower/ad_emb")
    assert (table.schema.part_rows, table.slots) == ((232, 268), ("Adam.m", "Adam.v"))
    read = whole(table)
    assert read.values is not None
    assert rows(read.keys, read.values) == rows(expected["keys"], expected["values"])
    assert rows(read.keys, read.slots["Adam.m"]) == slot_tensors("m/tower_ad_emb_Adam_m")
    assert rows(read.keys, read.slots["Adam.v"]) == slot_tensors("v/tower_ad_emb_Adam_v")
    assert list(table.check()) == []
    assert [variable.name for variable in checkpoint.variables] == [
        "beta1_power",
        "beta2_power",
        "dense_w",
        "dense_w/Adam",
        "dense_w/Adam_1",
    ]
    np.testing.assert_array_equal(next(checkpoint.read_variable("dense_w")), expected["dense_w"])


@pytest.mark.parametrize(
    ("folder", "name", "column", "part_rows"),
    [
        ("object", "user_emb", "user", (166, 177, 157)),
        ("object", "item_emb", "item", (250,)),
        ("savedmodel", "serve_emb", "serve", (59,)),
    ],
)
def test_object_based_checkpoints_and_saved_models_are_read_exactly(
    folder: str, name: str, column: str, part_rows: tuple[int, ...]
) -> None:
    expected = np.load(TFRA / "expected_tf2.npz")
    checkpoint = open_checkpoint(TFRA / folder)
    assert checkpoint.dialect == "tfra"
    table = checkpoint.table(name)
    assert table.schema.part_rows == part_rows
    read = whole(table)
    assert read.values is not None
    assert rows(read.keys, read.values) == rows(expected[f"{column}_keys"], expected[f"{column}_values"])


def test_the_rule_by_which_parts_own_keys_is_told_from_the_keys() -> None:
    # Its keys are negative too, and TensorFlow was built with CUDA where it was written.
    assert open_checkpoint(TFRA / "object").table("user_emb").schema.partition == "low_31_bits"
    assert open_checkpoint(TFRA / "object").table("item_emb").schema.partition is None


KEYS = np.array([-(2**63), -7, -1, 0, 1, 5, 2**31, 2**63 - 1])
VALUES = np.arange(16, dtype=np.float32).reshape(8, 2)


def tensors(base: str, keys: np.ndarray = KEYS, values: np.ndarray = VALUES, parts: int = 1) -> dict[str, np.ndarray]:
    found = {}
    owner = (keys % parts).astype(np.int64)
    for i in range(parts):
        found[f"{base}_mht_{i + 1}of{parts}-keys"] = keys[owner == i]
        found[f"{base}_mht_{i + 1}of{parts}-values"] = values[owner == i]
    return found


def test_parts_that_own_keys_by_floor_mod_or_by_no_rule_of_tfra_are_told(tmp_path: Path, save_plain: SavePlain) -> None:
    path = save_plain(tmp_path / "ckpt", tensors("emb/emb", parts=3))
    assert open_checkpoint(path).table("emb").schema.partition == "floor_mod"
    mixed = tensors("emb/emb", parts=3)
    first, second = "emb/emb_mht_1of3", "emb/emb_mht_2of3"
    for what in ("keys", "values"):
        mixed[f"{first}-{what}"], mixed[f"{second}-{what}"] = mixed[f"{second}-{what}"], mixed[f"{first}-{what}"]
    table = open_checkpoint(save_plain(tmp_path / "mixed", mixed)).table("emb")
    assert table.schema.partition is None and "partitioner" in " ".join(table.schema.notes)


@pytest.mark.parametrize(
    ("variable", "slots", "labels"),
    [
        ("emb/emb", ["m/emb_Adam_m", "v/emb_Adam_v"], ["Adam.m", "Adam.v"]),
        ("a/b/a_b", ["train/m_3/a_b_MyAdam_m", "train/v_3/a_b_MyAdam_v"], ["MyAdam.m", "MyAdam.v"]),
        ("emb/emb", ["accum/emb_Ftrl_accum", "linear/emb_Ftrl_linear"], ["Ftrl.accum", "Ftrl.linear"]),
        (
            "emb/emb",
            ["accum/emb_Adadelta_accum", "accum_update/emb_Adadelta_accum_update"],
            ["Adadelta.accum", "Adadelta.accum_update"],
        ),
        ("emb/emb", ["rms/emb_RMSProp_rms", "momentum/emb_RMSProp_momentum"], ["RMSProp.momentum", "RMSProp.rms"]),
        ("emb/emb", ["momentum/emb_Momentum_momentum"], ["Momentum.momentum"]),
        ("emb/emb", ["zeta/emb_LazyThing_zeta"], ["LazyThing.zeta"]),
        ("emb/emb", ["m/emb_m", "v/emb_v"], ["Adam.m", "Adam.v"]),
        ("emb/emb", ["accumulator_1/emb_accumulator"], ["Adagrad.accumulator"]),
        ("emb/emb", ["m/emb_look_up_m", "v/emb_look_up_v"], ["Adam.m", "Adam.v"]),
        (
            "m/user/tables_of_emb",
            ["optimizer/emb.Slook.Sm/tables_of_emb.Slook.Sm", "optimizer/emb.Slook.Sv/tables_of_emb.Slook.Sv"],
            ["Adam.m", "Adam.v"],
        ),
        *(
            (
                "m/user/tables_of_emb",
                [f"optimizer/emb.S{look}.S{slot}/tables_of_emb.S{look}.S{slot}" for slot in "mv"],
                ["Adam.m", "Adam.v"],
            )
            for look in ("group_id", "lazy", "lambda_1", "madam-shadow")
        ),
        (
            "p/tables_of_a.Sb",
            ["o/a.Sb.SDynamicEmbedding.Sx-shadow.Szeta/tables_of_a.Sb.SDynamicEmbedding.Sx-shadow.Szeta"],
            ["DynamicEmbedding/x-shadow.zeta"],
        ),
    ],
)  # fmt: skip
def test_slots_are_named_by_their_optimizer(
    variable: str, slots: list[str], labels: list[str], tmp_path: Path, save_plain: SavePlain
) -> None:
    rng = np.random.default_rng(0)
    saved, expected = {}, {}
    for place in [variable, *slots]:
        order = rng.permutation(len(KEYS))
        values = rng.normal(size=(8, 2)).astype(np.float32)
        expected[place] = rows(KEYS[order], values)
        one = tensors("x", KEYS[order], values)
        for tensor, array in one.items():
            what = tensor.rpartition("-")[2]
            path = f"{place}/0/.ATTRIBUTES/table-{what}" if "tables_of" in place else f"{place}_mht_1of1-{what}"
            saved[path] = array
    checkpoint = open_checkpoint(save_plain(tmp_path / "ckpt", saved))
    assert len(checkpoint.tables) == 1
    (table,) = checkpoint.tables.values()
    assert sorted(table.slots) == sorted(labels)
    read = whole(table)
    assert read.values is not None
    assert rows(read.keys, read.values) == expected[variable]
    for name, array in read.slots.items():
        slot = name.rpartition(".")[2]
        (place,) = [place for place in slots if place.endswith((f"_{slot}", f".S{slot}"))]
        assert rows(read.keys, array) == expected[place]
    taken = table.take(np.array([7, 0, 7]), ALL_COLUMNS)
    assert {name: slot.tolist() for name, slot in taken.slots.items()} == {
        name: read.slots[name][[7, 0, 7]].tolist() for name in read.slots
    }


def _graph(*full_names: str) -> bytes:
    """An object graph of variables that were called so: a node (1) of each, with an attribute (2) of a name (2)."""

    def message(field: int, value: bytes) -> bytes:
        return bytes([field << 3 | 2, len(value)]) + value

    return b"".join(message(1, message(2, message(2, full_name.encode()))) for full_name in full_names)


@pytest.mark.parametrize(
    "graph, optimizer",
    [
        (_graph("AdamW/emb/look/m", "AdamW/emb/look/v", "AdamW/m/dense"), "AdamW"),
        (_graph("Nadam_1/emb/look/m", "Nadam_1/emb/look/v"), "Nadam"),
        (_graph("AdamW/other/look/m", "mine/emb/look/m"), "Adam"),
        (b"no graph", "Adam"),
    ],
)
def test_an_object_graph_tells_the_optimizer_of_slots(
    graph: bytes, optimizer: str, tmp_path: Path, save_plain: SavePlain
) -> None:
    saved: dict[str, Any] = {"_CHECKPOINTABLE_OBJECT_GRAPH": graph}
    slots = [f"o/emb.Slook.S{slot}/tables_of_emb.Slook.S{slot}" for slot in "mv"]
    for place in ("user/tables_of_emb", *slots):
        saved |= {
            f"{place}/0/.ATTRIBUTES/table-keys": KEYS,
            f"{place}/0/.ATTRIBUTES/table-values": np.ones((len(KEYS), 2), np.float32),
        }
    (table,) = open_checkpoint(save_plain(tmp_path / "ckpt", saved)).tables.values()
    assert sorted(table.slots) == [f"{optimizer}.m", f"{optimizer}.v"]


@pytest.mark.parametrize("other", ["user_item/user_item", "item/user_item", "deep/user_vector/deep_user_vector"])
def test_a_variable_whose_name_begins_like_anothers_is_no_slot(
    other: str, tmp_path: Path, save_plain: SavePlain
) -> None:
    path = save_plain(tmp_path / "ckpt", {**tensors("user/user"), **tensors(other)})
    assert len(open_checkpoint(path).tables) == 2


def test_a_table_of_another_width_type_or_number_of_parts_is_no_slot(tmp_path: Path, save_plain: SavePlain) -> None:
    wide = tensors("m/emb_Adam_m", values=np.zeros((8, 3), np.float32))
    other = tensors("v/emb_Adam_v", values=VALUES.astype(np.float64))
    checkpoint = open_checkpoint(save_plain(tmp_path / "ckpt", {**tensors("emb/emb"), **wide, **other}))
    assert sorted(checkpoint.tables) == ["emb", "emb_Adam/m", "emb_Adam/v"]


def test_the_status_of_a_restrict_policy_is_frequencies_or_versions(tmp_path: Path, save_plain: SavePlain) -> None:
    counts = np.arange(8, dtype=np.int32)[:, None] + 1
    saved = {
        **tensors("deep/a/deep_a"),
        **tensors("deep/deep/status/frequency/deep_deep_deep_status_deep_a_frequency", KEYS[::-1].copy(), counts),
        **tensors("b/b"),
        **tensors("status_1/timestamp/status_1_b_timestamp", KEYS, counts + 100),
        "p/tables_of_x.Sc/0/.ATTRIBUTES/table-keys": KEYS,
        "p/tables_of_x.Sc/0/.ATTRIBUTES/table-values": VALUES,
        "p/x.Sc.Sfrequency/tables_of_x.Sc.Sfrequency/0/.ATTRIBUTES/table-keys": KEYS,
        "p/x.Sc.Sfrequency/tables_of_x.Sc.Sfrequency/0/.ATTRIBUTES/table-values": counts,
    }
    checkpoint = open_checkpoint(save_plain(tmp_path / "ckpt", saved))
    assert list(checkpoint.tables) == ["b", "deep/a", "x/c"]
    read = whole(checkpoint.table("deep/a"))
    assert read.freqs is not None and read.freqs.tolist() == counts[::-1, 0].tolist() and read.versions is None
    read = whole(checkpoint.table("b"))
    assert read.versions is not None and read.versions.tolist() == (counts[:, 0] + 100).tolist()
    assert checkpoint.table("b").schema.version_unit == "seconds"
    assert checkpoint.table("x/c").schema.has_freqs


def test_rows_that_a_slot_lacks_are_zeros_and_told(tmp_path: Path, save_plain: SavePlain) -> None:
    some = np.array([5, 0, 99])
    saved = {**tensors("emb/emb"), **tensors("m/emb_Adam_m", some, np.float32([[1, 1], [2, 2], [3, 3]]))}
    table = open_checkpoint(save_plain(tmp_path / "ckpt", saved)).table("emb")
    read = whole(table)
    assert {int(k): v.tolist() for k, v in zip(read.keys, read.slots["Adam.m"], strict=True)} == {
        int(key): {5: [1.0, 1.0], 0: [2.0, 2.0]}.get(int(key), [0.0, 0.0]) for key in KEYS
    }
    findings = [finding.message for finding in table.check()]
    assert len(findings) == 2
    assert "no row for 6 of 8 keys (-9223372036854775808, " in findings[0] and "1 rows" in findings[1]
    assert all(finding.severity == "warning" for finding in table.check())


def broken_cases() -> dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]]:
    name = "emb/emb_mht_{}of3-{}"
    return {
        "a part is missing": (
            lambda t: (t.pop(name.format(2, "keys")), t.pop(name.format(2, "values"))),
            "got 2 of 3 parts, part 1 is missing",
        ),
        "the last part is missing": (
            lambda t: (t.pop(name.format(3, "keys")), t.pop(name.format(3, "values"))),
            "got 2 of 3 parts, part 2 is missing",
        ),
        "values are missing": (lambda t: t.pop(name.format(2, "values")), "part 1 has no values"),
        "keys are missing": (lambda t: t.pop(name.format(1, "keys")), "part 0 has no keys"),
        "sizes contradict": (
            lambda t: t.update({name.format(1, "keys"): np.arange(9)}),
            "has shape \\[9\\] and .* expected \\[rows\\] and \\[rows, dim\\]",
        ),
        "a width contradicts": (
            lambda t: t.update({name.format(2, "values"): np.zeros((len(t[name.format(2, "keys")]), 5), np.float32)}),
            "different types or widths",
        ),
        "a type contradicts": (
            lambda t: t.update({name.format(2, "keys"): t[name.format(2, "keys")].astype(np.int32)}),
            "different types or widths",
        ),
        "two numbers of parts": (lambda t: t.update(tensors("emb/emb", parts=2)), "2 and 3 parts"),
        "a part beyond": (
            lambda t: t.update({k.replace("_1of3", "_7of3"): v for k, v in t.items() if "_1of3" in k}),
            "one of them is beyond 3",
        ),
        "keys in two dimensions": (
            lambda t: t.update({name.format(1, "keys"): t[name.format(1, "keys")][:, None]}),
            "expected \\[rows\\]",
        ),
        "rows without width": (
            lambda t: t.update(
                {k: np.zeros((len(t[k.replace("values", "keys")]), 0), np.float32) for k in t if k.endswith("values")}
            ),
            "0 wide",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", broken_cases())
def test_a_broken_table_is_refused_and_told(case: str, tmp_path: Path, save_plain: SavePlain) -> None:
    change, message = broken_cases()[case]
    saved = tensors("emb/emb", parts=3)
    change(saved)
    path = save_plain(tmp_path / "ckpt", {**saved, **tensors("good/good")})
    with pytest.raises((BadInputError, CorruptFileError), match=message):
        open_checkpoint(path)
    checkpoint = open_checkpoint(path, OpenOptions(lenient=True))
    assert list(checkpoint.tables) == ["good"] and list(checkpoint.broken) == ["emb"]
    assert not [variable for variable in checkpoint.variables if "_mht_" in variable.name]


def test_options_that_contradict_are_refused(tmp_path: Path, save_plain: SavePlain) -> None:
    path = save_plain(tmp_path / "ckpt", tensors("emb/emb"))
    assert open_checkpoint(path, OpenOptions(key_dtype="int64", value_dtype="float32", dim=2)).tables
    for options in (OpenOptions(key_dtype="int32"), OpenOptions(value_dtype="float16"), OpenOptions(dim=3)):
        with pytest.raises(UsageError, match="leave the option out"):
            open_checkpoint(path, options)


def test_tables_of_strings_are_listed_and_their_rows_refused(
    tmp_path: Path, save: Callable[..., Path], tf: Any
) -> None:
    strings = np.array([b"a", b"bc"], object)
    saved = {
        "s/s_mht_1of1-keys": strings,
        "s/s_mht_1of1-values": np.ones((2, 3), np.float32),
        "t/t_mht_1of1-keys": np.array([1, 2]),
        "t/t_mht_1of1-values": np.array([[b"x"], [b"y"]], object),
        "b/b_mht_1of1-keys": strings,
        "b/b_mht_1of1-values": np.array([[True], [False]]),
        **tensors("emb/emb"),
    }
    checkpoint = open_checkpoint(save(tmp_path / "ckpt", saved))
    listed = {
        t.schema.name: (t.schema.key_dtype, t.schema.value_dtype, t.dim, t.rows) for t in checkpoint.tables.values()
    }
    assert listed == {
        "b": ("string", "bool", 1, 2),
        "emb": ("int64", "float32", 2, 8),
        "s": ("string", "float32", 3, 2),
        "t": ("int64", "string", 1, 2),
    }
    for name in "bst":
        with pytest.raises(BadInputError, match="hash the strings to int64"):
            list(checkpoint.table(name).chunks(Columns()))
        with pytest.raises(BadInputError, match="hash the strings to int64"):
            checkpoint.table(name).take(np.array([0]))
        with pytest.raises(BadInputError, match="string"):
            write_tables([checkpoint.table(name)], tmp_path / "out", "tfplugin")
    assert len(whole(checkpoint.table("emb"))) == 8


def test_an_empty_table_is_read(tmp_path: Path, save_plain: SavePlain) -> None:
    saved = tensors("emb/emb", KEYS[:0], VALUES[:0], parts=2) | tensors("m/emb_Adam_m", KEYS[:0], VALUES[:0], parts=2)
    table = open_checkpoint(save_plain(tmp_path / "ckpt", saved)).table("emb")
    assert (table.rows, table.parts, table.slots) == (0, 2, ("Adam.m",))
    assert list(table.chunks()) == []
    assert list(table.check()) == []


def columns_by_key(table: TableReader) -> dict[str, dict[int, bytes]]:
    read = whole(table)
    assert read.values is not None
    columns = {"values": read.values, **read.slots, "freqs": read.freqs, "versions": read.versions}
    return {name: rows(read.keys, column) for name, column in columns.items() if column is not None}


def round_trip(saved: Mapping[str, np.ndarray], folder: Path, save_plain: SavePlain, to: str, parts: int) -> None:
    source = open_checkpoint(save_plain(folder / "source", saved))
    options = WriteOptions(force=True)
    write_tables(source.select([]), folder / "out", to, beside=source, parts=parts, options=options)
    (one,) = source.tables.values()
    types = OpenOptions(key_dtype=one.schema.key_dtype, value_dtype=one.schema.value_dtype, dim=one.dim)
    (other,) = open_checkpoint(folder / "out", types).tables.values()
    assert other.parts == parts and other.slots == one.slots
    if one.rows:
        assert columns_by_key(other) == columns_by_key(one)
    assert list(other.check()) == []


@settings(max_examples=25, deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40, unique=True),
    dim=st.integers(1, 5),
    key_dtype=st.sampled_from(["int64", "int32"]),
    value_dtype=st.sampled_from(["float32", "float64", "bfloat16", "int32", "float16", "int8", "int64"]),
    slots=st.sampled_from([(), ("Adam_m", "Adam_v"), ("Ftrl_accum", "Ftrl_linear")]),
    parts=st.integers(1, 4),
    to=st.sampled_from(["tfra", "tfra_files"]),
    seed=st.integers(0, 2**31),
)
def test_what_is_written_is_read_again(
    keys: list[int],
    dim: int,
    key_dtype: str,
    value_dtype: str,
    slots: tuple[str, ...],
    parts: int,
    to: str,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
    save_plain: SavePlain,
) -> None:
    if key_dtype == "int32":
        keys = list({key >> 32 for key in keys})
        value_dtype = {"float16": "float32", "int8": "int32", "int64": "int32"}.get(value_dtype, value_dtype)
    rng = np.random.default_rng(seed)
    array = np.array(keys, key_dtype)
    dtype = np.dtype(ml_dtypes.bfloat16) if value_dtype == "bfloat16" else np.dtype(value_dtype)
    draw = lambda: (rng.normal(size=(len(keys), dim)) * 50).astype(dtype)  # noqa: E731
    saved = tensors("emb/emb", array, draw())
    for slot in slots:
        order = rng.permutation(len(keys))
        saved |= tensors(f"{slot.split('_')[1]}/emb_{slot}", array[order], draw())
    round_trip(saved, tmp_path_factory.mktemp("round"), save_plain, to, parts)


def test_status_goes_into_files_and_back(tmp_path: Path, save_plain: SavePlain) -> None:
    saved = {
        **tensors("emb/emb"),
        **tensors("status/frequency/status_emb_frequency", KEYS, np.arange(8, dtype=np.int32)[:, None]),
    }
    source = open_checkpoint(save_plain(tmp_path / "source", saved))
    write_tables(source.select([]), tmp_path / "out", "tfra_files")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "emb_mht_1of1_rank0_size1-keys",
        "status_emb_frequency_mht_1of1_rank0_size1-values",
    }
    again = open_checkpoint(tmp_path / "out").table("emb")
    assert columns_by_key(again) == columns_by_key(source.table("emb"))


def test_names_are_those_that_tfra_gives(
    tmp_path: Path, save_plain: SavePlain, table_tensors: Any, make_sample: Any
) -> None:
    names = ("ads/emb", "users/emb", "m")
    samples = {name: make_sample(name, slots=("Adam.m", "Ftrl.accum"), rows=20) for name in names}
    saved: dict[str, Any] = {}
    for sample in samples.values():
        sample.freqs, sample.versions = sample.freqs // 2, None
        saved |= table_tensors(sample)
    source = open_checkpoint(save_plain(tmp_path / "source", saved))
    write_tables(source.select(list(names)), tmp_path / "out", "tfra", parts=2)
    keys = {tensor.removesuffix("_mht_1of2-keys") for tensor in Bundle(tmp_path / "out").entries if "1of2-k" in tensor}
    assert keys == {
        *("ads/emb/ads_emb", "users/emb/users_emb", "m/m"),
        *("m/ads_emb_Adam_m", "m_1/users_emb_Adam_m", "m_2/m_Adam_m"),
        *("accum/ads_emb_Ftrl_accum", "accum_1/users_emb_Ftrl_accum", "accum_2/m_Ftrl_accum"),
        "ads/ads/status/frequency/ads_ads_ads_status_ads_emb_frequency",
        "users/users/status/frequency/users_users_users_status_users_emb_frequency",
        "status/frequency/status_m_frequency",
    }
    again = open_checkpoint(tmp_path / "out")
    for name, sample in samples.items():
        read = whole(again.table(name))
        assert read.values is not None and rows(read.keys, read.values) == rows(sample.keys, sample.values)
        assert rows(read.keys, read.slots["Adam.m"]) == rows(sample.keys, sample.slots["Adam.m"])


@pytest.mark.parametrize("to", ["tfra", "tfra_files"])
def test_tables_of_status_go_where_tfra_looks_for_them(to: str, tmp_path: Path) -> None:
    counts = np.arange(1, 9, dtype=np.int32)[:, None]
    tables = [
        table_from_arrays("item", KEYS, np.ones((8, 2), np.float32), freqs=np.arange(8, dtype=np.int32)),
        table_from_arrays("status/ads/emb/frequency", KEYS, counts),
        table_from_arrays("status/user/timestamp", KEYS[::-1], counts),
        table_from_arrays("status/gone/frequency", KEYS, counts),
        table_from_arrays("ads/emb", KEYS, np.ones((8, 2), np.float32), freqs=np.arange(8, dtype=np.int32)),
        table_from_arrays("user", KEYS, np.ones((8, 2), np.float32)),
    ]
    account = write_tables(tables, tmp_path / "out", to, strict=to == "tfra", verify=to == "tfra")
    assert "what it counts itself is not written" in account.tables[0].changes[0]
    scoped = "ads_ads_ads_status_ads_emb_frequency"
    if to == "tfra":
        there = {name.rpartition("_mht_")[0] for name in Bundle(tmp_path / "out").entries if name.endswith("-keys")}
        assert there == {
            *("item/item", "ads/emb/ads_emb", "user/user"),
            f"ads/ads/status/frequency/{scoped}",
            "status/timestamp/status_user_timestamp",
            "status/gone/frequency/status_gone_frequency",
        }
    else:
        there = {path.name.rpartition("_mht_")[0] for path in (tmp_path / "out").glob("*-keys")}
        assert there == {"item", "ads_emb", "user", scoped, "status_user_timestamp", "status_gone_frequency"}
    read = whole(open_checkpoint(tmp_path / "out").table("status/user/timestamp"))
    assert read.values is not None and rows(read.keys, read.values) == rows(KEYS[::-1], counts)


def test_rows_that_slots_lack_are_what_optimizers_start_from(tmp_path: Path, save_plain: SavePlain) -> None:
    some, row = np.array([5]), np.float32([[2, 2]])
    names = {"Adagrad_accumulator": 0.1, "MyFtrl_accum": 0.1, "RMSProp_rms": 1.0, "RMSprop_velocity": 0.0}
    slots = {f"{name.split('_')[1]}/emb_{name}": start for name, start in names.items()}
    saved = tensors("emb/emb")
    for place in slots:
        saved |= tensors(place, some, row)
    read = whole(open_checkpoint(save_plain(tmp_path / "ckpt", saved)).table("emb"))
    for name, start in names.items():
        slot = read.slots[name.replace("_", ".")]
        expected = np.where((read.keys == 5)[:, None], 2, np.float32(start))
        np.testing.assert_array_equal(slot, np.broadcast_to(expected, slot.shape))


def test_int64_keys_go_where_tfra_looks_for_them(tmp_path: Path, save_plain: SavePlain) -> None:
    source = open_checkpoint(save_plain(tmp_path / "source", tensors("emb/emb"))).table("emb")
    for rule in (None, "floor_mod", "low_31_bits"):
        options = WriteOptions(partition=rule, force=True)
        write_tables([source], tmp_path / "out", "tfra", parts=3, options=options)
        table = open_checkpoint(tmp_path / "out").table("emb")
        assert table.schema.partition == (rule or "low_31_bits")
        for chunk in table.chunks():
            assert (owners(chunk.keys, 3, rule or "low_31_bits") == chunk.part).all()
        # What is TFRA's already keeps its rule.
        write_tables([table], tmp_path / "again", "tfra", parts=5, options=WriteOptions(force=True))
        assert open_checkpoint(tmp_path / "again").table("emb").schema.partition == (rule or "low_31_bits")


def test_types_that_tfra_has_no_table_for_are_refused(tmp_path: Path, save_plain: SavePlain) -> None:
    bytes_wide = tensors("emb/emb", KEYS.astype(np.int32)[2:6], VALUES.astype(np.int8)[2:6])
    table = open_checkpoint(save_plain(tmp_path / "source", bytes_wide)).table("emb")
    for to in ("tfra", "tfra_files"):
        with pytest.raises(BadInputError, match=r"int8, expected float32 or .* under int32 keys"):
            write_tables([table], tmp_path / "out", to)
        assert not list(tmp_path.glob("out*"))


def test_a_damaged_record_is_told(tmp_path: Path, save_plain: SavePlain) -> None:
    for damaged in ("{", "[]", '{"emb/emb": 1}', '{"emb/emb": ["a", 1]}'):
        path = save_plain(tmp_path / "ckpt", {**tensors("emb/emb"), "_kvtools_tfra": damaged})
        with pytest.raises(CorruptFileError, match="_kvtools_tfra"):
            open_checkpoint(path)
    record = '{"emb/emb": ["any name", "values"], "gone": ["any name", "slot:x"], "v/v": ["any name", "slot:odd"]}'
    path = save_plain(tmp_path / "ckpt", {**tensors("emb/emb"), **tensors("v/v"), "_kvtools_tfra": record})
    checkpoint = open_checkpoint(path)
    assert {name: table.slots for name, table in checkpoint.tables.items()} == {"any name": ("odd",)}
    assert not checkpoint.variables
