"""Loads tokenizers, and checks that student and teacher have the same tokenizer.

A divergence between two distributions is meaningful only if id v represents the same text for both models. Also, the
teacher's predictions are reliable only for texts that are tokenized as in its own training. So everything that
determines ids is compared: vocabulary, merges or scores, added tokens, normalizer, pre-tokenizer. BOS, EOS and pad
tokens may differ (as between a base student and an instruct teacher), and so may the chat templates. The student's
tokens and template are used. A head may have more rows than there are tokens (padding).
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from stillhouse.data.record import RecordError
from stillhouse.hashing import json_hash
from stillhouse.libraries import reading, writing

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
#: the parts of a tokenizer's identity, and their names in errors. pieces: the merges of a byte-pair model, [piece,
#: score] of a unigram model, else empty. settings: normalizer, pre-tokenizer and the model's options
_PARTS = {"vocabulary": "id", "added": "added token", "pieces": "merge or score number", "settings": "the"}
_NO_SETTING = ("vocab", "merges", "dropout")
#: the names of files that may contain a tokenizer's vocabulary
_OF_TOKENIZER = re.compile(r"(?i)token|vocab|merges|spiece|sentencepiece|.*\.(model|tiktoken|spm)$")
TOKENIZER_FILE = "tokenizer.json"
#: the texts for comparing a tokenizer with its file. The first word is short, because three tokens are not compared
PROBES = ("A still: two  spaces,\na line\n\nbreak and\ttabs.", "f (x) =\n    x + 1024", "Я и мир. 你好 سلام é 🙂")
#: the largest id that a token may have; the largest known vocabularies have about a million tokens
MAX_IDS = 10_000_000
#: a character for which a tokenizer has no token unless it has tokens for all bytes or an unknown token
_RARE = "\U000f1234"
#: the characters that represent bytes in byte-level tokenizers
_BYTES = frozenset(ByteLevel.alphabet())


def load_tokenizer(
    name_or_path: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a hub id. Raises ValueError if there is no tokenizer or if it is damaged. To
    detect damage, the tokenizer is used once and saved to a temporary folder.
    """
    what = f"the tokenizer of {name_or_path!r}"
    where = "cannot be loaded: there is no such folder, and it could not be loaded from the hub"
    if os.path.isdir(name_or_path):
        where = "cannot be read (expected tokenizer.json in that folder)"
        if not any(map(_OF_TOKENIZER.match, os.listdir(name_or_path))):
            # transformers would make an empty tokenizer of the model's type
            raise ValueError(
                f"{name_or_path} has no tokenizer: expected tokenizer.json in this folder, as "
                "AutoTokenizer.from_pretrained(…).save_pretrained(folder) writes it"
            )
    with reading(f"{what} {where}"):
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path, revision=revision, trust_remote_code=trust_remote_code
        )
    unusable = f"{what} cannot be used"
    with reading(unusable):
        tokenizer("a")
        vocabulary = tokenizer.get_vocab()
        token, largest = max(vocabulary.items(), key=lambda item: int(item[1]), default=("", 0))
    if largest > MAX_IDS:  # serialising takes time in proportion to the largest id
        raise ValueError(
            f"{unusable}: token {token!r:.80} of {len(vocabulary):,} has the id {largest:,}, expected at most "
            f"{MAX_IDS:,}"
        )
    with reading(unusable), TemporaryDirectory() as folder:
        if tokenizer.is_fast:
            tokenizer.backend_tokenizer.to_str()
        tokenizer.save_pretrained(folder)  # every checkpoint also does this
    if tokenizer.is_fast:
        with reading(f"{what} {where}"):
            path = cached_file(
                name_or_path, TOKENIZER_FILE, revision=revision, _raise_exceptions_for_missing_entries=False
            )
        if path is not None:
            require_tokens_of_file(what, tokenizer, path)
    return tokenizer


def require_tokens_of_file(what: str, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise ValueError if a tokenizer loses text, or decodes it differently, compared with its tokenizer.json alone.

    The class that transformers chooses may replace parts of the file. For example, transformers 5.17 reads a
    byte-level file whose configuration names a Llama class as SentencePiece, and all spaces are lost. The space
    before a text may differ (add_prefix_space). If the class only splits a text in other places, there is a warning
    and no error, because for some model types, transformers always uses its own rule in place of the file's rule.
    """
    with reading(f"{path} cannot be read"):
        file_tokenizer = Tokenizer.from_file(path)
    file_tokenizer.no_truncation()
    file_tokenizer.no_padding()
    for text in () if getattr(file_tokenizer.model, "dropout", None) else PROBES:  # with dropout, ids are random
        try:
            with reading("the vocabulary lacks characters of the probe"):
                expected = file_tokenizer.encode(text, add_special_tokens=False).ids
        except ValueError:
            continue
        with reading(f"{what} cannot be used"):
            # `tokenize` would raise an error for characters that both tokenizers leave out
            actual = tokenizer(text, add_special_tokens=False)["input_ids"]
        decoded = file_tokenizer.decode(expected).strip()
        is_same_text = file_tokenizer.decode(actual).strip() == decoded
        if is_same_text and tokenizer.backend_tokenizer.decode(expected).strip() == decoded:
            after_prefix = min(len(actual), len(expected)) - 3
            if actual[-after_prefix:] != expected[-after_prefix:]:
                warnings.warn(
                    f"{what}: transformers reads it with {type(tokenizer).__name__}, which splits texts in other "
                    f"places than its {TOKENIZER_FILE} defines; a server that reads only this file gets other tokens",
                    stacklevel=3,
                )
                return
            continue
        read, there = (tokenizer.convert_ids_to_tokens(ids[:8]) for ids in (actual, expected))
        raise ValueError(
            f"{what} is not read as its {TOKENIZER_FILE} says: transformers {transformers.__version__} reads it with "
            f"the class {type(tokenizer).__name__}, for which {text!r} begins with {read}; with the file alone, it "
            f"begins with {there}, which that class decodes as {tokenizer.backend_tokenizer.decode(expected)!r:.60}. "
            "Expected a class that fits the file as tokenizer_class in tokenizer_config.json, such as "
            '"PreTrainedTokenizerFast", or a later transformers'
        )


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """The ids of the texts. special: whether the tokenizer adds its special tokens. They are not added again to a
    text that begins with them or with the BOS, as rendered texts do. Raises RecordError as `encode` does.
    """
    ids: list[list[int]] = encode(tokenizer, texts, add_special_tokens=special)["input_ids"]
    if not special or not (prefix := _added_before(tokenizer)):
        return ids
    return [
        text_ids[len(prefix) :] if _begins_with(text_ids[len(prefix) :], prefix, tokenizer) else text_ids
        for text_ids in ids
    ]


def is_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether a text begins with the BOS, or with the special tokens that the tokenizer puts before a text."""
    if text.startswith(tokenizer.bos_token or "\0"):
        return True
    prefix = _added_before(tokenizer)
    return bool(prefix) and _begins_with(tokenize(tokenizer, [text], special=False)[0], prefix, tokenizer)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any) -> Any:
    """The tokenizer's result for the texts. Raises RecordError for a character without a token if the tokenizer has
    no unknown token. Most such tokenizers raise an error themselves. But byte-pair encoding without tokens for all
    bytes would leave the character out.
    """
    lost, cause = "", None
    try:
        with reading("a text cannot be tokenized"):
            encoded = tokenizer(list(texts), return_attention_mask=False, verbose=False, **options)
    except ValueError as error:
        lost, cause = next(filter(None, (_without_token(tokenizer, text) for text in texts)), ""), error
        if not lost:
            raise RecordError(str(error)) from error
    else:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and isinstance(backend.model, BPE):
            if _is_of_bytes(backend):
                leaves_out = not backend.model.unk_token and None in map(backend.token_to_id, _BYTES)
            else:
                leaves_out = not backend.encode(_RARE, add_special_tokens=False).ids
            if leaves_out:
                lost = next(filter(None, (_left_out(tokenizer, text) for text in texts)), "")
    if lost:
        raise RecordError(
            f"the tokenizer {tokenizer.name_or_path!r} has no token for {lost!r} (U+{ord(lost):04X}), and no unknown "
            "token: remove the character, or give the tokenizer an unk_token or tokens for all bytes"
        ) from cause
    return encoded


def _added_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    framed, bare = (encode(tokenizer, ["a"], add_special_tokens=special)["input_ids"][0] for special in (True, False))
    starts = (start for start in range(len(framed)) if bare and framed[start : start + len(bare)] == bare)
    return framed[: next(starts, 0)]


def _begins_with(ids: list[int], prefix: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    bos = tokenizer.bos_token_id
    return ids[: len(prefix)] == prefix or (bos in prefix and ids[:1] == [bos])


def _without_token(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The first character of a text that the tokenizer cannot tokenize; "" if there is none."""
    for token in tokenizer.get_added_vocab():
        text = text.replace(token, "")
    for character in dict.fromkeys(text):
        try:
            with reading(character):
                tokenizer(character, add_special_tokens=False)
        except ValueError:
            return character
    return ""


def _is_of_bytes(backend: Any) -> bool:
    """Whether a tokenizer represents the bytes of a text by characters, as GPT-2's tokenizer does."""
    rare = "".join(_pieces(backend, _RARE))
    return bool(rare) and _BYTES.issuperset(rare)


def _pieces(backend: Any, text: str) -> list[str]:
    """The input of byte-pair encoding for a text without added tokens."""
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def _left_out(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The first character that the normalizer keeps but that no token contains; "" if there is none."""
    backend, end = tokenizer.backend_tokenizer, 0
    if _is_of_bytes(backend):
        for token in tokenizer.get_added_vocab():
            text = text.replace(token, "")
        missing = {byte for byte in _BYTES if backend.token_to_id(byte) is None}
        lost = missing.intersection("".join(_pieces(backend, text)))
        shown = (character for character in text if not lost.isdisjoint("".join(_pieces(backend, character))))
        return next(shown, min(lost)) if lost else ""
    for start, stop in [*backend.encode(text, add_special_tokens=False).offsets, (len(text), len(text))]:
        for character in text[end:start].split():
            normalizer = backend.normalizer
            if normalizer is None or normalizer.normalize_str(character).strip():
                return character[0]
        end = max(end, stop)
    return ""


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike[str], processor_files: Sequence[Path] = ()
) -> None:
    """Write a tokenizer's files, and copy the files of a processor of media. Raises OSError on a full disk."""
    with writing(folder):
        tokenizer.save_pretrained(folder)
    for path in processor_files:
        shutil.copyfile(path, Path(folder) / path.name)


def check_same_tokenizer(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> list[str]:
    """Return warnings about different special tokens, such as the EOS. Raises ValueError with the first difference if
    an id may represent different texts for student and teacher.
    """
    identities = _identity(student), _identity(teacher)
    for part, what in _PARTS.items():
        one, other = (dict(side[part] if part != "pieces" else enumerate(side[part])) for side in identities)
        if one != other:
            name = min(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
            shown = [f"{side[name]!r:.160}" if name in side else "absent" for side in (one, other)]
            sizes = f" ({len(one)} and {len(other)} in all)" if len(one) != len(other) else ""
            raise ValueError(
                f"student and teacher have different tokenizers: {what} {name} is {shown[0]} for the student, "
                f"{shown[1]} for the teacher{sizes} (student {student.name_or_path!r}, teacher "
                f"{teacher.name_or_path!r}); choose a teacher and a student that share one tokenizer"
            )
    lines = []
    for role in _ROLES:
        tokens = [getattr(tokenizer, role) for tokenizer in (student, teacher)]
        if tokens[0] != tokens[1]:
            words = f"{tokens[0]!r} for the student, {tokens[1]!r} for the teacher"
            lines.append(f"{role} is {words}; the student's is used")
    ids = [tokenizer("a")["input_ids"] for tokenizer in (student, teacher)]
    if ids[0] != ids[1]:
        lines.append(
            f"the tokenizers put different special tokens around a text ('a' becomes {ids[0]} for the student, "
            f"{ids[1]} for the teacher); the student's special tokens are used"
        )
    return lines


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A sha256 of everything that `check_same_tokenizer` compares. Tokenizers with equal hashes pass the check."""
    return json_hash(_identity(tokenizer))


def text_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A sha256 of the chat template and the settings for decoding, which `tokenizer_fingerprint` leaves out."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    return json_hash(
        {
            "decoder": backend.get("decoder"),
            "added": backend.get("added_tokens"),
            "special": sorted(tokenizer.all_special_ids),
            "clean_up": bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
            "template": tokenizer.chat_template,
        }
    )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, which: str) -> list[str]:
    """Raise ValueError if a head with `rows` rows has no row for a token. which: "student" or "teacher".

    For an added token without a row, a warning is returned: some text-only models have added tokens for images, and
    texts do not contain these tokens (`Documents.check_ids` checks this).
    """
    beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= rows)
    if not beyond:
        return []
    added = tokenizer.added_tokens_decoder
    index, token = next((pair for pair in beyond if pair[0] not in added), beyond[0])
    shown = f"the {which}'s head has {rows} rows, but its tokenizer has id {index} ({token!r})"
    if index not in added:
        raise ValueError(f"{shown}: model and tokenizer do not belong together")
    return [f"{shown}; this is harmless as long as no text contains this token"]


def _identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Everything that determines the ids of a text, except the special tokens before and after it."""
    parts: dict[str, Any] = {
        "vocabulary": {index: token for token, index in tokenizer.get_vocab().items()},
        "added": {index: token.content for index, token in tokenizer.added_tokens_decoder.items()},
    }
    if not tokenizer.is_fast:
        return parts | {"pieces": [], "settings": {"class": type(tokenizer).__name__}}
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model = backend["model"]
    scores = model["vocab"] if isinstance(model.get("vocab"), list) else []
    settings = {"normalizer": backend["normalizer"], "pre-tokenizer": backend["pre_tokenizer"]}
    settings |= {f"model's {key}": value for key, value in model.items() if key not in _NO_SETTING}
    return parts | {"pieces": model.get("merges", scores), "settings": settings}
