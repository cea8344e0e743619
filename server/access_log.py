"""A line of JSON for every request, written by a thread of its own, so that no answer waits for a disk.

Where requests come faster than lines can be written, lines are left out, and counted; the log says how many.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvtools.errors import BadInputError
from kvtools.server.access_keys import AccessKeys
from kvtools.server.observer import Answered

log = logging.getLogger("kvtools.serve")

_MOST_WAITING = 65_536
_AT_ONCE = 1024


class AccessLog:
    """Writes to `path`, or to standard output if it is `-`. Several processes may write to the same file.

    Args:
        path: the file, which is appended to.

    Raises:
        BadInputError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.dropped = 0
        self._path = path
        self._waiting: queue.SimpleQueue[tuple[float, Answered, AccessKeys | None] | None] = queue.SimpleQueue()
        self._reopen = False
        self._failing = False
        self._torn = False  # the last line in the file is a part of one
        self._told = 0
        self._fd = _open(path)
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def add(self, answered: Answered, keys: AccessKeys | None = None) -> None:
        """Have a line written about an answer, with the name that its access key has in `keys`; returns at once."""
        if self._waiting.qsize() >= _MOST_WAITING:
            self.dropped += 1
        else:
            self._waiting.put((time.time(), answered, keys))

    def reopen(self) -> None:
        """Go on in a new file, if the old one was moved away."""
        self._reopen = True

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        going = True
        while going:
            entries = [self._waiting.get()]
            while len(entries) < _AT_ONCE and not self._waiting.empty():
                entries.append(self._waiting.get())
            going = None not in entries
            if self._reopen:
                self._reopen = False
                self._open_again()
            try:
                self._write(b"".join(self._line(*entry) for entry in entries if entry is not None))
            except Exception:  # a fault of ours shall not end all lines to come
                log.exception("writing lines of the access log failed")
                self.dropped += len(entries) - entries.count(None)
            if self.dropped > self._told and not self._failing:
                log.warning("%d lines of the access log were left out", self.dropped - self._told)
                self._told = self.dropped

    def _open_again(self) -> None:
        try:
            fd = _open(self._path)
        except BadInputError as error:
            log.error("%s; going on in the old file", error)
            return
        if self._path != "-":
            self._torn = self._torn and os.path.sameopenfile(fd, self._fd)
            os.close(self._fd)
        self._fd = fd

    def _write(self, lines: bytes) -> None:
        if not lines:
            return
        lines = b"\n" * self._torn + lines
        try:
            while lines:
                done = os.write(self._fd, lines)
                self._torn = lines[done - 1 : done] != b"\n"
                lines = lines[done:]
        except OSError as error:
            if not self._failing:
                log.error(
                    "the access log '%s' cannot be written: %s; answers go on, lines are left out until it can be",
                    self._path,
                    error.strerror,
                )
                self._told = self.dropped
            self._failing = True
            self.dropped += lines.lstrip(b"\n").count(b"\n")
            return
        if self._failing:
            self._failing = False
            log.warning("the access log is written again")  # and how many lines it lacks is told next

    def _line(self, when: float, answered: Answered, keys: AccessKeys | None) -> bytes:
        key = None if keys is None else keys.find(answered.headers)
        stamp = datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {
            "time": stamp,
            "id": answered.request_id,
            "client": answered.client[0] if answered.client else "",
            "key": "" if key is None else key.name,
            "protocol": answered.protocol,
            "api": answered.kind,
            "path": answered.path,
            "model": answered.model or next((count.model for count in answered.counts), ""),
            "tables": [count.table for count in answered.counts],
            "keys": sum(count.keys for count in answered.counts),
            "missing": sum(count.missing for count in answered.counts),
            "status": answered.status,
            "code": answered.code,
            "ms": round(answered.seconds * 1000, 3),
            "bytes_in": answered.bytes_in,
            "bytes_out": answered.bytes_out,
        }
        present = {name: value for name, value in line.items() if value not in ("", [])}
        return json.dumps(present, separators=(",", ":")).encode() + b"\n"


def _open(path: str) -> int:
    if path == "-":
        return 1
    try:
        return os.open(Path(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise BadInputError(f"opening the access log '{path}': {error.strerror or error}") from error
