"""Versions that come, go, and are damaged, without a server around them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient
from version_files import expected_rows, write_checkpoint, write_snapshot

from kvtools.array_table import ArrayTable
from kvtools.errors import BadInputError, UsageError
from kvtools.migrate import write_tables
from kvtools.server import sources as sources_module
from kvtools.server import version_loader
from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog, UnknownModelError, UnknownVersionError
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings
from kvtools.server.sources import ModelSource, SharedSources
from kvtools.server.store import TableStore
from kvtools.server.version_policy import VersionPolicy
from kvtools.server.versions import Versions

Write = Callable[..., Path]
KEYS = np.arange(5)


class Watched:
    """`Versions` that look when they are told to, and the catalog they load into."""

    def __init__(self, path: Path, policy: str = "latest", labels: dict[str, int] | None = None, **settings: Any):
        self.catalog = Catalog()
        settings.setdefault("cache", path.parent / "cache")
        source = ModelSource("m", str(path), VersionPolicy.parse(policy), labels or {})
        self.versions = Versions(self.catalog, [source], Settings(**{"poll": 3600.0, **settings}))
        self.versions.load()

    def look(self, times: int = 2) -> list[int]:
        """Look; the second time, files that have stayed as they were count as whole."""
        for _ in range(times):
            self.versions.look()
        return self.numbers()

    def numbers(self) -> list[int]:
        return [version.number for version in self.catalog.versions("m")]

    def states(self) -> dict[int, str]:
        self.versions.look()
        return {status.number: status.state for status in self.catalog.status("m")}

    def error(self, number: int) -> tuple[str, str]:
        (status,) = [status for status in self.catalog.status("m") if status.number == number]
        return status.error_code, status.error_message


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files that are there at the start count as whole."""
    monkeypatch.setattr(Versions, "_settled", lambda self, state, found: True)


def said(version: Any) -> int:
    """Which version the rows say they are of."""
    values, found = version.store.table("emb").lookup(KEYS)
    assert found.all() and np.array_equal(values - values[0, 0], np.repeat(KEYS[:, None], 4, 1))
    return int(values[0, 0]) // 1000


def until(condition: Callable[[], bool]) -> None:
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.01)


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.fixture(params=["snapshot", "checkpoint"])
def write_version(request: pytest.FixtureRequest) -> Write:
    return write_snapshot if request.param == "snapshot" else write_checkpoint


def test_the_newest_is_served_by_number_not_by_name(settled: None, write_version: Write, tmp_path: Path) -> None:
    for number in (9, 10, 2):
        write_version(tmp_path / "m", number)
    write_version(tmp_path / "m", 11, name="eleven")
    watched = Watched(tmp_path / "m")
    assert watched.numbers() == [10]
    assert said(watched.catalog.version()) == 10


def test_a_new_version_is_served_once_its_files_stay_as_they_are(
    write_version: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Versions, "_settled", lambda self, state, found: True)
        write_version(tmp_path / "m", 1)
        watched = Watched(tmp_path / "m")
    write_checkpoint(tmp_path / "m", 2)
    assert watched.look(1) == [1]
    assert watched.states()[2] == "AVAILABLE", "unchanged at the second look"
    assert watched.numbers() == [2]
    new = write_checkpoint(tmp_path / "m", 3)
    assert watched.look(1) == [2]
    with next(new.glob("*data*")).open("ab") as file:
        file.write(b"more")
    assert watched.look(1) == [2], "its files have changed since the last look"
    assert watched.catalog.status("m")[-1].error_message == "waiting until its files stay as they are"


def test_a_snapshot_tells_itself_whether_it_is_whole(
    write_version: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Versions, "_settled", lambda self, state, found: True)
        write_version(tmp_path / "m", 1)
        watched = Watched(tmp_path / "m")
    write_snapshot(tmp_path / "m", 2)
    assert watched.look(1) == [2]
    whole = write_snapshot(tmp_path, 3).read_bytes()
    copy = tmp_path / "m" / "3.kvsnap"
    for size in (100, len(whole) // 2, len(whole) - 1):
        copy.write_bytes(whole[:size])
        assert watched.look(1) == [2]
        assert watched.catalog.model("m").failures == 0, "it may be being copied"
    copy.write_bytes(whole)
    assert watched.look(1) == [3]


def test_the_old_version_is_unmapped_after_its_last_reader(settled: None, write_version: Write, tmp_path: Path) -> None:
    old = write_version(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    reader: Any = watched.catalog.version()
    snapshot = reader.store.snapshot.path
    assert said(reader) == 1 and mapped(snapshot)
    write_version(tmp_path / "m", 2)
    assert watched.look() == [2]
    assert watched.states() == {1: "UNLOADING", 2: "AVAILABLE"}
    remove(old)
    assert said(reader) == 1, "a request keeps the version with which it began"
    reader = None
    assert watched.states() == {1: "END", 2: "AVAILABLE"}
    assert not mapped(snapshot)


def remove(version: Path) -> None:
    if version.is_dir():
        shutil.rmtree(version)
    else:
        version.unlink()


def _data(version: Path) -> Path:
    return next(version.glob("*data*")) if version.is_dir() else version


def _truncate(version: Path) -> None:
    data = _data(version)
    data.write_bytes(data.read_bytes()[:-100])


def _flip(version: Path) -> None:
    data = _data(version)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)


def _cut_index(version: Path) -> None:
    index = next(version.glob("*.index")) if version.is_dir() else version
    index.write_bytes(index.read_bytes()[:40])


def _empty(version: Path) -> None:
    for file in [version] if version.is_file() else version.iterdir():
        file.write_bytes(b"")


def _leave_data(version: Path) -> None:
    (next(version.glob("*.index")) if version.is_dir() else version).write_bytes(b"to come")


def _replace_by_text(version: Path) -> None:
    if version.is_dir():
        for file in list(version.iterdir()):
            file.unlink()
        (version / "notes.txt").write_text("to come")
    else:
        version.write_text("to come")


def _replace_by_folder(version: Path) -> None:
    remove(version)
    version.mkdir()
    (version / "model").mkdir()
    (version / "model" / "notes.txt").write_text("to come")


@pytest.mark.parametrize(
    "damage", [_truncate, _flip, _cut_index, _empty, _leave_data, _replace_by_text, _replace_by_folder]
)
def test_a_bad_version_is_named_and_the_old_one_stays(
    settled: None, write_version: Write, tmp_path: Path, damage: Callable[[Path], None], caplog: Any
) -> None:
    write_version(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    damage(write_version(tmp_path / "m", 2))
    assert watched.look() == [1]
    assert said(watched.catalog.version()) == 1
    code, message = watched.error(2)
    assert code in ("DATA_LOSS", "INVALID_ARGUMENT") and message
    assert str(tmp_path) not in message, "no path of the host"
    assert watched.states() == {1: "AVAILABLE", 2: "END"}
    assert [r.message for r in caplog.records if "version 2 cannot be served" in r.message and "1 stays" in r.message]
    assert watched.catalog.model("m").failures == 1, "it is not tried again as long as it is the same"
    write_version(tmp_path / "m", 2)
    assert watched.look() == [2]
    assert said(watched.catalog.version()) == 2
    assert watched.error(2) == ("OK", "")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (MemoryError(), "RESOURCE_EXHAUSTED"),
        (OSError(errno.ENOSPC, "No space left on device", "/cache/x.kvsnap"), "UNAVAILABLE"),
    ],
)
def test_what_may_be_the_machines_fault_is_tried_again_at_every_look(
    settled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, fault: Exception, code: str
) -> None:
    write_snapshot(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    write_snapshot(tmp_path / "m", 2)

    def fail(*_: Any, **__: Any) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr("kvtools.server.version_loader.TableStore", fail)
        assert watched.look(4) == [1]
        assert watched.error(2)[0] == code and "/cache" not in watched.error(2)[1]
        assert caplog.text.count("version 2 cannot be served") == 1, "told once"
    assert watched.look(1) == [2]


def test_a_model_in_two_halves_that_is_half_copied_is_told_as_that(settled: None, tmp_path: Path) -> None:
    write_snapshot(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    half = tmp_path / "m" / "2"
    (half / "dense" / "variables").mkdir(parents=True)
    (half / "dense" / "saved_model.pb").write_bytes(b"x")
    said = "it looks like a part of what `kvtools export --split` writes: "
    assert watched.look() == [1]
    code, message = watched.error(2)
    assert code == "INVALID_ARGUMENT" and str(tmp_path) not in message
    assert f"{said}'split.json' and 'tables.kvsnap' are not there; copy the folder as a whole" in message
    shutil.copy(tmp_path / "m" / "1.kvsnap", half / "tables.kvsnap")
    assert watched.look() == [1], "its tables are not served as if they were all of it"
    assert f"{said}'split.json' is not there; copy the folder as a whole" in watched.error(2)[1]


@pytest.fixture
def slow_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have versions be so large that they cannot be verified before they are served."""
    monkeypatch.setattr("kvtools.server.version_loader._AT_ONCE", -1.0)


def test_a_first_version_that_is_damaged_is_never_served(settled: None, tmp_path: Path, caplog: Any) -> None:
    first = write_snapshot(tmp_path / "m", 1)
    _flip(write_snapshot(tmp_path / "m", 2))
    watched = Watched(tmp_path / "m")
    assert watched.numbers() == [1], "from the first answer on"
    (line,) = [r.message for r in caplog.records if r.levelname == "ERROR"]
    assert "version 2 cannot be served: verifying '" in line and line.endswith("(version 1 stays)")
    assert watched.look(1) == [1] and len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
    remove(first)
    caplog.clear()
    named = rf"serving '{tmp_path}/m': version 2: verifying '{tmp_path}/m/2.kvsnap': table 'emb', its keys"
    with pytest.raises(BadInputError, match=named):
        Watched(tmp_path / "m")
    assert not caplog.records, "the error says it"
    watched = Watched(tmp_path / "m", wait=True)
    (line,) = [r.message for r in caplog.records]
    assert f"version 2: verifying '{tmp_path}/m/2.kvsnap': table 'emb', its keys" in line
    assert line.endswith("; waiting for a version") and str(tmp_path) not in watched.catalog.unready()
    assert not watched.catalog.ready and "version 2" in watched.catalog.unready()


def test_what_is_served_unverified_gives_no_wrong_rows_and_leaves_without_a_gap(
    settled: None, slow_to_verify: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_snapshot(tmp_path / "m", 1)
    damaged = write_snapshot(tmp_path / "m", 2)
    content = bytearray(damaged.read_bytes())
    content[3 * 4096 + 16 * 7] ^= 4  # in a row
    damaged.write_bytes(content)
    watched = Watched(tmp_path / "m")
    assert watched.numbers() == [2], "it answers at once"
    client = TestClient(create_app(watched.catalog))
    error = "verifying '2.kvsnap': table 'emb', its rows from byte 0 on"
    answer = client.post("/v1/tables/emb:lookup", json={"keys": list(range(200))})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "damaged")
    assert answer.json()["error"]["message"].startswith(error) and answer.headers["Retry-After"] == "1"
    pooled = {"keys": [[1, 2]], "combiner": "sum"}
    assert client.post("/v1/tables/emb:lookup", json=pooled).status_code == 503
    assert client.get("/v1/tables/emb/rows/1").status_code == 503
    assert client.get("/v1/tables/emb:rows").status_code == 503
    answer = client.post("/v1/models/m:predict", json={"instances": [1]})
    assert answer.status_code == 503 and answer.json()["error"].startswith(error)
    tensor = {"name": "ids", "shape": [1], "datatype": "INT64", "data": [1]}
    answer = client.post("/v2/models/m/infer", json={"inputs": [tensor]})
    assert answer.status_code == 503 and answer.json()["error"].startswith(error)
    assert client.get("/readyz").status_code == 200

    plain = TableStore.__init__

    def opened(self: Any, path: Any, **rest: Any) -> None:
        assert watched.numbers() == [2], "there is no moment without a version"
        plain(self, path, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(TableStore, "__init__", opened)
        assert watched.look(1) == [1], "left for the one before"
    assert said(watched.catalog.version()) == 1
    assert not watched.catalog.version().store.verifies_on_use, "all of it is verified now"
    remove(first)
    watched = Watched(tmp_path / "m")
    watched.look(1)
    with pytest.raises(UnknownVersionError):
        watched.catalog.version()
    client = TestClient(create_app(watched.catalog))
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "not_ready" and "version 2" in answer.json()["error"]["message"]
    assert client.get("/livez").status_code == 200
    answer = client.post("/v1/tables/emb:lookup", json={"keys": [1]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


def test_what_one_worker_found_damaged_is_not_served_by_one_that_begins_later(
    settled: None, slow_to_verify: None, tmp_path: Path
) -> None:
    write_snapshot(tmp_path / "m", 1)
    _flip(write_snapshot(tmp_path / "m", 2))
    (tmp_path / "shared").mkdir()
    first = Watched(tmp_path / "m", shared=tmp_path / "shared")
    assert first.numbers() == [2] and first.look(1) == [1]
    later = Watched(tmp_path / "m", shared=tmp_path / "shared")
    assert later.numbers() == [1], "from its first answer on"
    assert later.error(2)[0] == "DATA_LOSS"
    write_snapshot(tmp_path / "m", 2)
    assert later.look() == [2] == Watched(tmp_path / "m", shared=tmp_path / "shared").numbers(), "it is another file"


@pytest.mark.parametrize("late", [False, True])
def test_a_snapshot_of_the_cache_that_is_damaged_is_made_again(
    settled: None, tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    write_checkpoint(tmp_path / "m", 1)
    (tmp_path / "shared").mkdir()
    assert said(Watched(tmp_path / "m").catalog.version()) == 1
    (made,) = (tmp_path / "cache").glob("*.kvsnap")
    _flip(made)
    if late:
        monkeypatch.setattr("kvtools.server.version_loader._AT_ONCE", -1.0)
    watched, other = (Watched(tmp_path / "m", shared=tmp_path / "shared") for _ in range(2))
    if late:
        with pytest.raises(RequestError, match="not what was written"):
            said(watched.catalog.version())
        assert watched.look(1) == other.look(1) == [1]
    assert said(watched.catalog.version()) == said(other.catalog.version()) == 1
    assert watched.error(1) == ("OK", "")
    assert any("it was in the cache, and is made again" in record.message for record in caplog.records)


def test_what_another_worker_has_verified_is_trusted(settled: None, slow_to_verify: None, tmp_path: Path) -> None:
    write_snapshot(tmp_path / "m", 1)
    (tmp_path / "shared").mkdir()
    first, second = (Watched(tmp_path / "m", shared=tmp_path / "shared") for _ in range(2))
    with SharedSources(tmp_path / "shared").only_once("another", lambda: True):
        third = Watched(tmp_path / "m", shared=tmp_path / "shared")
        assert third.catalog.version().store.verifies_on_use, "it does not wait for one that verifies"
    first.look(1)
    for worker in (second, third):
        assert worker.catalog.version().store.verifies_on_use
        worker.look(1)
        assert not worker.catalog.version().store.verifies_on_use


def test_workers_say_once_what_all_of_them_find_at_the_start(settled: None, tmp_path: Path, caplog: Any) -> None:
    write_snapshot(tmp_path / "m", 1)
    _flip(write_snapshot(tmp_path / "m", 2))
    (tmp_path / "shared").mkdir()
    for _ in range(3):
        assert Watched(tmp_path / "m", shared=tmp_path / "shared").numbers() == [1]
    assert len([r for r in caplog.records if "version 2 cannot be served" in r.message]) == 1


def test_a_version_that_could_not_be_finished_is_finished_later(
    settled: None, slow_to_verify: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_snapshot(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    with monkeypatch.context() as patch:
        patch.setattr(TableStore, "populate", lambda self, stop: (_ for _ in ()).throw(MemoryError))
        assert watched.look(1) == [1] and watched.error(1)[0] == "RESOURCE_EXHAUSTED"
        assert not watched.catalog.warm and said(watched.catalog.version()) == 1
    assert watched.look(1) == [1] and watched.catalog.warm
    assert watched.error(1) == ("OK", "")


def test_a_version_that_could_not_be_finished_is_finished_though_no_poll_looks(
    slow_to_verify: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, failed = TableStore.populate, []

    def populate(self: TableStore, stop: Any) -> None:
        if not failed:
            failed.append(1)
            raise MemoryError
        plain(self, stop)

    monkeypatch.setattr("kvtools.server.versions._WATCHED_EVERY", 0.01)
    write_snapshot(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m", poll=None)
    monkeypatch.setattr(TableStore, "populate", populate)
    watched.versions.go_on()
    until(lambda: watched.catalog.warm and watched.error(1) == ("OK", ""))
    watched.versions.stop()
    assert failed


def test_checksums_may_be_left_alone(settled: None, tmp_path: Path) -> None:
    _flip(write_snapshot(tmp_path / "m", 1))
    assert Watched(tmp_path / "m", verify=False).look() == [1]


def test_a_version_that_goes_is_let_go_but_never_the_last(
    settled: None, write_version: Write, tmp_path: Path, caplog: Any
) -> None:
    one, two = (write_version(tmp_path / "m", number) for number in (1, 2))
    watched = Watched(tmp_path / "m", "all")
    assert watched.look() == [1, 2]
    remove(two)
    assert watched.look() == [1]
    remove(one)
    assert watched.look() == [1]
    (tmp_path / "m").rmdir()
    assert watched.look() == [1]
    assert said(watched.catalog.version()) == 1
    assert [r for r in caplog.records if "no version any more" in r.message]


def test_a_folder_of_versions_is_no_model_itself_when_they_are_gone(settled: None, tmp_path: Path, caplog: Any) -> None:
    pytest.importorskip("pyarrow")
    one = write_snapshot(tmp_path / "m", 1)
    write_tables([ArrayTable("log", KEYS, np.ones((5, 1), np.float32))], tmp_path / "m" / "log.parquet", "parquet")
    watched = Watched(tmp_path / "m")
    remove(one)
    assert watched.look() == [1]
    assert list(watched.catalog.version().store.tables) == ["emb"]
    assert [r for r in caplog.records if "no version any more" in r.message]


def test_policies(settled: None, write_version: Write, tmp_path: Path, caplog: Any) -> None:
    for number in (1, 2, 3):
        write_version(tmp_path / "m", number)
    assert Watched(tmp_path / "m", "latest 2").look() == [2, 3]
    assert Watched(tmp_path / "m", "all").look() == [1, 2, 3]
    watched = Watched(tmp_path / "m", "1,3,7")
    assert watched.look() == [1, 3]
    assert watched.error(7)[0] == "NOT_FOUND"
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["model 'm': version 7 is to be served, and is not in its folder"]
    write_version(tmp_path / "m", 7)
    assert watched.look() == [1, 3, 7]


def test_only_what_the_policy_needs_is_opened(
    settled: None, write_version: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        write_version(tmp_path / "m", number)
    opened: list[str] = []
    plain = TableStore.__init__
    monkeypatch.setattr(
        TableStore, "__init__", lambda self, path, **rest: opened.append(path) or plain(self, path, **rest)
    )
    assert Watched(tmp_path / "m").look() == [3]
    assert [Path(path).stem for path in opened] == ["3"]


@pytest.mark.parametrize("text", ["latest 0", "newest", "1,x", "", "latest -1"])
def test_policies_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError, match="expected 'latest N', 'all' or numbers"):
        VersionPolicy.parse(text)


def test_what_is_served_is_untouched_by_what_lies_in_its_place_later(
    settled: None, write_version: Write, tmp_path: Path
) -> None:
    place = write_version(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    reader: Any = watched.catalog.version()
    place.rename(tmp_path / "away")
    write_version(tmp_path / "m", 1, says=2)
    assert said(reader) == 1, "another file of the same name"
    remove(tmp_path / "away")
    assert said(reader) == 1, "gone from the disk"
    assert watched.look() == [1] and said(watched.catalog.version()) == 2 and said(reader) == 1


def test_changes_that_workers_cannot_be_told_of_are_not_made(
    settled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        write_snapshot(tmp_path / "m", number)
    (tmp_path / "shared").mkdir()
    watched = Watched(tmp_path / "m", "all", shared=tmp_path / "shared", admin=True)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        answer = TestClient(create_app(watched.catalog, Settings(admin=True))).put(
            "/admin/models/m/labels/stable", json={"version": 1}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_shared")
        assert "nothing was changed" in answer.text and str(tmp_path) not in answer.text
        assert watched.catalog.labels("m") == {}
        _flip(write_snapshot(tmp_path / "m", 3))
        assert watched.look() == [1, 2], "a fault is found, though nobody can be told"
        assert watched.error(3)[0] == "DATA_LOSS"


def test_what_is_not_there_is_told(settled: None, tmp_path: Path, caplog: Any) -> None:
    one = write_snapshot(tmp_path / "m", 1)
    (tmp_path / "m" / "4.npz").write_bytes(b"")
    watched = Watched(tmp_path / "m", labels={"stable": 9})
    assert watched.look() == [1]
    assert "'4.npz' is no version: make a snapshot of it" in watched.error(4)[1]
    remove(one)
    assert watched.look() == [1]
    for line in (
        "version 4 cannot be served: '4.npz' is no version",
        "label 'stable' names version 9, which is not in its folder",
        "version 1 is gone from its folder, where no other can be served; it goes on being served",
    ):
        assert len([r for r in caplog.records if line in r.message]) == 1, line


def test_what_looks_like_a_version_and_is_none_is_told(settled: None, tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "m"
    write_snapshot(folder, 1)
    shutil.copyfile(folder / "1.kvsnap", folder / "11")
    for name in ("v8.kvsnap", "10.kvsnap.tmp", ".9.kvsnap", "notes.txt"):
        shutil.copyfile(folder / "1.kvsnap", folder / name)
    (folder / "7").mkdir()
    watched = Watched(folder, "all")
    assert watched.look() == [1] and said(watched.catalog.version()) == 1
    assert watched.error(11) == ("INVALID_ARGUMENT", "'11' is no version: a snapshot is called 11.kvsnap")
    assert watched.error(7) == ("INVALID_ARGUMENT", "'7' is no version: the folder is empty")
    told = [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert [line for line in told if "v8.kvsnap" in line] == [
        "model 'm': 'v8.kvsnap' in its folder is no version: its name is no number"
    ]
    assert len(told) == 3, "each once, and what is in progress not at all"
    write_checkpoint(folder, 7)
    assert watched.look() == [1, 7] and watched.error(7) == ("OK", "")


def test_what_can_never_be_a_version_is_told(settled: None, tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "m"
    whole = write_snapshot(folder, 1)
    os.mkfifo(folder / "2.kvsnap")  # whoever opens it waits for somebody to write
    os.mkfifo(folder / "3")
    (folder / "4").symlink_to(tmp_path / "nowhere")
    (folder / "5.kvsnap").symlink_to(folder / "5.kvsnap")
    (folder / "20261128233144123456").mkdir()
    shutil.copyfile(whole, folder / "9223372036854775808.kvsnap")
    watched = Watched(folder, "all")
    assert watched.look() == [1]
    assert watched.error(5)[1].startswith("'5.kvsnap' is no version: it cannot be read: Too many levels of ")
    for number, name in ((2, "2.kvsnap"), (3, "3")):
        assert watched.error(number)[1] == f"'{name}' is no version: it is neither a file nor a folder"
    for name, why in (
        ("20261128233144123456", "its number is above 9223372036854775807"),
        ("9223372036854775808.kvsnap", "its number is above 9223372036854775807"),
        ("4", "it is a link to nothing"),
    ):
        line = f"model 'm': '{name}' in its folder is no version: {why}"
        assert [record.message for record in caplog.records].count(line) == 1
    whole.unlink()
    with pytest.raises(BadInputError, match="no version"):
        Watched(folder)


def test_a_version_that_may_not_be_read_is_told_as_that_and_keeps_none_away(
    settled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scandir = tmp_path / "m", os.scandir
    write_snapshot(folder, 1)
    (folder / "7").mkdir()

    def refuse(path: Any) -> Any:
        if str(path).endswith("/7"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    watched = Watched(folder, "all")
    assert watched.look() == [1]
    assert watched.error(7)[1] == "'7' is no version: it cannot be read: Permission denied"
    write_snapshot(folder, 8)
    assert watched.look() == [1, 8]
    (folder / "8.kvsnap").unlink()
    (folder / "8.kvsnap").symlink_to(folder / "8.kvsnap")  # what is served out of reach for a moment
    assert watched.look() == [1, 8] and said(watched.catalog.version()) == 8


def test_a_folder_that_may_not_be_read_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(BadInputError, match="what is at its path cannot be read: Permission denied; --wait"):
        Watched(tmp_path)


def test_versions_may_be_numbered_by_a_clock(settled: None, tmp_path: Path) -> None:
    number = 1795908046335633000  # in nanoseconds
    write_snapshot(tmp_path / "m", number)
    watched = Watched(tmp_path / "m", labels={"stable": number})
    assert watched.numbers() == [number]
    client = TestClient(create_app(watched.catalog, Settings()))
    for path in (f"versions/{number}", "labels/stable"):
        answer = client.post(f"/v1/models/m/{path}:predict", json={"instances": [1]})
        assert answer.status_code == 200
    assert client.get(f"/v2/models/m/versions/{number}").json()["versions"] == [str(number)]
    answer = client.post("/v1/tables/emb:lookup", json={"keys": [1]})
    assert answer.headers["X-Embedding-Version"] == str(number)


def test_what_a_killed_writer_left_is_told_once(settled: None, tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "m"
    whole = write_snapshot(folder, 1)
    left = folder / ".7.kvsnap.kvtools-abc123"
    left.mkdir()
    shutil.copyfile(whole, left / "7.kvsnap")
    for name in ("8.kvsnap.tmp", "9.kvsnap.tmp", "notes.tmp"):
        shutil.copyfile(whole, folder / name)
    long_ago = whole.stat().st_mtime - 2 * 3600
    for path in (left / "7.kvsnap", left, folder / "8.kvsnap.tmp", folder / "notes.tmp"):
        os.utime(path, (long_ago, long_ago))
    watched = Watched(folder)
    for _ in range(2):
        assert watched.look() == [1]
    told = [record.message for record in caplog.records if "nothing was written" in record.message]
    assert [line.split("'")[3] for line in told] == [".7.kvsnap.kvtools-abc123", "8.kvsnap.tmp"]
    assert all(line.endswith("its writer was killed, as it seems; remove it") for line in told)


def test_an_empty_folder_is_waited_for_first(tmp_path: Path, caplog: Any) -> None:
    write_snapshot(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    (tmp_path / "m" / "2").mkdir()
    assert watched.look(1) == [1]
    assert watched.error(2) == ("OK", "waiting until its files stay as they are") and not caplog.records
    assert watched.look(1) == [1]
    assert watched.error(2)[0] == "INVALID_ARGUMENT", "it has stayed empty for a poll"


def test_labels_keep_their_versions_and_move_while_it_runs(settled: None, write_version: Write, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write_version(tmp_path / "m", number)
    watched = Watched(tmp_path / "m", labels={"stable": 1, "gone": 9})
    assert watched.look() == [1, 3]
    catalog = watched.catalog
    assert (said(catalog.version(label="stable")), said(catalog.version())) == (1, 3)
    watched.versions.set_label("m", "canary", 3)
    assert said(catalog.version("m", label="canary")) == 3
    watched.versions.set_label("m", "stable", 3)
    assert watched.look() == [3], "1 had nothing but its label"
    watched.versions.set_label("m", "canary", None)
    assert catalog.labels("m") == {"stable": 3, "gone": 9}
    for label in ("canary", "gone"):
        with pytest.raises(UnknownVersionError):
            catalog.version("m", label=label)
    with pytest.raises(UnknownVersionError, match="has no version 2"):
        watched.versions.set_label("m", "canary", 2)
    with pytest.raises(UnknownModelError):
        watched.versions.set_label("x", "canary", 3)


def test_a_model_that_goes_as_a_label_comes_is_told_as_unknown(
    settled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_snapshot(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    monkeypatch.setattr(watched.catalog, "version", lambda model, number: watched.versions._take([]))
    with pytest.raises(UnknownModelError, match="there is no model 'm'"):
        watched.versions.set_label("m", "stable", 1)


def test_a_version_written_anew_in_its_place_is_loaded_anew(
    settled: None, write_version: Write, tmp_path: Path
) -> None:
    write_version(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    assert said(watched.catalog.version()) == 1
    write_version(tmp_path / "m", 1, says=8)
    assert watched.look() == [1]
    assert said(watched.catalog.version()) == 8


@pytest.mark.parametrize("damage", [_truncate, _empty, _replace_by_text])
def test_a_snapshot_written_over_in_place_leaves_service(
    settled: None, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    write_snapshot(tmp_path / "m", 1)
    served = write_snapshot(tmp_path / "m", 2)
    watched = Watched(tmp_path / "m")
    damage(served)
    with pytest.raises(RequestError, match="it is loaded anew"):
        said(watched.catalog.version())
    assert "the file of version 2 was cut or written over" in watched.catalog.unready()
    assert watched.look() == [1], "the one before takes its place"
    assert said(watched.catalog.version()) == 1


def _damage_in_place(version: Path, *, keep_times: bool = False) -> bytes:
    """Write into the rows of a snapshot what leaves its header, size and end as they are; returns what it was."""
    sound, status = version.read_bytes(), version.stat()
    row = expected_rows(2, [7]).tobytes()
    with version.open("r+b") as file:
        file.seek(sound.index(row))
        file.write(bytes(len(row)))
    if keep_times:
        os.utime(version, ns=(status.st_atime_ns, status.st_mtime_ns))
    return sound


def _look_up_7(catalog: Catalog) -> Any:
    return catalog.version().store.table("emb").lookup(np.array([7]))[0]


@pytest.mark.parametrize("keep_times", [False, True])
@pytest.mark.parametrize("before", [True, False])
def test_a_snapshot_damaged_in_its_place_gives_no_wrong_row_and_leaves_service(
    settled: None, tmp_path: Path, before: bool, keep_times: bool, caplog: Any
) -> None:
    if before:
        write_snapshot(tmp_path / "m", 1)
    served = write_snapshot(tmp_path / "m", 2)
    watched = Watched(tmp_path / "m")
    assert (_look_up_7(watched.catalog) == expected_rows(2, [7])).all()
    _damage_in_place(served, keep_times=keep_times)
    for code in ("damaged",) if keep_times else ("file_changed", "damaged"):
        with pytest.raises(RequestError) as caught:
            _look_up_7(watched.catalog)
        assert (caught.value.status, caught.value.code) == (503, code)
        time.sleep(0.06)
    assert watched.look() == ([1] if before else [])
    if before:
        assert (_look_up_7(watched.catalog) == expected_rows(1, [7])).all()
    else:
        assert "its rows from byte 0 on" in watched.catalog.unready()
    assert "it is taken out of service" in caplog.text or "version 2 is taken out of service" in caplog.text


@pytest.mark.parametrize("change", ["touch", "chmod"])
def test_what_was_touched_is_compared_again_and_goes_on(settled: None, tmp_path: Path, change: str) -> None:
    served = write_snapshot(tmp_path / "m", 2)
    watched = Watched(tmp_path / "m")
    served.touch() if change == "touch" else served.chmod(0o600)
    assert watched.look() == [2] and not watched.catalog.version().store.verifies_on_use
    assert said(watched.catalog.version()) == 2 and watched.catalog.ready


def test_damage_is_found_though_nobody_asks_and_no_poll_looks(tmp_path: Path, caplog: Any) -> None:
    write_snapshot(tmp_path / "m", 1)
    served = write_snapshot(tmp_path / "m", 2)
    catalog = Catalog()
    versions = Versions(catalog, [ModelSource("m", str(tmp_path / "m"))], Settings())
    versions.start()
    try:
        until(lambda: catalog.warm)
        _damage_in_place(served)
        until(lambda: [version.number for version in catalog.versions()] == [1])
    finally:
        versions.stop()
    assert "version 2 is taken out of service" in caplog.text


def test_workers_do_not_take_what_was_damaged_in_its_place_for_what_one_of_them_verified(
    settled: None, tmp_path: Path
) -> None:
    write_snapshot(tmp_path / "m", 1)
    served = write_snapshot(tmp_path / "m", 2)
    (tmp_path / "shared").mkdir()
    workers = [Watched(tmp_path / "m", shared=tmp_path / "shared") for _ in range(2)]
    assert [worker.look() for worker in workers] == [[2], [2]]
    sound = _damage_in_place(served)
    assert [worker.look() for worker in workers] == [[1], [1]]
    assert Watched(tmp_path / "m", shared=tmp_path / "shared").look() == [1], "one that begins later"
    with served.open("r+b") as file:  # healed in its place
        file.write(sound)
    for worker in (*workers, Watched(tmp_path / "m", shared=tmp_path / "shared")):
        assert worker.look() == [2] and said(worker.catalog.version()) == 2


def test_the_lookup_that_finds_a_file_written_over_has_it_loaded_anew(tmp_path: Path, caplog: Any) -> None:
    served, other = write_snapshot(tmp_path / "m", 1), write_snapshot(tmp_path / "other", 2)
    catalog = Catalog()
    versions = Versions(catalog, [ModelSource("m", str(served))], Settings())  # no poll: nobody else looks
    versions.start()
    try:
        until(lambda: catalog.warm)
        shutil.copyfile(other, served)
        with pytest.raises(RequestError) as caught:
            said(catalog.version())
        assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
        until(lambda: catalog.ready)
        assert said(catalog.version()) == 2
    finally:
        versions.stop()
    assert caplog.text.count("was cut or written over") == 1


def test_a_snapshot_of_the_cache_that_is_cut_is_made_again(settled: None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    (made,) = (tmp_path / "cache").glob("*.kvsnap")
    _truncate(made)
    with pytest.raises(RequestError, match="it is loaded anew"):
        said(watched.catalog.version())
    assert watched.look(1) == [1], "though nothing has changed where it was made from"
    assert said(watched.catalog.version()) == 1 and watched.catalog.ready


def test_a_single_model_is_followed_too(settled: None, write_version: Write, tmp_path: Path) -> None:
    exported = write_version(tmp_path / "m", 0, name="exported")
    watched = Watched(exported)
    write_version(tmp_path / "m", 0, name="exported", says=5)
    assert watched.look() == [1]
    assert said(watched.catalog.version()) == 5


def test_a_link_that_is_swapped_is_a_new_version(settled: None, write_version: Write, tmp_path: Path) -> None:
    targets = [write_version(tmp_path / "m", number) for number in (1, 2)]
    latest = tmp_path / "latest"

    def swap(target: Path) -> None:
        beside = tmp_path / "latest.new"
        beside.symlink_to(target)
        beside.replace(latest)

    swap(targets[0])
    watched = Watched(latest)
    old: Any = watched.catalog.version()
    assert said(old) == 1
    swap(targets[1])
    assert watched.look() == [1] and said(watched.catalog.version()) == 2
    swap(targets[0])
    assert watched.look() == [1] and said(watched.catalog.version()) == 1, "and back"
    assert said(old) == 1, "who began with it ends with it"
    latest.unlink()
    assert watched.look() == [1] and said(watched.catalog.version()) == 1, "a link that is gone ends nothing"


def test_two_entries_of_one_number_are_refused(settled: None, write_version: Write, tmp_path: Path) -> None:
    write_version(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    write_version(tmp_path / "m", 2)
    write_version(tmp_path / "m", 2, name="002")
    assert watched.look() == [1]
    assert watched.error(2)[1].endswith("are the same version; remove one") and "'002" in watched.error(2)[1]


def test_no_version_at_the_start(
    settled: None, write_version: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(BadInputError, match=r"no version in this folder.*--wait"):
        Watched(tmp_path / "m")
    with pytest.raises(BadInputError, match="there is nothing"):
        Watched(tmp_path / "nowhere")
    watched = Watched(tmp_path / "m", wait=True)
    assert "waiting for a version" in caplog.text and "--wait" not in caplog.text
    assert not watched.catalog.ready and watched.catalog.live
    write_version(tmp_path / "m", 4)
    assert watched.look() == [4]
    assert watched.catalog.ready


def test_a_cache_that_cannot_be_written_is_named_to_who_starts_the_server_alone(settled: None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=f"making a snapshot in '{tmp_path}/file/cache'"):
        Watched(tmp_path / "m", cache=tmp_path / "file" / "cache")
    watched = Watched(tmp_path / "m", cache=tmp_path / "file" / "cache", wait=True)
    assert "making a snapshot in 'cache'" in watched.catalog.unready()


@pytest.mark.parametrize("resident", [False, True])
def test_rows_asked_for_lately_are_read_before_the_swap_where_not_all_are_in_memory(
    settled: None, write_version: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: bool
) -> None:
    monkeypatch.setattr(TableStore, "resident", property(lambda store: store.snapshot.resident and resident))
    write_version(tmp_path / "m", 1)
    watched = Watched(tmp_path / "m")
    old = watched.catalog.version()
    old.recent["emb"].note(np.array([3, 150, 3, -1]))
    table = type(old.store.table("emb"))
    touched: list[list[int]] = []
    plain = table.lookup

    def lookup(self: Any, keys: Any) -> Any:
        assert watched.numbers() == [1], "before the swap"
        touched.append(keys.tolist())
        return plain(self, keys)

    monkeypatch.setattr(table, "lookup", lookup)
    write_version(tmp_path / "m", 2)
    assert watched.look() == [2]
    assert touched == ([] if resident else [[-1, 3, 150]])


def test_several_models(settled: None, write_version: Write, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_version(tmp_path / name, 1)
    catalog = Catalog()
    models = {name: ModelSource(name, str(tmp_path / name)) for name in ("a", "b", "c")}
    versions = Versions(catalog, [models["a"], models["b"]], Settings(poll=3600.0))
    assert catalog.names() == ["a", "b"] and not catalog.ready, "named, and not loaded yet"
    versions.start()
    done = versions.reload([models["b"], models["c"], ModelSource("d", str(tmp_path / "nowhere"))])
    assert done.result(60) == {"d": "there is nothing at its path"}
    assert sorted(catalog.names()) == ["a", "b", "c", "d"], "nothing is let go of for a list that cannot be served"
    assert catalog.version("a").number == catalog.version("c").number == 1
    assert not catalog.ready, "d has no version"
    assert versions.reload([models["b"], models["c"]]).result(60) == {}
    versions.stop()
    assert catalog.names() == ["b", "c"] and catalog.ready
    with pytest.raises(UnknownModelError):
        catalog.version("a")


def test_of_two_reloads_the_later_one_says_what_is_let_go(settled: None, write_version: Write, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_version(tmp_path / name, 1)
    catalog = Catalog()
    models = {name: ModelSource(name, str(tmp_path / name)) for name in ("a", "b", "c")}
    versions = Versions(catalog, [models["a"]], Settings(poll=3600.0))
    versions.load()
    first, second = versions.reload([models["b"]]), versions.reload([models["c"], models["a"]])
    versions.go_on()
    assert first.result(60) == second.result(60) == {}
    versions.stop()
    assert sorted(catalog.names()) == ["a", "c"]


def test_of_two_reloads_at_two_workers_the_later_one_says_what_is_let_go(
    settled: None, write_version: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module.os, "kill", lambda pid, number: None)
    for name in ("a", "b", "c"):
        write_version(tmp_path / name, 1)
    (tmp_path / "shared").mkdir()
    models = {name: ModelSource(name, str(tmp_path / name)) for name in ("a", "b", "c")}
    workers = []
    for _ in range(2):
        catalog = Catalog()
        workers.append((catalog, Versions(catalog, [models["a"]], Settings(poll=3600.0, shared=tmp_path / "shared"))))
    for _, versions in workers:
        versions.load()
    first, second = workers[0][1].reload([models["b"]]), workers[1][1].reload([models["c"], models["a"]])
    for (_, versions), done in zip(workers, (first, second), strict=True):
        versions.go_on()
        assert done.result(60) == {}
    for catalog, versions in workers:
        versions.look_soon()  # as after the signal of the supervisor
        until(lambda catalog=catalog: sorted(catalog.names()) == ["a", "c"] and catalog.ready)
        versions.stop()


def test_a_model_that_is_sent_to_a_path_without_a_version_is_told(
    settled: None, write_version: Write, tmp_path: Path
) -> None:
    """It goes on with what it had, which is no version of the path that it was sent to."""
    for name, says in (("m", 5), ("other", 8)):
        write_version(tmp_path / name, 1, says=says)
    (tmp_path / "damaged" / "1").mkdir(parents=True)
    (tmp_path / "damaged" / "1" / "saved_model.pb").write_bytes(b"")
    watched = Watched(tmp_path / "m")
    watched.versions.go_on()
    for name, reason in (("nowhere", "its path has no version"), ("damaged", "version 1: ")):
        done = watched.versions.reload([ModelSource("m", str(tmp_path / name))])
        assert reason in done.result(60)["m"], name
        assert said(watched.catalog.version("m")) == 5
    assert watched.versions.reload([ModelSource("m", str(tmp_path / "other"))]).result(60) == {}
    assert said(watched.catalog.version("m")) == 8
    watched.versions.stop()


def test_a_model_may_be_taken_away_while_its_damage_is_found(
    settled: None, slow_to_verify: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_snapshot(tmp_path / "other", 1)
    _flip(write_snapshot(tmp_path / "m", 1))
    watched = Watched(tmp_path / "m")
    plain = version_loader.VersionLoader.finish

    def finish(self: Any, store: TableStore) -> None:
        watched.versions._take([])  # as where another worker was told so
        plain(self, store)

    with monkeypatch.context() as patch:
        patch.setattr(version_loader.VersionLoader, "finish", finish)
        watched.versions.go_on()
        until(lambda: watched.catalog.names() == [])
        assert watched.versions.reload([]).result(60) == {}
    other = ModelSource("other", str(tmp_path / "other"))
    assert watched.versions.reload([other]).result(60) == {}, "the thread goes on"
    assert said(watched.catalog.version("other")) == 1
    watched.versions.stop()


def test_the_thread_goes_on_where_changes_of_others_cannot_be_read(
    settled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(sources_module.os, "kill", lambda pid, number: None)
    monkeypatch.setattr("kvtools.server.versions._AFTER_FAILURE", 0.0)
    write_snapshot(tmp_path / "m", 1)
    (tmp_path / "shared").mkdir()
    watched = Watched(tmp_path / "m", shared=tmp_path / "shared")
    watched.versions.go_on()
    write_snapshot(tmp_path / "m", 2)
    plain, failed = SharedSources.changed, []

    def changed(self: SharedSources) -> Any:
        if not failed and threading.current_thread() is not threading.main_thread():
            failed.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(SharedSources, "changed", changed)
        with pytest.raises(OSError, match="Too many open files"):
            watched.versions.reload([ModelSource("m", str(tmp_path / "m"))]).result(60)
        until(lambda: watched.numbers() == [2])
    assert "looking for versions failed" in caplog.text
    watched.versions.stop()


def test_notes_of_versions_that_were_compared_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "_MOST_NOTES", 3)
    shared = SharedSources(tmp_path)
    for number in range(9):
        with shared.only_once(str(number), lambda: True) as done:
            assert not done
    with shared.only_once("8", lambda: True) as done:
        assert done
    assert len(list(tmp_path.glob("done-*"))) == 3


def test_a_fault_of_a_name_that_is_no_utf8_is_told_to_workers(tmp_path: Path) -> None:
    shared = SharedSources(tmp_path)
    shared.tell_fault("1", "serving 'caf\udce9': it is empty")
    assert shared.fault("1") == r"serving 'caf\udce9': it is empty"


def test_workers_hear_of_each_others_changes(
    settled: None, write_version: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(sources_module.os, "kill", lambda pid, number: told.append(number))
    for number in (1, 2):
        write_version(tmp_path / "m", number)
    shared = tmp_path / "shared"
    shared.mkdir()
    checked: list[str] = []
    monkeypatch.setattr(version_loader, "_AT_ONCE", 60.0)  # on a busy machine, too: what is cut short is done again
    plain = TableStore.verify
    monkeypatch.setattr(TableStore, "verify", lambda self, on: checked.append(str(self.path)) or plain(self, on))
    one, two = (Watched(tmp_path / "m", "all", shared=shared) for _ in range(2))
    one.look()
    one.versions.set_label("m", "stable", 1)
    assert told
    two.look()
    assert two.catalog.labels("m") == {"stable": 1}
    assert Watched(tmp_path / "m", "all", shared=shared).catalog.labels("m") == {"stable": 1}, "one that begins later"
    assert len(checked) == 2, "checksums are compared once for all workers"


def test_changes_by_several_workers_add_up(settled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module.os, "kill", lambda pid, number: None)
    for number in (1, 2):
        write_snapshot(tmp_path / "m", number)
    (tmp_path / "shared").mkdir()
    one, two = (Watched(tmp_path / "m", "all", {"old": 1}, shared=tmp_path / "shared") for _ in range(2))
    one.versions.set_label("m", "old", 2)
    two.versions.set_label("m", "new", 1)  # before it looked
    assert two.catalog.labels("m") == {"old": 2, "new": 1}
    one.versions.set_label("m", "new", None)
    assert one.catalog.labels("m") == {"old": 2}
    two.versions.reload([ModelSource("n", str(tmp_path / "m"))])
    one.versions.set_label("m", "old", 1)
    assert {source.name: source.labels for source in one.versions.sources()} == {"n": {}, "m": {"old": 1}}


def test_workers_do_without_locks_where_there_are_none(
    settled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(lock: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    write_snapshot(tmp_path / "m", 1)
    monkeypatch.setattr(sources_module.fcntl, "flock", flock)
    (tmp_path / "shared").mkdir()
    assert Watched(tmp_path / "m", shared=tmp_path / "shared").numbers() == [1]


def write_constant(path: Path, *tables: str, constant: float | None) -> None:
    """Write tables whose rows begin with `constant`, or nobody knows how."""
    metadata = {} if constant is None else {"initializer": {"kind": "constant", "a": constant}}
    rows = np.ones((5, 4), np.float32)
    beside = path.parent.parent / "beside"
    beside.mkdir()
    write_tables([ArrayTable(name, KEYS, rows, metadata=metadata) for name in tables], beside / "model", "tfplugin")
    path.parent.mkdir(exist_ok=True)
    beside.rename(path)


def test_missing_default_gives_what_training_would_have_begun_with(settled: None, tmp_path: Path) -> None:
    write_constant(tmp_path / "m" / "1", "scope/emb", constant=0.5)
    client = TestClient(create_app(Watched(tmp_path / "m", missing="default").catalog, Settings(missing="default")))
    answer = client.post("/v1/tables/scope/emb:lookup", json={"keys": [1, 99]}).json()
    assert answer == {"embeddings": [[1.0] * 4, [0.5] * 4], "found": [True, False]}


def test_missing_default_without_a_default_row_is_an_error_at_the_start(settled: None, tmp_path: Path) -> None:
    write_constant(tmp_path / "m" / "1", "scope/emb", "z", constant=None)
    with pytest.raises(BadInputError, match=r"default: table 'scope/emb' of '.*/m/1' .* say --missing zeros or"):
        Watched(tmp_path / "m", missing="default")
    assert Watched(tmp_path / "m", missing="error").numbers() == [1]


def test_a_new_version_without_a_default_row_is_bad_where_it_is_wanted(settled: None, tmp_path: Path) -> None:
    write_constant(tmp_path / "m" / "1", "emb", constant=0.5)
    watched = Watched(tmp_path / "m", missing="default")
    write_constant(tmp_path / "m" / "2", "emb", constant=None)
    assert watched.look() == [1]
    assert "table 'emb' of '2' has no default row" in watched.error(2)[1]
