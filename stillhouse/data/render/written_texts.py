"""Finds the lost texts of a conversation: contents, thoughts and tool calls that its chat template does not write.

The conversation is rendered a second time, with a mark in the middle of each text. If the second rendering without
its marks equals the first one, a text counts as written if the second rendering has its mark between the two halves
of the text. So a text that the conversation has twice must be written twice, and "4" is not found in "24". If the
renderings differ, because the template makes decisions from the texts, each text must occur in the first rendering as
often as in the conversation. An argument of a call that is not a text, such as true, false or null, is replaced by a
number for the second rendering, and counts as written if this number is written.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

from stillhouse.data.read.messages import MASKS, Message

#: keys with the thoughts of a turn
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
#: the tags that templates recognize in contents and remove, in some cases with the text between them: the tags around
#: thoughts and around replies of tools, and the flags that turn thoughts on and off
_MARKS = re.compile(
    r"(</?(?:seed:)?think(?:ing)?>|\[/?THINK\]|<\|channel>|<channel\|>|</?tool_response>|/no_?think\b|/think\b)"
)
_OPENS = re.compile(r"<(?:seed:)?think(?:ing)?>|\[THINK\]|<\|channel>")
_CLOSES = re.compile(r"</(?:seed:)?think(?:ing)?>|\[/THINK\]|<channel\|>")
#: the mark of a text, and the number that replaces another value. If a template sorts the names of arguments, the
#: marks do not change the order, because "!" sorts before letters and digits
_MARK, _NUMBER = "!StillhouseMark8f3a{}z", 918_273_645_000_000
_MARKED = re.compile(r"!StillhouseMark8f3a(\d+)z|918273645(\d{6})(?:\.5)?")
#: the keys of a call's name and arguments. The last three are other names of `arguments`, which few templates read
_OF_CALLS = ("name", "arguments", "parameters", "args", "input")
#: JSON's values as Python writes them
_OF_PYTHON = {"true": "True", "false": "False", "null": "None"}
#: a key that is added to the parts of a content. If a rendering has it, the template writes parts as objects
_PART_KEY, _WITH_PART_KEY = "StillhousePart8f3a{}z", re.compile(r"StillhousePart8f3a(\d+)z")

#: the keys of messages that have a check of their own, or whose values a template need not write as they are
KEYS = ("role", "content", "tool_calls", "function_call", "tool_call_id", *MASKS)
#: the kinds of lost texts. text: a content or a call. thought: thoughts; templates of reasoning models drop them from
#: earlier turns. changed: a text that is written with changes. object: a part of a content that is written as an
#: object. key: the value of another key of a message
Kind = Literal["text", "thought", "changed", "object", "key"]


class Lost(NamedTuple):
    """A lost text. message: the message's index. what: the name of the text within the message."""

    message: int
    what: str
    kind: Kind


def is_refused(loss: Lost) -> bool:
    """Whether the loss makes the record invalid, because a content or a call is lost."""
    return loss.kind in ("text", "object")


class _Text(NamedTuple):
    """A text with a mark. half: the number of the text's characters before the mark. loss: the loss to report if the
    text is not written. is_value: whether the text is the JSON of a call's value (a number, true, false, null), which
    is replaced by a number.
    """

    text: str
    half: int
    loss: Lost
    is_value: bool = False


def losses(render: Callable[[list[Message]], str], messages: list[Message], body: str, template: str) -> list[Lost]:
    """The lost texts of the messages, without repetitions.

    body: a text that begins with the rendering of the messages. template: the source of the template. A key whose
    value is not a string counts as lost if the source does not contain the key's name.
    """
    unread = [
        Lost(index, f"'{key}'", "key")
        for index, message in enumerate(messages)
        for key, value in message.items()
        if key not in KEYS and not isinstance(value, str) and key not in template
    ]
    return list(dict.fromkeys([*_lost_texts(render, messages, body), *unread]))


def _lost_texts(render: Callable[[list[Message]], str], messages: list[Message], body: str) -> Iterable[Lost]:
    marked = _Marked()
    try:
        copies = [marked.message(index, message) for index, message in enumerate(messages)]
    except RecursionError as error:
        raise ValueError("its tool calls are nested too deeply") from error
    try:
        rendered = render(copies)
    except ValueError:  # the template refuses the marks
        return _counted(marked.texts, body, set(range(len(marked.texts))))
    if match := _WITH_PART_KEY.search(rendered):
        return [Lost(int(match[1]), "'content'", "object")]
    # triples: the text before a mark; the mark's number if it is a text's mark, else None; the same for a value
    pieces = _MARKED.split(rendered)
    between, argument_values = pieces[::3], pieces[2::3]
    numbers = [int(text or value) for text, value in zip(pieces[1::3], argument_values, strict=True)]
    texts = marked.texts
    is_written = all(number < len(texts) for number in numbers) and body.startswith(between[0])
    at, is_whole = len(between[0]), dict[int, bool]()
    for number, is_value, before, behind in zip(numbers, argument_values, between[:-1], between[1:], strict=True):
        if not is_written:  # the body does not begin with the second rendering without its marks
            break
        text = texts[number].text if is_value else ""
        if not body.startswith(text, at):
            text = _OF_PYTHON.get(text, text)
        is_written = body.startswith(text + behind, at)
        at += len(text) + len(behind)
        is_whole[number] = is_whole.get(number, False) or bool(is_value) or _is_around(texts[number], before, behind)
    if not is_written:
        return _counted(texts, body, set(numbers))
    return (
        text.loss._replace(kind="changed") if number in is_whole else text.loss
        for number, text in enumerate(texts)
        if not is_whole.get(number)
    )


def _is_around(text: _Text, before: str, behind: str) -> bool:
    """Whether `before` ends with a text's first half, and `behind` begins with the second, unchanged or escaped."""
    mark = _MARK.format("")
    marked = f"{text.text[: text.half]}{mark}{text.text[text.half :]}"
    sides = (written.partition(mark) for written in chain([marked], _as_strings(marked)))
    return any(before.endswith(head) and behind.startswith(tail) for head, _, tail in sides)


def _as_strings(text: str) -> Iterator[str]:
    """The text as a string of JSON (also encoded twice, and in ASCII) and of Python, without the quotes."""
    escaped_text = json.dumps(text, ensure_ascii=False)
    yield escaped_text[1:-1]
    yield json.dumps(text)[1:-1]
    yield json.dumps(escaped_text, ensure_ascii=False)[3:-3]
    yield repr(text)[1:-1]


def _counted(texts: list[_Text], body: str, marked: set[int]) -> Iterator[Lost]:
    """The losses of texts that occur in the body less often than in the conversation. marked: the numbers of the
    marks that the template writes. A value of a call is also lost if its mark is not written.
    """
    by_text: dict[str, list[Lost]] = {}
    for number, text in enumerate(texts):
        if text.is_value and number not in marked:
            yield text.loss
        else:
            loss = text.loss._replace(kind="changed") if text.is_value else text.loss
            by_text.setdefault(text.text, []).append(loss)
    for written, text_losses in by_text.items():
        occurrences = max(map(body.count, (written, *_as_strings(written), _OF_PYTHON.get(written, written))))
        yield from text_losses[: max(0, len(text_losses) - occurrences)]


@dataclass
class _Marked:
    """Puts a mark into each text of a conversation. texts: the texts in the order of the numbers in their marks. ids:
    Kimi's template writes a call's id, which contains the function's name, in place of the name. So `ids` maps
    each such id to the id with the marked name.
    """

    texts: list[_Text] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)

    def message(self, index: int, message: Message) -> Message:
        marked = dict(message)
        content, is_assistant = message.get("content"), message["role"] == "assistant"
        if isinstance(content, str):
            marked["content"] = self._content(content, Lost(index, "'content'", "text"), is_assistant)
        elif isinstance(content, list):
            marked["content"] = parts = list(content)
            for number, part in enumerate(content):
                if part["type"] == "text":
                    name = f"part {number + 1} of 'content'" if content[1:] else "'content'"
                    text = self._content(part["text"], Lost(index, name, "text"), is_assistant)
                    parts[number] = {**part, "text": text, _PART_KEY.format(index): ""}
        for key, value in message.items():
            if isinstance(value, str) and key not in KEYS and (key != "name" or message["role"] != "tool"):
                kind: Kind = "thought" if key in THOUGHTS else "key"
                marked[key] = self._segment(value, Lost(index, f"'{key}'", kind))
        if isinstance(call_id := message.get("tool_call_id"), str):
            marked["tool_call_id"] = self.ids.get(call_id, call_id)
        if isinstance(calls := message.get("tool_calls"), list):
            marked["tool_calls"] = []
            for number, call in enumerate(calls, start=1):
                name = f"call {number} of 'tool_calls'" if calls[1:] else "'tool_calls'"
                marked["tool_calls"].append(self._call(call, Lost(index, name, "text")))
        elif calls:
            marked["tool_calls"] = self._value(calls, Lost(index, "'tool_calls'", "text"))
        if call := message.get("function_call"):
            marked["function_call"] = self._call(call, Lost(index, "'function_call'", "text"))
        return marked

    def _content(self, text: str, loss: Lost, is_assistant: bool) -> str:
        """Mark the texts of a content. The assistant's texts between tags of thoughts get the kind "thought"."""
        pieces = _MARKS.split(text)
        thought_marks = [mark if _OPENS.fullmatch(mark) or _CLOSES.fullmatch(mark) else "" for mark in pieces[1::2]]
        before, behind = (  # for each piece: the last tag of thoughts before it, and the next tag after it
            list(accumulate(marks, lambda last, mark: mark or last, initial=""))
            for marks in (thought_marks, thought_marks[::-1])
        )
        thoughts = Lost(loss.message, f"the thoughts in {loss.what}", "thought")
        for number, (last, coming) in enumerate(zip(before, behind[::-1], strict=True)):
            is_thought = is_assistant and bool(_OPENS.fullmatch(last) or _CLOSES.fullmatch(coming))
            pieces[2 * number] = self._segment(pieces[2 * number], thoughts if is_thought else loss)
        return "".join(pieces)

    def _segment(self, text: str, loss: Lost) -> str:
        """The text with a mark in its middle. The template need not write the white space around the text."""
        if not (core := text.strip()):
            return text
        half = len(core) // 2
        middle = len(text) - len(text.lstrip()) + half
        self.texts.append(_Text(core, half, loss))
        return f"{text[:middle]}{_MARK.format(len(self.texts) - 1)}{text[middle:]}"

    def _call(self, call: Any, loss: Lost) -> Any:
        if not isinstance(call, dict):
            return self._value(call, loss)
        marked = dict(call)
        for key in _OF_CALLS:
            if isinstance(arguments := call.get(key), dict):
                marked[key] = {}
                for name, value in arguments.items():
                    name_loss = loss._replace(what=f"the argument {name[:40]!r} of {loss.what}")
                    marked[key][self._name(name, name_loss)] = self._value(value, name_loss)
            elif arguments is not None:
                marked[key] = self._value(arguments, loss)
        if function := call.get("function"):
            marked["function"] = self._call(function, loss)
            name, call_id = function.get("name") if isinstance(function, dict) else None, call.get("id")
            if isinstance(name, str) and isinstance(call_id, str) and name and name in call_id:
                self.ids[call_id] = marked["id"] = call_id.replace(name, marked["function"]["name"])
        return marked

    def _value(self, value: Any, loss: Lost) -> Any:
        """Mark a JSON value: a mark goes into each text and after each key. A number replaces each other value."""
        if isinstance(value, str):
            return self._segment(value, loss)
        if isinstance(value, dict):
            return {self._name(key, loss): self._value(inner, loss) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._value(inner, loss) for inner in value]
        text = str(value) if type(value) in (int, float) else json.dumps(value)
        self.texts.append(_Text(text, 0, loss, is_value=True))
        return _NUMBER + len(self.texts) - 1 + (0.5 if isinstance(value, float) else 0)

    def _name(self, name: str, loss: Lost) -> str:
        if not name.strip():
            return name
        self.texts.append(_Text(name, len(name), loss))
        return name + _MARK.format(len(self.texts) - 1)
