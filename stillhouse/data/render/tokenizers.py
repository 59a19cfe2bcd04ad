"""Loads tokenizers and checks that student and teacher have the same one.

A divergence between two distributions has a meaning only if id v is the same piece of text for both models. And the
teacher's predictions are reliable only for texts that are tokenized as in its own training. So everything that
decides ids is compared: vocabulary, merges or scores, added tokens, normalizer, pre-tokenizer. The tokens that begin,
end or pad a sequence may differ (as between a base student and an instruct teacher), and so may the chat template;
the student's are used. A head may have more rows than there are tokens (padding).
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from stillhouse.hashing import json_hash
from stillhouse.libraries import reading, writing

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_NO_SETTING = ("vocab", "merges", "dropout")
#: the files in which tokenizers have their vocabulary
_OF_TOKENIZER = re.compile(r"(?i)token|vocab|merges|spiece|sentencepiece|.*\.(model|tiktoken|spm)$")
#: the largest id that a token may have; the largest vocabularies have a million tokens
MOST_IDS = 10_000_000


def load_tokenizer(
    name_or_path: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a hub id, which is passed on unchanged.

    Raises ValueError if there is none or if it is damaged, even if the damage would show only when it is used or
    saved.
    """
    what = f"the tokenizer of {name_or_path!r}"
    where = "cannot be loaded: there is no such folder, and it could not be loaded from the hub"
    if os.path.isdir(name_or_path):
        where = "cannot be read (expected tokenizer.json in that folder)"
        if not any(map(_OF_TOKENIZER.match, os.listdir(name_or_path))):
            # transformers would make an empty one of the model's type
            raise ValueError(
                f"{name_or_path} has no tokenizer: expected tokenizer.json beside the model, as "
                "AutoTokenizer.from_pretrained(…).save_pretrained(folder) writes it"
            )
    with reading(f"{what} {where}"):
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path, revision=revision, trust_remote_code=trust_remote_code
        )
    with reading(f"{what} cannot be used"), TemporaryDirectory() as folder:
        _require_dense(tokenizer)
        tokenizer("a")
        _identity(tokenizer)
        tokenizer.save_pretrained(folder)  # as each checkpoint will do
    return tokenizer


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[list[int]]:
    """The ids of each text. special: with the tokenizer's special tokens around it."""
    return tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike[str]) -> None:
    """Write a tokenizer's files. Raises OSError if that fails, for a full disk for example."""
    with writing(folder):
        tokenizer.save_pretrained(folder)


def _require_dense(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a token id above `MOST_IDS`: the library counts up to the largest id when it saves."""
    vocabulary = tokenizer.get_vocab()
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", 0))
    if largest > MOST_IDS:
        raise ValueError(
            f"token {token!r:.80} of {len(vocabulary):,} has the id {largest:,}, expected at most {MOST_IDS:,}"
        )


def check_same_tokenizer(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> list[str]:
    """Warnings about special tokens that differ between student and teacher, such as the end of sequence.

    Raises ValueError, naming the first difference, if the same ids may mean different text for the two.
    """
    difference = _first_difference(_identity(student), _identity(teacher))
    if difference:
        raise ValueError(
            f"student and teacher have different tokenizers: {difference} "
            f"(student {student.name_or_path!r}, teacher {teacher.name_or_path!r}); "
            "choose a teacher and a student that share one tokenizer"
        )
    return list(_role_warnings(student, teacher))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A sha256 over what `check_same_tokenizer` compares: two tokenizers with equal hashes pass that check."""
    return json_hash(asdict(_identity(tokenizer)))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, which: str) -> list[str]:
    """Check that a head of `rows` rows covers the tokenizer; returns warnings. More rows than tokens are fine.

    An added token without a row causes only a warning: some text-only models have such tokens for images, and no text
    contains them (`Documents.check_ids` checks that). Raises ValueError for any other token without a row.
    which: "student" or "teacher".
    """
    beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= rows)
    if not beyond:
        return []
    added = tokenizer.added_tokens_decoder
    index, token = next((pair for pair in beyond if pair[0] not in added), beyond[0])
    shown = f"the {which}'s head has {rows} rows, but its tokenizer has id {index} ({token!r})"
    if index not in added:
        raise ValueError(f"{shown}: model and tokenizer do not belong together")
    return [f"{shown}; this is harmless as long as no text contains it"]


@dataclass(frozen=True)
class _Identity:
    """Everything that decides the ids of a text, except the special tokens before and after it."""

    vocabulary: dict[int, str]
    added: dict[int, str]
    pieces: list[Any]  # merges of a byte-pair model, [piece, score] of a unigram model, else empty
    settings: dict[str, Any]  # normalizer, pre-tokenizer, the model's switches


def _identity(tokenizer: PreTrainedTokenizerBase) -> _Identity:
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    if not tokenizer.is_fast:
        return _Identity(vocabulary, added, [], {"class": type(tokenizer).__name__})
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model = backend["model"]
    scores = model["vocab"] if isinstance(model.get("vocab"), list) else []
    settings = {"normalizer": backend["normalizer"], "pre-tokenizer": backend["pre_tokenizer"]}
    settings |= {f"model's {key}": value for key, value in model.items() if key not in _NO_SETTING}
    return _Identity(vocabulary, added, model.get("merges", scores), settings)


def _first_difference(student: _Identity, teacher: _Identity) -> str:
    """The first difference, in words; "" if there is none."""
    return (
        _id_difference("id", student.vocabulary, teacher.vocabulary)
        or _id_difference("added token", student.added, teacher.added)
        or _piece_difference(student.pieces, teacher.pieces)
        or _setting_difference(student.settings, teacher.settings)
    )


def _id_difference(what: str, student: dict[int, str], teacher: dict[int, str]) -> str:
    if student == teacher:
        return ""
    first = min(index for index in student.keys() | teacher.keys() if student.get(index) != teacher.get(index))
    sides = [repr(names[first]) if first in names else "absent" for names in (student, teacher)]
    sizes = f" ({len(student)} and {len(teacher)} in all)" if len(student) != len(teacher) else ""
    return f"{what} {first} is {sides[0]} for the student, {sides[1]} for the teacher{sizes}"


def _piece_difference(student: list[Any], teacher: list[Any]) -> str:
    for rank, (one, other) in enumerate(zip(student, teacher, strict=False)):
        if one != other:
            return f"merge or score number {rank} is {one!r} for the student, {other!r} for the teacher"
    if len(student) != len(teacher):
        return f"the student has {len(student)} merges or scores, the teacher {len(teacher)}"
    return ""


def _setting_difference(student: dict[str, Any], teacher: dict[str, Any]) -> str:
    for name in sorted(student.keys() | teacher.keys()):
        if student.get(name) != teacher.get(name):
            one, other = (shorten(str(side.get(name)), 160) for side in (student, teacher))
            return f"the {name} is {one} for the student, {other} for the teacher"
    return ""


def _role_warnings(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> Iterator[str]:
    for role in _ROLES:
        tokens = [getattr(tokenizer, role) for tokenizer in (student, teacher)]
        if tokens[0] != tokens[1]:
            yield f"{role} is {tokens[0]!r} for the student, {tokens[1]!r} for the teacher; the student's is used"
    ids = [tokenizer("a")["input_ids"] for tokenizer in (student, teacher)]
    if ids[0] != ids[1]:
        yield (
            f"the tokenizers put different special tokens around a text ('a' becomes {ids[0]} for the student, "
            f"{ids[1]} for the teacher); the student's special tokens are used"
        )
