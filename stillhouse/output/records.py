"""The records that a run writes for its report, one type for each file. The report checks them when it reads them.

timeline.jsonl: Span    samples.jsonl: Sample    eval_samples.jsonl: EvalSample    tokens.json: HeldOutTokens

The keys of a file are the fields in their order. `json_lines.validated` checks the values that are read. The keys of
metrics.jsonl differ from run to run: it is in `metrics_file.py`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, FiniteFloat, NonNegativeInt, ValidationInfo

#: the parts of a job that have a lane of the timeline, in the order of the page
Lane = Literal["rollout", "teacher", "trainer", "weights"]
LANES: tuple[Lane, ...] = get_args(Lane)
#: `Span.what` of the trainer begins with this word while the trainer waits
WAIT = "wait"
#: the number of characters that are kept: the last ones of a prompt, the first ones of a completion
CHARACTERS = 4000

_LARGEST = 2**53  # every smaller integer is a float, too

_Count = Annotated[int, Field(ge=0, le=_LARGEST)]
_Seconds = Annotated[float, Field(ge=0, le=_LARGEST)]


def _not_before_start(stop: float, span: ValidationInfo) -> float:
    if stop < span.data.get("start", stop):
        raise ValueError(f"expected at least start, {span.data['start']}")
    return stop


@dataclass(frozen=True)
class Span:
    """One piece of work on the timeline.

    step: the optimizer step that the work is for.
    start, stop: seconds of the run.
    """

    step: _Count
    lane: Lane
    what: str
    start: _Seconds
    stop: Annotated[_Seconds, AfterValidator(_not_before_start)]


@dataclass(frozen=True)
class SampleToken:
    """One token of a completion.

    divergence: between teacher and student, in nats; None if it was not computed.
    version: the version of the weights that generated the token; None if the student did not generate it.
    target: whether the student is trained on the token.
    """

    text: str
    divergence: FiniteFloat | None
    version: Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)] | None
    target: bool


@dataclass(frozen=True)
class Sample:
    """A completion that a step was trained on.

    length: the number of tokens of the completion. `tokens` may have only the first of them.
    reward, advantage: None without a reward.
    staleness: optimizer steps between the weights that generated the completion and the weights that are trained on
        it.
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


@dataclass(frozen=True)
class EvalSample:
    """The student's completion of a held-out prompt at one evaluation.

    number: the number of the prompt.
    source: file and line of the document.
    reference: the continuation of the prompt in the document.
    tokens: the number of tokens of the full completion.
    """

    step: NonNegativeInt
    number: NonNegativeInt
    source: str
    prompt: str
    reference: str
    completion: str
    tokens: NonNegativeInt
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class TermAtToken:
    """What a term of the objective does at one token.

    value: the term's value in nats.
    gradient: the norm of the gradient of scale · value with respect to the student's logits.
    raises, lowers: the logits that a step against this gradient raises and lowers most, the largest first, as (token
        text, absolute value of the gradient's entry).
    """

    value: float
    gradient: float
    raises: list[tuple[str, float]]
    lowers: list[tuple[str, float]]


@dataclass(frozen=True)
class Token:
    """One token of a held-out document, and the two distributions that predicted it.

    kl: KL(teacher ‖ student) in nats over the full vocabulary; None for a document's first token, which nothing
        predicts.
    teacher, student: (token text, probability), most probable first.
    terms: the terms by their names; empty for a token that is no target, and in files of earlier versions.
    """

    text: str
    target: bool
    kl: float | None
    teacher: list[tuple[str, float]]
    student: list[tuple[str, float]]
    terms: dict[str, TermAtToken] = field(default_factory=dict)


@dataclass(frozen=True)
class Document:
    """source: its file and line."""

    source: str
    tokens: list[Token]


@dataclass(frozen=True)
class HeldOutTokens:
    """Held-out documents with the predictions of teacher and student at a step."""

    step: int
    documents: list[Document]
