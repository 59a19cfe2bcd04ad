"""A headless chromium that tests drive through its debugging protocol: pages, mouse and screenshots.

The protocol goes over a pipe: messages are JSON, each with a zero byte at its end. No port and no library is needed.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-pipe"
)


class Browser:
    """A context manager around one tab. `errors` are the console's errors and the exceptions of the page."""

    def __init__(self, folder: Path):
        self.errors: list[str] = []
        self._number = 0
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        self._in, self._out = os.fdopen(read_here, "rb"), os.fdopen(write_here, "wb", buffering=0)
        shell = f'exec "$@" 3<&{read_there} 4>&{write_there}'
        command = ["bash", "-c", shell, "bash", CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}"]
        self._process = subprocess.Popen(
            command, pass_fds=(read_there, write_there), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_there)
        os.close(write_there)
        self._rest = b""
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()

    def open(self, url: str, width: int, height: int = 1000) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        self._send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && 'charts' in document.documentElement.dataset")

    def value(self, expression: str) -> Any:
        result = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, attempts: int = 300) -> None:
        """Wait until an expression is true, for at most 30 seconds."""
        pause = "new Promise((done) => setTimeout(done, 100))"
        for _ in range(attempts):
            if self.value(f"Boolean({expression})"):
                return
            self.value(pause)
        raise AssertionError(f"never true: {expression}")

    def mouse(self, kind: str, x: float, y: float, *, pressed: bool = False, clicks: int = 1) -> None:
        button = {"button": "left", "clickCount": clicks} if kind != "mouseMoved" else {}
        held = {"buttons": 1, "button": "left"} if pressed else {}
        self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **(button | held))

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, pressed=True)
        for share in (0.3, 0.7, 1.0):
            at = [first + share * (last - first) for first, last in zip(start, stop, strict=True)]
            self.mouse("mouseMoved", *at, pressed=True)
        self.mouse("mouseReleased", *stop)

    def click(self, selector: str) -> None:
        x, y = self.middle(selector)
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def box(self, selector: str) -> dict[str, float]:
        """The place of an element in the window, after scrolling to it."""
        chosen = f"document.querySelector({json.dumps(selector)})"
        return self.value(
            f"({chosen}.scrollIntoView({{block: 'center'}}), {chosen}.getBoundingClientRect().toJSON())"
        )

    def middle(self, selector: str) -> tuple[float, float]:
        box = self.box(selector)
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if not method.startswith("Target."):
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        return self._until(lambda answer: answer.get("id") == self._number)

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._in.fileno(), 1 << 16)
                assert part, "the browser has ended"
                self._rest += part
            raw, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(raw)
            method, parameters = answer.get("method"), answer.get("params", {})
            if method == "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and parameters["type"] == "error":
                self.errors.append(str(parameters["args"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
            if wanted(answer):
                assert "error" not in answer, answer
                return answer.get("result", {})
