"""Training runs of benchmarks: configurations by dotted keys, settings of students, texts of models, and metrics."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from stillhouse.config import RunConfig, load_config
from stillhouse.models import Decoder
from stillhouse.rollout import GenerationRequest, Sampling
from stillhouse.rollout.generate import Generator

LOSS, CROSS_ENTROPY = "loss/total_nats_per_token", "eval/cross_entropy"


def run_config(settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with these values, each by its dotted key, such as `train.steps`."""
    sections: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else sections)[name] = value
    return load_config(None, settings=sections)


def student_settings(folder: Path, seed: int, steps: int, *, max_tokens: int, tokens_per_step: int) -> dict[str, Any]:
    """The settings of a run on the CPU that trains the student in a folder on its train.jsonl and held_out.jsonl."""
    return {
        "student.model": str(folder / "student"),
        "data.train": str(folder / "train.jsonl"),
        "data.eval": str(folder / "held_out.jsonl"),
        "data.max_tokens": max_tokens,
        "train.tokens_per_step": tokens_per_step,
        "train.micro_batch_tokens": tokens_per_step,
        "train.steps": steps,
        "train.learning_rate": 3e-3,
        "train.warmup": 0.1,
        "train.weight_decay": 0.1,
        "train.precision": "fp32",
        "eval.micro_batch_tokens": 4096,
        "checkpoint.every": 0,
        "device": "cpu",
        "seed": seed,
    }


def write_completions(path: Path, problems: Path, teacher: Path, max_new_tokens: int) -> Path:
    """The completions that a model writes for the problems at temperature 1."""
    decoder, tokenizer = Decoder.from_pretrained(teacher, dtype="float32"), AutoTokenizer.from_pretrained(teacher)
    sampling = Sampling(max_new_tokens, eos_ids=(tokenizer.eos_token_id,))
    records = [json.loads(line) for line in problems.read_text().splitlines()]
    ids = tokenizer([record["prompt"] for record in records], return_tensors="np")["input_ids"]
    requests = [GenerationRequest(number, prompt_N.astype("int32"), number) for number, prompt_N in enumerate(ids)]
    completions = Generator(decoder, sampling, torch.device("cpu"), batch_tokens=32768).generate(requests, 0)
    for record, completion in zip(records, completions, strict=True):
        record["completion"] = tokenizer.decode(completion.ids_N, skip_special_tokens=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records if record["completion"]))
    return path


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def values_of(out: Path, key: str) -> list[float]:
    """The values of a metric, of every line that has it."""
    return [line[key] for line in metrics(out) if key in line]
