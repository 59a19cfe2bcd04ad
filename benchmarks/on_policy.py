"""What reinforcement learning has learned, distilled: how many steps and tokens does each way of learning it need?

A tiny model that has imitated answers is trained by GRPO (policy_gradient, with the exact match as the reward) until
it solves nearly all problems: the teacher. Its own starting checkpoint then learns that again:

    on-policy     it writes, and the teacher judges every token: reverse KL over the full vocabulary
    off-policy    forward KL on completions that the teacher has generated
    SFT           cross-entropy on these completions
    GRPO          the same reinforcement learning again, with another seed

Each step has COMPLETIONS completions, whichever way. The result is the number of optimizer steps, and of completions'
tokens, until TARGET of held-out problems are solved, and the exact match by length after as many tokens for all ways.

How sparse the reward is decides what GRPO needs, so there are two starts (STARTS): a model whose samples of a prompt
differ much, and one whose samples are nearly always the same.

    python -m pip install matplotlib; python -m benchmarks.on_policy        # about 40 minutes on two quiet cores

Writes benchmarks/results/on_policy-<date>.json and docs/results/on_policy.png, and prints tables, summarised in
docs/results/on_policy.md. With --keep, runs that were finished before are not repeated.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import task_models
from benchmarks.on_policy_tables import draw, length_table, summary_of, table
from benchmarks.record import result_file, write_result
from benchmarks.training_runs import metrics, run_config, write_completions
from stillhouse.run.run import distill
from stillhouse.tasks import TaskSpec, problem

TASK, KEY = "reversal(2:12)", "eval/exact_match/reversal"
TAUGHT, TARGET = 0.95, 0.9
COMPLETIONS, SAMPLES, ANSWER_TOKENS, MAX_TOKENS = 256, 8, 16, 48
PROBLEMS = 8000
#: the share of right answers among those that the starting checkpoint has imitated, until 30 % of its own are right
STARTS = {"half of the imitated answers right": 0.5, "all imitated answers right": 1.0}
#: steps of GRPO between two looks at whether it is done
STRETCH = 50

COMMON: dict[str, Any] = {
    "data.eval": 0,
    "data.max_tokens": MAX_TOKENS,
    "train.tokens_per_step": MAX_TOKENS * COMPLETIONS // 2,  # a packed sequence has about two of the data's documents
    "train.micro_batch_tokens": MAX_TOKENS * 128,
    "train.schedule": "constant",
    "train.warmup": 5,
    "train.precision": "fp32",
    "eval.tasks": [TASK],
    "eval.task_tokens": ANSWER_TOKENS,
    "checkpoint.every": 0,
    "device": "cpu",
}
ROLLOUT = {"rollout.max_new_tokens": ANSWER_TOKENS}
#: GRPO needs groups and, with them, a smaller rate: at 3e-4 it is not faster, and less steady
GRPO = ROLLOUT | {
    "objective.loss": "policy_gradient",
    "rollout.reward": "stillhouse.tasks:exact_match",
    "rollout.prompts_per_step": COMPLETIONS // SAMPLES,
    "rollout.samples_per_prompt": SAMPLES,
    "train.learning_rate": 1.5e-4,
    "eval.every": 5,
}
ON_POLICY = ROLLOUT | {
    "objective.loss": "reverse_kl",
    "rollout.prompts_per_step": COMPLETIONS,
    "rollout.samples_per_prompt": 1,
}

Log = list[dict[str, Any]]


def run(out: Path, settings: dict[str, Any]) -> Log:
    """One run, unless it is complete; returns its log."""
    distill(run_config(COMMON | settings | {"out": str(out)}))
    return metrics(out)


def reinforce(folder: Path, name: str, settings: dict[str, Any], most_steps: int, target: float) -> tuple[Log, Path]:
    """GRPO until the exact match reaches the target, STRETCH by STRETCH; returns its log and the last model."""
    log: Log = []
    resume: dict[str, Any] = {}
    for steps in range(STRETCH, most_steps + 1, STRETCH):
        out = folder / f"{name}-{steps}"
        log += run(out, settings | GRPO | resume | {"train.steps": steps})
        if max(line[KEY] for line in log if KEY in line) >= target:
            break
        resume = {"checkpoint.resume": str(next((out / "checkpoints").glob(f"step-*{steps}")))}
    return log, out / "model"


def curve(log: Log) -> list[tuple[int, int, float]]:
    """(step, tokens that were trained on, exact match) of each evaluation."""
    points = {line["step"]: (line["step"], line["tokens"], line[KEY]) for line in log if KEY in line}
    return [points[step] for step in sorted(points)]


def until(points: list[tuple[int, int, float]], target: float) -> dict[str, int] | None:
    """The steps and tokens until the target is reached for the first time; None if it is not."""
    return next(({"steps": step, "tokens": tokens} for step, tokens, share in points if share >= target), None)


def by_length(log: Log, tokens: int) -> dict[str, float]:
    """The exact match by length at the last evaluation within so many tokens."""
    evaluation = [line for line in log if KEY in line and line["tokens"] <= tokens][-1]
    return {key.rpartition("_")[2]: value for key, value in evaluation.items() if key.startswith(f"{KEY}/length")}


def write_problems(path: Path, seed: int) -> Path:
    spec = TaskSpec.parse(TASK)
    records = [problem(spec, seed, number, held_out=False).record(spec.name) for number in range(PROBLEMS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def one_start(folder: Path, right: float, seed: int, most_steps: int) -> dict[str, Any]:
    """All ways from one starting checkpoint; right: see STARTS."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    start, problems = folder / "start", write_problems(folder / "problems.jsonl", seed)
    if not start.exists():
        task_models.train(
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
            right=right,
        )
    student = {"student.model": str(start), "data.train": str(problems)}
    taught, model = reinforce(folder, "teacher", student | {"seed": 10 + seed}, most_steps, TAUGHT)
    again, _ = reinforce(folder, "again", student | {"seed": 20 + seed}, most_steps, TARGET)
    teacher = {"teacher.model": str(model)}
    texts = {"data.train": str(write_completions(folder / "written.jsonl", problems, model, ANSWER_TOKENS))}
    ways = {
        "on-policy": student | teacher | ON_POLICY,
        "off-policy": student | teacher | texts | {"objective.loss": "forward_kl"},
        "SFT": student | texts | {"objective.loss": "cross_entropy"},
    }
    steps = {"train.steps": 60, "train.learning_rate": 3e-4, "eval.every": 1, "seed": 20 + seed}
    logs = {name: run(folder / name, settings | steps) for name, settings in ways.items()}
    logs["GRPO"] = again
    figures: dict[str, Any] = {
        name: {"until": until(curve(log), TARGET), "curve": curve(log)} for name, log in logs.items()
    }
    reached = [figures[name]["until"] for name in ways]
    # all three are compared while they differ: when the first of them has reached the target
    tokens = min((point["tokens"] for point in reached if point is not None), default=curve(logs["SFT"])[-1][1])
    for name in ways:
        figures[name]["by length"] = by_length(logs[name], tokens)
    return figures | {
        "start": curve(taught)[0][2],
        "teacher": {"until": until(curve(taught), TARGET), "curve": curve(taught)},
        "tokens of the comparison by length": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=800, help="most steps of reinforcement learning")
    parser.add_argument("--jobs", type=int, default=2, help="starts at the same time, each on one core")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    arguments = parser.parse_args()
    starts: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in STARTS}
    with tempfile.TemporaryDirectory() as temporary:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.jobs, mp_context=spawn, max_tasks_per_child=1) as jobs:
            waiting = {
                (name, seed): jobs.submit(
                    one_start,
                    (arguments.keep or Path(temporary)) / f"right{right:g}-seed{seed}",
                    right,
                    seed,
                    arguments.steps,
                )
                for name, right in STARTS.items()
                for seed in arguments.seeds
            }
            for (name, seed), future in waiting.items():
                starts[name][seed] = future.result()
    summary = {name: summary_of(list(seeds.values())) for name, seeds in starts.items()}
    for name in STARTS:
        print(f"\n{name}\n\n{table(summary[name])}\n\n{length_table(list(starts[name].values()))}")
    draw(starts, Path("docs/results/on_policy.png"), TARGET)
    settings = {"task": TASK, "target": TARGET, "completions per step": COMPLETIONS, "settings": COMMON}
    shares = [figures["start"] for by_seed in starts.values() for figures in by_seed.values()]
    settings["start"] = [min(shares), statistics.median(shares), max(shares)]
    write_result(result_file("on_policy"), settings | {"summary": summary, "starts": starts})


if __name__ == "__main__":
    main()
