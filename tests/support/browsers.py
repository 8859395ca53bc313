"""A Chromium without a window, for tests of pages."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import until
from tornado.websocket import websocket_connect

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no chromium here: apt-get install chromium"
)


class Browser:
    """A tab of a Chromium without a window, over its debugging port."""

    def __init__(self, folder: Path) -> None:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--remote-debugging-port=0",
        ]
        command = ["chromium", *options, f"--user-data-dir={folder}", "--window-size=1100,1600", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        told = folder / "DevToolsActivePort"
        until(lambda: told.exists() and len(told.read_text().split()) == 2, 60)
        connection = http.client.HTTPConnection("127.0.0.1", int(told.read_text().split()[0]))
        connection.request("PUT", "/json/new?about:blank")
        tab = json.loads(connection.getresponse().read())
        self._loop, self._sent = asyncio.new_event_loop(), 0
        self._socket = self._do(websocket_connect, tab["webSocketDebuggerUrl"])

    def _do(self, make: Callable[..., Any], *given: Any) -> Any:
        async def done() -> Any:
            return await make(*given)

        return self._loop.run_until_complete(done())

    def call(self, method: str, **params: object) -> dict[str, Any]:
        self._sent += 1
        self._do(self._socket.write_message, json.dumps({"id": self._sent, "method": method, "params": params}))
        while (said := json.loads(self._do(self._socket.read_message))).get("id") != self._sent:
            pass
        return said["result"]

    def says(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script)["result"].get("value")

    def show(self, url: str, width: int = 1100, height: int = 1600, dark: bool = False) -> None:
        """Opens a page in a window of this size; up to 480 pixels of width as a phone does."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width <= 480
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def picture(self, path: Path) -> None:
        """Saves what the window shows."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        async def close_socket() -> None:  # its last message needs a running loop
            self._socket.close()

        self._loop.run_until_complete(close_socket())
        self.process.kill()
        self.process.wait()
