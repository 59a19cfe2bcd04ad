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

from stillhouse.data.render.tokenizers import (
    check_same_tokenizer,
    check_vocabulary,
    load_tokenizer,
    tokenizer_fingerprint,
)


def changed(change: Callable[[dict[str, Any]], None]) -> PreTrainedTokenizerFast:
    """Return the toy tokenizer after an edit of its serialised form."""
    state = json.loads(toy_backend().to_str())
    change(state)
    return toy_tokenizer(backend=Tokenizer.from_str(json.dumps(state)))


def swap_ids(state: dict[str, Any]) -> None:
    vocabulary = state["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġ"] = vocabulary["Ġ"], vocabulary["Ġthe"]


def reverse_first_merges(state: dict[str, Any]) -> None:
    merges = state["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def drop_last_merge(state: dict[str, Any]) -> None:
    state["model"]["merges"].pop()


def swap_special(state: dict[str, Any]) -> None:
    vocabulary, added = state["model"]["vocab"], state["added_tokens"]
    vocabulary["<|im_start|>"], vocabulary["<|im_end|>"] = vocabulary["<|im_end|>"], vocabulary["<|im_start|>"]
    added[4]["content"], added[5]["content"] = added[5]["content"], added[4]["content"]


def no_longer_added(state: dict[str, Any]) -> None:
    del state["added_tokens"][5]


def lowercase(state: dict[str, Any]) -> None:
    state["normalizer"] = {"type": "Lowercase"}


def prefix_space(state: dict[str, Any]) -> None:
    state["pre_tokenizer"]["add_prefix_space"] = True


def byte_fallback(state: dict[str, Any]) -> None:
    state["model"]["byte_fallback"] = True


def test_the_same_tokenizer_saved_and_loaded(tmp_path: Path) -> None:
    loaded = load_tokenizer(str(save_toy_tokenizer(tmp_path, chat="plain")))
    assert check_same_tokenizer(toy_tokenizer(), loaded) == []
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(toy_tokenizer())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_ids, r"id \d+ is '\S+' for the student, '\S+' for the teacher"),
        (reverse_first_merges, r"merge or score number 0 is \['\S+', '\S+'\] for the student"),
        (drop_last_merge, r"the student has (\d+) merges or scores, the teacher \d+"),
        (swap_special, r"id 4 is '<\|im_start\|>' for the student, '<\|im_end\|>' for the teacher"),
        (no_longer_added, r"added token 5 is '<\|im_end\|>' for the student, absent for the teacher"),
        (lowercase, r"the normalizer is None for the student, \{'type': 'Lowercase'\} for the teacher"),
        (prefix_space, "the pre-tokenizer is"),
        (byte_fallback, "the model's byte_fallback is False for the student, True for the teacher"),
    ],
)
def test_a_difference_is_named(change: Callable[[dict[str, Any]], None], message: str) -> None:
    student, teacher = toy_tokenizer(), changed(change)
    with pytest.raises(ValueError, match=message):
        check_same_tokenizer(student, teacher)
    assert tokenizer_fingerprint(student) != tokenizer_fingerprint(teacher)


def test_a_token_more_on_one_side() -> None:
    teacher = toy_tokenizer()
    teacher.add_tokens(["<tool>"])
    with pytest.raises(ValueError, match=r"id 400 is absent for the student, '<tool>'.*\(400 and 401 in all\)"):
        check_same_tokenizer(toy_tokenizer(), teacher)


def test_another_chat_template_is_fine() -> None:
    student, teacher = toy_tokenizer(chat="plain"), toy_tokenizer(chat="generation")
    assert check_same_tokenizer(student, teacher) == []
    assert tokenizer_fingerprint(student) == tokenizer_fingerprint(teacher)


def test_a_base_student_beside_an_instruct_teacher_is_a_warning() -> None:
    student, teacher = toy_tokenizer(), toy_tokenizer(eos_token="<|im_end|>")
    (warning,) = check_same_tokenizer(student, teacher)
    assert "eos_token is '</s>' for the student, '<|im_end|>' for the teacher" in warning


def test_another_beginning_of_texts_is_a_warning() -> None:
    (warning,) = check_same_tokenizer(toy_tokenizer(), toy_tokenizer(adds_bos=False))
    assert "different special tokens around a text ('a' becomes [1, " in warning


def test_unigram_scores_are_compared() -> None:
    def unigram(score: float) -> PreTrainedTokenizerFast:
        pieces = [("<unk>", 0.0), ("a", -1.0), ("b", score)]
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces, unk_id=0)))

    assert check_same_tokenizer(unigram(-2.0), unigram(-2.0)) == []
    with pytest.raises(ValueError, match=r"score number 2 is \['b', -2.0\] for the student, \['b', -3.0\]"):
        check_same_tokenizer(unigram(-2.0), unigram(-3.0))


def test_word_level_models_have_neither_merges_nor_scores() -> None:
    def words(normalizer: Any) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
        backend.pre_tokenizer, backend.normalizer = pre_tokenizers.Whitespace(), normalizer
        return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")

    assert check_same_tokenizer(words(None), words(None)) == []
    with pytest.raises(ValueError, match="the normalizer is None"):
        check_same_tokenizer(words(None), words(normalizers.NFC()))


@pytest.mark.parametrize("rows", [400, 401, 512])
def test_padded_heads_are_fine(rows: int) -> None:
    assert check_vocabulary(toy_tokenizer(), rows, "teacher") == []


def test_a_head_that_is_too_small() -> None:
    with pytest.raises(ValueError, match=r"the teacher's head has 399 rows, but its tokenizer has id 399 \('"):
        check_vocabulary(toy_tokenizer(), 399, "teacher")


def test_an_added_token_beyond_the_head_is_a_warning() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["<image>"])
    (warning,) = check_vocabulary(tokenizer, 400, "student")
    assert "the student's head has 400 rows, but its tokenizer has id 400 ('<image>'); this is harmless" in warning
    with pytest.raises(ValueError, match=r"id 399 .* do not belong together"):
        check_vocabulary(tokenizer, 399, "student")


def test_no_tokenizer_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer: expected tokenizer[.]json"):
        load_tokenizer(str(tmp_path))
    # transformers makes an empty tokenizer of a model's folder without one
    build("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer: expected tokenizer[.]json"):
        load_tokenizer(str(tmp_path))
