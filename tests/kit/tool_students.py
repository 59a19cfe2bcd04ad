"""A student that calls a tool: a small model that has learned one conversation with a call by heart."""

from pathlib import Path
from typing import Any

import torch
from kit.families import build
from kit.tool_templates import add, tool_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

SCHEMAS = [get_json_schema(add)]
QUESTION = "What is two and two?"


def conversation(reply: str = "4") -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": reply},
        {"role": "assistant", "content": "It is 4."},
    ]


def reference(tokenizer: PreTrainedTokenizerFast, reply: str = "4") -> tuple[list[int], list[int], int]:
    """The ids of the conversation up to the last end of a turn, the positions of the assistant's tokens, and the
    length of the prompt: all by transformers' `apply_chat_template`.
    """

    def ids(count: int, *, prompt: bool = False) -> list[int]:
        text: Any = tokenizer.apply_chat_template(
            conversation(reply)[:count], tools=SCHEMAS, tokenize=False, add_generation_prompt=prompt
        )
        return tokenizer(text.rstrip("\n") if not prompt else text, add_special_tokens=False)["input_ids"]

    turns = [(len(ids(count - 1, prompt=True)), len(ids(count))) for count in (2, 4)]
    return ids(4), [at for start, stop in turns for at in range(start, stop)], turns[0][0]


def save_tool_student(folder: Path) -> PreTrainedTokenizerFast:
    """Write the student; its greedy completion of `QUESTION` is the call, and after the reply 4 the answer."""
    tokenizer = tool_tokenizer()
    model = build("llama", seed=1, vocab_size=len(tokenizer))
    ids, targets, _ = reference(tokenizer)
    tokens, labels = torch.tensor([ids]), torch.full((1, len(ids)), -100)
    labels[0, targets] = tokens[0, targets]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(300):
        loss = model(tokens, labels=labels).loss
        if loss < 0.02:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.02, f"the student has not learned its call: {loss}"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer
