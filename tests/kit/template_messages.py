"""Chat templates with calls of tools in the formats of known families, and random conversations with the rule that
chat templates and `load_documents` must keep: each text of a message is in the document, or the record is refused, or
a warning names the text.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kit.toy_tokenizer import toy_tokenizer
from transformers import PreTrainedTokenizerFast

from stillhouse.data import LoadOptions, load_documents

_SYSTEM = "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def _chat(call: str, *, between: str = "\n", before: str = "") -> str:
    """A template whose turns are `<|im_start|>role … <|im_end|>`. call: how it writes `call.function`."""
    calls = f"{{% for call in message.tool_calls %}}{call}{{{{ '' if loop.last else '{between}' }}}}{{% endfor %}}"
    return (
        _SYSTEM + "{% for message in messages %}{% if message.role == 'tool' %}"
        "{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
        "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
        "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% else %}"
        "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}{% if message.tool_calls %}"
        + before
        + calls
        + "{% endif %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        + _PROMPT
    )


_JSON = "{{ '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + call.function.arguments | tojson + '}' }}"
HERMES = _chat("{{ '<tool_call>\n' }}" + _JSON + "{{ '\n</tool_call>' }}")
XML = _chat(
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for name, value in call.function.arguments.items() %}"
    "{% set is_json = value is mapping or value is sequence and value is not string %}"
    "{% set text = value | tojson if is_json else value | string %}"
    "{{ '<parameter=' + name + '>\n' + text + '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}"
)
LLAMA = (
    "{% for message in messages %}{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% endif %}{% endfor %}"
) + _chat(_JSON.replace("arguments\\\": '", "parameters\\\": '").replace('"arguments": ', '"parameters": '))
MISTRAL = _chat(_JSON, between=", ", before="{{ '[TOOL_CALLS] [' }}").replace(
    "{% endfor %}{% endif %}{{ '<|im_end|>", "{% endfor %}{{ ']' }}{% endif %}{{ '<|im_end|>"
)
MISTRAL_ARGS = _chat(
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}", between=""
)
HARMONY = (
    _SYSTEM + "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' + "
    "message.content | tojson + '<|end|>' }}"
    "{% elif message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + "
    "call.arguments | tojson + '<|call|>' }}{% elif message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}{% else %}"
    "{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
#: by the beginning of the title of their format
TEMPLATES = {
    "JSON in <tool_call>": HERMES, "<function=…> in <tool_call>": XML, "a JSON object with name": LLAMA,
    "a JSON list after [TOOL_CALLS]": MISTRAL, "[ARGS] after [TOOL_CALLS]": MISTRAL_ARGS,
    "to=functions": HARMONY,
}  # fmt: skip


def tool_tokenizer(template: str = HERMES, *added: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens of these templates; its end of sequence is `<|im_end|>`."""
    tokenizer = toy_tokenizer(adds_bos=False, eos_token="<|im_end|>")
    special = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "[TOOL_CALLS]"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, "[ARGS]", *added]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.chat_template = template
    return tokenizer


def add(a: int, b: float = 1.0) -> float:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def find(text: str, exact: bool, tags: list[str], where: dict) -> str:  # type: ignore[type-arg]
    """Finds a text.

    Args:
        text: What to find.
        exact: Whether the case matters.
        tags: Tags of the text.
        where: Other conditions.
    """
    return f"{text} {exact} {tags} {where}"


def echo(text: str) -> str:
    """Gives back a text.

    Args:
        text: The text.
    """
    return text


class Notes:
    """Tools with state."""

    def reset(self, prompt: str, record: dict[str, Any]) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> list[str]:
        """Writes a note.

        Args:
            text: The note.
        """
        self.notes.append(text)
        return self.notes


Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
ODD_ROLES = ("function", "ipython", "assistent", "bot", "model", "human")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def chat_templates() -> dict[str, str]:
    """The chat templates that TRL has, by their names."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    }


def template_messages(folder: Path) -> Callable[[random.Random], None]:
    """A subject of the campaign (`kit/subjects.py`). It raises AssertionError where the rule is broken."""
    tokenizers = {name: toy_tokenizer() for name in chat_templates()}
    for name, template in chat_templates().items():
        tokenizers[name].chat_template = template

    def load(draw: random.Random) -> None:
        name = draw.choice([*tokenizers])
        record, texts = random_record(draw)
        require_texts(folder / "given.jsonl", record, texts, tokenizers[name], prompts=draw.random() < 0.2)

    return load


def require_texts(
    path: Path,
    record: dict[str, Any],
    texts: list[tuple[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    prompts: bool,
) -> None:
    """Load a record and compare its text with what it must have.

    texts: pairs of a text and the key that has it, or "thoughts".
    prompts: load the part that a prompt has; the texts of the turns at its end are then not expected.
    """
    path.write_text(json.dumps(record))
    documents = load_documents(path, tokenizer, LoadOptions(max_tokens=50_000, prompts=prompts))
    body = tokenizer.decode(documents.tokens(0), clean_up_tokenization_spaces=False)
    warnings = " ".join(documents.report.warnings)
    for (text, key), count in Counter(texts).items():
        if prompts and not any(text in json.dumps(message, ensure_ascii=False) for message in prompt_of(record)):
            continue
        escaped = json.dumps(text)[1:-1]
        strings = (text, escaped, json.dumps(escaped)[1:-1])
        is_warned = key == "thoughts" and "the chat template does not write" in warnings
        assert is_warned or max(map(body.count, strings)) >= (1 if prompts else count), (text, key, body)


def prompt_of(record: dict[str, Any]) -> list[Message]:
    messages = list(record.get("prompt") or record["messages"])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def random_record(draw: random.Random) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A record with a conversation, and its texts with the keys that have them."""
    texts: list[tuple[str, str]] = []
    roles = [*draw.choice([(), (), ("system",), ("developer",)])]
    for _ in range(draw.choice([1, 1, 2, 3])):
        roles += ["user", "assistant"]
        if draw.random() < 0.3:
            roles += [*["tool"] * draw.choice([1, 1, 2]), "assistant"]
    if draw.random() < 0.3:
        roles[draw.randrange(len(roles))] = draw.choice([*ROLES, *ODD_ROLES])
    messages = [_message(draw, role, texts, roles[number + 1 :][:1] == ["tool"]) for number, role in enumerate(roles)]
    if messages[-1]["role"] == "assistant" and draw.random() < 0.4 and messages[1:]:
        return {"prompt": messages[:-1], "completion": messages[-1:]}, texts
    return {"messages": messages}, texts


def _message(draw: random.Random, role: str, texts: list[tuple[str, str]], calls: bool) -> Message:
    message: Message = {"role": role}
    form = draw.choice(["text", "text", "text", "parts", "none"]) if calls else draw.choice(["text", "text", "parts"])
    if form == "text":
        message["content"] = _text(draw, texts, "content")
        if role == "assistant" and draw.random() < 0.2:
            message["content"] = f"<think>\n{_text(draw, texts, 'thoughts')}\n</think>\n\n{message['content']}"
    elif form == "parts":
        parts = [{"type": "text", "text": _text(draw, texts, "content")} for _ in range(draw.choice([1, 1, 2]))]
        message["content"] = parts
    elif draw.random() < 0.5:
        message["content"] = None
    if role == "assistant" and draw.random() < 0.3:
        message[draw.choice(THOUGHTS)] = _text(draw, texts, "thoughts")
    if calls or (role == "assistant" and draw.random() < 0.1):
        message["tool_calls"] = [_call(draw, texts, number) for number in range(draw.choice([1, 1, 2]))]
    if role == "tool":
        message |= {"tool_call_id": "000000000", "name": "name0"}
    return message


def _call(draw: random.Random, texts: list[tuple[str, str]], number: int) -> dict[str, Any]:
    count, key = draw.choice([0, 1, 2, 2]), "tool_calls"
    arguments: Any = {_new_text(draw, texts, key): _value(draw, texts) for _ in range(count)}
    if not arguments:
        arguments = draw.choice([{}, None, "", "{}"])
    elif draw.random() < 0.3:
        arguments = json.dumps(arguments)
    function = {"name": _text(draw, texts, "tool_calls"), "arguments": arguments}
    return {"id": f"{number:09d}", "type": "function", "function": function}


def _value(draw: random.Random, texts: list[tuple[str, str]]) -> Any:
    """An argument: a text, a number, another value of JSON, or an object."""
    kind = draw.choice(["text", "text", "number", "values", "object"])
    if kind == "text":
        return _text(draw, texts, "tool_calls")
    if kind == "number":
        texts.append((str(number := draw.randint(10**6, 10**7)), "tool_calls"))
        return number
    values = [draw.choice([True, False, None, [], ""]) for _ in range(draw.choice([1, 1, 2]))]
    if kind == "values":
        return values if values[1:] else values[0]
    return {_new_text(draw, texts, "tool_calls"): value for value in values}


def _text(draw: random.Random, texts: list[tuple[str, str]], key: str) -> str:
    """A new text, or an earlier one of the same key."""
    earlier = [text for text, of_key in texts if of_key == key and not text.isdigit()]
    if earlier and draw.random() < 0.1:
        texts.append((text := draw.choice(earlier), key))
        return text
    return _new_text(draw, texts, key)


def _new_text(draw: random.Random, texts: list[tuple[str, str]], key: str) -> str:
    text = f"t{draw.randrange(10**9)}{draw.choice(['', ' two', ' é', ' say', '!'])}"
    texts.append((text, key))
    return text
