"""`stillhouse plan`: dry-runs one rank of each kind of stage, in other processes. This process needs no torch."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from queue import LifoQueue
from typing import Any, Self

from stillhouse.config import (
    ConfigError,
    RolloutConfig,
    RunConfig,
    StudentConfig,
    TeacherConfig,
    as_config_error,
)
from stillhouse.libraries import reading
from stillhouse.plan.devices import DEVICES, Device
from stillhouse.plan.prediction import FIRST, Prediction, RankCounts, planned_ranks, predict

#: the maximum number of processes at a time; each needs about 1.5 GB of memory
PROCESSES = 2
#: the files of a model that a plan reads
_FILES = ["config.json", "generation_config.json"]

Job = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """The machines of a plan. name: the name of the device in `DEVICES`."""

    ranks: int
    gpus_per_node: int
    name: str

    @property
    def device(self) -> Device:
        return DEVICES[self.name]


@dataclass(frozen=True)
class Plan:
    """The dry run of a layout: the counts of its ranks by name.

    has_tower: whether a model has a vision tower; the dry run has no images.
    completions: a description of the completions of a step, for an on-policy run.
    overrides: the overrides of the configuration that give this layout.
    """

    machine: Machine
    ranks: Mapping[str, RankCounts]
    has_tower: bool = False
    completions: str | None = None
    overrides: Sequence[str] = ()

    @cached_property
    def prediction(self) -> Prediction:
        return predict(self.ranks, self.machine.device, self.machine.gpus_per_node)

    @property
    def largest(self) -> RankCounts:
        """The rank that needs the most memory."""
        return max(self.ranks.values(), key=lambda rank: rank.memory)

    @property
    def fits(self) -> bool:
        return self.largest.memory <= self.machine.device.usable

    def as_json(self) -> dict[str, Any]:
        prediction, device = self.prediction, self.machine.device
        return {
            "device": self.machine.name,
            "ranks": self.machine.ranks,
            "gpus_per_node": self.machine.gpus_per_node,
            "fits": self.fits,
            "usable_memory": device.usable,
            "step_seconds": prediction.seconds,
            "tokens_per_second": prediction.tokens_per_second,
            "model_share_of_peak": prediction.model_share,
            "bubble_share": prediction.bubble,
            "slowest": prediction.slowest,
            "counts_activations_of_images": not self.has_tower,
            "counts_generation": self.completions is None,
            "counts": {name: asdict(rank) for name, rank in self.ranks.items()},
            "times": {
                name: asdict(time) | {"seconds": time.seconds, "bound": time.bound}
                for name, time in prediction.times.items()
            },
        }


def plan_layout(job: Job) -> Plan:
    """Dry-run the layout of a job of `planned_job`. Raises ConfigError for a layout that a run refuses."""
    with DryRuns() as runs:
        [first] = runs.counts([job])
        numbers = planned_ranks(first.layout)
        others = runs.counts([job | {"rank": rank} for name, rank in numbers.items() if name != FIRST])
    machine = Machine(job["ranks"], job["gpus_per_node"], job["device"])
    return Plan(machine, dict(zip(numbers, [first, *others], strict=True)), job["has_tower"], job["completions"])


def planned_job(config: RunConfig, machine: Machine, document_tokens: int) -> Job:
    """Return the job of rank 0 (`child.py`). Models on the hub are replaced by folders with their configurations.

    document_tokens: the length of the documents in packed rows; in an on-policy run, the length of the prompts.
    Raises ConfigError for a configuration that a plan refuses.
    """
    if config.teachers is not None:
        raise ConfigError(
            "teachers",
            "a plan has at most one teacher, in the student's stages: expected teachers=null, and teacher.model or "
            "teacher=null",
        )
    for section, teacher in config.teacher_sections.items():
        if teacher.source_kind.is_store:
            raise ConfigError(
                f"{section}.{teacher.signals_from}",
                f"a plan has no signals of this source; expected {section}.model, whose layers run in the job, or "
                f"{section}=null for a plan of the student only",
            )
        if teacher.parallel is not None:
            raise ConfigError(f"{section}.parallel", "a plan runs the teacher in the student's stages: expected null")
    models: dict[str, StudentConfig | TeacherConfig] = {"student": config.student, **config.teacher_sections}
    for section, model in models.items():
        if model.quantize is not None:
            raise ConfigError(f"{section}.quantize", "a plan counts weights without quantization: expected null")
    if (engine := config.parallel.engine) != "torch":
        raise ConfigError("parallel.engine", f"got {engine}: a plan runs torch's layouts; expected torch")
    if config.train.compile:
        raise ConfigError(
            "train.compile", "got true: a plan counts the kernels of layers without compilation; expected false"
        )
    values = config.model_dump(mode="json")
    # a planned step has no evaluation and no checkpoint, so their sections get their defaults (null)
    values |= {"device": "cuda", "track": [], "eval": None, "checkpoint": None}
    values["data"]["eval"] = 0
    values["student"]["init"] = None  # the initial values do not change the shapes of the weights
    has_tower = False
    for section, model in models.items():
        if model.model is not None:
            folder = _folder(section, model.model, model.revision)
            values[section] |= {"model": folder, "revision": None}
            file = Path(folder) / "config.json"
            has_tower |= file.is_file() and "vision_config" in json.loads(file.read_text())
    document_tokens, completions = min(document_tokens, config.data.max_tokens), None
    if config.rollout is not None:
        weights = [source.weight for source in config.data.weighted_sources] or [1.0]
        parts = machine.ranks // (config.parallel.tensor * config.parallel.context) * config.parallel.stages_per_rank
        sources = [*zip(weights, config.rollouts, strict=True)]
        document_tokens, completions = _set_completions(values, sources, parts, document_tokens)
    return {
        "kind": "whole",
        "config": values,
        "ranks": machine.ranks,
        "rank": 0,
        "gpus_per_node": machine.gpus_per_node,
        "device": machine.name,
        "document_tokens": document_tokens,
        "completions": completions,
        "has_tower": has_tower,
    }


def _set_completions(
    values: Job, sources: Sequence[tuple[float, RolloutConfig]], parts: int, prompt_tokens: int
) -> tuple[int, str]:
    """Set the keys for the tokens of a sequence, a step and a micro-batch to their values for completions that
    `StepPacker` packs. Every completion has the largest rollout.max_new_tokens of all sources.

    sources: pairs of a weight and a section `rollout`. parts: the smallest number of micro-batches of a step.
    Returns the number of tokens of a completion with its prompt, and a description of the completions.
    """
    data, train, max_tokens = values["data"], values["train"], values["data"]["max_tokens"]
    samples = sum(w * source.samples_per_prompt for w, source in sources) / sum(weight for weight, _ in sources)
    prompts = values["rollout"]["prompts_per_step"] or max(1, int(train["tokens_per_step"] // (max_tokens * samples)))
    completions = max(1, round(prompts * samples))
    new_tokens = max(source.max_new_tokens for _, source in sources)
    tokens = min(max_tokens, prompt_tokens + new_tokens)
    capacity = min(max_tokens, max(tokens, -(-completions * tokens // max(1, parts))))
    in_sequence = capacity // tokens
    data["max_tokens"] = in_sequence * tokens
    train["tokens_per_step"] = -(-completions // in_sequence) * in_sequence * tokens
    train["micro_batch_tokens"] = train["micro_batch_tokens"] // capacity * in_sequence * tokens
    limit = f"rollout.max_new_tokens={new_tokens:,}"
    return tokens, f"{completions:,} in a step, each of {tokens:,} tokens with its prompt ({limit})"


class DryRuns:
    """Processes that dry-run ranks. A process starts when a job finds no idle process. All end with the block."""

    def __enter__(self) -> Self:
        self._idle: LifoQueue[subprocess.Popen[str] | None] = LifoQueue()
        for _ in range(PROCESSES):
            self._idle.put(None)
        self._errors = tempfile.TemporaryFile("w+")
        return self

    def __exit__(self, *error: Any) -> None:
        for _ in range(PROCESSES):
            if (process := self._idle.get()) is not None:
                process.communicate()
        self._errors.close()

    def counts(self, jobs: Sequence[Job]) -> list[RankCounts]:
        """Return the counts of several ranks. Raises the error of the first job that failed."""
        return [RankCounts.from_json(successful(answer)) for answer in self.answers(jobs)]

    def answers(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Return the answers of several jobs (`child.py`) in their order."""
        with ThreadPoolExecutor(PROCESSES) as pool:
            return list(pool.map(self._answer, jobs))

    def _answer(self, job: Job) -> dict[str, Any]:
        process = self._idle.get()
        if process is None:
            process = subprocess.Popen(
                [sys.executable, "-m", "stillhouse.plan.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},  # hides this machine's GPUs
                text=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(job), file=process.stdin, flush=True)
            if line := process.stdout.readline():
                answer: dict[str, Any] = json.loads(line)
                return answer
        finally:
            self._idle.put(process)
        self._errors.seek(0)
        raise RuntimeError(f"the process of a dry run ended with exit code {process.wait()}:\n{self._errors.read()}")


def successful(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a job, or raise the error that the answer contains."""
    if "error" not in answer:
        return answer
    if answer["key"] is None:
        raise ValueError(answer["error"])
    raise ConfigError(answer["key"], answer["error"])


def _folder(section: str, name: str, revision: str | None) -> str:
    """Return a folder with the configuration of a model. Its weights are not downloaded from the hub."""
    from stillhouse.gguf.plain_folder import plain_folder

    with as_config_error(f"{section}.model"):
        name = plain_folder(name)
    if os.path.isdir(name):
        return name
    from huggingface_hub import snapshot_download

    try:
        with reading(f"got {name!r}, which is neither a folder nor a model of the hub that can be read"):
            return snapshot_download(name, revision=revision, allow_patterns=_FILES)
    except ValueError as error:
        raise ConfigError(f"{section}.model", str(error)) from error
