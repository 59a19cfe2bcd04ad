"""The demo on images: strips of digits, tiny models that can learn to read them, and the files of a run.

With one version of Pillow, which has the font, a seed and a number give the same picture on every machine. The hash
of the digits decides whether a picture is held out.

The models are Qwen3-VL's with random weights. A folder has the model, the tokenizer (characters), and Qwen3-VL's own
processor. A picture of n digits becomes n tokens. The chat template writes an image and its question as
`<|vision_start|>…<|vision_end|>read the digits=`.
"""

import io
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from stillhouse.tasks import RandomNumbers, is_held_out
from stillhouse.tools.demo.student import write_configuration

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

TASK, QUESTION = "digits", "read the digits"
#: how many digits a picture has
LENGTHS = range(2, 5)
#: pixels of a picture's height, and of its width for each digit
SIDE = 16
SIZES = (12, 16)  # smallest and largest size of the font, in pixels
TURN, SHIFT = 12, 2  # largest angle to both sides, in degrees, and largest shift to each side, in pixels
DARK = 96  # each channel of the dark colour is below this, and each of the light one at most as far from white
NOISE = 24  # largest noise of a channel to both sides
_GROUP = 1000  # rows of one row group of the file
PATCH, MERGE = SIDE // 2, 2
#: width and layers of the language model, width and layers of the vision tower
TEACHER, STUDENT = (128, 4, 48, 2), (64, 2, 48, 2)
PAD, END = "<pad>", "</s>"
IMAGE_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2 * 64},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 1,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor"},
}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{{ '</s>' }}{% endgeneration %}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text + '=' }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
#: numbers of pictures, and steps of the teacher and of the student
PICTURES, HELD_OUT_PICTURES, TEACHER_STEPS, STUDENT_STEPS = 8_000, 200, 400, 500
_ALL_PARTS = ["language", "projector", "vision"]


def write_image_run(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write pictures of digits, two new vision-language models, teacher.yaml and run.yaml, unless they exist.

    teacher.yaml trains the larger model by cross-entropy, and run.yaml distills the result into the smaller one.
    Returns the paths of the two. Raises ValueError if Pillow is not installed.
    """
    pictures = {
        name: parquet_file(seed, count, held_out=name == "held_out")
        for name, count in (("train", PICTURES), ("held_out", HELD_OUT_PICTURES))
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in pictures.items():
        (folder / f"{name}.parquet").write_bytes(content)
    for name, sizes in (("new_teacher", TEACHER), ("student", STUDENT)):
        save(new_model(*sizes, seed), folder / name)
    settings = _image_settings(folder, "new_teacher", TEACHER_STEPS, 1e-3)
    settings |= {"objective": {"loss": "cross_entropy"}, "out": str(folder / "teacher")}
    key = "train.learning_rate=5e-4"
    what = "A vision-language model learns to read digits; it is the teacher of run.yaml"
    teacher = write_configuration(folder / "teacher.yaml", what, key, settings)
    settings = _image_settings(folder, "student", STUDENT_STEPS, 2e-3)
    settings |= {"teacher": {"model": str(folder / "teacher" / "model"), "dtype": "float32"}}
    settings |= {"objective": {"loss": "forward_kl"}, "out": str(folder / "first")}
    what = "A vision-language student learns from the model that teacher.yaml trains"
    return teacher, write_configuration(folder / "run.yaml", what, key, settings)


def _image_settings(folder: Path, student: str, steps: int, learning_rate: float) -> dict[str, Any]:
    return {
        "student": {"model": str(folder / student), "train": _ALL_PARTS},
        "data": {"train": str(folder / "train.parquet"), "eval": str(folder / "held_out.parquet"), "max_tokens": 64},
        "train": {"tokens_per_step": 1600, "micro_batch_tokens": 1600, "steps": steps}
        | {"learning_rate": learning_rate, "warmup": 0.1, "precision": "fp32"},
        "eval": {"every": 100, "samples": 4},
        "checkpoint": {"every": 0, "keep": 1},
    }


def parquet_file(seed: int, count: int, *, held_out: bool, lengths: range = LENGTHS) -> bytes:
    """The content of a Parquet file with the columns messages, images, task and length, as `datasets` reads it.
    Raises ValueError if Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise ValueError("pillow not installed; pip install 'stillhouse[images]'")
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features, Image, List, Value

    message = {"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})}
    columns = {"messages": List(message), "images": List(Image()), "task": Value("string"), "length": Value("int64")}
    rows = [record(seed, number, held_out=held_out, lengths=lengths) for number in range(count)]
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, Features(columns).arrow_schema), content, row_group_size=_GROUP)
    return content.getvalue()


def record(seed: int, number: int, *, held_out: bool, lengths: range = LENGTHS) -> dict[str, Any]:
    """Picture `number` of a split as a record of training data, with the bytes of a PNG file."""
    digits = answer(seed, number, held_out=held_out, lengths=lengths)
    encoded = io.BytesIO()
    strip(digits, RandomNumbers(f"{TASK} picture", seed, number)).save(encoded, "png")
    question = [{"type": "image", "text": None}, {"type": "text", "text": QUESTION}]
    content = [{"type": "text", "text": digits}]
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": content}],
        "images": [{"bytes": encoded.getvalue(), "path": None}],
        "task": TASK,
        "length": len(digits),
    }


def answer(seed: int, number: int, *, held_out: bool, lengths: range = LENGTHS) -> str:
    """The digits of picture `number` of a split. With `number`, their count cycles through `lengths`."""
    length, random = lengths[number % len(lengths)], RandomNumbers(TASK, seed, number)
    while True:
        digits = "".join(str(random.below(10)) for _ in range(length))
        if is_held_out(TASK, digits) == held_out:
            return digits


def strip(digits: str, random: RandomNumbers) -> "Image":
    """Draw each digit in a random size, place and angle, all in a random light colour on a dark one, with noise. The
    picture has SIDE rows and SIDE columns for each digit.
    """
    import numpy as np
    from PIL import Image, ImageDraw

    mask = Image.new("L", (SIDE * len(digits), SIDE))
    for place, digit in enumerate(digits):
        cell = Image.new("L", (SIDE, SIDE))
        x, y = (SIDE / 2 + random.below(2 * SHIFT + 1) - SHIFT for _ in range(2))
        font = _font(SIZES[0] + random.below(SIZES[1] - SIZES[0] + 1))
        ImageDraw.Draw(cell).text((x, y), digit, 255, font, anchor="mm")
        angle = random.below(2 * TURN + 1) - TURN
        mask.paste(cell.rotate(angle, Image.Resampling.BICUBIC), (place * SIDE, 0))
    dark = [random.below(DARK) for _ in range(3)]
    light = [255 - random.below(DARK) for _ in range(3)]
    share = np.asarray(mask, dtype=np.int64)[..., None]
    colours = (np.array(light) * share + np.array(dark) * (255 - share)) // 255
    noise = random.many(colours.size, 2 * NOISE + 1).reshape(colours.shape) - NOISE
    return Image.fromarray((colours + noise).clip(0, 255).astype(np.uint8))


@cache
def _font(size: int) -> "FreeTypeFont":
    from PIL import ImageFont

    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise ValueError(
            "pictures of digits need Pillow with FreeType, and the one that is installed has no FreeType"
        )
    return font


def tokenizer() -> PreTrainedTokenizerFast:
    special = [PAD, END, *IMAGE_TOKENS.values()]
    characters = dict.fromkeys("0123456789=read the digits")
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate([*special, *characters])}, PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)
    made.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS.values())})
    return made


def new_model(width: int, layers: int, tower: int, depth: int, seed: int) -> Qwen3VLForConditionalGeneration:
    """A model with random weights. width, layers: of the language model; tower, depth: of the vision tower."""
    vocabulary, heads = tokenizer(), width // 32
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text: dict[str, Any] = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    text |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 32, "rope_parameters": rotary}
    text |= {"vocab_size": len(vocabulary), "tie_word_embeddings": True, "max_position_embeddings": 256}
    text |= {"eos_token_id": vocabulary.eos_token_id, "pad_token_id": vocabulary.pad_token_id}
    vision: dict[str, Any] = {"depth": depth, "hidden_size": tower, "intermediate_size": 3 * tower, "num_heads": 4}
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 1, "out_hidden_size": width}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    for part in (text, vision):
        part["initializer_range"] = 0.04
    ids = {name: vocabulary.convert_tokens_to_ids(token) for name, token in IMAGE_TOKENS.items()}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(config)


def save(model: Qwen3VLForConditionalGeneration, folder: Path) -> Path:
    """Write model, tokenizer and processor as a Hugging Face folder, and return the folder."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR, indent=1))
    return folder
