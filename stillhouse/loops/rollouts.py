"""Opens the rollouts of an on-policy run, and the engines that generate completions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.checkpoint.resume import require_same_writer
from stillhouse.config import ConfigError, RolloutConfig, as_config_error
from stillhouse.config.data_section import source_prefix
from stillhouse.config.servers import ServerError, server_kinds, server_token
from stillhouse.loops.session import Data, Models, RolloutPlan, Session
from stillhouse.loops.weights_on_servers import ServerWatch, WeightsOnServers, probe_prompts
from stillhouse.models import Decoder, eos_ids
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.output.folder import RunFolder
from stillhouse.output.rollout_log import RolloutLog
from stillhouse.parallel import ShardedMicroBatches, is_first
from stillhouse.rollout import GenerationRequest, RolloutQueue, Sample, Samples, Sampling
from stillhouse.rollout.documents import StepPacker
from stillhouse.rollout.engines import InJobEngine, RemoteEngine, StudentCopy
from stillhouse.rollout.generate import Generator, check_generation
from stillhouse.rollout.plan import RolloutSchedule
from stillhouse.rollout.rollout import ERRORS, Rollout
from stillhouse.rollout.user_functions import CompletionCalls, warn
from stillhouse.user_code.environment import environment_of

#: a generation batch has this many times the tokens of a training micro-batch: generation keeps far fewer activations
_BATCHES = 8
#: the number of prompts with which a server's tokenizer is compared with the student's
_PROBES = 16


@contextmanager
def open_rollout(session: Session, folder: RunFolder, *, is_new: bool = True) -> Iterator[Rollout]:
    """Yield the rollouts of a run. At the end, open requests are cancelled, and the worker processes are ended.

    is_new: whether the run has no checkpoint.

    Raises ConfigError for an engine that cannot be used.
    """
    plan, models, data, run = session.rollout, session.models, session.data, ""
    assert plan is not None
    config, prompts = plan.config, data.train.documents
    if config.urls and config.writer == "student":
        with models.ranks.shared(*ERRORS) as shared:
            shared.value = folder.identity() if is_first() else None
        run = shared.value
    packer = StepPacker(data.train, session.schedule.train_config.micro_batch_tokens, data.by_length)
    schedule = RolloutSchedule.of(config, session.schedule.step_schedule.steps)
    engine, servers, queue, functions = None, None, None, None
    with ExitStack() as stack:
        if config.urls:
            servers = open_servers(session, run)
        else:
            teacher = None if config.writer == "student" else _writing_teacher(models)
            engine = in_job_engine(session, samplings(models, data.tokenizer, plan.configs)[0], teacher)
        if servers is not None:
            stack.callback(servers.close)
        weights = WeightsOnServers(models, data, config, servers, packer, folder, run) if run else None
        require_end_of_turns(models, data, plan)
        if is_first():
            sampling = samplings(models, data.tokenizer, plan.configs)
            calls = CompletionCalls(
                plan.configs, data.tokenizer, data.media_processor, sampling, compare_first=is_new
            )
            stack.callback(calls.close)
            sources, functions, in_job = calls.sources, calls.functions, not config.urls
            samples = Samples(prompts, plan.prompts, data.tokenizer, sources, together=in_job, alive=ServerWatch())
            stack.callback(samples.close)
            queue = RolloutQueue(samples, plan.prompts, schedule, servers, config)
        student, plans = models.engine.student, (plan.prompts, schedule)
        yield Rollout(plan.configs, engine, weights, queue, functions, *plans, prompts, data.dataset, student, packer)


def require_same_weights(config: RolloutConfig, rollout: Rollout, folder: RunFolder) -> None:
    """If servers keep their own weights, raise ValueError on all ranks if these have changed since the run began."""
    if config.urls and config.writer == "teacher":
        with rollout.shared():
            if rollout.queue is not None and rollout.queue.servers is not None:
                require_same_writer(rollout.queue.servers, folder)


def first_rollouts(session: Session, folder: RunFolder) -> tuple[list[Sample], ShardedMicroBatches]:
    """Return samples and micro-batches of a run's first step, generated in this job. Saves nothing."""
    timeline = RolloutLog()
    with open_rollout(session, folder) as rollout:
        samples = rollout.take(0, timeline)
        micro_batches = next(rollout.micro_batches([0], timeline))
        assert micro_batches is not None
        return samples, micro_batches


def in_job_engine(session: Session, sampling: Sampling, teacher: Decoder | None = None) -> InJobEngine:
    """Return an engine with the weights of a teacher, or with the student's weights if `teacher` is None. Raises
    ConfigError for a model that cannot generate.
    """
    models, data, schedule, copy = session.models, session.data, session.schedule, None
    evaluation, decoder = schedule.eval_config, teacher or models.student
    # with some engines, the student is not a transformers model, even in one process
    if teacher is None and (models.ranks.size > 1 or next(models.student.parameters()).is_meta):
        copy = StudentCopy(models.engine.student, models.student_source.build)
        decoder = copy.decoder
    key = "eval.tasks" if evaluation.tasks else "eval.samples" if evaluation.samples else "eval.callbacks"
    generator = make_generator(
        sampling,
        decoder,
        data,
        models.device,
        models.autocast,
        schedule.train_config.micro_batch_tokens,
        key=key if session.rollout is None else "rollout.engine",
        counted_rows=counted_rows(models, session.loss.spec),
    )
    return InJobEngine(generator, copy)


def make_generator(
    sampling: Sampling,
    decoder: Decoder,
    data: Data,
    device: torch.device,
    autocast: torch.dtype | None,
    micro_batch_tokens: int,
    *,
    key: str,
    counted_rows: int | None = None,
) -> Generator:
    """Build a `Generator`. Raises ConfigError with `key` if the model cannot generate."""
    with as_config_error(key):
        check_generation(decoder, device, data.media_processor)
    return Generator(
        decoder,
        sampling,
        device,
        autocast,
        max(_BATCHES * micro_batch_tokens, data.train.max_tokens),
        vocabulary=known_ids(data.tokenizer),
        counted_rows=counted_rows,
        tokenizer=data.tokenizer,
        processor=data.media_processor,
    )


def open_servers(session: Session, run: str = "") -> RemoteEngine | None:
    """Connect to the servers that generate completions, and return them on rank 0; other ranks get None.

    run: the identity of the run that publishes weights for the servers.

    Raises ConfigError on all ranks if a server cannot be used.
    """
    models, data, plan = session.models, session.data, session.rollout
    assert plan is not None
    rollout, student, prompts = plan.config, models.student, data.train.documents
    rows, counted = student.vocabulary_rows, counted_rows(models, session.loss.spec)
    if counted < rows:
        warn(
            f"a server normalises log-probabilities over all {rows:,} rows of the student's head, but training only "
            f"over the {counted:,} rows that the teacher also has: rollout/log_ratio includes this difference"
        )
    sampling, *others = samplings(models, data.tokenizer, plan.configs)
    with models.ranks.all_raise(ConfigError):
        if not is_first():
            return None
        try:
            engine: RemoteEngine = server_kinds()[rollout.engine].open_engine(
                rollout.urls,
                sampling,
                # false with an adapter, because a server then gets only the adapter, and no tied weights
                is_tied=student.tied and rollout.writer == "student" and student.lora is None,
                vocabulary=min(rows, known_ids(data.tokenizer)),
                timeout=rollout.timeout,
                update_timeout=session.schedule.train_config.timeout,
                warn=warn,
                keep_weights=rollout.writer == "teacher",
                probes=[
                    GenerationRequest(number, prompts.tokens(number), 0, media=prompts.media_of(number))
                    for number in probe_prompts(prompts)
                ],
                run=run,
                processor=data.media_processor,
                image_prompts=prompts if prompts.has_media else None,
                other_samplings=others,
                token=server_token("rollout.token_variable", rollout.token_variable),
            )
            if rollout.writer == "teacher":
                ids_N = np.concatenate([prompts.tokens(number) for number in range(min(len(prompts), _PROBES))])
                engine.require_tokenizer(data.tokenizer, data.tokenizer.decode(ids_N, skip_special_tokens=True))
            return engine
        except (ValueError, ServerError) as error:
            raise ConfigError("rollout.url", str(error)) from error


def samplings(
    models: Models, tokenizer: PreTrainedTokenizerBase, rollouts: Sequence[RolloutConfig]
) -> list[Sampling]:
    """Return the sampling settings for the prompts of each source. rollouts: the section rollout for each source."""
    is_here = rollouts[0].writer == "teacher" and not rollouts[0].urls
    eos = eos_ids(tokenizer, _writing_teacher(models) if is_here else models.student)
    return [sampling_of(rollout, eos) for rollout in rollouts]


def sampling_of(rollout: RolloutConfig, eos: tuple[int, ...]) -> Sampling:
    filters = rollout.top_p, rollout.top_k, rollout.min_p
    return Sampling(rollout.max_new_tokens, rollout.temperature, *filters, tuple(rollout.stop), eos)


def counted_rows(models: Models, spec: ObjectiveSpec) -> int:
    """Return the number of rows of the student's head that have a probability in training.

    With a divergence, this is the smallest number of rows among the heads of the student and of all teachers with
    exact signals (`common_vocabulary`).
    """
    rows = [models.student.vocabulary_rows]
    if any(part.divergence is not None for part in spec.parts):
        rows += [teacher.vocabulary_rows for teacher in models.teachers.values()]
        rows += [store.vocabulary for store in models.stores.values() if store.signal.is_exact and store.vocabulary]
    return min(rows)


def known_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's largest id + 1. Larger ids have no text, and are never sampled."""
    return max(tokenizer.get_vocab().values()) + 1


def _writing_teacher(models: Models) -> Decoder:
    teacher = models.teacher
    if teacher is None or models.ranks.size > 1:
        raise ConfigError(
            "rollout.writer",
            "got teacher: expected one teacher that is loaded in this process (teacher.model, without torchrun), or "
            "servers of the teacher (rollout.engine and rollout.url)",
        )
    return teacher


def require_end_of_turns(models: Models, data: Data, plan: RolloutPlan) -> None:
    """Raise ConfigError on all ranks if, for a source of prompts, the student cannot end a turn that gets a reply."""
    for number, rollout in enumerate(plan.configs):
        if rollout.writer == "student":
            require_end_of_turn(models, data, rollout, partial(source_prefix, plan.sources, number))


def require_end_of_turn(
    models: Models, data: Data, rollout: RolloutConfig, prefix: Callable[[str], str] = lambda key: ""
) -> None:
    """Raise ConfigError on all ranks if the student cannot end a turn that gets a reply. prefix: returns the text
    that is written before a key in errors.
    """
    if rollout.stop:
        return
    environment = environment_of(rollout, lambda key: f"{prefix(key)}rollout.{key}")
    if environment is None:
        return
    ends = eos_ids(data.tokenizer, models.student)
    markers = environment.markers(data.tokenizer, data.media_processor).items()
    if marker := next((text for index, text in markers if index not in ends), ""):
        raise ConfigError(
            environment.format_key,
            f"the chat template ends {environment.turns} with {marker!r}, which is no end-of-sequence token of the "
            "student: expected it in eos_token_id of the student's generation_config.json, or in rollout.stop",
        )
