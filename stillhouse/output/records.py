"""What a run writes for its report, one type for each file: the run makes them, the report checks them.

timeline.jsonl: Span    samples.jsonl: Sample    eval_samples.jsonl: EvalSample    tokens.json: HeldOutTokens

The keys of a file are the fields in their order. A value is checked where it is read (`json_lines.validated`), not
where it is made. metrics.jsonl, whose keys differ from run to run, is in `metrics_file.py`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, FiniteFloat, NonNegativeInt, ValidationInfo

#: the parts of a job that work or wait, in the order of the page
Lane = Literal["rollout", "teacher", "trainer", "weights"]
LANES: tuple[Lane, ...] = get_args(Lane)
#: what the trainer does while it waits begins with this word
WAIT = "wait"
#: kept of a prompt, from its end; of a completion, from its start
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
    """Who did what when. step: the optimizer step that the work is for. start, stop: seconds of the run."""

    step: _Count
    lane: Lane
    what: str
    start: _Seconds
    stop: Annotated[_Seconds, AfterValidator(_not_before_start)]


@dataclass(frozen=True)
class SampleToken:
    """One token of a completion.

    divergence: between teacher and student, in nats; None if it was not computed. version: of the weights that wrote
    the token; None if the student did not write it. target: whether it is trained on.
    """

    text: str
    divergence: FiniteFloat | None
    version: Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)] | None
    target: bool


@dataclass(frozen=True)
class Sample:
    """A completion that a step was trained on.

    length: of the completion in tokens; `tokens` may be only the first of them. reward, advantage: None without a
    reward. staleness: optimizer steps between the weights that wrote the completion and those that learn from it.
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

    number: of the prompt. source: file and line of the document. reference: how the document goes on. tokens: of the
    whole completion.
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

    value: in nats. gradient: the norm of the gradient of scale · value with respect to the student's logits. raises,
    lowers: (token text, entry of that gradient without its sign) of the logits that a step against the gradient
    raises and lowers most, the largest first.
    """

    value: float
    gradient: float
    raises: list[tuple[str, float]]
    lowers: list[tuple[str, float]]


@dataclass(frozen=True)
class Token:
    """One token of a held-out document, and the two distributions that predicted it.

    kl: KL(teacher ‖ student) in nats over the full vocabulary; None for a document's first token, which nothing
    predicts. teacher, student: (token text, probability), most probable first. terms: by name; empty for a token that
    is no target, and in the files of earlier versions.
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
