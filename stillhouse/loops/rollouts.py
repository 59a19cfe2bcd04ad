"""Opens the rollouts of an on-policy run."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

from stillhouse.checkpoint.resume import require_same_writer
from stillhouse.config import RolloutConfig
from stillhouse.loops.completion_calls import CompletionCalls, require_end_of_turns
from stillhouse.loops.completion_engine import open_engine, samplings
from stillhouse.loops.session import Session
from stillhouse.loops.weights_on_servers import ServerWatch, WeightsOnServers
from stillhouse.output.folder import RunFolder
from stillhouse.output.rollout_log import MonotonicClock, WorkTimeline
from stillhouse.parallel import ShardedMicroBatches, is_first
from stillhouse.rollout import PromptPlan, RolloutQueue, Sample, Samples
from stillhouse.rollout.documents import StepPacker
from stillhouse.rollout.engines import InJobEngine, RemoteEngine
from stillhouse.rollout.plan import RolloutSchedule
from stillhouse.rollout.rollout import ERRORS, Rollout


@contextmanager
def open_rollout(session: Session, folder: RunFolder, *, is_new: bool = True) -> Iterator[Rollout]:
    """Yield the rollouts of a run. At the end, the requests that are under way end, and the processes of functions.

    is_new: whether the run has no checkpoint. Raises ConfigError for an engine that cannot be used.
    """
    assert session.rollout is not None
    config, plan = session.rollout.config, session.rollout.prompts
    by_student, run = config.writer == "student", ""
    if config.urls and by_student:
        with session.models.ranks.shared(*ERRORS) as shared:
            shared.value = folder.identity() if is_first() else None
        run = shared.value
    packer = StepPacker(session.data.train, session.schedule.train_config.micro_batch_tokens, session.data.by_length)
    with ExitStack() as stack:
        engine = open_engine(session, run)
        if engine is not None:
            stack.callback(engine.close)
        servers = cast(RemoteEngine, engine) if config.urls and engine is not None else None
        weights = (
            WeightsOnServers(session.models, session.data, config, servers, packer, folder, run) if run else None
        )
        schedule, queue, calls = RolloutSchedule.of(config, session.schedule.step_schedule.steps), None, None
        require_end_of_turns(session.models, session.data, session.rollout)
        if is_first():
            calls = CompletionCalls(
                session.rollout.configs,
                session.data.tokenizer,
                session.data.media_processor,
                samplings(session.models, session.data.tokenizer, session.rollout.configs),
                compare_first=is_new,
            )
            stack.callback(calls.close)
            samples = Samples(
                session.data.train.documents,
                plan,
                session.data.tokenizer,
                calls.sources,
                together=servers is None,
                alive=ServerWatch(),
            )
            stack.callback(samples.close)
            queue = make_queue(config, samples, plan, schedule, servers)
        yield Rollout(
            session.rollout.configs,
            engine if isinstance(engine, InJobEngine) else None,
            weights,
            queue,
            None if calls is None else calls.functions,
            plan,
            schedule,
            session.data.train.documents,
            session.data.dataset,
            session.models.engine.student,
            packer,
        )


def require_same_weights(config: RolloutConfig, rollout: Rollout, folder: RunFolder) -> None:
    """Raise ValueError on all ranks if servers that keep their weights had other weights when the run began."""
    if config.urls and config.writer == "teacher":
        with rollout.shared():
            if rollout.queue is not None:
                require_same_writer(cast(RemoteEngine, rollout.queue.servers), folder)


def first_rollouts(session: Session, folder: RunFolder) -> tuple[list[Sample], ShardedMicroBatches]:
    """Return samples and micro-batches of a run's first step, generated in this job. Saves nothing."""
    timeline = WorkTimeline(MonotonicClock())
    with open_rollout(session, folder) as rollout:
        samples = rollout.take(0, timeline)
        micro_batches = next(rollout.micro_batches([0], timeline))
        assert micro_batches is not None
        return samples, micro_batches


def make_queue(
    rollout: RolloutConfig,
    samples: Samples,
    plan: PromptPlan,
    schedule: RolloutSchedule,
    servers: RemoteEngine | None = None,
) -> RolloutQueue:
    """Return the queue of samples. rollout: the section of the first source of prompts."""
    return RolloutQueue(
        samples,
        plan,
        schedule,
        servers,
        advantage=rollout.advantage,
        deviation=rollout.deviation,
        alive=ServerWatch(),
        by_student=rollout.writer == "student",
    )
