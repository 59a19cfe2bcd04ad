"""Writes the inputs of small runs from fixed seeds: model folders, tokenizers and data. It imports no stillhouse.

The models have the configuration classes of transformers. Their weights are larger than usual, and norms and biases
are not ones and zeros, so that a mistake changes the result. Paths in a configuration are relative to the run's
folder, so that no result depends on where the folder is.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

TEXT = [
    "The still is heated slowly, and what boils first leaves first: the heads, the heart, the tails.",
    "A student learns from a teacher by matching what the teacher would have said next, word by word.",
    "def kl(p, q):\n    return sum(a * (a.log() - b.log()) for a, b in zip(p, q, strict=True))",
    "What is the capital of France? The capital of France is Paris. Two and two is four.",
    "Numbers such as 1024, 2048 and 4096 occur in every configuration; so do brackets [], {} and ().",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
SUBJECTS = ("math", "code")

_SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}


def _llama(**options: Any) -> PreTrainedConfig:
    return LlamaConfig(**{**_SHAPE, **options})


def _qwen3(**options: Any) -> PreTrainedConfig:
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return Qwen3Config(**{**_SHAPE, "head_dim": 16, **windows, **options})


def _qwen3_moe(**options: Any) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        **{**_SHAPE, **_EXPERTS, "head_dim": 16, "num_experts": 4, "norm_topk_prob": True, **options}
    )


def _glm4_moe(**options: Any) -> PreTrainedConfig:
    """A family that has MTP layers of its own class."""
    return Glm4MoeConfig(
        **{**_SHAPE, **_EXPERTS, "head_dim": 16, "n_routed_experts": 4, "use_qk_norm": True, **options}
    )


FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
}


@dataclass(frozen=True)
class Model:
    """A model folder. tokenizer: a key of TOKENIZERS. vocabulary: rows of embedding and head; 0: the tokenizer's."""

    family: str
    seed: int
    layers: int = 2
    tied: bool = False
    vocabulary: int = 0
    tokenizer: str = "small"
    options: tuple[tuple[str, Any], ...] = ()

    def write(self, folder: Path) -> None:
        tokenizer = make_tokenizer(self.tokenizer)
        config = FAMILIES[self.family](
            vocab_size=self.vocabulary or len(tokenizer),
            num_hidden_layers=self.layers,
            tie_word_embeddings=self.tied,
            **dict(self.options),
        )
        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


# tokenizers

#: name → number of tokens, and the lines on which it is trained
TOKENIZERS: dict[str, tuple[int, list[str]]] = {"small": (400, TEXT), "other": (340, TEXT[1::-1])}


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that puts `<s>` before each text."""
    vocabulary, text = TOKENIZERS[name]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(text, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


# data


def write_texts(path: Path, records: int, seed: int, longest: int = 8) -> None:
    """Write different texts of one to `longest` words, each with a subject and an answer."""
    draw = random.Random(seed)
    words = " ".join(TEXT).split()
    texts = [f"{number} " + " ".join(draw.choices(words, k=draw.randint(1, longest))) for number in range(records)]
    write_records(
        path,
        [
            {"text": text, "subject": SUBJECTS[number % 3 == 0], "answer": words[number % len(words)]}
            for number, text in enumerate(texts)
        ],
    )


def write_prompts(path: Path, records: int) -> None:
    pairs = [(f"Two and {number} is", f" {number + 2}.") for number in range(records)]
    write_records(path, [{"prompt": prompt, "completion": completion} for prompt, completion in pairs])


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


#: a module with a reward, which the configuration names as rewards:length
REWARDS = '''def length(prompt: str, completion: str, record: dict) -> float:
    """Longer completions have a larger reward."""
    return float(len(completion)) + 0.1 * len(record["completion"])
'''


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
