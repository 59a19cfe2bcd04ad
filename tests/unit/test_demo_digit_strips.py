"""Pictures of digits: their files, their splits, and that they look like their answers."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Image, load_dataset
from kit.image_models import write_image_model
from PIL import Image as Pictures

from stillhouse.data import LoadOptions, load_documents, load_tokenizer
from stillhouse.images import IMAGES
from stillhouse.images.digits_demo import QUESTION, SIDE, answer, parquet_file, record, strip
from stillhouse.tasks import RandomNumbers, exact_match, is_held_out


def written(folder: Path) -> Path:
    path = folder / "digits.parquet"
    path.write_bytes(parquet_file(3, 30, held_out=False))
    return path


def answer_of(row: dict[str, Any]) -> str:
    return row["messages"][1]["content"][0]["text"]


def test_the_file_is_read_by_datasets_as_images(tmp_path: Path) -> None:
    path = written(tmp_path)
    rows = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.features["images"].feature == Image()
    for number, row in enumerate(rows):
        (image,), (question, answer) = row["images"], row["messages"]
        assert image.size == (SIDE * row["length"], SIDE)
        assert image.mode == "RGB"
        assert image.format == "PNG"
        assert [part["type"] for part in question["content"]] == ["image", "text"]
        assert question["role"] == "user"
        assert answer["role"] == "assistant"
        assert len(answer_of(row)) == row["length"] == 2 + number % 3
        assert answer_of(row).isdecimal()
        assert exact_match("", f" {answer_of(row)}\n", row) == 1
        assert exact_match("", answer_of(row)[:-1], row) == 0


def test_a_seed_gives_the_same_bytes_and_no_problem_is_in_both_splits() -> None:
    first = parquet_file(3, 30, held_out=False)
    assert first == parquet_file(3, 30, held_out=False)
    assert first != parquet_file(3, 30, held_out=True)
    for held_out in (False, True):
        answers = {answer_of(record(seed, number, held_out=held_out)) for seed in (1, 2) for number in range(60)}
        assert len(answers) > 40
        assert all(is_held_out("digits", answer) is held_out for answer in answers)


def test_the_file_is_training_data(tmp_path: Path) -> None:
    folder = write_image_model("qwen3_vl", tmp_path / "model")
    tokenizer = load_tokenizer(str(folder))
    processor = IMAGES.find_processor(str(folder), tokenizer)
    documents = load_documents(written(tmp_path), tokenizer, LoadOptions(200), processor=processor)
    assert len(documents) == 30
    assert documents.media is not None
    for document in range(3):
        ids_N, targets_N = documents.tokens(document), documents.targets(document)
        assert tokenizer.decode(ids_N[targets_N]).startswith(f"{answer(3, document, held_out=False)}<")
        assert QUESTION in tokenizer.decode(ids_N)


def test_pictures_look_like_their_digits() -> None:
    """The mean of many pictures of a digit is often nearer to another picture of it than the other digits' means."""

    def ink(digit: int, number: int) -> np.ndarray:
        """How light each pixel is, as a share of the picture's range."""
        grey = np.asarray(strip(str(digit), RandomNumbers("test", digit, number)).convert("L"), dtype=float)
        return (grey - grey.min()) / (grey.max() - grey.min())

    means = np.stack([np.mean([ink(digit, number) for number in range(60)], axis=0) for digit in range(10)])
    right = [
        int(((means - ink(digit, number)) ** 2).sum((1, 2)).argmin()) == digit
        for digit in range(10)
        for number in range(100, 110)
    ]
    assert np.mean(right) > 0.3  # chance is 0.1


def test_a_picture_has_its_digits_from_left_to_right() -> None:
    """A cell of a strip is the picture of its digit, apart from colours and noise."""
    wide = strip("17", RandomNumbers("test", 0, 0))
    assert wide.size == (2 * SIDE, SIDE)
    assert strip("17", RandomNumbers("test", 0, 0)).tobytes() == wide.tobytes()
    assert strip("17", RandomNumbers("test", 0, 1)).tobytes() != wide.tobytes()
    assert strip("71", RandomNumbers("test", 0, 0)).tobytes() != wide.tobytes()
    encoded = record(0, 0, held_out=False)["images"][0]["bytes"]
    assert Pictures.open(io.BytesIO(encoded)).size == (2 * SIDE, SIDE)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillhouse.images.digits_demo.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^pillow not installed; pip install 'stillhouse\[images\]'$"):
        parquet_file(0, 5, held_out=False)
