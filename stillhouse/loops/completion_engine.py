"""Opens the engine that generates completions."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, RolloutConfig, as_config_error
from stillhouse.config.servers import ServerError, server_kinds, server_token
from stillhouse.data.media import MediaProcessor
from stillhouse.loops.session import Data, Models, Session
from stillhouse.loops.weights_on_servers import probe_prompts
from stillhouse.models import Decoder, eos_ids
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import is_first, log_rank0
from stillhouse.rollout import GenerationRequest, RolloutEngine, Sampling
from stillhouse.rollout.engines import InJobEngine, RemoteEngine, StudentCopy
from stillhouse.rollout.generate import Generator, check_generation

#: tokens of a generation batch per token of a training micro-batch, because generation keeps far fewer activations
_BATCHES = 8
#: the number of prompts with which a server's tokenizer is compared with the student's
_PROBES = 16


def open_engine(session: Session, run: str = "") -> RolloutEngine | None:
    """Return the engine; None on ranks that get the completions from rank 0. Requests have samplings of their own.

    run: the identity of the run that publishes weights for the servers.

    Raises ConfigError for a student or a teacher that cannot generate.
    """
    models, plan = session.models, session.rollout
    assert plan is not None
    first = samplings(models, session.data.tokenizer, plan.configs)
    if plan.config.urls:
        return _served(session, plan.config, first, run)
    return in_job_engine(session, first[0], None if plan.config.writer == "student" else _writing_teacher(models))


def in_job_engine(session: Session, sampling: Sampling, teacher: Decoder | None = None) -> InJobEngine:
    """Return an engine with the weights of a teacher; None: with the student's own weights.

    Raises ConfigError for a model that cannot generate.
    """
    models, data, schedule, copy = session.models, session.data, session.schedule, None
    evaluation, decoder = schedule.eval_config, teacher or models.student
    # the student of some engines is no transformers model, also in one process
    if teacher is None and (models.ranks.size > 1 or next(models.student.parameters()).is_meta):
        copy = StudentCopy(models.engine.student, models.student_source.build)
        decoder = copy.decoder
    key = "eval.tasks" if evaluation.tasks else "eval.samples" if evaluation.samples else "eval.callbacks"
    generator = make_generator(
        sampling,
        decoder,
        data.tokenizer,
        models.device,
        models.autocast,
        generation_tokens(schedule.train_config.micro_batch_tokens, data.train.max_tokens),
        key=key if session.rollout is None else "rollout.engine",
        counted_rows=counted_rows(models, session.loss.spec),
        processor=data.media_processor,
    )
    return InJobEngine(generator, copy)


def _served(
    session: Session, rollout: RolloutConfig, samplings: Sequence[Sampling], run: str
) -> RolloutEngine | None:
    """Return an engine on rank 0, None on other ranks. Raises ConfigError on all ranks if a server cannot be used."""
    engine: RolloutEngine | None = None
    models, data = session.models, session.data
    rows, counted = models.student.vocabulary_rows, counted_rows(models, session.loss.spec)
    if counted < rows:
        log_rank0(
            f"warning: a server's log-probabilities are over all {rows:,} rows of the student's head, and training's "
            f"over the {counted:,} that the teacher has, too: rollout/log_ratio has the difference"
        )
    vocabulary, timeout = min(rows, known_ids(data.tokenizer)), session.schedule.train_config.timeout
    with models.ranks.all_raise(ConfigError):
        if is_first():
            engine = _connected(models.student, data, rollout, samplings, run, vocabulary, timeout)
    return engine


def _connected(
    student: Decoder,
    data: Data,
    rollout: RolloutConfig,
    samplings: Sequence[Sampling],
    run: str,
    vocabulary: int,
    update_timeout: float,
) -> RemoteEngine:
    prompts, (sampling, *others) = data.train.documents, samplings
    # with an adapter, a server gets only the adapter and keeps its own base model
    takes_models = rollout.writer == "student" and student.lora is None
    try:
        engine: RemoteEngine = server_kinds()[rollout.engine].open_engine(
            rollout.urls,
            sampling,
            is_tied=student.tied and takes_models,
            vocabulary=vocabulary,
            timeout=rollout.timeout,
            update_timeout=update_timeout,
            warn=lambda line: log_rank0(f"warning: {line}"),
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
    except (ValueError, ServerError) as error:
        raise ConfigError("rollout.url", str(error)) from error
    return engine


def samplings(
    models: Models, tokenizer: PreTrainedTokenizerBase, rollouts: Sequence[RolloutConfig]
) -> list[Sampling]:
    """Return how completions of the prompts of each source are sampled. rollouts: the section for each source."""
    is_here = rollouts[0].writer == "teacher" and not rollouts[0].urls
    eos = eos_ids(tokenizer, _writing_teacher(models) if is_here else models.student)
    return [sampling_of(rollout, eos) for rollout in rollouts]


def sampling_of(rollout: RolloutConfig, eos: tuple[int, ...]) -> Sampling:
    return Sampling(
        rollout.max_new_tokens,
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        rollout.min_p,
        tuple(rollout.stop),
        eos,
    )


def counted_rows(models: Models, spec: ObjectiveSpec) -> int:
    """Return the number of rows of the student's head that have a probability in training.

    With a divergence, this is the smallest number of rows among the student's head and the heads of all teachers with
    exact signals (`common_vocabulary`).
    """
    rows = [models.student.vocabulary_rows]
    if spec.has_divergence:
        rows += [teacher.vocabulary_rows for teacher in models.teachers.values()]
        rows += [store.vocabulary for store in models.stores.values() if store.signal.is_exact and store.vocabulary]
    return min(rows)


def generation_tokens(micro_batch_tokens: int, max_tokens: int) -> int:
    """Return the largest number of tokens of a generation batch."""
    return max(_BATCHES * micro_batch_tokens, max_tokens)


def make_generator(
    sampling: Sampling,
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    autocast: torch.dtype | None,
    batch_tokens: int,
    *,
    key: str,
    counted_rows: int | None = None,
    processor: MediaProcessor | None = None,
) -> Generator:
    """Build a `Generator`. Raises ConfigError with `key` if the model cannot generate."""
    with as_config_error(key):
        check_generation(decoder, device, processor)
    return Generator(
        decoder,
        sampling,
        device,
        autocast,
        batch_tokens,
        vocabulary=known_ids(tokenizer),
        counted_rows=counted_rows,
        tokenizer=tokenizer,
        processor=processor,
    )


def known_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's largest id + 1. Larger ids have no text, and are never sampled."""
    return max(tokenizer.get_vocab().values()) + 1


def _writing_teacher(models: Models) -> Decoder:
    teacher = models.teacher
    if teacher is None or models.ranks.size > 1:
        raise ConfigError(
            "rollout.writer",
            "got teacher: expected one teacher that is loaded in this process (teacher.model, without torchrun), or "
            "servers of it (rollout.engine and rollout.url)",
        )
    return teacher
