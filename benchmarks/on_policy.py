"""What reinforcement learning has learned, distilled: how many steps and tokens does each way of learning it need?

A tiny model that has imitated answers, of which one third are right, is trained by GRPO (policy_gradient, with the
exact match as the reward) until it solves nearly all problems. Its own starting checkpoint then learns that again:

    on-policy     it writes, and the trained model judges every token: reverse KL over the full vocabulary
    off-policy    forward KL on completions that the trained model has written
    SFT           cross-entropy on these completions
    GRPO          the same reinforcement learning again, with another seed

All ways have the same problems, learning rate and evaluation, which is the greedy exact match on held-out problems
every few steps, and about as many completions per step. The result is the number of optimizer steps and of tokens
that the student has written or read until TARGET of the problems are solved, and the exact match by length after as
many student tokens.
Writes benchmarks/results/on_policy-<date>.json.

    python -m benchmarks.on_policy --seeds 0 1 2
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import task_models
from benchmarks.record import result_file, write_result
from stillhouse.config import load_config
from stillhouse.config.task import TaskSpec
from stillhouse.models import Decoder
from stillhouse.rollouts import GenerationRequest, Sampling
from stillhouse.rollouts.generate import Generator
from stillhouse.tasks import problem
from stillhouse.train.run import distill

TASK, KEY = "reversal(2:12)", "eval/exact_match/reversal"
TAUGHT, TARGET = 0.95, 0.9
PROMPTS, SAMPLES, ANSWER_TOKENS = 16, 8, 16
COMPLETIONS = PROMPTS * SAMPLES
PROBLEMS = 4000
#: of the answers that the starting checkpoint has imitated; reinforcement learning needs answers that differ
RIGHT = 1 / 3

COMMON: dict[str, Any] = {
    "data.eval": 0,
    "data.max_tokens": 48,
    "train.tokens_per_step": 48 * COMPLETIONS,
    "train.micro_batch_tokens": 48 * 64,
    "train.learning_rate": 2e-4,
    "train.schedule": "constant",
    "train.warmup": 5,
    "train.precision": "fp32",
    "eval.tasks": [TASK],
    "eval.task_tokens": ANSWER_TOKENS,
    "checkpoint.every": 0,
    "device": "cpu",
}
ROLLOUT = {"rollout.prompts_per_step": PROMPTS, "rollout.samples_per_prompt": SAMPLES,
           "rollout.max_new_tokens": ANSWER_TOKENS}  # fmt: skip
GRPO = ROLLOUT | {"objective.loss": "policy_gradient", "rollout.reward": "stillhouse.tasks:exact_match"}


def run(folder: Path, name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """One run; returns its log."""
    layer: dict[str, Any] = {}
    for key, value in (COMMON | settings | {"out": str(folder / name)}).items():
        section, _, last = key.rpartition(".")
        (layer.setdefault(section, {}) if section else layer)[last] = value
    out = distill(load_config(None, settings=layer))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(log: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """(step, tokens that were trained on, exact match) of each evaluation."""
    return [(line["step"], line["tokens"], line[KEY]) for line in log if KEY in line]


def until(points: list[tuple[int, int, float]], target: float) -> dict[str, int] | None:
    """The steps and tokens until the target is reached for the first time; None if it is not."""
    return next(({"steps": step, "tokens": tokens} for step, tokens, share in points if share >= target), None)


def by_length(log: list[dict[str, Any]], tokens: int) -> dict[str, float]:
    """The exact match by length at the last evaluation within so many tokens."""
    line = [each for each in log if KEY in each and each["tokens"] <= tokens][-1]
    return {key.rpartition("_")[2]: value for key, value in line.items() if key.startswith(f"{KEY}/length")}


def write_problems(path: Path, seed: int) -> Path:
    spec = TaskSpec.parse(TASK)
    records = [problem(spec, seed, number, held_out=False).record(spec.name) for number in range(PROBLEMS)]
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def write_completions(path: Path, problems: Path, teacher: Path) -> Path:
    """The completions that a model writes for the problems at temperature 1."""
    decoder, tokenizer = Decoder.from_pretrained(teacher, dtype="float32"), AutoTokenizer.from_pretrained(teacher)
    sampling = Sampling(ANSWER_TOKENS, eos_ids=(tokenizer.eos_token_id,))
    records = [json.loads(line) for line in problems.read_text().splitlines()]
    ids = tokenizer([each["prompt"] for each in records], return_tensors="np")["input_ids"]
    requests = [GenerationRequest(number, each.astype("int32"), number) for number, each in enumerate(ids)]
    written = Generator(decoder, sampling, torch.device("cpu"), batch_tokens=32768).generate(requests, 0)
    for record, each in zip(records, written, strict=True):
        record["completion"] = tokenizer.decode(each.ids_N, skip_special_tokens=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in records if each["completion"]))
    return path


def one_seed(folder: Path, seed: int, most_steps: int) -> dict[str, Any]:
    start, problems = folder / "start", write_problems(folder / "problems.jsonl", seed)
    reached = task_models.train(
        TASK,
        start,
        steps=600,
        rows=64,
        width=128,
        layers=3,
        rate=2e-3,
        every=20,
        until=0.3,
        distinct=10**9,
        seed=seed,
    )
    student = {"student.model": str(start), "data.train": str(problems)}
    taught = run(folder, "teacher", student | GRPO | {"seed": 10 + seed, "train.steps": most_steps, "eval.every": 20})
    result: dict[str, Any] = {"start": reached, "teacher": curve(taught)}
    if curve(taught)[-1][2] < TAUGHT:
        print(f"seed {seed}: GRPO has reached {curve(taught)[-1][2]:.3f} in {most_steps} steps, not {TAUGHT}")
    model = str(folder / "teacher" / "model")
    texts: dict[str, Any] = {"data.train": str(write_completions(folder / "written.jsonl", problems, Path(model)))}
    teacher = {"teacher.model": model}
    # a packed sequence has about two documents
    texts["train.tokens_per_step"] = 48 * COMPLETIONS // 2
    steps = {"train.steps": max(40, most_steps // 4), "eval.every": 2, "seed": 20 + seed}
    logs = {
        "on-policy": run(folder, "on_policy", student | teacher | ROLLOUT | {"objective.loss": "reverse_kl"} | steps),
        "off-policy": run(folder, "off_policy", student | teacher | texts | {"objective.loss": "forward_kl"} | steps),
        "SFT": run(folder, "sft", student | texts | {"objective.loss": "cross_entropy"} | steps),
        "GRPO": run(folder, "grpo", student | GRPO | steps | {"train.steps": most_steps, "eval.every": 10}),
    }
    tokens = min(curve(log)[-1][1] for log in logs.values())
    for name, log in logs.items():
        result[name] = {"until": until(curve(log), TARGET), "curve": curve(log), "by length": by_length(log, tokens)}
    return result | {"tokens of the comparison by length": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400, help="most steps of reinforcement learning")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[int, dict[str, Any]] = {}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (arguments.keep or Path(temporary)) / f"seed{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            found[seed] = one_seed(folder, seed, arguments.steps)
    summary: dict[str, Any] = {}
    for name in ("on-policy", "off-policy", "SFT", "GRPO"):
        reached = [each[name]["until"] for each in found.values()]
        steps = [each["steps"] for each in reached if each is not None]
        summary[name] = {
            "steps": steps,
            "median": statistics.median(steps) if steps else None,
            "reached": f"{len(steps)} of {len(reached)} seeds",
        }
        print(name, summary[name])
    settings = {"task": TASK, "target": TARGET, "completions per step": COMPLETIONS, "settings": COMMON}
    write_result(result_file("on_policy"), settings | {"summary": summary, "seeds": found})


if __name__ == "__main__":
    main()
