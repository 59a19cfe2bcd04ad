"""On-policy runs in which one real vLLM writes the completions and another one, by its hidden states, judges them.

Part of benchmarks/engines.py. There is a run for each of the schedules sync, one_step_off and async, and two more
in which the writing vLLM is killed while it writes completions, and started again. The samples that a run trained on
and the weights of all its versions are kept. What is checked afterwards:

- Each sample is trained exactly once.
- The staleness of each token is within its schedule's bound.
- Each token's log-probability is the one by transformers, in float32, with the weights of the token's version; with
  those of the version before or after, it is another one.
- The losses are those of the same run with the teacher in the job, on the same samples.

L tokens of a prompt and its completion, N tokens of the completion, V vocabulary.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.engines_server import DEVELOPMENT, HIDDEN_STATES, PROCESSED, WRITING, VllmProcess, start
from benchmarks.training_runs import LOSS, run_config, values_of
from stillhouse.data import Documents
from stillhouse.loops import rollouts as rollouts_module
from stillhouse.loops.weights_on_servers import WeightsOnServers
from stillhouse.output.rollout_log import RolloutLog
from stillhouse.rollout import Sample
from stillhouse.rollout.publish import version_folder
from stillhouse.rollout.rollout import Rollout
from stillhouse.run.run import distill
from stillhouse.tools.demo.corpus import collect_split
from stillhouse.tools.demo.student import TEACHER

STEPS, PROMPTS, SAMPLES, NEW_TOKENS, MAX_STALENESS, TEMPERATURE = 20, 4, 2, 48, 2, 0.7
#: vLLM writes few completions at a time, so that under async some of them are under way when weights change. How many
#: depends on the machine's load; engines_completions.py requires it of completions that are long enough
AT_A_TIME = ("--max-num-seqs", "2")
#: large, so that each step changes the log-probabilities of its tokens by far more than the precision of the checks
LEARNING_RATE = 3e-3
#: the step, from 0, in which the writing vLLM is killed, and the schedules of these runs: with sync, its answers are
#: waited for, and with async, it has to take the next weights first
KILLED_IN, KILLED = 9, ("sync", "async")
#: the largest difference of a log-probability, in nats, from transformers' own in float32
SAME_LOG_PROB = 2e-5
#: for each version, some token must differ by so many nats with the weights of a neighbouring version
OTHER_LOG_PROB = 1e-2
#: the largest relative difference of a step's loss between the served teacher and the one in the job
SAME_LOSS = 1e-6
#: the least and the largest staleness of tokens after the first step, by schedule
STALENESS = {"sync": (0, 0), "one_step_off": (1, 1), "async": (0, MAX_STALENESS)}
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that a CPU build computes with
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # so that tokens are far from equally likely
    "tie_word_embeddings": False,  # a CPU build keeps the first head of a tied student
}


def measure_rollouts(folder: Path, python: str) -> dict[str, dict[str, Any]]:
    """The figures of every run. python: of an environment with vLLM."""
    folder = folder / "rollouts"
    _write_inputs(folder)
    teacher = start(python, folder / "teacher", *HIDDEN_STATES)
    writer = start(python, folder / "student", *WRITING, *PROCESSED, *AT_A_TIME, settings=DEVELOPMENT)
    figures = {}
    try:
        urls = {"teacher": teacher.wait().url, "writer": writer.wait().url}
        for schedule in STALENESS:
            figures[schedule] = _measure(folder, schedule, schedule, urls)
        for schedule in KILLED:
            kill = _Kill(writer)
            try:
                figures[f"{schedule}, killed"] = _measure(folder, f"{schedule} killed", schedule, urls, kill)
            finally:
                writer = kill.writer
            figures[f"{schedule}, killed"] |= kill.figures
    finally:
        writer.stop()
        teacher.stop()
    return figures


def problems_of(name: str, figures: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a run. Comparisons are written so that a NaN is a problem."""
    expected = STEPS * PROMPTS * SAMPLES
    if not figures["samples"] == figures["samples_trained_once"] == expected:
        once = figures["samples_trained_once"]
        yield f"of {figures['samples']} samples, {once} are trained once: expected {expected}"
    least, most = STALENESS[figures["schedule"]]
    if set(figures["staleness"]) - set(map(str, range(least, most + 1))):
        yield f"tokens by staleness {figures['staleness']}: expected {least} to {most}"
    if not figures["largest_log_prob_difference"] <= SAME_LOG_PROB:
        yield f"log-probabilities differ by {figures['largest_log_prob_difference']:.2g} nats from their version's"
    if not figures["smallest_difference_of_another_version"] >= OTHER_LOG_PROB:
        yield "the versions' log-probabilities are so similar that a wrong version would not be found"
    if not figures["largest_relative_loss_difference"] <= SAME_LOSS:
        yield f"losses differ by {figures['largest_relative_loss_difference']:.2g} from the teacher's in the job"
    if "killed" in name and not figures["under_way_when_killed"]:
        yield "no completion was under way when vLLM was killed"


class _Recording(Rollout):
    """The rollouts of a run; each step's samples are kept when they have been trained, and all published weights.

    kept: the folder of these weights. hook: is called with these rollouts after each step's requests have been sent.
    """

    kept: Path
    hook: "Callable[[_Recording, int], None] | None" = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps: list[list[Sample]] = []

    def _take(self, step: int, timeline: RolloutLog) -> None:
        assert isinstance(self.served, WeightsOnServers)
        shutil.copytree(version_folder(self.served.folder, step), version_folder(self.kept, step))
        if self.hook is not None:
            self.hook(self, step)
        super()._take(step, timeline)

    def trained(self, step: int) -> None:
        self.steps.append(self._taken[step])
        super().trained(step)


class _Repeating(Rollout):
    """Gives the samples of another run, step by step."""

    steps: Sequence[list[Sample]]

    def take(self, step: int, timeline: RolloutLog) -> list[Sample]:
        self._taken[step] = self.steps[step]
        return self.steps[step]

    def trained(self, step: int) -> None:
        del self._taken[step]


class _Kill:
    """Kills the writing vLLM when the requests of a step have been sent, and starts another one in its place."""

    def __init__(self, writer: VllmProcess):
        self.writer, self.figures = writer, dict[str, Any]()

    def __call__(self, rollouts: _Recording, step: int) -> None:
        if step != KILLED_IN:
            return
        assert rollouts.queue is not None
        time.sleep(0.1)  # some tokens of each completion have been generated
        self.writer.kill()
        self.figures["under_way_when_killed"] = len(rollouts.queue.samples.under_way)
        self.writer = self.writer.start_again()


def _measure(
    folder: Path, name: str, schedule: str, urls: Mapping[str, str], hook: _Kill | None = None
) -> dict[str, Any]:
    kept = folder / f"{name} weights"
    settings = {"rollout.engine": "vllm", "rollout.url": urls["writer"], "rollout.schedule": schedule}
    recorded: list[_Recording] = []

    def recording(*arguments: Any) -> _Recording:
        recorded.append(_Recording(*arguments))
        recorded[0].kept, recorded[0].hook = kept, hook
        return recorded[0]

    def repeating(*arguments: Any) -> _Repeating:
        repeated = _Repeating(*arguments)
        repeated.steps = recorded[0].steps
        return repeated

    before = time.perf_counter()
    with patch.object(rollouts_module, "Rollout", recording):
        losses = _losses(folder, name, **settings, **{"teacher.url": urls["teacher"]})
    seconds = time.perf_counter() - before
    [rollouts] = recorded
    with patch.object(rollouts_module, "Rollout", repeating):
        expected = _losses(folder, f"{name} in the job")
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    counts = Counter(sample.number for samples in rollouts.steps for sample in samples)
    versions = [sample.completion.versions_N for samples in rollouts.steps for sample in samples]
    return {
        "schedule": schedule,
        "steps": len(losses),
        "seconds": round(seconds, 1),
        "samples": len(versions),
        "samples_trained_once": sum(counts[number] == 1 for number in range(STEPS * PROMPTS * SAMPLES)),
        "tokens": sum(map(len, versions)),
        "samples_of_several_versions": sum(len(set(versions_N.tolist())) > 1 for versions_N in versions),
        "staleness": _staleness(rollouts.steps),
        **_log_probs(rollouts.steps, kept, rollouts.prompts),
        "largest_relative_loss_difference": float(np.max(differences)),  # unlike max(), it keeps a NaN
    }


def _staleness(steps: Sequence[list[Sample]]) -> dict[str, int]:
    """The tokens of the steps after the first one, counted by the age of the weights that generated them."""
    ages = [step - sample.completion.versions_N for step, samples in enumerate(steps) if step for sample in samples]
    return {str(age): count for age, count in sorted(Counter(np.concatenate(ages).tolist()).items())}


@torch.no_grad()
def _log_probs(steps: Sequence[list[Sample]], kept: Path, prompts: Documents) -> dict[str, Any]:
    """How far the engine's log-probabilities of tokens are from those of the version that generated them, as the
    engine says, and from those of the versions before and after it.
    """
    differences: dict[tuple[int, int], list[np.ndarray]] = {}
    samples = [sample for samples in steps for sample in samples]
    for number in range(STEPS):
        model = AutoModelForCausalLM.from_pretrained(version_folder(kept, number), dtype=torch.float32).eval()
        for sample in samples:
            versions_N = sample.completion.versions_N
            if not (np.abs(versions_N - number) <= 1).any():
                continue
            difference_N = np.abs(_model_log_probs(model, prompts, sample) - sample.completion.log_probs_N)
            for version in set(versions_N.tolist()):
                differences.setdefault((version, number), []).append(difference_N[versions_N == version])
    largest = {key: float(np.max(np.concatenate(difference))) for key, difference in differences.items()}
    either = [
        np.concatenate(difference)
        for (version, assumed), difference in differences.items()
        if abs(version - assumed) == 1
    ]
    return {
        "tokens_that_fit_another_version": int(
            sum((differences_N <= SAME_LOG_PROB).sum() for differences_N in either)
        ),
        "versions": len({version for version, _ in largest}),
        "largest_log_prob_difference": float(
            np.max([difference for (version, assumed), difference in largest.items() if version == assumed])
        ),
        "smallest_difference_of_another_version": float(np.min([differences_N.max() for differences_N in either])),
    }


def _model_log_probs(model: PreTrainedModel, prompts: Documents, sample: Sample) -> np.ndarray:
    """The log-probabilities of a sample's tokens, [tokens] float64."""
    prompt_ids = prompts.tokens(sample.prompt)
    ids_L = torch.from_numpy(np.concatenate([prompt_ids, sample.completion.ids_N]).astype(np.int64))
    logits_NV = model(ids_L[None]).logits[0, len(prompt_ids) - 1 : -1].double()
    log_probs_NV = (logits_NV / TEMPERATURE).log_softmax(-1)
    return log_probs_NV.gather(1, ids_L[len(prompt_ids) :, None])[:, 0].numpy()


def _write_inputs(folder: Path) -> None:
    """The shipped teacher, a random student with its tokenizer and a head of its own, and prompts."""
    shutil.copytree(TEACHER, folder / "teacher")
    vocabulary = json.loads((folder / "teacher/config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, eos_token_id=0, **SHAPE)).save_pretrained(folder / "student")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TEACHER / name, folder / "student")
    prompts = [document.text[:60] for document in collect_split("student")[:100]]
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))


def _losses(folder: Path, name: str, **settings: Any) -> list[float]:
    """The loss of each step of a run."""
    defaults = {
        "student.model": str(folder / "student"),
        "teacher.model": str(folder / "teacher"),
        "teacher.dtype": "float32",
        "data.train": str(folder / "train.jsonl"),
        "data.eval": 0.0,
        "data.max_tokens": 128,
        "rollout.prompts_per_step": PROMPTS,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": NEW_TOKENS,
        "rollout.max_staleness": MAX_STALENESS,
        "rollout.temperature": TEMPERATURE,
        "train.micro_batch_tokens": 512,
        "train.steps": STEPS,
        "train.schedule": "constant",
        "train.learning_rate": LEARNING_RATE,
        "train.precision": "fp32",
        "device": "cpu",
        "out": str(folder / name),
    }
    return values_of(distill(run_config(defaults | settings)), LOSS)
