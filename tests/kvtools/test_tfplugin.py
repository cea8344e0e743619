from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtools
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.chunk import ALL_COLUMNS, Chunk
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.diff import compare_tables
from kvtools.errors import BadInputError, CorruptFileError, UnknownTableError
from kvtools.merge import merge
from kvtools.verify import verify

Save = Callable[..., Path]
Make = Callable[..., Any]
Tensors = Callable[..., dict[str, Any]]


def by_key(chunks: list[Chunk]) -> dict[int, tuple[bytes, ...]]:
    """The rows as bytes, slots, frequencies and versions included."""
    rows = {}
    for chunk in chunks:
        columns = [
            chunk.values,
            *(chunk.slots[name] for name in sorted(chunk.slots)),
            chunk.freqs,
            chunk.versions,
        ]
        for i, key in enumerate(chunk.keys):
            assert int(key) not in rows
            rows[int(key)] = tuple(column[i].tobytes() for column in columns if column is not None)
    return rows


def reference(sample: Any) -> dict[int, tuple[bytes, ...]]:
    return by_key([Chunk(sample.keys, sample.values, sample.slots, sample.freqs, sample.versions)])


def check(table: TableReader, sample: Any, parts: int) -> None:
    schema = table.schema
    assert (schema.key_dtype, schema.value_dtype) == (sample.keys.dtype.name, sample.values.dtype.name)
    assert (schema.rows, schema.dim, schema.parts) == (len(sample.keys), sample.dim, parts)
    assert [slot.name for slot in schema.slots] == list(sample.slots)
    expected = reference(sample)
    for chunk_rows in (1, 7, 10_000):
        chunks = list(table.chunks(rows=chunk_rows))
        assert by_key(chunks) == expected
        assert all(chunk.values is not None and chunk.values.dtype == sample.values.dtype for chunk in chunks)
    keys = table.all_keys()
    assert keys.dtype == sample.keys.dtype
    rows = np.random.default_rng(0).permutation(len(keys))[:20]
    taken = table.take(rows, ALL_COLUMNS)
    assert np.array_equal(taken.keys, keys[rows])
    assert by_key([taken]) == {int(key): expected[int(key)] for key in keys[rows]}


@pytest.mark.parametrize("parts", [1, 3, 5])
@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16", "float64"])
def test_dtypes_and_parts(
    save: Save,
    make_sample: Make,
    table_tensors: Tensors,
    tmp_path: Path,
    parts: int,
    key_dtype: str,
    value_dtype: str,
) -> None:
    sample = make_sample(key_dtype=key_dtype, value_dtype=value_dtype)
    path = save(tmp_path / "a", table_tensors(sample, parts))
    check(open_checkpoint(path).table("scope/emb"), sample, parts)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("slices", [2, 5])
def test_slices_and_shards(
    save: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path, shards: int, slices: int
) -> None:
    sample = make_sample(rows=97, dim=3)
    path = save(tmp_path / "a", table_tensors(sample, 3), shards=shards, slices=slices)
    check(open_checkpoint(path).table("scope/emb"), sample, 3)


def test_empty_table_and_empty_parts(save: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path) -> None:
    for rows, parts in ((0, 1), (0, 3), (1, 5)):
        sample = make_sample(rows=rows)
        path = save(tmp_path / f"{rows}-{parts}", table_tensors(sample, parts))
        check(open_checkpoint(path).table("scope/emb"), sample, parts)


@pytest.mark.parametrize("parts", [1, 3])
def test_object_based(save: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path, parts: int) -> None:
    sample = make_sample("emb")
    tensors = table_tensors(sample, parts, prefix="model/user_emb")
    tensors |= {"_CHECKPOINTABLE_OBJECT_GRAPH": b"\x0a\x00", "w/.ATTRIBUTES/VARIABLE_VALUE": np.zeros(3)}
    checkpoint = open_checkpoint(save(tmp_path / "a", tensors))
    check(checkpoint.table("emb"), sample, parts)
    assert [variable.name for variable in checkpoint.variables] == ["w/.ATTRIBUTES/VARIABLE_VALUE"]


def test_two_objects_of_one_name_go_by_their_paths(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
) -> None:
    tensors = table_tensors(make_sample("emb"), 2, prefix="a/x") | table_tensors(make_sample("emb"), 1, prefix="b/y")
    assert list(open_checkpoint(save_plain(tmp_path / "c", tensors)).tables) == ["a/x", "b/y"]


def test_variable_saved_under_another_name(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
) -> None:
    sample = make_sample("renamed/emb", rows=9)
    path = save_plain(tmp_path / "a", table_tensors(sample, 3, name="emb"))
    check(open_checkpoint(path).table("renamed/emb"), sample, 3)


def test_variable_whose_name_looks_like_a_part(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
) -> None:
    sample = make_sample("emb/part_0", rows=9)
    check(open_checkpoint(save_plain(tmp_path / "a", table_tensors(sample))).table("emb/part_0"), sample, 1)


def test_partitioner_of_one_part(save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path) -> None:
    sample = make_sample("emb", rows=9)
    tensors = {name.replace("emb-", "emb/part_0-"): value for name, value in table_tensors(sample).items()}
    check(open_checkpoint(save_plain(tmp_path / "a", tensors)).table("emb"), sample, 1)


def test_slot_that_kvmeta_does_not_name_and_init_rows(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=9)
    tensors = table_tensors(sample, slots=[]) | {"emb-init": np.zeros((5, 4), np.float32)}
    checkpoint = open_checkpoint(save_plain(tmp_path / "a", tensors))
    assert {slot.name for slot in checkpoint.table("emb").schema.slots} == {"Adam.m", "Adam.v"}
    assert checkpoint.variables == ()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("target", ["tfplugin", "parquet"])
def test_scores_of_a_table_with_a_capacity_are_shown_and_named_as_lost(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path, parts: int, target: str
) -> None:
    sample = make_sample("emb", rows=40)
    tensors = table_tensors(sample, parts, policies={"max_capacity": 50, "eviction": "lru"})
    for name in [name for name in tensors if name.endswith("-keys")]:
        tensors[name.replace("-keys", "-scores")] = np.arange(len(tensors[name]), dtype=np.uint64)
        tensors[name.replace("-keys", "-orders")] = np.arange(len(tensors[name]), dtype=np.uint64) + 1
    path = save_plain(tmp_path / "a", tensors)
    checkpoint = open_checkpoint(path)
    table = checkpoint.table("emb")
    check(table, sample, parts)
    assert checkpoint.variables == ()
    kept = [f"eviction_{what}_{part}" for part in range(parts) for what in ("scores", "orders")]
    assert [extra.name for extra in table.schema.extras] == kept
    assert table.schema.metadata["policies"] == {"max_capacity": 50, "eviction": "lru"}
    assert verify(str(path)).count("error") == 0

    account = kvtools.write_tables([table], tmp_path / "b", target, parts=2)
    assert [loss for loss in account.tables[0].losses if loss.startswith("eviction scores:")]
    written = open_checkpoint(tmp_path / "b").table("emb")
    assert by_key(list(written.chunks())) == reference(sample)
    assert written.schema.extras == ()
    assert "policies" not in written.schema.metadata


POLICIES: dict[str, Any] = {
    "admission": {"kind": "bloom", "enter_threshold": 300, "below": "initial", "capacity": 50, "error": 0.1},
    "padding_key": 0,
    "expiry": [
        {"policy": "after_steps", "steps": 50},
        {"policy": "keep_top", "rows": 10, "by": "norm"},
    ],
    "versions": "steps",
}


def with_policies(sample: Any, table_tensors: Tensors, parts: int, steps: list[int], seed: int = 0) -> dict[str, Any]:
    """A table that expires by steps and counts in a filter of 2-byte cells; each part has a step of its own."""
    tensors = table_tensors(sample, parts)
    rng = np.random.default_rng(seed)
    for part, step in enumerate(steps):
        prefix = sample.name if parts == 1 else f"{sample.name}/part_{part}"
        record = json.loads(tensors[f"{prefix}-kvmeta"])
        record["policies"] = {**POLICIES, "step": step, "max_capacity": 70, "eviction": "lru"}
        tensors[f"{prefix}-kvmeta"] = json.dumps(record)
        tensors[f"{prefix}-pending_filter"] = rng.integers(0, 256, 192, np.uint8)
    return tensors


def largest_cells(tensors: dict[str, Any]) -> bytes:
    cells = [array.view("<u2") for name, array in tensors.items() if name.endswith("-pending_filter")]
    return bytes(np.max(cells, axis=0).astype("<u2").tobytes())


def records_of(prefix: Path, parts: int) -> list[dict[str, Any]]:
    bundle = Bundle(prefix)
    names = ["emb"] if parts == 1 else [f"emb/part_{part}" for part in range(parts)]
    return [json.loads(bundle.strings(f"{name}-kvmeta")[0])["policies"] for name in names]


@pytest.mark.parametrize("through", [None, "hdf5", "npz", "torch", "arrow"])
@pytest.mark.parametrize("parts", [1, 3, 7])
def test_steps_policies_and_filters_go_along(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path, parts: int, through: str | None
) -> None:
    sample = make_sample("emb", rows=40)
    tensors = with_policies(sample, table_tensors, 3, [7, 9, 8])
    path = save_plain(tmp_path / "a", tensors)
    if through is not None:
        first = kvtools.write_tables([open_checkpoint(path).table("emb")], tmp_path / "between", through)
        assert first.lossless
        path = tmp_path / "between"
    account = kvtools.write_tables([open_checkpoint(path).table("emb")], tmp_path / "b", "tfplugin", parts=parts)
    assert account.lossless
    rows = -(-30 // parts)  # of a table's 30, a part's share
    after_steps, keep_top = POLICIES["expiry"]
    expected = {**POLICIES, "step": 9, "expiry": [after_steps, {**keep_top, "rows": rows}]}
    assert records_of(tmp_path / "b", parts) == [expected] * parts
    written = open_checkpoint(tmp_path / "b").table("emb")
    assert written.schema.version_unit == "steps"
    filters = [written.extra(extra.name).tobytes() for extra in written.schema.extras]
    assert filters == [largest_cells(tensors)] * parts
    assert compare_tables(open_checkpoint(tmp_path / "a").table("emb"), written).same


def test_a_dialect_without_policies_says_what_is_lost_of_them(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
) -> None:
    tensors = with_policies(make_sample("emb", rows=40), table_tensors, 3, [7, 9, 8])
    table = open_checkpoint(save_plain(tmp_path / "a", tensors)).table("emb")
    (told,) = kvtools.write_tables([table], tmp_path / "b", "deeprec").tables
    losses = "\n".join(told.losses)
    assert "the step 9 that ages of rows are counted from" in losses
    assert "policies (admission, expiry, padding_key)" in losses
    assert "admission filter 0 [192]: the dialect has no place for them" in losses


def test_a_merge_takes_the_largest_step_and_joins_filters(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
) -> None:
    one = with_policies(make_sample("emb", rows=40), table_tensors, 2, [7, 9])
    two = with_policies(make_sample("emb", rows=9), table_tensors, 1, [12], seed=1)
    record = json.loads(two["emb-kvmeta"])
    record["policies"]["expiry"][1]["rows"] = 20  # as many as both parts of the other keep
    two["emb-kvmeta"] = json.dumps(record)
    sources = [open_checkpoint(save_plain(tmp_path / name, tensors)) for name, tensors in (("a", one), ("b", two))]
    account, _ = merge(sources, tmp_path / "c")
    assert account.lossless
    assert [record["step"] for record in records_of(tmp_path / "c", 2)] == [12, 12]
    assert [record["expiry"] for record in records_of(tmp_path / "c", 2)] == [POLICIES["expiry"]] * 2
    merged = open_checkpoint(tmp_path / "c").table("emb")
    filters = [merged.extra(extra.name).tobytes() for extra in merged.schema.extras]
    assert filters == [largest_cells({**{f"1{k}": v for k, v in one.items()}, **two})] * 2

    record["policies"]["admission"]["error"] = 0.2
    other = open_checkpoint(save_plain(tmp_path / "d", {**two, "emb-kvmeta": json.dumps(record)}))
    account, _ = merge([sources[0], other], tmp_path / "e")
    assert [loss for loss in account.tables[0].losses if loss.startswith("admission filters: the merged tables differ")]
    assert open_checkpoint(tmp_path / "e").table("emb").schema.extras == ()


@pytest.mark.parametrize("scores", [np.arange(39, dtype=np.uint64), np.arange(40, dtype=np.int64)])
def test_scores_that_do_not_fit_the_keys(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path, scores: np.ndarray
) -> None:
    tensors = table_tensors(make_sample("emb", rows=40))
    for number, column in enumerate(("emb-scores", "emb-orders")):
        with pytest.raises(CorruptFileError, match=rf"'{column}'.*expected uint64 \[40\]"):
            open_checkpoint(save_plain(tmp_path / str(number), tensors | {column: scores}))


def test_damaged_scores_are_found(save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path) -> None:
    scores = np.arange(40, dtype=np.uint64) + 2**40
    path = save_plain(tmp_path / "a", table_tensors(make_sample("emb", rows=40)) | {"emb-scores": scores})
    data = Path(f"{path}.data-00000-of-00001")
    data.write_bytes(data.read_bytes().replace(scores[7].tobytes(), scores[8].tobytes(), 1))
    assert "emb-scores" in str(verify(str(path)).findings)


def test_sample_kept_in_the_repository(sample_path: Path, sample_values: dict[str, dict[int, np.ndarray]]) -> None:
    checkpoint = open_checkpoint(sample_path)
    assert checkpoint.dialect == "tfplugin"
    assert [variable.name for variable in checkpoint.variables] == ["dense/kernel", "global_step"]
    for name, rows in sample_values.items():
        got = {}
        for chunk in checkpoint.table(name).chunks():
            assert chunk.values is not None
            got.update(zip(chunk.keys.tolist(), chunk.values.astype(np.float32), strict=True))
        assert got.keys() == rows.keys()
        assert all(np.array_equal(got[key], rows[key]) for key in rows)
    assert checkpoint.table("ads/emb").schema.parts == 3


def test_needs_neither_tensorflow_nor_protobuf(sample_path: Path) -> None:
    program = (
        "import sys; from kvtools.dialects.detect import open_checkpoint;"
        f"t = open_checkpoint({str(sample_path)!r}).table('ads/emb'); list(t.chunks());"
        "bad = {'tensorflow', 'google.protobuf', 'tfplugin'} & set(sys.modules); sys.exit(str(bad) if bad"
        " else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=sample_path)


def test_plain_checkpoint_has_variables_only(save_plain: Save, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_plain(tmp_path / "a", {"w": np.zeros((2, 3), np.float16), "s": "text"}))
    assert (checkpoint.dialect, dict(checkpoint.tables)) == ("tensorflow", {})
    assert [(v.name, v.dtype, v.shape) for v in checkpoint.variables] == [
        ("s", "string", ()),
        ("w", "float16", (2, 3)),
    ]
    assert checkpoint.variables[1].bytes == 12


def test_unknown_table_names_those_there(sample_path: Path) -> None:
    with pytest.raises(UnknownTableError, match="'ads/emb', 'empty_emb', 'user_emb'"):
        open_checkpoint(sample_path).table("ads")


class TestRefused:
    """Every way in which the tensors of a table can fail to make sense."""

    @pytest.fixture
    def open_with(
        self, save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
    ) -> Callable[..., Checkpoint]:
        def open_with(
            change: Callable[[dict[str, Any]], None] = lambda _: None,
            parts: int = 1,
            meta: dict[str, Any] | None = None,
        ) -> Checkpoint:
            tensors = table_tensors(make_sample("emb", rows=9), parts)
            for name in tensors:
                if meta and name.endswith("-kvmeta"):
                    tensors[name] = json.dumps({**json.loads(tensors[name]), **meta})
            change(tensors)
            return open_checkpoint(save_plain(tmp_path / "a", tensors))

        return open_with

    def test_newer_layout(self, open_with: Callable[..., Checkpoint]) -> None:
        with pytest.raises(BadInputError, match=r"'emb-kvmeta'.*got layout 2, expected at most 1; update kvtools"):
            open_with(meta={"layout": 2})

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, "\xff", '{"layout": 1'])
    def test_malformed_json(self, open_with: Callable[..., Checkpoint], text: str) -> None:
        with pytest.raises(CorruptFileError, match=r"'emb-kvmeta'.*malformed JSON"):
            open_with(lambda tensors: tensors.update({"emb-kvmeta": text.encode("latin-1")}))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("layout", None),
            ("layout", "1"),
            ("layout", 0),
            ("layout", True),
            ("name", ""),
            ("name", 5),
            ("part", 1),
            ("part", -1),
            ("parts", 0),
            ("parts", "2"),
            ("dim", 0),
            ("dim", 4.0),
            ("dim", None),
            ("key_dtype", "string"),
            ("key_dtype", ["int64"]),
            ("value_dtype", "complex64"),
            ("slots", {}),
            ("slots", [{"name": "m", "width": 0}]),
            ("slots", [{"width": 4}]),
            ("slots", [{"name": "m"}, {"name": "m"}]),
            ("slots", ["m"]),
        ],
    )
    def test_senseless_field(self, open_with: Callable[..., Checkpoint], field: str, value: Any) -> None:
        with pytest.raises(CorruptFileError, match=f"'emb-kvmeta'.*{field}"):
            open_with(meta={field: value})

    def test_unknown_fields_are_ignored(self, open_with: Callable[..., Checkpoint]) -> None:
        assert "emb" in open_with(meta={"admission": {"min_freq": 3}}).tables

    @pytest.mark.parametrize("suffix", ["values", "freqs", "versions", "slot-Adam.m"])
    def test_row_counts_that_disagree(self, open_with: Callable[..., Checkpoint], suffix: str) -> None:
        def shorten(tensors: dict[str, Any]) -> None:
            tensors[f"emb-{suffix}"] = tensors[f"emb-{suffix}"][:-1]

        with pytest.raises(CorruptFileError, match=rf"'emb-{suffix}' has shape \[8.*expected \[9"):
            open_with(shorten)

    @pytest.mark.parametrize("suffix", ["keys", "values", "slot-Adam.v"])
    def test_missing_column(self, open_with: Callable[..., Checkpoint], suffix: str) -> None:
        with pytest.raises(BadInputError, match=f"'emb-{suffix}'.*no such tensor"):
            open_with(lambda tensors: tensors.pop(f"emb-{suffix}"))

    @pytest.mark.parametrize(
        ("suffix", "array"),
        [
            ("keys", np.zeros(9, np.int32)),
            ("keys", np.zeros((9, 1), np.int64)),
            ("values", np.zeros((9, 5), np.float32)),
            ("values", np.zeros((9, 4), np.float64)),
            ("values", np.zeros(9, np.float32)),
            ("freqs", np.zeros(9, np.int64)),
            ("slot-Adam.m", np.zeros((9, 4), np.int32)),
        ],
    )
    def test_wrong_type_or_shape(self, open_with: Callable[..., Checkpoint], suffix: str, array: np.ndarray) -> None:
        with pytest.raises(CorruptFileError, match=f"table 'emb'.*'emb-{suffix}'"):
            open_with(lambda tensors: tensors.update({f"emb-{suffix}": array}))

    def test_missing_part(self, open_with: Callable[..., Checkpoint]) -> None:
        def drop(tensors: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.startswith("emb/part_1-")]:
                del tensors[name]

        with pytest.raises(BadInputError, match=r"got parts \[0, 2\] of 3, part 1 is missing"):
            open_with(drop, parts=3)

    def test_parts_that_disagree(self, open_with: Callable[..., Checkpoint]) -> None:
        def change(tensors: dict[str, Any]) -> None:
            record = json.loads(tensors["emb/part_1-kvmeta"])
            tensors["emb/part_1-kvmeta"] = json.dumps({**record, "slots": []})

        with pytest.raises(CorruptFileError, match="part 1 has slots"):
            open_with(change, parts=2)

    def test_flipped_bit_in_any_column(self, open_with: Callable[..., Checkpoint], tmp_path: Path) -> None:
        from kvtools.dialects.bundle import Bundle

        open_with()
        bundle = Bundle(tmp_path / "a")
        data = bundle.data_path(0)
        whole = data.read_bytes()
        for name, entry in bundle.entries.items():
            if entry.dtype == 7:
                continue
            damaged = bytearray(whole)
            damaged[entry.offset + entry.size - 1] ^= 128
            data.write_bytes(bytes(damaged))
            with pytest.raises(CorruptFileError, match=f"'{name}' from .*checksum mismatch"):
                list(open_checkpoint(tmp_path / "a").table("emb").chunks(rows=2))
