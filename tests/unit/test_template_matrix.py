"""Chat templates of real families × forms of conversations: the ids are those of transformers, and the targets are
those of TRL's templates for training, or the record is refused by name. `kit/template_forms.yaml` has the forms, and
by name what the templates do that differs.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
from jinja2 import TemplateError
from kit.gguf_files import real_model
from kit.template_messages import Message, add, chat_templates
from kit.toy_tokenizer import toy_backend, toy_tokenizer
from ruamel.yaml import YAML
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from stillhouse.data.record import ProcessorError, RecordError
from stillhouse.data.render.conversations import DATE, undated
from stillhouse.data.render.record_forms import template_for
from stillhouse.data.render.templates import Encoded, Rendered, Template
from stillhouse.data.render.tokenizers import load_tokenizer

CASES = YAML(typ="safe").load((Path(kit.__file__).parent / "template_forms.yaml").read_text(encoding="utf-8"))
TOOLS = [get_json_schema(add)]
ORIGINALS = [name for name in chat_templates() if not name.endswith("_training")]
THOUGHTS = ("Deep thought.", "Other thought.")
NO_IMAGES = "no processor for images|does not write|writes the parts|refuses the messages|cannot be identified"
#: the tokens with which a student ends its turns, where these are not the tokenizer's own
ENDS = {"glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>")}
_CONTROL = re.compile(
    r"<[|｜][^|｜<>'\s]+[|｜]>|<\w+\|>|<\|\w+>|<(?:start|end)_of_turn>|<end_of_utterance>|\[/?[A-Z_]+\]"
)


def control_tokens(template: str) -> list[str]:
    return sorted(set(_CONTROL.findall(template)), reverse=True)  # <|channel> before <channel|>


def small_tokenizer(name: str, **options: Any) -> PreTrainedTokenizerBase:
    """A tokenizer of 400 entries and the control tokens of one of TRL's templates, with this template."""
    tokenizer = toy_tokenizer(**options)
    tokenizer.chat_template = chat_templates()[name]
    tokenizer.add_special_tokens({"additional_special_tokens": control_tokens(tokenizer.chat_template)})
    return tokenizer


def conversation(form: str, template: str) -> list[Message]:
    text = json.dumps(CASES["forms"][form])
    return json.loads(text.replace("CONTROL", json.dumps(" ".join(control_tokens(template)))[1:-1]))


@dataclass
class Renderer:
    """A tokenizer with a chat template, and what transformers and we make of a conversation."""

    tokenizer: PreTrainedTokenizerBase
    ours: Template

    def document(self, messages: list[Message], tools: Any) -> tuple[Rendered, Encoded]:
        rendered = self.ours.render({"messages": messages, "tools": tools})
        (encoded,) = self.ours.encode([rendered])
        return rendered, encoded

    def characters(self, messages: list[Message]) -> set[int]:
        """The places of the characters of all targets in the text."""
        rendered, document = self.document(messages, None)
        encoded = self.tokenizer(rendered.body, add_special_tokens=False, return_offsets_mapping=True)
        spans = zip(encoded["offset_mapping"], document.targets, strict=True)
        return {place for (begin, end), is_target in spans if is_target for place in range(begin, end)}

    def whole(self, messages: list[Message], tools: Any) -> tuple[list[Message], str] | None:
        """The first form of the messages of which transformers writes all contents and calls, and its text."""
        for form in content_forms(messages):
            try:
                text = self.tokenizer.apply_chat_template(form, tools=tools, tokenize=False)
            except (TemplateError, TypeError, AttributeError, KeyError):
                continue
            if not (lacking(messages, text) or re.search(r"""['"]type['"]: ['"]text['"]|\\"city""", text)):
                return form, in_july(text)
        return None

    def marked(self, messages: list[Message], tools: Any) -> tuple[list[int], np.ndarray]:
        """The ids and the mask of transformers, with the template's own marks."""
        source = undated(str(self.tokenizer.chat_template))
        encoded = self.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = np.array(encoded["assistant_masks"], dtype=bool)
        mask[:1] = False  # nothing predicts the first token
        return encoded["input_ids"], mask

    def prompts(self, messages: list[Message], tools: Any) -> str:
        """The generation prompts before all turns of the assistant."""
        prompts = []
        for number, message in enumerate(messages):
            if number and message["role"] == "assistant":
                bare, prompted = (
                    self.tokenizer.apply_chat_template(
                        messages[:number], tools=tools, tokenize=False, add_generation_prompt=prompt
                    )
                    for prompt in (False, True)
                )
                prompts.append(prompted.removeprefix(bare))
        return "\0".join(prompts)

    def runs(self, ids: Any, mask: np.ndarray) -> list[str]:
        """The texts of the tokens that follow each other within a mask."""
        pairs = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
        return [self.tokenizer.decode([int(index) for index, _ in run]) for is_marked, run in pairs if is_marked]


def renderer(tokenizer: PreTrainedTokenizerBase, template: str, ends: tuple[str, ...] = ()) -> Renderer:
    """ends: the tokens with which the student ends its turns."""
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = template
    end_ids = tokenizer.convert_tokens_to_ids([end for end in ends if end in tokenizer.get_vocab()])
    record = {"messages": CASES["forms"]["one turn"]}
    return Renderer(tokenizer, template_for(record, tokenizer, "completion", end_ids=end_ids))


def content_forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The messages with contents and arguments as they are, as strings, and as parts or objects."""
    bare = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for content in (None, str, list):
        for arguments in (dict, str):
            form = deepcopy(bare)
            for message in form:
                text = message.get("content", "")
                text = text if isinstance(text, str) else "".join(part["text"] for part in text)
                if content is not None:
                    message["content"] = text if content is str else [{"type": "text", "text": text}]
                for call in message.get("tool_calls", []):
                    value = call["function"]["arguments"]
                    parsed = json.loads(value) if isinstance(value, str) else value
                    call["function"]["arguments"] = parsed if arguments is dict else json.dumps(parsed)
            yield form


def lacking(messages: list[Message], body: str) -> list[str]:
    """The contents and calls that a text has less often than the messages."""
    texts = []
    for message in messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        for part in parts:  # thoughts are no part of the content
            texts.append(re.split(r"</think>|<channel\|>", part)[-1])
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            texts += [call["function"]["name"], *arguments, *map(str, arguments.values())]
    needed = Counter(stripped for text in texts if (stripped := text.strip()))
    return [text for text, count in needed.items() if body.count(text) < count]


def in_july(text: str) -> str:
    """The text with the date that our templates get in place of today's."""
    for form in ("%Y-%m-%d", "%d %b %Y"):
        text = text.replace(datetime.now().strftime(form), DATE.strftime(form))
    return text


def answers(turns: list[str]) -> list[str]:
    """The turns without their thoughts."""
    return [turn.rpartition("</think>")[2].strip() for turn in turns]


def check(tokenizer: PreTrainedTokenizerBase, name: str, template: str, training: str | None) -> None:
    """name: of the template in template_forms.yaml. training: TRL's template for training, if there is one."""
    original = renderer(tokenizer, template, ENDS.get(name, ()))
    trained = renderer(tokenizer, training) if training else None
    headers = set[str]()
    unclear, other_masks, first_turns = [], [], {}
    for form in CASES["forms"]:
        messages = conversation(form, template)
        tools = TOOLS if any(message.get("tool_calls") for message in messages) else None
        if form == "image":
            with pytest.raises((ProcessorError, RecordError), match=NO_IMAGES):
                original.document(messages, tools)
            continue
        whole, document = original.whole(messages, tools), None
        try:
            rendered, document = original.document(messages, tools)
        except RecordError as error:
            require_reason(str(error), form, is_written=whole is not None)
            unclear += [form] if whole is not None and form != "answer first" else []
        else:
            assert whole is not None, (form, rendered.body)
            require_ids(original, document, rendered, whole[1], form, is_last=messages[-1]["role"] == "assistant")
            require_thoughts(messages, rendered, form)
            turns = original.runs(document.ids, document.targets)
            assert "endgeneration" in template or all(turn == turn.rstrip() for turn in turns), (form, turns)
            first_turns[form] = turns[0].strip()
        marking = trained or (original if "endgeneration" in template else None)
        if marking is not None and (written := marking.whole(messages, tools)) is not None:
            ids, mask = marking.marked(written[0], tools)
            require_marks(marking, messages, tools, ids, mask, form)
            if document is not None and whole is not None and marking is not original:
                prompts = original.prompts(whole[0], tools)
                more = marked_beside(original, document, ids, mask)
                other_masks += [form] if more is None or not all(text in prompts for text in more) else []
                headers |= {text for text in more or () if text in prompts}
    assert unclear == CASES["unclear"].get(name, [])
    assert other_masks == CASES["other masks"].get(name, [])
    assert headers == set(CASES["trained headers"].get(name, []))
    pairs = [("one turn", "several turns"), ("thoughts", "several thoughts")]
    turns = [(first_turns[one], first_turns[several]) for one, several in pairs if several in first_turns]
    drops = any(not alone.startswith(earlier) for alone, earlier in turns)
    assert drops == (name in CASES["drop thoughts of earlier turns"]), first_turns


def require_reason(error: str, form: str, *, is_written: bool) -> None:
    reason = "cannot be identified|begins with a turn" if is_written else "does not write|refuses the messages"
    assert re.search(reason, error), (form, error)


def require_ids(
    original: Renderer, document: Encoded, rendered: Rendered, text: str, form: str, *, is_last: bool
) -> None:
    """The ids are those of the text that transformers renders; GLM's last turn ends with the next turn's header."""
    ends = [index for index in document.ids[-1:] if rendered.body != text]
    assert rendered.body.startswith(text), (form, rendered.body, text)
    assert is_last or not ends, form
    assert rendered.body.removeprefix(text) == "".join(map(original.tokenizer.decode, ends)), form
    ids = original.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert document.ids.tolist() == ids + ends, form


def require_thoughts(messages: list[Message], rendered: Rendered, form: str) -> None:
    """Thoughts that are not written are named."""
    given = json.dumps(messages)
    if "control tokens" in form:
        return  # Gemma's tokens of thoughts are control tokens
    is_lost = any(thought in given and thought not in rendered.body for thought in THOUGHTS)
    assert is_lost == ("thought" in rendered.lost), (form, rendered)


def require_marks(
    marking: Renderer, messages: list[Message], tools: Any, ids: list[int], mask: np.ndarray, form: str
) -> None:
    """With a template that has marks, ids and targets are those of transformers."""
    _, document = marking.document(messages, tools)
    assert document.ids.tolist() == ids, form
    assert document.targets.tolist() == mask.tolist(), (form, marking.runs(ids, mask))


def marked_beside(original: Renderer, document: Encoded, ids: list[int], mask: np.ndarray) -> list[str] | None:
    """The texts that TRL's template for training marks beside our targets, without white space; None if it does not
    mark all our targets. If TRL's template keeps the thoughts that the original drops from earlier turns, the turns
    are compared without their thoughts.
    """
    if document.ids.tolist() != ids:
        ours, theirs = original.runs(document.ids, document.targets), original.runs(ids, mask)
        return [] if answers(ours) == answers(theirs) else None
    if (document.targets & ~mask).any():
        return None
    more = (text.strip() for text in original.runs(ids, mask & ~document.targets))
    return [text for text in more if text]


@pytest.mark.parametrize("name", ORIGINALS)
def test_every_form_of_a_conversation(name: str) -> None:
    templates = chat_templates()
    check(small_tokenizer(name), name, templates[name], templates.get(f"{name}_training"))


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3", "lfm2_2_5", "gptoss_training"])
def test_a_tokenizer_that_adds_a_space(name: str) -> None:
    """The ids are those of transformers, and the same characters are targets as without the space. The mask of
    transformers is none to compare with: it looks up the token of a single character.
    """
    backend = toy_backend()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced = small_tokenizer(name, backend=backend)
    assert spaced.tokenize("two") == spaced.tokenize(" two")
    renderers = [renderer(tokenizer, chat_templates()[name]) for tokenizer in (spaced, small_tokenizer(name))]
    for form in ("one turn", "system", "unicode", "empty answer", "thoughts in the content", "control tokens"):
        messages = conversation(form, chat_templates()[name])
        if renderers[0].whole(messages, None) is not None:
            ids, _ = renderers[0].marked(messages, None)
            assert renderers[0].document(messages, None)[1].ids.tolist() == ids, form
            assert renderers[0].characters(messages) == renderers[1].characters(messages), form


REAL = [
    *(("qwen3-tokenizer", None), ("qwen3-tokenizer", "qwen3"), ("qwen3-tokenizer", "qwen3_instruct_2507")),
    *(("llama3.1-tokenizer", None), ("llama3.1-tokenizer", "llama3_1"), ("llama3.1-tokenizer", "llama3")),
    *(("gemma3-tokenizer", None), ("gemma3-tokenizer", "gemma3"), ("gpt-oss-tokenizer", "gptoss")),
    *(("deepseek-v3-tokenizer", None), ("deepseek-v3-tokenizer", "deepseekv3")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tokenizer_name", "name"), REAL)
def test_every_form_with_a_real_tokenizer(tokenizer_name: str, name: str | None) -> None:
    """name: one of TRL's templates; None for the template of the tokenizer."""
    tokenizer, templates = load_tokenizer(str(real_model(tokenizer_name))), chat_templates()
    template = str(tokenizer.chat_template) if name is None else templates[name]
    check(tokenizer, name or tokenizer_name, template, templates.get(f"{name}_training"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3.1-tokenizer", "gemma3-tokenizer", "deepseek-v3-tokenizer"])
def test_a_text_that_is_rendered_already_gets_no_second_bos(name: str) -> None:
    tokenizer = load_tokenizer(str(real_model(name)))
    text = tokenizer.apply_chat_template(CASES["forms"]["one turn"], tokenize=False).rstrip()
    template = template_for({"text": text}, tokenizer, "completion")
    (document,) = template.encode([template.render({"text": text})])
    assert document.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert document.ids.tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.slow
def test_an_answer_whose_first_token_has_characters_of_the_prompt() -> None:
    """Qwen3 joins the line break at the prompt's end with those of the answer. The token is a target, and counted."""
    tokenizer = load_tokenizer(str(real_model("qwen3-tokenizer")))
    original = renderer(tokenizer, chat_templates()["qwen3_instruct_2507"])
    _, document = original.document(CASES["forms"]["white space"], None)
    assert original.runs(document.ids, document.targets) == ["\n\n\n  Beta answer. \n<|im_end|>"]
    assert document.joined_turns == 1
