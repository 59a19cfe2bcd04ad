"""How fast on-policy runs are: against TRL, and what one_step_off gains over sync. On two cores of a CPU.

    python -m benchmarks.on_policy_speed                 all parts, about 25 minutes on two quiet cores

trl        Our loop and TRL's DistillationTrainer take turns in one process and on one thread, with the same student,
           teacher, prompts, batch and optimizer: reverse KL over the whole vocabulary, completions by transformers in
           the same process. Needs `python -m pip install --no-deps trl==1.16.0 accelerate`. Ratios are of neighbours.
reward     The same with a reward that takes 50 ms for each sample, against TRL's GRPOTrainer, without a teacher: the
           policy gradient on groups of 4. Ours has 16 processes (`rollout.workers`) and the schedule `sync`. TRL gets
           the reward as a plain function, and as an asynchronous one that waits for all samples at once. Completions
           of two kinds: all end at 64 tokens, or each one ends at every token with a probability of 1/32.
overlap    A server writes on one core; the trainer and a teacher's server share the other one. Runs of sync and
           one_step_off take turns. The prediction is made of a sync run's own timeline: what the trainer does beside
           waiting for completions can overlap with writing them, and the longer of the two remains.

The models are random, so that completions practically never end early and both write as many tokens, except where
the weights are changed so that they end.
Writes benchmarks/results/on_policy_speed-<date>.json.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from benchmarks import slow_reward
from benchmarks.random_models import write_models, write_prompts
from benchmarks.record import result_file, write_result
from benchmarks.training_runs import LOSS, metrics, run_config
from stillhouse.output.log import RunLog
from stillhouse.run.run import distill

#: with the smaller one, the output head is a quarter of the student's weights, as in Qwen3-0.6B
VOCABULARIES = 8192, 32768
PROMPT, COMPLETION, ROWS = 64, 64, 16
#: width, layers
STUDENT, TEACHER = (256, 8), (512, 10)
#: steps of a run, and how many at its beginning are not counted (they load and compile)
STEPS, WARM = 8, 2
#: of the overlap: it needs longer runs, because a run's first step has nothing to overlap with
OVERLAP_STEPS = 14
RATE = 1e-5
#: completions of a prompt, in the part with a reward
GROUP = 4
#: the probability of an end at each token, in the part with a reward; 0: that of a random model
ENDS = {"all completions of 64 tokens": 0.0, "ends at random": 1 / 32}


def write_sizes(folder: Path, vocabulary: int, end: float = 0.0) -> Path:
    """Student, teacher and prompts in a folder of their own; returns it. end: see `write_models`."""
    folder = folder / f"vocabulary{vocabulary}-{end:.3f}"
    write_models(folder, {"student": STUDENT, "teacher": TEACHER}, vocabulary, end)
    write_prompts(folder / "prompts.jsonl", ROWS * STEPS, PROMPT, vocabulary)
    return folder


def settings_of(folder: Path, out: Path, steps: int, **more: Any) -> dict[str, Any]:
    flat = {
        "student.model": str(folder / "student"),
        "teacher.model": str(folder / "teacher"),
        "data.train": str(folder / "prompts.jsonl"),
        "data.eval": 0,
        "data.max_tokens": PROMPT + COMPLETION,
        "rollout.prompts_per_step": ROWS,
        "rollout.samples_per_prompt": 1,
        "rollout.max_new_tokens": COMPLETION,
        "train.steps": steps,
        "train.tokens_per_step": ROWS * (PROMPT + COMPLETION),
        "train.micro_batch_tokens": ROWS * (PROMPT + COMPLETION),
        "train.learning_rate": RATE,
        "train.schedule": "constant",
        "train.warmup": 0,
        "train.precision": "fp32",
        "checkpoint.every": 0,
        "device": "cpu",
        "out": str(out),
    }
    return flat | more


class Seconds(NamedTuple):
    """Seconds of the steps that count. cpu: of this process alone, which a busy machine hardly changes."""

    wall: list[float]
    cpu: list[float]


def now() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


def of_steps(ends: Sequence[tuple[float, float]]) -> Seconds:
    wall, cpu = np.diff(ends, axis=0)[WARM - 1 :].T.tolist()
    return Seconds(wall, cpu)


def step_ends(out: Path) -> list[float]:
    """The second at which each step of a run of ours was finished."""
    return [line["seconds"] for line in metrics(out) if LOSS in line]


def ours(folder: Path, out: Path) -> list[float]:
    """Seconds of the steps that count."""
    distill(run_config(settings_of(folder, out, STEPS)))
    return np.diff(step_ends(out))[WARM - 1 :].tolist()


def ours_with_reward(folder: Path, out: Path, steps: int) -> Seconds:
    """As many processes for the reward as samples."""
    flat = settings_of(folder, out, steps) | {
        "rollout.prompts_per_step": ROWS // GROUP,
        "rollout.samples_per_prompt": GROUP,
        "rollout.workers": ROWS,
        "rollout.reward": f"{slow_reward.__name__}:odd_words",
        "objective.loss": "policy_gradient",
    }
    del flat["teacher.model"]
    ends: list[tuple[float, float]] = []
    original = RunLog.train

    def train(log: RunLog, *arguments: Any) -> None:
        original(log, *arguments)
        ends.append(now())

    with patch.object(RunLog, "train", train):
        distill(run_config(flat))
    return of_steps(ends)


def trl(folder: Path, out: Path) -> list[float]:
    """Seconds of the steps that count, of TRL's DistillationTrainer."""
    from trl import DistillationConfig, DistillationTrainer

    arguments = DistillationConfig(**trl_arguments(out), beta=1.0)
    teacher = str(folder / "teacher")
    return seconds_of(DistillationTrainer, folder, out, args=arguments, teacher_model=teacher).wall


def plain_reward(completions: list[str], **_: Any) -> list[float]:
    return [slow_reward.odd_words("", completion, {}) for completion in completions]


async def asynchronous_reward(completions: list[str], **_: Any) -> list[float]:
    async def of_one(completion: str) -> float:
        await asyncio.sleep(slow_reward.SECONDS)
        return slow_reward.share_of_odd(completion)

    return list(await asyncio.gather(*map(of_one, completions)))


def trl_with_reward(folder: Path, out: Path, steps: int, reward: Callable[..., Any]) -> Seconds:
    """TRL's GRPOTrainer without a reference model."""
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(**trl_arguments(out, steps), num_generations=GROUP, beta=0.0)
    return seconds_of(GRPOTrainer, folder, out, args=arguments, reward_funcs=reward)


def trl_arguments(out: Path, steps: int = STEPS) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "max_steps": steps,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_completion_length": COMPLETION,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": steps,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "disable_dropout": False,
    }


def seconds_of(trainer: Any, folder: Path, out: Path, **options: Any) -> Seconds:
    """Train with a trainer of TRL."""
    from datasets import load_dataset
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[tuple[float, float]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(now())

    clock = Clock()
    prompts = load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train", cache_dir=str(out))
    trainer(model=str(folder / "student"), train_dataset=prompts, callbacks=[clock], **options).train()
    return of_steps(clock.ends)


def against_trl(folder: Path, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"ours": [], "TRL": []}
    for number in range(rounds):
        seconds["ours"].append(statistics.median(ours(folder, folder / f"ours{number}")))
        seconds["TRL"].append(statistics.median(trl(folder, folder / f"trl{number}")))
        print(f"round {number + 1}: {seconds['ours'][-1]:.2f} s ours, {seconds['TRL'][-1]:.2f} s TRL", flush=True)
    ratios = [theirs / our for our, theirs in zip(seconds["ours"], seconds["TRL"], strict=True)]
    per_step = ROWS * COMPLETION
    return {
        "seconds of a step": seconds,
        "TRL / ours": {"median": statistics.median(ratios), "rounds": ratios},
        "completion tokens per second, median": {
            name: per_step / statistics.median(second) for name, second in seconds.items()
        },
        "parts of a step of ours": parts(folder / f"ours{rounds - 1}"),
    }


def with_reward(folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    ways: dict[str, Callable[[Path, Path, int], Seconds]] = {
        "ours": ours_with_reward,
        "TRL, plain function": partial(trl_with_reward, reward=plain_reward),
        "TRL, asynchronous function": partial(trl_with_reward, reward=asynchronous_reward),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for place, (name, way) in enumerate(ways.items()):
            measured = way(folder, folder / f"reward{number}-{place}", steps)
            seconds[name].append(statistics.median(measured.wall))
            cpu[name].append(statistics.median(measured.cpu))
            print(f"round {number + 1}, {name}: {seconds[name][-1]:.2f} s, {cpu[name][-1]:.2f} s of CPU", flush=True)
    ratios = {
        name: [theirs / our for our, theirs in zip(seconds["ours"], values, strict=True)]
        for name, values in seconds.items()
        if name != "ours"
    }
    return {
        "seconds of a step": seconds,
        "CPU seconds of a step": cpu,
        "TRL / ours": {name: {"median": statistics.median(of), "rounds": of} for name, of in ratios.items()},
        "parts of a step of ours": parts(folder / f"reward{rounds - 1}-0"),
    }


def spans(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "timeline.jsonl").read_text().splitlines()]


def parts(out: Path) -> dict[str, float]:
    """Seconds of a step of sync, by what the trainer does: medians."""
    seconds: dict[str, dict[int, float]] = {}
    for span in spans(out):
        if span["lane"] == "trainer" and span["step"] > WARM:
            what = "weights" if "version" in span["what"] else span["what"]
            by_step = seconds.setdefault(what, {})
            by_step[span["step"]] = by_step.get(span["step"], 0.0) + span["stop"] - span["start"]
    return {what: statistics.median(by_round.values()) for what, by_round in seconds.items()}


@contextmanager
def serving(model: Path, core: int, *options: str) -> Iterator[str]:
    """A `stillhouse serve` process on one core."""
    command = [sys.executable, "-m", "stillhouse", "serve", str(model), "--port", "0", "--device", "cpu", *options]
    log = model.parent / f"serve-{model.name}.log"
    with log.open("w") as stream, on_core(core, command, stdout=stream, stderr=subprocess.STDOUT) as process:
        try:
            end = time.monotonic() + 120
            while (match := re.search(r"serving on (http://\S+)", log.read_text())) is None:
                if time.monotonic() > end or process.poll() is not None:
                    raise RuntimeError(f"the server has not started:\n{log.read_text()}")
                time.sleep(0.1)
            yield match[1]
        finally:
            process.terminate()


def on_core(core: int, command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, {core}), **options)


def separate(folder: Path, name: str, schedule: str, writer: str, teacher: str) -> float:
    """Seconds of a step of a run with a server that writes and one of the teacher."""
    flat = settings_of(folder, folder / name, OVERLAP_STEPS) | {
        "rollout.engine": "stillhouse", "rollout.url": writer, "rollout.schedule": schedule,
        "rollout.max_staleness": 1, "teacher.url": teacher,
    }  # fmt: skip
    arguments = [f"{key}={value}" for key, value in flat.items()]
    command = [sys.executable, "-m", "stillhouse", "distill", *arguments]
    with on_core(0, command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, problem = process.communicate()
    if process.returncode:
        raise RuntimeError(problem.decode())
    return statistics.median(np.diff(step_ends(folder / name))[WARM:].tolist())


def overlap(folder: Path, rounds: int) -> dict[str, Any]:
    """one_step_off against sync, and against the prediction from each sync run's timeline."""
    seconds: dict[str, list[float]] = {"sync": [], "one_step_off": [], "predicted": []}
    by_part: list[dict[str, float]] = []
    with serving(folder / "student", 1, "--generate") as writer, serving(folder / "teacher", 0) as teacher:
        for number in range(rounds):
            seconds["sync"].append(separate(folder, f"sync{number}", "sync", writer, teacher))
            seconds["one_step_off"].append(separate(folder, f"ahead{number}", "one_step_off", writer, teacher))
            by_part.append(parts(folder / f"sync{number}"))
            writing, weights = by_part[-1]["wait for completions"], by_part[-1]["weights"]
            seconds["predicted"].append(weights + max(writing, seconds["sync"][-1] - writing - weights))
            print("round", number + 1, {name: round(values[-1], 3) for name, values in seconds.items()}, flush=True)
    gains = [one / other for one, other in zip(seconds["sync"], seconds["one_step_off"], strict=True)]
    errors = [one / other for one, other in zip(seconds["one_step_off"], seconds["predicted"], strict=True)]
    return {
        "seconds of a step": seconds,
        "parts of a step of sync": by_part,
        "sync / one_step_off": {"median": statistics.median(gains), "rounds": gains},
        "one_step_off / predicted": {"median": statistics.median(errors), "rounds": errors},
    }


PARTS = ["trl", "reward", "overlap"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run of the part with a reward, at least 4")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    arguments = parser.parse_args()
    sizes = {"prompt": PROMPT, "completion": COMPLETION, "rows": ROWS,
             "student (width, layers)": STUDENT, "teacher (width, layers)": TEACHER}  # fmt: skip
    result: dict[str, Any] = {"sizes": sizes}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {size: write_sizes(Path(temporary), size) for size in arguments.vocabularies}
        if "trl" in arguments.parts:
            result["trl"] = {size: against_trl(folder, arguments.rounds) for size, folder in folders.items()}
            for size, figures in result["trl"].items():
                print("vocabulary", size, figures["TRL / ours"], figures["parts of a step of ours"])
        if "reward" in arguments.parts:
            result["reward"] = {"seconds of a reward": slow_reward.SECONDS, "completions of a prompt": GROUP}
            for size in arguments.vocabularies:
                for name, end in ENDS.items():
                    folder = write_sizes(Path(temporary), size, end)
                    figures = with_reward(folder, arguments.rounds, arguments.steps)
                    result["reward"][f"vocabulary {size}, {name}"] = figures
                    print("vocabulary", size, name, figures["TRL / ours"], flush=True)
        if "overlap" in arguments.parts:
            result["overlap"] = overlap(folders[arguments.vocabularies[0]], arguments.rounds)
            print({name: result["overlap"][name] for name in ("sync / one_step_off", "one_step_off / predicted")})
    write_result(result_file("on_policy_speed"), result)


if __name__ == "__main__":
    main()
