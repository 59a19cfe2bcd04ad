"""A run's files that its report shows, when a line or a value is one that no run writes, or a file is missing.

An error names the file and the place in it. What a killed run leaves behind is left out with a note on the page.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from kit.config_cases import refused_calls
from kit.report_runs import EVAL_SAMPLE, Page, make_on_policy_run, make_run

from stillhouse.output.json_lines import read_metrics
from stillhouse.report.page import write_report
from stillhouse.report.run_files import OPTIONAL_FILES, read_run

LINE_FILES = ("metrics.jsonl", "timeline.jsonl", "samples.jsonl", "eval_samples.jsonl")
LINES = [
    *(b"", b"{", b"5", b"[]", b"null", b"\xff", b"\x1b[31m", b"[" * 5000),
    *(b"{}", b'{"loss": 1}', b'{"step": null}', b'{"step": "x"}', b'{"step": 1e999}', b'{"step": 1, "a": "b"}'),
    *(b'{"step": -1}', b'{"step": 1, "\\u001b[31m": []}', b'{"step": 1, "a": ' + b"9" * 400 + b"}"),
    *(b'{"step": ' + b"9" * digits + b"}" for digits in (400, 5000)),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_on_policy_run(tmp_path_factory.mktemp("runs") / "damaged", steps=4)
    (folder / "eval_samples.jsonl").write_text((json.dumps(EVAL_SAMPLE) + "\n") * 3)
    (folder / "config.yaml").write_text("teacher: {model: a}\nrollout: {}\neval: {samples: 2}\n")
    return folder


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "damaged"))


def notes(run_dir: Path) -> list[str]:
    return read_run(run_dir).notes


@pytest.mark.parametrize("name", LINE_FILES)
@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:20].decode(errors="replace"))
def test_a_line_that_no_run_writes_is_named(run_dir: Path, name: str, line: bytes) -> None:
    path = run_dir / name
    first, *others = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, line, *others]))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:2: ") as error:
        read_run(run_dir)
    text = str(error.value)
    assert len(text) < 400 + len(str(path))
    assert "\x1b" not in text
    assert text.count("\n") < 3


@pytest.mark.parametrize(("call", "message"), refused_calls("values of records that no run writes"))
def test_a_wrong_value_names_its_key(run_dir: Path, call: str, message: str) -> None:
    name, change = eval(call)
    path = run_dir / name
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps(json.loads(last) | change)]) + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{name}:{len(lines) + 1}: {message}")):
        read_run(run_dir)


@pytest.mark.parametrize(("call", "message"), refused_calls("files of a run that a report cannot read"))
def test_a_failed_report_names_the_file_and_leaves_the_page_before(run_dir: Path, call: str, message: str) -> None:
    name, text = eval(call)
    before = write_report(run_dir).read_bytes()
    (run_dir / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        write_report(run_dir)
    assert (run_dir / "report.html").read_bytes() == before


@pytest.mark.parametrize("name", LINE_FILES)
def test_a_half_last_line_is_left_out_with_a_note(run_dir: Path, name: str) -> None:
    intact = read_run(run_dir)
    path = run_dir / name
    complete = path.read_bytes()
    path.write_bytes(complete + b'{"step": 31, "la')
    cut = read_run(run_dir)
    assert (cut.lines, cut.rollouts, cut.eval_samples) == (intact.lines, intact.rollouts, intact.eval_samples)
    assert cut.notes == [f"The last line of {name} is incomplete and left out: the run ended while writing it."]
    assert cut.notes[0] in Page(write_report(run_dir)).text
    path.write_bytes(complete[:-1])  # a line that is complete except for its newline
    assert read_run(run_dir) == intact


@pytest.mark.parametrize("name", OPTIONAL_FILES)
def test_a_missing_file_is_named_on_the_page(run_dir: Path, name: str) -> None:
    assert notes(run_dir) == []
    (run_dir / name).unlink()
    assert f"{name} is missing: the page lacks {OPTIONAL_FILES[name]}." in Page(write_report(run_dir)).text


@pytest.mark.parametrize("name", LINE_FILES)
def test_an_empty_file_is_noted(run_dir: Path, name: str) -> None:
    (run_dir / name).write_bytes(b"")
    page = Page(write_report(run_dir))
    assert f"{name} has no line yet" in page.text
    assert ("not measured" in page.text) == (name == "metrics.jsonl")


def test_only_metrics_is_enough_and_without_it_there_is_no_run(run_dir: Path) -> None:
    for name in OPTIONAL_FILES:
        (run_dir / name).unlink()
    assert "damaged" in Page(write_report(run_dir)).text
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"damaged contains no run: it has no metrics\.jsonl"):
        read_metrics(run_dir / "metrics.jsonl")


def test_a_file_that_a_run_does_not_write_is_not_missed(tmp_path: Path) -> None:
    """The two files of on-policy runs, the samples of eval.samples, and the text of a run without held-out data."""
    run_dir = make_run(tmp_path / "off_policy", steps=2)
    assert notes(run_dir) == []
    (run_dir / "tokens.json").unlink()
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "tokens": 5, "seconds": 1.0, "eval/exact_match/sums": 0.5}\n')
    for share, missing in ((0, []), (0.1, ["tokens.json"])):
        (run_dir / "config.yaml").write_text(f"teacher: {{model: a}}\ndata: {{train: a.jsonl, eval: {share}}}\n")
        assert [note.split()[0] for note in notes(run_dir)] == missing
        page = Page(write_report(run_dir))
        assert "Held-out cross-entropy" not in page.text  # the log has no value of it
        assert "Exact match: sums" in page.text
