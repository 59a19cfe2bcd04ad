"""The quantities that terms read from a chunk's logits (softmaxes, sums and single logits), each computed once.

Before the first chunk, each term requests its quantities from a `TilePlan`, which assigns an index to each. The
pointwise functions are compiled for `TilePlan.pointwise`, the part of the plan without tensors, which is hashable.
The functions of a pass exchange numbers per row as the columns of one tensor [C, X]. The key of a column is its name
and the index of the column's softmax, tile or pair (0 if there is only one).

C rows of a chunk of T tokens, N ids per token, X columns. q is the student's probability.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from torch import Tensor

from stillhouse.objective.divergence import Divergence, KullbackLeibler
from stillhouse.objective.signals import Signal, SparseSignal

#: the index of the student's tile; the other tiles are the logits of dense teachers
STUDENT = 0

SumName: TypeAlias = (
    Literal["largest", "both_top", "student_others", "student_mean", "teacher_others", "teacher_mean"]
    | Literal["mass_gap", "excess", "log_ratio", "logits_sum", "count"]
)
NormalizerName: TypeAlias = Literal["reference", "student_log_mass", "teacher_log_mass", "mass_ratio"]
CoefficientName: TypeAlias = (
    Literal["counted", "probability", "log_probability", "slope"]
    | Literal["outside_reference", "outside_log_mass", "outside", "uniform"]
)
Column: TypeAlias = tuple[SumName | NormalizerName | CoefficientName, int]
Columns: TypeAlias = dict[Column, Tensor]

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class PointwisePlan:
    """The structure of a chunk's pointwise work. Tiles and softmaxes are given as indices.

    tiles: how many tiles a chunk has: one for the student and one for each dense signal.
    temperatures: the temperature of each softmax of the student.
    teachers: (tile, temperature) of each softmax of a dense teacher.
    pairs: (divergence, teacher's softmax, student's softmax); no divergence is a weighted sum.
    buckets: for each sparse signal that needs sums over the tokens outside its ids, the student's softmax.
    entropic: the student's softmaxes for which the gradient of the entropy is needed.
    uniform: True if the mean of log q over the vocabulary is needed (at temperature 1).
    scale, softcap: the scale and the softcap of the student's head.
    """

    tiles: int = 1
    temperatures: tuple[float, ...] = ()
    teachers: tuple[tuple[int, float], ...] = ()
    pairs: tuple[tuple[Divergence, int, int], ...] = ()
    buckets: tuple[int, ...] = ()
    entropic: tuple[int, ...] = ()
    uniform: bool = False
    scale: float = 1.0
    softcap: float | None = None

    @property
    def couples(self) -> list[tuple[int, int]]:
        """The distinct pairs (teacher's softmax, student's softmax) that divergences compare."""
        return list(dict.fromkeys((teacher, student) for _, teacher, student in self.pairs))

    @property
    def renormalizable(self) -> dict[int, KullbackLeibler]:
        """The KL divergences, by the index of their pair. The first sweep computes their sums without normalizers."""
        return {at: kl for at, (kl, _, _) in enumerate(self.pairs) if isinstance(kl, KullbackLeibler)}

    @property
    def two_sweep(self) -> list[int]:
        """The indices of the pairs that need the normalizers first, and therefore a second sweep over the logits."""
        return [at for at in range(len(self.pairs)) if at not in self.renormalizable]

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
        """The columns of `RowStatistics.normalizers_CX`, which turn logits into log-probabilities."""
        columns: list[Column] = [("reference", tile) for tile in range(self.tiles)]
        columns += [("student_log_mass", at) for at in range(len(self.temperatures))]
        columns += [("teacher_log_mass", at) for at in range(len(self.teachers))]
        return columns + [("mass_ratio", at) for at in range(len(self.couples))]

    @property
    def coefficients(self) -> list[Column]:
        """The columns of rows_BX in `pointwise.gradient` that follow the normalizers."""
        columns: list[Column] = [("counted", 0)]
        columns += [("probability", at) for at in range(len(self.temperatures))]
        columns += [("log_probability", at) for at in self.entropic]
        columns += [("slope", at) for at in range(len(self.pairs))]
        for at in range(len(self.buckets)):
            columns += [("outside_reference", at), ("outside_log_mass", at), ("outside", at)]
        if self.uniform:
            columns.append(("uniform", 0))
        return columns


class TilePlan:
    """Assigns an index to each quantity that terms request in `Term.request`. Equal requests get the same index.

    After `close`, the methods only look up an index, and raise LookupError for a quantity that was not requested.

    pointwise: the plan of the pointwise functions, after `close`.
    signals: the dense signals, in the order of their tiles.
    buckets: each sparse signal that needs sums over the tokens outside its ids, with the student's softmax.
    ids: the ids, [T] or [T, N], for which logits are needed.
    """

    pointwise: PointwisePlan

    def __init__(self, scale: float = 1.0, softcap: float | None = None):
        self._scale, self._softcap = scale, softcap
        self._temperatures: dict[float, int] = {}
        self._entropic: dict[int, int] = {}
        self._uniform = self._is_closed = False
        self._teachers: dict[tuple[int, float], int] = {}
        self._pairs: dict[tuple[Divergence, int, int], int] = {}
        self.signals: dict[Signal, int] = {}
        self.buckets: dict[tuple[SparseSignal, int], int] = {}
        self.ids: dict[Tensor, int] = {}  # a tensor as a key is compared by identity

    def softmax(self, temperature: float) -> int:
        """Return the index of the student's softmax at a temperature."""
        return self._index(self._temperatures, temperature, f"the student's softmax at temperature {temperature}")

    def entropy(self, temperature: float) -> int:
        """Request the gradient of the student's entropy at a temperature. Return the index of the softmax."""
        softmax = self.softmax(temperature)
        self._index(self._entropic, softmax, f"the gradient of the entropy at temperature {temperature}")
        return softmax

    def uniform(self) -> None:
        """Request the mean of log q over the vocabulary."""
        self.softmax(1.0)
        self._uniform = True

    def tile(self, signal: Signal) -> int:
        """Return the index of a dense signal's tile. Terms with the same signal share one tile."""
        return self._index(self.signals, signal, "this teacher signal") + 1

    def teacher(self, signal: Signal, temperature: float) -> int:
        """Return the index of a dense teacher's softmax at a temperature."""
        softmax = (self.tile(signal), temperature)
        return self._index(self._teachers, softmax, f"the teacher's softmax at temperature {temperature}")

    def pair(self, divergence: Divergence, signal: Signal, temperature: float) -> int:
        """Return the index of a divergence (not a weighted sum) between a dense teacher and the student."""
        pair = (divergence, self.teacher(signal, temperature), self.softmax(temperature))
        return self._index(self._pairs, pair, f"{divergence} at temperature {temperature}")

    def outside(self, signal: SparseSignal, temperature: float) -> int:
        """Return the index of the student's mass outside the ids of a sparse signal."""
        return self._index(self.buckets, (signal, self.softmax(temperature)), "the student's mass outside these ids")

    def logits_at(self, ids: Tensor) -> int:
        """Return the index of the student's logits at these ids, [T] or [T, N]."""
        return self._index(self.ids, ids, "the logits at these ids")

    def close(self) -> None:
        """End the requests, and make `pointwise`."""
        self._is_closed = True
        self.pointwise = PointwisePlan(
            1 + len(self.signals),
            tuple(self._temperatures),
            tuple(self._teachers),
            tuple(self._pairs),
            tuple(softmax for _, softmax in self.buckets),
            tuple(self._entropic),
            self._uniform,
            self._scale,
            self._softcap,
        )

    def _index(self, requested: dict[T, int], key: T, name: str) -> int:
        if self._is_closed and key not in requested:
            raise LookupError(f"{name}: no term has requested it; expected a request for it in Term.request")
        return requested.setdefault(key, len(requested))
