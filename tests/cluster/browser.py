"""A headless Chromium that tests drive over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 30.0
LOOK_S = 0.02
MESSAGE_BYTES_MAX = 64 << 20  # a picture


def found() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page of the browser."""

    def __init__(self, socket_url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.numbers = itertools.count(1)
        self.said: list[str] = []  # errors and warnings that the page has logged
        self.socket: WebSocketClientConnection = self.loop.run_until_complete(self._connect(socket_url))
        for domain in ("Page", "Runtime", "Log"):
            self.order(f"{domain}.enable")

    async def _connect(self, socket_url: str) -> WebSocketClientConnection:
        return await websocket_connect(socket_url, max_message_size=MESSAGE_BYTES_MAX)

    def order(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Have something done and wait for the answer."""
        return self.loop.run_until_complete(asyncio.wait_for(self._order(method, parameters), PATIENCE_S))

    async def _order(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self.numbers)
        await self.socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            text = await self.socket.read_message()
            assert text is not None, "the browser has ended"
            word = json.loads(text)
            if word.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(json.dumps(word["params"]))
            if word.get("id") == number:
                assert "error" not in word, word
                return word["result"]

    def screen(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """What the page is shown on."""
        self.order("Emulation.setDeviceMetricsOverride", width=width, height=height,
                   deviceScaleFactor=2 if phone else 1, mobile=phone)
        self.order("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def go(self, url: str) -> None:
        """Load a page."""
        self.order("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """The value of an expression in the page, of a promise too."""
        result = self.order("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script: str, patience_s: float = PATIENCE_S) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + patience_s
        while not (value := self.value(script)):
            assert time.monotonic() < end, f"it did not come about: {script}"
            time.sleep(LOOK_S)
        return value

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write what is seen as PNG."""
        told = self.order("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    def close(self) -> None:
        """Leave it."""
        self.loop.run_until_complete(self._close())
        self.loop.close()

    async def _close(self) -> None:
        self.socket.close()
        await asyncio.sleep(0)


@contextlib.contextmanager
def browser(path: str) -> Iterator[Tab]:
    """A new browser with an empty page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--hide-scrollbars", f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            tab = Tab(_first_page(Path(folder), process))
            try:
                yield tab
            finally:
                tab.close()
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _first_page(folder: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        assert process.poll() is None, "the browser has ended"
        with contextlib.suppress(OSError, IndexError, StopIteration):
            port = (folder / "DevToolsActivePort").read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE_S) as answer:
                pages = json.load(answer)
            return str(next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"))
        time.sleep(LOOK_S)
    raise AssertionError("the browser does not listen")
