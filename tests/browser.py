"""Chromium without a window, driven over a pair of pipes by its own protocol (CDP)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",  # as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-pipe",
)


class Browser:
    """A context manager. Each page has its own size; all share what is stored."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM
        here, commands = os.pipe()
        answers, there = os.pipe()
        # The browser reads its file 3 and writes its file 4, whatever the numbers are here
        line = f'exec "$@" 3<&{here} 4>&{there}'
        arguments = ["bash", "-c", line, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={folder}"]
        self.process = subprocess.Popen(
            arguments,
            pass_fds=(here, there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder)},
        )
        os.close(here)
        os.close(there)
        self.commands = os.fdopen(commands, "wb")
        self.answers = os.fdopen(answers, "rb")
        self.number = 0
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.commands.close()
        self.answers.close()

    def call(self, method: str, session: str = "", **parameters: Any) -> Any:
        """The result of a command."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        self.commands.write(json.dumps(command).encode() + b"\0")
        self.commands.flush()
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _read(self) -> bytes:
        while b"\0" not in self._rest:
            piece = os.read(self.answers.fileno(), 65536)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return message

    def open(self, url: str, width: int = 390, height: int = 844) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, target, attached["sessionId"])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.call("Page.navigate", url=url)
        return page


class Page:
    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser = browser
        self.target = target
        self.session = session

    def call(self, method: str, **parameters: Any) -> Any:
        return self.browser.call(method, self.session, **parameters)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    @property
    def url(self) -> str:
        return str(self.value("location.href"))

    @property
    def text(self) -> str:
        """What a person reads in it."""
        return str(self.value("document.body?.innerText ?? ''"))

    def click(self, selector: str, times: int = 1) -> None:
        """Click as a person does, in the middle of what the selector finds, so many times."""
        element = f"document.querySelector({json.dumps(selector)})"
        place = self.value(
            f"{element}.scrollIntoView(), {element}.getBoundingClientRect().toJSON()"
        )
        where = {
            "x": place["x"] + place["width"] / 2,
            "y": place["y"] + place["height"] / 2,
        }
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                button = {"button": "left", "clickCount": count}
                self.call("Input.dispatchMouseEvent", type=kind, **where, **button)

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
