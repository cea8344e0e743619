"""What a store serves stays what it was when it was opened, and a changed source never gets an old snapshot."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, OutputError, UnknownTableError
from kvtools.migrate import write_tables
from kvtools.server.request import RequestError
from kvtools.server.store import TableStore

KEYS = np.array([5, -3, 7, 5])


def write(path: Path, number: float, dialect: str = "npz", dtype: str = "float32") -> Path:
    """A table whose values are all `number`; its last row hides the first."""
    values = np.full((4, 2), number).astype(dtype)
    values[0] = 99
    write_tables([ArrayTable("emb", KEYS, values)], path, dialect, options=WriteOptions(force=True))
    return path


def served(store: TableStore) -> float:
    values, found = store.table("emb").lookup(np.array([5, -3, 7]))
    assert found.all() and len(np.unique(values)) == 1
    return float(values[0, 0])


def snapshots(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*.kvsnap"))


def test_a_snapshot_is_mapped_as_it_is(tmp_path: Path) -> None:
    store = TableStore(write(tmp_path / "a.kvsnap", 1, "snapshot"), cache=tmp_path / "cache")
    assert (served(store), store.dialect, store.table("emb").duplicates) == (1, "snapshot", 1)
    assert not (tmp_path / "cache").exists()
    assert len(store.fingerprint) == 32


def test_anything_else_becomes_a_snapshot_once(tmp_path: Path) -> None:
    path, cache, rows = write(tmp_path / "a.npz", 1), tmp_path / "cache", []
    store = TableStore(path, cache=cache, progress=lambda name, done, total: rows.append((name, done, total)))
    assert (served(store), store.dialect, store.path, store.table("emb").duplicates) == (1, "npz", path, 1)
    assert rows[-1] == ("emb", 4, 4)
    (made,) = snapshots(cache)
    written = (cache / made).stat().st_ino
    assert served(TableStore(path, cache=cache)) == 1
    assert snapshots(cache) == [made] and (cache / made).stat().st_ino == written


def test_renaming_deleting_and_copying_change_nothing_of_what_is_served(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.npz", 1), tmp_path / "cache"
    store = TableStore(path, cache=cache)
    write(tmp_path / "b.npz", 2).rename(path)
    assert served(store) == 1
    write(tmp_path / "b.npz", 3)
    shutil.copyfile(tmp_path / "b.npz", path)
    assert served(store) == 1
    path.unlink()
    shutil.rmtree(cache)
    assert served(store) == 1


def test_a_changed_source_gets_a_new_snapshot_and_the_old_one_goes(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.npz", 1), tmp_path / "cache"
    first = TableStore(path, cache=cache)
    status = path.stat()
    path.write_bytes(write(tmp_path / "b.npz", 2).read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # the same size, name and time of modification
    second = TableStore(path, cache=cache)
    assert (served(first), served(second)) == (1, 2)
    assert first.fingerprint != second.fingerprint
    assert len(snapshots(cache)) == 1


def test_a_checkpoint_and_a_folder_are_told_by_all_their_files(sample_path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    TableStore(sample_path, cache=cache)
    copy = Path(shutil.copytree(sample_path if sample_path.is_dir() else sample_path.parent, tmp_path / "copy"))
    TableStore(copy, cache=cache)
    before = snapshots(cache)
    for file in copy.iterdir():
        os.utime(file)
    TableStore(copy, cache=cache)
    assert len(before) == len(snapshots(cache)) == 2 and before != snapshots(cache)


def test_a_source_is_the_same_however_its_path_is_spelled(
    sample_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(sample_path if sample_path.is_dir() else sample_path.parent, tmp_path / "sm" / "4")
    write(tmp_path / "sm" / "a.npz", 1)
    monkeypatch.chdir(tmp_path)
    for made, name in enumerate(("sm/4", "sm/a.npz"), 1):
        for path in (name, f"./{name}", f"{tmp_path}/{name}", f"sm/../{name}", f"../{tmp_path.name}/{name}"):
            TableStore(path, cache=cache)
        assert len(snapshots(cache)) == made


def test_tables_that_are_named(tmp_path: Path) -> None:
    tables = [ArrayTable(name, KEYS[:1], np.ones((1, 2), np.float32)) for name in ("a", "b")]
    for name, dialect in (("x.npz", "npz"), ("x.kvsnap", "snapshot")):
        write_tables(tables, tmp_path / name, dialect)
        store = TableStore(tmp_path / name, tables=["b"], cache=tmp_path / "cache")
        assert list(store.tables) == ["b"]
        assert list(TableStore(tmp_path / name, cache=tmp_path / "cache").tables) == ["a", "b"]
        with pytest.raises(UnknownTableError, match="GET /v1/tables"):
            store.table("a")
        with pytest.raises(UnknownTableError, match="it has 'a', 'b'"):
            TableStore(tmp_path / name, tables=["c"], cache=tmp_path / "cache")


def test_a_snapshot_in_the_cache_that_was_cut_is_made_again(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.npz", 1), tmp_path / "cache"
    TableStore(path, cache=cache)
    (made,) = snapshots(cache)
    os.truncate(cache / made, 5000)
    assert served(TableStore(path, cache=cache)) == 1


def test_few_sources_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtools.server.snapshot_cache._MOST_SNAPSHOTS", 2)
    for number in range(4):
        TableStore(write(tmp_path / f"{number}.npz", number), cache=tmp_path / "cache")
    assert len(snapshots(tmp_path / "cache")) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 4  # and a lock for each


def test_snapshots_take_half_of_the_free_space_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    def store(number: int) -> TableStore:
        before = set(snapshots(cache))
        made = TableStore(write(tmp_path / f"{number}.npz", number), cache=cache)
        for name in set(snapshots(cache)) - before:  # times that tell which was used first
            for file in (name, f"{name.partition('-')[0]}.lock"):
                os.utime(cache / file, (number, number))
        return made

    first = store(0)
    second = store(1)
    third = store(2)
    names = sorted(snapshots(cache), key=lambda name: (cache / name).stat().st_mtime)
    room = sum((cache / name).stat().st_blocks * 512 for name in names)
    usage = shutil.disk_usage(tmp_path)._replace(free=room)  # so three may stay, and no fourth
    monkeypatch.setattr("kvtools.server.snapshot_cache.shutil.disk_usage", lambda path: usage)
    del second
    fourth = store(3)
    assert names[1] not in snapshots(cache), "nobody serves it"
    assert {names[0], names[2]} < set(snapshots(cache)), "they are served"
    assert [served(first), served(third), served(fourth)] == [0, 2, 3]
    del first, third
    usage = usage._replace(free=0)
    fifth = store(4)
    assert len(snapshots(cache)) == 2 and names[0] not in snapshots(cache) and names[2] not in snapshots(cache)
    assert [served(fourth), served(fifth)] == [3, 4]


def test_a_snapshot_that_another_process_removes_before_it_is_open_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def write_tables_twice(tables: Any, path: Path, *others: Any, **named: Any) -> Any:
        account = write_tables(tables, path, *others, **named)
        written.append(path)
        if len(written) == 1:
            path.unlink()
        return account

    monkeypatch.setattr("kvtools.server.snapshot_cache.write_tables", write_tables_twice)
    store = TableStore(write(tmp_path / "a.npz", 1), cache=tmp_path / "cache")
    assert served(store) == 1 and len(written) == 2 and snapshots(tmp_path / "cache") == [written[0].name]


def test_the_log_says_when_a_snapshot_is_made_and_where_it_lies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvtools.serve")
    path, cache = write(tmp_path / "a.npz", 1), tmp_path / "cache"
    TableStore(path, cache=cache)
    TableStore(path, cache=cache)
    (made,) = snapshots(cache)
    (message,) = caplog.messages
    assert message.startswith(f"made a snapshot of '{path}' in ") and f"'{cache / made}' (" in message


def test_a_cache_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(lock: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path, cache = write(tmp_path / "a.npz", 1), tmp_path / "cache"
    monkeypatch.setattr("kvtools.server.snapshot_cache.fcntl.flock", flock)
    with pytest.raises(OutputError, match=f"making a snapshot in '{cache}': No locks available; name another --cache"):
        TableStore(path, cache=cache)


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="name another --cache"):
        TableStore(write(tmp_path / "a.npz", 1), cache=tmp_path / "file" / "cache")


def test_a_source_without_tables(tmp_path: Path) -> None:
    write_tables([], tmp_path / "a.kvsnap", "snapshot")
    with pytest.raises(BadInputError, match="it has no key-value table"):
        TableStore(tmp_path / "a.kvsnap")


def test_populate_and_verify(tmp_path: Path) -> None:
    path = write(tmp_path / "a.kvsnap", 1, "snapshot")
    store = TableStore(path)
    stopped = threading.Event()
    stopped.set()
    store.populate(stopped)
    assert not store.warm
    store.populate(threading.Event())
    assert store.warm
    store.verify()
    data = bytearray(path.read_bytes())
    data[4096 * 3] ^= 1
    (tmp_path / "b.kvsnap").write_bytes(data)
    with pytest.raises(CorruptFileError, match="table 'emb', its rows from byte 0 on"):
        TableStore(tmp_path / "b.kvsnap").verify()


def test_a_store_is_read_and_verified_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TableStore(write(tmp_path / "a.kvsnap", 1, "snapshot"))
    asked: list[Any] = []
    for name in ("populate", "verify"):
        monkeypatch.setattr(store.snapshot, name, lambda **options: asked.append(options["background"]))
    store.populate()
    store.verify()
    assert asked == [True, True]


def test_a_served_snapshot_that_is_written_over_is_an_error(tmp_path: Path, caplog: Any) -> None:
    path = write(tmp_path / "a.kvsnap", 1, "snapshot")
    store = TableStore(path)
    path.write_bytes(write(tmp_path / "b.kvsnap", 2, "snapshot").read_bytes())
    for _ in range(3):
        with pytest.raises(RequestError, match="it is loaded anew") as caught:
            store.table("emb").lookup(KEYS)
        assert (caught.value.status, caught.value.code) == (503, "file_changed")
    (line,) = caplog.messages
    assert f"'{path}'" in line and "replace a snapshot by renaming another one to its name" in line


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int32", "int64"])
def test_values_come_in_the_type_of_the_table(tmp_path: Path, dtype: str) -> None:
    import ml_dtypes

    table = ArrayTable("emb", KEYS[:2], np.ones((2, 3)).astype(getattr(ml_dtypes, dtype, dtype)))
    write_tables([table], tmp_path / "a.kvsnap", "snapshot")
    values, _ = TableStore(tmp_path / "a.kvsnap").table("emb").lookup(np.array([5]))
    assert values.dtype.name == dtype and (values == 1).all()
