"""The report page: its content, its notes on missing files, and hostile text, which must stay text."""

import html
import io
import json
import random
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from kit.report_runs import EVAL_SAMPLE, HOSTILE, Page, make_run
from kit.runs import ROOT
from PIL import Image

from stillhouse.data import DataReport
from stillhouse.data.media_files import MediaFile
from stillhouse.images import SHOWN
from stillhouse.images.decode import thumbnail
from stillhouse.report import curves
from stillhouse.report.page import ASSETS, write_report
from stillhouse.report.shown_records import SHADES, shade_class


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return make_run(tmp_path / "distilled")


def page_of(run_dir: Path, *others: Path) -> Page:
    return Page(write_report(run_dir, others))


def test_page_shows_the_whole_run(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    assert not list(run_dir.glob("*.partial"))
    page = Page(path)
    assert "small-student ← Example/Teacher-5M" in page.text
    assert "minimise forward_kl on completions" in page.text
    assert page.titles == [
        "Held-out cross-entropy", "Held-out forward KL", "Held-out agreement", "Held-out entropy", "Loss: forward_kl",
        "Training entropy", "Training agreement", "Learning rate", "Gradient norm", "Throughput",
    ]  # fmt: skip
    assert len(page.data["charts"]) == len(page.titles) == len(page.all("figure"))
    # only its values span enough for a logarithmic axis
    assert [chart["title"] for chart in page.data["charts"] if chart["log"]] == ["Training: Gradient norm"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/cross_entropy" in line]
    ends = (evaluations[0], evaluations[-1])
    (first, first_share), (last, last_share) = ((x["eval/cross_entropy"], 100 * x["eval/agreement"]) for x in ends)
    for fact in (
        *(f"{first:.3f} → {last:.3f}", f"{first_share:.1f} % → {last_share:.1f} %", f"{lines[-1]['tokens']:,}"),
        *("3 min 33 s", "nats per token", "18,233", "cut to the length limit", "learning_rate: 2e-5", "Example CPU"),
        "train, reasons: train.jsonl:17",
    ):
        assert fact in page.text, fact
    assert all(attributes.get("class") != "notes" for attributes in page.all("ul"))


def test_each_term_has_a_chart_and_runs_of_one_name_get_their_parents(tmp_path):
    page = page_of(make_run(tmp_path / "mixed", terms=("cross_entropy", "jsd(0.5)"), steps=10))
    assert page.titles[4:7] == ["Total loss", "Loss: cross_entropy", "Loss: jsd(0.5)"]
    runs = [make_run(tmp_path / seed / "run", steps=2) for seed in ("seed-0", "seed-1")]
    assert page_of(*runs).data["runs"] == ["seed-0/run", "seed-1/run"]


def test_compare_refuses_the_run_itself_and_too_many(run_dir, tmp_path):
    with pytest.raises(ValueError, match="given twice"):
        write_report(run_dir, [run_dir / ".." / run_dir.name])
    with pytest.raises(ValueError, match="got 8 runs to compare: expected at most 7"):
        write_report(run_dir, [tmp_path / str(index) for index in range(8)])
    with pytest.raises(ValueError, match=r"nowhere contains no run: it has no metrics\.jsonl"):
        write_report(run_dir, [tmp_path / "nowhere"])


def test_hostile_text_stays_text(run_dir):
    run_dir = run_dir.rename(run_dir.with_name("a<i>&b"))
    environment = json.loads((run_dir / "environment.json").read_text())
    environment["objective"] = "<img src=x onerror=alert(1)>"
    (run_dir / "environment.json").write_text(json.dumps(environment))
    page = page_of(run_dir)
    assert not page.all("b")
    assert not page.all("img")
    # the scripts are the data, the charting library and our code; a `</script>` in the data ended none of them
    assert len(page.scripts) == 3
    # the text is unchanged, including newline, tab and quotes; only NUL is replaced by a mark
    assert HOSTILE.replace("\x00", "") in page.text
    labels = "".join(token[0] for token in page.data["documents"][1])
    assert "</script><b" in labels.replace("␣", " ")
    assert "<img src=x onerror=alert(1)>" in page.text
    assert page.data["runs"] == ["a<i>&b"]
    assert "</script" not in page.scripts[0]


def policy_without_loading(page: Page, images: int = 0) -> str:
    """Assert that only so many images have an address, and return the page's security policy."""
    loading = {"src", "srcset", "href", "poster", "data", "action", "background", "formaction", "xlink:href"}
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "base", "audio", "video", "source"}
        assert loading & attributes.keys() <= ({"src"} if tag == "img" else set()), (tag, attributes)
    assert len(page.all("img")) == images
    (policy,) = (a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    return policy


def test_page_loads_nothing(run_dir):
    page = page_of(run_dir)
    policy = policy_without_loading(page)
    styles = "".join(re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL))
    assert "url(" not in styles
    assert "@import" not in styles
    for script in page.scripts[1:]:
        assert not re.search(r"\bfetch\(|XMLHttpRequest|\bimport\(|WebSocket|sendBeacon|new Image|new Worker", script)
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.split("script-src")[1]
    assert policy.count("'sha256-") == 2
    assert "MIT License" in (ASSETS / "uplot.LICENSE").read_text()
    assert "uPlot (v1.6.32)" in (ASSETS / "uplot.min.js").read_text()[:100]


def test_images_are_in_the_page_and_no_other_address_is(run_dir):
    path = run_dir / "tokens.json"
    shown = json.loads(path.read_text())
    noise = io.BytesIO()  # no encoder makes it small
    Image.effect_noise((1000, 700), 90).save(noise, format="PNG")
    made = thumbnail(MediaFile.of(noise.getvalue()))
    image = {"width": made.width, "height": made.height, "thumbnail": made.thumbnail}
    assert len(made.thumbnail) < 40_000
    shown["documents"][1] |= {"images": [image] * SHOWN, "image_count": 12}
    path.write_text(json.dumps(shown))
    sample = EVAL_SAMPLE | {"images": [image], "image_count": 1}
    (run_dir / "eval_samples.jsonl").write_text(json.dumps(sample) + "\n")
    page = page_of(run_dir)
    assert [attributes["src"] for attributes in page.all("img")] == [made.thumbnail] * (SHOWN + 1)
    assert [attributes["alt"] for attributes in page.all("img")][:2] == ["image 1 of 1", "image 1 of 12"]
    assert page.text.count("The first 8 of 12 images.") == 1
    assert not page.all("b")
    assert policy_without_loading(page, SHOWN + 1).endswith("; img-src data:")


def test_a_resumed_run_is_one_curve(run_dir):
    """The trainer removes the lines after the checkpoint and continues; it evaluates step 150 a second time."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    again = [line for line in lines if line["step"] == 150 and "eval/forward_kl" in line]
    resumed = sorted([*lines, *again], key=lambda line: line["step"])
    path.write_text("".join(json.dumps(line) + "\n" for line in resumed))
    for chart in page_of(run_dir).data["charts"]:
        for series in chart["series"]:
            assert series["steps"] == sorted(series["steps"])
            assert None not in series["values"]


def test_numbers_that_are_not_finite_are_gaps(run_dir):
    path = run_dir / "metrics.jsonl"
    values = ("NaN", "2.0", "Infinity")
    path.write_text("".join(f'{{"step": {step}, "eval/forward_kl": {value}}}\n' for step, value in enumerate(values)))
    (chart,) = page_of(run_dir).data["charts"]
    assert chart["series"][0]["values"] == [None, 2.0, None]


@pytest.mark.parametrize(
    ("steps", "gaps"),
    [
        (range(6), []),
        ([0, 1, 2, 4, 5, 6], [3]),
        ([0, 100, 200, 300, 310], []),  # the last evaluation is at the end
        ([0, 1000, 1010, 1020], []),  # two intervals
        ([0, 100, 200, 700, 1200, 1700], []),  # the run was resumed with another interval
        ([0, 100, 200, 500, 600, 700], [350]),
    ],
)
def test_missing_steps_are_gaps(steps, gaps):
    assert [step for step, value in curves._with_gaps([(step, 1.0) for step in steps]) if value is None] == gaps


def test_long_curves_keep_their_extremes():
    rng = random.Random(0)
    series = [(float(step), rng.random()) for step in range(100_000)]
    series[31_417] = (31_417.0, 50.0)
    series[60_000] = (60_000.0, None)
    thin = curves._thin(series)
    assert len(thin) <= curves.POINTS
    assert (31_417.0, 50.0) in thin
    assert (60_000.0, None) in thin
    assert thin == sorted(thin, key=lambda point: point[0])


@pytest.mark.parametrize(
    ("kl", "number"), [(-1e-7, 0), (0.0, 0), (0.04, 1), (0.5, 5), (0.99, 5), (1.0, 6), (3.9, 7), (40.0, 8)]
)
def test_shades_double(kl, number):
    assert shade_class(kl) == f"k{number}"


def test_prompt_is_dimmed_and_text_kept(run_dir):
    """Whitespace stays; an empty token has a mark; half of a surrogate pair, which UTF-8 lacks, is replaced."""
    texts = {"def": (False, None), "\n\n    ": (False, 3.0), " x": (True, 3.0), "": (True, 0.5)}
    texts["\ud83d"] = (True, None)
    tokens = [{"text": text, "target": target, "kl": kl, "teacher": [], "student": []}
              for text, (target, kl) in texts.items()]  # fmt: skip
    (run_dir / "tokens.json").write_text(json.dumps({"step": 7, "documents": [{"source": "e:1", "tokens": tokens}]}))
    page = page_of(run_dir)
    text = re.search(r'<div class="text".*?</div>', page.source, re.DOTALL).group()
    assert re.findall(r'<span class=" ?(.*?)"', text) == ["prompt", "prompt", "k7", "k5", ""]
    assert html.unescape(re.sub("<[^>]*>", "", text)) == "def\n\n     x\ufffd"
    assert [token[0] for token in page.data["documents"][0]][:4] == ["def", "↵↵␣␣␣␣", "␣x", "∅"]
    assert {"data-mark": "∅"} in page.all("i")


def contrast(*colours: str) -> float:
    """Return the contrast ratio of WCAG 2 between two #rrggbb colours."""
    luminances = []
    for colour in colours:
        parts = [part / 255 for part in bytes.fromhex(colour[1:])]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    low, high = sorted(luminances)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_readable_and_ordered(theme):
    style = (ASSETS / "report.css").read_text()
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[theme == "dark"]
    colour = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    for text in ("text", "muted", *(f"run-{index}" for index in range(8))):
        assert contrast(colour[text], colour["page"]) >= 4.5, text
    shades = [colour[f"kl-{index}"] for index in range(len(SHADES) + 1)]
    assert all(contrast(colour["on-shade"], shade_colour) >= 4.5 for shade_colour in shades)
    distances = [contrast(colour["page"], shade_colour) for shade_colour in shades]
    assert distances == sorted(distances)


def test_held_out_prompts_are_shown_with_their_completions_over_time(run_dir):
    samples = [
        EVAL_SAMPLE | {"step": step, "number": n, "source": f"eval.jsonl:{n}", "completion": f" step {step}\t{n}"}
        for step in range(0, 100, 10)
        for n in (0, 1)
    ]
    samples.append(EVAL_SAMPLE | {"step": 100, "completion": " is five", "finish": "stop"})
    of_prompts = {"key": "eval.prompts", "source": "p.jsonl:1", "reference": None}
    samples.append(EVAL_SAMPLE | of_prompts | {"reward": 0.75, "reward_parts": {"exact": 1.0, "short": -0.5}})
    (run_dir / "eval_samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    page = page_of(run_dir)
    assert "<b>Two & three</b>" in page.text
    shown = [page.text.index(f"step {step} ") for step in range(0, 101, 20)]
    assert shown == sorted(shown)
    assert "3 tokens, as in the data" in page.text
    assert "3 tokens, cut, reward 0.75 (exact 1, short -0.5)" in page.text
    assert "The same 3 prompts" in page.text
    assert (run_dir / "report.html").read_text().count('<tr class="data">') == 2
    assert "5 further evaluations of eval.jsonl:0" in page.text
    assert "4 further evaluations of eval.jsonl:1" in page.text
    for step in range(0, 100, 10):
        assert f" step {step}\t1" in page.text


def test_data_that_are_not_there_have_no_row(run_dir):
    """A run without foreign columns and without a mixture has neither a form nor shares."""
    reports = {name: asdict(DataReport(f"{name}.jsonl")) for name in ("train", "train/1")}
    (run_dir / "data.json").write_text(json.dumps(reports))
    plain = page_of(run_dir).text
    assert "columns read as" not in plain
    assert "share of the tokens" not in plain
    reports["train/1"] |= {"form": "Alpaca", "trained_share": 0.25}
    (run_dir / "data.json").write_text(json.dumps(reports))
    mixture = page_of(run_dir).text
    assert re.search(r"columns read as\s*Alpaca", mixture)
    assert re.search(r"share of the tokens to train on\s*0\.25", mixture)


def test_every_metric_of_a_run_has_a_title(tmp_path):
    """A key in quotes in the code that writes metrics has a chart of its own; only one of a later version is named by
    its key.
    """
    keys = {"eval/mtp_1/acceptance", "eval/mtp_1/sampled_acceptance"}
    for source in (ROOT / "stillhouse").rglob("*.py"):
        keys |= set(re.findall(r'"((?:rollout|speed|train|eval|loss)/[a-z_]+)"', source.read_text()))
    keys -= {"eval/exact_match", "eval/acceptance", "eval/sampled_acceptance"}  # prefixes of keys
    run = make_run(tmp_path / "run", steps=2, every=1)
    line = {"step": 3, "tokens": 3, "seconds": 3.0} | dict.fromkeys([*sorted(keys), "memory/peak_bytes"], 0.5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    page = page_of(run)
    assert len(keys) > 25
    assert [title for title in page.titles if "/" in title] == ["memory/peak_bytes"]


def write_metrics(run: Path, lines: list[dict[str, float]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_constant_metrics_are_folded_with_their_values(run_dir, tmp_path):
    lines = [{"step": step, "train/learning_rate": 0.002, "later/metric": step} for step in (1, 2, 3)]
    write_metrics(run_dir, lines)
    page = page_of(run_dir)
    assert page.titles == ["later/metric"] == [chart["title"].partition(": ")[2] for chart in page.data["charts"]]
    assert "1 metric with a constant value: Learning rate" in page.text
    assert "Learning rate: 0.002 per step" in page.text
    other = make_run(tmp_path / "other")
    write_metrics(other, [line | {"train/learning_rate": 0.5} for line in lines])
    assert "Learning rate: distilled 0.002, other 0.5 per step" in page_of(run_dir, other).text
    write_metrics(run_dir, lines[:1])  # one point may be the first of a curve
    assert page_of(run_dir).titles == ["Learning rate", "later/metric"]


def test_the_summary_begins_with_the_held_out_reward(run_dir):
    rewards = {"rollout/reward": 0.1, "eval/cross_entropy": 2.0, "eval/prompts/reward": 0.25}
    write_metrics(run_dir, [{"step": step, **rewards} for step in (0, 9)])
    tiles = re.findall(r"<dt>(.*?)</dt>", page_of(run_dir).source)
    assert tiles[:3] == ["Reward of completions", "Held-out cross-entropy", "Reward"]


def test_a_run_without_a_teacher_has_no_empty_tiles_and_misses_no_tokens(run_dir):
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(re.sub(r"^teacher:.*\n(?: .*\n)*", "teacher: null\n", config, flags=re.M))
    (run_dir / "tokens.json").unlink()
    write_metrics(run_dir, [{"step": step, "eval/cross_entropy": 2.0 - step} for step in (0, 1)])
    page = page_of(run_dir)
    assert "not measured" not in page.text.partition("Tokens")[0]
    assert "agreement" not in page.text.partition("Configuration")[0].lower()
    assert all(attributes.get("class") != "notes" for attributes in page.all("ul"))
