"""Runs on images whose teacher reads other tokens than the student, and both as models of plain transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit.image_models import picture, write_image_model
from PIL import Image
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from stillhouse.images.load_processor import load_processor

RECORDS = 12


def images_of(number: int) -> list[int]:
    """The pictures of a record's turns: of most records, one before each answer."""
    return [[10 * number, 10 * number + 1], [10 * number], []][number % 3]


def turns_of(number: int) -> list[dict[str, Any]]:
    """Two questions and answers. An image of the second question is between targets."""
    turns = []
    for turn in range(2):
        text = [{"type": "text", "text": f"what is {number} and {turn}?"}]
        image = [{"type": "image", "image": f"{at}.png"} for at in images_of(number)[turn : turn + 1]]
        answer = [{"type": "text", "text": f"number {number} of {turn}"}]
        turns += [{"role": "user", "content": text + image}, {"role": "assistant", "content": answer}]
    return turns


def write_data(folder: Path, **columns: Callable[[int], str]) -> None:
    for number in range(RECORDS):
        for at in images_of(number):
            picture(at, 8 + 4 * (at % 5), 8 + 4 * (number % 3)).save(folder / f"{at}.png")
    lines = [
        json.dumps({"messages": turns_of(number)} | {name: of(number) for name, of in columns.items()})
        for number in range(RECORDS)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "eval.jsonl").write_text("\n".join(lines[:3]))


def write_models(folder: Path, student: str, teacher: str) -> None:
    write_image_model(student, folder / "student", seed=1, tokenizer_of=[teacher])
    write_image_model(teacher, folder / "teacher", seed=2, tokenizer_of=[student])
    if teacher == student:  # with larger images
        change_processor(folder / "teacher", size={"shortest_edge": 256, "longest_edge": 1024})


def change_processor(folder: Path, **settings: Any) -> None:
    path = folder / "processor_config.json"
    processor = json.loads(path.read_text())
    processor["image_processor"] |= settings
    path.write_text(json.dumps(processor))


class Plain:
    """A model of plain transformers in float64 with its processor; a text model has none."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.processor = folder, None
        if (folder / name / "processor_config.json").exists():
            self.processor: Any = load_processor(str(folder / name))
            self.model: Any = AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float64)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)

    def read(
        self, pieces: list[str], pictures: list[int], tokenizer: Any, completion: list[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [S, V]; the ids [N] and the places of the tokens of pieces of text with pictures between them."""
        special = not pieces[0].startswith("<s>") and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        texts = [tokenizer(text, add_special_tokens=special and not n)["input_ids"] for n, text in enumerate(pieces)]
        if self.processor is None:
            assert not pictures
            inputs = {"input_ids": torch.tensor([texts[0]])}
        else:
            images = [[Image.open(self.folder / f"{at}.png") for at in pictures]] if pictures else None
            text = self.processor.image_token.join(pieces)
            inputs = self.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=special)
        texts[-1] = texts[-1] + (completion or [])
        if completion:  # its tokens have the kind of text
            behind = {"input_ids": completion, "attention_mask": [1] * len(completion)}
            inputs = {
                name: torch.cat([value, torch.tensor([behind.get(name, [0] * len(completion))])], 1)
                if name in behind or "token_type" in name
                else value
                for name, value in inputs.items()
            }
        ids, places = inputs["input_ids"][0].tolist(), list[int]()
        for piece in texts:
            start = places[-1] + 1 if places else 0
            start = next(at for at in range(start, len(ids)) if ids[at : at + len(piece)] == piece)
            places += range(start, start + len(piece))
        logits_SV = self.model(**inputs, use_cache=False).logits[0]
        return logits_SV, torch.tensor(ids)[places], torch.tensor(places)
