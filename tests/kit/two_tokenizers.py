"""Real tokenizers that cut the same text differently, trained on the demo's text, and models for them.

small, large    byte-level BPE of 300 and 512 tokens; the second one has Llama 3's pattern of words and no <s>
pieces          SentencePiece's way: BPE over "▁", bytes for unknown characters, a space before each text (Llama 2)
mistral         the same, but no space is added before a text that has one, nor behind a special token (Mistral)
gemma           the same, but no space is added at all, and runs of two spaces are also added tokens (Gemma)
deepseek        byte-level BPE of 700 tokens with DeepSeek's patterns of words and its names of special tokens
words           WordPiece, whose tokens have no exact bytes
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kit.families import build
from kit.runs import write_records
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from stillhouse.data.render.token_bytes import BYTE_OF
from stillhouse.tools.demo.corpus import collect_split

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NAMES = ["small", "large", "pieces", "mistral", "gemma", "deepseek"]
#: settings of runs, with K ids per token
K = 16
GOLD = {"teacher.cross_tokenizer": "gold", "teacher.top_k": K}


@cache
def demo_text() -> list[str]:
    return [document.text[:2000] for document in collect_split("held_out")[:40]]


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A new object of the tokenizer, which tests may change."""
    backend = Tokenizer.from_str(_trained(name))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if name == "large":
        roles = {"eos_token": "<|end|>"}
    if name == "deepseek":
        roles = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def write_model(folder: Path, name: str, *, family: str, seed: int) -> Path:
    made = tokenizer(name)
    build(family, vocab_size=len(made), seed=seed).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def write_pair(folder: Path) -> Path:
    """Write a student and a teacher with different tokenizers, and data."""
    write_model(folder / "student", "small", family="llama", seed=1)
    write_model(folder / "teacher", "large", family="qwen3", seed=2)
    for name, texts in (("train.jsonl", demo_text()[:12]), ("eval.jsonl", demo_text()[12:16])):
        write_records(folder / name, [{"text": text[:150]} for text in texts])
    return folder


def bytes_of(made: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[bytes]:
    """The bytes of plain tokens, read from the vocabulary in another way than in the code under test."""
    pieces = []
    for token in made.convert_ids_to_tokens(list(ids)):
        if token.startswith("<0x") and len(token) == 6:
            pieces.append(bytes.fromhex(token[3:5]))
        elif isinstance(made.backend_tokenizer.decoder, decoders.ByteLevel):
            pieces.append(bytes(BYTE_OF[character] for character in token))
        else:
            pieces.append(token.replace("▁", " ").encode())
    return pieces


def vocabulary_bytes(made: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """The bytes of each token that is not special."""
    special = set(made.all_special_ids) | {at for at, token in made.added_tokens_decoder.items() if token.special}
    ids = [index for index in range(len(made)) if index not in special]
    return dict(zip(ids, bytes_of(made, ids), strict=True))


def are_characters(piece: bytes) -> bool:
    return piece.decode(errors="replace").encode() == piece


def cut_within_a_text(made: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text behind a character that no token has together with another one."""
    (border,) = made.convert_tokens_to_ids(["<0x01>"])
    ids = made("\x01" + text, add_special_tokens=False)["input_ids"]
    return ids[ids.index(border) + 1 :]


@cache
def _trained(name: str) -> str:
    if name == "large":
        return _byte_level(512, ["<|end|>", "<|im_end|>"], PATTERN).to_str()
    if name == "deepseek":
        special = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
        return _with_begin(_byte_level(700, special, r"\p{N}{1,3}", DEEPSEEK), special[0]).to_str()
    makers = {"small": _small, "mistral": _mistral, "gemma": _gemma, "words": _words, "pieces": _pieces}
    return makers[name]().to_str()


def _small() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trained = _bpe(backend, 300, ["<s>", "</s>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet())
    return _with_begin(trained)


def _byte_level(size: int, special: list[str], *patterns: str) -> Tokenizer:
    """A byte-level BPE model over words that the patterns cut."""
    backend = Tokenizer(models.BPE())
    by_words = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*by_words, by_bytes])
    backend.decoder = decoders.ByteLevel()
    return _bpe(backend, size, special, pre_tokenizers.ByteLevel.alphabet())


def _pieces() -> Tokenizer:
    backend = _over_spaces(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _with_begin(backend)


def _mistral() -> Tokenizer:
    backend = _over_spaces(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], size=500, by_words=True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _with_begin(backend)


def _gemma() -> Tokenizer:
    backend = _over_spaces(["<unk>", "<s>", "</s>"], size=400)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    size = backend.get_vocab_size()
    backend.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("\n\n", normalized=False)])
    assert backend.get_vocab_size() == size, "expected tokens that the model has, too"
    return _with_begin(backend)


def _over_spaces(special: list[str], size: int = 300, *, by_words: bool = False) -> Tokenizer:
    """A byte-pair model over texts with "▁" for spaces, which writes characters that it does not have as bytes.

    by_words: a token has no space after another character.
    """
    numbers = [f"<0x{byte:02X}>" for byte in range(256)]
    plain = Tokenizer(models.BPE())
    plain.normalizer = normalizers.Replace(" ", "▁")
    if by_words:
        plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    learned = json.loads(_bpe(plain, size, special, list("etaoinshr▁\n")).to_str())["model"]
    contents = [*special, *numbers, *(token for token in learned["vocab"] if token not in special)]
    vocabulary = {token: index for index, token in enumerate(contents)}
    merges = [tuple(pair) for pair in learned["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.add_special_tokens(special)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _words() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(demo_text(), trainer)
    return backend


def _bpe(backend: Tokenizer, size: int, special: list[str], alphabet: list[str]) -> Tokenizer:
    options = {"special_tokens": special, "initial_alphabet": sorted(alphabet)}
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)
    backend.train_from_iterator(demo_text(), trainer)
    return backend


def _with_begin(backend: Tokenizer, begin: str = "<s>") -> Tokenizer:
    special = [(begin, backend.token_to_id(begin))]
    backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    return backend
