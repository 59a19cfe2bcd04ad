"""Tiny models that can learn to read strips of digits, and the exact match of a model.

The models are Qwen3-VL's with random weights. A folder has the model, the tokenizer (characters), and Qwen3-VL's own
processor. A picture of n digits becomes n tokens. The chat template writes an image and its question as
`<|vision_start|>…<|vision_end|>read the digits=`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.digit_pictures import LENGTHS, QUESTION, SIDE, answer, strip
from stillhouse.images.load_processor import load_processor
from stillhouse.tasks import RandomNumbers

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


def new_student(teacher: Path, seed: int) -> Qwen3VLForConditionalGeneration:
    """A student with the teacher's vision tower, and with a new projector and a new language model."""
    student = new_model(*STUDENT, seed)
    tower = Qwen3VLForConditionalGeneration.from_pretrained(teacher, dtype=torch.float32).model.visual.state_dict()
    kept = {name: weight for name, weight in tower.items() if "merger" not in name}
    student.model.visual.load_state_dict(kept, strict=False)
    return student


def parameters(folder: Path) -> int:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def exact_matches(folder: Path, count: int, *, black: bool = False) -> dict[str, float]:
    """The shares of held-out pictures that plain transformers reads exactly, of all and by the number of digits.

    An answer is generated greedily. black: with black pictures of the same sizes.
    """
    processor = load_processor(str(folder))
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    by_length: dict[int, list[str]] = {length: [] for length in LENGTHS}
    for number in range(count):
        digits = answer(0, number, held_out=True)
        by_length[len(digits)].append(digits)
    shares = {}
    for length, answers in by_length.items():
        pictures = [strip(digits, RandomNumbers("held out", length, number)) for number, digits in enumerate(answers)]
        if black:
            pictures = [Image.new("RGB", picture.size) for picture in pictures]
        inputs = _inputs(processor, QUESTION, pictures)
        generated = model.generate(**inputs, max_new_tokens=max(LENGTHS) + 1, do_sample=False)
        texts = processor.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        matches = [text == digits for text, digits in zip(texts, answers, strict=True)]
        shares[f"length {length}"] = sum(matches) / len(matches)
    return {"all": sum(shares.values()) / len(shares)} | shares


def _inputs(processor: Any, question: str, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}]
        for picture in pictures
    ]
    options = {"return_dict": True, "return_tensors": "pt"}
    return dict(processor.apply_chat_template(conversations, tokenize=True, **options))
