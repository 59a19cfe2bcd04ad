"""Evaluation on prompts without references (`eval.prompts`): the student completes the same prompts each time.

Turns, tools and environments are the same as in training; the weights are those of the student in this job. The
teacher scores the student's tokens as it scores the tokens of rollouts. So the divergence is measured on prefixes
that the student generated.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from stillhouse.config import ConfigError, EvalPromptsConfig, RolloutConfig, as_config_error
from stillhouse.config.reward_sum import part_names
from stillhouse.config.servers import ServerError
from stillhouse.data import Documents, LoadOptions, load_documents
from stillhouse.data.media import shown_media, shown_text
from stillhouse.data.render.record_forms import are_conversations
from stillhouse.hashing import json_hash
from stillhouse.loops.held_out import in_shown_order
from stillhouse.loops.rollout_records import turn_statistics
from stillhouse.loops.rollouts import require_end_of_turn
from stillhouse.loops.session import Data, Models, RolloutPlan, Session
from stillhouse.loops.step_metrics import means
from stillhouse.objective import Signals, reverse_kl
from stillhouse.output.records import CHARACTERS, EvalSample
from stillhouse.parallel import Ranks, ShardedMicroBatches, is_first, watchdog
from stillhouse.rollout import Completion, Sample, Samples, Sampling, TargetRules, step_documents
from stillhouse.rollout.documents import StepPacker
from stillhouse.rollout.engines import InJobEngine, JobEngine
from stillhouse.rollout.plan import PromptSeeds
from stillhouse.rollout.rollout import ERRORS
from stillhouse.rollout.user_functions import CompletionCalls, warn
from stillhouse.signals.signal_store import SignalWatch
from stillhouse.user_code.environment import environment_of
from stillhouse.user_code.functions import EVAL_REWARD

#: the beginning of a key in `Progress.data` for the prompts of one setting of eval.prompts
PROMPTS = "eval.prompts/"
#: the number of shown completions if eval.samples is 0
SHOWN = 4


class PromptEvaluation:
    """The student's completions of held-out prompts, and their scores by the teacher and by a reward.

    engine: the engine with the weights to evaluate. Each prompt has the same seed at each evaluation.

    Raises ConfigError for data that has no prompts, for a reward that cannot be imported, and on all ranks if the
    student cannot end a turn that gets a reply.
    """

    def __init__(self, session: Session, settings: EvalPromptsConfig, engine: InJobEngine, sampling: Sampling):
        self._session, self._settings = session, settings
        self._prompts = held_out_prompts(session.models, session.data, session.rollout, settings)
        words = None if session.rollout is None else shared_prompts(session.data.train.documents, self._prompts)
        if words is not None:
            warn(words)
        # if the configuration has no section rollout, the defaults of this section are used
        section = RolloutConfig() if session.rollout is None else session.rollout.config
        require_end_of_turn(session.models, session.data, section)
        if section.has_turns:  # a turn must end at the same texts as in training
            sampling = replace(sampling, stop=tuple(section.stop))
        changes = {
            "reward": settings.reward,
            "reward_tokens": settings.reward_tokens,
            "workers": min(section.workers, len(self._prompts)),
            "max_new_tokens": settings.max_new_tokens,
        }
        self._rollout, self._engine, self._sampling = section.model_copy(update=changes), engine, sampling
        packed = session.data.train
        budget = session.schedule.held_out_tokens
        self._packer = StepPacker(packed, budget, session.data.by_length)
        self._documents_at_once = max(1, budget // packed.max_tokens)

    @property
    def count(self) -> int:
        """The number of prompts that the student completes."""
        return len(self._prompts)

    @property
    def hashes(self) -> dict[str, str]:
        """A hash of the prompts, under a key that contains a hash of the settings that choose the prompts."""
        settings = self._settings
        chosen = json_hash([settings.data, settings.count, settings.max_new_tokens])
        return {f"{PROMPTS}{chosen}": self._prompts.fingerprint()}

    def evaluate(self, step: int) -> tuple[dict[str, float], list[EvalSample]]:
        """Return the metrics `eval/prompts/…` and some completions, the same on all ranks. A collective.

        `reverse_kl` is a mean over the student's tokens. The other metrics are means over completions; `ended` is the
        share of completions that the student ended.

        Raises the errors of `completed`.
        """
        session = self._session
        calls_functions = self._rollout.reward is not None or self._rollout.has_turns
        watchdog.enter("eval.prompts", timed=not calls_functions)  # functions and servers can take any time
        ranks, data, seed = session.models.ranks, session.data, session.schedule.seed
        sources = self._rollout, self._sampling
        samples = completed(ranks, data, seed, *sources, self._prompts, self._engine, EVAL_REWARD)
        watchdog.enter("the scores of eval.prompts")
        metrics = {
            "completion_tokens": float(np.mean([sample.generated_tokens for sample in samples])),
            "ended": float(np.mean([sample.completion.finish == "stop" for sample in samples])),
        } | turn_statistics(samples, [self._rollout])
        if session.models.teacher_configs:
            sums = session.models.engine.evaluate(self._scored(samples), divergence=reverse_kl())
            token_metrics = means(sums, session.loss.spec, session.models.signal_temperatures)
            metrics |= {
                name: value for name, value in token_metrics.items() if name.partition("/")[0] == "reverse_kl"
            }
        names = part_names(self._settings.reward)
        if self._settings.reward is not None:
            metrics["reward"] = float(np.mean([sample.reward for sample in samples]))
            metrics |= {
                f"reward/{name}": float(np.mean(results))
                for name, *results in zip(names, *(sample.reward_parts for sample in samples), strict=True)
            }
        count = session.schedule.eval_config.samples or SHOWN
        shown: list[EvalSample] = []
        for sample in samples[:count]:
            ids_N = self._prompts.tokens(sample.prompt)
            one = eval_sample(step, session.data, self._prompts, sample.prompt, ids_N, sample.completion)
            parts = dict(zip(names, sample.reward_parts, strict=True))
            shown.append(replace(one, key="eval.prompts", reward=sample.reward, reward_parts=parts))
        return {f"eval/prompts/{name}": value for name, value in metrics.items()}, shown

    def _scored(self, samples: Sequence[Sample]) -> Iterator[tuple[ShardedMicroBatches, Sequence[Signals]]]:
        """Yield (micro-batches, signals) for a few completions at a time, so that little memory is needed."""
        session, student = self._session, self._session.models.engine.student
        together = student.layout.degrees.data * student.layout.stages * self._documents_at_once
        for start in range(0, len(samples), together):
            # the tokens are scored like tokens of a dataset, without the log-probabilities of their sampling
            documents = step_documents(self._prompts, samples[start : start + together], TargetRules())
            part = self._packer.sharded(student, replace(documents, per_token={}), training=False)
            yield part, session.models.source.request(part).result()
            del part


def eval_sample(
    step: int, data: Data, documents: Documents, number: int, prompt_N: np.ndarray, completion: Completion
) -> EvalSample:
    """The record of a held-out prompt's completion, without a reference. number: the number of the document."""
    return EvalSample(
        step=step,
        number=number,
        source=documents.sources[number],
        prompt=shown_text(data.tokenizer, prompt_N, data.media_processor)[-CHARACTERS:],
        reference=None,
        completion=data.tokenizer.decode(completion.ids_N.tolist())[:CHARACTERS],
        tokens=len(completion.ids_N),
        finish=completion.finish,
        **shown_media(documents.media_of(number), data.media_processor),
    )


def shared_prompts(train: Documents, prompts: Documents) -> str | None:
    """A warning about held-out prompts that an on-policy run trains on, or None. train: the prompts of training."""
    if prompts.media is not None:  # prompts about different media can have the same tokens
        return None
    held_out = [prompts.tokens(number).tobytes() for number in range(len(prompts))]
    shared = set(held_out).intersection(train.tokens(number).tobytes() for number in range(len(train)))
    if not (count := sum(prompt in shared for prompt in held_out)):
        return None
    return (
        f"eval.prompts.data: {count:,} of the {len(prompts):,} held-out prompts are also in the training data: "
        "the metrics eval/prompts/… are better than on unseen prompts"
    )


def held_out_prompts(models: Models, data: Data, plan: RolloutPlan | None, settings: EvalPromptsConfig) -> Documents:
    """Return up to `settings.count` prompts, the same prompts in every run on this data. Raises ConfigError if the
    data cannot be read or if a record has no prompt.
    """
    named = {key.removeprefix("teachers."): config for key, config in models.teacher_configs.items()}
    prefixes = {name: prefix for name, config in named.items() if (prefix := getattr(config, "prefix", None))}
    route, rollout = data.train.together, None if plan is None else plan.config
    environment = None if rollout is None else environment_of(rollout)
    options = LoadOptions(
        data.train.max_tokens - settings.max_new_tokens,
        columns=() if route is None else (route,),
        allowed={} if route is None else {route: list(named)},
        prefixes=prefixes,
        reader=route,
        prompts=True,
        keep_records=True,
        tools=None if environment is None else environment.schemas,
    )
    with as_config_error("eval.prompts.data"):
        documents = load_documents(
            settings.data, data.tokenizer, options, processor=data.media_processor, teachers=data.teacher_media
        )
    has_reply = rollout is not None and rollout.reply_role
    if rollout is not None and has_reply and not are_conversations(documents.records[0], data.tokenizer):
        raise ConfigError(
            "eval.prompts.data",
            f"the prompts of {settings.data} are strings, with rollout.reply={rollout.reply}: expected conversations "
            "('messages', or 'prompt' as a list of messages)",
        )
    return documents.select(in_shown_order(documents, range(len(documents)))[: settings.count])


def completed(
    ranks: Ranks,
    data: Data,
    seed: int,
    rollout: RolloutConfig,
    sampling: Sampling | None,
    prompts: Documents,
    engine: JobEngine,
    reward_key: str,
) -> list[Sample]:
    """Return one sample of each prompt, with the reward, the environment and the tools of `rollout`, on all ranks. A
    collective of all processes.

    sampling: the sampling settings, or None for the engine's settings.
    reward_key: the key of the configuration that has the reward.

    Raises the `ERRORS` of rank 0 on all ranks.
    """
    require_no_signal = SignalWatch(ServerError(f"a signal came while the run waited for {reward_key}"))
    finished: list[Sample] = []
    with ExitStack() as stack:
        samples: Samples | None = None
        with ranks.shared(*ERRORS):
            if is_first():
                processor = data.media_processor
                calls = CompletionCalls([rollout], data.tokenizer, processor, [sampling], reward_key=reward_key)
                stack.callback(calls.close)
                plan, tokenizer = PromptSeeds(seed), data.tokenizer
                samples = Samples(prompts, plan, tokenizer, calls.sources, together=True, alive=require_no_signal)
                stack.callback(samples.close)
                samples.start([(number, number) for number in range(len(prompts))])
        engine.complete(samples, *ERRORS)
        with ranks.shared(*ERRORS) as shared:
            if samples is not None:
                finished = sorted(samples.finished(), key=lambda sample: sample.number)
                finished = [samples.rewarded(sample) for sample in finished]
                samples.wait_until_dropped()
                shared.value = [sample.as_json() for sample in finished]
        return finished if samples is not None else [Sample.from_json(values) for values in shared.value]
