"""The records of rollouts: requests to an engine, its completions, and samples. N tokens of a completion."""

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
    top_k, min_p: the limits of these filters; 0 switches a filter off.
    stop: a completion ends after each of these texts and contains the text.
    eos_ids: a completion ends after each of these tokens and contains the token.
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
        """values: the dict of `asdict`, after it was sent as JSON."""
        return cls(**dict(values) | {name: tuple(values[name]) for name in ("stop", "eos_ids")})

    @property
    def samples_all_tokens(self) -> bool:
        """Whether no filter removes tokens. Tokens are then sampled from the recorded log-probabilities."""
        return self.top_p == 1 and self.top_k == 0 and self.min_p == 0


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """The request for one completion.

    number: a number that is unique in the run.
    prompt_ids: int32, at least one token.
    seed: the seed of the sampling, for engines that accept one.
    max_new_tokens: a smaller limit than the limit of `Sampling`, or None for the limit of `Sampling`.
    media: the media of the prompt; `prompt_ids` has their placeholder tokens.
    media_tensors: replace `media`: the tensors that a client's processor has computed; only in this process.
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

    ids_N: int32, with the end of sequence, if the model generated one.
    log_probs_N: float32, the engine's own log-probabilities of these tokens over the full vocabulary, after the
        temperature.
    versions_N: int32, the version of the weights that generated the token: the number of their optimizer steps.
    finish: "stop" if the completion has ended, "length" if it was cut.

    Raises ValueError for arrays of different lengths, no token, or a log-probability that is not finite or above 0.
    """

    ids_N: np.ndarray
    log_probs_N: np.ndarray
    versions_N: np.ndarray
    finish: Literal["stop", "length"]

    def __post_init__(self) -> None:
        lengths = {len(self.ids_N), len(self.log_probs_N), len(self.versions_N)}
        if len(lengths) > 1 or lengths == {0}:
            raise ValueError(
                f"a completion with {sorted(lengths)} ids, log-probabilities and versions: expected one each"
            )
        if not (np.isfinite(self.log_probs_N).all() and self.log_probs_N.max() <= 1e-3):
            raise ValueError("a completion with log-probabilities that are not finite, or above 0")

    @classmethod
    def joined(cls, parts: Sequence[Self], *, is_cut: bool = False) -> Self:
        """One completion of several parts. It ends as the last part does, or is cut after this part if `is_cut`."""
        columns = zip(*((part.ids_N, part.log_probs_N, part.versions_N) for part in parts), strict=True)
        ids_N, log_probs_N, versions_N = map(np.concatenate, columns)
        return cls(ids_N, log_probs_N, versions_N, "length" if is_cut else parts[-1].finish)

    def as_json(self) -> list[Any]:
        # float64 represents every float32 exactly, and so does its decimal form
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


#: a function that gets a request's number and its completion; any thread may call it
CompletionCallback = Callable[[tuple[int, Completion]], None]


class CompletionInbox:
    """The completions that engines have generated, in the order of their arrival. Any thread may put a completion
    into it.

    is_early: whether a thread reads the inbox while the engine in this job generates other completions.
    arrivals: tuples of a request's number, its completion or the error of the request, and the time of arrival in
        seconds of `time.monotonic`.
    """

    def __init__(self, *, is_early: bool = False):
        self.is_early, self.arrivals = is_early, SimpleQueue[Any]()

    def put(self, content: Sequence[Any]) -> None:
        """content: a request's number, and its completion, the JSON of its completion, or its error."""
        number, result = content
        result = Completion.from_json(result) if isinstance(result, list) else result
        self.arrivals.put((number, result, time.monotonic()))


@dataclass(frozen=True, eq=False)
class Sample:
    """A finished completion of a prompt, with the replies of an environment.

    number: the number of the sample in the run.
    prompt: the number of the prompt's document.
    reward: None if the run has no reward.
    advantage: the reward relative to the rewards of the same prompt (see `with_advantages`).
    reward_parts: if the reward is a weighted sum, its parts without their weights; otherwise empty.
    object_reward: the part of the reward that the sample's object in the environment gives, or None if it gives no
        part.
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
        """Whether the model generated the token, bool; otherwise it comes from the environment."""
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
