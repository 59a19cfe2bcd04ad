"""The rollouts of an on-policy run: from the configuration to the samples of a step, on all processes.

With servers, only rank 0 is connected to them, and the other ranks get its samples.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, RolloutConfig, RunConfig
from stillhouse.data import Documents, PackedMicroBatches, PackedSequences
from stillhouse.parallel import ShardedMicroBatches, watchdog
from stillhouse.rollouts import (
    Completion,
    RolloutEngine,
    RolloutPlan,
    RolloutQueue,
    Sample,
    SampleWriter,
    TargetRules,
    require_versions,
    step_documents,
)
from stillhouse.rollouts.hooks import load_function
from stillhouse.rollouts.weights import publish
from stillhouse.teachers import SignalsLostError
from stillhouse.teachers.client import ServerError
from stillhouse.train.agreement import from_all_ranks
from stillhouse.train.folder import RunFolder
from stillhouse.train.rollout_engine import open_engine
from stillhouse.train.rollout_log import Timeline
from stillhouse.train.session import Session

T = TypeVar("T")

WAIT_FOR_COMPLETIONS = "wait for completions"

#: how many steps ahead of its own a schedule asks for completions; async: see `queue.py`
_AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}


class Rollouts:
    """queue: of the samples; None on ranks without an engine, which get them from rank 0."""

    def __init__(self, session: Session, folder: RunFolder):
        assert session.config.rollout is not None
        self.session, self.config = session, session.config.rollout
        self.weights = Path(self.config.weights or folder.path / "weights")
        self.engine: RolloutEngine | None = open_engine(session, self.config)
        self.queue = None
        if self.engine is not None:
            assert session.plan is not None
            steps, prompts = session.step_schedule.steps, session.train.documents
            self.queue = make_queue(self.config, self.engine, prompts, session.plan, session.tokenizer, steps)

    def ask(self, step: int, timeline: Timeline) -> None:
        """Give the engine the weights of this step, and ask for the completions that the step asks for.

        Except under async, the completions of this step are finished before: they have tokens of one version.
        """
        with watchdog.untimed(f"the completions of step {step + 1}"):
            self._ask(step, timeline)

    def _ask(self, step: int, timeline: Timeline) -> None:
        queue, number = self.queue, step + 1
        with timeline.span(number, "trainer", WAIT_FOR_COMPLETIONS):
            if self.config.schedule != "async":
                self._on_first(lambda: queue.wait_for(step) if queue is not None and queue.has_asked(step) else None)
        if self.config.writer == "student":
            with timeline.span(number, "weights", f"version {step}"):
                folder = None
                if self.config.urls:
                    session = self.session
                    folder = publish(session.runner, self.weights, step, tokenizer=session.tokenizer)
                self._on_first(lambda: self._update_weights(step, folder))
        # an engine in this job writes now; with servers, this only sends the requests
        with timeline.span(number, "trainer", WAIT_FOR_COMPLETIONS):
            self._on_first(lambda: None if queue is None else queue.ask(step))

    def take(self, step: int, timeline: Timeline) -> list[Sample]:
        """The samples of a step, the same on all ranks. Waits for them."""
        queue = self.queue
        phase = f"the completions of step {step + 1}"
        with timeline.span(step + 1, "trainer", WAIT_FOR_COMPLETIONS), watchdog.untimed(phase):
            content = self._on_first(lambda: [] if queue is None else [_as_json(each) for each in queue.take(step)])
        if queue is not None and queue.taken_times != (0.0, 0.0):
            offset = timeline.seconds - time.monotonic()
            start, stop = (offset + each for each in queue.taken_times)
            timeline.add(step + 1, "rollout", f"{len(content)} completions", start, stop)
        samples = [_from_json(each) for each in content]
        if self.config.writer == "student":
            require_versions(samples, step, self.config.max_staleness)
        return samples

    def micro_batches(self, step: int, samples: Sequence[Sample]) -> ShardedMicroBatches:
        """This process's part of a step on these samples, and on the dataset's completions of the step."""
        session, plan = self.session, self.session.plan
        assert plan is not None
        rows = session.step_schedule.rows_per_micro_batch
        return session.shard(
            pack_step(session.config, session.train, samples, rows, session.dataset, plan.from_dataset(step))
        )

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def _update_weights(self, step: int, folder: Path | None) -> None:
        if self.engine is not None:
            self.engine.update_weights(step, folder)

    def _on_first(self, action: Callable[[], T]) -> T:
        """The result of an action on rank 0, on all ranks. It must be something that JSON can hold.

        All ranks with an engine take the action, because an engine in this job writes on all of them together. An
        error of rank 0 is raised on all ranks.
        """
        result: Any = None
        problem, is_lost = "", False
        if self.engine is not None:
            try:
                result = action()
            except ServerError as error:
                problem, is_lost = str(error), True
            except ValueError as error:
                problem = str(error)
        result, problem, is_lost = from_all_ranks((result, problem, is_lost), self.session.device)[0]
        if is_lost:
            raise SignalsLostError(problem)
        if problem:
            raise ValueError(problem)
        return result


def first_rollouts(session: Session) -> ShardedMicroBatches:
    """The micro-batches of the first step of a run whose completions are written in this job; nothing is saved."""
    rollouts, timeline = Rollouts(session, RunFolder(Path(session.config.out))), Timeline(time.monotonic)
    rollouts.ask(0, timeline)
    return rollouts.micro_batches(0, rollouts.take(0, timeline))


def make_queue(
    rollout: RolloutConfig,
    engine: RolloutEngine,
    prompts: Documents,
    plan: RolloutPlan,
    tokenizer: PreTrainedTokenizerBase,
    steps: int,
) -> RolloutQueue:
    """Raises ConfigError for a reward or an environment that cannot be loaded."""
    writer = SampleWriter(
        engine,
        prompts,
        plan,
        tokenizer,
        rollout.max_new_tokens,
        reward=_function("reward", rollout),
        environment=_function("environment", rollout),
        max_turns=rollout.max_turns if rollout.environment is not None else 1,
    )
    return RolloutQueue(
        writer,
        plan,
        ahead=min(_AHEAD.get(rollout.schedule, (rollout.max_staleness + 1) // 2), rollout.max_staleness),
        max_staleness=rollout.max_staleness,
        in_order=rollout.schedule != "async",
        last_step=steps - 1,
        advantage=rollout.advantage,
        alive=watchdog.progress,
    )


def pack_step(
    config: RunConfig,
    prompts: PackedSequences,
    samples: Sequence[Sample],
    rows: int,
    dataset: Documents | None = None,
    from_dataset: Sequence[int] = (),
) -> PackedMicroBatches:
    """The micro-batches of a step, with `rows` packed sequences each. from_dataset: see `step_documents`."""
    rollout = config.rollout
    assert rollout is not None
    rules = TargetRules(
        mask_truncated=rollout.truncated == "mask",
        position_decay=rollout.position_decay,
        by_student=rollout.writer == "student",
    )
    packed = PackedSequences(
        step_documents(prompts.documents, samples, rules, dataset, from_dataset),
        max_tokens=prompts.max_tokens,
        seed=0,
        shuffle=False,
        gaps=prompts.gaps,
        together=None if config.teachers is None else config.teachers.route,
    )
    numbers = np.arange(len(packed))
    return packed.micro_batches([numbers[start : start + rows] for start in range(0, len(packed), rows)])


def _function(key: str, rollout: RolloutConfig) -> Any:
    path = getattr(rollout, key)
    try:
        return None if path is None else load_function(path)
    except ValueError as error:
        raise ConfigError(f"rollout.{key}", str(error)) from error


def _as_json(sample: Sample) -> dict[str, Any]:
    completion = sample.completion
    return {
        "number": sample.number,
        "prompt": sample.prompt,
        "ids": completion.ids_N.tolist(),
        "log_probs": completion.log_probs_N.tolist(),
        "versions": completion.versions_N.tolist(),
        "finish": completion.finish,
        "is_written": sample.is_written_N.tolist(),
        "reward": sample.reward,
        "advantage": sample.advantage,
    }


def _from_json(content: Mapping[str, Any]) -> Sample:
    completion = Completion(
        np.array(content["ids"], dtype=np.int32),
        np.array(content["log_probs"], dtype=np.float32),
        np.array(content["versions"], dtype=np.int32),
        content["finish"],
    )
    is_written_N = np.array(content["is_written"], dtype=bool)
    return Sample(
        content["number"], content["prompt"], completion, is_written_N, content["reward"], content["advantage"]
    )
