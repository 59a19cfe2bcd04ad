"""The records that a run writes for its report: one type per file.

timeline.jsonl: TimelineSpan  samples.jsonl: SampleRecord  eval_samples.jsonl: EvalSample  tokens.json: HeldOutTokens

The keys in a file are the fields of its type, in the same order. The report checks the values with
`json_lines.validated`. The type of metrics.jsonl, whose keys differ between runs, is `MetricsLine`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, FiniteFloat, NonNegativeInt, ValidationInfo

#: the parts of a job that have a lane in the timeline, in the order of the report
Lane = Literal["rollout", "teacher", "trainer", "weights"]
LANES: tuple[Lane, ...] = get_args(Lane)
#: the first word of `TimelineSpan.what` while the trainer waits
WAIT = "wait"
#: the number of characters that are kept at the end of a prompt and at the beginning of a completion
CHARACTERS = 4000

_LARGEST = 2**53  # all smaller integers are exact as floats

_Count = Annotated[int, Field(ge=0, le=_LARGEST)]
_Seconds = Annotated[float, Field(ge=0, le=_LARGEST)]


def _not_before_start(stop: float, span: ValidationInfo) -> float:
    if stop < span.data.get("start", stop):
        raise ValueError(f"expected at least start, {span.data['start']}")
    return stop


@dataclass(frozen=True)
class TimelineSpan:
    """A span of work. step: the optimizer step to which the work belongs. start, stop: in seconds of the run."""

    step: _Count
    lane: Lane
    what: str
    start: _Seconds
    stop: Annotated[_Seconds, AfterValidator(_not_before_start)]


@dataclass(frozen=True)
class SampleToken:
    """One token of a completion.

    divergence: the divergence between teacher and student in nats; None if it was not computed.
    version: the version of the weights that generated the token; None if the student did not generate the token.
    target: whether the student is trained on the token.
    """

    text: str
    divergence: FiniteFloat | None
    version: Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)] | None
    target: bool


@dataclass(frozen=True)
class SampleRecord:
    """A completion on which a step was trained.

    length: the number of tokens; `tokens` can be shorter. reward, advantage: None without a reward.
    reward_parts: if the reward is a weighted sum, its parts by name, before they are multiplied by their weights.
    staleness: step − 1 − the oldest version of the weights that generated a token; 0 if `source` is not the student.
    prompt_source: the name of the prompt's source, if the run has several.
    """

    step: _Count
    prompt: str
    completion: str
    tokens: list[SampleToken]
    length: _Count
    reward: FiniteFloat | None
    advantage: FiniteFloat | None
    finish: Literal["stop", "length"]
    source: Literal["student", "dataset", "teacher"]
    staleness: _Count
    reward_parts: dict[str, FiniteFloat | None] = field(default_factory=dict)
    prompt_source: str | None = None

    @property
    def facts(self) -> list[str]:
        """Facts about the completion in words: its source, length, end and reward, and its weights' version."""
        ended = "ended by itself" if self.finish == "stop" else "cut at the limit"
        facts = [f"{self.source}'s", f"{self.length:,} tokens, {ended}"]
        if self.prompt_source is not None:
            facts.insert(1, f"prompt of {self.prompt_source}")
        if self.reward is not None:
            parts = ", ".join(f"{name} {value:.4g}" for name, value in self.reward_parts.items() if value is not None)
            facts.append(f"reward {self.reward:.4g}" + (f" ({parts})" if parts else ""))
        if self.advantage is not None:
            facts.append(f"advantage {self.advantage:+.3g}")
        versions = sorted({token.version for token in self.tokens if token.version is not None})
        if versions:
            facts.append(f"version {versions[0]}" + (f" to {versions[-1]}" if len(versions) > 1 else ""))
        if self.source == "student":
            facts.append(f"staleness {self.staleness}")
        return facts


@dataclass(frozen=True)
class HeldOutImage:
    """An image of a held-out document. width, height: its size in pixels. thumbnail: a reduced JPEG of the image."""

    width: _Count
    height: _Count
    thumbnail: Annotated[str, Field(pattern=r"^data:image/jpeg;base64,[A-Za-z0-9+/]+=*$", max_length=200_000)]


@dataclass(frozen=True)
class EvalSample:
    """The student's completion of a held-out prompt at one evaluation.

    key: the configuration's key for the prompts. number: the number of the prompt among these prompts.
    source: `file:line` of the document. reference: the document's completion; None if it is only a prompt.
    tokens: the number of tokens of the full completion.
    images: the first images of the prompt. image_count: the number of all its images.
    reward, reward_parts: the results of eval.prompts.reward, as in `SampleRecord`.
    """

    step: NonNegativeInt
    number: NonNegativeInt
    source: str
    prompt: str
    reference: str | None
    completion: str
    tokens: NonNegativeInt
    finish: Literal["stop", "length"]
    images: list[HeldOutImage] = field(default_factory=list)
    image_count: NonNegativeInt = 0
    key: Literal["data.eval", "eval.prompts"] = "data.eval"
    reward: FiniteFloat | None = None
    reward_parts: dict[str, FiniteFloat] = field(default_factory=dict)


@dataclass(frozen=True)
class TermAtToken:
    """The value and the gradient of a term of the objective at one token.

    value: the term's value in nats.
    gradient: the norm of the gradient of scale · value with respect to the student's logits.
    raises: the logits with the most negative gradients, which gradient descent raises, as pairs (token text, absolute
        value of the gradient), the largest first. lowers: such pairs of the logits with the most positive gradients.
    """

    value: float
    gradient: float
    raises: list[tuple[str, float]]
    lowers: list[tuple[str, float]]


@dataclass(frozen=True)
class Token:
    """One token of a held-out document, and the models' predictions for it.

    kl: KL(teacher ‖ student) in nats over the full vocabulary; None for a document's first token.
    teacher, student: pairs (token text, probability), the most probable first.
    terms: the terms of the objective by name; empty if the token is not a target, and in files of earlier versions.
    """

    text: str
    target: bool
    kl: float | None
    teacher: list[tuple[str, float]]
    student: list[tuple[str, float]]
    terms: dict[str, TermAtToken] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldOutDocument:
    """A held-out document.

    source: `file:line`.
    tokens: the tokens, but only the first of consecutive placeholders of an image.
    images: the first images of the document.
    image_count: the number of all its images.
    """

    source: str
    tokens: list[Token]
    images: list[HeldOutImage] = field(default_factory=list)
    image_count: NonNegativeInt = 0


@dataclass(frozen=True)
class HeldOutTokens:
    """Held-out documents with the predictions of teacher and student after `step` steps."""

    step: int
    documents: list[HeldOutDocument]
