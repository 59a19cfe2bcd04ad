"""What is learned from completions that older weights have generated: staleness 0, 1, 2 and 4, and its corrections.

A student that solves a third of a seeded task learns from a teacher that solves nearly all of it, for as many steps
under each schedule, with the engine in this process. Every token is then exactly as old as the schedule says (async
with max_staleness 8 asks four steps ahead). reverse_kl is exact whatever token was sampled; for the policy gradient
with the teacher's log-ratio as the advantage, the draws matter, and `rollout.correction` weights them.

    python -m benchmarks.on_policy_staleness --seeds 0 1         about 12 minutes on two quiet cores

Prints a table, and writes benchmarks/results/on_policy_staleness-<date>.json.
"""

import argparse
import multiprocessing
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import task_models
from benchmarks.on_policy import COMMON, KEY, ROLLOUT, TASK, curve, run, write_problems
from benchmarks.record import result_file, write_result

STALENESS: dict[int, dict[str, Any]] = {
    0: {"rollout.schedule": "sync"},
    1: {"rollout.schedule": "one_step_off", "rollout.max_staleness": 1},
    2: {"rollout.schedule": "two_step_off", "rollout.max_staleness": 2},
    4: {"rollout.schedule": "async", "rollout.max_staleness": 8},
}
WAYS: dict[str, dict[str, Any]] = {
    "reverse_kl": {"objective.loss": "reverse_kl"},
    **{
        f"policy_gradient(teacher_kl=1), {correction}": {
            "objective.loss": "policy_gradient(teacher_kl=1)",
            "rollout.correction": correction,
        }
        for correction in ("none", "truncated", "masked")
    },
}
STEPS, PROMPTS = 40, 128


def one_seed(folder: Path, seed: int) -> dict[str, dict[int, float]]:
    """The exact match at the end of each run; a run's age of tokens is checked."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    common: dict[str, Any] = {"rows": 64, "width": 128, "layers": 3, "rate": 2e-3, "distinct": 10**9, "seed": seed}
    task_models.train(TASK, folder / "student", steps=600, every=20, until=0.3, right=0.5, **common)
    task_models.train(TASK, folder / "teacher", steps=600, every=100, until=0.97, **common)
    settings = ROLLOUT | {
        "student.model": str(folder / "student"), "teacher.model": str(folder / "teacher"),
        "data.train": str(write_problems(folder / "problems.jsonl", seed)), "seed": seed,
        "rollout.prompts_per_step": PROMPTS, "rollout.samples_per_prompt": 1,
        "train.steps": STEPS, "train.learning_rate": 3e-4, "eval.every": STEPS,
    }  # fmt: skip
    matches: dict[str, dict[int, float]] = {}
    for way, more in WAYS.items():
        for staleness, schedule in STALENESS.items():
            log = run(folder / f"{way} {staleness}", settings | more | schedule)
            ages = [line["rollout/staleness_max"] for line in log if "rollout/staleness_max" in line]
            assert max(ages) == ages[-1] == staleness, f"{way}: tokens are {ages} versions old, not {staleness}"
            matches.setdefault(way, {})[staleness] = curve(log)[-1][2]
    return matches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=2, help="seeds at the same time, each on one core")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as jobs:
            waiting = {seed: jobs.submit(one_seed, Path(temporary) / str(seed), seed) for seed in arguments.seeds}
            seeds = {seed: future.result() for seed, future in waiting.items()}
    print("| | " + " | ".join(map(str, STALENESS)) + " |")
    print("| --- " * (len(STALENESS) + 1) + "|")
    for way in WAYS:
        cells = []
        for staleness in STALENESS:
            shares = [seed[way][staleness] for seed in seeds.values()]
            cells.append(f"{statistics.fmean(shares):.2f} ({', '.join(f'{share:.2f}' for share in shares)})")
        print(f"| {way} | " + " | ".join(cells) + " |")
    settings = {"task": TASK, "metric": KEY, "steps": STEPS, "completions per step": PROMPTS, "settings": COMMON}
    write_result(result_file("on_policy_staleness"), settings | {"seeds": seeds})


if __name__ == "__main__":
    main()
