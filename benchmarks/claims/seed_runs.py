"""The models, data files and runs of one seed. Whatever is complete in the folder is not made again.

A run is `stillhouse distill` in this process, with one thread. The models are those of benchmarks/task_models.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import task_models
from benchmarks.training_runs import metrics, run_config, write_completions
from stillhouse.run.run import distill
from stillhouse.tasks import TaskSpec, problem

#: held-out problems of an evaluation: the standard error of an exact match is at most 3.5 %
HELD_OUT = 200
COMMON: dict[str, Any] = {
    "data.packing": "rows",  # one document in a row, so that a step has exactly as many documents as a run asks for
    "train.schedule": "constant",
    "train.warmup": 5,
    "train.precision": "fp32",
    "eval.every": 0,
    "eval.task_count": HELD_OUT,
    "checkpoint.every": 0,
    "device": "cpu",
}


@dataclass(frozen=True)
class TinyModel:
    """A model that imitates a task's answers. right: the share of right answers among those that it imitates."""

    task: str
    steps: int
    width: int = 64
    layers: int = 2
    right: float = 1.0
    rows: int = 64

    @property
    def name(self) -> str:
        return f"{self.task}-{self.width}x{self.layers}-{self.steps}steps-right{self.right:g}"


@dataclass(frozen=True)
class SeedRuns:
    """Where the files of a claim's seed are, and how large its runs are.

    models: the folder of models, which claims share. divisor: divides all steps and numbers of problems; 1 except in
    a rehearsal.
    """

    models: Path
    folder: Path
    seed: int
    divisor: int = 1

    def model(self, model: TinyModel, seed: int | None = None) -> Path:
        """The folder of a model, trained with a seed. None: the seed of these runs."""
        seed = self.seed if seed is None else seed
        out = self.models / f"{model.name}-seed{seed}"
        if not (out / "tokenizer.json").exists():
            task_models.train(
                model.task,
                out,
                steps=self.part(model.steps),
                rows=model.rows,
                width=model.width,
                layers=model.layers,
                rate=2e-3,
                every=model.steps,
                until=2.0,
                distinct=10**9,
                seed=seed,
                right=model.right,
            )
        return out

    def problems(self, task: str, count: int = 4000, *, held_out: bool = False, only_length: int = 0) -> Path:
        """A file of problems with their answers. only_length: their length; 0: all lengths of the task."""
        path = self.folder / f"{task}-{count}{'-held-out' if held_out else ''}{only_length or ''}.jsonl"
        spec, records = TaskSpec.parse(task), []
        number = 0
        while len(records) < (self.part(count) if count > 1 else 1):
            item = problem(spec, self.seed, number, held_out=held_out)
            number += 1
            if only_length in (0, item.length):
                records.append(item.record(spec.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    def mixed_problems(self, tasks: Sequence[str]) -> Path:
        """A file in which the problems of tasks take turns."""
        path = self.folder / f"{'-'.join(tasks)}.jsonl"
        lines = [self.problems(task).read_text(encoding="utf-8").splitlines(keepends=True) for task in tasks]
        path.write_text("".join(line for turn in zip(*lines, strict=True) for line in turn), encoding="utf-8")
        return path

    def completions(self, name: str, problems: Path, writer: Path, max_new_tokens: int) -> Path:
        """The problems with completions that a model samples at temperature 1; empty ones are left out."""
        path = self.folder / f"{name}.jsonl"
        return path if path.exists() else write_completions(path, problems, writer, max_new_tokens)

    def run(
        self, name: str, tasks: list[str], settings: dict[str, Any], *, steps: int, rows: int, max_tokens: int
    ) -> list[dict[str, float]]:
        """Train a student and return its evaluations before and after, by the names in metrics.jsonl without `eval/`.

        tasks: those of the exact match; the first one's held-out problems are also data.eval. rows: documents of a
        step.
        """
        values = COMMON | {
            "data.eval": str(self.problems(tasks[0], HELD_OUT, held_out=True)),
            "data.max_tokens": max_tokens,
            "train.tokens_per_step": max_tokens * rows,
            "train.micro_batch_tokens": max_tokens * 128,
            "train.steps": self.part(steps),
            "eval.tasks": tasks,
            "eval.task_tokens": max_tokens // 2,
            "eval.task_count": self.part(HELD_OUT),
            "seed": self.seed,
            "out": str(self.folder / name),
        }
        distill(run_config(values | settings))
        return [
            {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}
            for line in metrics(self.folder / name)
            if "eval/cross_entropy" in line
        ]

    def part(self, count: int) -> int:
        """A number of steps or of problems, divided in a rehearsal."""
        return max(2, count // self.divisor)
