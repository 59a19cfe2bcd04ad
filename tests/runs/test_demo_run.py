"""The demo with a tenth of its steps and an eighth of its held-out text.

`benchmarks/demo.py` runs the whole demo, with three seeds.
"""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from stillhouse.config import load_config
from stillhouse.tools.demo.corpus import NamedText, Split, collect_split
from stillhouse.tools.demo.demo import LABELS, OBJECTIVES, aligned_rows, run_demo
from stillhouse.tools.demo.student import TEACHER

STEPS = 60
#: held-out documents with more characters are left out
LONGEST = 2_700


def short_split(split: Split) -> list[NamedText]:
    """Return a split of the demo's text; of the held-out split only the short documents, an eighth of its text."""
    documents = collect_split(split)
    return [document for document in documents if split != "held_out" or len(document.text) <= LONGEST]


@pytest.mark.slow
def test_the_distilled_student_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has teacher, control and student. The students start equal; a second call adds nothing."""
    monkeypatch.setattr("stillhouse.tools.demo.student.collect_split", short_split)
    rows = run_demo(tmp_path, steps=STEPS)
    assert [row["run"] for row in rows] == ["teacher", "cross_entropy", "distilled"]
    teacher, text_only, distilled = rows
    assert teacher["forward_kl"] == pytest.approx(0, abs=1e-6)
    assert teacher["agreement"] == 1
    assert teacher["cross_entropy"] < min(text_only["cross_entropy"], distilled["cross_entropy"])
    assert distilled["cross_entropy"] < text_only["cross_entropy"] - 0.1
    assert distilled["forward_kl"] < text_only["forward_kl"]
    assert text_only["tokens"] == distilled["tokens"] > 0
    assert teacher["parameters"] == AutoModelForCausalLM.from_pretrained(TEACHER).num_parameters()
    shown = aligned_rows(rows)
    assert all(label in shown for label in LABELS.values())
    first = [json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[0]) for run in OBJECTIVES]
    assert first[0]["eval/cross_entropy"] == first[1]["eval/cross_entropy"]
    reports = [json.loads((tmp_path / run / "data.json").read_text()) for run in OBJECTIVES]
    assert reports[0] == reports[1]
    page = (tmp_path / "distilled" / "report.html").read_text()
    assert all(run in page for run in OBJECTIVES)
    before = (tmp_path / "distilled" / "metrics.jsonl").read_bytes()
    trial = load_config(tmp_path / "run.yaml")  # with the same models and texts as the two runs
    assert trial.data == load_config(tmp_path / "distilled" / "config.yaml").data
    assert trial.student.model == str(tmp_path / "student")
    (tmp_path / "run.yaml").write_text("changed by the user")
    assert run_demo(tmp_path, steps=STEPS) == rows
    assert (tmp_path / "run.yaml").read_text() == "changed by the user"
    assert (tmp_path / "distilled" / "metrics.jsonl").read_bytes() == before
