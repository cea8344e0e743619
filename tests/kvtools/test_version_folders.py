"""Which versions are old, and that nothing else is ever removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtools.dialects.snapshot import MAGIC
from kvtools.errors import OutputError, UsageError
from kvtools.replace_output import replace_folder
from kvtools.version_folders import check_version, next_version, outdated, remove_versions


def model(folder: Path, name: str, written_by: str = "kvtools 1.0") -> Path:
    (folder / name / "assets.extra").mkdir(parents=True)
    (folder / name / "saved_model.pb").touch()
    (folder / name / "assets.extra" / "kvtools.json").write_text(json.dumps({"written_by": written_by}))
    return folder / name


def snapshot(folder: Path, name: str) -> Path:
    (folder / name).write_bytes(MAGIC + b"...")
    return folder / name


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    for name in ("9", "10", "100", "2"):
        model(tmp_path, name)
    assert names(outdated(tmp_path / "100", 2)) == ["2", "9"]
    assert names(outdated(tmp_path / "100", 9)) == []
    assert names(outdated(tmp_path / "101", 2)) == ["2", "9", "10"]  # not there yet


def test_the_one_just_written_stays_even_if_it_is_not_among_the_newest(tmp_path: Path) -> None:
    for name in ("1", "2", "3", "4"):
        model(tmp_path, name)
    assert names(outdated(tmp_path / "1", 2)) == ["2"]


def test_only_what_kvtools_wrote_is_removed(tmp_path: Path) -> None:
    model(tmp_path, "5")
    ours = model(tmp_path, "1")
    model(tmp_path, "2", written_by="somebody")
    (tmp_path / "3").mkdir()  # without a manifest
    (tmp_path / "4").write_text("a file")
    elsewhere = model(tmp_path, "elsewhere")
    (tmp_path / "0").symlink_to(elsewhere)
    (tmp_path / "1.kvsnap").write_bytes(MAGIC)
    model(tmp_path, "1.old")
    (tmp_path / "2" / "more").touch()
    there = {path.name for path in tmp_path.iterdir()}
    assert outdated(tmp_path / "5", 1) == [ours]
    assert remove_versions([ours]) == ([ours], [])
    assert {path.name for path in tmp_path.iterdir()} == there - {"1"}


def test_snapshots_are_versions_by_themselves(tmp_path: Path) -> None:
    for name in ("7.kvsnap", "8.kvsnap", "10.kvsnap"):
        snapshot(tmp_path, name)
    model(tmp_path, "3")
    (tmp_path / "1.kvsnap").write_text("no snapshot")
    old = outdated(tmp_path / "10.kvsnap", 2)
    assert names(old) == ["7.kvsnap"]
    remove_versions(old)
    assert sorted(names([*tmp_path.iterdir()])) == ["1.kvsnap", "10.kvsnap", "3", "8.kvsnap"]


def test_the_next_version_is_behind_all_that_are_there(tmp_path: Path) -> None:
    assert next_version(tmp_path).name == "1"
    (tmp_path / "9").mkdir()
    snapshot(tmp_path, "10.kvsnap")
    (tmp_path / ".11.kvtools-x").mkdir()
    assert next_version(tmp_path).name == "11"
    assert next_version(tmp_path, ".kvsnap").name == "11.kvsnap"
    with pytest.raises(OutputError, match="there is no such folder; make it first"):
        next_version(tmp_path / "none")
    model(tmp_path, "1795908046335633000")  # of a clock in nanoseconds
    assert next_version(tmp_path).name == "1795908046335633001"


def test_a_version_that_another_process_is_writing_has_its_number(tmp_path: Path) -> None:
    (tmp_path / "3").mkdir()
    with replace_folder(tmp_path / "4", mark="a", force=False) as work:
        assert work.name.startswith(".4.kvtools-") and next_version(tmp_path).name == "5"
        (work / "a").touch()
    assert next_version(tmp_path).name == "5"


def test_an_output_that_is_no_version_is_told(tmp_path: Path) -> None:
    check_version(tmp_path / "007.kvsnap", 1)
    with pytest.raises(UsageError, match=r"versions are told by their numbers; name one, such as '.*/model/1'"):
        check_version(tmp_path / "model", 3)
    with pytest.raises(UsageError, match="got --keep 0, expected 1 or more versions"):
        check_version(tmp_path / "1", 0)


def test_what_cannot_be_removed_is_told_and_the_rest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [model(tmp_path, "1"), model(tmp_path, "2")]
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "1":
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    removed, faults = remove_versions(versions)
    assert names(removed) == ["2"] and faults == [f"removing '{tmp_path / '1'}': Permission denied"]
    assert names([*tmp_path.iterdir()]) == ["1"]


def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / f".1.kvtools-removed-{'0' * 32}"
    model(tmp_path, left.name)
    working = tmp_path / ".3.kvtools-abc"
    working.mkdir()
    assert remove_versions([model(tmp_path, "2")])[1] == []
    assert names([*tmp_path.iterdir()]) == [working.name]
