"""A browser for tests: Chromium through chromedriver, over the WebDriver protocol, which is plain HTTP."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ENTER, ESCAPE, UP, SHIFT = "\ue007", "\ue00c", "\ue013", "\ue008"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def chromium() -> tuple[str, str] | None:
    """The browser and its driver, where both are installed."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )
    driver = shutil.which("chromedriver")
    return (found, driver) if found and driver else None


class Browser:
    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, session

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._http.request(method, f"/session/{self._session}{path}", json={} if body is None else body)
        value = answer.json()["value"]
        assert answer.status_code == 200, f"{path}: {value.get('error')}: {value.get('message', '')[:400]}"
        return value

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def js(self, script: str, *arguments: Any) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def cdp(self, command: str, **params: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def size(self, width: int, height: int) -> None:
        mobile = width < 600
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def dark(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])

    def click(self, selector: str) -> None:
        self._call("POST", f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def keys(self, *keys: str) -> None:
        """To whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def text(self, selector: str) -> str:
        return str(self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.js("return document.querySelectorAll(arguments[0]).length", selector))

    def wait(self, script: str, *arguments: Any, seconds: float = 30.0) -> Any:
        """Until the expression is true."""
        ends = time.monotonic() + seconds
        while not (found := self.js(f"return {script}", *arguments)):
            assert time.monotonic() < ends, f"not in {seconds} s: {script} {arguments}; {self.text('body')[:800]}"
            time.sleep(0.03)
        return found

    def accept(self) -> None:
        self._call("POST", "/alert/accept")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def log(self) -> list[str]:
        """Errors of the page's scripts, and what its Content-Security-Policy refused."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


@contextmanager
def browsing(downloads: Path, language: str = "en-US") -> Iterator[Browser]:
    found = chromium()
    assert found is not None
    driver = subprocess.Popen([found[1], "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert driver.stdout is not None
        port = next(match[1] for line in driver.stdout if (match := re.search(r"successfully on port (\d+)", line)))
        options = {
            "binary": found[0],
            "args": [
                "--headless=new",
                "--no-sandbox",
                "--disable-dev-shm-usage",
                f"--lang={language}",
                "--disable-gpu",
            ],
            "prefs": {"intl.accept_languages": language, "download.default_directory": str(downloads)},
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            made = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in made, made
            try:
                yield Browser(http, made["sessionId"])
            finally:
                http.delete(f"/session/{made['sessionId']}")
    finally:
        driver.terminate()
        driver.wait(10)
