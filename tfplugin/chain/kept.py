"""Which members of a chain stay in the folder, and TensorFlow's `checkpoint` file, which names the fulls."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from tensorflow.python.checkpoint import checkpoint_management

from kvtools.chain import Member, members
from kvtools.replace_output import is_being_written


class Kept:
    """The fulls of a folder that are kept, the oldest first.

    An old full goes with the increments that need it, once there are `max_to_keep` newer ones. One that is kept for
    `every_n_hours` stays without increments.

    Args:
      folder, name: of the chain.
      max_to_keep: how many fulls; None: all.
      every_n_hours: of those that would go, one in so many hours stays for good; None: none.
    """

    def __init__(self, folder: Path, name: str, max_to_keep: int | None, every_n_hours: float | None) -> None:
        self._folder = folder
        self._name = name
        self._max_to_keep = max_to_keep
        self._every_n_hours = every_n_hours
        self._lock = threading.Lock()
        self._times: dict[Member, float] | None = None
        self._preserved = time.time() - 1.0

    def add(self, full: Member, held: Collection[Path] = ()) -> None:
        """A full is whole: notes it, and removes what has to go, but for members that are `held` back for now."""
        with self._lock:
            if self._times is None:
                self._times = self._found()
            # One of a later moment may have been written sooner.
            self._times = dict(sorted({**self._times, full: time.time()}.items()))
            self._note()  # first, so that who is killed while files go finds the new one
            if self._max_to_keep is not None:
                self._sweep(self._max_to_keep, held)
                self._note()

    def _found(self) -> dict[Member, float]:
        """What an earlier manager kept: as TensorFlow's does, not those that it preserved for good."""
        state = checkpoint_management.get_checkpoint_state(str(self._folder))
        fulls = [one for one in members(self._folder, self._name) if one.kind == "full"]
        now = time.time()
        noted: dict[str, float] = {}
        if state is not None:
            self._preserved = min(state.last_preserved_timestamp, now)
            paths = [Path(path).name for path in state.all_model_checkpoint_paths]
            times = list(state.all_model_checkpoint_timestamps) or [now] * len(paths)
            noted = {path: min(at, now) for path, at in zip(paths, times, strict=True)}
        last = max((one.number for one in fulls if one.prefix.name in noted), default=-1)
        found = {}
        for one in fulls:
            at = noted.get(one.prefix.name)
            if at is None and one.number > last:  # its writer was killed before it could say so
                found[one] = one.index.stat().st_mtime
            elif at is not None and at > self._preserved:
                found[one] = at
        return found

    def _note(self) -> None:
        times = self._times or {}
        paths = [str(one.prefix) for one in times]
        checkpoint_management.update_checkpoint_state_internal(
            str(self._folder),
            model_checkpoint_path=paths[-1],
            all_model_checkpoint_paths=paths,
            all_model_checkpoint_timestamps=list(times.values()),
            last_preserved_timestamp=self._preserved,
            save_relative_paths=True,
        )

    def _sweep(self, most: int, held: Collection[Path]) -> None:
        times = self._times or {}
        gone = []
        counted = [one for one in times if one.prefix not in held]
        while len(counted) > most:
            oldest = counted.pop(0)
            at = times.pop(oldest)
            if self._every_n_hours and at - self._every_n_hours * 3600.0 >= self._preserved:
                self._preserved = at
            else:
                gone.append(oldest)
        least = counted[0].number if counted else 0
        for one in members(self._folder, self._name):
            if one.kind == "delta" and one.number <= least and one.prefix not in held:
                gone.append(one)
        remove_files(self._folder, gone)


def remove_files(folder: Path, gone: Sequence[Member]) -> None:
    """Removes the files of members: first the index of each, by which it is there."""
    for member in gone:
        member.index.unlink(missing_ok=True)
    # Listed once: of increments there may be thousands.
    prefixes = {member.prefix.name for member in gone}
    for path in folder.iterdir() if gone else ():
        prefix, _, rest = path.name.rpartition(".data-")
        if prefix in prefixes and "-of-" in rest:
            path.unlink(missing_ok=True)


def remove_leavings(folder: Path, name: str) -> None:
    """Removes what killed writers have left of members of a chain: hidden folders, and data without an index."""
    if not folder.is_dir():
        return
    data = [path for path in folder.iterdir() if path.name.startswith(f"{name}-") and ".data-" in path.name]
    running = []
    for path in folder.iterdir():
        if path.name.startswith(f".{name}-") and ".kvtools-" in path.name:
            if is_being_written(path):
                running.append(path.name)
            else:
                shutil.rmtree(path, ignore_errors=True)
    for path in data:
        prefix = path.name.rpartition(".data-")[0]
        # In this order: who was just about to put an index beside it has done so, if it is not running any more.
        is_running = any(one.startswith(f".{prefix}.kvtools-") for one in running)
        if not is_running and not (folder / f"{prefix}.index").exists():
            path.unlink(missing_ok=True)
