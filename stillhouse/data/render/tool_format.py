"""The format in which a chat template writes calls of tools, and the replies to them. It is proven for the template.

transformers' response templates parse a turn. The format of a template is not guessed by the model's name: the
template writes calls of all tools, and a format is used only if it gives the same calls back. `FORMATS` has the
common formats; a tokenizer may also have a response template of its own.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response

from stillhouse.data.media import MediaProcessor
from stillhouse.data.read.messages import Message
from stillhouse.data.record import RecordError
from stillhouse.data.render.assistant_turns import ANCHOR
from stillhouse.data.render.chat_template import ChatTemplate
from stillhouse.data.render.ordinary_text import OrdinaryText
from stillhouse.data.render.reply_format import first_special
from stillhouse.display import first_line

#: the name of a tool in replies to calls of no tool, which the template may write
UNKNOWN = "unknown_tool"
#: errors of transformers' parser for text that is no call
_UNPARSED = (ValueError, TypeError, KeyError, RecursionError)
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_TEXT: dict[str, Any] = {"content": {"content": "text"}}
_THOUGHTS: dict[str, Any] = {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"}}


def _fields(tool_calls: Mapping[str, Any], others: Mapping[str, Any] = _THOUGHTS) -> dict[str, Any]:
    """A response template. The prefix of a turn is only the generation prompt, so that no anchor is needed."""
    return {"start_anchor": "\0", "fields": {**others, "tool_calls": dict(tool_calls), **_TEXT}}


#: by name: a text with which calls begin, and the response template
FORMATS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "JSON in <tool_call> (Hermes, Qwen)": (
        "<tool_call>",
        _fields(
            {
                **{"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
                "transform": {"type": "function", "function": "{content}"},
            }
        ),
    ),
    "<function=…> in <tool_call> (Qwen3-Coder, Qwen3.5, Nemotron)": (
        "<tool_call>",
        _fields(
            {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                **{"close_pattern": r"</function>\s*</tool_call>", "repeats": True, "content": "xml-inline"},
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
                    "value_parser": {"name": "text", "args": {"strip": False}},
                },
                "transform": _CALL,
            }
        ),
    ),
    "<arg_key> and <arg_value> in <tool_call> (GLM)": (
        "<tool_call>",
        _fields(
            {
                "open_pattern": r"<tool_call>(?P<name>[^\s<]+)",
                **{"close": "</tool_call>", "repeats": True, "content": "xml-inline", "transform": _CALL},
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                    "value_parser": {"name": "text", "args": {"strip": False}},
                },
            }
        ),
    ),
    "a JSON object with name and parameters (Llama 3)": (
        '{"name"',
        _fields(
            {
                "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
                **{"close_pattern": r"\}\s*$", "repeats": True, "content": "json", "transform": _CALL},
            }
        ),
    ),
    "a JSON list after [TOOL_CALLS] (Mistral)": (
        "[TOOL_CALLS]",
        _fields(
            {
                **{"open": "[TOOL_CALLS]", "close_pattern": "$", "content": "json", "transform_each": True},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            }
        ),
    ),
    "[ARGS] after [TOOL_CALLS] (Mistral)": (
        "[TOOL_CALLS]",
        _fields(
            {
                "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[\s]+)\[ARGS\]",
                **{"close_pattern": r"(?=\[TOOL_CALLS\])|$", "repeats": True, "content": "json", "transform": _CALL},
            }
        ),
    ),
    "to=functions in a commentary (gpt-oss)": (
        "to=functions.",
        _fields(
            {
                # the template writes the header in another order than the model
                "open_pattern": r"to=functions\.(?P<name>[^\s<]+)\s*(?:<\|channel\|>commentary)?\s*"
                r"(?:<\|constrain\|>)?\s*json<\|message\|>",
                **{"close_pattern": r"<\|call\|>|$", "repeats": True, "content": "json", "transform": _CALL},
            },
            {
                "thinking": {
                    "open": "<|channel|>analysis<|message|>",
                    **{"close": "<|end|>", "content": "text", "repeats": True, "join": "\n"},
                }
            },
        ),
    ),
}


@dataclass(frozen=True)
class Call:
    """A call of a tool. problem: why it cannot be made; empty if it can."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


class ToolFormat:
    """How a tokenizer's chat template writes calls of tools and replies to them.

    schemas: the JSON schemas of the tools, as transformers' `get_json_schema` makes them.

    Raises ValueError if no format is proven: if a call that the template writes is not parsed back as the same call,
    if the template does not write a reply behind the turn, or if it writes the turn in another way with a reply.
    """

    def __init__(self, template: ChatTemplate, schemas: Sequence[dict[str, Any]]):
        self.template, self.schemas, self.tokenizer = template, list(schemas), template.tokenizer
        self.names = [schema["function"]["name"] for schema in schemas]
        self._lock = threading.Lock()
        self.text = OrdinaryText(self.tokenizer, "rollout.tools")
        self._special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        before, prompted = (self._text([_QUESTION], prompt=prompt) for prompt in (False, True))
        if not prompted.startswith(before) or prompted == before:
            raise self._error("has no generation prompt behind the messages")
        self._before, self._prompted, self.prompt = before, prompted, prompted.removeprefix(before)
        self.marker, self._tail = self._end_of_turn()
        self.marker_id: int = self.tokenizer.convert_tokens_to_ids(self.marker)
        self.title, self._opening, self._parsed_by = self._proven()
        self.has_several = self._writes_several()
        self._prove_replies(1)
        if self.has_several:
            self._prove_replies(2)

    def calls(self, turn: str) -> list[Call]:
        """The calls in a turn of the model, without its end marker; [] if the turn has no call.

        A call with a problem has one that the model should read.
        """
        try:
            parsed = self._parse(turn, self.prompt, self._parsed_by)
        except _UNPARSED as error:
            return [Call(UNKNOWN, {}, f"the call cannot be parsed ({first_line(error)})")]
        calls = [self._checked(call) for call in parsed]
        if not calls and self._opening in turn.rpartition("</think>")[2]:
            return [Call(UNKNOWN, {}, "the call cannot be parsed")]
        if len(calls) > 1 and not self.has_several:
            return [Call(calls[0].name, {}, "only one call at a time is possible")]
        return calls

    def reply_ids(self, names: Sequence[str], replies: Sequence[str], *, ends: bool = False) -> list[int]:
        """The tokens between the end of a turn and the beginning of the next turn.

        names: of the tools that the turn calls. replies: the texts of their replies. Added tokens of the tokenizer
            in them become ordinary text.
        ends: whether the end marker of the turn comes first, because the model has not generated it.
        """
        ids = self.text.ids_within(partial(self._suffix, names), replies)
        return [self.marker_id, *ids] if ends else ids

    def _end_of_turn(self) -> tuple[str, str]:
        """The token with which a turn with a call ends, and the text from the anchor in the call's argument to it.

        If the template writes no token behind the last turn (GLM), the token is the header of the reply.
        """
        called = self._text([_QUESTION, _calling([(self.names[0], {"a": ANCHOR})])])
        behind = called.partition(ANCHOR)[2].rstrip()
        marker = max((text for text in self._special if behind.endswith(text)), key=len, default="")
        if not marker and behind:
            replied = self._conversation(self.names[:1], ["a"]).partition(ANCHOR)[2]
            marker = first_special(replied.removeprefix(behind), self._special) if replied.startswith(behind) else ""
            behind += marker
        if not marker:
            raise self._error(
                f"does not write a call of {self.names[0]!r} with its argument and a special token at its end "
                f"(it ends with {called[-60:]!r})"
            )
        return marker, behind

    def _proven(self) -> tuple[str, str, dict[str, Any]]:
        """Title, opening and response template of the format that gives back all calls."""
        parsed_by = getattr(self.tokenizer, "response_template", None)
        formats = {"the tokenizer's response_template": (_opening_of(parsed_by), parsed_by)} if parsed_by else {}
        problem = ""
        for title, (opening, parsed_by) in {**formats, **FORMATS}.items():
            difference = self._difference(parsed_by)
            if not difference:
                return title, opening, parsed_by
            problem = problem or difference
        raise self._error(f"{problem}, and no other of the {len(formats) + len(FORMATS)} formats gives it back")

    def _difference(self, parsed_by: dict[str, Any]) -> str:
        """The first call that is not parsed back as the same call, in words; "" if there is none."""
        for calls in [[], *([call] for schema in self.schemas for call in _examples(schema))]:
            turn, prefix = self._turn(calls)
            expected = [{"name": name, "arguments": arguments} for name, arguments in calls]
            try:
                parsed: Any = [call["function"] for call in self._parse(turn, prefix, parsed_by)]
            except _UNPARSED as error:
                parsed = first_line(error)
            if [_bare(call) for call in parsed] != expected if isinstance(parsed, list) else True:
                return f"writes {str(expected)[:100]} as {turn[-100:]!r}, which is parsed back as {parsed!r:.60}"
        return ""

    def _writes_several(self) -> bool:
        calls = [(self.names[0], {"a": text}) for text in (f"one{ANCHOR}", f"two{ANCHOR}")]
        try:
            turn, prefix = self._turn(calls)
            parsed = self._parse(turn, prefix, self._parsed_by)
        except _UNPARSED:
            return False
        return [_bare(call["function"]) for call in parsed] == [{"name": n, "arguments": a} for n, a in calls]

    def _prove_replies(self, count: int) -> None:
        replies = [f"Reply{ANCHOR}{number}" for number in range(count)]
        names = [self.names[0]] * count
        suffix = self._suffix(names, replies)
        places = [suffix.find(reply) for reply in replies]
        if -1 in places or places != sorted(places):
            raise self._error(f"does not write the replies of tools behind their calls, but {suffix[:300]!r}")
        if not suffix.endswith(self.prompt):
            raise self._error(
                f"ends with {suffix[-80:]!r} after a reply, and not with its generation prompt {self.prompt!r}"
            )
        complete = self._conversation(names, replies)
        head = complete.removesuffix(suffix)
        if self.text.template_ids(complete) != self.text.template_ids(head) + self.reply_ids(names, replies):
            raise self._error("writes replies of which the first token also has characters of the turn before")

    def _turn(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, str]:
        """A turn without its end marker as the model would generate it, and the prefix for the parser."""
        message = _calling(calls) if calls else {"role": "assistant", "content": "Nothing more is needed."}
        text = self._text([_QUESTION, message])
        prefix = self.prompt if text.startswith(self._prompted) else ""
        return text.removeprefix(self._prompted if prefix else self._before).rstrip().removesuffix(
            self.marker
        ), prefix

    def _suffix(self, names: Sequence[str], replies: Sequence[str]) -> str:
        complete = self._conversation(names, replies)
        _, anchor, behind = complete.partition(ANCHOR)
        if not anchor or not behind.startswith(self._tail):
            raise self._error(
                f"writes {behind[: len(self._tail)]!r} behind the call if a reply follows, and {self._tail!r} "
                "otherwise"
            )
        return behind.removeprefix(self._tail)

    def _conversation(self, names: Sequence[str], replies: Sequence[str]) -> str:
        calls = [(name, {"a": "b"}) for name in names[:-1]]
        answers: list[Message] = [
            {"role": "tool", "name": name, "tool_call_id": _call_id(number), "content": reply}
            for number, (name, reply) in enumerate(zip(names, replies, strict=True))
        ]
        return self._text([_QUESTION, _calling([*calls, (names[-1], {"a": ANCHOR})]), *answers], prompt=True)

    def _parse(self, turn: str, prefix: str, parsed_by: dict[str, Any]) -> list[dict[str, Any]]:
        message = parse_response(turn, parsed_by, prefix=prefix, tools=self.schemas)
        calls: list[dict[str, Any]] = message.get("tool_calls", [])
        return calls

    def _checked(self, call: Any) -> Call:
        function = call.get("function") if isinstance(call, dict) else None
        function = _bare(function) if isinstance(function, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str):
            return Call(UNKNOWN, {}, "the call has no name of a tool")
        if name not in self.names:
            return Call(UNKNOWN, {}, f"there is no tool {name[:80]!r}: expected {', '.join(self.names)}")
        if not isinstance(arguments, dict):
            return Call(name, {}, "the arguments of the call are no JSON object")
        return Call(name, arguments)

    def _text(self, messages: list[Message], *, prompt: bool = False) -> str:
        with self._lock:
            try:
                return self.template.text(messages, self.schemas, prompt=prompt)
            except RecordError as error:
                raise self._error(f"cannot write a conversation with tools: {error}") from error

    def _error(self, problem: str) -> ValueError:
        return ValueError(
            f"the chat template of {self.tokenizer.name_or_path!r} {problem}: expected calls of tools "
            "that can be parsed (data.chat_template), or a tokenizer with a response_template"
        )


def tool_format(
    tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]], processor: MediaProcessor | None = None
) -> ToolFormat:
    """The proven format of a tokenizer's chat template; see `ToolFormat`. processor: see `ChatTemplate`."""
    return ToolFormat(ChatTemplate(tokenizer, ("messages",), "none", processor), schemas)


_QUESTION: Message = {"role": "user", "content": "Please help."}


def _calling(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Message:
    message_calls = [
        {"id": _call_id(number), "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": message_calls}


def _call_id(number: int) -> str:
    return f"{number:09d}"  # the form that Mistral's templates require


def _bare(function: Any) -> Any:
    """A call without keys such as an id. Templates write no arguments in different ways."""
    if not isinstance(function, dict):
        return function
    return {"name": function.get("name"), "arguments": function.get("arguments") or {}}


def _opening_of(response_template: Mapping[str, Any]) -> str:
    opening = response_template.get("fields", {}).get("tool_calls", {}).get("open")
    return opening if isinstance(opening, str) else "\0"


def _examples(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls of a tool with all its arguments: easy ones, and ones that a careless format would change."""
    function = schema["function"]
    properties = function.get("parameters", {}).get("properties", {})
    for values in _VALUES:
        yield function["name"], {name: _value(of, values) for name, of in properties.items()}


_VALUES: Sequence[Mapping[str, Any]] = (
    {"string": "Paris", "integer": 7, "number": 2.5, "boolean": True, "array": [1, 2], "object": {"a": 1}},
    {
        **{"string": '75001 "b" <c>\n{d} [é]', "integer": -12, "number": 0.125, "boolean": False},
        **{"array": ["a", "b"], "object": {"a": {"b": [1, "c"]}}},
    },
    {"string": "75001", "integer": 0, "number": 1e-3, "boolean": True, "array": [], "object": {}},
)


def _value(schema: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    kind = schema.get("type", "string")
    if choices := schema.get("enum"):
        return choices[0]
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "array" and isinstance(items := schema.get("items"), Mapping) and items:
        return [_value(items, values)] * len(values["array"])
    return values.get(kind, values["string"])
