"""Checks the messages and tools of a record with a conversation.

The content of a message is a text, or a list of parts: `{"type": "text", "text": …}` and `{"type": "image", …}`. An
image part without a value gets the next image of the record's column of images (`images/columns.py`).
"""

import copy
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from stillhouse.data.record import RecordError, column_value, parsed_json, value_in_words
from stillhouse.display import first_line, name_list

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

#: the keys with which other projects set the weight of a turn in the loss, or exclude the turn from the loss
MASKS = ("weight", "train", "loss")
#: ShareGPT's names of the roles. Chat templates do not know them, so no turn would be a target
OTHER_ROLES = {"human": "user", "gpt": "assistant"}
#: other names of the assistant. Only turns with the role assistant are targets, for all templates
_ASSISTANTS = ("ai", "bot", "chatbot", "chatgpt", "model")
#: marks the place of an image in a text
MARK = "<image>"
#: the keys for the value of an image part; a part can have only one of them
_IMAGE_KEYS = ("image", "url", "path", "base64", "image_url")
#: the maximum number of parts in the content of one message
MAX_PARTS = 10_000


def messages_of(fields: dict[str, Any], column: str) -> list[Message]:
    """The messages of a column, without null keys. Raises RecordError if the messages are invalid."""
    value = column_value(fields, column)
    if not isinstance(value, list):
        raise RecordError(f"'{column}' must be a list of messages, got {value_in_words(value)}")
    if not value:
        raise RecordError(f"'{column}' is empty")
    return [_message(message, f"message {number} of '{column}'") for number, message in enumerate(value, start=1)]


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise RecordError(f"{name} must be an object with 'role' and 'content', got {value_in_words(message)}")
    message = {key: value for key, value in message.items() if value is not None}  # Parquet adds absent keys as null
    for key in ("role", "content"):
        if key == "content" and (message.get("tool_calls") or message.get("function_call")):
            continue
        if key not in message:
            raise RecordError(f"{name} has no '{key}' (found {name_list(message)})")
        if key == "content" and isinstance(message[key], list):
            if len(parts := message[key]) > MAX_PARTS:
                raise RecordError(f"{name} has {len(parts):,} parts: expected at most {MAX_PARTS:,}")
            message[key] = [_part(part, f"part {number} of {name}") for number, part in enumerate(parts, start=1)]
            if not text_of(message).strip():  # some templates write such a list differently from an empty text
                message = with_joined_parts(message)
        elif not isinstance(message[key], str):
            expected = "a string" if key == "role" else "a string or a list of parts"
            raise RecordError(f"'{key}' of {name} must be {expected}, got {value_in_words(message[key])}")
    if expected := _expected_role(message["role"]):
        raise RecordError(f"'role' of {name} is {message['role']!r}: expected {expected!r} (system, user, assistant)")
    for number, call in enumerate(_calls(message), start=1):
        try:
            _parsed(call.get("arguments"))
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"'arguments' of call {number} of {name} is a string, but not the JSON of an object "
                f"({first_line(error)}), got {value_in_words(call['arguments'])}"
            ) from error
    return message


def _calls(message: Message) -> list[dict[str, Any]]:
    """The functions that a message calls, each with its `name` and `arguments`."""
    calls = message.get("tool_calls") or []
    calls = [*(calls if isinstance(calls, list) else []), message.get("function_call")]
    functions = (call.get("function", call) for call in calls if isinstance(call, dict))
    return [function for function in functions if isinstance(function, dict)]


def _parsed(arguments: Any) -> Any:
    """The arguments of a call, as an object if they are JSON text (OpenAI's form). Null and an empty text, which some
    programs write for a call without arguments, become an empty object, which models write for such a call.
    """
    if isinstance(arguments, str):
        arguments = parsed_json(arguments) if arguments.strip() else None
        if arguments is not None and not isinstance(arguments, dict):
            raise ValueError(f"it is {value_in_words(arguments)}")
    return {} if arguments is None else arguments


def with_arguments(message: Message, *, as_text: bool) -> Message:
    """The message with its calls' arguments as objects; with `as_text`, as JSON text (given text stays unchanged)."""
    if not _calls(message):
        return message
    message = copy.deepcopy(message)
    for function in _calls(message):
        parsed = _parsed(arguments := function.get("arguments"))
        if not as_text:
            function["arguments"] = parsed
        elif not isinstance(arguments, str) or not parsed:
            function["arguments"] = json.dumps(parsed, ensure_ascii=False)
    return message


@lru_cache(maxsize=256)
def _expected_role(role: str) -> str:
    """The correct name of a role that is misspelled or has another project's name; "" for every other role."""
    plain = role.strip().lower()
    expected = OTHER_ROLES.get(plain, "assistant" if plain in _ASSISTANTS else plain)
    if expected in ("system", "user", "assistant"):
        return expected if expected != role else ""
    return "assistant" if get_close_matches(plain, ["assistant"], cutoff=0.8) else ""


def _part(part: Any, name: str) -> dict[str, Any]:
    """Return the part as {type: "text", text} or {type: "image"}, with the key `image` if it names its image."""
    if not isinstance(part, dict):
        raise RecordError(f"{name} must be an object with 'type', got {value_in_words(part)}")
    part = {key: value for key, value in part.items() if value is not None}  # Parquet adds absent keys as null
    kind = part.get("type")
    other = next((key for key in (_IMAGE_KEYS if kind == "text" else ("text",)) if part.get(key)), None)
    if other is not None and kind in ("text", "image", "image_url"):
        raise RecordError(f"{name} has the type {kind!r} and the key '{other}': expected two parts")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RecordError(f"'text' of {name} must be a string, got {value_in_words(part.get('text'))}")
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise RecordError(f"'type' of {name} is {value_in_words(kind)}: expected 'text' or 'image'")
    values = {key: part[key] for key in _IMAGE_KEYS if key in part}
    if len(values) > 1:
        raise RecordError(f"{name} has {name_list(values)}: expected one of them")
    if not values:
        return {"type": "image"}
    key, value = values.popitem()
    if key == "image_url" and isinstance(value, dict):
        value = value.get("url")
    if key == "base64" and isinstance(value, str):
        value = f"data:image/;base64,{value}"
    return {"type": "image", "image": value}


def text_of(message: Message) -> str:
    """All text of a message's content; "" if it has no content."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def with_text_appended(message: Message, text: str) -> Message:
    """The message with this text at the end of its content."""
    content = message.get("content", "")
    if isinstance(content, str):
        return message | {"content": content + text}
    if content and content[-1]["type"] == "text":
        return message | {"content": [*content[:-1], content[-1] | {"text": content[-1]["text"] + text}]}
    return message | {"content": [*content, {"type": "text", "text": text}]}


def with_parts(message: Message) -> Message:
    """The message with its content as a list of parts, also for "", because some templates read the first part."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def with_joined_parts(message: Message) -> Message:
    """The message with its content as a string, if the content is a list of texts or absent."""
    content = message.get("content", [])
    if not isinstance(content, list) or any(part["type"] != "text" for part in content):
        return message
    return message | {"content": text_of(message)}


def require_targets(messages: list[Message], column: str) -> None:
    """Raise RecordError for an assistant's turn whose weight in the loss is not 1, which is not supported."""
    for number, message in enumerate(messages, start=1):
        mask = next((key for key in MASKS if message.get(key, 1) != 1), None)
        if mask is not None and message["role"] == "assistant":
            raise RecordError(
                f"'{mask}' of message {number} of '{column}' is {value_in_words(message[mask])}, but every turn of "
                "the assistant is a target with the weight 1: expected lists of messages as 'prompt' (before the "
                "first turn to train on) and 'completion', or records in which all turns have the weight 1"
            )


def tools_of(fields: dict[str, Any]) -> Tools:
    """The record's tools, or None. Raises RecordError unless they are a list of objects or the JSON text of such a
    list. (Parquet can store objects with different keys only as text.)
    """
    value = tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = parsed_json(tools)
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"'tools' is a string, but not JSON ({first_line(error)}), got {value_in_words(value)}"
            ) from error
    if tools is not None and not isinstance(tools, list):
        raise RecordError(f"'tools' must be a list of objects, or such a list as JSON, got {value_in_words(value)}")
    for number, tool in enumerate(tools or [], start=1):
        if not isinstance(tool, dict):
            raise RecordError(f"tool {number} of 'tools' must be an object, got {value_in_words(tool)}")
    return tools or None


def require_among(tools: list[dict[str, Any]], tools_in_run: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a record's tools. Raises RecordError for a tool that the run lacks or has with other parameters."""
    parameters = {tool["function"]["name"]: _parameters(tool) for tool in tools_in_run}
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in parameters:
            raise RecordError(
                f"'tools' has {value_in_words(name)}, which is not in rollout.tools: expected {name_list(parameters)}"
            )
        (names, _), (names_of_run, required_of_run) = _parameters({"function": function}), parameters[name]
        if not required_of_run <= names <= names_of_run:
            raise RecordError(
                f"'tools' has {name!r} with the parameters {name_list(names)}: expected the parameters in "
                f"rollout.tools, {name_list(names_of_run)}"
            )
    return tools


def _parameters(tool: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The names of a tool's parameters, and the names of its parameters without a default."""
    parameters = tool["function"].get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    return set(parameters.get("properties") or {}), set(parameters.get("required") or [])


def has_empty_answer(fields: Mapping[str, Any]) -> bool:
    """Whether a record has an answer without text: a completion, or an assistant turn with neither text nor a call of
    a tool nor another key.
    """
    answer = fields.get("completion", fields.get("messages"))
    if not isinstance(answer, list):
        return isinstance(answer, str) and not answer.strip()
    return any(
        message.get("role") == "assistant"
        and not text_of(message | {"content": message.get("content") or ""}).strip()
        and not any(value for key, value in message.items() if key not in ("role", "content"))
        for message in answer
    )
