"""Each text of a conversation is in its document, or its record is refused, or a warning names it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.config_cases import refused_calls
from kit.documents import load_records
from kit.template_messages import chat_templates
from kit.toy_tokenizer import PLAIN_TEMPLATE, toy_tokenizer
from transformers import PreTrainedTokenizerFast

from stillhouse.data import DataError, Documents
from stillhouse.data.render.conversations import undated

USER, ANSWER = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo", "n": 7}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def student(template: str) -> PreTrainedTokenizerFast:
    """template: the name of one of TRL's templates, or a template."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = chat_templates().get(template, template)
    return tokenizer


def load(folder: Path, template: str, record: dict[str, Any] | list[Any], **options: Any) -> Documents:
    records = [{"messages": record}] if isinstance(record, list) else [record]
    return load_records(folder, records, student(template), max_tokens=4000, **options)


def text(documents: Documents, number: int = 0) -> str:
    return toy_tokenizer().decode(documents.tokens(number))


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in texts]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma", "phi3", "gptoss", "smolvlm", "idefics3", "gemma3"])
def test_parts_and_strings_give_the_same_document(tmp_path: Path, name: str) -> None:
    """Of templates for strings, of which some print a list as Python does, and of templates for parts."""
    strings = load(tmp_path, name, [USER, ANSWER])
    question = USER | {"content": parts("Two ", "and two?")}
    in_parts = load(tmp_path, name, [question, ANSWER | {"content": parts("Four.")}])
    assert "Four." in text(strings)
    assert "Two and two?" in text(strings)
    if name != "gemma3":  # it strips each part
        assert text(in_parts) == text(strings)
    assert strings.targets(0).sum() == in_parts.targets(0).sum()


def test_the_forms_of_contents_that_templates_need(tmp_path: Path) -> None:
    """DeepSeek's joins the content of a call with it, and LLaVA's writes only the first of several parts."""
    call = CALL | {"function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
    for content in ({"content": None}, {}, {"content": ""}):
        calls = {"role": "assistant", "tool_calls": [call], **content}
        documents = load(tmp_path, "deepseekv3_training", [USER, calls, {"role": "tool", "content": "4"}, ANSWER])
        assert "<｜Assistant｜><｜tool▁calls▁begin｜>" in text(documents)
    in_parts = load(tmp_path, "llava_next", [USER | {"content": parts("Two and", " two?")}, ANSWER])
    assert "Two and two?" in text(in_parts)


def test_the_error_of_the_form_that_the_template_reads_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ends a prompt with .*<think>"):
        load(tmp_path, "deepseekv3", [USER | {"content": parts("Two and two?")}, ANSWER])
    with pytest.raises(DataError, match="refuses the messages: Conversation roles must alternate"):
        load(tmp_path, "gemma", [USER, USER, ANSWER])


@pytest.mark.parametrize(("call", "problem"), refused_calls("lost texts"))
def test_lost_instructions_and_targets_are_refused(tmp_path: Path, call: str, problem: str) -> None:
    name, messages = eval(call)
    with pytest.raises(DataError, match=problem) as refused:
        load(tmp_path, name, messages)
    assert str(refused.value).startswith(f"{tmp_path}/train.jsonl:1: ")
    records = [{"messages": messages}, {"messages": [USER, ANSWER]}]
    documents = load_records(tmp_path, records, student(name), max_tokens=4000, on_error="skip")
    assert (len(documents), documents.report.skipped) == (1, 1)


def test_the_message_of_a_column_and_the_roles_that_are_written_are_named(tmp_path: Path) -> None:
    record = {"prompt": [USER], "completion": [{"role": "critic", "content": "Well."}, ANSWER]}
    with pytest.raises(
        DataError, match=r"message 1 of 'completion', whose role is 'critic'.*assistant, system, tool, u"
    ):
        load(tmp_path, "qwen3", record)
    with pytest.raises(DataError, match="message 1 of 'prompt', whose role is 'critic'"):
        load(tmp_path, "qwen3", {"prompt": [{"role": "critic", "content": "Well."}, USER]}, prompts=True)


#: each value of JSON, and names that templates sort
ARGUMENTS = {
    **{"n2": True, "n": False, "N": None, "all": [None, True, {"deep": None}], "a b": "x", "é": 1.5},
    **{"o": {"p": {}}, "e": [], "": ""},
}


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "gemma4", "glm4moe", "lfm2_v2", "muse_glimmer", "qwen3_5_think"])
def test_all_names_and_values_of_arguments_are_written(tmp_path: Path, name: str) -> None:
    calls = [{"id": "000000000", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}]
    documents = load(tmp_path, name, [USER, ANSWER | {"content": "", "tool_calls": calls}])
    assert all(key in text(documents) for key in ARGUMENTS)
    assert not [line for line in documents.report.warnings if "does not write" in line]


@pytest.mark.parametrize(("call", "problem"), refused_calls("lost arguments"))
def test_lost_names_and_values_of_arguments_are_named(tmp_path: Path, call: str, problem: str) -> None:
    """A value is refused if the text does not change with it, and a warning names it if it is changed."""
    written, arguments = eval(call)
    calls = (
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}"
        "{% for name, value in call.function.arguments | dictsort %}{{ " + written + " }}{% endfor %}{% endfor %}"
    )
    template = PLAIN_TEMPLATE.replace("'<|im_end|>", "'' }}" + calls + "{{ '<|im_end|>")
    messages = [USER, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    if problem:
        with pytest.raises(DataError, match=f"does not write {problem}.* of message 2 of 'messages':"):
            load(tmp_path, template, messages)
    else:
        warnings = " ".join(load(tmp_path, template, messages).report.warnings)
        assert "the argument 'n' of 'tool_calls' of message 2 of 'messages' with changes" in warnings


@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "llava_next", "qwen3", "gemma3"])
def test_empty_contents_are_the_same_in_every_form(tmp_path: Path, name: str) -> None:
    forms = ("", [], parts(""), parts("", ""))
    texts = {text(load(tmp_path, name, [USER | {"content": form}, ANSWER, USER, ANSWER])) for form in forms}
    assert len(texts) == 1
    load(tmp_path, name, [USER, ANSWER | {"content": ""}, USER, ANSWER])


@pytest.mark.parametrize("more", [{"name": "Ann"}, {"metadata": {"k": [7]}}, {"prefix": True}, {"id": "msg 7"}])
def test_keys_of_messages_that_are_not_written_warn_once(tmp_path: Path, more: dict[str, Any]) -> None:
    (key,) = more
    record = {"messages": [USER | more, ANSWER]}
    documents = load_records(tmp_path, [record, record], student("qwen3"), max_tokens=4000)
    (line,) = [line for line in documents.report.warnings if "does not write" in line]
    assert line.startswith(f"{tmp_path}/train.jsonl:1: the chat template does not write '{key}' of message 1 of")
    assert "(such records: 2)" in line
    written = PLAIN_TEMPLATE.replace("message.role +", f"message.role + message.{key} | tojson +")
    assert not load(tmp_path, written, [record["messages"][0], ANSWER | more], tokens="all").report.warnings


@pytest.mark.parametrize(("call", "problem"), refused_calls("contents of other interfaces"))
def test_contents_of_other_interfaces_are_refused(tmp_path: Path, call: str, problem: str) -> None:
    message = eval(call)
    with pytest.raises(DataError, match=f"train.jsonl:1: .*{problem}"):
        load(tmp_path, "qwen3", [message, USER, ANSWER])


#: templates that drop a text which the conversation has a second time, or which is a part of another one
_ONCE = PLAIN_TEMPLATE.replace(
    "messages %}", "messages %}{% if loop.first or message.content != loop.previtem.content %}"
).replace("{% endfor %}", "{% endif %}{% endfor %}")
_NO_SYSTEM = PLAIN_TEMPLATE.replace("in messages", "in messages if message.role != 'system'")


def test_changed_texts_and_dropped_thoughts_warn(tmp_path: Path) -> None:
    template = PLAIN_TEMPLATE.replace("message.content +", "message.content.replace('two', 'three') +")
    documents = load(tmp_path, template, [USER, ANSWER])
    assert "'content' of message 1 of 'messages' with changes inside" in str(documents.report.warnings)
    answer = ANSWER | {"content": "<think>\nTwice two.\n</think>\n\nFour."}
    documents = load(tmp_path, "qwen3", [USER, answer, USER, answer])
    assert text(documents).count("Twice two.") == 1
    assert "the thoughts in 'content' of message 2 of 'messages'" in documents.report.warnings[0]
    assert not load(tmp_path, "qwen3", [USER, answer]).report.warnings


@pytest.mark.parametrize(
    ("name", "key"), [("gemma3", "reasoning_content"), ("llama3", "thinking"), ("phi3", "reasoning")]
)
def test_lost_thoughts_warn_once(tmp_path: Path, name: str, key: str) -> None:
    record = {"messages": [USER, ANSWER | {key: "Twice two."}]}
    documents = load_records(tmp_path, [{"messages": [USER, ANSWER]}, record, record], student(name), max_tokens=4000)
    (line,) = [line for line in documents.report.warnings if key in line]
    start = f"{tmp_path}/train.jsonl:2: the chat template does not write '{key}' of message 2 of 'messages'"
    assert line.startswith(start)
    assert "(such records: 2)" in line
    assert text(documents, 0) == text(documents, 1)


@pytest.mark.parametrize(
    "content", ["", "/no_think", " \n", "4", "</think>", '"4"\n<b>\'é\\', "!StillhouseMark8f3a0z"]
)
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gptoss", "gemma4"])
def test_odd_texts_are_written(tmp_path: Path, name: str, content: str) -> None:
    call = CALLING | {"tool_calls": [{"function": {"name": "f", "arguments": {"city": content, "n": 0}}}]}
    messages = [USER | {"content": content}, call, {"role": "tool", "name": "f", "content": content}, ANSWER]
    documents = load(tmp_path, name, messages)
    assert not [line for line in documents.report.warnings if "does not write" in line]
    written = {content, json.dumps(content, ensure_ascii=False)[1:-1]}
    assert any(text(documents).count(string) >= 3 for string in written) or len(written) == 2


def test_a_call_that_is_written_by_its_id(tmp_path: Path) -> None:
    """As Kimi's template does."""
    written = "{% for call in message.tool_calls %}{{ call.id + call.function.arguments | tojson }}{% endfor %}"
    template = PLAIN_TEMPLATE.replace("'<|im_end|>", "'' }}" + written + "{{ '<|im_end|>")
    calls = [{"id": "functions.f:0", **CALL}, {"id": "functions.f:1", **CALL}]
    documents = load(tmp_path, template, [USER, ANSWER | {"tool_calls": calls}])
    assert "functions.f:1" in text(documents)
    with pytest.raises(DataError, match="call 1 of 'tool_calls' of message 2"):
        load(tmp_path, template, [USER, ANSWER | {"tool_calls": [{"id": "call_7", **CALL}] * 2}])


@pytest.mark.parametrize("name", ["nemotron_3_nano", "nemotron_3_nano_training"])
def test_a_generation_prompt_that_opens_thoughts(tmp_path: Path, name: str) -> None:
    record = {"prompt": [USER], "completion": [ANSWER]}
    if name.endswith("training"):
        assert load(tmp_path, name, record).targets(0).any()
        return
    with pytest.raises(
        DataError, match=r"ends a prompt with .*<think>.*\(data.chat_template; for a template that reads enable_thin"
    ) as error:
        load(tmp_path, name, record)
    assert "last turn" not in str(error.value)
    assert load(tmp_path, "{%- set enable_thinking = false %}\n" + chat_templates()[name], record).targets(0).any()
    assert load(tmp_path, name, record | {"completion": [ANSWER | {"reasoning_content": "Hm."}]}).targets(0).any()


THOUGHTS_IN_BOTH = [
    USER,
    ANSWER | {"reasoning_content": "Twice two.", "thinking": "Twice two."},
    USER | {"content": "And three?"},
    ANSWER | {"reasoning_content": "Thrice.", "thinking": "Thrice."},
]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "gptoss", "glm4moe", "llama3_1", "phi3", "qwen2_5"])
def test_the_last_turn_alone_is_a_target_behind_the_same_context(tmp_path: Path, name: str) -> None:
    """Of templates that drop earlier thoughts, write all thoughts, or none. The target is what follows the prompt."""
    tokenizer, last = student(name), load(tmp_path, name, THOUGHTS_IN_BOTH, turns="last")
    tokenizer.chat_template = undated(chat_templates()[name])
    body = tokenizer.apply_chat_template(THOUGHTS_IN_BOTH, tokenize=False)
    prompt = tokenizer.apply_chat_template(THOUGHTS_IN_BOTH[:-1], tokenize=False, add_generation_prompt=True)
    assert body.startswith(prompt)
    encoded = tokenizer(body, add_special_tokens=False, return_offsets_mapping=True)
    count = len(encoded["input_ids"])
    assert last.tokens(0).tolist()[:count] == encoded["input_ids"]
    # the end marker of the turn is a target, but not the line break behind it
    begin, stop = len(prompt), len(body.rstrip("\n"))
    expected = [last_at > begin and first_at < stop for first_at, last_at in encoded["offset_mapping"]]
    assert last.targets(0).tolist()[:count] == expected
    split = {"prompt": THOUGHTS_IN_BOTH[:-1], "completion": THOUGHTS_IN_BOTH[-1:]}
    assert np.array_equal(load(tmp_path, name, split).targets_N, last.targets_N)


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "deepseekv3", "gemma3", "llama3"])
def test_the_last_turn_that_a_template_marks_is_that_of_trl(tmp_path: Path, name: str) -> None:
    """TRL trains on all turns that its templates mark. The last of these is the only target."""
    tokenizer = student(undated(chat_templates()[f"{name}_training"]))
    last = load(tmp_path, f"{name}_training", THOUGHTS_IN_BOTH, turns="last")
    marked = tokenizer.apply_chat_template(
        THOUGHTS_IN_BOTH, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    assert last.tokens(0).tolist() == marked["input_ids"]
    mask = np.array(marked["assistant_masks"], dtype=bool)
    (begins,) = np.nonzero(np.diff(mask.astype(int)) == 1)
    assert len(begins) == 2
    mask[: begins[-1] + 1] = False
    assert last.targets(0).tolist() == mask.tolist()


def test_turns_without_their_thoughts_are_counted_and_the_last_turn_has_none(tmp_path: Path) -> None:
    three = [*THOUGHTS_IN_BOTH, USER, ANSWER | {"reasoning_content": "Again."}]
    (line,) = load(tmp_path, "qwen3", three).report.warnings
    assert "In 2 turns, the student learns to answer without thoughts" in line
    assert line.endswith("set data.turns=last (such records: 1)")
    assert not load(tmp_path, "qwen3", three, turns="last").report.warnings
    prompt = {"prompt": three[:-1], "completion": three[-1:]}
    assert not load(tmp_path, "qwen3", prompt).report.warnings
    wrong_key = [USER, ANSWER | {"reasoning": "Twice two."}]
    (line, _) = load(tmp_path, "gemma3", wrong_key, turns="last").report.warnings[::-1]
    assert "'reasoning' of message 2 of 'messages'" in line
    assert "data.turns" not in line


def test_a_conversation_without_a_last_answer_is_refused_or_skipped(tmp_path: Path) -> None:
    records = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER, USER]}]
    expected = "train.jsonl:2: the last message of 'messages' has the role 'user', so data.turns=last has no target"
    with pytest.raises(DataError, match=expected):
        load_records(tmp_path, records, student("qwen3"), max_tokens=400, turns="last")
    documents = load_records(tmp_path, records, student("qwen3"), max_tokens=400, turns="last", on_error="skip")
    assert documents.report.skipped == 1
    assert len(documents) == 1


def test_earlier_turns_may_have_the_weight_0_if_only_the_last_is_a_target(tmp_path: Path) -> None:
    messages = [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}]
    with pytest.raises(DataError, match=r"'weight' of message 2 of 'messages' .* or data\.turns=last"):
        load(tmp_path, "qwen2_5", messages)
    documents = load(tmp_path, "qwen2_5", messages, turns="last")
    assert toy_tokenizer().decode(documents.tokens_N[documents.targets_N]).count("Four.") == 1
    with pytest.raises(DataError, match="'weight' of message 4"):
        load(tmp_path, "qwen2_5", [*messages[:3], ANSWER | {"weight": 0}], turns="last")
