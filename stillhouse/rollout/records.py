"""The records of rollouts: requests to an engine, its completions, and samples.

Dimension: N tokens of a completion.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any, Literal, Self

import numpy as np
from torch import Tensor

from stillhouse.data.media_files import MediaFile

#: the version of a token that no model generated
NOT_GENERATED = -1


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of completions.

    max_new_tokens: the maximum number of tokens of a completion, including its end of sequence.
    temperature: divides the logits; 0 means greedy decoding.
    top_p: the limit of nucleus sampling; 1 switches this filter off.
    top_k, min_p: the limits of the top-k filter and of the min-p filter; 0 switches a filter off.
    stop: texts. A completion ends as soon as it contains one of these texts, which remains part of the completion.
    eos_ids: token ids. A completion ends with the first of these tokens that is generated.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the settings from the dict of `asdict`, after this dict was sent as JSON."""
        return cls(**dict(values) | {name: tuple(values[name]) for name in ("stop", "eos_ids")})

    @property
    def samples_all_tokens(self) -> bool:
        """Whether no filter is used, so that recorded log-probabilities are those of the sampling distribution."""
        return self.top_p == 1 and self.top_k == 0 and self.min_p == 0


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """The request for one completion.

    number: a number that is unique in the run.
    prompt_ids: int32, at least one token.
    seed: the seed of the sampling, for engines that accept one.
    max_new_tokens: an additional limit, or None. The smaller of this limit and `Sampling.max_new_tokens` applies.
    media: the media of the prompt; `prompt_ids` has their placeholder tokens.
    media_tensors: the media as tensors that a client has computed, used instead of `media`. `as_json` omits them.
    sampling: the sampling settings, or None for the settings of the engine.
    """

    number: int
    prompt_ids: np.ndarray
    seed: int
    max_new_tokens: int | None = None
    media: Sequence[MediaFile] = ()
    media_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    sampling: Sampling | None = None

    @property
    def has_media(self) -> bool:
        return bool(self.media or self.media_tensors)

    def as_json(self) -> list[Any]:
        media = [file.as_json() for file in self.media]
        sampling = None if self.sampling is None else asdict(self.sampling)
        return [self.number, self.prompt_ids.tolist(), self.seed, self.max_new_tokens, media, sampling]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        number, ids, seed, max_new_tokens, media, sampling = values
        files = [MediaFile.from_json(file) for file in media]
        own_sampling = None if sampling is None else Sampling.from_json(sampling)
        return cls(number, np.array(ids, dtype=np.int32), seed, max_new_tokens, files, sampling=own_sampling)


@dataclass(frozen=True, eq=False)
class Completion:
    """A completion with the log-probability and the version of each token.

    ids_N: int32, including the end of sequence if the model generated one.
    log_probs_N: float32, the engine's own log-probabilities of these tokens over the full vocabulary, from the logits
        divided by the temperature.
    versions_N: int32, the version of the weights that generated each token, which is the number of optimizer steps of
        the weights; `NOT_GENERATED` for tokens of an environment.
    finish: "stop" if the model ended the completion, "length" if a limit of tokens cut it.

    Raises ValueError for empty arrays, arrays of different lengths, and a log-probability that is not finite or is
    above 0.
    """

    ids_N: np.ndarray
    log_probs_N: np.ndarray
    versions_N: np.ndarray
    finish: Literal["stop", "length"]

    def __post_init__(self) -> None:
        lengths = {len(self.ids_N), len(self.log_probs_N), len(self.versions_N)}
        if len(lengths) > 1 or lengths == {0}:
            raise ValueError(
                f"the ids, log-probabilities and versions of a completion have the lengths {sorted(lengths)}: "
                "expected one length for all, at least 1"
            )
        if not (np.isfinite(self.log_probs_N).all() and self.log_probs_N.max() <= 1e-3):
            raise ValueError(
                "a completion has log-probabilities that are not finite, or above 0: expected finite numbers up to 0"
            )

    @classmethod
    def joined(cls, parts: Sequence[Self], *, is_cut: bool = False) -> Self:
        """Join the parts of a completion. `finish` is "length" if `is_cut`, and that of the last part otherwise."""
        columns = zip(*((part.ids_N, part.log_probs_N, part.versions_N) for part in parts), strict=True)
        ids_N, log_probs_N, versions_N = map(np.concatenate, columns)
        return cls(ids_N, log_probs_N, versions_N, "length" if is_cut else parts[-1].finish)

    def as_json(self) -> list[Any]:
        # `tolist` gives float64, which represents every float32 exactly; JSON keeps all digits of a float64
        return [self.ids_N.tolist(), self.log_probs_N.tolist(), self.versions_N.tolist(), self.finish]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        ids, log_probs, versions, finish = values
        return cls(
            np.array(ids, dtype=np.int32),
            np.array(log_probs, dtype=np.float32),
            np.array(versions, dtype=np.int32),
            finish,
        )


#: a function that gets a request's number and its completion, and that any thread is allowed to call
CompletionCallback = Callable[[tuple[int, Completion]], None]


class CompletionInbox:
    """The completions that engines have generated, in the order of their arrival. `put` can be called in any thread.

    is_early: whether an engine in this job puts each completion as soon as it ends, while others are not finished.
    arrivals: tuples of a request's number, the completion or the error of the request, and the time of arrival in
        seconds of `time.monotonic`.
    """

    def __init__(self, *, is_early: bool = False):
        self.is_early, self.arrivals = is_early, SimpleQueue[Any]()

    def put(self, content: Sequence[Any]) -> None:
        """Add a result. content: a request's number, and the completion, its JSON, or the error of the request."""
        number, result = content
        result = Completion.from_json(result) if isinstance(result, list) else result
        self.arrivals.put((number, result, time.monotonic()))


@dataclass(frozen=True, eq=False)
class Sample:
    """A finished completion of a prompt, including the replies of an environment.

    number: the number of the sample in the run.
    prompt: the number of the prompt's document.
    reward: the reward of the completion, or None if the run has no reward or has not computed it yet.
    advantage: the reward relative to the rewards of the same prompt (see `with_advantages`).
    reward_parts: if the reward is a weighted sum, its parts without their weights; otherwise empty.
    object_reward: the part of the reward that the sample's object in the environment gives, or None if the reward has
        no such part.
    tool_calls, tool_errors: the number of tool calls with a reply, and the number of these replies that are errors.
    """

    number: int
    prompt: int
    completion: Completion
    reward: float | None = None
    advantage: float = 0.0
    reward_parts: tuple[float, ...] = ()
    object_reward: float | None = None
    tool_calls: int = 0
    tool_errors: int = 0

    @property
    def is_generated_N(self) -> np.ndarray:
        """For each token, whether the model generated it, [N] bool. Other tokens are replies of an environment."""
        return self.completion.versions_N != NOT_GENERATED

    @property
    def generated_tokens(self) -> int:
        """The number of tokens that the model generated."""
        return int(self.is_generated_N.sum())

    @property
    def turns(self) -> int:
        """The number of the model's turns. A turn is a run of successive tokens that the model generated."""
        return int((np.diff(self.is_generated_N, prepend=False) & self.is_generated_N).sum())

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"completion": self.completion.as_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        completion, parts = Completion.from_json(values["completion"]), tuple(values["reward_parts"])
        return cls(**dict(values) | {"completion": completion, "reward_parts": parts})
