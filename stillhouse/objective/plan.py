"""What a list of terms needs from every chunk's logits: softmaxes, sums and single logits, each computed once.

Before the first chunk, terms ask for what they need (`PlanBuilder`) and get an index; the index of a result is the
same in every chunk. A `Plan` is the part that the pointwise functions are compiled for: hashable, without tensors.

T tokens, N ids per token.
"""

from dataclasses import dataclass, field

from torch import Tensor

from stillhouse.objective.formulas import Divergence, KullbackLeibler
from stillhouse.objective.signals import Signal, SparseSignal

OUTSIDE = ("outside_reference", "outside_log_mass", "outside")


@dataclass(frozen=True)
class Plan:
    """The structure of a chunk's pointwise work. Softmaxes and tiles are given by their index.

    Tile 0 holds the student's logits, tile n those of the n-th dense teacher.

    tiles: the number of tiles.
    temperatures: the temperature of each softmax of the student.
    teachers: (tile, temperature) of each softmax of a dense teacher.
    pairs: (divergence, teacher softmax, student softmax); no divergence is a weighted sum.
    buckets: for each sparse signal whose outside (the tokens outside its ids) is needed, the student's softmax.
    entropic: the student's softmaxes whose entropy needs a gradient.
    uniform: whether the mean of log q over the vocabulary is needed (at temperature 1; q: the student's probability).
    scale, softcap: those of the student's head.
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
        """The different (teacher softmax, student softmax) that divergences compare."""
        return list(dict.fromkeys((teacher, student) for _, teacher, student in self.pairs))

    @property
    def renormalizable(self) -> dict[int, KullbackLeibler]:
        """The pairs whose sums are taken together with the normalizers' sums and normalized afterwards."""
        return {at: each for at, (each, _, _) in enumerate(self.pairs) if isinstance(each, KullbackLeibler)}

    @property
    def mixed(self) -> list[int]:
        """The pairs that need both normalizers first, and therefore a second sweep over the logits."""
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
        """The numbers of a row that turn logits into log-probabilities."""
        return [
            *(f"reference/{tile}" for tile in range(self.tiles)),
            *(f"student_log_mass/{at}" for at in range(len(self.temperatures))),
            *(f"teacher_log_mass/{at}" for at in range(len(self.teachers))),
            *(f"mass_ratio/{at}" for at in range(len(self.couples))),
        ]

    @property
    def coefficients(self) -> list[str]:
        """The other numbers of a row that `pointwise.gradient` takes."""
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
    """Collects what terms ask for. A repeated request returns the same index."""

    scale: float = 1.0
    softcap: float | None = None
    #: dense signals, in the order of their tiles
    signals: list[Signal] = field(default_factory=list)
    #: (sparse signal, student softmax) whose outside is needed, in the order of `Plan.buckets`
    buckets: list[tuple[SparseSignal, int]] = field(default_factory=list)
    #: ids [T] or [T, N] whose logits are needed
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
        """A dense teacher's softmax at a temperature; terms with the same signal share its tile."""
        return _place(self._teachers, (_place(self.signals, signal) + 1, temperature))

    def pair(self, divergence: Divergence, signal: Signal, temperature: float) -> int:
        """A divergence between a dense teacher and the student; it must not be a weighted sum."""
        return _place(self._pairs, (divergence, self.teacher(signal, temperature), self.softmax(temperature)))

    def outside(self, signal: SparseSignal, temperature: float) -> int:
        """The student's probabilities outside a sparse signal's ids."""
        return _place(self.buckets, (signal, self.softmax(temperature)))

    def entropy(self, temperature: float) -> int:
        """The student's softmax at a temperature, and the gradient of its entropy."""
        _place(self._entropic, self.softmax(temperature))
        return self.softmax(temperature)

    def uniform(self) -> None:
        """The mean over the vocabulary of log q."""
        self.softmax(1.0)
        self._uniform = True

    def logits_at(self, ids: Tensor) -> int:
        """The student's logits at some ids."""
        # by identity, not with `_place`: == compares tensors element by element
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
