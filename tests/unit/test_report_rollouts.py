"""The report page of an on-policy run, from files that a run's own writers wrote."""

import html
import itertools
import json
import random
import re
import shutil
from pathlib import Path

import pytest
from kit.report_runs import HOSTILE, TEXT, Page, make_on_policy_run, make_sample

from stillhouse.output.folder import RunFolder
from stillhouse.output.records import TimelineSpan
from stillhouse.output.rollout_log import RolloutLog
from stillhouse.report import run_files, shown_records
from stillhouse.report.page import write_report
from stillhouse.report.shown_records import staleness_rows


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_on_policy_run(tmp_path_factory.mktemp("runs") / "on_policy", steps=30)


@pytest.fixture
def run_dir(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "on_policy"))


def headings(page: Page) -> list[str]:
    return re.findall(r"<h2>([^<]*)</h2>", page.source)


def test_page_has_the_curves_of_rollouts_and_tasks(run_dir):
    page = Page(write_report(run_dir))
    assert page.titles[:2] == ["Exact match: gsm8k", "Exact match: math"]
    assert page.titles[-4:] == ["Reward", "Completion length", "Cut completions", "Waiting"]
    folded = (
        "12 metrics with a constant value: Reward, spread, Longest and shortest completion, Length of ended "
        "completions, Turns, Calls of tools, Errors of tools, Equal rewards, Own completions, Staleness, Training "
        "against engine, Time of a reward, Sampling"
    )
    assert folded in page.text
    assert "Other" not in headings(page)
    assert "10.0 % → 60.0 %" in page.text


def test_the_timeline_shows_the_last_steps_and_who_waited(run_dir):
    page = Page(write_report(run_dir))
    assert "steps 19 to 30" in page.text
    boxes = [box for box in page.all("div") if box.get("class", "").startswith("box")]
    waits = [box for box in boxes if "waits" in box["class"]]
    assert len(waits) == 2 * shown_records.STEPS
    assert all("wait for" in box["title"] for box in waits)
    assert any(box["title"].startswith("step 30, publish <version 30>: 0.5 s") for box in boxes)
    places = [re.match(r"left:([\d.]+)%;width:([\d.]+)%", box["style"]) for box in boxes]
    assert all(float(place[1]) + float(place[2]) <= 100.01 for place in places)


def span(start, stop, step=1, lane="rollout", what="generate"):
    return TimelineSpan(step=step, lane=lane, what=what, start=start, stop=stop)


def test_work_at_the_same_time_is_in_rows_from_the_first_step_on():
    spans = [span(0, 4), span(1, 3), span(3, 5), span(0, 10, lane="trainer", what="wait")]
    shown = shown_records.timeline(spans)
    rollout, _, trainer, _ = shown.lanes
    assert [(box.left, box.width, box.row) for box in rollout.boxes] == [(0, 40, 0), (10, 20, 1), (30, 20, 1)]
    assert (rollout.rows, rollout.shares) == (2, [("busy", 50), ("idle", 50)])
    assert (dict(trainer.shares)["waiting"], shown.waiting) == (100, 1)
    many = shown_records.timeline([span(0, 1 + n) for n in range(50)])
    assert many.lanes[0].rows == shown_records.ROWS
    spans = [span(10 * step, 10 * step + 10, step, "trainer", "update") for step in range(1, 15)]
    shown = shown_records.timeline([span(25, 35, 4), span(2, 12, 2), *spans])
    assert (shown.first, shown.last, shown.start, shown.seconds) == (3, 14, 30, 120)
    assert [(box.left, round(box.width, 1)) for box in shown.lanes[0].boxes] == [(0, 4.2)]
    assert [text for _, text in shown.ticks] == ["0 s", "50 s", "100 s"]
    assert [text for _, text in shown.marks if text] == ["3", "5", "7", "9", "11", "13"]


def test_the_trainer_waits_for_the_share_of_its_steps_that_the_run_prints():
    """Time between steps, such as that of an evaluation, is no part of a step and is named separately."""
    parts = [("wait for completions", 0, 2), ("train", 2, 3), ("wait for completions", 7, 8), ("train", 8, 10)]
    spans = [span(start, stop, 1 + number // 2, "trainer", what) for number, (what, start, stop) in enumerate(parts)]
    shown = shown_records.timeline(spans)
    (trainer,) = (lane for lane in shown.lanes if lane.name == "trainer")
    assert trainer.shares == [("busy", 30), ("waiting", 30), ("between its steps", 40)]
    assert shown.waiting == pytest.approx(0.5)


@pytest.mark.parametrize("ends", [(1, 2, 3), (1.114, 2.229, 3), (1e-3, 2e-3, 3), (0.005, 2.995, 3)])
def test_the_shares_of_a_lane_add_up_to_100(ends):
    first, second, last = ends
    spans = [span(0, first, 1, "trainer", "train"), span(first, second, 1, "trainer", "wait"), span(0, last)]
    for lane in shown_records.timeline(spans).lanes:
        assert sum(percent for _, percent in lane.shares) == 100


@pytest.mark.parametrize("spans", [[], [span(1, 1)], [span(3, 3 + 1e-300)]])
def test_a_timeline_without_time_is_not_drawn(spans):
    assert shown_records.timeline(spans) is None


def test_completions_are_shaded_with_the_version_of_each_token(run_dir):
    page = Page(write_report(run_dir))
    text = re.findall(r'<div class="written".*?</div>', page.source, re.DOTALL)[0]
    tokens = re.findall(r'<span class="(.*?)" title="(.*?)">', text)
    assert {title.rpartition(", ")[2] for _, title in tokens} == {"version 28", "version 29"}
    assert sum("renewed" in kind for kind, _ in tokens) == 1
    no_targets = [kind for kind, title in tokens if "not a target" in title]
    assert all("prompt" in kind and not re.search(r"\bk\d", kind) for kind in no_targets)
    title = next(title for kind, title in tokens if "nats" in title and "prompt" not in kind)
    record = json.loads((run_dir / "samples.jsonl").read_text().splitlines()[-2])
    divergence = next(token["divergence"] for token in record["tokens"] if token["target"] and token["divergence"])
    assert title.startswith(f"{divergence:.3g} nats")
    assert html.unescape(re.sub("<[^>]*>", "", text)) == TEXT
    assert 'if a < b && b > c:</script><b id="injected">' in page.text  # of the other text, which is hostile
    assert all(attributes.get("id") != "injected" for _, attributes in page.elements)


def write_samples(folder: Path, steps, text=TEXT, **changes) -> None:
    rng = random.Random(0)
    (folder / "samples.jsonl").unlink(missing_ok=True)
    with RolloutLog(RunFolder(folder), 1, float) as log:
        for step in steps:
            log.write([make_sample(text, step, rng, **changes)])


def test_a_page_shows_at_most_200_steps_and_a_bounded_number_of_tokens(run_dir):
    write_samples(run_dir, [*range(226, 451), *range(1, 226)], "a b")
    page = Page(write_report(run_dir))
    shown = [int(step) for step in re.findall(r"<summary>step (\d+)", page.source)]
    assert len(shown) == 200
    assert shown[0] == 450
    assert {a - b for a, b in itertools.pairwise(shown)} <= {1, 2, 3}
    assert "200 of 450 recorded steps" in page.text
    chosen = run_files.shown_steps(dict.fromkeys(range(300), 2048))
    assert chosen[-1] == 299
    assert 15 <= len(chosen) <= run_files.TOKENS // 2048
    assert run_files.shown_steps({3: 10**6}) == [3]
    of_step = run_files.first_samples([("samples.jsonl:1", at, 512) for at in range(200)])
    assert len(of_step) == run_files.TOKENS // 512


def test_odd_completions(run_dir):
    write_samples(run_dir, [1], "word " * 600)
    page = Page(write_report(run_dir))
    length = json.loads((run_dir / "samples.jsonl").read_text())["length"]
    assert f"… {length - 512:,} more tokens" in page.text
    assert f"{length:,} tokens, ended by itself" in page.text
    write_samples(run_dir, [1], "\ud800 x", prompt="\ud800")
    write_report(run_dir)
    write_samples(run_dir, [1], "", tokens=[], length=0, completion="", reward=None, advantage=None)
    assert "0 tokens, ended by itself" in Page(write_report(run_dir)).text


def test_staleness_counts_the_students_completions(run_dir):
    write_samples(run_dir, range(1, 7))  # 1, 2, 0, 1, 2, 0
    lines = (run_dir / "samples.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"source": "dataset"})
    lines[1] = json.dumps(json.loads(lines[1]) | {"staleness": 40})
    (run_dir / "samples.jsonl").write_text("\n".join(lines) + "\n")
    staleness = run_files.read_run(run_dir).rollouts.staleness
    assert staleness == {0: 2, 1: 1, 2: 1, 40: 1}
    rows = staleness_rows(staleness)
    assert [(name, count) for name, count, _ in rows if count] == [("0", 2), ("1", 1), ("2", 1), ("12 or more", 1)]


def test_compared_on_policy_runs_share_the_curves(run_dir, tmp_path):
    other = make_on_policy_run(tmp_path / "other", steps=20, texts=(HOSTILE,), seed=1)
    page = Page(write_report(run_dir, [other]))
    reward = page.data["charts"][page.titles.index("Reward")]
    assert [series["run"] for series in reward["series"]] == [0, 1]
    assert headings(page).count("Timeline") == 1
