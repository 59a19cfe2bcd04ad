"""The rollouts of an on-policy run: gives new weights to the engine, and the samples of each step to all ranks."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from stillhouse.checkpoint.served_models import require_same_writer
from stillhouse.config import RolloutConfig, StudentConfig
from stillhouse.config.reward_sum import has_part_of_object
from stillhouse.config.servers import ServerError
from stillhouse.data import Documents
from stillhouse.loops.completion_calls import CompletionCalls
from stillhouse.loops.completion_engine import open_engine, samplings
from stillhouse.loops.session import Session
from stillhouse.loops.source_replies import require_end_of_turns, turn_replies
from stillhouse.loops.step_packer import StepPacker
from stillhouse.loops.weights_proof import probe_samples, require_weights_in_use
from stillhouse.models import model_fingerprint
from stillhouse.output.disk import explained_write_errors
from stillhouse.output.folder import RunFolder
from stillhouse.output.rollout_log import Timeline
from stillhouse.parallel import ShardedMicroBatches, is_first, local_folder, watchdog
from stillhouse.preemption import OverdueError
from stillhouse.rollout import (
    PromptPlan,
    RolloutEngine,
    RolloutQueue,
    Sample,
    SampleGenerator,
    Sampling,
    SourceSettings,
    TargetRules,
    require_versions,
    step_documents,
)
from stillhouse.rollout.engines import InJobEngine, RemoteEngine
from stillhouse.rollout.plan import RolloutSchedule
from stillhouse.rollout.publish import publish
from stillhouse.rollout.published_folder import AdapterBase
from stillhouse.rollout.turns import TurnReplies
from stillhouse.signals import SignalsLostError
from stillhouse.signals.signal_store import SECONDS_BETWEEN_LOOKS, SignalWatch
from stillhouse.user_code.functions import UserFunctionError

Result = TypeVar("Result")

WAIT_FOR_COMPLETIONS = "wait for completions"


class Rollouts:
    """The samples of each step, on all ranks. Rank 0 has the `queue`; the other ranks get the samples from rank 0.

    Rewards and environments run only on rank 0, or in worker processes on its host. An engine in this job generates
    on all ranks together: the other ranks get the requests of rank 0.
    """

    def __init__(self, session: Session, folder: RunFolder, *, is_new: bool = True):
        """is_new: whether the run has no checkpoint."""
        assert session.rollout_config is not None
        assert session.plan is not None
        self.session, self.config, self.plan = session, session.rollout_config, session.plan
        self._packer = StepPacker(session.train, session.train_config.micro_batch_tokens, session.by_length)
        self.queue: RolloutQueue | None = None
        self.engine: RolloutEngine | None = None
        self.calls: CompletionCalls | None = None
        #: the run's identity in published weights, and their folder; runs that share rollout.weights have subfolders
        self.run, self.weights = "", folder.path / "weights"
        self.base: AdapterBase | None = None
        if self.config.urls and self.config.writer == "student":
            self.run = self._on_first(folder.identity)
            self.weights = Path(self.config.weights) / self.run if self.config.weights else self.weights
            if session.student_config.adapter is not None:
                self.base = AdapterBase(**self._on_first(partial(_base_of, session.student_config)))
        self.engine = open_engine(session, self.config, self.run)
        self.schedule, prompts = RolloutSchedule.of(self.config, session.step_schedule.steps), session.train.documents
        require_end_of_turns(session)
        if is_first():
            assert self.engine is not None
            self.calls = CompletionCalls(session.rollouts, compare_first=is_new)
            self.queue = make_queue(
                session.rollouts,
                samplings(session),
                self.schedule,
                self.engine,
                prompts,
                self.plan,
                session.tokenizer,
                self.calls,
                turn_replies(session.rollouts, self.calls, session.tokenizer, session.media_processor),
            )

    def require_same_writer(self, folder: RunFolder) -> None:
        """Raise ValueError on all ranks if servers that keep their weights had other weights when the run began."""
        engine = self.engine
        if self.config.urls and self.config.writer == "teacher":
            self._on_first(lambda: require_same_writer(cast(RemoteEngine, engine), folder))

    def ask(self, step: int, timeline: Timeline) -> None:
        """Give this step's weights to the engine, and request the completions that are due at this step.

        Except under async, the completions for this step are finished before the weights change.
        """
        with watchdog.untimed(f"the completions of step {step + 1}"):
            self._ask(step, timeline)

    def _ask(self, step: int, timeline: Timeline) -> None:
        number, folder = step + 1, None
        if self.config.writer == "student" and self.config.urls:
            # the weights are published while the servers still generate
            publishing = f"publish version {step}"
            with (
                timeline.trainer(publishing),
                timeline.span(number, "weights", publishing),
                explained_write_errors(self.weights),
            ):
                folder = publish(
                    self.session.engine.student,
                    self.weights,
                    step,
                    run=self.run,
                    tokenizer=self.session.tokenizer,
                    base=self.base,
                )
        with timeline.trainer(WAIT_FOR_COMPLETIONS):
            if self.schedule.in_order:
                self._of_queue(lambda queue: queue.wait_for(step) if queue.has_requested(step) else None)
        if self.config.writer == "student":
            version = f"version {step}"
            with timeline.trainer(version), timeline.span(number, "weights", version):
                if folder is None:
                    assert self.engine is not None
                    self.engine.update_weights(step, None)
                else:
                    self._on_first(partial(self._update_servers, step, folder))
                    self._prove_weights(step)
        # an engine in this job generates now; with servers, this only sends the requests
        with timeline.trainer(WAIT_FOR_COMPLETIONS):
            self._of_queue(lambda queue: queue.ask(step))

    def take(self, step: int, timeline: Timeline) -> list[Sample]:
        """Wait for the samples of a step, and return them on all ranks."""
        queue = self.queue
        phase = f"the completions of step {step + 1}"
        with timeline.trainer(WAIT_FOR_COMPLETIONS), watchdog.untimed(phase):
            content = self._of_queue(lambda queue: [sample.as_json() for sample in queue.take(step)])
        if queue is not None and queue.taken_times != (0.0, 0.0):
            offset = timeline.seconds - time.monotonic()
            start, stop = (offset + time_ for time_ in queue.taken_times)
            timeline.add(step + 1, "rollout", f"{len(content)} completions", start, stop)
        samples = [Sample.from_json(values) for values in content]
        if self.config.writer == "student":
            require_versions(samples, step, self.config.max_staleness)
        return samples

    def micro_batches(self, step: int, samples: Sequence[Sample]) -> ShardedMicroBatches:
        """Return this process's part of a step on these samples and on the dataset's completions."""
        dataset, numbers = self.session.dataset, self.plan.from_dataset(step)
        prompts, rules = self.session.train.documents, TargetRules.of(self.session.rollouts)
        return self._shard(step_documents(prompts, samples, rules, dataset, numbers))

    def _shard(self, documents: Documents) -> ShardedMicroBatches:
        layout = self.session.engine.student.layout
        return self.session.shard(self._packer.micro_batches(documents, layout.degrees.data * layout.stages))

    def finish(self) -> None:
        """Wait for the end of the last samples' environments. Raises their errors on all ranks."""
        with watchdog.untimed("the end of environments"):
            self._of_queue(lambda queue: queue.finish())

    def close(self) -> None:
        """End the requests that are under way, and the processes of rewards and environments."""
        if self.calls is not None:
            self.calls.close()
        if self.engine is not None:
            self.engine.close()

    def can_take(self, step: int) -> bool:
        """Whether the samples of a later step are finished; only the schedule two_step_off can have them early."""
        if self.config.schedule != "two_step_off" or step > self.schedule.last_step:
            return False
        return self._of_queue(lambda queue: queue.has_requested(step) and queue.is_ready(step))

    def call_times(self) -> dict[str, tuple[int, float]]:
        """On rank 0, the number and the seconds of the calls of rewards, environments and tools since the last call
        of this method, by their keys; elsewhere empty."""
        return {} if self.calls is None else self.calls.functions.take_times()

    def trained(self, step: int) -> None:
        """Record that the optimizer has made this step."""
        if self.queue is not None:
            self.queue.trained(step)

    def _update_servers(self, step: int, folder: Path) -> None:
        """On rank 0: give servers new weights, which may take minutes. A signal ends the wait.

        After a signal, the thread that updates the weights goes on until the engine's connections are closed.
        """
        assert self.engine is not None
        threads, require_no_signal = ThreadPoolExecutor(1), _ServerWatch()
        try:
            update = threads.submit(self.engine.update_weights, step, folder)
            while not wait([update], SECONDS_BETWEEN_LOOKS).done:
                require_no_signal()
            update.result()
        finally:
            threads.shutdown(wait=False)

    def _prove_weights(self, step: int) -> None:
        """Raise SignalsLostError on all ranks if a server generates with other weights than the student's."""
        urls, content = self._on_first(self._probes)
        if not urls:  # all servers have just been restarted, and will get the weights again
            return
        samples = [Sample.from_json(values) for values in content]
        micro_batches = self._shard(step_documents(self.session.train.documents, samples, TargetRules()))
        with watchdog.nested(f"the proof that servers generate with version {step}"):  # ranks compute, servers do not
            prompts, name = self.session.train.documents, self.config.engine
            rounding = require_weights_in_use(self.session.models, prompts, name, step, urls, micro_batches)
        if self.engine is not None:
            cast(RemoteEngine, self.engine).weights.set_proved(urls[0], rounding)

    def _probes(self) -> tuple[list[str], list[Any]]:
        """On rank 0: return the servers' addresses and the samples that they generated as probes, as JSON."""
        by_server = cast(RemoteEngine, self.engine).weights.probed
        samples = probe_samples(self.session.train.documents, by_server)
        return list(by_server), [sample.as_json() for sample in samples]

    def _of_queue(self, action: Callable[[RolloutQueue], Result]) -> Result:
        """Run an action on the queue of rank 0, and return its result on all ranks; see `_on_first`."""

        def on_first() -> Result:
            assert self.queue is not None
            return action(self.queue)

        return self._on_first(on_first)

    def _on_first(self, action: Callable[[], Result]) -> Result:
        """Run an action on rank 0, and return its result on all ranks, sent as JSON.

        An error of rank 0 is raised on all ranks: ValueError, UserFunctionError, or SignalsLostError if no server
        answers or a user's function does not return after a signal.
        """
        kinds = ServerError, OverdueError, UserFunctionError, ValueError
        try:
            if isinstance(self.engine, InJobEngine):
                return self.engine.lead(action, *kinds)
            return self.session.ranks.on_first(action, *kinds)
        except (ServerError, OverdueError) as error:
            raise SignalsLostError(str(error)) from error


def _base_of(student: StudentConfig) -> dict[str, Any]:
    """Return the fields of `AdapterBase` for the model of a student with an adapter."""
    fingerprint = model_fingerprint(local_folder(student.model, student.revision))
    return {"fingerprint": fingerprint, "dtype": student.dtype, "quantize": student.quantize}


def first_rollouts(session: Session, folder: RunFolder) -> tuple[list[Sample], ShardedMicroBatches]:
    """Return samples and micro-batches of a run's first step, generated in this job. Saves nothing."""
    timeline = Timeline(time.monotonic)
    with closing(Rollouts(session, folder)) as rollouts:
        rollouts.ask(0, timeline)
        samples = rollouts.take(0, timeline)
        return samples, rollouts.micro_batches(0, samples)


class _ServerWatch(SignalWatch):
    """A `SignalWatch` for answers of servers, which also reports to the watchdog that this process is alive."""

    def __init__(self) -> None:
        super().__init__(ServerError("a signal came while the run waited for completions"))

    def __call__(self) -> None:
        watchdog.progress()
        super().__call__()


def make_queue(
    rollouts: Sequence[RolloutConfig],
    samplings: Sequence[Sampling],
    schedule: RolloutSchedule,
    engine: RolloutEngine,
    prompts: Documents,
    plan: PromptPlan,
    tokenizer: PreTrainedTokenizerBase,
    calls: CompletionCalls,
    replies: Sequence[TurnReplies | None],
) -> RolloutQueue:
    """Return the queue of samples, whose rewards come from `calls`.

    rollouts, samplings: the section rollout, and how tokens are sampled, for each source of prompts.
    replies: for each source, what follows the turns of its samples.
    """
    sources = [
        SourceSettings(
            rollout.max_new_tokens,
            sampling,
            of_source.reward,
            of_turns,
            of_source.run_elsewhere,
            1 if of_turns is None else rollout.max_turns,
            has_part_of_object(rollout.reward),
        )
        for rollout, sampling, of_source, of_turns in zip(rollouts, samplings, calls.sources, replies, strict=True)
    ]
    generator = SampleGenerator(engine, prompts, plan, tokenizer, sources)
    rollout = rollouts[0]
    return RolloutQueue(
        generator,
        plan,
        schedule,
        advantage=rollout.advantage,
        deviation=rollout.deviation,
        alive=_ServerWatch(),
        by_student=rollout.writer == "student",
    )
