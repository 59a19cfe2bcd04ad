"""How samples of the prompts of one source are generated."""

from dataclasses import dataclass

from stillhouse.rollout.records import Sampling
from stillhouse.rollout.reward import RewardSum
from stillhouse.rollout.turns import TurnReplies


@dataclass(frozen=True)
class SourceSettings:
    """How samples of the prompts of one source are generated.

    max_new_tokens: the maximum number of tokens of a sample: all turns of the model and all replies together.
    sampling: how tokens are sampled; None: as the engine does without it.
    reward: see `reward.py`. environment: replies to the model's turns. If one is set, the prompts need
        the records of the data.
    object_gives_reward: whether the sample's object in `environment` gives a part of `reward`.
    calls_from_any_thread: whether a reward or a reply is requested as soon as the model's turn has ended, also while
        the engine generates others. Otherwise, `SampleGenerator.finished` requests it.
    max_turns: the maximum number of turns of the model.
    """

    max_new_tokens: int
    sampling: Sampling | None = None
    reward: RewardSum | None = None
    environment: TurnReplies | None = None
    calls_from_any_thread: bool = False
    max_turns: int = 1
    object_gives_reward: bool = False
