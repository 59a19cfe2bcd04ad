"""Documents with images: the tokens and masks of each family's processor, and the tensors of documents."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import first_is_quick
from kit.documents import same_documents
from kit.image_documents import (
    CONVERSATIONS,
    FOUR,
    QUESTION,
    Student,
    encoded,
    image,
    png,
    text,
    user,
    write_pictures,
)
from kit.image_models import FAMILIES

from stillhouse.data import DataError, Documents, PackedSequences, make_micro_batch
from stillhouse.data.media import MediaInputs
from stillhouse.images.decode import open_image


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Student:
    return Student("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    write_pictures(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", first_is_quick(FAMILIES))
def test_inputs_are_the_processors(pictures: Path, tmp_path_factory: pytest.TempPathFactory, family: str) -> None:
    student = Student(family, tmp_path_factory.mktemp(family))
    documents = student.load_records(pictures, *({"messages": turns} for turns in CONVERSATIONS))
    processor, inputs = student.processor.processor, MediaInputs(student.processor)
    expected_images = []
    for number, turns in enumerate(CONVERSATIONS):
        with_paths = json.loads(json.dumps(turns).replace('"image": "', f'"image": "{pictures}/'))
        options = {"return_dict": True, "return_tensors": "pt", "return_assistant_tokens_mask": True}
        expected = processor.apply_chat_template([with_paths], tokenize=True, **options)
        assert documents.tokens(number).tolist() == expected["input_ids"][0].tolist()
        assert documents.targets(number).tolist() == expected["assistant_masks"][0].bool().tolist()
        micro_batch = make_micro_batch(documents, [[number]], media_inputs=inputs)
        images = {name: value for name, value in expected.items() if name in micro_batch.media}
        assert micro_batch.media.keys() == images.keys()
        assert bool(images) == (number < 2)
        assert all(torch.equal(micro_batch.media[name], images[name]) for name in images)
        types = student.processor.layout.token_types
        if types is not None:
            assert torch.equal(micro_batch.inputs[types], expected[types])
        expected_images.append(images)
    # the order of the documents in the rows is the order of the images
    together = make_micro_batch(documents, [[1, 2], [0]], media_inputs=inputs).media
    swapped = make_micro_batch(documents, [[0], [2, 1]], media_inputs=inputs).media
    assert any(not torch.equal(together[name], swapped[name]) for name in together)
    assert together.keys() == expected_images[0].keys()


def test_documents_with_images_have_placeholders_and_need_their_processor(qwen: Student, pictures: Path) -> None:
    documents = qwen.load_records(pictures, {"messages": CONVERSATIONS[1]}, tokens="all")
    is_pad = documents.tokens(0) == qwen.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert is_pad.sum() == 34
    assert documents.targets(0).tolist() == [False, *~is_pad[1:]]
    documents = qwen.load_records(pictures, {"messages": CONVERSATIONS[0]})
    with pytest.raises(ValueError, match="has images, which need media_inputs"):
        PackedSequences(documents, max_tokens=200, seed=0).micro_batch([0])


def test_documents_with_images_are_split_joined_and_selected(qwen: Student, pictures: Path) -> None:
    documents = qwen.load_records(pictures, *({"messages": turns} for turns in CONVERSATIONS))
    texts = qwen.load_records(pictures, {"messages": CONVERSATIONS[2]})
    assert documents.media is not None
    assert texts.media is None
    joined = Documents.joined({"a": texts, "b": documents})
    chosen = joined.select([3, 2, 0])
    assert chosen.media is not None
    assert [len(chosen.media.of(number)) for number in range(3)] == [0, 3, 0]
    assert chosen.media.of(1) == documents.media.of(1)
    train, held_out = documents.split(0.3)
    for part in (train, held_out):
        for number, source in enumerate(part.sources):
            assert part.media is not None
            assert part.media.of(number) == documents.media.of(documents.sources.index(source))
    other = png(7)
    (pictures / "0.png").write_bytes(other)
    changed = qwen.load_records(pictures, {"messages": CONVERSATIONS[0]})
    assert changed.fingerprint() != documents.select([0]).fingerprint()
    assert qwen.load_records(pictures, {"messages": CONVERSATIONS[0]}).keys_D[0] != documents.keys_D[0]


def test_a_changed_image_is_refused_when_it_is_used(qwen: Student, pictures: Path) -> None:
    documents = qwen.load_records(pictures, {"messages": CONVERSATIONS[0]}, cache=pictures / "cache")
    again = qwen.load_records(pictures, {"messages": CONVERSATIONS[0]}, cache=pictures / "cache")
    assert same_documents(documents, again)
    assert len(list((pictures / "cache").glob("*/images.arrow"))) == 1
    inputs = MediaInputs(qwen.processor)
    make_micro_batch(again, [[0]], media_inputs=inputs)
    (pictures / "0.png").write_bytes(png(5))
    with pytest.raises(DataError, match=r"train.jsonl:1: .*0.png: the image has other bytes than when the data"):
        make_micro_batch(again, [[0]], media_inputs=inputs)
    (pictures / "0.png").unlink()
    with pytest.raises(DataError, match=r"0.png: the image cannot be read \(No such file or directory\)"):
        make_micro_batch(again, [[0]], media_inputs=inputs)


def test_cached_images_keep_their_bytes_and_are_compared_with_their_hashes(qwen: Student, pictures: Path) -> None:
    record = {"messages": [user({"type": "image", "base64": encoded(png(0))}, text(QUESTION)), FOUR]}

    def load(**options: Any) -> Documents:
        return qwen.load_records(pictures, record, cache=pictures / "cache", **options)

    first = load()
    assert first.media is not None
    assert first.media.of(0)[0].data == png(0)
    assert same_documents(first, qwen.load_records(pictures, record))
    (path,) = (pictures / "cache").glob("*/images.arrow")
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(ValueError, match=r"images.arrow has other bytes than when it was written"):
        load()


def test_a_limit_of_pixels_gives_fewer_tokens(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("limited")
    record, cache = {"messages": [user(image("1.png")), FOUR]}, pictures / "cache"
    students = [Student("qwen3_vl", folder, most_pixels=pixels) for pixels in (None, 100)]
    documents = [student.load_records(pictures, record, cache=cache) for student in students]
    assert len(documents[1].tokens_N) < len(documents[0].tokens_N)
    assert len(list((pictures / "cache").glob("*/manifest.json"))) == 2
    limited = open_image(png(1, (20, 16)), 100)
    assert limited.width * limited.height <= 100
    assert limited.size == (11, 8)
    assert open_image(png(1, (150, 1)), 100).size == (100, 1)
