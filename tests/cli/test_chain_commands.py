"""The commands on chains (inspect, verify, log, merge, apply, diff --output delta), and others given a chain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools import chain
from kvtools.chain_increment import increment_of, write_member
from kvtools.cli.main import main
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.detect import open_checkpoint
from kvtools.migrate import write_tables

from ..kvtools.chain_files import CHAIN, ChainWriter, Rows, dense, row, rows_of, table_of

FIRST: Rows = {1: row(1), 2: row(2), -3: row(3), 4: row(4)}
SECOND: Rows = {1: row(1), 2: row(20), -3: row(3), 7: row(7)}  # 4 went, 7 came, 2 changed
THIRD: Rows = {1: row(1, freq=2), 2: row(20), 4: row(44), 9: row(9)}  # -3 and 7 went, 4 came again, 1 changed


@pytest.fixture
def train(tmp_path: Path) -> Path:
    folder = tmp_path / "train"
    folder.mkdir()
    writer = ChainWriter(folder)
    for rows in (FIRST, SECOND, THIRD):
        tables = {"emb": table_of(rows)}
        writer.delta(tables) if writer.number else writer.full(tables)
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> str:
    """Run a command and return what it prints; of one that fails, its error."""
    assert main([str(argument) for argument in arguments]) == status
    captured = capsys.readouterr()
    return captured.err if status == 1 or status == 2 else captured.out


def told(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> Any:
    assert main([*(str(argument) for argument in arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_inspect_lists_the_members(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "inspect", train)
    assert "ckpt-2.delta" in text and "the newest whole chain: ckpt-1 and 2 increments" in text
    report = told(capsys, "inspect", train)
    assert [(m["number"], m["kind"], m["rows"], m["born"], m["removed"]) for m in report["members"]] == [
        (1, "full", 4, 0, 0),
        (2, "delta", 2, 1, 1),
        (3, "delta", 3, 2, 2),
    ]
    assert report["fault"] is None and report["full"]["tables"][0]["name"] == "emb"
    rows = told(capsys, "inspect", train, "--keys", "4", "-3")["rows"]
    assert [(found["key"], found["norm"] > 0) for found in rows] == [(4, True)]


def test_a_gap_is_named_with_the_next_step(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in train.glob("ckpt-2.delta.*"):
        file.unlink()
    assert "gap: increment 2 is missing" in said(capsys, "inspect", train, status=1)
    verified = told(capsys, "verify", train, status=3)
    assert [(f["severity"], f["check"]) for f in verified["findings"] if f["severity"] == "error"] == [
        ("error", "chain-gap")
    ]
    for command in (["stats"], ["get"], ["merge"], ["migrate"], ["log"], ["export", "--savedmodel"]):
        arguments = {"stats": [train], "get": [train, 1], "log": [train]}.get(command[0], [train, train / "out.h5"])
        if command[0] == "export":
            arguments = [train / "out", train]
        assert "gap: increment 2 is missing" in said(capsys, *command, *arguments, status=1)
    assert not list(train.glob("out*"))


def test_verify_reads_every_member(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verified = told(capsys, "verify", train)
    assert verified["ok"] and [t["name"] for t in verified["tables"]] == [
        "ckpt-1: emb",
        "ckpt-2.delta: emb",
        "ckpt-3.delta: emb",
    ]
    data = train / "ckpt-3.delta.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[3] ^= 1
    data.write_bytes(bytes(content))
    found = told(capsys, "verify", train, status=3)["findings"]
    assert any("ckpt-3.delta" in f["message"] and f["severity"] == "error" for f in found)


def test_verify_holds_members_to_their_records(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = ChainWriter(train, name="other", of="x")
    writer.full({"emb": table_of(FIRST)})
    writer.delta({"emb": table_of(SECOND)}, full=0)
    text = said(capsys, "verify", train, status=1)
    assert "there are several" in text
    verified = told(capsys, "verify", train / "other", status=0)
    assert verified["errors"] == 0
    writer.delta({"emb": table_of(THIRD)}, chain="y")
    verified = told(capsys, "verify", train / "other", status=3)
    assert [f["check"] for f in verified["findings"] if f["severity"] == "error"] == ["chain-other-chain"]


def test_log_tells_who_came_and_went(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = told(capsys, "log", train, "--keys", "5")
    second, third = (member["tables"][0] for member in log["members"][1:])
    assert (second["born_keys"], second["changed_keys"], second["removed_keys"]) == ([7], [2], [4])
    assert (third["born"], third["changed"], third["removed"]) == (2, 1, 2)
    assert (third["born_keys"], third["changed_keys"], third["removed_keys"]) == ([4, 9], [1], [-3, 7])
    assert "ckpt-3.delta: emb: removed -3, 7" in said(capsys, "log", train, "--keys", "5")
    life = told(capsys, "log", train, "--key", "4")["events"]
    assert [(event["member"], event["what"]) for event in life] == [
        ("ckpt-1", "there"),
        ("ckpt-2.delta", "removed"),
        ("ckpt-3.delta", "born"),
    ]
    assert life[2]["value"] == [44, 45, 46]
    assert [e["what"] for e in told(capsys, "log", train, "--key", "-3")["events"]] == ["there", "removed"]
    assert [e["what"] for e in told(capsys, "log", train, "--key", "-3", "--until", "2")["events"]] == ["there"]
    assert told(capsys, "log", train, "--key", "1000", status=3)["events"] == []


def test_counts_of_a_chain_say_what_they_count(train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "stats", train).splitlines()[0] == f"{train} (chain, members 1 to 3)"
    assert said(capsys, "stats", train / "ckpt").splitlines()[0] == f"{train / 'ckpt'} (chain, members 1 to 3)"
    assert said(capsys, "stats", train / "ckpt-1").splitlines()[0] == f"{train / 'ckpt-1'} (tfplugin)"
    assert "\n3 members of 1 table, 9 rows in all members, " in said(capsys, "verify", train)
    assert "\n1 table, 4 rows, " in said(capsys, "verify", train / "ckpt-1")
    assert "rows deleted  keys gone" in said(capsys, "merge", train, tmp_path / "whole")
    (merged,) = told(capsys, "merge", train, tmp_path / "again")["merged"]
    assert (merged["deleted"], merged["gone"]) == (3, 2)  # -3 and 7 went, and 4, which came again


def test_log_says_where_records_count_other_births(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = ChainWriter(tmp_path)
    writer.full({"emb": table_of(FIRST)})
    table = increment_of(table_of(FIRST), table_of(SECOND))[0]
    table.born = (2,)  # key 7, and key 2, which went and came again between the two
    record = chain.Record(CHAIN, 2, "delta", 1, chain.Previous(1, chain.fingerprint(tmp_path / "ckpt-1")), 0.0, 1, {})
    write_member(tmp_path / "ckpt-2.delta", [table], record, beside=dense(0))
    text = said(capsys, "log", tmp_path)
    assert "note: ckpt-2.delta: emb: by its record 2 rows were born" in text
    assert told(capsys, "log", tmp_path)["members"][1]["tables"][0]["recorded_born"] == 2
    assert told(capsys, "inspect", tmp_path)["members"][1]["born"] == 2


def test_members_that_are_named_for_chains_and_increments_for_fulls(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for member in ("ckpt-1", "ckpt-2.delta", "ckpt-2.delta.index"):
        assert f"that is one checkpoint; name the folder of its chain, '{train}'" in said(
            capsys, "log", train / member, status=1
        )
    assert "there is no such folder" in said(capsys, "log", train / "ckpt-7", status=1)
    text = said(capsys, "get", train / "ckpt-2", "1", status=1)
    assert "the increment 'ckpt-2.delta' of a chain; name the chain's folder" in text and "--until 2" in text


def test_merge_and_apply_make_the_full_checkpoint(
    train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing left out" in said(capsys, "merge", train, tmp_path / "whole")
    assert rows_of(open_checkpoint(tmp_path / "whole").table("emb")) == THIRD
    said(capsys, "merge", train, tmp_path / "second", "--until", "2")
    assert rows_of(open_checkpoint(tmp_path / "second").table("emb")) == SECOND
    said(capsys, "apply", tmp_path / "second", train / "ckpt-3.delta", tmp_path / "third")
    assert told(capsys, "diff", tmp_path / "whole", tmp_path / "third")["same"]
    said(capsys, "merge", train / "ckpt-1", train / "ckpt-2.delta", train / "ckpt-3.delta", tmp_path / "again")
    assert told(capsys, "diff", tmp_path / "whole", tmp_path / "again")["same"]
    assert "gap" in said(capsys, "apply", train / "ckpt-1", train / "ckpt-3.delta", tmp_path / "no", status=1)
    assert "expected BASE" in said(capsys, "apply", train / "ckpt-1", tmp_path / "no", status=2)
    into = ("merge", train, tmp_path / "into", "--into", "x", "--table", "emb")
    assert "leave it out" in said(capsys, *into, "--until", "2", status=2)
    said(capsys, *into)
    assert sorted(rows_of(open_checkpoint(tmp_path / "into").table("x"))) == sorted(THIRD)
    sum_of = ("merge", train / "ckpt-1", train / "ckpt-2.delta", tmp_path / "no", "--on-conflict", "sum")
    text = said(capsys, *sum_of, status=2)
    assert "leave --on-conflict, --slots, --table and --into out" in text and "kvtools apply" in text
    assert not list(tmp_path.glob("no*"))


@pytest.mark.parametrize("parts", [1, 3])
def test_what_merge_counts_of_a_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str], parts: int) -> None:
    """Against the keys and the lists of keys that went as they lie in the files of each member."""
    rng = np.random.default_rng(parts)
    train = tmp_path / "train"
    train.mkdir()
    writer = ChainWriter(train)
    prefixes = []
    for _ in range(5):
        rows = {int(key): row(int(rng.integers(9))) for key in rng.choice(60, 40, replace=False)}
        tables = {"emb": table_of(rows, parts=parts)}
        prefixes.append(writer.delta(tables) if writer.number else writer.full(tables))

    def tensor(prefix: Path, name: str) -> Any:
        bundle = Bundle(prefix)
        found = [bundle.tensor(one).read() for one in bundle.entries if one.endswith(name)]
        return np.concatenate([np.empty(0, np.int64), *found])

    keys = [tensor(prefix, "-keys") for prefix in prefixes]
    removed = [tensor(prefix, "-removed") for prefix in prefixes]
    # A row stays in the count unless a later member says that its key went.
    left = [
        mine[~np.isin(mine, np.concatenate([np.empty(0, np.int64), *removed[number + 1 :]]))]
        for number, mine in enumerate(keys)
    ]
    there, times = np.unique(np.concatenate(left), return_counts=True)
    several = int(np.count_nonzero(times > 1))
    read, live = sum(map(len, keys)), sum(map(len, left))
    gone = len(np.setdiff1d(np.concatenate(keys), there))
    naive = int(np.count_nonzero(np.unique(np.concatenate(keys), return_counts=True)[1] > 1))
    assert 0 < several < naive and read - live > gone > 0
    (merged,) = told(capsys, "merge", train, tmp_path / "json")["merged"]
    sources = merged.pop("sources")
    assert len(sources) == 5 and all(Path(f"{source}.index").exists() for source in sources)
    assert merged == {
        "table": "emb",
        "rows_read": read,
        "rows": len(there),
        "conflicts": several,
        "repeated": 0,
        "deleted": read - live,
        "gone": gone,
    }
    head, line = said(capsys, "merge", train, tmp_path / "text").splitlines()[:2]
    assert head.split("  ")[0] == "merged table" and "keys in several" in head
    assert list(map(int, line.split()[1:])) == [5, read, len(there), several, 0, read - live, gone]


def test_increments_of_a_chain_without_their_full_checkpoint(
    train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = train / "ckpt-2.delta", train / "ckpt-3.delta"
    for paths in ((first, second), (first, second, train / "ckpt-1"), (train / "ckpt-1", first, train / "ckpt-1")):
        text = " ".join(said(capsys, "merge", *paths, tmp_path / "no", status=2).split())
        names = ", ".join(f"'{path}'" for path in paths)
        assert f"merging {names}: '{first}' is an increment of a chain, which goes after the full checkpoint" in text
        assert "name that first, and increments alone after it" in text and "[" not in text
    assert not list(tmp_path.glob("no*"))
    # What it names: one increment of several.
    said(capsys, "apply", train / "ckpt-1", first, second, tmp_path / "later")
    said(capsys, "diff", train / "ckpt-1", tmp_path / "later", tmp_path / "both.delta", "--output", "delta")
    said(capsys, "apply", train / "ckpt-1", tmp_path / "both.delta", tmp_path / "again")
    assert rows_of(open_checkpoint(tmp_path / "again").table("emb")) == THIRD


def test_diff_writes_an_increment(train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = ChainWriter(tmp_path, name="later").full({"emb": table_of(FIRST)})
    text = said(capsys, "diff", train, later, "--output", "delta", train / "ckpt-4.delta")
    assert "increment 4 after 3" in text
    assert told(capsys, "diff", train, later)["same"]
    written = told(capsys, "diff", train / "ckpt-1", later, tmp_path / "x.delta", "--output", "delta")
    assert written["sequence"] == 2 and written["changes"][0]["changed"] == 0
    assert "expected both or neither" in said(capsys, "diff", train, later, "--output", "delta", status=2)
    assert "expected delta" in said(capsys, "diff", train, later, tmp_path / "y", "--output", "npz", status=2)


@pytest.mark.parametrize("out", ["a.ckpt", "b.ckpt", "b.ckpt.index"])
def test_an_increment_never_replaces_what_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, keys in (("a.ckpt", {1: row(1), 2: row(2)}), ("b.ckpt", {1: row(3)})):
        write_tables([table_of(keys)], name, "tfplugin")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for options in ([], ["--force"]):
        assert main(["diff", "a.ckpt", "b.ckpt", out, "--output", "delta", *options]) == 1
        assert "that is what is read, which would be lost" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_other_commands_take_the_newest_whole_chain(
    train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = told(capsys, "get", train, "4", "7", "9")
    assert [found["key"] for found in rows["rows"]] == [4, 9] and rows["missing"] == [7]
    assert told(capsys, "stats", train)["tables"][0]["rows"] == 4
    for command, out in (("migrate", "a.h5"), ("clip", "b.h5"), ("reshard", "c.ckpt"), ("cast", "d.h5")):
        more = {"clip": ["--min-freq", "0"], "reshard": ["--parts", "2"], "cast": ["--dtype", "float16"]}.get(
            command, []
        )
        more += ["--to", "hdf5"] if command in ("clip", "cast") else []
        said(capsys, command, train, tmp_path / out, *more)
        table = open_checkpoint(tmp_path / out).table("emb")
        assert sorted(key for chunk in table.chunks() for key in chunk.keys.tolist()) == [1, 2, 4, 9]


@pytest.mark.parametrize("command", ["inspect", "stats", "get", "migrate", "export"])
def test_an_increment_is_never_taken_for_a_table(
    train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path, out = train / "ckpt-2.delta", tmp_path / "out.h5"
    arguments = {"get": [path, 1], "migrate": [path, out], "export": ["--savedmodel", tmp_path / "m", path]}
    text = said(capsys, command, *arguments.get(command, [path]), status=1)
    assert "ckpt-2.delta' is an increment of a chain" in text.replace("': it is", "' is") and "kvtools merge" in text
    assert not list(tmp_path.glob("out*")) and not (tmp_path / "m").exists()
