"""Checksums beside files of formats that have none: what changed, went and came; damage is told from writing."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from kvtools.array_table import table_from_arrays
from kvtools.checksum_file import checksum_path, files_of, read_checksums, write_checksums
from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CorruptFileError, OutputError
from kvtools.migrate import write_tables
from kvtools.verify import verify

DATA = Path(__file__).parent.parent / "data"
BLOCK = 1 << 20
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A table of 4 blocks and a bit in a format without checksums."""
    values = np.random.default_rng(0).normal(size=(18_000, 64)).astype(np.float32)
    write_tables([table_from_arrays("emb", np.arange(len(values)), values)], tmp_path / "dump", "sok")
    return tmp_path / "dump"


def found(path: Path) -> list[tuple[str, str]]:
    return [(finding.severity, finding.check) for finding in verify(str(path)).findings]


def messages(path: Path) -> str:
    return "\n".join(finding.message for finding in verify(str(path)).findings)


def later(path: Path, checkpoint: Path) -> None:
    """Give a file a time after that of the checksums."""
    known = read_checksums(checkpoint)
    assert known is not None
    os.utime(path, ns=(known.written + 10**9, known.written + 10**9))


def test_what_is_in_the_file(dump: Path) -> None:
    made = write_checksums(dump)
    assert made.path == dump / ".kvtools-checksums" == checksum_path(dump)
    told = json.loads(made.path.read_text())
    text = made.path.read_text()
    content = text[text.index('"content": ') + len('"content": ') : -2]
    assert told["crc32c"] == f"{google_crc32c.value(content.encode()):08x}"
    assert told["content"]["block"] == BLOCK
    for file in told["content"]["files"]:
        data = (dump / file["name"]).read_bytes()
        assert file["bytes"] == len(data) and file["modified"] == (dump / file["name"]).stat().st_mtime_ns
        blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        assert file["crc32c"] == "".join(f"{google_crc32c.value(block):08x}" for block in blocks)
    assert {file["name"] for file in told["content"]["files"]} == {"emb-key", "emb-weight"}
    again = read_checksums(dump)
    assert again == made


def test_sound_files_are_compared_and_that_is_said(dump: Path, capsys: Capture) -> None:
    assert main(["verify", str(dump)]) == 0
    assert "not compared: emb: bytes with any checksum: sok has none; see --write-checksums" in capsys.readouterr().out
    assert main(["verify", str(dump), "--write-checksums"]) == 0
    assert f"wrote {dump}/.kvtools-checksums: checksums of 2 files, 4.5 MiB" in capsys.readouterr().out
    assert main(["verify", str(dump)]) == 0
    out = capsys.readouterr().out
    assert "compared: 2 files, 4.5 MiB, with the checksums of 20" in out and "not compared" not in out
    assert main(["verify", str(dump), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (files,) = told["checked_files"]
    assert files["path"] == f"{dump}/.kvtools-checksums" and files["files"] == 2
    assert [table["checksums"] for table in told["tables"]] == [None]
    assert main(["verify", str(DATA / "sample")]) == 0
    assert "compared: all tables: bytes with CRC-32C, in its files" in capsys.readouterr().out


@pytest.mark.parametrize("newer", [False, True])
def test_a_changed_byte_is_found(dump: Path, newer: bool) -> None:
    """Whatever the file's time says, if few blocks of many differ."""
    write_checksums(dump)
    file = dump / "emb-weight"
    time = file.stat().st_mtime_ns
    data = bytearray(file.read_bytes())
    data[2 * BLOCK + 77] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(time, time))
    if newer:
        later(file, dump)
    assert found(dump) == [("error", "changed-file")]
    said = messages(dump)
    assert f"'{file}' differs from its checksums in bytes {2 * BLOCK} to {3 * BLOCK};" in said
    assert ("it is damaged, or was written again" if newer else "nobody wrote to it since: it is damaged") in said


def test_a_changed_byte_of_a_small_file_is_an_error(tmp_path: Path) -> None:
    """A file of one block: nothing tells damage from writing, so that it is said, and is no mere warning."""
    shutil.copytree(DATA / "sok", tmp_path / "sok")
    write_checksums(tmp_path / "sok")
    file = tmp_path / "sok" / "emb_0-weight"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    later(file, tmp_path / "sok")
    assert ("error", "changed-file") in found(tmp_path / "sok")
    assert "it is damaged, or was written again" in messages(tmp_path / "sok")


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("size", [3 * BLOCK, 3 * BLOCK + 5, 100, 0])
def test_a_cut_file_is_damage_whatever_its_time(dump: Path, size: int, newer: bool) -> None:
    write_checksums(dump)
    file = dump / "emb-weight"
    os.truncate(file, size)
    if newer:
        later(file, dump)
    assert ("error", "changed-file") in found(dump)
    assert f"'{file}' was cut: it has {size} bytes, expected {18_000 * 256 + 296}" in messages(dump)


def test_missing_and_extra_files(dump: Path) -> None:
    write_checksums(dump)
    (dump / "other-key").write_bytes((dump / "emb-key").read_bytes())
    (dump / "emb-key").unlink()
    (dump / ".DS_Store").write_text("no file of it")
    checks = found(dump)
    assert ("error", "missing-file") in checks and ("warning", "extra-file") in checks
    said = messages(dump)
    assert "'emb-key' is in" in said and "'other-key' is not in" in said and "DS_Store" not in said


@pytest.mark.parametrize("rows", [18_000, 17_000, 19_000])
def test_a_checkpoint_that_was_written_again_is_told_from_a_damaged_one(dump: Path, rows: int) -> None:
    write_checksums(dump)
    values = np.random.default_rng(1).normal(size=(rows, 64)).astype(np.float32)
    fresh = dump.with_name("fresh")
    write_tables([table_from_arrays("emb", np.arange(rows) * 3, values)], fresh, "sok")
    for file in fresh.glob("emb-*"):
        (dump / file.name).write_bytes(file.read_bytes())  # as its engine does, into the same files
        later(dump / file.name, dump)
    assert found(dump) == [("warning", "stale-checksums")]
    said = messages(dump)
    assert "written again after" in said and f"kvtools verify {dump} --write-checksums --force" in said
    assert main(["verify", str(dump), "--write-checksums", "--force"]) == 0
    assert found(dump) == []


def test_what_kvtools_writes_anew_has_no_old_checksums(tmp_path: Path) -> None:
    table = table_from_arrays("emb", np.arange(4), np.ones((4, 2), np.float32))
    for dialect, name in (("npz", "a.npz"), ("tfplugin", "model"), ("sok", "folder")):
        path = tmp_path / name
        write_tables([table], path, dialect)
        write_checksums(open_checkpoint(path).path)
        assert main(["clip", str(path), str(path), "--top-k", "2", "--by", "l2", "--force"]) == 0
        assert read_checksums(path) is None
        assert found(path) == []


def test_files_of_a_bundle_alone(tmp_path: Path) -> None:
    table = table_from_arrays("emb", np.arange(4), np.ones((4, 2), np.float32))
    for name in ("model.ckpt-1", "model.ckpt-10"):
        write_tables([table], tmp_path / name, "tfplugin")
    (tmp_path / "model.ckpt-1.meta").write_text("graph")
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"')
    assert list(files_of(tmp_path / "model.ckpt-1")) == [
        "model.ckpt-1.data-00000-of-00001",
        "model.ckpt-1.index",
        "model.ckpt-1.meta",
    ]
    assert main(["verify", str(tmp_path), "--write-checksums"]) == 0
    assert (tmp_path / "model.ckpt-1.kvtools-checksums").exists()
    assert verify(str(tmp_path)).checked_files[0].files == 3
    data = tmp_path / "model.ckpt-1.data-00000-of-00001"
    data.write_bytes(data.read_bytes() + b"more")
    assert any(finding.check in ("stale-checksums", "changed-file") for finding in verify(str(tmp_path)).findings)


def test_tables_in_a_folder_beside_a_bundle_and_a_saved_model_whole() -> None:
    names = files_of(open_checkpoint(DATA / "tfra" / "filesystem" / "ckpt").path)  # type: ignore[arg-type]
    assert any(name.startswith("TFRADynamicEmbedding/") for name in names) and "ckpt.index" in names
    model = DATA / "tfra" / "savedmodel"
    names = files_of(open_checkpoint(model).path)  # type: ignore[arg-type]
    assert "saved_model.pb" in names and any(name.startswith("variables/") for name in names)


def test_nothing_is_written_of_what_is_wrong(dump: Path, capsys: Capture) -> None:
    values = np.full((3, 2), np.nan, np.float32)
    bad = dump.with_name("bad")
    write_tables([table_from_arrays("emb", np.arange(3), values)], bad, "sok")
    assert main(["verify", str(bad), "--write-checksums"]) == 3
    assert read_checksums(bad) is None
    for more, message in (
        (["--table", "emb"], "expected the whole of it"),
        (["--table", "emb", "--force"], "expected the whole of it"),
    ):
        assert main(["verify", str(dump), "--write-checksums", *more]) == 2
        assert message in capsys.readouterr().err
    assert main(["verify", str(dump), "--dry-run"]) == 2
    assert "which are for --write-checksums" in capsys.readouterr().err


def test_checksums_are_not_replaced_unasked(dump: Path) -> None:
    write_checksums(dump)
    before = checksum_path(dump).read_bytes()
    with pytest.raises(OutputError, match="add --force to replace it"):
        write_checksums(dump)
    assert checksum_path(dump).read_bytes() == before
    write_checksums(dump, force=True)
    with pytest.raises(BadInputError, match="there is no file of it"):
        write_checksums(dump / "nothing")


def damage_of(text: str) -> list[Any]:
    """Ways in which a file of checksums is none."""
    told = json.loads(text)
    return [
        "",
        "{",
        "[]",
        "[" * 100_000,
        text[:-20],
        text.replace('"bytes": ', '"bytes": 1', 1),
        json.dumps({**told, "kvtools_checksums": 2}),
        json.dumps({"kvtools_checksums": 1}),
        b"\xff\xfe",
    ]


@pytest.mark.parametrize("number", range(9))
def test_a_damaged_file_of_checksums_is_a_warning(dump: Path, number: int) -> None:
    write_checksums(dump)
    path = checksum_path(dump)
    damaged = damage_of(path.read_text())[number]
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    with pytest.raises((CorruptFileError, BadInputError), match="reading the checksums"):
        read_checksums(dump)
    assert found(dump) == [("warning", "checksum-file")]


def test_of_what_cannot_be_opened_the_changed_file_is_named(tmp_path: Path) -> None:
    table = table_from_arrays("emb", np.arange(4), np.ones((4, 2), np.float32))
    path = tmp_path / "a.npz"
    write_tables([table], path, "npz")
    write_checksums(path)
    os.truncate(path, 100)
    assert [check for _, check in found(path)] == ["open", "changed-file"]


def test_a_file_that_changes_meanwhile_is_refused(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvtools.checksum_file as module

    def blocks(path: Path, block: int) -> Any:
        with path.open("ab") as file:
            file.write(b"more")
        return [zlib.crc32(b"")]

    monkeypatch.setattr(module, "_blocks", blocks)
    with pytest.raises(OutputError, match="changed while it was read"):
        write_checksums(dump)
    assert not checksum_path(dump).exists()
