"""Small on-policy runs: their configuration, data, requests and figures; and queues of samples whose engine answers
in an order that a test chooses, which no real engine can be made to do.
"""

import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit.layout_runs import weights
from kit.ranks import run_ranks
from kit.runs import metrics, write_records, write_run
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.config import RunConfig
from stillhouse.data import DataReport, Documents
from stillhouse.data.offsets import offsets_of
from stillhouse.rollout import (
    Completion,
    GenerationRequest,
    PromptPlan,
    RolloutQueue,
    Samples,
    Sampling,
    SourceSettings,
)
from stillhouse.rollout.plan import PromptSource, RolloutSchedule
from stillhouse.rollout.records import CompletionInbox
from stillhouse.rollout.turns import EpisodeCalls

CPU = torch.device("cpu")
LENGTHS = (3, 11, 1, 7, 5)
SAMPLING = Sampling(max_new_tokens=9, eos_ids=(2,))


def requests(lengths: Sequence[int] = LENGTHS, vocabulary: int = 251, seed: int = 0) -> list[GenerationRequest]:
    random = np.random.Generator(np.random.PCG64(seed))
    prompts = [random.integers(3, vocabulary, length).astype(np.int32) for length in lengths]
    return [GenerationRequest(number, ids, seed=1000 + number) for number, ids in enumerate(prompts)]


def as_lists(completions: list[Completion]) -> list[tuple[list[int], list[float], str]]:
    return [(each.ids_N.tolist(), each.log_probs_N.tolist(), each.finish) for each in completions]


STEPS, PROMPTS, SAMPLES = 12, 7, 3


class LateEngine:
    """Writes two tokens of the version at which it answers. It answers in a random order, as many as `most`."""

    def __init__(self, most: int, seed: int = 0):
        self.most, self.version, self.draw = most, 0, random.Random(seed)
        self.waiting: list[tuple[GenerationRequest, CompletionInbox]] = []
        self.requested: list[int] = []

    def generate(
        self, requests: Sequence[GenerationRequest], inbox: CompletionInbox | None = None
    ) -> list[Future[Completion]]:
        assert inbox is not None
        self.waiting += [(request, inbox) for request in requests]
        self.requested += [request.number for request in requests]
        return []

    def answer(self) -> None:
        self.draw.shuffle(self.waiting)
        for request, inbox in self.waiting[: self.most]:
            ids_N = np.array([request.number % 251, 2], dtype=np.int32)
            versions_N = np.full(2, self.version, dtype=np.int32)
            inbox.put((request.number, Completion(ids_N, np.zeros(2, np.float32) - 1, versions_N, "stop")))
        del self.waiting[: self.most]

    def update_weights(self, version: int, folder: Path | None) -> None:
        self.version = version

    def close(self) -> None:
        self.waiting.clear()


def prompts() -> Documents:
    lengths = [2 + number % 3 for number in range(PROMPTS)]
    tokens_N = np.arange(sum(lengths), dtype=np.int32)
    keys_D = np.arange(PROMPTS, dtype=np.uint64)
    records: list[dict[str, Any]] = [{"answer": number} for number in range(PROMPTS)]
    sources = [f"train.jsonl:{number + 1}" for number in range(PROMPTS)]
    report = DataReport("train.jsonl")
    targets_N = np.zeros(len(tokens_N), dtype=bool)
    return Documents(tokens_N, targets_N, offsets_of(lengths), keys_D, sources, report, records=records)


def queue_of(engine: LateEngine, *, ahead: int, in_order: bool, share: float = 1.0, slack: int = 0) -> RolloutQueue:
    plan = one_source_plan(PROMPTS, 5, 4, SAMPLES, seed=3, share=share)
    samples = Samples(prompts(), plan, toy_tokenizer(), [SourceSettings(8)], alive=engine.answer)
    schedule = RolloutSchedule(ahead, in_order, ahead + slack, STEPS - 1)
    return RolloutQueue(samples, plan, schedule, cast(Any, engine))


#: the figures that do not depend on the batches in which completions were written
SAME = (
    "step",
    "tokens",
    "rollout/completion_tokens",
    "rollout/truncated",
    "rollout/staleness",
    "rollout/staleness_max",
)


def write_on_policy_run(folder: Path, **settings: Any) -> RunConfig:
    """Write a run with prompts. Its steps have four prompts with two completions each."""
    folder.mkdir(exist_ok=True)
    records = [{"prompt": f"Two and {number} is", "completion": f" {number + 2}."} for number in range(15)]
    write_records(folder / "train.jsonl", records)
    write_records(folder / "eval.jsonl", records[:5])
    defaults = {
        "objective.loss": "reverse_kl",
        "rollout.max_new_tokens": 11,
        "rollout.samples_per_prompt": 2,
        "rollout.prompts_per_step": 4,
        "data.max_tokens": 37,
        "train.tokens_per_step": 37,
        "train.micro_batch_tokens": 74,
    }
    return write_run(folder, **defaults | settings)


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Write a module with functions of the user, for runs in this process and in others."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that the end of the test removes what it imports
    del sys.modules[name]


def assert_same_under_layouts(folder: Path) -> None:
    """Compare the gradients of a run under all layouts of two processes."""
    shown = run_ranks(2, "parity", folder / "run.yaml")[0].out
    same = {line.split("  ")[0] for line in shown.splitlines() if line.endswith("  same")}
    assert same >= {"fsdp 2", "replicate 2", "tensor 2", "context 2", "pipeline 2, 1f1b", "pipeline 2, gpipe"}
    assert "DIFFERENT" not in shown


def rollout_figures(out: Path) -> list[dict[str, float]]:
    """Return the figures of each step, without those that depend on the time."""
    lines = [line for line in metrics(out) if "rollout/share" in line]
    return [{key: value for key, value in line.items() if not key.startswith(("speed", "seconds"))} for line in lines]


def assert_same_figures(out: Path, expected_out: Path, keys: Sequence[str], loss: str) -> None:
    for figures, expected in zip(rollout_figures(out), rollout_figures(expected_out), strict=True):
        assert {key: figures[key] for key in keys} == {key: expected[key] for key in keys}
        assert figures[loss] == pytest.approx(expected[loss], rel=1e-5)


def assert_same_rollouts(out: Path, expected_out: Path, keys: Sequence[str], loss: str) -> None:
    """Compare two runs whose completions were written in different batches.

    keys: of the figures that are equal; loss: the key of a loss, which differs by rounding, as the weights do.
    """
    assert_same_figures(out, expected_out, keys, loss)
    for name, weight in weights(expected_out).items():
        assert weights(out)[name].sub(weight).abs().max() < 1e-4, name


def served(folder: Path, name: str, *urls: str, **settings: str) -> tuple[Any, ...]:
    """The arguments of a run with servers of our own that write the completions. name: of its output folder."""
    values = {"out": str(folder / name), "rollout.engine": "stillhouse", "rollout.url": f"[{', '.join(urls)}]"}
    return ("distill", folder / "run.yaml", *(f"{key}={value}" for key, value in (values | settings).items()))


def assert_same_served(out: Path, expected_out: Path) -> None:
    """As `assert_same_rollouts`; the servers have written with the trainer's weights."""
    assert_same_rollouts(out, expected_out, SAME, "loss/total_nats_per_token")
    assert all(line["rollout/log_ratio_max"] < 1e-4 for line in rollout_figures(out))


def one_source_plan(
    prompts: int, dataset: int, prompts_per_step: int, samples_per_prompt: int, seed: int, share: float = 1.0
) -> PromptPlan:
    return PromptPlan([PromptSource(prompts, samples_per_prompt, dataset, share)], prompts_per_step, seed)


@dataclass(frozen=True)
class Episodic:
    """Calls a function (prompt, completion, record, source, episode) → future in place of an environment."""

    function: Callable[..., Future[Any]]

    def request(self, key: str, path: str, *arguments: Any) -> Future[Any]:
        return self.function(*arguments)


def episodic(function: Callable[..., Future[Any]]) -> EpisodeCalls:
    return EpisodeCalls(Episodic(function), "rollout.environment", "m:f")
