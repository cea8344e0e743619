from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtools.dialects.detect import dialects, open_checkpoint
from kvtools.dialects.location import Location, locate
from kvtools.errors import BadInputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(["model.ckpt-5", "model.ckpt-10", "other"]):
        (tmp_path / f"{name}.index").write_bytes(b"")
        (tmp_path / f"{name}.data-00000-of-00001").write_bytes(b"")
        os.utime(tmp_path / f"{name}.index", (1000 + number, 1000 + number))
    return tmp_path


@pytest.mark.parametrize("suffix", ["", ".index", ".data-00000-of-00001", ".meta"])
def test_prefix_or_any_of_its_files(folder: Path, suffix: str) -> None:
    assert locate(folder / f"model.ckpt-5{suffix}") == Location(folder / "model.ckpt-5")


def test_folder_without_state_gives_the_newest(folder: Path) -> None:
    assert locate(folder) == Location(folder / "other")


@pytest.mark.parametrize(
    "text",
    [
        'model_checkpoint_path: "model.ckpt-10"\nall_model_checkpoint_paths: "model.ckpt-5"\n',
        "model_checkpoint_path: 'model.ckpt-10'\n",
        'model_checkpoint_path: "/moved/from/elsewhere/model.ckpt-10"\n',
        'model_checkpoint_path: "model.ckpt\\05510"\n',
        'all_model_checkpoint_paths: "other"\nmodel_checkpoint_path: "model.ckpt-10"\n',
    ],
)
def test_folder_with_state_gives_what_it_names(folder: Path, text: str) -> None:
    (folder / "checkpoint").write_text(text)
    assert locate(folder) == Location(folder / "model.ckpt-10")


def test_state_that_names_nothing_there(folder: Path) -> None:
    (folder / "checkpoint").write_text('model_checkpoint_path: "gone"')
    with pytest.raises(BadInputError, match="names 'gone', and there is no"):
        locate(folder)
    (folder / "checkpoint").write_bytes(b"\xff\x00")
    with pytest.raises(BadInputError, match="names no model_checkpoint_path"):
        locate(folder)


def test_saved_model(tmp_path: Path) -> None:
    (tmp_path / "variables").mkdir()
    (tmp_path / "saved_model.pb").write_bytes(b"")
    assert locate(tmp_path) == Location(tmp_path / "variables" / "variables", tmp_path)


def test_prefix_wins_over_a_folder_of_its_name(folder: Path) -> None:
    (folder / "model.ckpt-5").mkdir()
    assert locate(folder / "model.ckpt-5") == Location(folder / "model.ckpt-5")


def test_index_missing_beside_data(folder: Path) -> None:
    (folder / "other.index").unlink()
    with pytest.raises(BadInputError, match=r"found 'other.data-00000-of-00001' but no 'other.index'"):
        locate(folder / "other")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no such folder"):
        locate(tmp_path / "nope")
    with pytest.raises(BadInputError, match=r"no '\*.index' file"):
        locate(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadInputError, match="none of a checkpoint's"):
        locate(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    "tables, message",
    [(["kv_tables/tables.index"], r"unzip .*m\.keras 'kv_tables/\*'"), ([], r"without tables; load it, and save a tf")],
)
def test_a_file_of_keras_says_how_to_get_at_its_tables(tmp_path: Path, tables: list[str], message: str) -> None:
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        for name in ["config.json", "model.weights.h5", *tables]:
            archive.writestr(name, b"")
    with pytest.raises(BadInputError, match=f"it is a file of Keras.*{message}"):
        locate(tmp_path / "m.keras")


@pytest.fixture
def powerless() -> Iterator[Path]:
    """A folder that everybody may enter, while this process is a user whom permissions bind."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are closed to other users
    folder.chmod(0o777)
    dialects()  # what is imported later may be closed to other users, too
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(user)
        for path in folder.rglob("*"):
            path.chmod(0o700)
        shutil.rmtree(folder)


@pytest.mark.parametrize("denied", ["model.ckpt.index", "a.npz", "folder", "folder/inside"])
def test_what_may_not_be_read_is_said_so(powerless: Path, denied: str) -> None:
    path = powerless / denied
    path.parent.mkdir(exist_ok=True)
    if denied == "folder":
        path.mkdir(0o000)
    else:
        path.write_bytes(b"x")
        path.chmod(0o000)
        if denied == "folder/inside":
            path.parent.chmod(0o000)
    with pytest.raises(BadInputError, match="Permission denied"):
        open_checkpoint(powerless / denied.removesuffix(".index"))
