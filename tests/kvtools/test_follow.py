"""What comes next in a chain, and what is refused: by name, once, and nothing is skipped."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from chain_writer import ChainWriter, without

from kvtools.chain import ChainError, members
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.follow import ChainWalk, expect_folder
from kvtools.increment import read_increment, read_record
from kvtools.migrate import write_tables


class Walk(ChainWalk):
    """A walk that notes what it is told, and tries refused members again at once."""

    def __init__(self, folder: Path) -> None:
        self.told: list[ChainError] = []
        super().__init__(folder, on_refused=lambda error: self.told.append(error))

    def steps(self) -> list[str]:
        """Take what comes, as far as it goes."""
        taken = []
        while (step := self.next()) is not None:
            taken.append(step.member.prefix.name)
            self.took(step)
        return taken

    def again(self) -> list[str]:
        for bad in self._bad.values():
            bad.again = 0
        self._due = 0
        return self.steps()


@pytest.fixture
def writer(tmp_path: Path) -> ChainWriter:
    writer = ChainWriter(tmp_path / "run", {"emb": 2})
    writer.put("emb", range(10), 1)
    writer.full()
    for number in range(3):
        writer.put("emb", range(number), number)
        writer.increment()
    return writer


def test_a_full_and_its_increments_then_each_as_it_comes(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    assert walk.steps() == ["ckpt-1", "ckpt-2.delta", "ckpt-3.delta", "ckpt-4.delta"]
    assert walk.next() is None and walk.behind is None
    writer.remove("emb", [1])
    writer.increment()
    assert walk.steps() == ["ckpt-5.delta"]
    assert walk.position is not None and walk.position.sequence == 5 and not walk.refused


def test_a_folder_is_not_listed_anew_for_each_of_many_increments(writer: ChainWriter, monkeypatch) -> None:
    for number in range(20):
        writer.put("emb", [number], number)
        writer.increment()
    listed = []
    monkeypatch.setattr("kvtools.follow.members", lambda *folder: listed.append(folder) or members(*folder))
    walk = Walk(writer.folder)
    assert len(walk.steps()) == 24 and len(listed) == 2  # the second sees that this is all
    assert walk.position is not None and walk.position.sequence == 24


def test_an_increment_that_went_after_the_folder_was_listed_is_a_gap(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    for _ in range(2):
        step = walk.next()
        assert step is not None
        walk.took(step)
    (writer.folder / "ckpt-3.delta.index").unlink()
    assert walk.steps() == [] and walk.refused == {"gap": 1}


def test_a_full_beside_an_increment_is_not_loaded_and_increments_may_follow_either(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    beside = writer.full(beside=True)
    writer.put("emb", [3], 3)
    writer.increment()
    assert walk.steps() == ["ckpt-5.delta"]
    writer.full(beside=True)
    writer.mark = read_record(members(writer.folder)[-1])[1]  # as a run does that has restored the full
    writer.put("emb", [4], 3)
    writer.increment()
    assert walk.steps() == ["ckpt-6.delta"]
    # Who comes late begins at the newest full.
    assert Walk(writer.folder).steps() == ["ckpt-5", "ckpt-6.delta"]
    for number in (1, 2, 3, 4):
        without(writer.folder / f"ckpt-{number}")
        without(writer.folder / f"ckpt-{number}.delta")
    assert beside.name == "ckpt-4" and walk.steps() == [] and not walk.told


def test_removing_the_increment_of_a_full_is_no_other_past(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    writer.full(beside=True)
    without(writer.folder / "ckpt-4.delta")
    assert walk.again() == [] and not walk.told


def test_a_full_without_an_increment_is_begun_from(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    writer.put("emb", [1], 50)
    writer.full()
    writer.put("emb", [2], 50)
    writer.increment()
    assert walk.steps() == ["ckpt-5", "ckpt-6.delta"]


def test_a_gap_is_named_and_a_full_heals_it(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    for _ in range(3):
        writer.put("emb", [1], 60)
        writer.increment()
    without(writer.folder / "ckpt-5.delta")
    without(writer.folder / "ckpt-6.delta")
    assert walk.steps() == [] and walk.again() == []
    (told,) = walk.told
    assert told.reason == "gap" and "'ckpt-7.delta' is there, and 5 to 6 is not" in str(told)
    assert walk.refused == {"gap": 1} and walk.behind is not None and "gap" in walk.trouble
    writer.full(beside=True)
    assert walk.again() == ["ckpt-7"]
    assert walk.next() is None and walk.behind is None and not walk.trouble


def test_a_gap_that_is_filled_is_gone_through(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    writer.put("emb", [1], 60)
    late = writer.increment()
    aside = writer.folder / "aside"
    aside.mkdir()
    for file in writer.folder.glob("ckpt-5.delta.*"):
        shutil.move(file, aside / file.name)
    writer.put("emb", [2], 60)
    writer.increment()
    assert walk.steps() == [] and walk.refused == {"gap": 1}
    for file in aside.iterdir():
        shutil.move(file, writer.folder / file.name)
    assert walk.steps() == [late.name, "ckpt-6.delta"] and not walk.trouble


@pytest.mark.parametrize(
    ("record", "reason", "says"),
    [
        ({"chain": "another"}, "other-chain", "another chain"),
        ({"previous": {"sequence": 4, "fingerprint": "00"}}, "fingerprint", "fingerprint"),
        ({"previous": {"sequence": 2, "fingerprint": "00"}}, "disorder", "follows 2, expected 4"),
        ({"previous": None}, "disorder", "follows None"),
        ({"sequence": 9}, "disorder", "by its record"),
        ({"kind": "strange"}, "damaged", "strange"),
        ({"format": 2}, "damaged", "update kvtools"),
    ],
)
def test_what_does_not_follow_is_refused(
    writer: ChainWriter, record: dict[str, object], reason: str, says: str
) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    writer.put("emb", [1], 7)
    writer.increment(**record)
    writer.put("emb", [1], 8)
    writer.increment()
    assert walk.steps() == [] and walk.again() == []
    (told,) = walk.told
    assert told.reason == reason and says in str(told)
    assert walk.position is not None and walk.position.sequence == 4


def test_a_chain_without_a_full_is_named(writer: ChainWriter) -> None:
    without(writer.folder / "ckpt-1")
    walk = Walk(writer.folder)
    assert walk.steps() == [] and [told.reason for told in walk.told] == ["no-full"]
    with pytest.raises(BadInputError, match="No such file"):
        Walk(writer.folder / "nowhere").next()


def test_a_damaged_full_leaves_the_one_before(writer: ChainWriter) -> None:
    writer.full()
    index = writer.folder / "ckpt-5.index"
    index.write_bytes(index.read_bytes()[:-3])
    walk = Walk(writer.folder)
    assert walk.steps() == ["ckpt-1", "ckpt-2.delta", "ckpt-3.delta", "ckpt-4.delta"]
    assert walk.refused == {"damaged": 1}


def test_a_run_that_begins_anew_in_the_folder_is_gone_over_to(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    shutil.rmtree(writer.folder)
    other = ChainWriter(writer.folder, {"emb": 2})
    other.put("emb", [1], 1)
    other.full()
    assert walk.again() == ["ckpt-1"]
    assert walk.position is not None and walk.position.chain == other.chain


def test_another_past_of_the_same_number_is_gone_over_to_by_its_full(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    # The run was begun again from its full, and has written other members from there on.
    for number in (2, 3, 4):
        without(writer.folder / f"ckpt-{number}.delta")
    writer.number, writer.mark = 1, read_record(members(writer.folder)[0])[1]
    writer.put("emb", [1], 70)
    writer.increment()
    assert walk.again() == ["ckpt-1", "ckpt-2.delta"]


def test_another_run_that_has_gone_past_is_gone_over_to_at_once(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    before = walk.position
    shutil.rmtree(writer.folder)
    other = ChainWriter(writer.folder, {"emb": 2})
    other.put("emb", [1], 1)
    other.full()
    for number in range(6):
        other.put("emb", [number], 1)
        other.increment()
    names = ["ckpt-1", *(f"ckpt-{number}.delta" for number in range(2, 8))]
    assert walk.again() == names
    assert walk.refused == {"other-chain": 1}
    again = Walk(writer.folder)
    assert before is not None
    again.resume(before)  # as one that was stopped meanwhile
    assert again.steps() == names


def another_run(folder: Path, increments: int, name: str = "ckpt") -> list[str]:
    """Copy another run's chain over what is in the folder, and return the names of its members."""
    other = ChainWriter(folder.parent / "other", {"emb": 2})
    other.put("emb", [1], 1)
    other.full()
    for number in range(increments):
        other.put("emb", [number], 1)
        other.increment()
    for file in sorted(other.folder.iterdir()):
        shutil.copy(file, folder / file.name.replace("ckpt", name, 1))
    return [f"ckpt-{1 + number}{'.delta' if number else ''}" for number in range(1 + increments)]


def test_another_run_is_gone_over_to_between_files_that_are_left(writer: ChainWriter) -> None:
    writer.full(beside=True)
    walk = Walk(writer.folder)
    assert walk.steps() == ["ckpt-4"]
    before = walk.position
    assert before is not None
    names = another_run(writer.folder, 5)
    assert walk.again() == names and walk.refused == {"other-chain": 1} and not walk.trouble
    again = Walk(writer.folder)
    again.resume(before)
    assert again.steps() == names
    assert Walk(writer.folder).steps() == ["ckpt-4", *names]  # the newest full by its number is the one left
    # A full that is left behind is never gone back to, also where the new chain cannot go on.
    assert walk.again() == []


def test_another_run_that_has_not_gone_past_is_told_until_the_members_before_are_removed(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    names = another_run(writer.folder, 1)  # ckpt-3.delta and ckpt-4.delta are those of the run before
    for _ in range(3):
        assert walk.again() == []
    assert walk.position is not None and walk.position.sequence == 4
    assert walk.refused == {"other-chain": 1} and len(walk.told) == 1
    assert "'ckpt-1' is of another chain" in walk.trouble and "remove the members of the chain before" in walk.trouble
    for number in (3, 4):
        without(writer.folder / f"ckpt-{number}.delta")
    assert walk.again() == names and not walk.trouble


def test_another_run_with_a_damaged_member_is_gone_over_to_once(writer: ChainWriter) -> None:
    writer.full(beside=True)
    walk = Walk(writer.folder)
    walk.steps()
    another_run(writer.folder, 5)
    taken = []
    for _ in range(8):
        step = walk.next()
        if step is None:
            break
        if step.member.prefix.name == "ckpt-2.delta":
            walk.refuse(step.member, CorruptFileError("its data are cut"))
        else:
            taken.append(step.member.prefix.name)
            walk.took(step)
    assert taken == ["ckpt-1"]


def test_another_run_that_comes_while_a_member_is_applied_is_noticed(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    step = walk.next()
    while step is not None and step.member.number < 4:
        walk.took(step)
        step = walk.next()
    assert step is not None
    shutil.rmtree(writer.folder)
    writer.folder.mkdir()
    names = another_run(writer.folder, 4)
    walk.took(step)  # of the run before; what lies there by its number is another's
    assert walk.again() == names


def test_a_chain_of_another_name_beside_the_followed_one_is_left_out(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    another_run(writer.folder, 5, name="a-ckpt")
    assert walk.again() == [] and walk.refused == {"other-chain": 1}


def test_a_member_in_place_of_the_folder_is_named(writer: ChainWriter, tmp_path: Path) -> None:
    for name in ("ckpt-1", "ckpt-2.delta", "ckpt-2.delta.index"):
        with pytest.raises(UsageError, match=f"that is one member of a chain; name its folder, '{writer.folder}'"):
            expect_folder(writer.folder / name)
    expect_folder(writer.folder)
    expect_folder(tmp_path / "later-1")


def test_a_member_that_is_removed_while_it_is_looked_at_is_no_fault(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    writer.put("emb", [1], 5)
    gone = writer.increment()
    step = walk.next()
    assert step is not None
    without(gone)
    walk.refuse(step.member, BadInputError("its index is not there"))
    assert not walk.told and not walk.refused and walk.steps() == []


def test_one_that_goes_on_does_not_begin_anew(writer: ChainWriter) -> None:
    walk = Walk(writer.folder)
    walk.steps()
    again = Walk(writer.folder)
    assert walk.position is not None
    again.resume(walk.position)
    assert again.steps() == []
    writer.put("emb", [1], 5)
    writer.increment()
    assert again.steps() == ["ckpt-5.delta"] and not again.told


def test_an_ordinary_checkpoint_manager_is_followed_full_by_full(writer: ChainWriter, tmp_path: Path) -> None:
    source = open_checkpoint(writer.folder / "ckpt-1")
    folder = tmp_path / "plain"
    folder.mkdir()
    for number in (1, 2):
        write_tables(source.select([]), folder / f"ckpt-{number}", "tfplugin")
    walk = Walk(folder)
    assert walk.steps() == ["ckpt-2"]
    write_tables(source.select([]), folder / "ckpt-3", "tfplugin")
    assert walk.again() == ["ckpt-3"]


def test_an_increment_is_read_whole(writer: ChainWriter) -> None:
    writer.put("emb", [5, 70], 2)
    writer.remove("emb", [6, 99])
    prefix = writer.increment()
    (member,) = [member for member in members(writer.folder) if member.prefix == prefix]
    record, mark = read_record(member)
    assert record is not None
    changes = read_increment(member, record, mark).tables["emb"]
    assert changes.rows.keys.tolist() == [5, 70] and changes.removed.tolist() == [6, 99] and len(changes) == 4
    assert (
        changes.rows.values is not None and changes.rows.slots["Adam.m"].tolist() == (changes.rows.values * 2).tolist()
    )
    data = Path(f"{prefix}.data-00000-of-00001")
    whole = data.read_bytes()
    for at in range(0, len(whole), 40):  # no byte that is used goes unchecked
        data.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            found = read_increment(member, *read_record(member)).tables["emb"]  # type: ignore[arg-type]
        except CorruptFileError:
            continue
        assert np.array_equal(found.rows.values, changes.rows.values) and found.removed.tolist() == [6, 99]
    data.write_bytes(whole)
    os.truncate(data, len(whole) - 1)
    with pytest.raises(BadInputError):
        read_increment(member, record, mark)
    assert json.loads(record.to_json())["sequence"] == 5
