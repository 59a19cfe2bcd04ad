"""Images of records: what is read, the tokens and masks of each family's processor, and the tensors of documents."""

import base64
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from kit import first_is_quick
from kit.documents import same_documents
from kit.image_models import FAMILIES, image_tokenizer, picture, write_processor
from PIL import Image
from transformers import PreTrainedTokenizerBase

from stillhouse.data import (
    DataError,
    Documents,
    LoadOptions,
    PackedSequences,
    load_documents,
    load_tokenizer,
    make_micro_batch,
)
from stillhouse.data.images import open_image
from stillhouse.data.record import RecordError
from stillhouse.data.render.image_processor import ImageInputs, ImageProcessor

SIZES = [(12, 8), (20, 16), (9, 30)]
FOUR = {"role": "assistant", "content": [{"type": "text", "text": "four"}]}
QUESTION = "two and two?"


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def png(seed: int = 0, size: tuple[int, int] = (12, 8)) -> bytes:
    file = io.BytesIO()
    picture(seed, *size).save(file, "PNG")
    return file.getvalue()


def write_pictures(folder: Path) -> None:
    for number, size in enumerate(SIZES):
        (folder / f"{number}.png").write_bytes(png(number, size))


class Student:
    """The tokenizer and the processor of a family, in a folder without weights."""

    def __init__(self, family: str, folder: Path, **options: Any):
        write_processor(family, folder)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(str(folder))
        processor = ImageProcessor.find(str(folder), self.tokenizer, **options)
        assert processor is not None
        self.processor: ImageProcessor = processor

    def load(self, source: Path, max_tokens: int = 600, cache: Path | None = None, **options: Any) -> Documents:
        return load_documents(source, self.tokenizer, LoadOptions(max_tokens, **options), cache, self.processor)

    def load_records(self, folder: Path, *records: dict[str, Any], **options: Any) -> Documents:
        path = folder / "train.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        return self.load(path, **options)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Student:
    return Student("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    write_pictures(tmp_path)
    return tmp_path


CONVERSATIONS = [
    [user(image("0.png"), text(QUESTION)), FOUR],
    [
        user(text("see "), image("1.png"), text("and "), image("2.png")),
        FOUR,
        user(image("0.png"), text("2048")),
        {"role": "assistant", "content": [text("and "), text("Paris")]},
    ],
    [user(text(QUESTION)), FOUR],
]


@pytest.mark.parametrize("family", first_is_quick(FAMILIES))
def test_tokens_masks_and_tensors_are_those_of_transformers_for_each_conversation(
    pictures: Path, tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    student = Student(family, tmp_path_factory.mktemp(family))
    documents = student.load_records(pictures, *({"messages": turns} for turns in CONVERSATIONS))
    processor, inputs = student.processor.processor, ImageInputs(student.processor)
    expected_images = []
    for number, turns in enumerate(CONVERSATIONS):
        with_paths = json.loads(json.dumps(turns).replace('"image": "', f'"image": "{pictures}/'))
        options = {"return_dict": True, "return_tensors": "pt", "return_assistant_tokens_mask": True}
        expected = processor.apply_chat_template([with_paths], tokenize=True, **options)
        assert documents.tokens(number).tolist() == expected["input_ids"][0].tolist()
        assert documents.targets(number).tolist() == expected["assistant_masks"][0].bool().tolist()
        micro_batch = make_micro_batch(documents, [[number]], image_inputs=inputs)
        images = {name: value for name, value in expected.items() if name in micro_batch.images}
        assert micro_batch.images.keys() == images.keys()
        assert bool(images) == (number < 2)
        assert all(torch.equal(micro_batch.images[name], images[name]) for name in images)
        types = student.processor.layout.token_types
        if types is not None:
            assert torch.equal(micro_batch.inputs[types], expected[types])
        expected_images.append(images)
    # the order of the documents in the rows is the order of the images
    together = make_micro_batch(documents, [[1, 2], [0]], image_inputs=inputs).images
    swapped = make_micro_batch(documents, [[0], [2, 1]], image_inputs=inputs).images
    assert any(not torch.equal(together[name], swapped[name]) for name in together)
    assert together.keys() == expected_images[0].keys()


def test_example_documents_have_one_two_and_no_images(qwen: Student) -> None:
    one, two, without = qwen.processor.example_documents()
    assert {*one} == {*two} == {"input_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw"}
    assert {*without} == {"input_ids", "mm_token_type_ids"}
    joined = qwen.processor.join([{"image_grid_thw": part["image_grid_thw"]} for part in (one, two)])
    assert joined["image_grid_thw"].tolist() == [*one["image_grid_thw"].tolist(), *two["image_grid_thw"].tolist()]


def test_a_document_is_described_with_its_images(qwen: Student, pictures: Path) -> None:
    documents = qwen.load_records(pictures, {"messages": CONVERSATIONS[1]})
    assert qwen.processor.in_words(documents, 0) == (
        f"{pictures}/train.jsonl:1: images of 20 × 16, 9 × 30, 12 × 8 pixels, 34 placeholder tokens of 94, 9 to "
        "predict"
    )
    shown = qwen.processor.shortened(qwen.tokenizer.decode(documents.tokens(0)))
    assert "see <|vision_start|><|image_pad|>[× 12]<|vision_end|>and <|vision_start|><|image_pad|>[× 16]" in shown


def test_packed_rows_have_the_types_and_axis_positions_of_each_document(qwen: Student, pictures: Path) -> None:
    documents = qwen.load_records(pictures, *({"messages": turns} for turns in CONVERSATIONS))

    def positions(ids_S: torch.Tensor, types_S: torch.Tensor | None, images: Any) -> torch.Tensor:
        assert types_S is not None
        assert bool(types_S.any()) == bool(images)
        return torch.arange(len(ids_S))[:, None] + 100 * types_S[:, None] + torch.arange(3)

    packed = PackedSequences(documents, max_tokens=200, seed=0, image_inputs=ImageInputs(qwen.processor))
    micro_batch = packed.with_axis_positions(positions).micro_batch(range(len(packed)))
    types_T = micro_batch.inputs["mm_token_type_ids"].flatten()
    axes_TA = micro_batch.inputs["axis_position_ids"].flatten(0, 1)
    is_document_T = micro_batch.document_T >= 0
    pad = qwen.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert torch.equal(types_T, (micro_batch.input_ids_BS.flatten() == pad).long() * is_document_T)
    expected_T = micro_batch.position_ids_BS.flatten()
    assert torch.equal(axes_TA[~is_document_T], expected_T[~is_document_T, None].expand(-1, 3))
    assert torch.equal(axes_TA[is_document_T, 1], (expected_T + 100 * types_T + 1)[is_document_T])
    assert "axis_position_ids" not in packed.micro_batch([0]).inputs
    assert (micro_batch.labels_T[types_T > 0] != pad).all()
    with pytest.raises(ValueError, match="has images, which are not supported here"):
        PackedSequences(documents, max_tokens=200, seed=0).micro_batch([0])


def test_placeholders_are_no_targets_if_all_tokens_are(qwen: Student, pictures: Path) -> None:
    documents = qwen.load_records(pictures, {"messages": CONVERSATIONS[1]}, tokens="all")
    is_pad = documents.tokens(0) == qwen.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert is_pad.sum() == 34
    assert documents.targets(0).tolist() == [False, *~is_pad[1:]]


FORMS: dict[str, Callable[[bytes], dict[str, Any]]] = {
    "path part": lambda _: {"messages": [user({"type": "image", "path": "0.png"}, text(QUESTION)), FOUR]},
    "url part with a path": lambda _: {"messages": [user({"type": "image", "url": "0.png"}, text(QUESTION)), FOUR]},
    "data URL": lambda data: {
        "messages": [
            user(
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(data)}"}}, text(QUESTION)
            ),
            FOUR,
        ]
    },
    "base64": lambda data: {"messages": [user({"type": "image", "base64": encoded(data)}, text(QUESTION)), FOUR]},
    "TRL": lambda _: {"messages": [user({"type": "image"}, text(QUESTION)), FOUR], "images": ["0.png"]},
    "TRL without a place": lambda _: {
        "prompt": [{"role": "user", "content": QUESTION}],
        "completion": [{"role": "assistant", "content": "four"}],
        "images": [{"bytes": None, "path": "0.png"}],
    },
    "ms-swift": lambda _: {
        "messages": [{"role": "user", "content": f"<image>{QUESTION}"}, {"role": "assistant", "content": "four"}],
        "images": ["0.png"],
    },
    "LLaVA": lambda _: {
        "image": "0.png",
        "conversations": [{"from": "human", "value": f"<image>{QUESTION}"}, {"from": "gpt", "value": "four"}],
    },
}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_record_give_the_same_document(qwen: Student, pictures: Path, form: str) -> None:
    expected = qwen.load_records(pictures, {"messages": CONVERSATIONS[0]})
    documents = qwen.load_records(pictures, FORMS[form](png(0)))
    assert same_documents(documents, expected) or form.startswith("TRL without")  # another content key: two columns
    assert documents.fingerprint() == expected.fingerprint()


def test_parquet_has_the_bytes_of_images_as_datasets_writes_them(qwen: Student, pictures: Path) -> None:
    expected = qwen.load_records(pictures, {"messages": CONVERSATIONS[1]})
    turns = json.loads(json.dumps(CONVERSATIONS[1]))
    for turn in turns:  # an Arrow struct has all keys
        turn["content"] = [{"type": part["type"], "text": part.get("text")} for part in turn["content"]]
    images = [{"bytes": png(number, SIZES[number]), "path": "gone.png"} for number in (1, 2, 0)]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": turns, "images": images}]), pictures / "train.parquet"
    )
    documents = qwen.load(pictures / "train.parquet")
    assert same_documents(documents, expected)
    assert documents.images is not None
    assert [part.data for part in documents.images.of(0)] == [part["bytes"] for part in images]


def test_saved_datasets_give_the_bytes_of_images(qwen: Student, pictures: Path) -> None:
    import datasets

    expected = qwen.load_records(pictures, {"messages": CONVERSATIONS[0]})
    rows = [{"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "four"}]}]
    rows[0]["images"] = [{"bytes": png(0), "path": None}]  # type: ignore[assignment]
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
        }
    )
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(pictures / "saved"))
    documents = qwen.load(pictures / "saved")
    assert documents.fingerprint() == expected.fingerprint()
    assert documents.images is not None
    assert documents.images.of(0)[0].data == png(0)


def test_documents_with_images_are_split_joined_and_selected(qwen: Student, pictures: Path) -> None:
    documents = qwen.load_records(pictures, *({"messages": turns} for turns in CONVERSATIONS))
    texts = qwen.load_records(pictures, {"messages": CONVERSATIONS[2]})
    assert documents.images is not None
    assert texts.images is None
    joined = Documents.joined({"a": texts, "b": documents})
    chosen = joined.select([3, 2, 0])
    assert chosen.images is not None
    assert [len(chosen.images.of(number)) for number in range(3)] == [0, 3, 0]
    assert chosen.images.of(1) == documents.images.of(1)
    train, held_out = documents.split(0.3)
    for part in (train, held_out):
        for number, source in enumerate(part.sources):
            assert part.images is not None
            assert part.images.of(number) == documents.images.of(documents.sources.index(source))
    other = png(7)
    (pictures / "0.png").write_bytes(other)
    assert (
        qwen.load_records(pictures, {"messages": CONVERSATIONS[0]}).fingerprint()
        != documents.select([0]).fingerprint()
    )
    assert qwen.load_records(pictures, {"messages": CONVERSATIONS[0]}).keys_D[0] != documents.keys_D[0]


def test_a_changed_image_is_refused_when_it_is_used(qwen: Student, pictures: Path) -> None:
    documents = qwen.load_records(pictures, {"messages": CONVERSATIONS[0]}, cache=pictures / "cache")
    again = qwen.load_records(pictures, {"messages": CONVERSATIONS[0]}, cache=pictures / "cache")
    assert same_documents(documents, again)
    assert len(list((pictures / "cache").glob("*/images.arrow"))) == 1
    inputs = ImageInputs(qwen.processor)
    make_micro_batch(again, [[0]], image_inputs=inputs)
    (pictures / "0.png").write_bytes(png(5))
    with pytest.raises(DataError, match=r"train.jsonl:1: .*0.png: the image has other bytes than when the data"):
        make_micro_batch(again, [[0]], image_inputs=inputs)
    (pictures / "0.png").unlink()
    with pytest.raises(DataError, match=r"0.png: the image cannot be read \(No such file or directory\)"):
        make_micro_batch(again, [[0]], image_inputs=inputs)


def test_cached_images_keep_their_bytes_and_are_compared_with_their_hashes(qwen: Student, pictures: Path) -> None:
    def load(**options: Any) -> Documents:
        return qwen.load_records(pictures, FORMS["base64"](png(0)), cache=pictures / "cache", **options)

    first = load()
    assert first.images is not None
    assert first.images.of(0)[0].data == png(0)
    assert same_documents(first, qwen.load_records(pictures, FORMS["base64"](png(0))))
    (path,) = (pictures / "cache").glob("*/images.arrow")
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(ValueError, match=r"images.arrow has other bytes than when it was written"):
        load()


def test_a_smaller_limit_of_pixels_gives_fewer_tokens_and_another_cache_entry(
    pictures: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("limited")
    documents = [
        Student("qwen3_vl", folder, most_pixels=pixels).load_records(
            pictures, {"messages": [user(image("1.png")), FOUR]}, cache=pictures / "cache"
        )
        for pixels in (None, 100)
    ]
    assert len(documents[1].tokens_N) < len(documents[0].tokens_N)
    assert len(list((pictures / "cache").glob("*/manifest.json"))) == 2
    limited = open_image(png(1, (20, 16)), 100)
    assert limited.width * limited.height <= 100
    assert limited.size == (11, 8)
    assert open_image(png(1, (400, 1)), 100).size == (100, 1)


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def test_images_are_decoded_as_transformers_does(tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    original = picture(1, 12, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    alpha = original.copy()
    alpha.putalpha(Image.linear_gradient("L").resize(original.size))
    files = {
        "rotated": saved(original, "JPEG", exif=exif),
        "palette": saved(original.quantize(16), "PNG"),
        "transparent palette": saved(original.quantize(16), "GIF", transparency=0),
        "alpha": saved(alpha, "PNG"),
        "grey and alpha": saved(alpha.convert("LA"), "PNG"),
        "one bit": saved(original.convert("1"), "PNG"),
        "CMYK": saved(original.convert("CMYK"), "TIFF"),
        "animated": saved(original, "GIF", save_all=True, append_images=[picture(2, 12, 8)]),
        "WebP": saved(original, "WEBP", lossless=True),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        expected = np.asarray(load_image(str(tmp_path / name)))
        assert np.array_equal(np.asarray(open_image(data)), expected), name
    assert open_image(files["rotated"]).size == (8, 12)
    # transformers would make all values above 255 white
    grey = Image.fromarray(np.asarray([[0, 255, 256, 65535]], dtype=np.uint16))
    assert np.asarray(open_image(saved(grey, "PNG")))[0, :, 1].tolist() == [0, 0, 1, 255]


def bomb() -> bytes:
    """A PNG file whose header has 400,000,000 pixels."""
    data = bytearray(png())
    data[16:24] = (20_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not an image: expected one of AVIF, BMP, GIF"),
        (b"GIF89a", "cannot be decoded|is not an image"),
        (png()[:-30], "cannot be decoded: image file is truncated"),
        (png()[:60] + b"abcd" + png()[64:], "cannot be decoded"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
        (saved(Image.new("F", (3, 3)), "TIFF"), r"has 32 bits per pixel \(mode F\)"),
        (bomb(), "exceeds limit of .* pixels, could be decompression bomb"),
    ],
    ids=["empty", "header", "truncated", "checksum", "PostScript", "float", "bomb"],
)
def test_a_broken_image_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        open_image(data)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no such file": (
        {"messages": [user(image("no.png")), FOUR]},
        r"image 1 \('no.png'\) cannot be read: No such file or directory",
    ),
    "a folder": ({"messages": [user(image(".")), FOUR]}, r"image 1 \('.'\) is a folder: expected a regular file"),
    "a null character": ({"messages": [user(image("a\0b")), FOUR]}, "image 1 .* is not a path: embedded null byte"),
    "a URL": (
        {"messages": [user(image("https://a.b/c.png")), FOUR]},
        "image 1 is the URL 'https://a.b/c.png': expected a path, because nothing is downloaded",
    ),
    "another data URL": (
        {"messages": [user(image("data:text/plain,a")), FOUR]},
        "image 1 is a data URL of another form",
    ),
    "no base64": ({"messages": [user({"type": "image", "base64": "a!"}), FOUR]}, "image 1 is not valid base64"),
    "a number": ({"messages": [user(image(3)), FOUR]}, r"image 1 is a number \(3\): expected a path"),
    "no value": ({"messages": [user({"type": "image"}), FOUR]}, "image 1 has no value"),
    "too few places": (
        {"messages": [user({"type": "image"}, text("a")), FOUR], "images": ["0.png", "1.png"]},
        "the messages have 1 places for images .* and the record has 2 images",
    ),
    "too many places": (
        {"messages": [{"role": "user", "content": "<image> and <image>"}, FOUR], "images": ["0.png"]},
        "the messages have 2 places for images .* and the record has 1 images",
    ),
    "both": (
        {"messages": [user(image("0.png")), FOUR], "images": ["0.png"]},
        "a column of images and an image part with a value",
    ),
    "two columns": (
        {"messages": [user({"type": "image"}), FOUR], "images": ["0.png"], "image": "0.png"},
        "both 'image' and 'images' have images|both 'images' and 'image' have images|have images: expected one",
    ),
    "a text": ({"text": "two", "images": ["0.png"]}, "the record has 1 images and no messages"),
    "a video": (
        {"messages": [user(image("0.png")), FOUR], "videos": ["a.mp4"]},
        "'videos' is not empty: expected only text and images",
    ),
    "another part": (
        {"messages": [user({"type": "audio", "audio": "a"}), FOUR]},
        "'type' of part 1 of message 1 of 'messages' is a string .* expected 'text' or 'image'",
    ),
    "no part": ({"messages": [user("a"), FOUR]}, "part 1 of message 1 of 'messages' must be an object with 'type'"),
    "two values": (
        {"messages": [user({"type": "image", "image": "0.png", "path": "0.png"}), FOUR]},
        "part 1 of message 1 of 'messages' has .* expected one of them",
    ),
    "no user": ({"messages": [FOUR], "images": ["0.png"]}, "no turn of the user before which they could be put"),
    "a placeholder in a text": (
        {"messages": [user(image("0.png"), text("see <|image_pad|>")), FOUR]},
        r"has 2 times the placeholder '<\|image_pad\|>' for 1 images",
    ),
    "broken": ({"messages": [user(image("broken.png")), FOUR]}, "image 1 .*broken.png.* cannot be decoded"),
    "too long": ({"messages": [user(text("a" * 20), image("2.png")), FOUR]}, "its images end at token .* cut at 30"),
    "too narrow": ({"messages": [user(image("narrow.png")), FOUR]}, "the processor refuses the images: .*ratio"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_record_with_a_bad_image_is_refused_with_its_line_or_skipped(
    qwen: Student, pictures: Path, fault: str
) -> None:
    (pictures / "broken.png").write_bytes(png()[:-40])
    (pictures / "narrow.png").write_bytes(png(0, (1, 300)))
    record, message = FAULTS[fault]
    most = {"max_tokens": 30} if fault == "too long" else {}
    good = {"messages": [user(text("a")), FOUR]}
    with pytest.raises(DataError, match=rf"train.jsonl:2: (?s:.*)({message})"):
        qwen.load_records(pictures, good, record, **most)
    if fault != "a text":  # this record has none of the columns of the first
        documents = qwen.load_records(pictures, record | good, good, record, on_error="skip", **most)
        assert documents.report.skipped >= 1
        assert "train.jsonl:3" in documents.report.reasons[-1]


def test_images_need_a_student_with_a_processor(qwen: Student, pictures: Path, tmp_path: Path) -> None:
    path = pictures / "train.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATIONS[0]}))
    for on_error in ("raise", "skip"):
        with pytest.raises(
            DataError, match=r"train.jsonl:1: the record has images, but .* has no processor for images"
        ):
            load_documents(path, qwen.tokenizer, LoadOptions(64, on_error=on_error))
    assert ImageProcessor.find(str(pictures), qwen.tokenizer) is None


def test_a_text_with_a_placeholder_and_without_an_image_is_refused(qwen: Student, pictures: Path) -> None:
    records = [{"messages": CONVERSATIONS[0]}, {"messages": [user(text("<|image_pad|>")), FOUR]}]
    documents = qwen.load_records(pictures, *records)
    with pytest.raises(DataError, match=r"train.jsonl:2: its text has a placeholder token of images"):
        qwen.processor.check_texts(documents)
    qwen.processor.check_texts(documents.select([0]))


def test_a_processor_with_another_tokenizer_or_template_is_refused(pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    student = Student("internvl", folder)
    student.tokenizer.chat_template = "other"
    with pytest.raises(ValueError, match=r"have different chat templates: set data\.chat_template"):
        student.processor.processor  # noqa: B018
    other = ImageProcessor.find(str(folder), image_tokenizer("qwen3_vl"))
    assert other is not None
    with pytest.raises(ValueError, match="has another tokenizer than the model"):
        other.processor  # noqa: B018


def test_a_template_that_drops_strings_gets_parts(qwen: Student, pictures: Path) -> None:
    template = qwen.tokenizer.chat_template
    expected = qwen.load_records(pictures, {"messages": [user(text(QUESTION)), FOUR]})
    strings = [{"role": turn["role"], "content": turn["content"][0]["text"]} for turn in CONVERSATIONS[2]]
    qwen.tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    try:
        documents = qwen.load_records(pictures, {"messages": strings})
    finally:
        qwen.tokenizer.chat_template = template
    assert documents.tokens(0).tolist() == expected.tokens(0).tolist()
    assert documents.targets(0).tolist() == expected.targets(0).tolist()
