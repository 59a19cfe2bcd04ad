"""Documents with images: the tokens, masks and tensors of each family's processor, and what is refused by line."""

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from kit import first_is_quick, image_documents
from kit.config_cases import refused_calls
from kit.documents import same_documents
from kit.image_documents import CONVERSATIONS, FOUR, QUESTION, Student, encoded, image, png, text, user
from kit.image_models import FAMILIES, image_tokenizer, picture, write_image_model
from PIL import Image

from stillhouse.data import DataError, Documents, LoadOptions, PackedSequences, load_documents, make_micro_batch
from stillhouse.data.media import MediaInputs
from stillhouse.data.record import RecordError
from stillhouse.images import IMAGES, decode
from stillhouse.images.decode import IsolatedDecoder, open_image
from stillhouse.images.load_processor import load_processor


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Student:
    return Student("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    image_documents.write_pictures(tmp_path)
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


def asks(*parts: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [question(parts[0]) if isinstance(parts[0], str) else user(*parts), FOUR], **columns}


def question(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


ANSWER = {"role": "assistant", "content": "four"}


DATA = "data:image/png;base64,"
FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "path part": lambda _: asks({"type": "image", "path": "0.png"}, text(QUESTION)),
    "url part with a path": lambda _: asks({"type": "image", "url": "0.png"}, text(QUESTION)),
    "data URL": lambda data: asks({"type": "image_url", "image_url": {"url": DATA + data}}, text(QUESTION)),
    "base64": lambda data: asks({"type": "image", "base64": data}, text(QUESTION)),
    "TRL": lambda _: asks({"type": "image"}, text(QUESTION), images=["0.png"]),
    "TRL without a place": lambda _: {
        "prompt": [question(QUESTION)],
        "completion": [ANSWER],
        "images": [{"bytes": None, "path": "0.png"}],
    },
    "ms-swift": lambda _: {"messages": [question(f"<image>{QUESTION}"), ANSWER], "images": ["0.png"]},
    "LLaVA": lambda _: {
        "image": "0.png",
        "conversations": [{"from": "human", "value": f"<image>{QUESTION}"}, {"from": "gpt", "value": "four"}],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_record_give_the_same_document(qwen: Student, pictures: Path, form: str) -> None:
    expected = qwen.load_records(pictures, {"messages": CONVERSATIONS[0]})
    documents = qwen.load_records(pictures, FORMS[form](encoded(png(0))))
    assert same_documents(documents, expected) or form.startswith("TRL without")  # another content key: two columns
    assert documents.fingerprint() == expected.fingerprint()


def test_parquet_has_the_bytes_of_images_as_datasets_writes_them(qwen: Student, pictures: Path) -> None:
    expected = qwen.load_records(pictures, {"messages": CONVERSATIONS[1]})
    turns = json.loads(json.dumps(CONVERSATIONS[1]))
    for turn in turns:  # an Arrow struct has all keys
        turn["content"] = [{"type": part["type"], "text": part.get("text")} for part in turn["content"]]
    sizes = image_documents.SIZES
    images = [{"bytes": png(number, sizes[number]), "path": "gone.png"} for number in (1, 2, 0)]
    table = pyarrow.Table.from_pylist([{"messages": turns, "images": images}])
    pyarrow.parquet.write_table(table, pictures / "train.parquet")
    documents = qwen.load(pictures / "train.parquet")
    assert same_documents(documents, expected)
    assert documents.media is not None
    assert [part.data for part in documents.media.of(0)] == [part["bytes"] for part in images]


def test_saved_datasets_give_the_bytes_of_images(qwen: Student, pictures: Path) -> None:
    import datasets

    expected = qwen.load_records(pictures, {"messages": CONVERSATIONS[0]})
    rows = [{"messages": [question(QUESTION), ANSWER], "images": [{"bytes": png(0), "path": None}]}]
    turn = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features({"messages": [turn], "images": datasets.List(datasets.Image())})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(pictures / "saved"))
    documents = qwen.load(pictures / "saved")
    assert documents.fingerprint() == expected.fingerprint()
    assert documents.media is not None
    assert documents.media.of(0)[0].data == png(0)


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


def of_size(width: int, height: int) -> bytes:
    """A PNG file whose header has other sides than its content."""
    data = bytearray(png())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(("call", "message"), refused_calls("images"))
def test_a_broken_image_is_refused(call: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        open_image(eval(call))


def with_scans(count: int) -> bytes:
    """A progressive JPEG that repeats its last scan. It takes 31 bytes, and the time to go through all pixels."""
    data = saved(Image.new("L", (1000, 1000)), "JPEG", progressive=True)
    return data[:-2] + data[data.rfind(b"\xff\xda") : -2] * count + data[-2:]


def with_wide_tiles(width: int, height: int) -> bytes:
    """A TIFF of height rows and few columns. Each row is a tile of `width` columns, and all are the same bytes."""
    tile = zlib.compress(bytes(width))
    tags = {256: height // 100, 257: height, 258: 8, 259: 8, 262: 1, 277: 1, 322: width, 323: 1}
    fields = {tag: struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()}
    tables = 8 + 2 + 12 * (len(tags) + 2) + 4
    fields[324] = struct.pack("<HHII", 324, 4, height, tables)
    fields[325] = struct.pack("<HHII", 325, 4, height, tables + 4 * height)
    offset = struct.pack("<I", tables + 8 * height)
    directory = struct.pack("<H", len(fields)) + b"".join(fields.values()) + bytes(4)
    table = offset * height + struct.pack("<I", len(tile)) * height
    return b"II*\0" + struct.pack("<I", 8) + directory + table + tile


#: images of few bytes that take minutes to decode
SLOW = {
    "scans": lambda: with_scans(20_000),
    "tiles": lambda: with_wide_tiles(2**20, 10_000),
    "header": lambda: b"P6\n#" + b"c" * 60_000_000 + b"\n1 1 255\n...",
    "plain": lambda: b"P3 1000 1000 255\n" + b"#\n1 " * 3_000_000,
}


@pytest.mark.parametrize("kind", SLOW)
def test_a_slow_image_is_refused(qwen: Student, pictures: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "IMAGE_SECONDS", 0.2)
    monkeypatch.setattr(qwen.processor, "_isolated_decoder", IsolatedDecoder(), raising=False)
    (pictures / "slow").write_bytes(SLOW[kind]())
    records = [asks(image(name), text(QUESTION)) for name in ("0.png", "slow", "1.png")]
    with pytest.raises(DataError, match=r"train.jsonl:2: image 1 .*slow.* cannot be decoded: it took more than 0"):
        qwen.load_records(pictures, *records)
    documents = qwen.load_records(pictures, *records, on_error="skip")
    assert (len(documents), documents.report.skipped) == (2, 1)


def test_images_at_the_limits_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same pixels as in this process, one after another and after one that exceeds them."""
    decoder = IsolatedDecoder(20_000)
    for data in (png(1, (200, 1)), with_scans(2), png(0, (30, 20)), b"P3 10 10 255\n" + b"#\n1 " * 300):
        here, there = open_image(data, 20_000), decoder.open(data)
        assert (here.size, here.tobytes()) == (there.size, there.tobytes())
    monkeypatch.setattr(decode, "IMAGE_BYTES", 2**20)
    small = IsolatedDecoder()
    with pytest.raises(RecordError, match="cannot be decoded"):
        # its pixels need more memory than this process has freed and kept, which its fork may use beside the limit
        small.open(saved(Image.new("1", (9000, 9000)), "PNG"))
    assert small.open(png()).size == open_image(png()).size


@pytest.mark.parametrize(("call", "message"), refused_calls("records with images"))
def test_a_record_with_a_bad_image_is_refused(qwen: Student, pictures: Path, call: str, message: str) -> None:
    (pictures / "broken.png").write_bytes(png()[:-40])
    (pictures / "narrow.png").write_bytes(png(0, (1, 300)))
    record = eval(call)
    most = {"max_tokens": 30} if "cut at token" in message else {}
    good = asks(text("a"))
    with pytest.raises(DataError, match=rf"train.jsonl:2: (?s:.*)({message})"):
        qwen.load_records(pictures, good, record, **most)
    if "no messages" not in message:  # this record has none of the columns of the first
        documents = qwen.load_records(pictures, record | good, good, record, on_error="skip", **most)
        assert documents.report.skipped >= 1
        assert "train.jsonl:3" in documents.report.reasons[-1]


def test_images_need_a_student_with_a_processor(qwen: Student, pictures: Path) -> None:
    path = pictures / "train.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATIONS[0]}))
    needed = r"train.jsonl:1: the record has images, but .* has no processor for images"
    for on_error in ("raise", "skip"):
        with pytest.raises(DataError, match=needed):
            load_documents(path, qwen.tokenizer, LoadOptions(64, on_error=on_error))
    assert IMAGES.find_processor(str(pictures), qwen.tokenizer) is None


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
    other = IMAGES.find_processor(str(folder), image_tokenizer("qwen3_vl"))
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


def test_what_is_no_processor_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=rf"^the processor of '{tmp_path}' cannot be loaded: "):
        load_processor(str(tmp_path))
    write_image_model("internvl", tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "InternVLProcessor", "image_processor": 3}')
    with pytest.raises(ValueError, match=rf"^the processor of '{tmp_path}' cannot be loaded: "):
        load_processor(str(tmp_path))
    monkeypatch.setattr("stillhouse.images.load_processor.is_vision_available", lambda: False)
    with pytest.raises(ValueError, match=r"needs Pillow.*pip install 'stillhouse\[images\]'$"):
        load_processor("a/model")
