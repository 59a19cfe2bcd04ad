"""Tokenizers that count as the same, and errors that name a difference."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.config_cases import refused_calls
from kit.documents import load_records
from kit.toy_tokenizer import toy_backend, toy_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: F401 (messages.yaml)
from transformers import PreTrainedTokenizerFast

from stillhouse.agents.reply_format import OrdinaryText
from stillhouse.data import DataError, check_same_tokenizer, check_vocabulary, load_tokenizer, tokenizer_fingerprint
from stillhouse.data.render.tokenizers import require_tokens_of_file
from stillhouse.libraries import is_at_least


def changed(change: Callable[[dict[str, Any]], object]) -> PreTrainedTokenizerFast:
    state = json.loads(toy_backend().to_str())
    change(state)
    return toy_tokenizer(backend=Tokenizer.from_str(json.dumps(state)))


def swap(values: Any, one: Any, other: Any) -> None:
    values[one], values[other] = values[other], values[one]


def swap_special(state: dict[str, Any]) -> None:
    swap(state["model"]["vocab"], "<|im_start|>", "<|im_end|>")
    state["added_tokens"][4]["content"], state["added_tokens"][5]["content"] = "<|im_end|>", "<|im_start|>"


def with_token(token: str) -> PreTrainedTokenizerFast:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([token])
    return tokenizer


def unigram(score: float) -> PreTrainedTokenizerFast:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", score)]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces, unk_id=0)))


def words(normalizer: Any) -> PreTrainedTokenizerFast:
    """A model with neither merges nor scores."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.normalizer = pre_tokenizers.Whitespace(), normalizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_the_same_tokenizer_saved_and_loaded(tmp_path: Path) -> None:
    """Also with another chat template."""
    toy_tokenizer(chat="plain").save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    pairs = ((toy_tokenizer(chat="generation"), loaded), (unigram(-2.0), unigram(-2.0)), (words(None), words(None)))
    for student, teacher in pairs:
        assert check_same_tokenizer(student, teacher) == []
        assert tokenizer_fingerprint(student) == tokenizer_fingerprint(teacher)


@pytest.mark.parametrize(("call", "message"), refused_calls("tokenizers"))
def test_a_difference_is_named(call: str, message: str) -> None:
    student, teacher = eval(call)
    with pytest.raises(ValueError, match=message):
        check_same_tokenizer(student, teacher)
    assert tokenizer_fingerprint(student) != tokenizer_fingerprint(teacher)


@pytest.mark.parametrize(("call", "warning"), refused_calls("other special tokens"))
def test_other_special_tokens_are_a_warning(call: str, warning: str) -> None:
    teacher = eval(call)
    (message,) = check_same_tokenizer(toy_tokenizer(), toy_tokenizer(**teacher))
    assert warning in message


def test_heads_cover_the_tokens() -> None:
    for rows in (400, 401, 512):
        assert check_vocabulary(toy_tokenizer(), rows, "teacher") == []
    (warning,) = check_vocabulary(with_token("<image>"), 400, "student")
    assert "the student's head has 400 rows, but its tokenizer has id 400 ('<image>'); this is harmless" in warning
    for tokenizer in (toy_tokenizer(), with_token("<image>")):
        with pytest.raises(
            ValueError, match=r"the teacher's head has 399 rows, .* id 399 \(.* do not belong together"
        ):
            check_vocabulary(tokenizer, 399, "teacher")


def saved_as(folder: Path, backend: Tokenizer, name: str, **options: Any) -> str:
    """Save a tokenizer whose configuration names a class of transformers."""
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name} | options))
    return str(folder)


@pytest.mark.parametrize("name", ["GemmaTokenizer", "LlamaTokenizer"])
def test_a_class_that_reads_the_file_in_another_way_is_refused(tmp_path: Path, name: str) -> None:
    """Gemma's class replaces the byte-level parts by SentencePiece's; transformers 5.17 does so for Llama's, too."""
    folder = saved_as(tmp_path, toy_backend(), name)
    if name == "GemmaTokenizer" or not is_at_least("transformers", "5.18"):
        with pytest.raises(ValueError, match=rf"not read as its tokenizer\.json says: transformers .*{name}"):
            load_tokenizer(folder)
    else:
        text = "two  and\ntwo"
        tokenizer = load_tokenizer(folder)
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_a_decoder_that_is_not_the_files_is_refused(tmp_path: Path) -> None:
    """The ids are those of the file; what the student writes would have no spaces."""
    backend = toy_backend()
    folder = saved_as(tmp_path, backend, "PreTrainedTokenizerFast")
    tokenizer = load_tokenizer(folder)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    with pytest.raises(ValueError, match="that class decodes as 'AĠ"):
        require_tokens_of_file("the tokenizer", tokenizer, str(tmp_path / "tokenizer.json"))


def test_a_class_that_cuts_texts_in_other_places_is_a_warning(tmp_path: Path) -> None:
    """transformers chooses such a class for model types such as qwen3_5, whatever tokenizer_config.json says."""
    folder = saved_as(tmp_path, toy_backend(), "Qwen2Tokenizer")
    with pytest.warns(UserWarning, match=r"which splits texts in other places than its tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizerFast"])
def test_a_space_before_the_text_may_differ(tmp_path: Path, name: str) -> None:
    """Llama's class takes add_prefix_space from the configuration; the file may say something else."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Aastilf", "▁A", "▁a"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    options: dict[str, Any] = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    for prefix in ("always", "never"):
        backend = Tokenizer(models.BPE(vocab, [("▁", "A"), ("▁", "a")], **options))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
        strip = [decoders.Strip(" ", 1, 0)] if prefix == "always" else []
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        backend.decoder = decoders.Sequence(parts)
        for number, option in enumerate(({}, {"add_prefix_space": False}, {"add_prefix_space": True})):
            load_tokenizer(saved_as(tmp_path / f"{prefix}{number}", backend, name, **option))


def test_settings_that_no_class_reads_do_not_count(tmp_path: Path) -> None:
    """A file may truncate or pad, and a vocabulary may lack characters without having an unknown token."""
    backend = toy_backend()
    backend.enable_truncation(3)
    load_tokenizer(saved_as(tmp_path / "truncated", backend, "PreTrainedTokenizerFast"))
    backend.no_truncation()
    backend.enable_padding(length=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_tokenizer(saved_as(tmp_path / "padded", backend, "PreTrainedTokenizerFast"))
    pieces = Tokenizer(models.Unigram([("▁a", -1.0), ("a", -2.0), ("▁", -3.0)]))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=pieces).save_pretrained(tmp_path / "few")
    load_tokenizer(str(tmp_path / "few"))


def without_unknown(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the words "a" and "b" without an unknown token."""
    ids = {"</s>": 0, "a": 1, "b": 2}
    made: dict[str, Any] = {
        "unigram": models.Unigram([("</s>", 0.0), ("a", -1.0), ("b", -1.0)]),
        "wordpiece": models.WordPiece(ids, unk_token="[UNK]"),
        "wordlevel": models.WordLevel(ids, unk_token="[UNK]"),
        "bpe": models.BPE(ids, []),
    }
    backend = Tokenizer(made[kind])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content + '</s>' }}{% endfor %}"
    return tokenizer


MESSAGES = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b 🙂"}]}


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "wordlevel", "bpe"])
@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ({"text": "a 🙂"}, {"text": "a b"}),
        ({"prompt": "🙂", "completion": "b"}, {"prompt": "a", "completion": "b"}),
        ({"prompt": "a", "completion": "🙂"}, {"prompt": "a", "completion": "b"}),
        (MESSAGES, {"messages": [*MESSAGES["messages"][:1], {"role": "assistant", "content": "b"}]}),
    ],
    ids=["text", "prompt", "completion", "messages"],
)
def test_a_character_without_token(tmp_path: Path, kind: str, bad: dict[str, Any], good: dict[str, Any]) -> None:
    """Byte-pair encoding would leave it out, and the others raise an error without the record."""
    tokenizer = without_unknown(kind)
    message = r"train\.jsonl:2: the tokenizer '' has no token for '🙂' \(U\+1F642\), and no unknown token"
    with pytest.raises(DataError, match=message):
        load_records(tmp_path, [good, bad, good], tokenizer)
    documents = load_records(tmp_path, [good, bad, good], tokenizer, on_error="skip")
    assert (len(documents), documents.report.skipped) == (2, 1)
    assert re.search(message, documents.report.reasons[0])
    alone = load_records(tmp_path, [good, good], tokenizer)
    assert np.array_equal(alone.tokens_N, documents.tokens_N)


def test_a_character_of_which_some_bytes_have_no_token(tmp_path: Path) -> None:
    """A byte-level tokenizer that was trained without `initial_alphabet` has only the bytes of its texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(special_tokens=["</s>"], show_progress=False)
    backend.train_from_iterator(["the cat sat é \U000f1234"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    texts = ["the cat</s> sat é\U000f1234", "the Ã", "the cat\tsat", "Q", "🙂"]  # Ã has one of the bytes of é
    documents = load_records(tmp_path, [{"text": text} for text in texts], tokenizer, on_error="skip")
    assert (len(documents), documents.report.skipped) == (1, 4)
    named = [re.findall(r"no token for ('.+?') ", line) for line in documents.report.reasons]
    assert named == [[repr(character)] for character in ("Ã", "\t", "Q", "🙂")]


def test_a_character_without_a_token_in_a_prefix_and_in_a_reply(tmp_path: Path) -> None:
    tokenizer = without_unknown("unigram")
    with pytest.raises(
        DataError, match=r"train\.jsonl:1: the prefix of teacher 'one': the tokenizer '' has no token"
    ):
        load_records(tmp_path, [{"text": "a"}], tokenizer, prefixes={"one": "🙂"})
    with pytest.raises(ValueError, match=r"rollout\.tools: the tokenizer '' has no token for '🙂'"):
        OrdinaryText(tokenizer, "rollout.tools").ids("a 🙂")
