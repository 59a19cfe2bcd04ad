"""Tokenizers that count as the same, and errors that name a difference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.families import build
from kit.toy_tokenizer import save_toy_tokenizer, toy_backend, toy_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stillhouse.data import check_same_tokenizer, check_vocabulary, load_tokenizer, tokenizer_fingerprint


def changed(change: Callable[[dict[str, Any]], object]) -> PreTrainedTokenizerFast:
    """Return the toy tokenizer after an edit of its serialised form."""
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
    loaded = load_tokenizer(str(save_toy_tokenizer(tmp_path, chat="plain")))
    pairs = ((toy_tokenizer(chat="generation"), loaded), (unigram(-2.0), unigram(-2.0)), (words(None), words(None)))
    for student, teacher in pairs:
        assert check_same_tokenizer(student, teacher) == []
        assert tokenizer_fingerprint(student) == tokenizer_fingerprint(teacher)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: swap(state["model"]["vocab"], "Ġthe", "Ġ"), r"id \d+ is '\S+' for the student, '\S+' for the"),
        (
            lambda state: swap(state["model"]["merges"], 0, 1),
            r"merge or score number 0 is \['\S+', '\S+'\] for the st",
        ),
        (
            lambda state: state["model"]["merges"].pop(),
            r"score number (\d+) is .* absent for the teacher \(\d+ and \d+ in",
        ),
        (swap_special, r"id 4 is '<\|im_start\|>' for the student, '<\|im_end\|>' for the teacher"),
        (lambda state: state["added_tokens"].pop(5), r"added token 5 is '<\|im_end\|>' for the student, absent for"),
        (
            lambda state: state.update(normalizer={"type": "Lowercase"}),
            r"the normalizer is None for the student, \{'type': 'Lowercase'\} for the teacher",
        ),
        (lambda state: state["pre_tokenizer"].update(add_prefix_space=True), "the pre-tokenizer is"),
        (
            lambda state: state["model"].update(byte_fallback=True),
            "the model's byte_fallback is False for the student, True for the teacher",
        ),
    ],
)
def test_a_difference_is_named(change: Callable[[dict[str, Any]], object], message: str) -> None:
    require_difference(toy_tokenizer(), changed(change), message)


def test_differences_of_other_models_are_named() -> None:
    message = r"id 400 is absent for the student, '<tool>'.*\(400 and 401 in all\)"
    require_difference(toy_tokenizer(), with_token("<tool>"), message)
    message = r"score number 2 is \['b', -2.0\] for the student, \['b', -3.0\]"
    require_difference(unigram(-2.0), unigram(-3.0), message)
    require_difference(words(None), words(normalizers.NFC()), "the normalizer is None")


def require_difference(student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_same_tokenizer(student, teacher)
    assert tokenizer_fingerprint(student) != tokenizer_fingerprint(teacher)


@pytest.mark.parametrize(
    ("teacher", "warning"),
    [
        ({"eos_token": "<|im_end|>"}, "eos_token is '</s>' for the student, '<|im_end|>' for the teacher"),
        ({"adds_bos": False}, "different special tokens around a text ('a' becomes [1, "),
    ],
)
def test_other_special_tokens_are_a_warning(teacher: dict[str, Any], warning: str) -> None:
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


def test_no_tokenizer_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer: expected tokenizer[.]json"):
        load_tokenizer(str(tmp_path))
    # transformers makes an empty tokenizer of a model's folder without one
    build("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer: expected tokenizer[.]json"):
        load_tokenizer(str(tmp_path))
