"""Completions of eval.prompts with their rewards: turns, tools and environments are those of training.

They are generated with the weights in the job. The user's functions are called on rank 0, or in workers on its host.
"""

from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from stillhouse.config import EvalPromptsConfig, RolloutConfig
from stillhouse.config.reward_sum import has_part_of_object
from stillhouse.config.servers import ServerError
from stillhouse.data import Documents
from stillhouse.loops.completion_calls import CompletionCalls
from stillhouse.loops.sample_statistics import has_turns
from stillhouse.loops.session import Session
from stillhouse.loops.source_replies import require_end_of_turn, turn_replies
from stillhouse.preemption import OverdueError
from stillhouse.rollout import Sample, SampleGenerator, Sampling, SourceSettings
from stillhouse.rollout.engines import InJobEngine, RolloutEngine
from stillhouse.signals.signal_store import SECONDS_BETWEEN_LOOKS, SignalWatch
from stillhouse.user_code.functions import EVAL_REWARD, UserFunctionError


class PromptSamples:
    """Generates a sample of each prompt. rollout: the section rollout with the settings of eval.prompts.

    Raises ConfigError on all ranks if the student cannot end a turn with a call of a tool, or before a reply.
    """

    def __init__(
        self,
        session: Session,
        settings: EvalPromptsConfig,
        prompts: Documents,
        engine: InJobEngine,
        sampling: Sampling,
    ):
        section = session.rollout_config or RolloutConfig()  # without one, its defaults hold for servers
        workers = min(section.workers, len(prompts))
        of_eval = {"reward": settings.reward, "reward_tokens": settings.reward_tokens, "workers": workers}
        self._session, self._prompts, self.rollout = session, prompts, section.model_copy(update=of_eval)
        if has_turns(section):  # a turn ends as in training
            sampling = replace(sampling, stop=tuple(section.stop))
        require_end_of_turn(session, section)
        self._engine, self._max_new_tokens = engine.with_sampling(sampling), settings.max_new_tokens

    @property
    def calls_functions(self) -> bool:
        """Whether the samples need functions of the user or servers, which may take any time."""
        return self.rollout.reward is not None or has_turns(self.rollout)

    def generate(self, version: int) -> list[Sample]:
        """Return the samples in the order of the prompts, on all ranks; a collective. version: of the weights.

        Raises UserFunctionError on all ranks if a function fails, OverdueError if it does not return after a signal,
        and ServerError if a reward's server does not answer in time, or if workers do not before a signal.
        """
        self._engine.version = version
        kinds = UserFunctionError, ValueError, OverdueError, ServerError
        arguments = self.rollout, self._prompts, self._engine, self._max_new_tokens, EVAL_REWARD
        content = self._engine.lead(
            lambda: [sample.as_json() for sample in completed(self._session, *arguments)], *kinds
        )
        return [Sample.from_json(values) for values in content]


def completed(
    session: Session,
    rollout: RolloutConfig,
    prompts: Documents,
    engine: RolloutEngine,
    max_new_tokens: int,
    reward_key: str,
) -> list[Sample]:
    """On rank 0: return a sample of each prompt, with the reward, the environment and the tools of `rollout`.

    Raises the errors of `PromptSamples.generate`. reward_key: the key of the configuration that has the reward.
    """
    require_no_signal = SignalWatch(ServerError(f"a signal came while the run waited for {reward_key}"))
    with closing(CompletionCalls([rollout], reward_key=reward_key)) as calls:
        (of_prompts,) = calls.sources
        (replies,) = turn_replies([rollout], calls, session.tokenizer, session.media_processor)
        settings = SourceSettings(
            max_new_tokens,
            reward=of_prompts.reward,
            environment=replies,
            calls_from_any_thread=of_prompts.run_elsewhere,
            max_turns=1 if replies is None else rollout.max_turns,
            object_gives_reward=has_part_of_object(rollout.reward),
        )
        plan = _PromptSeeds(session.seed)
        generator = SampleGenerator(engine, prompts, plan, session.tokenizer, [settings])
        generator.start([(number, number) for number in range(len(prompts))])
        samples: list[Sample] = []
        while len(samples) < len(prompts):
            samples += generator.finished(SECONDS_BETWEEN_LOOKS)
            require_no_signal()
        samples.sort(key=lambda sample: sample.number)
        samples = [generator.rewarded(sample, require_no_signal) for sample in samples]
        generator.wait_until_dropped(require_no_signal)
        return samples


@dataclass(frozen=True)
class _PromptSeeds:
    """One sample for each prompt, with the same seeds at each evaluation."""

    seed: int

    def source_of(self, group: int) -> int:
        return 0

    def group_of(self, sample: int) -> int:
        return sample

    def sample_seed(self, sample: int, turn: int) -> int:
        if turn == 0:
            return self.seed + sample
        state = np.random.SeedSequence([self.seed, sample, turn]).generate_state(1, np.uint64)
        return int(state[0] >> np.uint64(1))
