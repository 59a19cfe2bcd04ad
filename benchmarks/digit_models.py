"""A student of the tiny Qwen3-VL models of `stillhouse.images.digits_demo`, and the exact match of a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration

from stillhouse.images.digits_demo import LENGTHS, QUESTION, STUDENT, answer, new_model, strip
from stillhouse.images.load_processor import load_processor
from stillhouse.tasks import RandomNumbers


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
