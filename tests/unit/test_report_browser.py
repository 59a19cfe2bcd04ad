"""The report page in a real browser: it draws all charts without errors and without a horizontal scroll bar."""

import html
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from kit.report_runs import HOSTILE, Page, make_on_policy_run, make_run

from stillhouse.report.command import ReportServer
from stillhouse.report.page import ASSETS, write_report
from stillhouse.report.shown_records import shade_class

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
FLAGS = f"{QUIET} --remote-debugging-pipe"


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

    def wait(self, expression: str) -> None:
        """Wait until an expression is true, for at most 30 seconds."""
        pause = "new Promise((done) => setTimeout(done, 100))"
        for _ in range(300):
            if self.value(f"Boolean({expression})"):
                return
            self.value(pause)
        raise AssertionError(f"never true: {expression}")

    def mouse(self, kind: str, x: float, y: float, *, pressed: bool = False) -> None:
        button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
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
        box = self.box(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def box(self, selector: str) -> dict[str, float]:
        """The place of an element in the window, after scrolling to it."""
        chosen = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{chosen}.scrollIntoView({{block: 'center'}})")
        return self.value(f"{chosen}.getBoundingClientRect().toJSON()")

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


pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")]

DUMP = f"{QUIET} --enable-logging=stderr --dump-dom --virtual-time-budget=5000"
THEMES = {"light": "--blink-settings=preferredColorScheme=1", "dark": "--blink-settings=preferredColorScheme=0"}

# A window is at least 500 pixels wide, but a frame can be narrower. The frame contains the whole page with its
# content security policy. The script waits until the page is drawn, and writes its results to the frame's dataset.
FRAME = """<!doctype html>
<html style="color-scheme: light dark"><body><iframe width="{width}" height="900" srcdoc="{page}"></iframe><script>
setTimeout(() => {{
  const frame = document.querySelector("iframe"), page = frame.contentDocument, root = page.documentElement;
  Object.assign(frame.dataset, {{
    charts: root.dataset.charts,
    drawn: page.querySelectorAll('[data-drawn="true"]').length,
    injected: page.querySelectorAll("#injected").length,
    width: page.defaultView.innerWidth,
    overflow: root.scrollWidth - root.clientWidth,
    background: page.defaultView.getComputedStyle(page.body).backgroundColor,
  }});
  frame.removeAttribute("srcdoc");
}}, 3000);
</script></body></html>"""

# Rows of tiles that end before their grid does: the right edges of the last tiles of rows.
HOLES = """[...document.querySelectorAll(".charts, .figures, .tables")].flatMap((grid) => {
  const rows = new Map();
  for (const tile of grid.children) {
    const box = tile.getBoundingClientRect();
    rows.set(Math.round(box.top), box.right);
  }
  return [...rows.values()].filter((right) => grid.getBoundingClientRect().right - right > 3);
})"""


def opened(path: Path, width: int, theme: str) -> tuple[dict[str, str], list[str]]:
    frame = path.with_name("frame.html")
    page = html.escape(path.read_text(encoding="utf-8"))
    frame.write_text(FRAME.format(width=width, page=page), encoding="utf-8")
    profile = f"--user-data-dir={path.parent / 'profile'}"
    arguments = [CHROMIUM, *DUMP.split(), THEMES[theme], "--window-size=1800,1000", profile, frame.as_uri()]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    measured = dict(re.findall(r'data-(\w+)="([^"]*)"', result.stdout.partition("<iframe")[2].partition(">")[0]))
    return measured, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


def page_colour(theme: str) -> str:
    style = (ASSETS / "report.css").read_text()
    colour = re.findall(r"--page: #([0-9a-f]{6});", style)[theme == "dark"]
    return "rgb({}, {}, {})".format(*bytes.fromhex(colour))


def compared_runs(folder: Path) -> Path:
    distilled = make_run(folder / "distilled", terms=("cross_entropy", "jsd(0.5)"))
    return write_report(distilled, [make_run(folder / "control", terms=("cross_entropy",), every=75)])


def on_policy_run(folder: Path) -> Path:
    return write_report(make_on_policy_run(folder / "on_policy", steps=30, texts=(HOSTILE, "a" * 400, "word " * 600)))


@pytest.mark.parametrize("make_page", [compared_runs, on_policy_run])
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_draws_every_chart_without_complaint(tmp_path, width, theme, make_page):
    path = make_page(tmp_path)
    measured, complaints = opened(path, width, theme)
    assert not complaints
    charts = str(len(Page(path).data["charts"]))
    assert measured == {
        **{"charts": charts, "drawn": charts, "injected": "0", "width": str(width), "overflow": "0"},
        "background": page_colour(theme),
    }


def reload(browser: Browser) -> None:
    """The page that is there before is marked, so that it is not taken for the new one."""
    root = "document.documentElement.dataset"
    browser.value(f"({root}.before = 'true', location.reload())")
    browser.wait(f"document.readyState === 'complete' && 'charts' in {root} && !('before' in {root})")


def wait_until_drawn(browser: Browser) -> None:
    browser.wait("document.querySelectorAll('.chart').length === document.querySelectorAll('[data-drawn]').length")


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 900, 1600])
def test_a_reader_points_zooms_smooths_and_comes_back(tmp_path, width):
    run = make_run(tmp_path / "distilled", terms=("cross_entropy", "jsd(0.5)"))
    url = write_report(run).as_uri()
    at = "document.querySelector('[data-chart=\"4\"] .at').textContent"
    shown = "document.querySelector('[data-chart=\"4\"] .legend b').textContent"
    with Browser(tmp_path) as browser:
        browser.open(url, width)
        wait_until_drawn(browser)
        assert browser.value(HOLES) == []
        assert browser.value(at) == "step 300"
        last, box = browser.value(shown), browser.box('[data-chart="4"] .u-over')
        left, right, height = box["x"], box["x"] + box["width"], box["y"] + box["height"] / 2
        browser.mouse("mouseMoved", (left + right) / 2, height)
        browser.wait(f"{at} === 'step 150'")
        assert browser.value(shown) != last
        browser.drag((left + box["width"] / 3, height), (left + 2 * box["width"] / 3, height))
        browser.wait("location.hash.includes('steps=')")
        low, high = map(float, browser.value("location.hash").partition("steps=")[2].split(".."))
        assert (low, high) == (pytest.approx(100, abs=4), pytest.approx(200, abs=4))
        browser.click('[data-chart="4"] .log')
        browser.value("(smooth.value = 0.9, smooth.dispatchEvent(new Event('input')))")
        kept = browser.value("location.hash")
        assert "smooth=0.9" in kept
        assert "log=Training" in kept
        smoothed = browser.value(shown)
        assert smoothed != last
        reload(browser)
        wait_until_drawn(browser)
        assert browser.value("location.hash") == kept
        assert browser.value(shown) == smoothed
        assert browser.value("document.querySelector('[data-chart=\"4\"] .log').ariaPressed") == "true"
        box = browser.box('[data-chart="4"] .u-over')
        browser.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        browser.wait(f"Math.abs(+{at}.slice(5) - 150) < 3")
        assert not browser.errors


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 900, 1600])
def test_a_token_shows_what_each_term_does_there(tmp_path, width):
    url = write_report(make_run(tmp_path / "distilled")).as_uri()
    token = ".text[data-document='0'] > span:nth-child(12)"
    shades = f"document.querySelector({token!r}).className"
    readout = "document.getElementById('readout')"
    with Browser(tmp_path) as browser:
        browser.open(url, width)
        wait_until_drawn(browser)
        documents = browser.value("JSON.parse(document.getElementById('data').textContent).documents")
        _, kl, _, _, ((_, gradient, raises, _), _) = documents[0][11]
        assert browser.value(shades) == shade_class(kl)
        browser.value(f"document.querySelector({token!r}).scrollIntoView()")
        box = browser.box(token)
        browser.mouse("mouseMoved", box["x"] + 2, box["y"] + 4)
        browser.wait(f"!{readout}.hidden")
        assert browser.value(f"{readout}.querySelectorAll('.effect').length") == 2
        assert raises[0][0] in browser.value(f"{readout}.querySelector('.effect').textContent")
        edges = browser.value(f"(({{left, right}}) => [left, right])({readout}.getBoundingClientRect())")
        assert 0 <= edges[0] < edges[1] <= width
        browser.value("(shaded.value = 'cross_entropy', shaded.dispatchEvent(new Event('change')))")
        assert browser.value(shades).split()[0] == shade_class(gradient)
        assert "shaded=cross_entropy" in browser.value("location.hash")
        reload(browser)
        assert browser.value(shades) == shade_class(gradient)
        browser.value("(shaded.value = '', shaded.dispatchEvent(new Event('change')))")
        assert browser.value(shades) == shade_class(kl)
        assert not browser.errors


@pytest.mark.slow
def test_a_watched_page_follows_the_run_and_keeps_the_view(tmp_path):
    run = make_run(tmp_path / "distilled")
    server = ReportServer(run)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    with server, Browser(tmp_path) as browser:
        browser.open(f"{server.url}#smooth=0.5&steps=100..200", 900, height=400)
        browser.wait("document.querySelector('.live').textContent.startsWith('Live')")
        browser.value("scrollTo(0, 300)")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 340, "train/gradient_norm": 3.25, "later/metric": 7}\n')
        browser.wait("document.querySelector('main').textContent.includes('later/metric')")
        wait_until_drawn(browser)
        assert browser.value("scrollY") == 300
        assert browser.value("location.hash") == "#smooth=0.5&steps=100..200"
        assert browser.value("smooth.value") == "0.5"
        (run / "data.json").write_text("[")
        browser.wait("document.querySelector('.live.failed')?.textContent.includes('not JSON')")
        (run / "data.json").write_text("{}")
        browser.wait("!document.querySelector('.live.failed')")
        server.shutdown()
        server.server_close()
        browser.wait("document.querySelector('.live').textContent.includes('has ended')")
        assert all("503" in error or "ERR_CONNECTION" in error for error in browser.errors)
