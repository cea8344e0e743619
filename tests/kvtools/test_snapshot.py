"""Snapshots against dicts: keys and values of every type, bags, duplicates, what happens to the file under a reader."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtools
from kvtools import _snapshot
from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.schema import numpy_dtype
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CheckFailedError, CorruptFileError, OutputError, UnknownTableError, UsageError
from kvtools.migrate import write_tables
from kvtools.quantized_rows import decode, encode
from kvtools.snapshot import Snapshot, file_errors

KEY_DTYPES = ("int64", "int32", "uint64")
VALUE_DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64")
SMALL_MEMORY = 1 << 16
"""So little that a few thousand rows go through the disk."""


def some_keys(n: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Distinct keys, the extreme ones first."""
    limits = np.iinfo(dtype)
    drawn = np.random.default_rng(seed).integers(limits.min, limits.max, n, dtype=dtype, endpoint=True)
    return np.fromiter(dict.fromkeys([limits.min, limits.max, 0, 1, limits.max - 1, *drawn.tolist()]), dtype)[:n]


def some_values(n: int, dim: int, dtype: str, seed: int = 1) -> np.ndarray:
    """Any bits, so NaN and infinities are among the floats."""
    kind = numpy_dtype(dtype)
    return np.random.default_rng(seed).integers(0, 256, (n, dim * kind.itemsize), np.uint8).view(kind)


def write(path: Path, *tables: ArrayTable, **options: Any) -> Any:
    return write_tables(tables, path, "snapshot", options=WriteOptions(**options))


@pytest.mark.parametrize("memory", [1 << 30, SMALL_MEMORY])
@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_keys_of_every_type(tmp_path: Path, dtype: str, memory: int) -> None:
    keys = some_keys(3000, dtype)
    values = some_values(len(keys), 7, "float32")
    write(tmp_path / "a.kvsnap", ArrayTable("emb", keys, values), memory=memory)
    table = Snapshot(tmp_path / "a.kvsnap").table("emb")
    rows = dict(zip(keys.tolist(), values, strict=True))
    asked = np.concatenate([keys[::-1], some_keys(500, dtype, seed=9), keys[:3]])
    got, found = table.lookup(asked)
    assert (table.rows, got.shape, got.dtype) == (len(keys), (len(asked), 7), np.float32)
    assert found.tolist() == [key in rows for key in asked.tolist()]
    expected = np.stack([rows.get(key, np.zeros(7, np.float32)) for key in asked.tolist()])
    assert got.tobytes() == expected.tobytes()
    assert np.array_equal(table.find(asked) >= 0, found)


@pytest.mark.parametrize("memory", [1 << 30, SMALL_MEMORY])
@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_values_of_every_type_bit_for_bit(tmp_path: Path, dtype: str, memory: int) -> None:
    for dim in (1, 3, 16, 129):
        keys = some_keys(900, "int64")
        values = some_values(len(keys), dim, dtype)
        path = tmp_path / f"{dim}.kvsnap"
        write(path, ArrayTable("emb", keys, values), memory=memory)
        snapshot = Snapshot(path)
        got, found = snapshot.table("emb").lookup(keys)
        assert found.all() and got.dtype == numpy_dtype(dtype) and got.tobytes() == values.tobytes()
        as_floats, _ = snapshot.table("emb").native.lookup(keys, as_float32=True)
        with np.errstate(all="ignore"):
            assert np.array_equal(as_floats, values.astype(np.float32), equal_nan=True)
        assert snapshot.verify()


@pytest.mark.parametrize("rows", [0, 1, 2, 9])
def test_few_rows(tmp_path: Path, rows: int) -> None:
    keys = some_keys(max(rows, 5), "int64")[:rows]
    write(tmp_path / "a.kvsnap", ArrayTable("emb", keys, some_values(rows, 2, "float32")))
    snapshot = Snapshot(tmp_path / "a.kvsnap")
    _, found = snapshot.table("emb").lookup(np.array([*keys.tolist(), 77, -77]))
    assert found.tolist() == [True] * rows + [False] * 2
    assert snapshot.table("emb").lookup(np.empty(0, np.int64))[0].shape == (0, 2)
    assert snapshot.verify() and snapshot.populate() and snapshot.warm
    (table,) = open_checkpoint(tmp_path / "a.kvsnap").select([])
    assert sorted(table.all_keys().tolist()) == sorted(keys.tolist())


@pytest.mark.parametrize("memory", [1 << 30, SMALL_MEMORY])
def test_of_a_key_that_is_there_twice_the_last_row_counts(tmp_path: Path, memory: int) -> None:
    keys = np.random.default_rng(0).integers(-900, 900, 5000)
    values = np.arange(20_000, dtype=np.float32).reshape(5000, 4)
    account = write(tmp_path / "a.kvsnap", ArrayTable("emb", keys, values), memory=memory)
    last = dict(zip(keys.tolist(), values, strict=True))
    snapshot = Snapshot(tmp_path / "a.kvsnap")
    got, found = snapshot.table("emb").lookup(np.array(list(last)))
    assert found.all() and np.array_equal(got, np.stack(list(last.values())))
    assert snapshot.table("emb").native.duplicates == 5000 - len(last)
    assert (account.tables[0].rows_read, account.tables[0].rows_written) == (5000, len(last))
    assert f"{5000 - len(last)} rows: a later row has their key" in account.tables[0].losses[0]
    with pytest.raises(CheckFailedError, match="a later row has their key"):
        write_tables([ArrayTable("emb", keys, values)], tmp_path / "b.kvsnap", "snapshot", strict=True)
    table = ArrayTable("emb", keys, values, part_rows=(3000, 2000))
    checked = write_tables([table], tmp_path / "c.kvsnap", "snapshot", verify=True)
    assert "compared with the source, by key" in checked.tables[0].checks[-1]


@pytest.mark.parametrize("memory", [1 << 30, SMALL_MEMORY])
def test_what_was_written_is_read_back(tmp_path: Path, memory: int) -> None:
    keys = some_keys(4000, "uint64")
    table = ArrayTable(
        "ads/größe",
        keys,
        some_values(len(keys), 5, "float16"),
        slots={"Adam.m": np.zeros((len(keys), 5), np.float32)},
        freqs=np.arange(len(keys), dtype=np.uint32),
        versions=np.arange(len(keys), dtype=np.int64) * -7,
        version_unit="steps",
        extras={"default_row": np.arange(5, dtype=np.float16)},
        metadata={"initializer": {"kind": "constant", "value": 0.5}},
    )
    account = write(tmp_path / "a.kvsnap", table, ArrayTable("b", keys[:1], np.zeros((1, 1), np.int8)), memory=memory)
    assert account.tables[0].losses == ("optimizer slots Adam.m: the dialect has none",)
    read = open_checkpoint(tmp_path / "a.kvsnap")
    assert (read.dialect, list(read.tables)) == ("snapshot", ["ads/größe", "b"])
    schema = read.table("ads/größe").schema
    assert (schema.freq_dtype, schema.version_dtype, schema.version_unit) == ("uint32", "int64", "steps")
    assert schema.metadata == {"initializer": {"kind": "constant", "value": 0.5}}
    assert read.table("ads/größe").extra("default_row").tolist() == [0, 1, 2, 3, 4]
    chunk = read.table("ads/größe").to_numpy()
    order = np.argsort(chunk.keys)
    expected = table.to_numpy().take(np.argsort(keys))
    for column in ("keys", "values", "freqs", "versions"):
        assert getattr(chunk, column)[order].tobytes() == getattr(expected, column).tobytes()
    taken = read.table("ads/größe").take(order[:9])
    assert np.array_equal(taken.keys, expected.keys[:9])


def test_bags_are_pooled_as_numpy_would(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    keys = some_keys(400, "int64")
    splits = np.sort(np.concatenate([[0, 0, 999, 999], rng.integers(0, 999, 60)])).astype(np.int64)
    asked = rng.choice(np.concatenate([keys, some_keys(100, "int64", seed=8)]), 999)
    weights = rng.choice(np.float32([0, 0.5, -1, 2]), 999)
    missing = rng.normal(size=9).astype(np.float32)
    for dtype in VALUE_DTYPES:
        values = (rng.normal(size=(400, 9)) * 20).astype(numpy_dtype(dtype))
        write(tmp_path / f"{dtype}.kvsnap", ArrayTable("emb", keys, values))
        table = Snapshot(tmp_path / f"{dtype}.kvsnap").table("emb")
        wide = np.float64 if dtype == "float64" else np.float32
        rows = dict(zip(keys.tolist(), values.astype(wide), strict=True))
        for combiner, weight, row in [("sum", None, None), ("mean", weights, missing), ("sqrtn", weights, None)]:
            absent = np.zeros(9, wide) if row is None else row.astype(wide)
            expected = np.zeros((len(splits) - 1, 9), np.float32)
            for bag, (first, last) in enumerate(itertools.pairwise(splits.tolist())):
                total, divisor = np.zeros(9, wide), wide(0)
                for i in range(first, last):
                    w = wide(1 if weight is None else weight[i])
                    total = total + w * rows.get(int(asked[i]), absent)
                    divisor = divisor + (w * w if combiner == "sqrtn" else w)
                divisor = wide(1) if combiner == "sum" else divisor if combiner == "mean" else np.sqrt(divisor)
                expected[bag] = 0 if divisor == 0 else (total / divisor).astype(np.float32)
            got = table.pool(asked, splits, combiner, weights=weight, missing=row)
            assert np.array_equal(got, expected), (dtype, combiner)
    for wrong in ([0, 5, 3, 999], [1, 999]):
        with pytest.raises(ValueError, match="rise from 0"):
            table.pool(asked, np.array(wrong, np.int64))
    with pytest.raises(ValueError, match="999 keys"):
        table.pool(asked, np.array([0, 998], np.int64))


def test_a_missing_key_gets_what_the_caller_says(tmp_path: Path) -> None:
    write(tmp_path / "a.kvsnap", ArrayTable("emb", np.array([5]), np.float32([[1, 2]])))
    table = Snapshot(tmp_path / "a.kvsnap").table("emb")
    got, found = table.lookup(np.array([[6, 5]]), missing=np.float32([8, 9]))
    assert (got.tolist(), found.tolist()) == ([[[8, 9], [1, 2]]], [[False, True]])
    with pytest.raises(TypeError, match="int64"):
        table.lookup(np.array([5.0]))
    with pytest.raises(UnknownTableError, match="it has emb"):
        Snapshot(tmp_path / "a.kvsnap").table("other")


@pytest.mark.parametrize(("dtype", "row_bytes", "steps"), [("int8", 39, 255), ("int4", 23, 15)])
def test_quantized_rows_are_near_and_say_so(tmp_path: Path, dtype: str, row_bytes: int, steps: int) -> None:
    keys = some_keys(500, "int64")
    values = np.random.default_rng(0).normal(size=(500, 33)).astype(np.float32)
    values[3] = 0
    values[4] = np.float32(1e-45)
    values[5] = np.float32(3e38)
    account = write(tmp_path / "a.kvsnap", ArrayTable("emb", keys, values), compression=dtype)
    assert f"rows are {dtype} with an offset and a scale, off by up to 1/{2 * steps}" in account.tables[0].losses[0]
    table = Snapshot(tmp_path / "a.kvsnap").table("emb")
    got, found = table.lookup(keys)
    assert found.all() and got.dtype == np.float32 and table.native.row_bytes == row_bytes
    assert not got[3].any() and np.array_equal(got[5], values[5])
    width = np.ptp(values.astype(np.float64), axis=1, keepdims=True)
    assert (np.abs(got - values) <= width / steps / 2 * 1.008 + np.abs(values) * 2**-23 + 1e-44).all()
    reader = open_checkpoint(tmp_path / "a.kvsnap").table("emb")
    assert reader.schema.rows_as == dtype and reader.schema.value_dtype == "float32"
    assert np.array_equal(table.native.lookup(keys)[0], reader.take(table.find(keys)).values)
    read = reader.to_numpy()
    assert np.array_equal(read.values, table.lookup(read.keys)[0])
    # The rows are floats to whoever copies them, and written as such.
    write_tables([reader], tmp_path / "again.kvsnap", "snapshot", options=WriteOptions())
    again = Snapshot(tmp_path / "again.kvsnap").table("emb")
    assert not again.native.quantized and np.array_equal(again.lookup(keys)[0], got)
    values[7, 2] = np.nan
    with pytest.raises(BadInputError, match=f"as {dtype}: the row of key {keys[7]} has NaN or infinity, or numbers"):
        write(tmp_path / "b.kvsnap", ArrayTable("emb", keys, values), compression=dtype)
    with pytest.raises(UsageError, match="float16, expected float32"):
        write(tmp_path / "b.kvsnap", ArrayTable("emb", keys, np.ones((500, 2), np.float16)), compression=dtype)
    with pytest.raises(UsageError, match="--verify, which compares every number"):
        table = ArrayTable("emb", keys[:9], np.ones((9, 2), np.float32))
        options = WriteOptions(compression=dtype)
        write_tables([table], tmp_path / "b.kvsnap", "snapshot", options=options, verify=True)
    assert not (tmp_path / "b.kvsnap").exists()


@pytest.mark.parametrize("memory", [1 << 30, SMALL_MEMORY])
def test_tables_may_be_quantized_one_by_one(tmp_path: Path, memory: int) -> None:
    keys = some_keys(3000, "int64")
    values = np.random.default_rng(0).normal(size=(3000, 9)).astype(np.float32)
    tables = [ArrayTable(name, keys, values) for name in ("a", "b", "c")]
    write(tmp_path / "a.kvsnap", *tables, memory=memory, rows_as={"a": "int8", "c": "int4"})
    snapshot = Snapshot(tmp_path / "a.kvsnap")
    for name, dtype in (("a", "int8"), ("b", None), ("c", "int4")):
        expected = values if dtype is None else decode(encode(values, dtype), dtype, 9)
        assert snapshot.table(name).lookup(keys)[0].tobytes() == expected.tobytes()


def test_the_same_rows_have_the_same_fingerprint(tmp_path: Path) -> None:
    keys, values = some_keys(50, "int64"), some_values(50, 3, "float32")
    changed = values.copy()
    changed.view(np.uint8)[49, 0] ^= 1
    orders = {"a": slice(None), "b": slice(None, None, -1)}
    for name, order in orders.items():
        write(tmp_path / f"{name}.kvsnap", ArrayTable("emb", keys[order], values[order]))
    write(tmp_path / "c.kvsnap", ArrayTable("emb", keys, changed))
    a, b, c = (Snapshot(tmp_path / f"{name}.kvsnap").fingerprint for name in "abc")
    assert len(a) == 32 and a == b != c


def test_a_file_renamed_over_it_or_deleted_changes_nothing(tmp_path: Path) -> None:
    path, keys = tmp_path / "a.kvsnap", some_keys(5000, "int64")
    write(path, ArrayTable("emb", keys, np.ones((5000, 8), np.float32)))
    table = Snapshot(path).table("emb")
    write(path, ArrayTable("emb", keys, np.full((5000, 8), 2, np.float32)), force=True)
    assert (table.lookup(keys)[0] == 1).all() and (Snapshot(path).table("emb").lookup(keys)[0] == 2).all()
    path.unlink()
    assert (table.lookup(keys)[0] == 1).all()


def test_touching_it_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    write(path, ArrayTable("emb", np.array([5]), np.float32([[1, 2]])))
    table = Snapshot(path).table("emb")
    os.utime(path, (1, 1))
    assert table.lookup(np.array([5]))[1].all()


def test_a_file_copied_over_it_is_an_error_and_never_other_rows(tmp_path: Path) -> None:
    path, keys = tmp_path / "a.kvsnap", some_keys(5000, "int64")
    write(path, ArrayTable("emb", keys, np.ones((5000, 8), np.float32)))
    write(tmp_path / "b.kvsnap", ArrayTable("emb", keys, np.full((5000, 8), 2, np.float32)))
    table = Snapshot(path).table("emb")
    path.write_bytes((tmp_path / "b.kvsnap").read_bytes())
    for use in (lambda: table.lookup(keys), lambda: table.find(keys), lambda: table.pool(keys, np.array([0, 5000]))):
        with pytest.raises(BadInputError, match="cut or written over since it was opened"):
            use()


def _written_in_place(path: Path, keep: str) -> None:
    """Damage the rows of a snapshot without a change of its header, size or end."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        file.write(bytes(4096))
    if keep == "times":  # as `cp -p` and `rsync -t --inplace` do
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("keep", ["nothing", "times"])
def test_bytes_written_into_it_are_an_error_and_never_wrong_rows(tmp_path: Path, keep: str) -> None:
    path, keys = tmp_path / "a.kvsnap", some_keys(50_000, "int64")
    values = np.arange(50_000 * 16, dtype=np.float32).reshape(-1, 16)
    write(path, ArrayTable("emb", keys, values))
    sound = path.read_bytes()
    snapshot = Snapshot(path)
    table = snapshot.table("emb")
    identity = snapshot.native.identity
    assert np.array_equal(table.lookup(keys)[0], values) and not snapshot.native.verifies_on_use
    _written_in_place(path, keep)
    uses: list[Any] = [
        lambda: table.lookup(keys)[0],
        lambda: table.pool(keys, np.arange(len(keys) + 1)),
        lambda: table.native.take(table.find(keys))[1],
    ]
    if keep == "nothing":
        with pytest.raises(BadInputError, match="and may be being written"):
            uses[0]()
        time.sleep(0.06)
    for use in uses:
        with pytest.raises(CorruptFileError, match="its rows from byte"), file_errors():
            use()
    with pytest.raises(CorruptFileError):
        snapshot.verify()
    assert snapshot.native.verifies_on_use and snapshot.native.identity != identity
    with path.open("r+b") as file:  # healed in its place
        file.write(sound)
    assert snapshot.verify() and not snapshot.native.verifies_on_use
    for use in uses:
        assert np.array_equal(use(), values)


@pytest.mark.parametrize("change", ["touch", "chmod", "rename", "replace", "link", "unlink"])
def test_what_changes_no_bytes_changes_no_answer(tmp_path: Path, change: str) -> None:
    path, keys = tmp_path / "a.kvsnap", np.array([5, 7])
    write(path, ArrayTable("emb", keys, np.float32([[1, 2], [3, 4]])))
    snapshot = Snapshot(path)
    other = tmp_path / "b.kvsnap"
    other.write_bytes(path.read_bytes())
    changes: dict[str, Any] = {
        "touch": path.touch,
        "chmod": lambda: path.chmod(0o600),
        "rename": lambda: path.rename(tmp_path / "c"),
        "replace": lambda: other.replace(path),
        "link": lambda: os.link(path, tmp_path / "c"),
        "unlink": path.unlink,
    }
    changes[change]()
    if change == "touch":  # which cannot be told from writing
        with pytest.raises(BadInputError, match="it was written over or touched just now"):
            snapshot.table("emb").lookup(keys)
        time.sleep(0.06)
    values, found = snapshot.table("emb").lookup(keys)
    assert found.all() and values.tolist() == [[1, 2], [3, 4]]
    # What has lost or won a name was not written to.
    assert snapshot.native.verifies_on_use == (change in ("touch", "chmod", "rename"))
    assert snapshot.verify() and not snapshot.native.verifies_on_use


def test_a_file_that_is_cut_is_an_error_and_ends_no_process(tmp_path: Path) -> None:
    # In a process of its own: where this fails, SIGBUS ends it. Its other faults still end it, with a traceback.
    path, keys = tmp_path / "a.kvsnap", some_keys(50_000, "int64")
    write(path, ArrayTable("emb", keys, np.ones((50_000, 16), np.float32)))
    program = """
        import faulthandler, mmap, os, sys
        import numpy as np
        from kvtools.errors import BadInputError
        from kvtools.snapshot import Snapshot, file_errors
        faulthandler.enable()
        path = sys.argv[1]
        keys = np.load(path + ".npy")
        snapshot = Snapshot(path)
        table = snapshot.table("emb")
        assert table.lookup(keys[:10])[1].all()
        other = mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
        size = os.path.getsize(path)
        os.truncate(path, 8192)
        for use in (lambda: table.lookup(keys), snapshot.populate, snapshot.verify):
            try:
                use()
            except BadInputError as error:
                assert "cut or written over" in str(error), error
            else:
                raise AssertionError("no error")
        os.truncate(path, size)
        try:
            table.lookup(keys)
        except BadInputError:
            print("survived", flush=True)
        os.truncate(path, 0)
        other[size - 1]
    """
    np.save(f"{path}.npy", keys)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.stdout == "survived\n", done.stderr
    assert done.returncode < 0 and "Bus error" in done.stderr


def test_populate_and_verify_can_be_stopped(tmp_path: Path) -> None:
    write(tmp_path / "a.kvsnap", ArrayTable("emb", np.arange(9), np.ones((9, 3), np.float32)))
    snapshot = Snapshot(tmp_path / "a.kvsnap")
    assert not snapshot.populate(go_on=lambda done, total: False) and not snapshot.warm
    seen: list[tuple[int, int]] = []
    assert snapshot.populate(go_on=lambda done, total: seen.append((done, total)) or True) and snapshot.warm
    assert seen and seen[-1][0] == seen[-1][1]
    assert not snapshot.verify(go_on=lambda done, total: False)


def test_whoever_uses_a_version_last_does_not_wait_until_its_memory_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    write(path, ArrayTable("emb", np.arange(300_000), np.ones((300_000, 16), np.float32)))

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # another thread has its turn later, mostly
    try:
        for _ in range(100):
            snapshot = Snapshot(path)
            assert snapshot.populate(background=True) and snapshot.verify(background=True)
            del snapshot
            if mapped():
                break
        else:
            pytest.fail("it was unmapped by the thread that let it go")
    finally:
        os.sched_setaffinity(0, allowed)
    last = time.monotonic() + 60
    while mapped():
        assert time.monotonic() < last, "it stays mapped for ever"
        time.sleep(0.001)


def test_lookups_from_many_threads(tmp_path: Path) -> None:
    keys = some_keys(20_000, "int64")
    write(tmp_path / "a.kvsnap", ArrayTable("emb", keys, np.arange(20_000, dtype=np.float32)[:, None]))
    table, wrong = Snapshot(tmp_path / "a.kvsnap").table("emb"), []

    def look(seed: int) -> None:
        rows = np.random.default_rng(seed).integers(0, 20_000, 3000)
        for _ in range(20):
            got, found = table.lookup(keys[rows])
            if not found.all() or not np.array_equal(got[:, 0], rows):
                wrong.append(seed)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_disk_that_is_full_leaves_the_old_file_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.kvsnap"
    write(path, ArrayTable("emb", np.array([5]), np.float32([[1, 2]])))
    program = f"""
        import resource, signal
        import numpy as np
        from kvtools.array_table import ArrayTable
        from kvtools.dialects.writing import WriteOptions
        from kvtools.migrate import write_tables
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        table = ArrayTable("emb", np.arange(50_000), np.ones((50_000, 2), np.float32))
        write_tables([table], {str(path)!r}, "snapshot", options=WriteOptions(force=True))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert f"OutputError: writing '{path}': File too large; nothing was changed there" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["a.kvsnap"]
    assert Snapshot(path).table("emb").lookup(np.array([5]))[1].all()


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["migrate", "export"])
def test_a_command_on_a_disk_that_is_full_leaves_nothing(tmp_path: Path, sample_path: Path, command: str) -> None:
    program = (
        "import resource, sys; from kvtools.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    out = tmp_path / "out" / "a.kvsnap"
    out.parent.mkdir()
    source = str(sample_path / "model.ckpt-7")
    arguments = {"migrate": ["migrate", source, str(out)], "export": ["export", source, "--snapshot", str(out)]}
    for options in ([], ["--force"]):
        before = {file.name: file.read_bytes() for file in out.parent.iterdir()}
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments[command], *options], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
        assert f"writing '{out}': File too large; nothing was changed there, make room" in done.stderr
        assert {file.name: file.read_bytes() for file in out.parent.iterdir()} == before
        out.write_bytes(b"what was there before")


def test_a_folder_that_is_not_there_or_a_file_that_is(tmp_path: Path) -> None:
    table = ArrayTable("emb", np.array([5]), np.float32([[1, 2]]))
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"'.*file' is no folder"):
        write(tmp_path / "file" / "a.kvsnap", table)
    write(tmp_path / "new" / "folder" / "a.kvsnap", table)
    write(tmp_path / "a.kvsnap", table)
    with pytest.raises(OutputError, match="exists"):
        write(tmp_path / "a.kvsnap", table)
    with pytest.raises(UsageError, match="expected none, int8 or int4"):
        write(tmp_path / "b.kvsnap", table, compression="gzip")


def test_opening_what_is_none(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="No such file"):
        Snapshot(tmp_path / "no.kvsnap")
    with pytest.raises(BadInputError, match="Is a directory"):
        Snapshot(tmp_path)
    with pytest.raises(BadInputError, match="names of snapshots are UTF-8"):
        Snapshot(tmp_path / os.fsdecode(b"caf\xe9.kvsnap"))
    (tmp_path / "a.kvsnap").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(CorruptFileError, match="does not begin as a snapshot does"):
        Snapshot(tmp_path / "a.kvsnap")


def test_the_writer_refuses_rows_that_do_not_add_up(tmp_path: Path) -> None:
    writer = _snapshot.Writer(str(tmp_path / "a"), 1 << 20)
    writer.begin_table("emb", key_dtype="int64", value_dtype="float32", dim=2, rows=3)
    writer.add_keys(np.array([1, 2]))
    with pytest.raises(ValueError, match="got 2 keys, expected 3"):
        writer.sort_keys()
    writer.add_keys(np.array([3]))
    with pytest.raises(ValueError, match="more keys came than its 3 rows"):
        writer.add_keys(np.array([4]))
    writer.sort_keys()
    with pytest.raises(ValueError, match="it has not"):
        writer.add_rows(2, np.ones((2, 2), np.float32))
    writer.add_rows(0, np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match="got 2 rows, expected 3"):
        writer.end_table()
    writer.abort()
    with pytest.raises(ValueError, match="closed"):
        writer.end_table()


def test_kvtools_open_reads_one(tmp_path: Path) -> None:
    write(tmp_path / "a.kvsnap", ArrayTable("emb", np.array([5]), np.float32([[1, 2]])))
    assert kvtools.open(tmp_path / "a.kvsnap").table("emb").take(np.array([0])).values.tolist() == [[1, 2]]


ROWS_OF_SEVERAL_MEBIBYTES = 300_000


@pytest.fixture(scope="module")
def several_mebibytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, np.ndarray]:
    """A snapshot whose keys, rows and frequencies are several mebibytes each, and its keys; a row is twice its key."""
    keys = np.arange(ROWS_OF_SEVERAL_MEBIBYTES)
    rows = np.repeat(2 * keys[:, None], 3, 1).astype(np.float32)
    table = ArrayTable("emb", keys, rows, freqs=keys, extras={"default_row": np.float32([7, 7, 7])})
    path = tmp_path_factory.mktemp("several") / "a.kvsnap"
    write(path, table)
    return path.read_bytes(), keys


def _flipped(content: bytes, section: int, place: int) -> bytes:
    """Flip a bit of a section of the first table, `place` bytes in."""
    description = int.from_bytes(content[24:32], "little")
    offset = int.from_bytes(content[description + 16 + 40 + 16 * section :][:8], "little") + place
    return content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :]


@pytest.mark.parametrize(("section", "place"), [(0, 100), (1, 1_500_000), (2, 8), (2, 2_100_000), (3, 1_100_000)])
def test_what_is_read_is_verified_before_its_first_use(
    several_mebibytes: tuple[bytes, np.ndarray], tmp_path: Path, section: int, place: int
) -> None:
    content, keys = several_mebibytes
    (tmp_path / "a.kvsnap").write_bytes(_flipped(content, section, place))
    named = ["directory", "keys", "rows", "frequencies"][section]

    def fresh() -> Snapshot:
        snapshot = Snapshot(tmp_path / "a.kvsnap")
        snapshot.verify_on_use()
        return snapshot

    uses: list[Any] = [
        lambda table, some: table.lookup(some)[0][:, 0] / 2,
        lambda table, some: table.pool(some, np.arange(len(some) + 1))[:, 0] / 2,
        lambda table, some: table.native.take(table.find(some), freqs=section == 3)[2 if section == 3 else 0],
    ]
    refused = 0
    for use in uses[2:] if section == 3 else uses:
        snapshot = fresh()
        for some in np.array_split(keys[::100], 300):
            try:
                with file_errors():
                    assert np.array_equal(use(snapshot.table("emb"), some), some), "what was written, or an error"
            except CorruptFileError as error:
                assert f"table 'emb', its {named} from byte {place >> 20 << 20} on" in str(error)
                refused += 1
    assert refused
    with pytest.raises(CorruptFileError, match=named), file_errors():
        fresh().table("emb").native.read(0, len(keys))
    snapshot = fresh()
    with pytest.raises(CorruptFileError, match=named):
        snapshot.verify()
    assert snapshot.native.verifies_on_use, "damaged: it is not over"


def test_verifying_on_use_ends_when_all_is_verified(
    several_mebibytes: tuple[bytes, np.ndarray], tmp_path: Path
) -> None:
    content, keys = several_mebibytes
    (tmp_path / "a.kvsnap").write_bytes(content)
    snapshot = Snapshot(tmp_path / "a.kvsnap")
    snapshot.verify_on_use()
    assert not snapshot.verify(go_on=lambda done, total: False) and snapshot.native.verifies_on_use
    assert np.array_equal(snapshot.table("emb").lookup(keys)[0][:, 0], 2 * keys)
    snapshot.verify()
    assert not snapshot.native.verifies_on_use
    snapshot.verify_on_use()
    assert not snapshot.native.trust("another") and snapshot.native.verifies_on_use
    assert snapshot.native.trust(snapshot.native.identity)
    assert not snapshot.native.verifies_on_use


def test_a_default_row_is_verified_at_once(several_mebibytes: tuple[bytes, np.ndarray], tmp_path: Path) -> None:
    (tmp_path / "a.kvsnap").write_bytes(_flipped(several_mebibytes[0], 5, 0))
    with pytest.raises(CorruptFileError, match="its default row from byte 0"):
        Snapshot(tmp_path / "a.kvsnap").verify_on_use()


def test_damage_met_on_use_ends_a_verification_that_is_running(
    several_mebibytes: tuple[bytes, np.ndarray], tmp_path: Path
) -> None:
    content, keys = several_mebibytes
    tables = [ArrayTable(name, keys, np.ones((len(keys), 40), np.float32)) for name in ("a", "b")]
    write(tmp_path / "a.kvsnap", *tables)
    content = (tmp_path / "a.kvsnap").read_bytes()
    (tmp_path / "a.kvsnap").write_bytes(content[:-300_000] + b"x" + content[-299_999:])
    snapshot = Snapshot(tmp_path / "a.kvsnap")
    snapshot.verify_on_use()
    places: list[int] = []

    def meet(done: int, total: int) -> bool:
        places.append(done)
        if len(places) == 1:
            with pytest.raises(CorruptFileError):
                snapshot.table("b").lookup(keys)
        return True

    with pytest.raises(CorruptFileError, match="table 'b', its rows"):
        snapshot.verify(threads=1, go_on=meet)
    assert places[1:] == [], "what was met is thrown, not looked for"


def test_keys_of_any_integer_type_are_taken(tmp_path: Path) -> None:
    keys, values = np.array([5, -7, 9], np.int32), some_values(3, 2, "float32")
    write(tmp_path / "a.kvsnap", ArrayTable("emb", keys, values))
    table = Snapshot(tmp_path / "a.kvsnap").table("emb")
    for asked in ([-7, 4], np.array([-7, 4]), np.array([-7, 4], np.int8)):
        got, found = table.lookup(asked)
        assert found.tolist() == [True, False] and got[0].tobytes() == values[1].tobytes()
    assert table.find(-7).shape == () and table.lookup(-7)[0].shape == (2,)
    assert table.find([]).shape == (0,) and table.pool([5, 9], np.array([0, 2])).shape == (1, 2)
    with pytest.raises(UsageError, match="got key 2147483648, expected int32: -2147483648 to 2147483647"):
        table.lookup([5, 2**31])
    with pytest.raises(TypeError, match="int32"):
        table.lookup([0.5])
