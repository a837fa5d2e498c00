"""A headless Chromium for tests of pages, driven over pipes with its own protocol (DevTools): no further package."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""None: this machine has no Chromium."""
DEADLINE_S = 60.0
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions "
    "--disable-background-networking --disable-component-update --hide-scrollbars "
    "--host-resolver-rules='MAP * ~NOTFOUND, EXCLUDE 127.0.0.1' --remote-debugging-pipe"
)


class Page:
    """One page of a browser."""

    def __init__(self, read_end: int, write_end: int) -> None:
        self._read, self._write = read_end, write_end
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the browser told by itself: console messages, violations, requests."""

    def attach(self) -> None:
        """Open an empty page, and listen to it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol; its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, file: Path) -> float:
        """Open a file and wait until it has drawn a picture; seconds from the navigation to that picture."""
        self.navigate(file.absolute().as_uri())
        self.wait("document.readyState === 'complete'")
        painted = "performance.getEntriesByName('first-contentful-paint')"
        self.wait(f"{painted}.length > 0")
        frame = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"
        drawn = self.evaluate(frame)
        loaded = "performance.getEntriesByType('navigation')[0].loadEventEnd"
        first = self.evaluate(f"Math.max({painted}[0].startTime, {loaded})")
        return min(float(drawn), float(first)) / 1000

    def navigate(self, url: str) -> None:
        """Open an address without waiting for it."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, of a promise what it is resolved to; AssertionError if it raises."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until JavaScript is true."""
        end = time.monotonic() + DEADLINE_S
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {condition}"
            time.sleep(0.02)

    def press(self, key: str, text: str = "") -> None:
        """A key, as a keyboard sends it."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **typed)

    def screenshot(self, file: Path, *, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """A picture of the window as PNG."""
        self.look(width=width, height=height, dark=dark)
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def look(self, *, width: int, height: int, dark: bool) -> None:
        """The size of the window, and which theme the system prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + DEADLINE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no answer of Chromium within {DEADLINE_S:g} s"
            piece = os.read(self._read, 2**20)
            assert piece, "Chromium ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def chromium() -> Iterator[Page]:
    """A page of a browser that ends with the body. Nothing that it shows can reach the network."""
    assert PROGRAM is not None
    to_browser, from_driver = os.pipe()
    to_driver, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = f"exec '{PROGRAM}' {OPTIONS} --user-data-dir='{profile}' 3<&{to_browser} 4>&{from_browser}"
        browser = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            page = Page(to_driver, from_driver)
            page.attach()
            yield page
        finally:
            browser.kill()
            browser.wait()
            os.close(from_driver)
            os.close(to_driver)
