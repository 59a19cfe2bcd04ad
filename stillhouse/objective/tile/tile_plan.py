"""What the terms of an objective read from a chunk's logits: softmaxes, sums and single logits, each computed once.

Before the first chunk, each term requests from a `PlanBuilder` what it will read. The `Plan` that is built from these
requests does not change any more. It gives everything that was requested an index, the same in every chunk, and
raises LookupError for anything else. Its part `Plan.pointwise` is what the pointwise functions are compiled for:
hashable, without tensors.

The functions of a pass give each other numbers per row as the columns of one tensor [C, X]. The key of a column is
its name and the index of the softmax, tile or pair that it belongs to (0 if there is only one).

C rows of a chunk of T tokens, N ids per token, X columns. q is the student's probability.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NewType, TypeAlias, TypeVar, cast

from torch import Tensor

from stillhouse.objective.formulas import Divergence, KullbackLeibler
from stillhouse.objective.signals import Signal, SparseSignal

TileIndex = NewType("TileIndex", int)
StudentSoftmax = NewType("StudentSoftmax", int)
TeacherSoftmax = NewType("TeacherSoftmax", int)
PairIndex = NewType("PairIndex", int)
BucketIndex = NewType("BucketIndex", int)
IdsIndex = NewType("IdsIndex", int)

#: the tile of the student's logits; the others are those of dense teachers
STUDENT = TileIndex(0)

SumName: TypeAlias = Literal[
    "largest",
    "both_top",
    "student_others",
    "student_mean",
    "teacher_others",
    "teacher_mean",
    "mass_gap",
    "excess",
    "log_ratio",
    "logits_sum",
    "count",
]
NormalizerName: TypeAlias = Literal["reference", "student_log_mass", "teacher_log_mass", "mass_ratio"]
CoefficientName: TypeAlias = Literal[
    "counted",
    "probability",
    "log_probability",
    "slope",
    "outside_reference",
    "outside_log_mass",
    "outside",
    "uniform",
]
Column: TypeAlias = tuple[SumName | NormalizerName | CoefficientName, int]
Columns: TypeAlias = dict[Column, Tensor]

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class PointwisePlan:
    """The structure of a chunk's pointwise work.

    tiles: the number of tiles.
    temperatures: the temperature of each softmax of the student.
    teachers: (tile, temperature) of each softmax of a dense teacher.
    pairs: the divergences between a teacher's and a student's softmax; no divergence is a weighted sum.
    buckets: for each sparse signal whose outside (the tokens outside its ids) is needed, the student's softmax.
    entropic: the student's softmaxes whose entropy needs a gradient.
    uniform: whether the mean of log q over the vocabulary is needed (at temperature 1).
    scale, softcap: those of the student's head.
    """

    tiles: int = 1
    temperatures: tuple[float, ...] = ()
    teachers: tuple[tuple[TileIndex, float], ...] = ()
    pairs: tuple[tuple[Divergence, TeacherSoftmax, StudentSoftmax], ...] = ()
    buckets: tuple[StudentSoftmax, ...] = ()
    entropic: tuple[StudentSoftmax, ...] = ()
    uniform: bool = False
    scale: float = 1.0
    softcap: float | None = None

    @property
    def couples(self) -> list[tuple[TeacherSoftmax, StudentSoftmax]]:
        """The different (teacher softmax, student softmax) that divergences compare."""
        return list(dict.fromkeys((teacher, student) for _, teacher, student in self.pairs))

    # torch.compile traces the two casts below, and cannot trace a call of a NewType

    @property
    def students(self) -> list[StudentSoftmax]:
        """The indices of the student's softmaxes."""
        return [cast("StudentSoftmax", at) for at in range(len(self.temperatures))]

    @property
    def indexed_pairs(self) -> list[tuple[PairIndex, tuple[Divergence, TeacherSoftmax, StudentSoftmax]]]:
        return [(cast("PairIndex", at), pair) for at, pair in enumerate(self.pairs)]

    @property
    def renormalizable(self) -> dict[PairIndex, KullbackLeibler]:
        """The pairs whose sums are taken together with the normalizers' sums and normalized afterwards."""
        return {at: kl for at, (kl, _, _) in self.indexed_pairs if isinstance(kl, KullbackLeibler)}

    @property
    def two_sweep(self) -> list[PairIndex]:
        """The pairs that need both normalizers first, and therefore a second sweep over the logits."""
        return [at for at, _ in self.indexed_pairs if at not in self.renormalizable]

    @property
    def raw_sums(self) -> list[Column]:
        """The columns of `pointwise.raw_sums`."""
        columns: list[Column] = [("reference", tile) for tile in range(self.tiles)]
        columns += [("both_top", tile) for tile in range(1, self.tiles)]
        columns += [("largest", tile) for tile in range(self.tiles)]
        for at in range(len(self.temperatures)):
            columns += [("student_others", at), ("student_mean", at)]
        for at in range(len(self.teachers)):
            columns += [("teacher_others", at), ("teacher_mean", at)]
        columns += [("mass_gap", at) for at in range(len(self.couples))]
        for at in self.renormalizable:
            columns += [("excess", at), ("log_ratio", at)]
        if self.uniform:
            columns += [("logits_sum", 0), ("count", 0)]
        return columns

    @property
    def normalizers(self) -> list[Column]:
        """The columns of `RowStatistics.normalizers`, which turn logits into log-probabilities."""
        return [
            *(("reference", tile) for tile in range(self.tiles)),
            *(("student_log_mass", at) for at in range(len(self.temperatures))),
            *(("teacher_log_mass", at) for at in range(len(self.teachers))),
            *(("mass_ratio", at) for at in range(len(self.couples))),
        ]

    @property
    def coefficients(self) -> list[Column]:
        """The further columns that `pointwise.gradient` takes."""
        columns: list[Column] = [("counted", 0)]
        columns += [("probability", at) for at in range(len(self.temperatures))]
        columns += [("log_probability", at) for at in self.entropic]
        columns += [("slope", at) for at in range(len(self.pairs))]
        for at in range(len(self.buckets)):
            columns += [("outside_reference", at), ("outside_log_mass", at), ("outside", at)]
        if self.uniform:
            columns.append(("uniform", 0))
        return columns


@dataclass(frozen=True, eq=False)
class Plan:
    """The index of everything that terms requested. All lookups raise LookupError for what no term requested.

    signals: the dense signals, in the order of their tiles.
    buckets: (sparse signal, student softmax) whose outside is needed.
    ids: the ids [T] or [T, N] whose logits are needed.
    ranks: how many of the student's top tokens are needed.
    """

    pointwise: PointwisePlan
    signals: tuple[Signal, ...]
    buckets: tuple[tuple[SparseSignal, StudentSoftmax], ...]
    ids: tuple[Tensor, ...]
    ranks: int = 0

    def softmax(self, temperature: float) -> StudentSoftmax:
        at = _index(self.pointwise.temperatures, temperature, f"the student's softmax at temperature {temperature}")
        return StudentSoftmax(at)

    def entropy(self, temperature: float) -> StudentSoftmax:
        """The softmax at this temperature, if the gradient of its entropy was requested."""
        softmax = self.softmax(temperature)
        _index(self.pointwise.entropic, softmax, f"the gradient of the entropy at temperature {temperature}")
        return softmax

    def tile(self, signal: Signal) -> TileIndex:
        return TileIndex(_index(self.signals, signal, "this teacher signal") + 1)

    def teacher(self, signal: Signal, temperature: float) -> TeacherSoftmax:
        softmax = (self.tile(signal), temperature)
        at = _index(self.pointwise.teachers, softmax, f"the teacher's softmax at temperature {temperature}")
        return TeacherSoftmax(at)

    def pair(self, divergence: Divergence, signal: Signal, temperature: float) -> PairIndex:
        pair = (divergence, self.teacher(signal, temperature), self.softmax(temperature))
        return PairIndex(_index(self.pointwise.pairs, pair, f"{divergence} at temperature {temperature}"))

    def outside(self, signal: SparseSignal, temperature: float) -> BucketIndex:
        bucket = (signal, self.softmax(temperature))
        return BucketIndex(_index(self.buckets, bucket, "the student's mass outside these ids"))

    def logits_at(self, ids: Tensor) -> IdsIndex:
        # by identity: == compares tensors element by element
        return IdsIndex(_index([id(known) for known in self.ids], id(ids), "the logits at these ids"))


class PlanBuilder:
    """Collects the requests of terms. A repeated request is the same as one.

    scale, softcap: those of the student's head.
    """

    def __init__(self, scale: float = 1.0, softcap: float | None = None):
        self._scale, self._softcap = scale, softcap
        self._temperatures: list[float] = []
        self._entropic: list[StudentSoftmax] = []
        self._uniform = False
        self._signals: list[Signal] = []
        self._teachers: list[tuple[TileIndex, float]] = []
        self._pairs: list[tuple[Divergence, TeacherSoftmax, StudentSoftmax]] = []
        self._buckets: list[tuple[SparseSignal, StudentSoftmax]] = []
        self._ids: list[Tensor] = []
        self._ranks = 0

    def softmax(self, temperature: float) -> StudentSoftmax:
        """Request the student's softmax at a temperature."""
        return StudentSoftmax(_add(self._temperatures, temperature))

    def entropy(self, temperature: float) -> None:
        """Request the student's softmax at a temperature, and the gradient of its entropy."""
        _add(self._entropic, self.softmax(temperature))

    def uniform(self) -> None:
        """Request the mean over the vocabulary of log q."""
        self.softmax(1.0)
        self._uniform = True

    def divergence(self, divergence: Divergence, signal: Signal, temperature: float) -> None:
        """Request a divergence between a dense teacher and the student; it must not be a weighted sum.

        Terms with the same signal share its tile.
        """
        tile = TileIndex(_add(self._signals, signal) + 1)
        teacher = TeacherSoftmax(_add(self._teachers, (tile, temperature)))
        _add(self._pairs, (divergence, teacher, self.softmax(temperature)))

    def outside(self, signal: SparseSignal, temperature: float) -> None:
        """Request the student's probabilities outside a sparse signal's ids."""
        _add(self._buckets, (signal, self.softmax(temperature)))

    def logits_at(self, ids: Tensor) -> None:
        """Request the student's logits at some ids, [T] or [T, N]."""
        if not any(known is ids for known in self._ids):
            self._ids.append(ids)

    def top_k(self, ranks: int) -> None:
        """Request the student's `ranks` top tokens."""
        self._ranks = max(self._ranks, ranks)

    def build(self) -> Plan:
        pointwise = PointwisePlan(
            1 + len(self._signals),
            tuple(self._temperatures),
            tuple(self._teachers),
            tuple(self._pairs),
            tuple(softmax for _, softmax in self._buckets),
            tuple(self._entropic),
            self._uniform,
            self._scale,
            self._softcap,
        )
        return Plan(pointwise, tuple(self._signals), tuple(self._buckets), tuple(self._ids), self._ranks)


def _add(known: list[T], requested: T) -> int:
    if requested not in known:
        known.append(requested)
    return known.index(requested)


def _index(known: Sequence[Hashable], wanted: Hashable, what: str) -> int:
    if wanted not in known:
        raise LookupError(f"{what}: no term has requested it; expected a request for it in Term.request")
    return known.index(wanted)
