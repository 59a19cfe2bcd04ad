"""Makes a tokenizer from the metadata of a GGUF file.

A file has the vocabulary, the merges, and the name of the rule by which texts are split before the merges. For a
rule that transformers does not know, it takes GPT-2's without a warning, and it leaves out the normalizer of a rule.
So byte-level tokenizers are built here, with the rules of the models' own tokenizer.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from stillhouse.display import name_list
from stillhouse.libraries import reading

_PREFIX = "tokenizer.ggml."
#: kinds of tokens
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


#: what splits a text before byte-level merges, by the name in a file; None: GPT-2's pattern
_SPLITS: dict[str, Any] = {
    "gpt-2": None,
    "smollm": pre_tokenizers.Digits(individual_digits=True),
    "llama-bpe": _split(_WORDS % r"\p{N}{1,3}"),
    "qwen2": _split(_WORDS % r"\p{N}"),
}
#: rules that use GPT-2's pattern after their own split
_THEN_WORDS = {"gpt-2", "smollm"}


def gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Make the tokenizer of a file. Raises ValueError for a kind of tokenizer that cannot be made or proven.

    metadata: see `GgufFile`.
    """
    what = f"{path}: its tokenizer"
    values = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    kind, rule = values.get("model"), values.get("pre")
    tokens = values.get("tokens")
    if not isinstance(tokens, list) or len({token for token in tokens if isinstance(token, str)}) != len(tokens):
        raise ValueError(f"{what} has no list of different tokens ({_PREFIX}tokens)")
    roles = {role: _token(what, values, key, tokens) for role, key in _ROLES.items()}
    options = {**roles, "chat_template": metadata.get("tokenizer.chat_template")}
    templates = [key for key in metadata if key.startswith("tokenizer.chat_template")]
    if len(templates) > 1 or not isinstance(options["chat_template"], str | None):
        raise ValueError(f"{what} has {name_list(templates)}: expected at most one chat template, a text")
    if kind == "gpt2" and isinstance(rule, str) and rule in _SPLITS and not values.get("add_space_prefix"):
        with reading(f"{what} cannot be made"):
            tokenizer = _byte_level(values, rule, options)
    elif kind == "llama" and metadata.get("general.architecture") == "gemma3":
        tokens = [_SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
        tokenizer = _gemma(path, tokens, options)
    else:
        raise ValueError(
            f"{what} is of the kind {kind!r:.60} with the rule {rule!r:.60} for splitting texts: expected gpt2 with "
            f"{name_list(_SPLITS)}, or the tokenizer of Gemma 3"
        )
    _require_equal(what, tokenizer, values, tokens, roles)
    return tokenizer


def _token(what: str, values: Mapping[str, Any], key: str, tokens: list[str]) -> str | None:
    number = values.get(f"{key}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ValueError(f"{what}: {_PREFIX}{key}_token_id is {number!r:.60}, expected 0 to {len(tokens) - 1}")
    return tokens[number]


def _byte_level(values: Mapping[str, Any], rule: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    tokens, merges = values["tokens"], [tuple(merge.split(" ")) for merge in values["merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in _THEN_WORDS)
    split = _SPLITS[rule]
    backend.pre_tokenizer = last if split is None else pre_tokenizers.Sequence([split, last])
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, values["token_type"], strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    ends = [("bos_token", "add_bos_token"), ("eos_token", "add_eos_token")]
    before, after = ([options[role]] if values.get(flag, False) else [] for role, flag in ends)
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=[(token, vocabulary[token]) for token in {*before, *after}]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **options)


def _gemma(path: Path, tokens: list[str], options: dict[str, Any]) -> PreTrainedTokenizerBase:
    """transformers' tokenizer, with the runs of spaces that it leaves out, because the file spells them otherwise."""
    with reading(f"{path}: its tokenizer cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        runs = [AddedToken(token, normalized=True) for token in tokens if len(token) > 1 and not token.strip(_SPACE)]
        tokenizer.add_tokens(runs)
    tokenizer.chat_template = options["chat_template"]
    return tokenizer


def _require_equal(
    what: str, tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any], tokens: list[str], roles: dict[str, Any]
) -> None:
    """Compare ids, roles of tokens, and what is put around a text, with the file."""
    vocabulary = tokenizer.get_vocab()
    if different := [token for number, token in enumerate(tokens) if vocabulary.get(token) != number]:
        raise ValueError(f"{what}: the ids of {len(different):,} tokens are not read, first {different[0]!r:.60}")
    if added := sorted(vocabulary.keys() - set(tokens)):
        raise ValueError(f"{what}: transformers adds tokens that the file lacks: {name_list(added)}")
    for role, token in roles.items():
        if getattr(tokenizer, role) != token:
            raise ValueError(f"{what}: {role} is read as {getattr(tokenizer, role)!r}, and the file has {token!r}")
    bare, framed = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    before = [tokenizer.bos_token_id] if values.get("add_bos_token", False) else []
    after = [tokenizer.eos_token_id] if values.get("add_eos_token", False) else []
    if framed != [*before, *bare, *after]:
        raise ValueError(f"{what}: 'a' becomes {framed}, expected {[*before, *bare, *after]}")
