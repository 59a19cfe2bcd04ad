"""Short chat templates with calls of tools in the formats of known families, and tools that a model may call."""

from typing import Any

from kit.toy_tokenizer import toy_tokenizer
from transformers import PreTrainedTokenizerFast

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
    "JSON in <tool_call>": HERMES,
    "<function=…> in <tool_call>": XML,
    "a JSON object with name": LLAMA,
    "a JSON list after [TOOL_CALLS]": MISTRAL,
    "[ARGS] after [TOOL_CALLS]": MISTRAL_ARGS,
    "to=functions": HARMONY,
}


def tool_tokenizer(template: str = HERMES, *added: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens of these templates; its end of sequence is `<|im_end|>`."""
    tokenizer = toy_tokenizer(adds_bos=False, eos_token="<|im_end|>")
    special = [
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|call|>",
        "<|return|>",
        "[TOOL_CALLS]",
        "[ARGS]",
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, *added]})
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
