"""What a list of terms needs of every chunk's logits: the softmaxes, sums and entries, each once.

Terms ask for what they need before the first chunk (`PlanBuilder`); the answer has the same place in every chunk.
A `Plan` is the part of it that the pointwise functions are made for: no tensors, hashable.

T tokens, N ids per token.
"""

from dataclasses import dataclass, field

from torch import Tensor

from stillhouse.objective.formulas import Divergence, KullbackLeibler
from stillhouse.objective.signals import Signal, SparseSignal

OUTSIDE = ("outside_reference", "outside_log_mass", "outside")


@dataclass(frozen=True)
class Plan:
    """The structure of a chunk's pointwise work.

    Tile 0 holds the student's logits, tile n those of the n-th dense teacher.

    tiles: how many there are.
    temperatures: of the student's softmaxes.
    teachers: (tile, temperature) of the dense teachers' softmaxes.
    pairs: (divergence, teacher softmax, student softmax); no divergence is a sum.
    buckets: student softmax of each set of ids whose outside is asked for.
    entropic: the student softmaxes whose entropy has a gradient.
    uniform: whether the mean of log q is asked for (at temperature 1).
    scale, softcap: of the student's head.
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
        """(teacher softmax, student softmax) that a divergence compares, each once."""
        return list(dict.fromkeys((teacher, student) for _, teacher, student in self.pairs))

    @property
    def renormalizable(self) -> dict[int, KullbackLeibler]:
        """The pairs whose sums can be put right after the sweep in which the normalisers are summed."""
        return {at: each for at, (each, _, _) in enumerate(self.pairs) if isinstance(each, KullbackLeibler)}

    @property
    def mixed(self) -> list[int]:
        """The pairs that need both normalisers first, in a second sweep."""
        return [at for at in range(len(self.pairs)) if at not in self.renormalizable]

    @property
    def raw_sums(self) -> list[str]:
        """The columns of `pointwise.raw_sums`."""
        students, teachers = range(len(self.temperatures)), range(len(self.teachers))
        return [
            *(f"reference/{tile}" for tile in range(self.tiles)),
            *(f"both_top/{tile}" for tile in range(1, self.tiles)),
            *(f"largest/{tile}" for tile in range(self.tiles)),
            *(f"{name}/{at}" for at in students for name in ("student_others", "student_mean")),
            *(f"{name}/{at}" for at in teachers for name in ("teacher_others", "teacher_mean")),
            *(f"mass_gap/{at}" for at in range(len(self.couples))),
            *(f"{name}/{at}" for at in self.renormalizable for name in ("excess", "log_ratio")),
            *(("logits_sum", "count") if self.uniform else ()),
        ]

    @property
    def normalizers(self) -> list[str]:
        """The numbers of a row that make log-probabilities of logits."""
        return [
            *(f"reference/{tile}" for tile in range(self.tiles)),
            *(f"student_log_mass/{at}" for at in range(len(self.temperatures))),
            *(f"teacher_log_mass/{at}" for at in range(len(self.teachers))),
            *(f"mass_ratio/{at}" for at in range(len(self.couples))),
        ]

    @property
    def coefficients(self) -> list[str]:
        """The further numbers of a row that `pointwise.gradient` takes."""
        return [
            "counted",
            *(f"probability/{at}" for at in range(len(self.temperatures))),
            *(f"log_probability/{at}" for at in self.entropic),
            *(f"slope/{at}" for at in range(len(self.pairs))),
            *(f"{name}/{at}" for at in range(len(self.buckets)) for name in OUTSIDE),
            *(("uniform",) if self.uniform else ()),
        ]


@dataclass
class PlanBuilder:
    """Collects what terms ask for. Asking twice gives the same place."""

    scale: float = 1.0
    softcap: float | None = None
    #: dense signals, in the order of their tiles
    signals: list[Signal] = field(default_factory=list)
    #: (sparse signal, student softmax) whose outside is asked for, in the order of `Plan.buckets`
    buckets: list[tuple[SparseSignal, int]] = field(default_factory=list)
    #: ids [T] or [T, N] whose logits are asked for
    entries: list[Tensor] = field(default_factory=list)
    _softmaxes: list[float] = field(default_factory=list)
    _teachers: list[tuple[int, float]] = field(default_factory=list)
    _pairs: list[tuple[Divergence, int, int]] = field(default_factory=list)
    _entropic: list[int] = field(default_factory=list)
    _uniform: bool = False

    def softmax(self, temperature: float) -> int:
        """The student's softmax at a temperature."""
        return _place(self._softmaxes, temperature)

    def teacher(self, signal: Signal, temperature: float) -> int:
        """A dense teacher's softmax; terms that carry the same signal share its tile."""
        return _place(self._teachers, (_place(self.signals, signal) + 1, temperature))

    def pair(self, divergence: Divergence, signal: Signal, temperature: float) -> int:
        """A divergence that is no sum, between a dense teacher and the student."""
        return _place(self._pairs, (divergence, self.teacher(signal, temperature), self.softmax(temperature)))

    def outside(self, signal: SparseSignal, temperature: float) -> int:
        """The student's probabilities outside a sparse signal's ids."""
        return _place(self.buckets, (signal, self.softmax(temperature)))

    def entropy(self, temperature: float) -> int:
        """The student's softmax at a temperature, with the gradient of its entropy."""
        _place(self._entropic, self.softmax(temperature))
        return self.softmax(temperature)

    def uniform(self) -> None:
        """The mean over the vocabulary of log q."""
        self.softmax(1.0)
        self._uniform = True

    def logits_at(self, ids: Tensor) -> int:
        """The student's logits at some ids."""
        # tensors are equal by element, so `_place` is not for them
        held = [at for at, each in enumerate(self.entries) if each is ids]
        if not held:
            self.entries.append(ids)
        return held[0] if held else len(self.entries) - 1

    def build(self) -> Plan:
        return Plan(
            1 + len(self.signals),
            tuple(self._softmaxes),
            tuple(self._teachers),
            tuple(self._pairs),
            tuple(softmax for _, softmax in self.buckets),
            tuple(self._entropic),
            self._uniform,
            self.scale,
            self.softcap,
        )


def _place(known: list, wanted: object) -> int:
    if wanted not in known:
        known.append(wanted)
    return known.index(wanted)
