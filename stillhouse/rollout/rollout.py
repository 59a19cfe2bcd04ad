"""The rollouts of an on-policy run: `Rollout.take` gives the samples of a step to all ranks.

Only rank 0 has the queue of samples. Rewards and environments run in the process of rank 0, or in worker processes on
the host of rank 0.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from stillhouse.config import RolloutConfig
from stillhouse.config.servers import ServerError
from stillhouse.data import Documents
from stillhouse.output.rollout_log import RolloutLog
from stillhouse.parallel import DistributedStudent, ShardedMicroBatches, watchdog
from stillhouse.parallel.ranks import Shared
from stillhouse.preemption import OverdueError
from stillhouse.rollout.documents import StepPacker, TargetRules, step_documents
from stillhouse.rollout.engines import InJobEngine
from stillhouse.rollout.plan import PromptPlan, RolloutSchedule
from stillhouse.rollout.queue import RolloutQueue, require_versions
from stillhouse.rollout.records import Sample
from stillhouse.signals import SignalsLostError
from stillhouse.user_code.function_calls import FunctionCalls
from stillhouse.user_code.functions import UserFunctionError

WAIT_FOR_COMPLETIONS = "wait for completions"
#: errors of rank 0 that all ranks raise
ERRORS = ServerError, OverdueError, UserFunctionError, ValueError


class ServedStudent(Protocol):
    """Gives the student's weights to servers. Both methods are collectives of all processes."""

    def publish(self, version: int) -> None:
        """Write the weights to a folder. During this, the servers still generate with the previous weights."""

    def update(self, version: int) -> None:
        """Make the servers load the published weights, and prove that the servers use these weights."""


@contextmanager
def errors_of_signals() -> Iterator[None]:
    """Turn the errors for servers that do not answer (ServerError) and for a user's function that does not return
    after a signal (OverdueError) into SignalsLostError.
    """
    try:
        yield
    except (ServerError, OverdueError) as error:
        raise SignalsLostError(str(error)) from error


@dataclass(eq=False)
class Rollout:
    """The samples of each step, on all ranks.

    rollouts: the section rollout for each source of prompts.
    engine: generates in this job, or None if servers generate.
    served: gives the student's weights to servers. It is None without servers, and for servers that keep their own
        weights.
    queue, functions: the samples, and the calls of the user's functions, on rank 0.
    prompts, dataset: the documents to which the numbers in `plan` refer.
    packer: packs the documents of a step.
    """

    rollouts: Sequence[RolloutConfig]
    engine: InJobEngine | None
    served: ServedStudent | None
    queue: RolloutQueue | None
    functions: FunctionCalls | None
    plan: PromptPlan
    schedule: RolloutSchedule
    prompts: Documents
    dataset: Documents | None
    student: DistributedStudent
    packer: StepPacker

    def __post_init__(self) -> None:
        self._by_student = self.rollouts[0].writer == "student"
        self._ranks, self._taken = self.student.ranks, dict[int, list[Sample]]()
        self._is_single_process = self._ranks.size == 1

    def take(self, step: int, timeline: RolloutLog) -> list[Sample]:
        """Return the samples of a step, with rewards and advantages, on all ranks. A collective of all processes.

        First, the engine gets the weights of this step and the requests that are due. Except under async, completions
        for this step that an earlier step requested are finished before the weights change. All ranks raise the
        errors of rank 0: ValueError, UserFunctionError and SignalsLostError.
        """
        queue, phase = self.queue, f"the completions of step {step + 1}"
        with watchdog.nested(phase, timed=False):
            self._update_weights(step, timeline)
            with timeline.trainer(WAIT_FOR_COMPLETIONS):
                with self.shared():
                    if queue is not None:
                        queue.start(step)
                if self.engine is not None:
                    with errors_of_signals():
                        self.engine.complete(None if queue is None else queue.samples, *ERRORS)
                    if queue is not None:
                        queue.collect()
                if step not in self._taken:
                    self._take(step, timeline)
        return self._taken[step]

    def micro_batches(self, steps: Iterable[int], timeline: RolloutLog) -> Iterator[ShardedMicroBatches | None]:
        """For each step, yield this process's part of the micro-batches of the step's samples and dataset documents.

        If `take` has not been called for a step, yield None until it has been called. Under two_step_off, the samples
        of this step are taken without `take` as soon as they are finished.
        """
        for step in steps:
            while step not in self._taken and not self._take_early(step, timeline):
                yield None
            rules, numbers = TargetRules.of(self.rollouts), self.plan.from_dataset(step)
            documents = step_documents(self.prompts, self._taken[step], rules, self.dataset, numbers)
            yield self.packer.sharded(self.student, documents)

    def trained(self, step: int) -> None:
        """Record that the optimizer has made this step."""
        del self._taken[step]
        if self.queue is not None:
            self.queue.trained(step)

    def finish(self) -> None:
        """Wait until the environments have dropped the objects of the last samples. Raises errors on all ranks."""
        with watchdog.nested("the end of environments", timed=False), self.shared():
            if self.queue is not None:
                self.queue.samples.wait_until_dropped()

    @contextmanager
    def shared(self) -> Iterator[Shared]:
        """Enter `Ranks.shared`, and raise the errors of `take` on all ranks."""
        with errors_of_signals(), self._ranks.shared(*ERRORS) as shared:
            yield shared

    def _update_weights(self, step: int, timeline: RolloutLog) -> None:
        """Give the weights of this step to the engine, if the student generates the samples."""
        if self.served is not None:
            with timeline.trainer(f"publish version {step}", step + 1, "weights"):
                self.served.publish(step)  # servers still generate with the previous weights
        if self.schedule.in_order and self.engine is None:
            with timeline.trainer(WAIT_FOR_COMPLETIONS), self.shared():
                if self.queue is not None and self.queue.has_requested(step):
                    self.queue.wait_for(step)
        if not self._by_student:
            return
        with timeline.trainer(f"version {step}", step + 1, "weights"):
            if self.served is not None:
                self.served.update(step)
            if self.engine is not None:
                self.engine.update_weights(step)

    def _take(self, step: int, timeline: RolloutLog) -> None:
        samples: list[Sample] = []
        with self.shared() as shared:
            if self.queue is not None:
                samples = self.queue.take(step)
                if not self._is_single_process:
                    shared.value = [sample.as_json() for sample in samples]
        if self.queue is None:
            samples = [Sample.from_json(values) for values in shared.value]
        elif self.queue.taken_times != (0.0, 0.0):
            timeline.add_monotonic(step + 1, "rollout", f"{len(samples)} completions", *self.queue.taken_times)
        if self._by_student:
            require_versions(samples, step, self.rollouts[0].max_staleness)
        self._taken[step] = samples

    def _take_early(self, step: int, timeline: RolloutLog) -> bool:
        """Take the samples of a later step if they are finished, and return whether they are."""
        if self.rollouts[0].schedule != "two_step_off":
            return False
        with self.shared() as shared:
            if self.queue is not None:
                shared.value = self.queue.has_requested(step) and self.queue.is_ready(step)
        if shared.value:
            phase = f"the completions of step {step + 1}"
            with timeline.trainer(WAIT_FOR_COMPLETIONS), watchdog.nested(phase, timed=False):
                self._take(step, timeline)
        return bool(shared.value)
