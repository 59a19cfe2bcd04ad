"""Prompts: what a model writes after, from records with and without completions."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.config_cases import refused_calls
from kit.documents import ANSWER, BOS, QUESTION, load_records
from kit.toy_tokenizer import PLAIN_TEMPLATE, Chat, toy_tokenizer

from stillhouse.data import DataError, PackedSequences

load_prompts = partial(load_records, prompts=True, keep_records=True)


@pytest.mark.parametrize("more", [{}, {"completion": "four"}])
def test_a_prompt_ends_where_the_completion_of_the_same_record_begins(tmp_path: Path, more: dict[str, str]) -> None:
    record = {"prompt": "two and two?", **more}
    prompts = load_prompts(tmp_path, [record])
    documents = load_records(tmp_path, [record | {"completion": "four"}])
    first = int(np.flatnonzero(documents.targets(0))[0])
    assert prompts.tokens(0).tolist() == documents.tokens(0)[:first].tolist()
    assert not prompts.targets_N.any()
    assert prompts.records == [record]


@pytest.mark.parametrize("chat", ["plain", "generation", "reasoning"])
@pytest.mark.parametrize(
    "record", [{"messages": [QUESTION]}, {"messages": [QUESTION, ANSWER]}, {"prompt": [QUESTION]}]
)
def test_a_chat_ends_with_the_assistants_header(tmp_path: Path, chat: Chat, record: dict[str, Any]) -> None:
    tokenizer = toy_tokenizer(chat=chat)
    expected = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(load_prompts(tmp_path, [record], chat=chat).tokens(0)) == expected


@pytest.mark.parametrize("space", [" ", ""])
def test_a_prompt_that_ends_with_a_space_is_warned_of(tmp_path: Path, space: str) -> None:
    """In training, the first token of the answer has the space; in use, the prompt has it as a token."""
    tokenizer = toy_tokenizer(chat="plain")
    turn = "{{ message.role + ':" + space + "' + message.content.strip() + '</s>' }}"
    prompt = "{% if add_generation_prompt %}{{ 'assistant:" + space + "' }}{% endif %}"
    tokenizer.chat_template = "{% for message in messages %}" + turn + "{% endfor %}" + prompt
    chats = [{"messages": [QUESTION, {"role": "assistant", "content": f"{word} is"}]} for word in ("capital", "four")]
    texts = [{"prompt": f"Answer:{space}", "completion": "capital"}]
    for records, agree in ((chats, not space), (texts, True)):
        prompts, documents = load_prompts(tmp_path, records, tokenizer), load_records(tmp_path, records, tokenizer)
        first = int(np.flatnonzero(documents.targets(0))[0])
        assert (prompts.tokens(0).tolist() == documents.tokens(0)[:first].tolist()) == agree
        for report in (prompts.report, documents.report):
            warnings = [line for line in report.warnings if "ends with a space" in line]
            assert len(warnings) == bool(space)
            assert all("train.jsonl:1: the prompt ends" in line for line in warnings)
            assert all(line.endswith(f"(such records: {len(records)})") for line in warnings)


_ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
_WRITES_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize(
    ("template", "of_tools", "of_prompt"),
    [
        (_WRITES_TOOLS + PLAIN_TEMPLATE, False, False),
        (PLAIN_TEMPLATE, True, False),
        (_WRITES_TOOLS + PLAIN_TEMPLATE.replace("add_generation_prompt", "false"), False, True),
        # as in Mistral's, a turn of the assistant begins directly behind that of the user
        (_WRITES_TOOLS + "{% for message in messages %}{{ message.content + '</s>' }}{% endfor %}", False, False),
    ],
    ids=range(4),
)
def test_warnings_of_templates(tmp_path: Path, template: str, of_tools: bool, of_prompt: bool, prompts: bool) -> None:
    tokenizer = toy_tokenizer(chat="plain")
    tokenizer.chat_template = template
    records = [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, ANSWER], "tools": [_ADD]}]
    warnings = "".join(load_records(tmp_path, records, tokenizer, max_tokens=256, prompts=prompts).report.warnings)
    assert ("does not write the descriptions of tools" in warnings) == of_tools
    heading = r"'<|im_start|>assistant\n', with which the template begins a turn of the assistant"
    assert (heading in warnings) == (of_prompt and prompts)


def test_keys_are_those_of_documents_and_the_fingerprint_has_all_columns(tmp_path: Path) -> None:
    records = [{"prompt": f"{number} and two?", "completion": f"{number + 2}"} for number in range(40)]
    prompts, documents = load_prompts(tmp_path, records), load_records(tmp_path, records)
    assert prompts.keys_D.tolist() == documents.keys_D.tolist()
    first, second = (load_prompts(tmp_path, [{"prompt": "a", "answer": answer}]) for answer in "bc")
    assert first.fingerprint() != second.fingerprint()


@pytest.mark.parametrize(("call", "problem"), refused_calls("prompts"))
def test_a_record_without_a_usable_prompt_is_refused_by_its_line(tmp_path: Path, call: str, problem: str) -> None:
    record = eval(call)
    with pytest.raises(DataError, match=rf"train.jsonl:1: .*{problem}"):
        load_prompts(tmp_path, [record], max_tokens=24, chat="plain")


def test_an_empty_prompt_needs_a_beginning_of_sequence(tmp_path: Path) -> None:
    assert load_prompts(tmp_path, [{"prompt": ""}]).tokens(0).tolist() == [BOS]
    records, without_bos = [{"prompt": "a"}, {"prompt": ""}], toy_tokenizer(adds_bos=False)
    with pytest.raises(DataError, match=r"train\.jsonl:2: the prompt has no token"):
        load_prompts(tmp_path, records, without_bos)
    documents = load_prompts(tmp_path, records, without_bos, on_error="skip")
    assert (documents.report.skipped, len(documents)) == (1, 1)


def test_weights_and_numbers_per_token_are_shifted_like_labels(tmp_path: Path) -> None:
    documents = load_records(tmp_path, [{"prompt": "a b", "completion": "c d e"}] * 3)
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
