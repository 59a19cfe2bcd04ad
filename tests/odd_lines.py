"""One text among 40 with a token that no other text has, and students that come to grief over it."""

from pathlib import Path
from typing import Any

from runs import write_records
from toy_tokenizer import toy_tokenizer

ODD = "§"  # its first byte is a token of its own, and no other text has it
LINE = 23


def with_odd_line(folder: Path) -> None:
    """Write odd.jsonl: 40 texts, of which only one contains `ODD`."""
    texts = [f"{number} the still is heated slowly" for number in range(40)]
    texts[LINE - 1] = f"the {ODD} heads"
    write_records(folder / "odd.jsonl", [{"text": text} for text in texts])


def odd_id() -> int:
    return int(toy_tokenizer()(ODD, add_special_tokens=False)["input_ids"][0])


def vanishing(model: Any) -> None:
    """RMS norm without its epsilon: a row of 1e-19 is normalised well, and its gradient overflows."""
    _without_epsilon(model, 1e-19)


def vanished(model: Any) -> None:
    """The same of a row of zeros: the loss is not a number."""
    _without_epsilon(model, 0.0)


def _without_epsilon(model: Any, value: float) -> None:
    model.config.rms_norm_eps = 0.0
    model.get_input_embeddings().weight[0] = 1.0  # the padding's row of zeros would be NaN at once
    model.get_input_embeddings().weight[odd_id()] = value
