"""A headless Chromium, led by WebDriver: JSON over HTTP, which needs no library."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.program import children


def is_installed() -> bool:
    """Returns whether Chromium and its driver are there."""
    return bool(shutil.which("chromedriver") and shutil.which("chromium"))


class Browser:
    """One window.

    Args:
        session: Address of the driver's session.
    """

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        """Loads a page."""
        _post(f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Runs the body of a function in the page; returns what it does."""
        return _post(f"{self._session}/execute/sync", {"script": script, "args": []})

    def press(self, keys: str) -> None:
        """Presses keys one after the other, wherever the focus is; those without a sign are U+E000 and more."""
        pressed = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        _post(f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": pressed}]})

    def wait(self, script: str, timeout_s: float) -> None:
        """Waits until a script returns true."""
        deadline = time.monotonic() + timeout_s
        while not self.run(script):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true in the page: {script}")
            time.sleep(0.05)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Sets the size of the page, in pixels, and whether the person likes it dark."""
        self._chromium(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700},
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._chromium("Emulation.setEmulatedMedia", {"features": scheme})

    def picture(self, path: Path) -> None:
        """Writes what is seen as a PNG."""
        data = self._chromium("Page.captureScreenshot", {"format": "png"})["data"]
        path.write_bytes(base64.b64decode(data))

    def _chromium(self, command: str, params: dict[str, Any]) -> Any:
        return _post(f"{self._session}/goog/cdp/execute", {"cmd": command, "params": params})


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Starts a driver and a headless Chromium, and ends both."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=children.die_with_parent(),  # noqa: PLW1509  one thread
    )
    try:
        assert driver.stdout is not None
        port = next(
            line.rpartition("port ")[2].strip(" .\n") for line in driver.stdout if "successfully on port" in line
        )
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        wanted = {"alwaysMatch": {"goog:chromeOptions": {"args": arguments}, "acceptInsecureCerts": True}}
        base = f"http://127.0.0.1:{port}/session"
        session = f"{base}/{_post(base, {'capabilities': wanted})['sessionId']}"
        try:
            yield Browser(session)
        finally:
            urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=30.0).close()
    finally:
        driver.terminate()
        driver.wait()
        assert driver.stdout is not None
        driver.stdout.close()


def _post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        return json.loads(answer.read())["value"]
