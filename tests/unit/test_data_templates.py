"""From columns to tokens: the ids, the targets among them, and the reasons of refused records."""

import json
import re
from typing import Any

import numpy as np
import pytest
from kit.config_cases import refused_calls
from kit.documents import BOS, EOS, plain
from kit.toy_tokenizer import toy_backend, toy_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from stillhouse.data.record import RecordError
from stillhouse.data.render.record_forms import template_for
from stillhouse.data.render.templates import ANCHOR, Encoded, Tokens

CHAT = [
    *({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}),
    *({"role": "assistant", "content": " Paris is"}, {"role": "user", "content": "And two and two?"}),
    {"role": "assistant", "content": "four"},
]


def encode(fields: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tokens: Tokens = "completion") -> Encoded:
    template = template_for(fields, tokenizer, tokens)
    return template.encode([template.render(fields)])[0]


def targets_text(encoded: Encoded, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode(encoded.ids[encoded.targets].tolist())


@pytest.mark.parametrize("tokens", ["completion", "all"])
def test_text_gets_the_tokenizers_special_tokens_and_the_end(tokens: Tokens) -> None:
    tokenizer = toy_tokenizer()
    encoded = encode({"text": "the heads"}, tokenizer, tokens)
    body = plain(tokenizer, "the heads")
    assert encoded.ids.tolist() == [BOS, *body, EOS]
    assert encoded.targets.tolist() == [False] + [True] * (len(body) + 1)
    assert (encoded.ids.dtype, encoded.targets.dtype) == (np.int32, np.bool_)


def test_the_stop_token_is_a_target_where_pad_is_the_same_token() -> None:
    tokenizer = toy_tokenizer(pad_token="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS
    for fields in ({"text": "the"}, {"prompt": "the", "completion": " heads"}):
        encoded = encode(fields, tokenizer)
        assert (encoded.ids[-1], encoded.targets[-1]) == (EOS, True)


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(True, False), (False, False), (True, True)])
def test_prompt_and_completion(adds_bos: bool, adds_eos: bool) -> None:
    tokenizer = toy_tokenizer(adds_bos=adds_bos, adds_eos=adds_eos)
    fields = {"prompt": "What is two", "completion": " and two?", "id": 7}
    prompt = [BOS] * adds_bos + plain(tokenizer, "What is two")
    completion = [*plain(tokenizer, " and two?"), EOS]
    for tokens in ("completion", "all"):
        encoded = encode(fields, tokenizer, tokens)
        assert encoded.ids.tolist() == prompt + completion
        expected = [tokens == "all"] * len(prompt) + [True] * len(completion)
        assert encoded.targets.tolist() == [False] + expected[1:]


@pytest.mark.parametrize(
    ("tokenizer", "prompt"),
    [
        ({}, "a</s>"),  # an end that is written into the prompt stays
        ({"adds_bos": False}, ""),
        ({"adds_bos": False, "bos_token": "</s>"}, "the"),  # a BOS that is EOS is no end of the prompt
    ],
)
def test_only_an_appended_end_is_removed_from_a_prompt(tokenizer: dict[str, Any], prompt: str) -> None:
    toy = toy_tokenizer(**tokenizer)
    encoded = encode({"prompt": prompt, "completion": " heads"}, toy)
    before, completion = [BOS] * (not tokenizer) + plain(toy, prompt), [*plain(toy, " heads"), EOS]
    assert encoded.ids.tolist() == before + completion
    assert encoded.targets[1:].tolist() == ([False] * len(before) + [True] * len(completion))[1:]


@pytest.mark.parametrize("chat", ["plain", "generation"])
def test_only_the_assistant_is_a_target(chat: Any) -> None:
    tokenizer = toy_tokenizer(chat=chat)
    encoded = encode({"messages": CHAT}, tokenizer)
    assert encoded.ids.tolist() == tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert targets_text(encoded, tokenizer) == " Paris is<|im_end|>four<|im_end|>"
    everything = encode({"messages": CHAT}, tokenizer, "all")
    assert everything.ids.tolist() == encoded.ids.tolist()
    assert everything.targets.tolist() == [False] + [True] * (len(encoded.ids) - 1)


@pytest.mark.parametrize("chat", ["plain", "generation"])
def test_offsets_without_leading_spaces_lose_no_target(chat: Any) -> None:
    tokenizer = toy_tokenizer(chat=chat, adds_bos=False, backend=toy_backend())
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    encoded = encode({"messages": CHAT}, tokenizer)
    assert targets_text(encoded, tokenizer) == " Paris is<|im_end|>four<|im_end|>"


def test_the_space_after_the_last_turn_stays_a_target_where_no_marker_ends_the_turn() -> None:
    tokenizer = toy_tokenizer(chat="plain")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    # The second answer's first token also contains the space before the answer. A token that overlaps is a target.
    assert targets_text(encode({"messages": CHAT}, tokenizer), tokenizer) == " Paris is\n four\n"


def test_a_template_that_drops_earlier_thoughts() -> None:
    tokenizer = toy_tokenizer(chat="reasoning")
    encoded = encode({"messages": CHAT}, tokenizer)
    assert encoded.ids.tolist() == tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert targets_text(encoded, tokenizer) == " Paris is<|im_end|><think>\n\n</think>\nfour<|im_end|>"
    last = encode({"prompt": CHAT[:4], "completion": CHAT[4:]}, tokenizer)
    assert targets_text(last, tokenizer) == "<think>\n\n</think>\nfour<|im_end|>"


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("opener", ["", "<think>\n"])
def test_the_thoughts_that_are_shown_are_targets(inline: bool, opener: str) -> None:
    tokenizer = toy_tokenizer(chat="reasoning")
    assert isinstance(tokenizer.chat_template, str)
    # If the generation prompt opens the thoughts, it is longer than the heading of an earlier turn without
    # thoughts. The content of that turn begins with the same characters, and all of it is a target.
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ '" + opener.replace("\n", "\\n") + "' }}{% endif %}"
    answers = {2: ("Of cheese.", "<table>"), 4: ("Two, then two.", "four")}
    messages: list[dict[str, Any]] = list(CHAT)
    for index, (thoughts, answer) in answers.items():
        content = f"<think>\n{thoughts}\n</think>{answer}" if inline else answer
        messages[index] = {"role": "assistant", "content": content}
        if not inline:
            messages[index]["reasoning_content"] = thoughts
    encoded = encode({"messages": messages}, tokenizer)
    shown = "<think>\nTwo, then two.\n</think>\n".removeprefix(opener)
    assert targets_text(encoded, tokenizer) == f"<table><|im_end|>{shown}four<|im_end|>"


@pytest.mark.parametrize("content", ["", " ", "Let me see."])
def test_a_tool_call_in_an_earlier_turn(content: str) -> None:
    tokenizer = toy_tokenizer(chat="reasoning")
    call = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "add"}}]}
    messages = [CHAT[1], call, {"role": "tool", "content": "4"}, *CHAT[2:]]
    text = content + "\n\n" if content else ""
    expected = f"{text}<tool>add</tool><|im_end|> Paris is<|im_end|><think>\n\n</think>\nfour<|im_end|>"
    assert targets_text(encode({"messages": messages}, tokenizer), tokenizer) == expected


@pytest.mark.parametrize("chat", ["plain", "reasoning"])
def test_markers_that_the_user_quotes_are_not_the_templates(chat: Any) -> None:
    tokenizer = toy_tokenizer(chat=chat)
    quoted = "Is <|im_start|>assistant\nfour<|im_end|>\n a turn? <think></think><|im_start|>assistant\n"
    messages = [{"role": "user", "content": quoted}, *CHAT[2:4], CHAT[4] | {"content": quoted.split("?")[0]}]
    thoughts = "<think>\n\n</think>\n" if chat == "reasoning" else ""
    expected = f" Paris is<|im_end|>{thoughts}Is <|im_start|>assistant\nfour<|im_end|>\n a turn<|im_end|>"
    assert targets_text(encode({"messages": messages}, tokenizer), tokenizer) == expected


def test_an_end_that_only_the_last_turn_has() -> None:
    tokenizer = toy_tokenizer(chat="plain")
    tokenizer.chat_template += "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    targets = targets_text(encode({"messages": CHAT}, tokenizer), tokenizer)
    assert targets == " Paris is<|im_end|>four<|im_end|>\n</s>"
    called = [*CHAT[:2], CHAT[2] | {"tool_calls": [{}]}, *CHAT[3:]]  # the call may follow the token
    with pytest.raises(RecordError, match="renders the first 3 messages by themselves differently"):
        encode({"messages": called}, tokenizer)


def turns(content: str, prompt: str = "<|im_start|>assistant\\n", heading: str = "'\\n'") -> str:
    """Return a template for tests. The arguments are Jinja expressions for a turn's content and heading."""
    return (
        "{% for message in messages %}{% set last = loop.last %}{% set assistant = message.role == 'assistant' %}"
        "{{ '<|im_start|>' + message.role + " + heading + " + (" + content + ") + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + prompt + "' }}{% endif %}"
    )


OPENS = "<|im_start|>assistant\\n<think>"
THINKS = "('<think></think>' if last and assistant else '') + message.content"


@pytest.mark.parametrize(("call", "message"), refused_calls("chat templates"))
def test_a_template_that_leaves_the_turns_unclear_is_refused(call: str, message: str) -> None:
    template = eval(call)
    tokenizer = toy_tokenizer(chat="plain")
    tokenizer.chat_template = template
    with pytest.raises(RecordError, match=re.escape(message)):
        encode({"messages": CHAT}, tokenizer)


def test_text_that_holds_the_anchor_is_right_or_refused() -> None:
    tokenizer = toy_tokenizer(chat="reasoning")
    answered = [CHAT[1], CHAT[2] | {"content": ANCHOR}, *CHAT[3:]]
    expected = f"{ANCHOR}<|im_end|><think>\n\n</think>\nfour<|im_end|>"
    assert targets_text(encode({"messages": answered}, tokenizer), tokenizer) == expected
    question = [CHAT[1] | {"content": ANCHOR}, *CHAT[2:]]
    with pytest.raises(RecordError, match="renders the first 2 messages by themselves differently"):
        encode({"messages": question}, tokenizer)


def test_a_conversation_without_an_answer_has_no_target() -> None:
    encoded = encode({"messages": CHAT[:2]}, toy_tokenizer(chat="plain"))
    assert len(encoded.ids) > 0
    assert not encoded.targets.any()


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "take")]


def with_tools(chat: Any) -> PreTrainedTokenizerFast:
    tokenizer = toy_tokenizer(chat=chat)
    tools_first = "{% if tools is not none %}{{ '<tools>' + tools | tojson + '</tools>' }}{% endif %}"
    tokenizer.chat_template = f"{tools_first}{tokenizer.chat_template}"
    return tokenizer


@pytest.mark.parametrize("form", [{"messages": CHAT}, {"prompt": CHAT[:4], "completion": CHAT[4:]}])
@pytest.mark.parametrize(
    ("chat", "tokens"),
    [("plain", "completion"), ("plain", "all"), ("generation", "completion"), ("reasoning", "completion")],
)
def test_tools_reach_the_template(chat: Any, form: dict[str, Any], tokens: Tokens) -> None:
    tokenizer = with_tools(chat)
    expected = tokenizer.apply_chat_template(CHAT, tools=TOOLS, return_dict=True)["input_ids"]
    template = template_for(form, tokenizer, tokens)
    forms_of_tools, empty = (TOOLS, json.dumps(TOOLS)), (None, [], "[]", "null")
    rendered = [template.render(form | {"tools": tools}) for tools in (*forms_of_tools, *empty)]
    without, *encoded = template.encode([template.render(form), *rendered])
    for document in encoded[:2]:
        assert document.ids.tolist() == expected
        assert tokens == "all" or targets_text(document, tokenizer) == targets_text(without, tokenizer)
    assert all(document.ids.tolist() == without.ids.tolist() for document in encoded[2:])


@pytest.mark.parametrize("chat", ["plain", "generation", "reasoning"])
def test_turns_that_tools_change_are_found(chat: Any) -> None:
    tokenizer = toy_tokenizer(chat=chat)
    opens = "<|im_start|>' + ('tools for ' if tools else '') + '"
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<|im_start|>", opens)
    targets = targets_text(encode({"prompt": CHAT[:4], "completion": CHAT[4:], "tools": TOOLS}, tokenizer), tokenizer)
    assert targets.removeprefix("<think>\n\n</think>\n") == "four<|im_end|>"


def test_a_template_of_its_own_for_tools() -> None:
    tokenizer = toy_tokenizer(chat="generation")
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": with_tools("plain").chat_template}
    encoded = encode({"messages": CHAT, "tools": TOOLS}, tokenizer)
    assert tokenizer.decode(encoded.ids).startswith("<tools>")
    assert targets_text(encoded, tokenizer) == " Paris is<|im_end|>four<|im_end|>"
    assert not tokenizer.decode(encode({"messages": CHAT}, tokenizer).ids).startswith("<tools>")


def test_extra_columns() -> None:
    one, other = (encode(fields, toy_tokenizer()) for fields in ({"text": "a", "tools": 3}, {"text": "a"}))
    assert one.ids.tolist() == other.ids.tolist()
    fields = {"prompt": "a", "messages": CHAT}
    assert template_for(fields, toy_tokenizer(chat="plain"), "completion").columns == ("messages",)


@pytest.mark.parametrize(("call", "message"), refused_calls("columns"))
def test_columns_of_no_or_several_forms(call: str, message: str) -> None:
    columns = eval(call)
    with pytest.raises(ValueError, match=message):
        template_for(dict.fromkeys(columns, "a"), toy_tokenizer(), "completion")


TEXT, COMPLETION, MESSAGES = {"text": "good"}, {"prompt": "a", "completion": "b"}, {"messages": CHAT}


@pytest.mark.parametrize(("call", "message"), refused_calls("records"))
def test_a_bad_record_is_refused(call: str, message: str) -> None:
    """first: the dataset's first record, which decides its form."""
    first, fields = eval(call)
    template = template_for(first, toy_tokenizer(chat="plain"), "completion")
    with pytest.raises(RecordError, match=re.escape(message)):
        template.render(fields)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="has no end-of-sequence token"):
        template_for({"text": "a"}, toy_tokenizer(eos_token=None), "completion")  # type: ignore[arg-type]
