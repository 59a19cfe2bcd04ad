"""Models for tests of weights in 8 or 4 bits, and the values of such weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit.runs import forward_backward
from kit.teacher_gradients import Gradients, named_gradients
from kit.toy_tokenizer import toy_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from stillhouse.loops.session import Session


def save_teacher(folder: Path, change: Callable[[Any], None] = lambda model: None, width: int = 64) -> Path:
    """Save a teacher. width: of its hidden states; nf4 on a CPU needs multiples of 64."""
    tokenizer = toy_tokenizer()
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def dequantized(weight: Any) -> Tensor:
    if hasattr(weight, "qdata"):
        return weight.dequantize()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def first_step(session: Session) -> Gradients:
    loss = forward_backward(session).sums["loss"]
    return loss, named_gradients(session.models.student)
