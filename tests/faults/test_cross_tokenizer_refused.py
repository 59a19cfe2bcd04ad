"""What a run with a teacher of another tokenizer refuses, by the name of the key, the document or the model."""

import math
from pathlib import Path
from typing import Any

import pytest
from kit.runs import run, session_of, write_records, write_run
from kit.two_tokenizers import GOLD, tokenizer, write_model, write_pair
from safetensors.torch import load_file, save_file

from stillhouse.config import ConfigError
from stillhouse.run.run import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("cross"))


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        prepare(write_run(folder, **settings), announce=False)
    return str(error.value)


def test_another_tokenizer_is_refused_and_the_key_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"different tokenizers: .* or set teacher.cross_tokenizer to gold, which"):
        session_of(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**GOLD, "objective.loss": "uld"}, "objective.loss: uld does not exist any more: removed in November 2026"),
        ({**GOLD, "teacher.top_k": 10_000}, "teacher.top_k: got 10000, expected at most 512"),
    ],
)
def test_settings_that_do_not_go_together(folder: Path, settings: dict[str, Any], message: str) -> None:
    assert message in refused(folder, **settings)


def test_a_teacher_that_is_the_students_base_is_refused(folder: Path) -> None:
    settings = {"teacher.model": str(folder / "student"), "student.adapter": {"type": "lora", "r": 2}}
    assert (
        "teacher.cross_tokenizer: got gold with student: expected null, because the teacher is the student without"
        in refused(folder, **GOLD, **settings)
    )


def test_a_tokenizer_without_exact_bytes_is_refused(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "words", "words", family="qwen3", seed=2)
    message = refused(folder, **GOLD, **{"teacher.model": str(tmp_path / "words")})
    assert "teacher.cross_tokenizer: the tokens of" in message
    assert "WordPiece" in message


def test_a_document_that_cannot_be_aligned_is_refused_by_its_line(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "teacher", "pieces", family="qwen3", seed=2)
    data = write_records(tmp_path / "train.jsonl", [{"text": "fine"}, {"text": "a▁b"}])
    message = refused(folder, **GOLD, **{"teacher.model": str(tmp_path / "teacher"), "data.train": str(data)})
    assert f"{data}:2: the teacher's tokenizer changes the text" in message


def test_no_cache_is_written(folder: Path, tmp_path: Path) -> None:
    write_run(folder, **GOLD)
    message = run("cache", folder / "run.yaml", "--out", tmp_path / "cache", code=2).err
    assert "teacher.cross_tokenizer: got gold: a cache holds the signals of one tokenizer" in message


def test_the_same_tokenizer_gives_a_warning(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "teacher", "small", family="qwen3", seed=2)
    session = session_of(folder, **GOLD, **{"teacher.model": str(tmp_path / "teacher")})
    assert any("have the same tokenizer" in warning for warning in session.warnings)
    session.close()


def test_a_teacher_with_weights_that_are_not_finite(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "teacher", "large", family="qwen3", seed=2)
    path = tmp_path / "teacher" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"teacher: .*norm.weight.* are NaN or infinite"):
        session_of(folder, **GOLD, **{"teacher.model": str(tmp_path / "teacher")})


def test_a_teacher_whose_head_has_no_row_for_a_token(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "teacher", "small", family="qwen3", seed=2)
    tokenizer("large").save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"the teacher's token id \d+, but the teacher's head has 301 rows"):
        session_of(folder, **GOLD, **{"teacher.model": str(tmp_path / "teacher")})
