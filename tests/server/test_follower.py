"""A model that is served from a chain: each increment is served when it is there, and nothing that does not fit."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from chain_writer import ChainWriter, without

import kvtools.server.follower as follower_module
from kvtools.chain import Reason
from kvtools.errors import BadInputError, CorruptFileError, OutputError
from kvtools.server.catalog import Catalog
from kvtools.server.fold import folds_of
from kvtools.server.follower import Follower
from kvtools.server.metrics import Metrics
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings
from kvtools.server.store import TableStore

ASKED = np.arange(-5, 60)


@pytest.fixture
def writer(tmp_path: Path) -> ChainWriter:
    writer = ChainWriter(tmp_path / "run", {"emb": 3, "also": 2})
    writer.put("emb", range(20), 1)
    writer.put("also", range(5), 1)
    writer.full()
    writer.put("emb", range(5), 2)
    writer.increment()
    return writer


class Followed:
    """A follower whose threads are not started: the test does what they do."""

    def __init__(self, folder: Path, cache: Path, **settings: Any) -> None:
        self.catalog = Catalog()
        self.follower = Follower(self.catalog, "default", folder, Settings(cache=cache, **settings))
        self.follower.load()

    def look(self) -> None:
        for bad in self.follower._walk._bad.values():
            bad.again = 0
        self.follower._walk._due = 0
        self.follower._look()

    def fold(self) -> None:
        store, position = self.follower._store, self.follower._walk.position
        assert store is not None and position is not None
        self.follower._loader.finish(store.base)
        self.follower._stop.wait = lambda timeout=None: True  # type: ignore[method-assign]  # not for it to be served
        self.follower._fold(store, position)
        self.look()

    @property
    def sequence(self) -> int:
        return self.catalog.version().number

    def metrics(self) -> dict[str, float]:
        lines = [line.rpartition(" ") for line in Metrics(self.catalog).text().splitlines() if "_follow_" in line]
        return {name: float(value) for name, _, value in lines if not name.startswith("#")}


@pytest.fixture
def follow(writer: ChainWriter, tmp_path: Path) -> Iterator[Callable[..., Followed]]:
    yield lambda **settings: Followed(writer.folder, tmp_path / "cache", **settings)


def assert_serves(followed: Followed, writer: ChainWriter, sequence: int | None = None) -> None:
    version = followed.catalog.version()
    assert version.number == (writer.number if sequence is None else sequence)
    for name, table in version.store.tables.items():
        expected, there = writer.expected(name, ASKED)
        values, found = table.lookup(ASKED)
        assert values.tobytes() == expected.tobytes() and found.tobytes() == there.tobytes()


def test_every_increment_is_a_version_and_one_that_was_taken_stays(
    writer: ChainWriter, follow: Callable[..., Followed]
) -> None:
    followed = follow()
    assert_serves(followed, writer)
    taken = followed.catalog.version()
    before = taken.store.table("emb").lookup(ASKED)
    for number in range(8):
        writer.put("emb", range(number, number + 9), 10 + number)
        writer.remove("emb", [number + 12, 50])
        writer.put("also", [number], number)
        writer.increment()
        followed.look()
        assert_serves(followed, writer)
    again = taken.store.table("emb").lookup(ASKED)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(before, again, strict=True))
    told = followed.metrics()
    of = '{model="default"}'
    assert told[f"kvtools_follow_version{of}"] == 10 and told[f"kvtools_follow_lag_seconds{of}"] == 0
    assert told[f"kvtools_follow_increments_total{of}"] == 9 and 0 <= told[f"kvtools_follow_freshness_seconds{of}"] < 60


def test_what_does_not_fit_is_refused_counted_and_told_once_and_a_full_heals_it(
    writer: ChainWriter, follow: Callable[..., Followed], caplog: pytest.LogCaptureFixture
) -> None:
    followed = follow()
    counted = {name: count for name, count in followed.metrics().items() if "refused" in name}
    assert len(counted) == len(get_args(Reason)) and not any(counted.values())
    good = {name: {k: v.copy() for k, v in rows.items()} for name, rows in writer.rows.items()}
    writer.put("emb", [1], 30)
    writer.increment(chain="another")
    with caplog.at_level(logging.ERROR, "kvtools.serve"):
        followed.look()
        followed.look()
    errors = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1 and "another chain" in errors[0]
    late, writer.rows = writer.rows, good
    assert_serves(followed, writer, 2)
    writer.rows = late
    told = followed.metrics()
    assert told['kvtools_follow_refused_total{model="default",reason="other-chain"}'] == 1
    assert counted.keys() == {name for name in told if "refused" in name}  # each is there from the start
    assert told['kvtools_follow_lag_seconds{model="default"}'] > 0
    assert followed.catalog.model("default").failures == 1
    assert "another chain" in followed.follower.status.trouble
    writer.full()
    followed.look()
    assert_serves(followed, writer)
    assert followed.metrics()['kvtools_follow_lag_seconds{model="default"}'] == 0
    assert followed.follower.status.trouble == ""


@pytest.mark.parametrize("fault", ["cut", "flipped", "gone", "table", "dim"])
def test_a_damaged_or_foreign_increment_leaves_what_is_served(
    writer: ChainWriter, follow: Callable[..., Followed], fault: str, tmp_path: Path
) -> None:
    followed = follow()
    good = {name: {k: v.copy() for k, v in rows.items()} for name, rows in writer.rows.items()}
    if fault in ("table", "dim"):
        writer.dims = {"emb": 3, "also": 2, "new": 2} if fault == "table" else {"emb": 3, "also": 4}
        writer.rows = {name: {} for name in writer.dims}
        writer.changed = {name: set() for name in writer.dims}
        writer.gone = {name: set() for name in writer.dims}
    writer.put("emb", range(12), 40)
    writer.put("also", [1], 40)
    prefix = writer.increment()
    data = Path(f"{prefix}.data-00000-of-00001")
    whole = data.read_bytes()
    if fault == "cut":
        data.write_bytes(whole[:-40])
    elif fault == "flipped":
        at = whole.index(np.float32(40).tobytes())  # of a row of the first table
        data.write_bytes(whole[:at] + b"\x01" + whole[at + 1 :])
    elif fault == "gone":
        data.unlink()
    followed.look()
    late, writer.rows = writer.rows, good
    kept, writer.dims = writer.dims, {"emb": 3, "also": 2}
    assert_serves(followed, writer, 2)
    assert dict(followed.follower.status.refused) == {"other-table" if fault in ("table", "dim") else "damaged": 1}
    if fault in ("cut", "flipped", "gone"):  # it comes whole after all
        writer.rows, writer.dims = late, kept
        data.write_bytes(whole)
        followed.look()
        assert_serves(followed, writer)


def test_increments_are_folded_and_served_from_one_file(
    writer: ChainWriter, follow: Callable[..., Followed], tmp_path: Path
) -> None:
    followed = follow()
    for number in range(3):
        writer.put("emb", range(number, 30), number + 50)
        writer.remove("also", [number])
        writer.increment()
        followed.look()
        followed.fold()
        assert_serves(followed, writer)
        assert followed.follower.status.rows_over == 0 and followed.follower.status.folds == number + 1
        files = [path for path in (tmp_path / "cache").glob("*.kvsnap")]
        assert len(files) == 1, "of a chain there is one file: what it was made of is gone"
    writer.put("emb", [3], 99)
    writer.increment()
    followed.look()
    assert_serves(followed, writer)


def test_a_start_goes_on_from_the_folded_file_and_from_the_chain_without_it(
    writer: ChainWriter, follow: Callable[..., Followed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = follow()
    writer.put("emb", [1, 40], 60)
    writer.increment()
    followed.look()
    followed.fold()
    writer.remove("emb", [40])
    writer.increment()
    loaded = []
    load = follower_module.VersionLoader.load
    monkeypatch.setattr(
        follower_module.VersionLoader,
        "load",
        lambda self, model, found, *rest, **more: (
            loaded.append(Path(found.path).name) or load(self, model, found, *rest, **more)
        ),
    )
    again = follow()
    assert_serves(again, writer)
    assert len(loaded) == 1 and loaded[0].endswith("-000000000003.kvsnap")
    # A fold of which the chain knows nothing any more is not gone on from.
    loaded.clear()
    shutil.rmtree(writer.folder)
    other = ChainWriter(writer.folder, {"emb": 3, "also": 2})
    other.put("emb", [7], 1)
    other.full()
    assert_serves(follow(), other)
    assert loaded == ["ckpt-1"]
    # Nor one that another run of the same numbers has gone past.
    for _ in range(4):
        other.put("emb", [7], other.number)
        other.increment()
    loaded.clear()
    assert_serves(follow(), other)
    assert loaded == ["ckpt-1"]
    # And a damaged one neither.
    for path in (tmp_path / "cache").glob("*.kvsnap"):
        path.write_bytes(path.read_bytes()[:-9])
    assert_serves(follow(), other)


def test_one_of_two_processes_folds_and_the_other_takes_it_over(
    writer: ChainWriter, follow: Callable[..., Followed], tmp_path: Path
) -> None:
    one, other = follow(), follow()
    writer.put("emb", range(30), 60)
    writer.increment()
    one.look()
    one.fold()
    other.look()
    writer.put("emb", [1], 61)
    writer.increment()
    other.look()
    made = {path: path.stat().st_ino for path in (tmp_path / "cache").glob("*.kvsnap")}
    other.fold()
    assert {path: path.stat().st_ino for path in (tmp_path / "cache").glob("*.kvsnap")} == made
    assert other.follower.status.folds == 1 and other.follower.status.rows_over == 1
    assert_serves(other, writer)
    (fold,) = folds_of(tmp_path / "cache", writer.folder)
    assert fold.position.sequence == 3


def test_a_cache_where_there_are_no_locks_is_named(
    writer: ChainWriter, follow: Callable[..., Followed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(lock: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    followed = follow()
    monkeypatch.setattr("kvtools.server.fold.fcntl.flock", flock)
    cache = tmp_path / "cache"
    with pytest.raises(OutputError, match=f"folding increments in '{cache}': No locks available; name another --cache"):
        followed.fold()


def test_what_could_not_be_brought_into_memory_is_later(
    follow: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, failed = TableStore.populate, []

    def populate(self: TableStore, stop: threading.Event) -> None:
        if not failed:
            failed.append(1)
            raise MemoryError
        plain(self, stop)

    monkeypatch.setattr(follower_module, "_AFTER_FAILURE", 0.0)
    followed = follow()
    monkeypatch.setattr(TableStore, "populate", populate)
    followed.follower.go_on()
    last = time.monotonic() + 60
    while not followed.catalog.warm:
        assert time.monotonic() < last
        time.sleep(0.001)
    followed.follower.stop()
    assert failed


def test_what_is_damaged_below_is_found_by_the_fold_and_loaded_anew(
    writer: ChainWriter, follow: Callable[..., Followed], tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    followed = follow(verify=False)
    (file,) = (tmp_path / "cache").glob("*.kvsnap")
    data = bytearray(file.read_bytes())
    with file.open("r+b") as opened:  # of the rows
        opened.seek(data.index(np.float32(3 + 19 / 7).tobytes()))
        opened.write(b"\x07")
    followed.follower._newer = CorruptFileError("its rows are damaged")
    followed.look()
    assert_serves(followed, writer)


def test_a_full_in_the_middle_that_stands_beside_its_increment_is_not_loaded(
    writer: ChainWriter, follow: Callable[..., Followed]
) -> None:
    followed = follow()
    writer.full(beside=True)
    writer.put("emb", [1], 70)
    writer.increment()
    followed.look()
    assert_serves(followed, writer)
    assert followed.catalog.model().loads == 1
    late = follow()
    assert_serves(late, writer)


def test_nothing_to_serve_is_an_error_unless_it_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(BadInputError, match="no full checkpoint"):
        Followed(tmp_path / "run", tmp_path / "cache")
    caplog.clear()
    with pytest.raises(BadInputError, match=r"nowhere.*; --wait waits for it"):
        Followed(tmp_path / "nowhere", tmp_path / "cache")
    assert not caplog.records  # the error says it
    Followed(tmp_path / "nowhere", tmp_path / "cache", wait=True)
    assert [record.message.count("waiting for it") for record in caplog.records] == [1]
    waiting = Followed(tmp_path / "run", tmp_path / "cache", wait=True)
    assert "default" in waiting.catalog.unready()
    writer = ChainWriter(tmp_path / "run", {"emb": 3, "also": 2})
    writer.put("emb", [1], 1)
    writer.full()
    waiting.look()
    assert_serves(waiting, writer)


def test_another_run_that_is_copied_over_the_folder_is_served(
    writer: ChainWriter, follow: Callable[..., Followed], tmp_path: Path
) -> None:
    writer.full(beside=True)
    followed = follow()
    assert_serves(followed, writer, 2)
    other = ChainWriter(tmp_path / "other", {"emb": 3, "also": 2})
    other.put("emb", range(9), 5)
    other.full()
    for key in (1, 2):
        other.put("emb", [key], 6)
        other.increment()
    shutil.copytree(other.folder, writer.folder, dirs_exist_ok=True)  # the run before's ckpt-2 is left
    followed.look()
    assert_serves(followed, other, 3)
    assert followed.follower.status.trouble == ""


def test_a_file_that_was_written_over_is_loaded_anew(
    writer: ChainWriter, follow: Callable[..., Followed], tmp_path: Path
) -> None:
    followed = follow()
    (file,) = (tmp_path / "cache").glob("*.kvsnap")
    file.write_bytes(b"\x00" * 1000)
    followed.look()
    assert_serves(followed, writer)


def test_bytes_written_into_the_file_below_are_never_answered_and_it_is_made_again(
    writer: ChainWriter, follow: Callable[..., Followed], tmp_path: Path
) -> None:
    followed = follow()
    (file,) = (tmp_path / "cache").glob("*.kvsnap")
    at = file.read_bytes().index(np.float32(3 + 19 / 7).tobytes())
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(b"\x07")
    with pytest.raises(RequestError):
        followed.catalog.version().store.tables["emb"].lookup(ASKED)
    assert followed.follower._store is not None
    with pytest.raises(CorruptFileError) as caught:  # as the thread that folds does
        followed.follower._loader.finish(followed.follower._store.base)
    followed.follower._newer = caught.value
    followed.look()
    assert_serves(followed, writer)


def test_a_chain_whose_files_are_gone_is_told_once_and_goes_on_when_it_is_back(
    writer: ChainWriter, follow: Callable[..., Followed], caplog: pytest.LogCaptureFixture
) -> None:
    followed = follow()
    followed.follower._threads[0].is_alive = lambda: True  # type: ignore[method-assign]  # it is following
    sequence = followed.sequence
    files = {file: file.read_bytes() for file in writer.folder.iterdir() if file.is_file()}
    for file in files:
        file.unlink()
    for _ in range(3):
        followed.look()
    told = [line for line in caplog.messages if "there is no member in it any more" in line]
    assert len(told) == 1 and f"up to {sequence}, stays" in told[0]
    assert "there is no member in it any more" in followed.follower.status.trouble
    assert_serves(followed, writer)
    for file, content in files.items():
        file.write_bytes(content)
    followed.look()
    assert followed.follower.status.trouble == ""
    away = writer.folder.rename(writer.folder.with_name("away"))  # as a share that is not mounted any more
    followed.look()
    assert "No such file" in followed.follower.status.trouble
    assert_serves(followed, writer)
    away.rename(writer.folder)
    writer.put("emb", range(3), 9)
    writer.increment()
    followed.look()
    assert_serves(followed, writer)
    assert followed.follower.status.trouble == ""


def test_lost_increments_behind_a_newer_full_do_not_matter(
    writer: ChainWriter, follow: Callable[..., Followed]
) -> None:
    followed = follow()
    for _ in range(4):
        writer.put("emb", [1], 80 + writer.number)
        lost = writer.increment()
        without(lost)
    writer.full(beside=True)
    writer.put("emb", [2], 90)
    writer.increment()
    followed.look()
    assert_serves(followed, writer)
    assert not followed.follower.status.refused
