"""The report page: its content, its notes on missing files, and hostile text, which must stay text."""

import html
import json
import random
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from kit.report_runs import HOSTILE, Page, make_run
from kit.runs import ROOT

from stillhouse.data import DataReport
from stillhouse.output.report import curves, held_out, write_report
from stillhouse.output.report.reading import read_metrics


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return make_run(tmp_path / "distilled")


def test_page_shows_the_whole_run(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    assert not list(run_dir.glob("*.partial"))
    page = Page(path)
    assert "small-student ← Example/Teacher-5M" in page.text
    assert "minimise forward_kl on completions" in page.text
    assert page.titles == [
        "Held-out cross-entropy", "Held-out forward KL", "Held-out agreement", "Held-out entropy", "Loss: forward_kl",
        "Training entropy", "Training agreement", "Gradient norm", "Learning rate", "Throughput",
    ]  # fmt: skip
    assert len(page.data["charts"]) == len(page.titles) == len(page.all("figure"))
    for fact in (
        "18,233",
        "cut to the length limit",
        "learning_rate: 2e-5",
        "Example CPU",
        "train, reasons: train.jsonl:17",
    ):
        assert fact in page.text
    assert "nats per token" in page.text
    assert not page.all("ul") or all(a.get("class") != "notes" for a in page.all("ul"))


def test_summary_goes_from_first_to_last_evaluation(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/cross_entropy" in line]
    text = Page(write_report(run_dir)).text
    assert f"{evaluations[0]['eval/cross_entropy']:.3f} → {evaluations[-1]['eval/cross_entropy']:.3f}" in text
    assert f"{100 * evaluations[0]['eval/agreement']:.1f} % → {100 * evaluations[-1]['eval/agreement']:.1f} %" in text
    assert f"{lines[-1]['tokens']:,}" in text
    assert "3 min 33 s" in text  # 300 steps of 0.71 s


def test_each_term_has_a_chart_beside_the_total(tmp_path):
    page = Page(write_report(make_run(tmp_path / "mixed", terms=("cross_entropy", "jsd(0.5)"))))
    assert page.titles[4:7] == ["Total loss", "Loss: cross_entropy", "Loss: jsd(0.5)"]


def test_metrics_of_a_later_version_are_drawn_under_their_key(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 301, "memory/peak_bytes": 12}\n')
    page = Page(write_report(run_dir))
    assert page.titles[-1] == "memory/peak_bytes"


def test_compared_runs_share_the_charts(tmp_path):
    distilled = make_run(tmp_path / "distilled")
    control = make_run(tmp_path / "cross_entropy_only", terms=("cross_entropy",), seed=1)
    path = write_report(distilled, compare=[control])
    assert path == distilled / "compare.html"  # the run's own page stays
    page = Page(path)
    assert page.data["runs"] == ["distilled", "cross_entropy_only"]
    assert [series["run"] for series in page.data["charts"][0]["series"]] == [0, 1]
    last = json.loads((control / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"→ {last['eval/cross_entropy']:.3f}" in page.text
    assert "cross_entropy_only" in page.text


def test_compared_runs_of_one_name_get_their_parents(tmp_path):
    runs = [make_run(tmp_path / seed / "run", steps=2) for seed in ("seed-0", "seed-1")]
    assert Page(write_report(runs[0], runs[1:])).data["runs"] == ["seed-0/run", "seed-1/run"]


def test_compare_refuses_the_run_itself_and_too_many(run_dir, tmp_path):
    with pytest.raises(ValueError, match="given twice"):
        write_report(run_dir, [run_dir / ".." / run_dir.name])
    with pytest.raises(ValueError, match="got 8 runs to compare; at most 7"):
        write_report(run_dir, [tmp_path / str(index) for index in range(8)])
    with pytest.raises(ValueError, match=r"nowhere contains no run"):
        write_report(run_dir, [tmp_path / "nowhere"])


def test_hostile_text_stays_text(run_dir):
    run_dir = run_dir.rename(run_dir.with_name("a<i>&b"))
    environment = json.loads((run_dir / "environment.json").read_text())
    environment["objective"] = "<img src=x onerror=alert(1)>"
    (run_dir / "environment.json").write_text(json.dumps(environment))
    page = Page(write_report(run_dir))
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


def test_half_a_surrogate_pair_is_shown_as_a_replacement(run_dir):
    tokens = {"step": 1, "documents": [{"source": "x:1", "tokens": [entry("\ud83d"), entry("", kl=0.5)]}]}
    (run_dir / "tokens.json").write_text(json.dumps(tokens))
    page = Page(write_report(run_dir))
    assert "\ufffd" in page.text
    assert {"data-mark": "∅"} in page.all("i")


def test_page_loads_nothing(run_dir):
    page = Page(write_report(run_dir))
    loading = {"src", "srcset", "href", "poster", "data", "action", "background", "formaction", "xlink:href"}
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "audio", "video", "source"}
        assert not loading & attributes.keys(), (tag, attributes)
    styles = "".join(re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL))
    assert "url(" not in styles
    assert "@import" not in styles
    for script in page.scripts[1:]:
        assert not re.search(r"\bfetch\(|XMLHttpRequest|\bimport\(|WebSocket|sendBeacon|new Image|new Worker", script)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.split("script-src")[1]
    assert policy.count("'sha256-") == 2


def test_library_carries_its_licence():
    assets = Path(curves.__file__).parent / "assets"
    assert "MIT License" in (assets / "uplot.LICENSE").read_text()
    assert "uPlot (v1.6.32)" in (assets / "uplot.min.js").read_text()[:100]


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "data.json", "tokens.json"])
def test_a_missing_file_is_named_on_the_page(run_dir, name):
    (run_dir / name).unlink()
    page = Page(write_report(run_dir))
    assert f"{name} is missing" in page.text
    assert page.data["charts"]


def test_only_metrics_is_enough_and_without_it_there_is_no_run(run_dir):
    for path in run_dir.iterdir():
        if path.name != "metrics.jsonl":
            path.unlink()
    assert "distilled" in Page(write_report(run_dir)).text
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"distilled contains no run: it has no metrics\.jsonl"):
        write_report(run_dir)


def test_a_run_that_has_not_measured_yet_says_so(run_dir):
    (run_dir / "metrics.jsonl").write_text("")
    page = Page(write_report(run_dir))
    assert "no line yet" in page.text
    assert "not measured" in page.text


def test_only_an_incomplete_last_line_is_left_out(run_dir):
    path = run_dir / "metrics.jsonl"
    whole, _ = read_metrics(path)
    raw = path.read_bytes()
    path.write_bytes(raw[:-40])
    cut, notes = read_metrics(path)
    assert cut == whole[:-1]
    assert "incomplete" in notes[0]
    assert "incomplete" in Page(write_report(run_dir)).text
    path.write_bytes(raw[:-1])  # the line is complete except for its newline
    assert read_metrics(path) == (whole, [])


def test_a_resumed_run_is_one_curve(run_dir):
    """The trainer removes the lines after the checkpoint and continues; it evaluates step 150 a second time."""
    path = run_dir / "metrics.jsonl"
    whole = [json.loads(line) for line in path.read_text().splitlines()]
    again = [line for line in whole if line["step"] == 150 and "eval/forward_kl" in line]
    resumed = [line for line in whole if line["step"] <= 150] + again + [line for line in whole if line["step"] > 150]
    path.write_text("".join(json.dumps(line) + "\n" for line in resumed))
    for chart in Page(write_report(run_dir)).data["charts"]:
        for series in chart["series"]:
            assert series["steps"] == sorted(series["steps"])
            assert None not in series["values"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"step": 2, "loss', "not a JSON object"),
        (b"\xff", "not a JSON object"),
        (b"[1]", 'expected an object with a number "step"'),
        (b'{"tokens": 1}', 'expected an object with a number "step"'),
        (b'{"step": 1, "speed/tokens_per_second": "fast"}', "speed/tokens_per_second is 'fast'"),
        (b'{"step": -1}', "step -1 follows step 1"),
    ],
)
def test_a_malformed_line_elsewhere_is_an_error_with_its_place(run_dir, bad, message):
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], bad, *lines[2:]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl:3: ") as caught:
        write_report(run_dir)
    assert message in str(caught.value)
    assert not (run_dir / "report.html").exists()


def test_a_failed_report_leaves_the_one_before(run_dir):
    before = write_report(run_dir).read_bytes()
    (run_dir / "data.json").write_text("[")
    with pytest.raises(ValueError, match=r"data\.json: not JSON"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_bytes() == before


def test_malformed_tokens_name_their_key(run_dir):
    tokens = {"step": 1, "documents": [{"source": "x:1", "tokens": [entry("a"), {"text": "b", "target": True}]}]}
    (run_dir / "tokens.json").write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match=r"tokens\.json: documents\.0\.tokens\.1\.kl: field required"):
        write_report(run_dir)


def test_numbers_that_are_not_finite_are_gaps(run_dir):
    path = run_dir / "metrics.jsonl"
    values = ("NaN", "2.0", "Infinity")
    path.write_text("".join(f'{{"step": {step}, "eval/forward_kl": {value}}}\n' for step, value in enumerate(values)))
    (chart,) = Page(write_report(run_dir)).data["charts"]
    assert chart["series"][0]["values"] == [None, 2.0, None]


def points(steps):
    return [(step, 1.0) for step in steps]


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
    assert [step for step, value in curves._with_gaps(points(steps)) if value is None] == gaps


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


def test_logarithmic_axis_only_where_values_span_enough(run_dir):
    page = Page(write_report(run_dir))
    logarithmic = {title for title, chart in zip(page.titles, page.data["charts"], strict=True) if chart["log"]}
    assert logarithmic == {"Gradient norm"}


def entry(text, *, target=True, kl=None):
    return {"text": text, "target": target, "kl": kl, "teacher": [], "student": []}


@pytest.mark.parametrize(
    ("kl", "shade"), [(-1e-7, 0), (0.0, 0), (0.04, 1), (0.5, 5), (0.99, 5), (1.0, 6), (3.9, 7), (40.0, 8)]
)
def test_shades_double(kl, shade):
    assert held_out.shade(kl) == shade


def test_prompt_is_dimmed_and_whitespace_kept(run_dir):
    tokens = [entry("def", target=False), entry("\n\n    ", target=False, kl=3.0), entry(" x", kl=3.0)]
    (run_dir / "tokens.json").write_text(json.dumps({"step": 7, "documents": [{"source": "e:1", "tokens": tokens}]}))
    page = Page(write_report(run_dir))
    text = re.search(r'<div class="text".*?</div>', page.source, re.DOTALL).group()
    classes = re.findall(r'<span class="(.*?)"', text)
    assert [one.split() for one in classes] == [["prompt"], ["prompt"], ["k7"]]
    assert html.unescape(re.sub("<[^>]*>", "", text)) == "def\n\n     x"
    assert [token[0] for token in page.data["documents"][0]] == ["def", "↵↵␣␣␣␣", "␣x"]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2 between two #rrggbb colours."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_readable_and_ordered(theme):
    style = (Path(curves.__file__).parent / "assets" / "report.css").read_text()
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[theme == "dark"]
    colour = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    for text in ("text", "muted", *(f"run-{index}" for index in range(8))):
        assert contrast(colour[text], colour["page"]) >= 4.5, text
    shades = [colour[f"kl-{index}"] for index in range(len(held_out.SHADES) + 1)]
    assert all(contrast(colour["on-shade"], one) >= 4.5 for one in shades)
    distances = [contrast(colour["page"], one) for one in shades]
    assert distances == sorted(distances)


def test_a_run_without_held_out_data_has_no_place_for_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 1, "tokens": 5, "seconds": 1.0, "eval/exact_match/sums": 0.5}\n')
    (out / "config.yaml").write_text("data: {train: a.jsonl, eval: 0}\n")
    page = write_report(out).read_text(encoding="utf-8")
    assert "Held-out cross-entropy" not in page
    assert "tokens.json is missing" not in page
    assert "Exact match, sums" in page
    (out / "config.yaml").write_text("data: {train: a.jsonl, eval: 0.1}\n")
    page = write_report(out).read_text(encoding="utf-8")
    assert "Held-out cross-entropy" in page
    assert "tokens.json is missing" in page


def sample_line(step, number, completion, **changes) -> str:
    line = {"step": step, "number": number, "source": f"eval.jsonl:{number}", "prompt": "<b>Two & three</b>\n",
            "reference": " is five", "completion": completion, "tokens": 3, "finish": "length"}  # fmt: skip
    return json.dumps(line | changes) + "\n"


def test_held_out_prompts_are_shown_with_their_completions_over_time(run_dir):
    lines = [sample_line(step, number, f" step {step}\t{number}") for step in range(0, 100, 10) for number in (0, 1)]
    lines.append(sample_line(100, 0, " is five", finish="stop"))
    (run_dir / "eval_samples.jsonl").write_text("".join(lines))
    page = Page(write_report(run_dir))
    assert "<b>Two & three</b>" in page.text
    shown = [
        page.text.index(text) for text in ("step 0 ", "step 20 ", "step 40 ", "step 60 ", "step 80 ", "step 100 ")
    ]
    assert shown == sorted(shown)
    assert "3 tokens, as in the data" in page.text
    assert "5 further evaluations of eval.jsonl:0" in page.text
    assert "4 further evaluations of eval.jsonl:1" in page.text
    for step in range(0, 100, 10):
        assert f" step {step}\t1" in page.text


def test_samples_that_were_asked_for_and_malformed_ones_are_named(run_dir):
    assert "eval_samples.jsonl" not in Page(write_report(run_dir)).text
    config = run_dir / "config.yaml"
    config.write_text(config.read_text() + "\neval: {samples: 2}\n")
    assert "eval_samples.jsonl is missing" in Page(write_report(run_dir)).text
    path = run_dir / "eval_samples.jsonl"
    path.write_text(sample_line(0, 0, "x") + '{"step": 1')
    assert "last line of eval_samples.jsonl is incomplete" in Page(write_report(run_dir)).text
    path.write_text(sample_line(0, 0, "x") + sample_line(-1, 0, "x"))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:2: step: input should be greater"):
        write_report(run_dir)


def test_data_that_are_not_there_have_no_row(run_dir):
    """A run without foreign columns and without a mixture has neither a form nor shares."""
    reports = {name: asdict(DataReport(f"{name}.jsonl")) for name in ("train", "train/1")}
    (run_dir / "data.json").write_text(json.dumps(reports))
    plain = Page(write_report(run_dir)).text
    assert "columns read as" not in plain
    assert "share of the tokens" not in plain
    reports["train/1"] |= {"form": "Alpaca", "trained_share": 0.25}
    (run_dir / "data.json").write_text(json.dumps(reports))
    mixture = Page(write_report(run_dir)).text
    assert re.search(r"columns read as\s*Alpaca", mixture)
    assert re.search(r"share of the tokens to train on\s*0\.25", mixture)


def test_every_metric_of_a_run_has_a_title(tmp_path):
    """A key in quotes in the code that writes metrics has a chart of its own, and not its key as a title."""
    keys = {"eval/mtp_1/acceptance", "eval/mtp_1/sampled_acceptance"}
    for source in (ROOT / "stillhouse").rglob("*.py"):
        keys |= set(re.findall(r'"((?:rollout|speed|train|eval|loss)/[a-z_]+)"', source.read_text()))
    keys -= {"eval/exact_match", "eval/acceptance", "eval/sampled_acceptance"}  # prefixes of keys
    run = make_run(tmp_path / "run", steps=2, every=1)
    line = {"step": 3, "tokens": 3, "seconds": 3.0} | dict.fromkeys(sorted(keys), 0.5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    page = Page(write_report(run))
    assert len(keys) > 25
    assert not [title for title in page.titles if "/" in title]
