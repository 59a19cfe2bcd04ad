"""Writes the demo's newly initialised student, and the files of an example run. Nothing is downloaded or trained.

The student has the teacher's family and vocabulary, and a quarter of the teacher's parameters.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from stillhouse.config.yaml_text import write_yaml
from stillhouse.tools.demo.corpus import NamedText, collect_split, write_jsonl

TEACHER = Path(__file__).parent / "teacher"
#: the best learning rate of 2e-3, 3e-3 and 4e-3 for the demo's student without a teacher (docs/log.md)
LEARNING_RATE = 3e-3
#: the steps of the example run, which takes about two minutes on two cores
TRIAL_STEPS = 200

_HEADER = """\
# The demo's student learns from the demo's teacher.
# Change any key in this file, or on the command line, such as train.steps=50; docs/config.md has all keys.
# A folder contains one run: for another run, also change `out`.
"""


def new_student(seed: int) -> PreTrainedModel:
    """Return a newly initialised student with half the teacher's width and one layer less, and so about a quarter of
    the teacher's parameters. The global random state on the CPU does not change.
    """
    config = AutoConfig.from_pretrained(TEACHER, trust_remote_code=False)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, name, getattr(config, name) // 2)
    config.num_hidden_layers -= 1
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def save_new_student(folder: Path, seed: int) -> None:
    """Write a new student and the teacher's tokenizer as an ordinary Hugging Face model folder."""
    new_student(seed).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TEACHER, trust_remote_code=False).save_pretrained(folder)


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: Iterable[NamedText]) -> torch.Tensor:
    """Return the documents as one sequence of token ids, with an end-of-sequence token after each document."""
    ids = tokenizer([document.text for document in documents], add_special_tokens=False)["input_ids"]
    return torch.tensor([token for document in ids for token in [*document, tokenizer.eos_token_id]])


def write_text_run(folder: Path, seed: int = 0) -> Path:
    """Write the demo's texts, a new student, and run.yaml if it does not exist. Return the path of run.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(collect_split("student"), folder / "train.jsonl")
    write_jsonl(collect_split("held_out"), folder / "held_out.jsonl")
    save_new_student(folder / "student", seed)
    path = folder / "run.yaml"
    if not path.exists():
        settings = text_settings(folder, TRIAL_STEPS) | {"out": str(folder / "first")}
        path.write_text(_HEADER + write_yaml(settings), encoding="utf-8")
    return path


def text_settings(folder: Path, steps: int) -> dict[str, Any]:
    """Return the configuration of a run with the demo's models and texts, without the key `out`."""
    return {
        "student": {"model": str(folder / "student")},
        "teacher": {"model": str(TEACHER), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "held_out.jsonl"), "max_tokens": 256},
        "objective": {"loss": "forward_kl"},
        "train": {
            "tokens_per_step": 1024,
            "micro_batch_tokens": 1024,
            "steps": steps,
            "learning_rate": LEARNING_RATE,
            "warmup": 0.1,
            "weight_decay": 0.1,
            "precision": "fp32",
        },
        "eval": {"every": max(1, steps // 3), "micro_batch_tokens": 4096, "samples": 4},
        "checkpoint": {"every": 0, "keep": 1},
    }
