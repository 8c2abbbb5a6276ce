"""A Chromium without a window, driven over the pipe of its DevTools protocol: no library and no port is needed.

Messages are JSON with a zero byte behind each: the browser reads descriptor 3 and writes descriptor 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DEADLINE_S = 120.0
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root, and open a page of our own only
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)


def browser() -> str | None:
    """Return the path of a Chromium, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Tab:
    """One page of the browser."""

    to_browser: int
    from_browser: int
    session: str = ""
    errors: list[str] = field(default_factory=list)  # what the page wrote on its console, and did not catch
    _number: int = 0
    _buffer: bytes = b""
    _messages: deque[dict[str, Any]] = field(default_factory=deque)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression on the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a condition holds on the page."""
        script = (
            f"new Promise(done => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 50); look(); }})"
        )
        assert self.evaluate(script)

    def show(self, url: str, width: int, *, dark: bool = False) -> None:
        """Open a page in a window of this width."""
        self.resize(width, dark=dark)
        self.call("Page.navigate", url=url)

    def resize(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Give the window this width, and the page a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path: Path, selector: str = "html") -> None:
        """Write the whole page, or an element of it, as a PNG."""
        box = self.evaluate(
            f"(box => ({{x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height, scale: 1}}))"
            f"(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=box)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + DEADLINE_S
        while not self._messages:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, "the browser does not answer"
            if select.select([self.from_browser], [], [], left_s)[0]:
                chunk = os.read(self.from_browser, 1 << 20)
                assert chunk, "the browser has ended"
                *whole, self._buffer = (self._buffer + chunk).split(b"\0")
                self._messages.extend(json.loads(each) for each in whole)
        return self._messages.popleft()

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(event["params"])[:500])
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.errors.append(event["params"]["entry"]["text"])
            case _:
                pass


def _start(command: list[str], reads: int, writes: int) -> subprocess.Popen[bytes]:
    """Start a browser that reads and writes these descriptors, which are closed here."""
    ends = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (reads, writes)]  # beyond 3 and 4
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    moved = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]} {ends[0]}<&- {ends[1]}>&-'
    started = subprocess.Popen(["bash", "-c", moved, "bash", *command], pass_fds=ends, **quiet)
    for descriptor in (reads, writes, *ends):
        os.close(descriptor)
    return started


@contextmanager
def open_tab() -> Generator[Tab]:
    """Start a browser with one page, and end it with all of its processes."""
    path = browser()
    assert path is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        started = _start([path, *OPTIONS, f"--user-data-dir={profile}", "about:blank"], theirs_in, theirs_out)
        try:
            tab = Tab(ours_out, ours_in)
            target = tab.call("Target.createTarget", url="about:blank")["targetId"]
            tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                tab.call(f"{domain}.enable")
            yield tab
            tab.session = ""
            tab.call("Browser.close")
            started.wait(DEADLINE_S)
        finally:
            started.kill()
            started.wait()
            os.close(ours_out)
            os.close(ours_in)
