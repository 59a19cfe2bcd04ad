"""The format in which a chat template writes calls of tools and the replies to these calls.

The format of a template is not guessed from the model's name, but proven: the template writes calls of all tools, and
a format is used only if it parses the same calls from this text. A format is a response template of transformers.
`FORMATS` has the common formats, and a tokenizer can have a response template of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response

from stillhouse.agents.reply_format import QUESTION, TurnFormat
from stillhouse.data.media import MediaProcessor
from stillhouse.data.read.messages import Message
from stillhouse.data.render.templates import ANCHOR
from stillhouse.display import first_line

#: the JSON schema of a tool, as transformers' `get_json_schema` makes it
Schema = dict[str, Any]
#: the name of the tool in replies to calls of unknown tools; some templates write the name into the reply
UNKNOWN = "unknown_tool"
#: errors of transformers' parser for a text that is not a call
_UNPARSED = (ValueError, TypeError, KeyError, RecursionError)
_WHOLE_CALL = {"type": "function", "function": "{content}"}
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THOUGHTS: dict[str, Any] = {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"}}


def _format(opening: str, thoughts: Mapping[str, Any] = _THOUGHTS, **calls: Any) -> tuple[str, dict[str, Any]]:
    """Return the text with which calls begin, and the response template.

    calls: additional entries of the template's field `tool_calls`.
    """
    tool_calls = {"repeats": True, "content": "json", "transform": _CALL} | calls
    fields = {**thoughts, "tool_calls": tool_calls, "content": {"content": "text"}}
    # the prefix that the parser gets is only the generation prompt, so the parser needs no anchor to find the turn
    return opening, {"start_anchor": "\0", "fields": fields}


#: the parser for the values of arguments that are written in tags
_TEXT = {"name": "text", "args": {"strip": False}}
#: the common formats, by their names
FORMATS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "JSON in <tool_call> (Hermes, Qwen)": _format(
        "<tool_call>", open="<tool_call>", close="</tool_call>", transform=_WHOLE_CALL
    ),
    "<function=…> in <tool_call> (Qwen3-Coder, Qwen3.5, Nemotron)": _format(
        "<tool_call>",
        open_pattern=r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            "value_parser": _TEXT,
        },
    ),
    "<arg_key> and <arg_value> in <tool_call> (GLM)": _format(
        "<tool_call>",
        open_pattern=r"<tool_call>(?P<name>[^\s<]+)",
        close="</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            "value_parser": _TEXT,
        },
    ),
    "a JSON object with name and parameters (Llama 3)": _format(
        '{"name"', open_pattern=r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*', close_pattern=r"\}\s*$"
    ),
    "a JSON list after [TOOL_CALLS] (Mistral)": _format(
        "[TOOL_CALLS]",
        open="[TOOL_CALLS]",
        close_pattern="$",
        repeats=False,
        transform_each=True,
        transform={"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    ),
    "[ARGS] after [TOOL_CALLS] (Mistral)": _format(
        "[TOOL_CALLS]",
        open_pattern=r"\[TOOL_CALLS\](?P<name>[^\[\s]+)\[ARGS\]",
        close_pattern=r"(?=\[TOOL_CALLS\])|$",
    ),
    "to=functions in a commentary (gpt-oss)": _format(
        "to=functions.",
        {
            "thinking": {
                "open": "<|channel|>analysis<|message|>",
                **{"close": "<|end|>", "content": "text", "repeats": True, "join": "\n"},
            }
        },
        # the template writes the parts of the header in another order than the model
        open_pattern=r"to=functions\.(?P<name>[^\s<]+)\s*(?:<\|channel\|>commentary)?\s*"
        r"(?:<\|constrain\|>)?\s*json<\|message\|>",
        close_pattern=r"<\|call\|>|$",
    ),
}
#: values of arguments by their JSON types: simple values, and values that an unsuitable format would change
_VALUES: Sequence[Mapping[str, Any]] = (
    {"string": "Paris", "integer": 7, "number": 2.5, "boolean": True, "array": [1, 2], "object": {"a": 1}},
    {
        **{"string": '75001 "b" <c>\n{d} [é]', "integer": -12, "number": 0.125, "boolean": False},
        **{"array": ["a", "b"], "object": {"a": {"b": [1, "c"]}}},
    },
    {"string": "75001", "integer": 0, "number": 1e-3, "boolean": True, "array": [], "object": {}},
)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. problem: the reason why the call cannot be made, or ""."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


class ToolFormat(TurnFormat):
    """How a tokenizer's chat template writes calls of tools and replies to them.

    schemas: the schemas of the tools.
    processor: see `ChatTemplate`.

    Raises ValueError if no format parses the calls that the template writes as the same calls, if the template does
    not write a reply after the turn, or if it writes the turn differently when a reply follows.
    """

    _key, _what = "rollout.tools", "a conversation with tools"
    _expected = "a data.chat_template whose tool calls can be parsed, or a tokenizer with a response_template"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Schema], processor: MediaProcessor | None = None
    ):
        self.schemas, self.names = list(schemas), [schema["function"]["name"] for schema in schemas]
        super().__init__(tokenizer, processor, _replied(self.names[:1], ["a"]), self.schemas)
        if not self._prompted.startswith(self._before) or self._prompted == self._before:
            raise self._error("has no generation prompt after the messages")
        if not self.marker:
            raise self._error(
                f"does not write a call of {self.names[0]!r} with its argument and a special token at its end "
                f"(it ends with {self._last_turn[-60:]!r})"
            )
        self.title, self._opening, self._parsed_by = self._proven()
        several = [(self.names[0], {"a": text}) for text in (f"one{ANCHOR}", f"two{ANCHOR}")]
        try:
            self.has_several = not self._difference(several, self._parsed_by)
        except ValueError:  # the template does not accept two calls
            self.has_several = False
        for count in (1, 2) if self.has_several else (1,):
            names, replies = self.names[:1] * count, [f"Reply{ANCHOR}{number}" for number in range(count)]
            messages = _replied(names, replies)
            suffix = self._suffix(messages, self.schemas)
            places = [suffix.find(text) for text in replies]
            if -1 in places or places != sorted(places):
                raise self._error(f"does not write the replies of tools after their calls, but {suffix[:300]!r}")
            self._prove_ids(messages, self.schemas, self.reply_ids(names, replies))

    def calls(self, turn: str) -> list[ToolCall]:
        """The calls in a turn of the model. The problem of a call is a text for the model.

        turn: the text of the turn without its end marker.
        """
        try:
            message = parse_response(turn, self._parsed_by, prefix=self.prompt, tools=self.schemas)
        except _UNPARSED as error:
            return [ToolCall(UNKNOWN, {}, f"the call cannot be parsed ({first_line(error)})")]
        calls = [self._checked(call) for call in message.get("tool_calls", [])]
        if not calls and self._opening in turn.rpartition("</think>")[2]:
            return [ToolCall(UNKNOWN, {}, "the call cannot be parsed")]
        if len(calls) > 1 and not self.has_several:
            return [ToolCall(calls[0].name, {}, "only one call at a time is possible")]
        return calls

    def reply_ids(self, names: Sequence[str], replies: Sequence[str], *, ends: bool = False) -> list[int]:
        """The tokens between the end of a turn and the beginning of the next turn (see `ReplyFormat`).

        names: the names of the tools that the turn calls.
        replies: the texts of the tools' replies.
        """
        ids = self.text.ids_within(lambda texts: self._suffix(_replied(names, texts), self.schemas), replies)
        return [self.marker_id, *ids] if ends else ids

    def _proven(self) -> tuple[str, str, dict[str, Any]]:
        """The title, the opening and the response template of the first format that parses all written calls."""
        formats, problem = dict(FORMATS), ""
        if parsed_by := getattr(self.tokenizer, "response_template", None):
            opening = parsed_by.get("fields", {}).get("tool_calls", {}).get("open")
            opening = opening if isinstance(opening, str) else "\0"
            formats = {"the tokenizer's response_template": (opening, parsed_by)} | formats
        examples: list[list[tuple[str, dict[str, Any]]]] = [[]]
        for schema in self.schemas:
            properties = schema["function"].get("parameters", {}).get("properties", {})
            for values in _VALUES:
                arguments = {name: _example(argument, values) for name, argument in properties.items()}
                examples.append([(schema["function"]["name"], arguments)])
        for title, (opening, parsed_by) in formats.items():
            difference = next(filter(None, (self._difference(calls, parsed_by) for calls in examples)), "")
            if not difference:
                return title, opening, parsed_by
            problem = problem or difference
        raise self._error(f"{problem}, and none of the {len(formats)} formats parses all calls without a change")

    def _difference(self, calls: Sequence[tuple[str, Mapping[str, Any]]], parsed_by: dict[str, Any]) -> str:
        """A description of the difference between a turn's calls and the calls parsed from its text, or ""."""
        message = _calling(calls) if calls else {"role": "assistant", "content": "Nothing more is needed."}
        text = self._written([QUESTION, message], self.schemas)
        # if the template also writes the generation prompt before this turn, the parser gets it as the prefix
        prefix = self.prompt if text.startswith(self._prompted) else ""
        turn = text.removeprefix(self._prompted if prefix else self._before).rstrip().removesuffix(self.marker)
        expected = [{"name": name, "arguments": arguments} for name, arguments in calls]
        try:
            parsed_message = parse_response(turn, parsed_by, prefix=prefix, tools=self.schemas)
            parsed: Any = [call["function"] for call in parsed_message.get("tool_calls", [])]
            if [_bare(call) for call in parsed] == expected:
                return ""
        except _UNPARSED as error:
            parsed = first_line(error)
        return f"writes {str(expected)[:100]} as {turn[-100:]!r}, which is parsed as {parsed!r:.60}"

    def _checked(self, call: Any) -> ToolCall:
        function = _bare(call.get("function")) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(name := function["name"], str):
            return ToolCall(UNKNOWN, {}, "the call has no name of a tool")
        if name not in self.names:
            return ToolCall(UNKNOWN, {}, f"there is no tool {name[:80]!r}: expected {', '.join(self.names)}")
        if not isinstance(function["arguments"], dict):
            return ToolCall(name, {}, "the arguments of the call are no JSON object")
        return ToolCall(name, function["arguments"])


def _calling(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Message:
    """A turn with calls. The ids of the calls have nine digits, because Mistral's templates require this."""
    message_calls = [
        {"id": f"{number:09d}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": message_calls}


def _replied(names: Sequence[str], replies: Sequence[str]) -> list[Message]:
    """A conversation with calls of these tools and the replies to them. The anchor is in the last call."""
    answers = [
        {"role": "tool", "name": name, "tool_call_id": f"{number:09d}", "content": text}
        for number, (name, text) in enumerate(zip(names, replies, strict=True))
    ]
    called = _calling([*((name, {"a": "b"}) for name in names[:-1]), (names[-1], {"a": ANCHOR})])
    return [QUESTION, called, *answers]


def _bare(function: Any) -> Any:
    """A call with only its name and arguments. Templates write empty arguments in different ways: they become {}."""
    if not isinstance(function, dict):
        return function
    return {"name": function.get("name"), "arguments": function.get("arguments") or {}}


def _example(schema: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    kind = schema.get("type", "string")
    if choices := schema.get("enum"):
        return choices[0]
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "array" and isinstance(items := schema.get("items"), Mapping) and items:
        return [_example(items, values)] * len(values["array"])
    return values.get(kind, values["string"])
