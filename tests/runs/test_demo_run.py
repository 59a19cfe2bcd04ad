"""The whole demo, with one seed; `benchmarks/demo.py` runs it with three."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from stillhouse.tools.demo.demo import LABELS, OBJECTIVES, demo, table
from stillhouse.tools.demo.student import TEACHER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    out = tmp_path_factory.mktemp("demo")
    return out, demo(out)


def test_the_table_has_teacher_control_and_student(finished: tuple[Path, list[dict]]) -> None:
    _, rows = finished
    assert [row["run"] for row in rows] == ["teacher", "cross_entropy", "distilled"]
    teacher, text_only, distilled = rows
    assert teacher["forward_kl"] == pytest.approx(0, abs=1e-6)
    assert teacher["agreement"] == 1
    assert teacher["cross_entropy"] < min(text_only["cross_entropy"], distilled["cross_entropy"])
    assert text_only["tokens"] == distilled["tokens"] > 0
    assert teacher["parameters"] == AutoModelForCausalLM.from_pretrained(TEACHER).num_parameters()
    assert 0.2 < distilled["parameters"] / teacher["parameters"] < 0.3
    shown = table(rows)
    assert all(label in shown for label in LABELS.values())


def test_both_students_start_equal_and_see_the_same_text(finished: tuple[Path, list[dict]]) -> None:
    out, _ = finished
    first = [json.loads((out / run / "metrics.jsonl").read_text().splitlines()[0]) for run in OBJECTIVES]
    assert first[0]["eval/cross_entropy"] == first[1]["eval/cross_entropy"]
    reports = [json.loads((out / run / "data.json").read_text()) for run in OBJECTIVES]
    assert reports[0] == reports[1]


def test_the_report_compares_both_runs(finished: tuple[Path, list[dict]]) -> None:
    out, _ = finished
    page = (out / "distilled" / "report.html").read_text()
    assert "cross_entropy" in page
    assert "distilled" in page


def test_a_second_call_leaves_the_runs_as_they_are(finished: tuple[Path, list[dict]]) -> None:
    out, rows = finished
    before = (out / "distilled" / "metrics.jsonl").read_bytes()
    assert demo(out) == rows
    assert (out / "distilled" / "metrics.jsonl").read_bytes() == before


def test_the_distilled_student_wins(finished: tuple[Path, list[dict]]) -> None:
    _, (_, text_only, distilled) = finished
    assert distilled["cross_entropy"] < text_only["cross_entropy"] - 0.2
    assert distilled["forward_kl"] < text_only["forward_kl"]
