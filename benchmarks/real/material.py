"""The models, texts and prompts of the experiments, which settings name as @NAME.

The text is the documentation of Python's standard library, which every installation has. The split of a document
depends on its name alone (`stillhouse/tools/demo/corpus.py`), and no paragraph is in both splits. Result files have
the number and the hash of the pieces, because the text depends on Python's version.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real.tasks import LEARNED, write_problems
from benchmarks.training_runs import write_completions
from stillhouse.fetch import fetch
from stillhouse.tools.demo.corpus import Split, collect_split

#: characters of a piece: about 300 tokens
PIECE = 1200
#: pieces for training (about 120,000 tokens) and for the held-out figures (about 3,000 tokens)
TRAINED, HELD_OUT = 400, 10
#: pieces of a training text that is read again and again
FEW = 10
#: tokens of a beginning, of the text's own continuation, and of the teacher's
BEGINNING, CONTINUATION, ANSWER = 64, 64, 192
#: beginnings that the teacher continues: as many tokens as 90 steps of 1,024 read
ANSWERS = 360
MODELS = "smollm2", "gemma3-270m"
#: student → the layers of SmolLM2's 30 that it has
LAYERS = {"half": [*range(0, 30, 2)], "most": [*range(15), *range(16, 26, 2), *range(26, 30)]}


def material(name: str, folder: Path) -> Path:
    """Return the path of a model or a data file, which is made in the folder if it is not there."""
    if name in MODELS:
        return fetch(name)
    path = folder / name if name in LAYERS else folder / f"{name}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        MAKERS[name](unfinished)
        unfinished.rename(path)
    return path


def training_pieces() -> list[str]:
    return _first("teacher", TRAINED)


def held_out_pieces() -> list[str]:
    return _first("held_out", HELD_OUT)


def described(pieces: list[str]) -> dict[str, Any]:
    """The size and the hash of pieces, for a result file."""
    digest = hashlib.sha256("\0".join(pieces).encode()).hexdigest()
    return {"pieces": len(pieces), "characters": sum(map(len, pieces)), "sha256": digest}


def file_facts(path: Path) -> dict[str, Any]:
    """The number of records and the hash of a data file, for a result file."""
    content = path.read_bytes()
    return {"records": content.count(b"\n"), "sha256": hashlib.sha256(content).hexdigest()}


def _first(split: Split, count: int) -> list[str]:
    pieces = [piece for document in collect_split(split) for piece in _cut(document.text)]
    if len(pieces) < count:
        raise ValueError(f"Python's library has {len(pieces)} pieces for {split}: expected {count}")
    # from all over the library, so that long modules do not make up the whole
    return pieces[:: len(pieces) // count][:count]


def _cut(text: str) -> Iterator[str]:
    """Cut a text between paragraphs into pieces of about `PIECE` characters; a shorter rest is left out."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= PIECE:
            yield piece[: 2 * PIECE]
            piece = ""


def _part(path: Path, layers: list[int]) -> None:
    """SmolLM2 with some of its layers."""
    teacher = fetch("smollm2")
    model = AutoModelForCausalLM.from_pretrained(teacher)
    model.model.layers = torch.nn.ModuleList(model.model.layers[layer] for layer in layers)
    model.config.num_hidden_layers = len(layers)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(path)
    model.save_pretrained(path)


def _text(path: Path, count: int = TRAINED) -> None:
    _write(path, ({"text": piece} for piece in training_pieces()[:count]))


def _held_out(path: Path) -> None:
    _write(path, ({"text": piece} for piece in held_out_pieces()))


def _beginnings(path: Path) -> None:
    _write(path, ({"prompt": beginning} for beginning, _ in _split_pieces()))


def _continued(path: Path) -> None:
    _write(path, ({"prompt": beginning, "completion": rest} for beginning, rest in _split_pieces()))


def _answers(path: Path) -> None:
    """The teacher's own continuations at temperature 1."""
    prompts = path.with_suffix(".prompts")
    _write(prompts, ({"prompt": beginning} for beginning, _ in _split_pieces()[:ANSWERS]))
    write_completions(path, prompts, fetch("smollm2"), ANSWER)


def _split_pieces() -> list[tuple[str, str]]:
    tokenizer = AutoTokenizer.from_pretrained(fetch("smollm2"))
    ids = tokenizer(training_pieces())["input_ids"]
    stop = BEGINNING + CONTINUATION
    return [(tokenizer.decode(row[:BEGINNING]), tokenizer.decode(row[BEGINNING:stop])) for row in ids]


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


MAKERS: dict[str, Callable[[Path], None]] = {
    **{name: partial(_part, layers=layers) for name, layers in LAYERS.items()},
    "text": _text,
    "few_texts": partial(_text, count=FEW),
    "held_out": _held_out,
    "beginnings": _beginnings,
    "continued": _continued,
    "answers": _answers,
    "tasks": partial(write_problems, names=LEARNED),
    "long_words": partial(write_problems, names=["long_words"]),
}
