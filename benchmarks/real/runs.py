"""The runs of experiments.yaml: their training, their figures and their result files."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.real.figures import answers, own_figures, task_figures, text_figures
from benchmarks.real.material import described, file_facts, held_out_pieces, material
from benchmarks.real.trl_runs import train
from benchmarks.record import RESULTS, write_result
from benchmarks.training_runs import metrics, run_config
from stillhouse.run.run import distill

EXPERIMENTS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("experiments.yaml").read_text(encoding="utf-8")
)
#: the settings of every run
SETTINGS = {
    "data.train": "@text",
    "data.eval": 0,
    "data.max_tokens": 512,
    "train.steps": 90,
    "train.tokens_per_step": 1024,
    "train.micro_batch_tokens": 1024,
    "train.learning_rate": 6e-4,
    "train.warmup": 0.1,
    "train.weight_decay": 0.1,
    "train.precision": "fp32",
    "eval.every": 0,
    "checkpoint.every": 30,
    "checkpoint.keep": 1,
    "device": "cpu",
}
#: metrics that a result file has, of each step or evaluation
CURVES = (
    "loss/total_nats_per_token",
    "eval/cross_entropy",
    "train/gradient_norm",
    "rollout/reward",
    "rollout/equal_rewards",
)


@dataclass(frozen=True)
class Run:
    """A training run of an experiment in a work folder. steps: at most so many, for a rehearsal."""

    experiment: str
    name: str
    seed: int
    work: Path
    steps: int | None = None

    @property
    def result_path(self) -> Path:
        return RESULTS / f"real-{self.experiment}-{self.name}-seed{self.seed}.json"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as experiments.yaml has them: models and data by their names."""
        experiment = EXPERIMENTS[self.experiment]
        settings = SETTINGS | experiment["settings"] | experiment["runs"][self.name]
        del settings["title"]
        settings["train.steps"] = min(settings["train.steps"], self.steps or settings["train.steps"])
        return {key: value for key, value in settings.items() if value is not None} | {"seed": self.seed}

    def model(self) -> Path:
        """Return the folder of the trained model. It is trained if it is not there; an interrupted run goes on."""
        settings = {key: self.resolve(value) for key, value in self.settings.items()}
        if "trl.beta" in settings:
            return train(settings, self._out)
        return distill(run_config(settings | {"out": str(self._out)})) / "model"

    def measure(self) -> None:
        """Train the model and write its result file. Raises ValueError for a result file with other settings."""
        if self.result_path.exists():
            if json.loads(self.result_path.read_text(encoding="utf-8"))["settings"] != self.settings:
                raise ValueError(f"{self.result_path} has other settings than experiments.yaml: remove it first")
            print(f"{self.result_path} exists")
            return
        model = self.model()
        result: dict[str, Any] = {"experiment": self.experiment, "run": self.name, "settings": self.settings}
        lines = metrics(self._out)
        curves = {key: values for key in CURVES if (values := [line[key] for line in lines if key in line])}
        result |= {"trained": {key: lines[-1][key] for key in ("tokens", "seconds")}, "curves": curves}
        result |= {"data": file_facts(Path(self.resolve(self.settings["data.train"])))}
        result |= {"held_out": described(held_out_pieces())}
        write_result(self.result_path, result | self.figures(model))

    def measure_start(self) -> None:
        """Write the result file of the models that the experiment begins with, of seed 0.

        Raises ValueError for a result file with other models.
        """
        path, settings = start_path(self.experiment), EXPERIMENTS[self.experiment].get("start")
        if settings is None:
            return
        if path.exists():
            if json.loads(path.read_text(encoding="utf-8"))["settings"] != settings:
                raise ValueError(f"{path} has other models than experiments.yaml: remove it first")
            return
        first = replace(self, seed=0)
        models = {name: self.figures(Path(first.resolve(value))) for name, value in settings.items()}
        write_result(path, {"experiment": self.experiment, "settings": settings, "models": models})

    def figures(self, model: Path) -> dict[str, Any]:
        """The figures of a model that the experiment asks for, and its answers."""
        wanted, teacher = EXPERIMENTS[self.experiment]["figures"], material("smollm2", self.work)
        figures: dict[str, float] = {}
        if "text" in wanted:
            figures |= text_figures(teacher, model)
        if "own" in wanted:
            figures |= own_figures(teacher, model)
        if "tasks" in wanted:
            figures |= task_figures(model)
        return {"figures": figures} | ({"answers": answers(model)} if "answers" in wanted else {})

    def resolve(self, value: Any) -> Any:
        """Replace @NAME by the path of the material, and @EXPERIMENT/RUN by the path of the run's model."""
        if not isinstance(value, str) or not value.startswith("@"):
            return value
        experiment, _, run = value[1:].partition("/")
        path = (
            Run(experiment, run, self.seed, self.work, self.steps).model() if run else material(experiment, self.work)
        )
        return str(path)

    @property
    def _out(self) -> Path:
        return self.work / f"{self.experiment}-{self.name}-seed{self.seed}"


def start_path(experiment: str) -> Path:
    return RESULTS / f"real-{experiment}-start.json"
