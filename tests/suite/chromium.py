"""A real browser that a test can drive: Chromium over its debugging pipe (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="there is no chromium; apt-get install chromium"
)
_PATIENCE = 60.0


class Tab:
    """One page; `faults` are its uncaught errors, and what its content security policy kept out."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest, self._number, self._session = read, write, b"", 0, None
        self.faults: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            self._rest += os.read(self._read, 1 << 20)
        message, self._rest = self._rest.split(b"\0", 1)
        told = json.loads(message)
        if told.get("method") == "Runtime.exceptionThrown":
            self.faults.append(str(told["params"]["exceptionDetails"]))
        if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
            self.faults.append(told["params"]["entry"]["text"])
        return dict(told)

    def open(self, url: str, *, width: int = 1280, height: int = 900) -> None:
        """Open a page, and wait until its script has run."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never came: {expression}"

    def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives; a promise is waited for."""
        answer = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start Chromium with a profile of its own in `folder`, and give its one tab."""
    to_read, to_write = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{to_read[0]} 4>&{to_write[1]}', "chromium", "chromium", *options],
        pass_fds=(to_read[0], to_write[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        os.close(to_read[0])
        os.close(to_write[1])
        yield Tab(to_write[0], to_read[1])
    finally:
        os.close(to_read[1])
        process.kill()
        process.wait()
        os.close(to_write[0])
