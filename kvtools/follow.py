"""Follows a chain of checkpoints: what comes next, whether it may be applied, and what is said of what may not.

`ChainWalk` knows where somebody who applies a chain is in it, and gives the next step: an increment that goes there, or
a full checkpoint to begin anew from. What does not fit is refused with a name, and nothing is skipped: the state stays
as it is until the member is replaced, or a newer full is there. docs/chain.md says what fits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvtools.chain import ChainError, Member, Reason, Record, chain_of, fingerprint, member_of, members, record_of
from kvtools.errors import BadInputError, KvtoolsError, UsageError, one_line
from kvtools.increment import read_record

_TRIED_AGAIN = 1.0  # s: a file that is still being copied here may be whole by then
_STILL_CHANGING = 0.1  # s: two changes of a folder within a tick of its clock look like one


def expect_folder(path: Path) -> None:
    """Raise `UsageError` where a path names one member of a chain instead of the folder; it need not be there yet."""
    if path.is_dir():
        return
    prefix = path.with_suffix("") if path.suffix == ".index" else path
    if member_of(prefix) is not None and Path(f"{prefix}.index").is_file():
        raise UsageError(
            f"following '{path}': that is one member of a chain; name its folder, '{path.parent}', and the newest"
            " member is found in it"
        )


@dataclass(frozen=True)
class Position:
    """Where in a chain somebody is: all members up to `sequence` are applied.

    `follows` are the fingerprints that the next increment may name as what it follows; `chain` is None where the
    full is of a writer without chains. `time` is when the moment was that the member is of, Unix time, 0 if not known.
    """

    chain: str | None
    sequence: int
    follows: frozenset[str]
    time: float

    def after(self, record: Record, mark: str) -> Position:
        """Return the position after the increment of this record and fingerprint."""
        return Position(record.chain, record.sequence, frozenset([mark]), record.time)


@dataclass(frozen=True)
class Step:
    """What comes next: a full to begin anew from, or an increment to apply; `position` is what holds after it."""

    member: Member
    record: Record | None
    fingerprint: str
    position: Position


@dataclass
class _Refused:
    stamp: tuple[int, ...]
    message: str
    again: float  # when to try it again, of `time.monotonic`


@dataclass
class ChainWalk:
    """The way along the chain in `folder` (of `name`, where the folder has several). By one thread at a time.

    `position` is None before the first full. Whoever has applied a step calls `took`; who could not, `refuse`.
    `refused` counts the members that were refused, each once, by reason; `trouble` says what stands in the way now.
    `behind` is since when something has been waiting that is not applied, Unix time, or None; `gone` says that the
    members of what was applied are, and no other is there. `on_refused` is told of each refusal once.

    Example:
        ```python
        walk = ChainWalk("run")
        while (step := walk.next()) is not None:
            apply(step)
            walk.took(step)
        ```
    """

    folder: Path
    name: str | None = None
    position: Position | None = None
    refused: dict[str, int] = field(default_factory=dict)
    trouble: str = ""
    behind: float | None = None
    gone: str = ""
    on_refused: Callable[[ChainError], None] = lambda error: None

    def __post_init__(self) -> None:
        self._bad: dict[Path, _Refused] = {}
        self._seen = 0  # the folder's time of change, in ns, when nothing new was in it
        self._due = 0.0
        self._listed: dict[int, Member] = {}  # the increments that were there when the folder was last listed
        self._known: dict[int, tuple[int, ...]] = {}  # what the newest member applied was, by its number
        self._left: Position | None = None  # of the chain that another one has taken the place of
        self._looked_at: tuple[int, ...] = ()  # the newest full, which is of what is applied
        self._other_run = ""  # what is said of one that is of another run, and behind

    def next(self) -> Step | None:
        """Return the next step, or None where there is nothing to apply now.

        Raises:
            BadInputError: the folder cannot be read.
        """
        step = self._listed_next()
        if step is not None:
            return step
        now = time.monotonic()
        changed = self._changed_at()
        if changed == self._seen and now < self._due:
            return None
        found = members(self.folder, self.name)
        self._listed = {member.number: member for member in found if member.kind == "delta"}
        there = {member.prefix for member in found}
        self._bad = {prefix: bad for prefix, bad in self._bad.items() if prefix in there}
        step = self._choose(found)
        if step is None:
            # Changes in the tick of the clock in which it was listed would look like none.
            self._seen = changed if time.time() - changed / 1e9 > _STILL_CHANGING else 0
            self._due = now + (_TRIED_AGAIN if self._bad else 3600)
            self.gone = ""
            if self.position and not found:
                self.gone = (
                    f"chain in '{self.folder}': there is no member in it any more; what was applied, up to"
                    f" {self.position.sequence}, stays, and so it is until there is a full"
                )
            if self.position and not any(member.number > self.position.sequence for member in found):
                self.behind = None
                self.trouble = self._other_run or self.gone
        return step

    def _listed_next(self) -> Step | None:
        """Return the step of the next increment where the last listing has it, so that many need one listing."""
        member = None if self.position is None else self._listed.pop(self.position.sequence + 1, None)
        if member is None or self._rests(member):
            return None
        try:
            step = self._increment(member, None)
        except KvtoolsError:
            return None  # the folder as it is now says why
        self._note_behind([member], member.number)
        return step

    def took(self, step: Step) -> None:
        """Note that a step was applied."""
        self.position = step.position
        # What lies there now may be another file than the one that was read: its fingerprint is looked at once.
        self._known = {step.member.number: ()}
        self._bad.pop(step.member.prefix, None)
        for bad in self._bad.values():
            bad.again = 0  # what was missing before it may be there now
        self._seen = 0
        self.trouble = self.gone = ""
        self.behind = None

    def resume(self, position: Position) -> None:
        """Go on from a position that was kept, such as that of a process before."""
        self.position = position
        self._known = {position.sequence: ()}  # whether that is what lies there now, is still to be seen
        self._seen = 0

    def refuse(self, member: Member, error: Exception, reason: Reason | None = None) -> None:
        """Note that a member cannot be applied; it is tried again in a second, or when its files change."""
        if reason is None:
            reason = error.reason if isinstance(error, ChainError) else "damaged"
        message = one_line(str(error))
        stamp = _stamp(member)
        if not stamp:  # it was removed meanwhile, as members before a newer full are
            return
        before = self._bad.get(member.prefix)
        self._bad[member.prefix] = _Refused(stamp, message, time.monotonic() + _TRIED_AGAIN)
        self.trouble = message
        if before is None or (before.stamp, before.message) != (stamp, message):
            self.refused[reason] = self.refused.get(reason, 0) + 1
            self.on_refused(ChainError(message, reason))

    @property
    def _at(self) -> int:
        return -1 if self.position is None else self.position.sequence

    def _choose(self, found: list[Member]) -> Step | None:
        fulls = {member.number: member for member in found if member.kind == "full"}
        if self.position is None:
            return self._newest_full(found, fulls, -1)
        increments = {member.number: member for member in found if member.kind == "delta"}
        at = self.position.sequence
        newer = sorted(member.number for member in found if member.number > at)
        if not newer:
            if self._is_rewritten(found):
                return self._newest_full(found, fulls, -1)
            self._other_run = self._other_run_behind(fulls[max(fulls)]) if fulls else ""
            return None
        self._note_behind(found, newer[0])
        following = increments.get(at + 1)
        if following is not None and not self._rests(following):
            try:
                return self._increment(following, fulls.get(at))
            except KvtoolsError as error:
                self.refuse(following, error)
        step = self._newest_full(found, fulls, at)
        if step is None and following is None and at + 1 not in fulls:
            first = min((number for number in newer if number in increments), default=None)
            if first is not None and not self._rests(increments[first]):
                missing = f"{at + 1}" if first == at + 2 else f"{at + 1} to {first - 1}"
                message = (
                    f"chain in '{self.folder}': gap: '{increments[first].prefix.name}' is there, and {missing} is not,"
                    f" which comes after {at}; what was applied stays until it comes, or a newer full"
                )
                self.refuse(increments[first], ChainError(message, "gap"))
        if step is None and self._is_rewritten(found):
            step = self._newest_full(found, fulls, -1)
        return step or self._other_chain(found)

    def _other_run_behind(self, full: Member) -> str:
        """Refuse a newest full that is of another run and behind what is applied, and return the message, or ''.

        Nothing leads past what is applied yet; once something does, `_other_chain` goes over.
        """
        stamp = _stamp(full)
        if stamp == self._looked_at:
            return ""
        if self._rests(full):
            return self._bad[full.prefix].message
        position = self.position
        assert position is not None
        with contextlib.suppress(KvtoolsError):
            record, _ = read_record(full)
            chain = None if record is None else record.chain
            if chain != position.chain and not self._is_left(record):
                message = (
                    f"chain in '{self.folder}': '{full.prefix.name}' is of another chain ({chain}) than what is applied"
                    f" ({position.chain}), which has come to {position.sequence}; that is served until the other has"
                    " gone past it: remove the members of the chain before"
                )
                self.refuse(full, ChainError(message, "other-chain"))
                return message
        self._looked_at = stamp
        return ""

    def _other_chain(self, found: list[Member]) -> Step | None:
        """Return the step of another run's full from which a whole chain leads past what is applied.

        Files of the chain before may still lie between its members.
        """
        assert self.position is not None
        last = found[-1] if found[-1].kind == "delta" else found[-2 if len(found) > 1 else -1]
        if last.kind != "delta" or last.number <= self.position.sequence:
            return None
        try:
            record = record_of(last)
            if record is None or record.chain == self.position.chain:
                return None
            name = _name_of(last)
            here = [member for member in found if member.number == self.position.sequence]
            if any(_name_of(member) != name and fingerprint(member.prefix) in self.position.follows for member in here):
                return None  # two chains lie here side by side, and this one is whole
            of_it = []
            for member in found:
                with contextlib.suppress(KvtoolsError):
                    if (its := record_of(member)) is not None and its.chain == record.chain:
                        of_it.append(member)
            whole = chain_of(of_it)
        except KvtoolsError:
            return None  # not all of it may be there yet
        if not whole or whole[-1] != last:
            return None
        self._left = self.position
        return self._newest_full(whole, {whole[0].number: whole[0]}, -1)

    def _newest_full(self, found: list[Member], fulls: dict[int, Member], above: int) -> Step | None:
        """Return the step of the newest full above a number that can be begun from."""
        for number in sorted((number for number in fulls if number > above), reverse=True):
            member = fulls[number]
            if self._rests(member):
                continue
            try:
                record, mark = read_record(member)
            except KvtoolsError as error:
                self.refuse(member, error)
                continue
            if above >= 0 and self._is_left(record):
                continue
            follows = {mark}
            if record is not None and record.previous is not None and record.previous.sequence == number:
                follows.add(record.previous.fingerprint)
            chain = None if record is None else record.chain
            moment = 0.0 if record is None else record.time
            return Step(member, record, mark, Position(chain, number, frozenset(follows), moment))
        increments = [member for member in found if member.kind == "delta"]
        if self.position is None and not fulls and increments and not self._rests(increments[0]):
            message = (
                f"chain in '{self.folder}': it begins with increment '{increments[0].prefix.name}' and has no full one;"
                " copy the full that it goes back to"
            )
            self.refuse(increments[0], ChainError(message, "no-full"))
        return None

    def _increment(self, member: Member, full: Member | None) -> Step:
        """Return the step of an increment; raises `ChainError` if it does not follow."""
        position = self.position
        assert position is not None
        where = f"chain in '{self.folder}': '{member.prefix.name}'"
        record, mark = read_record(member)
        assert record is not None  # an increment without one is a ChainError
        if record.chain != position.chain:
            raise ChainError(
                f"{where} is of another chain ({record.chain}) than what is applied ({position.chain}); it is left out"
                " until a full of its chain is there",
                "other-chain",
            )
        previous = record.previous
        if previous is None or previous.sequence != position.sequence:
            named = None if previous is None else previous.sequence
            raise ChainError(f"{where}: disorder: it follows {named}, expected {position.sequence}", "disorder")
        if previous.fingerprint not in position.follows and not self._is_twin(full, previous.fingerprint):
            raise ChainError(
                f"{where} follows another member {previous.sequence} than the one that is applied: its fingerprint"
                " differs; it is left out until there is a newer full",
                "fingerprint",
            )
        return Step(member, record, mark, position.after(record, mark))

    def _is_twin(self, full: Member | None, mark: str) -> bool:
        """Tell whether `mark` is that of a full of the same moment as the increment that is applied."""
        assert self.position is not None
        if full is None or fingerprint(full.prefix) != mark:
            return False
        record, _ = read_record(full)
        previous = None if record is None else record.previous
        return (
            previous is not None and previous.sequence == full.number and previous.fingerprint in self.position.follows
        )

    def _is_left(self, record: Record | None) -> bool:
        """Tell whether a full was left behind by the chain before, which another run has taken the place of."""
        left = self._left
        return (
            left is not None and record is not None and record.chain == left.chain and record.sequence <= left.sequence
        )

    def _is_rewritten(self, found: list[Member]) -> bool:
        """Tell whether other members have taken the place of what is applied: another past, or another run."""
        if not found or not self._known or self.position is None:
            return False
        ((number, stamp),) = self._known.items()
        here = [member for member in found if member.number == number]
        if any(_stamp(member) == stamp for member in here):
            return False
        for member in here:
            with contextlib.suppress(KvtoolsError):
                seen = _stamp(member)
                mark = fingerprint(member.prefix)
                if mark in self.position.follows or self._is_twin(member, mark):
                    self._known = {number: seen}
                    return False
        return bool(here) or found[-1].number < number

    def _rests(self, member: Member) -> bool:
        bad = self._bad.get(member.prefix)
        return bad is not None and bad.stamp == _stamp(member) and time.monotonic() < bad.again

    def _note_behind(self, found: list[Member], number: int) -> None:
        if self.behind is not None:
            return
        member = next(member for member in found if member.number == number)
        with contextlib.suppress(OSError):
            self.behind = member.index.stat().st_mtime

    def _changed_at(self) -> int:
        try:
            return self.folder.stat().st_mtime_ns
        except OSError as error:
            raise BadInputError(f"reading the chain in '{self.folder}': {error.strerror or error}") from error


def _name_of(member: Member) -> str:
    return member.prefix.name.removesuffix(".delta").rpartition("-")[0]


def _stamp(member: Member) -> tuple[int, ...]:
    """Return what tells the index of a member from another."""
    try:
        status = member.index.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size
