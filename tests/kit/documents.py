"""Documents for tests: loaded from records that are written here, or made of lists of tokens."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.runs import write_records
from kit.toy_tokenizer import Chat, toy_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from stillhouse.data import DataReport, Documents, LoadOptions, Substitution, Substitutions, load_documents
from stillhouse.data.offsets import offsets_of

ODD = "§"  # its first byte is a separate token, which no other text has
LINE = 23


def with_odd_line(folder: Path) -> None:
    """Write odd.jsonl: 40 texts, of which only one contains `ODD`."""
    texts = [f"{number} the still is heated slowly" for number in range(40)]
    texts[LINE - 1] = f"the {ODD} heads"
    write_records(folder / "odd.jsonl", [{"text": text} for text in texts])


def odd_id() -> int:
    return int(toy_tokenizer()(ODD, add_special_tokens=False)["input_ids"][0])


def vanishing(model: Any, value: float = 1e-19) -> None:
    """Set the odd token's embedding: RMS norm without epsilon normalises 1e-19, but the gradient overflows."""
    model.config.rms_norm_eps = 0.0
    model.get_input_embeddings().weight[0] = 1.0  # otherwise the padding token's zeros would give NaN in every step
    model.get_input_embeddings().weight[odd_id()] = value


#: with an embedding of 0, RMS norm without epsilon gives NaN, and so does the loss
vanished = partial(vanishing, value=0.0)


#: ids of the toy tokenizer
BOS, EOS = 1, 2
QUESTION = {"role": "user", "content": "two and two?"}
ANSWER = {"role": "assistant", "content": "four"}


def load_records(
    folder: Path,
    records: list[Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    chat: Chat | None = None,
    max_tokens: int = 64,
    **options: Any,
) -> Documents:
    """Write records to `folder/train.jsonl`, a text as a line of its own, and load them.

    tokenizer: None for the toy tokenizer with the template `chat`.
    """
    path = folder / "train.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return load_documents(path, tokenizer or toy_tokenizer(chat=chat), LoadOptions(max_tokens=max_tokens, **options))


def write_fingerprint(folder: str, result: str) -> None:
    """Load `folder/a.jsonl` with a cache in the folder, and write the documents' fingerprint to a file."""
    path, cache = Path(folder) / "a.jsonl", Path(folder) / "cache"
    documents = load_documents(path, toy_tokenizer(), LoadOptions(max_tokens=32), cache)
    Path(result).write_text(documents.fingerprint())


def plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text without the tokenizer's special tokens around it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def same_documents(one: Documents, other: Documents) -> bool:
    return one.fingerprint() == other.fingerprint() and np.array_equal(one.keys_D, other.keys_D)


def documents_of(
    ids: list[list[int]],
    targets: list[list[int]],
    prefixes: dict[str, list[list[int]]] | None = None,
    bos: list[bool] | None = None,
) -> Documents:
    """Make documents from lists. bos: which of them begin with a BOS that stays in front of a prefix."""
    return Documents(
        np.concatenate(ids).astype(np.int32),
        np.concatenate(targets).astype(bool),
        offsets_of([len(document) for document in ids]),
        np.arange(len(ids), dtype=np.uint64),
        [f"train.jsonl:{number + 1}" for number in range(len(ids))],
        DataReport("train.jsonl"),
        substitutions={
            name: Substitutions.of(
                [
                    [Substitution(int(begins), int(begins), np.array(text, dtype=np.int32))]
                    for text, begins in zip(texts, bos or [], strict=True)
                ]
            )
            for name, texts in (prefixes or {}).items()
        },
    )


def documents_of_length(count: int, length: int) -> Documents:
    """Return documents whose tokens are all 0."""
    return documents_of([[0] * length] * count, [[0] + [1] * (length - 1)] * count)


def random_documents(lengths: list[int], prefixes: dict[str, list[int]] | None = None, seed: int = 0) -> Documents:
    """Make documents and prefixes of these lengths with random tokens below 251; some documents begin with a BOS.

    About 0.7 of the tokens are targets.
    """
    random = np.random.default_rng(seed)
    bos = [bool(number % 3) for number in range(len(lengths))]
    ids = [random.integers(3, 251, length).tolist() for length in lengths]
    for document, begins in zip(ids, bos, strict=True):
        document[0] = BOS if begins else document[0]
    targets = [[0, *(random.random(length - 1) < 0.7).tolist()] for length in lengths]
    texts = {
        name: [random.integers(3, 251, length).tolist() for length in of_teacher]
        for name, of_teacher in (prefixes or {}).items()
    }
    return documents_of(ids, targets, texts, bos)


def log_probs(folder: Path, name: str, documents: Documents, document: int) -> Tensor:
    """Return log p at every position of one document, from the folder's model in plain transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
    ids = torch.from_numpy(documents.tokens(document).astype(np.int64))
    with torch.no_grad():
        return torch.log_softmax(model(ids[None]).logits[0], -1)
