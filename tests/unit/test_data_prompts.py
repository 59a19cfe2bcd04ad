"""Prompts: what a model writes after, from records with and without completions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.data import DataError, Documents, PackedSequences, load_documents

BOS = 1
QUESTION = {"role": "user", "content": "two and two?"}
ANSWER = {"role": "assistant", "content": "four"}


def load(folder: Path, records: list[Any], max_tokens: int = 64, **options: Any) -> Documents:
    path = folder / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    tokenizer = options.pop("tokenizer", None) or toy_tokenizer(chat=options.pop("chat", None))
    return load_documents(path, tokenizer, max_tokens=max_tokens, keep_records=True, **{"prompts": True} | options)


@pytest.mark.parametrize("more", [{}, {"completion": "four"}])
def test_a_prompt_ends_where_the_completion_of_the_same_record_begins(tmp_path: Path, more: dict[str, str]) -> None:
    documents = load(tmp_path, [{"prompt": "two and two?", **more}])
    whole = load(tmp_path, [{"prompt": "two and two?", "completion": "four"}], prompts=False)
    first = int(np.flatnonzero(whole.targets(0))[0])
    assert documents.tokens(0).tolist() == whole.tokens(0)[:first].tolist()
    assert not documents.targets_N.any()
    assert documents.records == [{"prompt": "two and two?", **more}]


@pytest.mark.parametrize("chat", ["plain", "generation", "reasoning"])
@pytest.mark.parametrize("answers", [[], [ANSWER]])
def test_a_chat_ends_with_the_beginning_of_the_assistants_turn(
    tmp_path: Path, chat: str, answers: list[dict[str, str]]
) -> None:
    tokenizer = toy_tokenizer(chat=chat)
    expected = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=False)
    for records in ([{"messages": [QUESTION, *answers]}], [{"prompt": [QUESTION]}]):
        documents = load(tmp_path, records, chat=chat)
        assert tokenizer.decode(documents.tokens(0)) == expected


def test_the_same_records_are_held_out_as_of_whole_documents(tmp_path: Path) -> None:
    records = [{"prompt": f"{number} and two?", "completion": f"{number + 2}"} for number in range(40)]
    prompts, whole = load(tmp_path, records), load(tmp_path, records, prompts=False)
    assert prompts.keys_D.tolist() == whole.keys_D.tolist()
    assert prompts.split(0.3)[1].sources == whole.split(0.3)[1].sources


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"prompt": "two and two? " * 9},
            "the prompt has .* tokens: expected at most 24, .* lower rollout.max_new",
        ),
        ({"prompt": 3}, "'prompt' must be a string"),
        ({"messages": [ANSWER]}, "'messages' has only turns of the assistant"),
        ({"text": "two and two?"}, "no usable columns: found text; expected one of 'prompt' or 'messages'"),
        ({"prompt": "a", "messages": [QUESTION]}, "ambiguous columns"),
    ],
)
def test_a_record_without_a_usable_prompt_is_refused_by_its_line(
    tmp_path: Path, record: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=rf"train.jsonl:1: .*{problem}"):
        load(tmp_path, [record], max_tokens=24, chat="plain")


def test_an_empty_prompt_needs_a_beginning_of_sequence(tmp_path: Path) -> None:
    assert load(tmp_path, [{"prompt": ""}]).tokens(0).tolist() == [BOS]
    without = toy_tokenizer(adds_bos=False)
    with pytest.raises(DataError, match="the prompt has no token"):
        load(tmp_path, [{"prompt": ""}], tokenizer=without)
    documents = load(tmp_path, [{"prompt": ""}, {"prompt": "a"}], tokenizer=without, on_error="skip")
    assert (documents.report.skipped, len(documents)) == (1, 1)


def test_the_fingerprint_depends_on_what_rewards_may_read(tmp_path: Path) -> None:
    first, second = (load(tmp_path, [{"prompt": "a", "answer": answer}]) for answer in "bc")
    assert first.fingerprint() != second.fingerprint()


def test_weights_and_numbers_per_token_are_shifted_like_labels(tmp_path: Path) -> None:
    documents = load(tmp_path, [{"prompt": "a b", "completion": "c d e"}] * 3, prompts=False)
    count = len(documents.tokens_N)
    object.__setattr__(documents, "per_token", {"old_log_probs": np.arange(count, dtype=np.float32)})
    object.__setattr__(documents, "weights_N", 1 / (1 + np.arange(count, dtype=np.float32)))
    for chosen in (documents, documents.select([2, 0])):
        packed = PackedSequences(chosen, max_tokens=40, seed=0, shuffle=False)
        micro_batch = packed.micro_batch(range(len(packed)))
        labels_T, values_T = micro_batch.labels_T, micro_batch.per_token["old_log_probs"].long()
        rows = micro_batch.valid_index
        assert len(rows) == int(chosen.targets_N.sum())
        assert labels_T[rows].tolist() == documents.tokens_N[values_T[rows]].tolist()
        assert micro_batch.weights_T[rows].tolist() == documents.weights_N[values_T[rows]].tolist()
        assert (micro_batch.weights_T == 0).sum() == len(labels_T) - len(rows)
