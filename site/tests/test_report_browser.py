"""The report page in a real browser: it draws all charts without errors and without a horizontal scroll bar."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_runs import HOSTILE, Page, make_run
from rollout_runs import make_on_policy_run

from stillhouse.report import curves, write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --dump-dom --virtual-time-budget=5000"
)
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


def opened(path: Path, width: int, theme: str) -> tuple[dict[str, str], list[str]]:
    """Open the page with this width and theme. Return its measurements and the browser's errors."""
    frame = path.with_name("frame.html")
    page = html.escape(path.read_text(encoding="utf-8"))
    frame.write_text(FRAME.format(width=width, page=page), encoding="utf-8")
    profile = f"--user-data-dir={path.parent / 'profile'}"
    arguments = [CHROMIUM, *QUIET.split(), THEMES[theme], "--window-size=1800,1000", profile, frame.as_uri()]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', result.stdout.partition("<iframe")[2].partition(">")[0]))
    return found, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


def page_colour(theme: str) -> str:
    style = (Path(curves.__file__).parent / "assets" / "report.css").read_text()
    colour = re.findall(r"--page: #([0-9a-f]{6});", style)[theme == "dark"]
    return "rgb({}, {}, {})".format(*bytes.fromhex(colour))


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_draws_every_chart_without_complaint(tmp_path, width, theme):
    distilled = make_run(tmp_path / "distilled", terms=("cross_entropy", "jsd(0.5)"))
    control = make_run(tmp_path / "control", terms=("cross_entropy",), every=75)
    path = write_report(distilled, [control])
    found, complaints = opened(path, width, theme)
    assert not complaints
    charts = str(len(Page(path).data["charts"]))
    assert found == {
        "charts": charts,
        "drawn": charts,
        "injected": "0",
        "width": str(width),
        "overflow": "0",
        "background": page_colour(theme),
    }


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_shows_an_on_policy_run_without_complaint(tmp_path, width, theme):
    path = write_report(
        make_on_policy_run(tmp_path / "on_policy", steps=30, texts=(HOSTILE, "a" * 400, "word " * 600))
    )
    found, complaints = opened(path, width, theme)
    assert not complaints
    charts = str(len(Page(path).data["charts"]))
    assert (found["charts"], found["drawn"], found["injected"]) == (charts, charts, "0")
    assert (found["width"], found["overflow"]) == (str(width), "0")
