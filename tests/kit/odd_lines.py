"""Forty texts, one of which has a token that no other text has, and students that fail on this token."""

from pathlib import Path
from typing import Any

from kit.runs import write_records
from kit.toy_tokenizer import toy_tokenizer

ODD = "§"  # its first byte is a separate token, which no other text has
LINE = 23


def with_odd_line(folder: Path) -> None:
    """Write odd.jsonl: 40 texts, of which only one contains `ODD`."""
    texts = [f"{number} the still is heated slowly" for number in range(40)]
    texts[LINE - 1] = f"the {ODD} heads"
    write_records(folder / "odd.jsonl", [{"text": text} for text in texts])


def odd_id() -> int:
    return int(toy_tokenizer()(ODD, add_special_tokens=False)["input_ids"][0])


def vanishing(model: Any) -> None:
    """Set the odd token's embedding to 1e-19: RMS norm without epsilon normalises it, but the gradient overflows."""
    _without_epsilon(model, 1e-19)


def vanished(model: Any) -> None:
    """Set the odd token's embedding to 0: RMS norm without epsilon gives NaN, and so does the loss."""
    _without_epsilon(model, 0.0)


def _without_epsilon(model: Any, value: float) -> None:
    model.config.rms_norm_eps = 0.0
    model.get_input_embeddings().weight[0] = 1.0  # otherwise the padding token's zeros would give NaN in every step
    model.get_input_embeddings().weight[odd_id()] = value
