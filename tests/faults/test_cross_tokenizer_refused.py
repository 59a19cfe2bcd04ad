"""What a run with a teacher of another tokenizer refuses, by the name of the key, the document or the model."""

import math
from pathlib import Path
from typing import Any

import pytest
from kit.runs import run, session_of, write_records, write_run
from kit.two_tokenizers import GOLD, tokenizer, write_model, write_pair
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("cross"))


def with_nan(teacher: Path) -> None:
    path = teacher / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, path, {"format": "pt"})


ADAPTER = {"student.model": "student", "teacher.model": "student", "student.adapter": {"type": "lora", "r": 2}}
#: the tokenizer of another teacher than that of the pair, settings, and the message
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, r"different tokenizers: .* or set teacher.cross_tokenizer to gold, which"),
    ("", GOLD | {"objective.loss": "uld"}, "objective.loss: uld does not exist any more: removed in November 2026"),
    ("", GOLD | {"teacher.top_k": 10_000}, "teacher.top_k: got 10000, expected at most 512"),
    (
        "",
        GOLD | ADAPTER,
        "cross_tokenizer: got gold with student: expected null, because the teacher is the student w",
    ),
    ("words", GOLD, "(?s)teacher.cross_tokenizer: the tokens of .*WordPiece"),
    ("pieces", GOLD | {"data.train": "tricky.jsonl"}, "tricky.jsonl:2: the teacher's tokenizer changes the text"),
    ("large, with NaN", GOLD, r"teacher: .*norm.weight.* are NaN or infinite"),
    ("small, with more tokens", GOLD, r"the teacher's token id \d+, but the teacher's head has 301 rows"),
]


@pytest.mark.parametrize(("teacher", "settings", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_a_teacher_or_settings_that_cannot_be_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, teacher: str, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(folder)
    write_records(folder / "tricky.jsonl", [{"text": "fine"}, {"text": "a▁b"}])
    if teacher:
        other = write_model(folder / teacher, teacher.partition(",")[0], family="qwen3", seed=2)
        settings = settings | {"teacher.model": str(other)}
    if "NaN" in teacher:
        with_nan(other)
    elif "more tokens" in teacher:
        tokenizer("large").save_pretrained(other)
    with pytest.raises(ValueError, match=message):
        session_of(folder, **settings)


def test_no_cache_is_written(folder: Path, tmp_path: Path) -> None:
    write_run(folder, **GOLD)
    message = run("cache", folder / "run.yaml", "--out", tmp_path / "cache", code=2).err
    assert "teacher.cross_tokenizer: got gold: a cache holds the signals of one tokenizer" in message


def test_the_same_tokenizer_gives_a_warning(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "teacher", "small", family="qwen3", seed=2)
    session = session_of(folder, **GOLD, **{"teacher.model": str(tmp_path / "teacher")})
    assert any("have the same tokenizer" in warning for warning in session.warnings)
    session.close()
