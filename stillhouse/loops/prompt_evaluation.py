"""Evaluation on prompts alone (`eval.prompts`): the student completes the same prompts at each evaluation.

The teacher scores the completions as it scores those of rollouts, so that the divergence is on the student's own
prefixes. No reference completion is needed.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace

import numpy as np

from stillhouse.config import EvalPromptsConfig, RolloutConfig, as_config_error
from stillhouse.config.reward_sum import part_names
from stillhouse.data import Documents, LoadOptions, load_documents
from stillhouse.generation import GenerationRequest, Sample, Sampling, TargetRules, step_documents
from stillhouse.generation.rollout_engines import InJobEngine
from stillhouse.generation.user_functions import Reward, tool_schemas
from stillhouse.hashing import json_hash
from stillhouse.loops.completion_calls import CompletionCalls
from stillhouse.loops.held_out_images import shown_images, shown_text
from stillhouse.loops.held_out_metrics import in_shown_order
from stillhouse.loops.session_objects import Session
from stillhouse.loops.step_metrics import means
from stillhouse.loops.step_packer import StepPacker
from stillhouse.objective import Signals, reverse_kl
from stillhouse.output.records import CHARACTERS, EvalSample
from stillhouse.parallel import ShardedMicroBatches, watchdog
from stillhouse.preemption import OverdueError
from stillhouse.serving.client import ServerError
from stillhouse.signals.signal_store import SECONDS_BETWEEN_LOOKS, SignalWatch
from stillhouse.user_code.functions import EVAL_REWARD, Turn, UserFunctionError

#: the beginning of a key in `Progress.data` for the prompts of one setting of eval.prompts
PROMPTS = "eval.prompts/"
#: how many completions are shown if eval.samples is 0
SHOWN = 4


class PromptEvaluation:
    """The student's completions of held-out prompts, and what the teacher and a reward say about them.

    engine: has the weights to evaluate; each completion has the same seed at each evaluation.

    Raises ConfigError for data that has no prompts, and for a reward that cannot be imported.
    """

    def __init__(self, session: Session, settings: EvalPromptsConfig, engine: InJobEngine, sampling: Sampling):
        self._session, self._settings = session, settings
        self._engine = engine.with_sampling(sampling)
        self._prompts = held_out_prompts(session, settings)
        # rank 0 calls the functions; without a section rollout, servers have its default timeout
        of_eval = {"reward": settings.reward, "workers": 0}
        self._rollout = (session.rollout_config or RolloutConfig()).model_copy(update=of_eval)
        packed = session.train
        budget = session.eval_config.micro_batch_tokens or session.train_config.micro_batch_tokens
        self._packer = StepPacker(packed, budget, session.by_length)
        self._documents_at_once = max(1, budget // packed.max_tokens)

    @property
    def hashes(self) -> dict[str, str]:
        """A hash of the prompts, under a key for the settings that choose them."""
        settings = self._settings
        chosen = json_hash([settings.data, settings.count, settings.max_new_tokens])
        return {f"{PROMPTS}{chosen}": self._prompts.fingerprint()}

    def evaluate(self, step: int) -> tuple[dict[str, float], list[EvalSample]]:
        """Return the metrics `eval/prompts/…` and some completions, the same on all ranks.

        A collective of all processes.

        `reverse_kl` is the mean over tokens, in nats per token. `completion_tokens`, `ended` (the share of
        completions with an end), `reward` and its parts are means over completions.

        Raises UserFunctionError on all ranks if the reward fails, OverdueError if it does not return after a signal,
        and ServerError if its server does not answer in time, or not before a signal.
        """
        session = self._session
        watchdog.enter("eval.prompts")
        self._engine.version = step
        requests = [
            GenerationRequest(
                number,
                self._prompts.tokens(number),
                session.seed + number,
                images=self._prompts.images_of(number),
            )
            for number in range(len(self._prompts))
        ]
        completions = [future.result() for future in self._engine.generate(requests)]
        metrics = {
            "completion_tokens": float(np.mean([len(completion.ids_N) for completion in completions])),
            "ended": float(np.mean([completion.finish == "stop" for completion in completions])),
        }
        samples = [
            Sample(number, number, completion, np.ones(len(completion.ids_N), dtype=bool))
            for number, completion in enumerate(completions)
        ]
        if session.teacher_configs:
            sums = session.engine.evaluate(self._scored(samples), divergence=reverse_kl())
            temperatures = {store.signal.temperature or 1.0 for store in session.stores.values()}
            of_tokens = means(sums, session.spec, mixes_temperatures=len(temperatures) > 1)
            metrics |= {name: value for name, value in of_tokens.items() if name.partition("/")[0] == "reverse_kl"}
        if self._settings.reward is not None:
            samples = self._rewarded(samples)
            names = part_names(self._settings.reward)
            metrics["reward"] = float(np.mean([sample.reward for sample in samples]))
            metrics |= {
                f"reward/{name}": float(np.mean(results))
                for name, *results in zip(names, *(sample.reward_parts for sample in samples), strict=True)
            }
        count = session.eval_config.samples or SHOWN
        shown = [self._shown(step, sample) for sample in samples[:count]]
        return {f"eval/prompts/{name}": value for name, value in metrics.items()}, shown

    def _scored(self, samples: Sequence[Sample]) -> Iterator[tuple[ShardedMicroBatches, Sequence[Signals]]]:
        """Yield the completions as (micro-batches, signals), with few micro-batches per data rank at a time."""
        session, layout = self._session, self._session.engine.student.layout
        parts = layout.degrees.data * layout.stages
        together = parts * self._documents_at_once
        for start in range(0, len(samples), together):
            # the tokens are scored like those of a dataset, without the log-probabilities of their sampling
            documents = step_documents(self._prompts, samples[start : start + together], TargetRules())
            part = session.shard(self._packer.micro_batches(replace(documents, per_token={}), parts), training=False)
            yield part, session.source.request(part).result()
            del part

    def _rewarded(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with their rewards, on all ranks."""
        watchdog.enter("eval.prompts.reward", timed=False)  # it may take any time
        results: list[tuple[float, list[float]]] = self._session.ranks.on_first(
            lambda: [(reward.value, list(reward.parts)) for reward in self._rewards(samples)],
            UserFunctionError,
            ValueError,
            OverdueError,
            ServerError,
        )
        return [
            replace(sample, reward=value, reward_parts=tuple(parts))
            for sample, (value, parts) in zip(samples, results, strict=True)
        ]

    def _rewards(self, samples: Sequence[Sample]) -> list[Reward]:
        """Compute the rewards of the samples, in this process or on servers."""
        prompts, decode = self._prompts, self._session.tokenizer.decode
        require_no_signal = SignalWatch(ServerError("a signal came while the run waited for eval.prompts.reward"))
        with closing(CompletionCalls([self._rollout], reward_key=EVAL_REWARD)) as calls:
            (of_prompts,) = calls.sources
            assert of_prompts.reward is not None
            futures = []
            for sample in samples:
                prompt = decode(prompts.tokens(sample.prompt).tolist())
                completion = decode(sample.completion.ids_N.tolist(), skip_special_tokens=True)
                record, source = prompts.records[sample.prompt], prompts.sources[sample.prompt]
                turns: list[Turn] = [{"role": "student", "text": completion}]
                futures.append(of_prompts.reward(prompt, completion, record, source, turns, None))
            for future in futures:
                while not wait([future], SECONDS_BETWEEN_LOOKS).done:
                    require_no_signal()
            return [future.result() for future in futures]

    def _shown(self, step: int, sample: Sample) -> EvalSample:
        prompts, completion, session = self._prompts, sample.completion, self._session
        prompt = shown_text(session.tokenizer, prompts.tokens(sample.prompt), session.image_processor)
        return EvalSample(
            step=step,
            number=sample.prompt,
            source=prompts.sources[sample.prompt],
            prompt=prompt[-CHARACTERS:],
            reference=None,
            completion=session.tokenizer.decode(completion.ids_N.tolist())[:CHARACTERS],
            tokens=len(completion.ids_N),
            finish=completion.finish,
            images=shown_images(prompts, sample.prompt),
            image_count=len(prompts.images_of(sample.prompt)),
            key="eval.prompts",
            reward=sample.reward,
            reward_parts=dict(zip(part_names(self._settings.reward), sample.reward_parts, strict=True)),
        )


def held_out_prompts(session: Session, settings: EvalPromptsConfig) -> Documents:
    """Return up to `settings.count` prompts, the same ones in every run on this data.

    Raises ConfigError if the data cannot be read or if a record has no prompt.
    """
    named = {key.removeprefix("teachers."): config for key, config in session.teacher_configs.items()}
    prefixes = {name: prefix for name, config in named.items() if (prefix := getattr(config, "prefix", None))}
    route = session.values.get("teachers.route")
    options = LoadOptions(
        session.train.max_tokens - settings.max_new_tokens,
        columns=() if route is None else (str(route),),
        allowed={} if route is None else {str(route): list(named)},
        prefixes=prefixes,
        reader=None if route is None else str(route),
        prompts=True,
        keep_records=True,
        tools=tool_schemas(session.rollout_config),
    )
    with as_config_error("eval.prompts.data"):
        documents = load_documents(
            settings.data,
            session.tokenizer,
            options,
            processor=session.image_processor,
            teachers=session.teacher_images,
        )
    return documents.select(in_shown_order(documents, range(len(documents)))[: settings.count])
