"""The engine: training for the loops, `check`, `parity`, the examples and the tests, the same under every layout.

    output = engine.forward_backward(micro_batches, signals, normalizer)     adds the step's gradient
    norm = engine.update(learning_rate)                                      clips it, and makes the optimizer step
    sums = engine.evaluate(held_out)                                         returns held-out sums
    engine.save(folder); engine.load(folder)                                 everything that a run needs to continue

The loss of every micro-batch is a sum over its tokens, divided by the number of target tokens of the whole step. So
neither the loss nor the gradient depends on how the step is split into micro-batches. `build_engine.py` lists the
engines.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.engine.parts import LossPart
from stillhouse.models import OutputProcessor
from stillhouse.objective import ObjectiveOutput, Signals
from stillhouse.objective.metric_keys import CHUNK_TOKENS
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import DistributedStudent


class StepOutput:
    """The result of one forward and backward over a step's micro-batches.

    outputs: the objective's outputs for this process's micro-batches, with their losses detached. Empty on processes
        without the last stage, and on all tensor ranks but the first, because tensor ranks have the same tokens.
    """

    def __init__(self, outputs: list[ObjectiveOutput], total: Callable[[], dict[str, float]]):
        self.outputs, self._total = outputs, total

    @cached_property
    def sums(self) -> dict[str, float]:
        """Metric sums over all tokens of the step, the same on every process; the loss has the key `loss`.

        The first access is a collective of all processes and waits for the device.
        """
        return self._total()


@dataclass(frozen=True)
class SavedTensors:
    """elements: the number of elements in the weights and moments of all processes; copies of an element count once.
    without_moments: the parameters that never had a gradient, so that the optimizer has no state for them.
    """

    elements: int
    without_moments: list[str]


class Engine(Protocol):
    """Trains a student on micro-batches and the teachers' signals for them. The methods are collectives.

    parts: the losses beside the objective.
    autocast: the dtype of matrix products; None: the dtype of the weights.
    """

    objective: ObjectiveSpec
    parts: tuple[LossPart, ...]
    autocast: torch.dtype | None

    @property
    def student(self) -> DistributedStudent: ...

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], signals: Sequence[Signals], normalizer: float
    ) -> StepOutput:
        """Add the gradient of the micro-batches' losses to the student's gradient.

        signals: the signals of each micro-batch, from a `SignalSource`.
        normalizer: the number of target tokens of the step, over all processes.
        """
        ...

    def update(self, learning_rate: float) -> float:
        """Clip the gradient, apply it to the weights, then set every gradient to None.

        Returns the norm of the full gradient before clipping, the same on every process. Raises NotFiniteError
        before any weight is changed.
        """
        ...

    def evaluate(
        self, held_out: Iterable[tuple[Sequence[MicroBatch], Sequence[Signals]]], *, of_teacher: bool = False
    ) -> dict[str, float]:
        """Return sums over all target tokens, the same on every process: cross-entropy and, with signals, forward KL.

        Both are at temperature 1, except that the forward KL of a sparse signal is at the signal's own temperature.
        They do not depend on the engine's own objective. For signals with sorted probabilities, the result has `uld`
        instead, the distance of the sorted probabilities at the objective's temperature. The sums also have the
        metrics of `LossPart.held_out`.

        held_out: yields some micro-batches at a time, with their signals.
        of_teacher: also return the teacher's own cross-entropy; the signals must be exact.
        """
        ...

    def bytes_to_save(self) -> int:
        """Return the size of what `save` writes. Raises ValueError, naming a tensor, if state is not finite."""
        ...

    def save(self, folder: Path) -> SavedTensors:
        """Write the weights, the optimizer's state and the random states to a folder that all processes share.

        Call `bytes_to_save` first; it refuses state that is not finite.
        """
        ...

    def load(self, folder: Path, without_moments: Sequence[str]) -> None:
        """Restore a state that `save` has written, under any layout. without_moments: see `SavedTensors`.

        Raises ValueError for the state of another model.
        """
        ...

    def process(
        self,
        processor: OutputProcessor,
        micro_batches: Sequence[MicroBatch],
        signals: Sequence[Signals],
        parts: Sequence[LossPart] = (),
    ) -> list[Any]:
        """Run another output processor on each micro-batch, without gradients and in eval mode; returns its results.

        The list is empty on processes without results (see `StepOutput.outputs`).

        processor: its context is `DistillTargets`.
        parts: the losses beside the processor's; without an `MtpLoss`, MTP layers do not run.
        """
        ...

    @property
    def needs_teacher(self) -> bool:
        """Whether a step needs a teacher's signals."""
        ...

    def with_losses(self, objective: ObjectiveSpec, parts: Sequence[LossPart] = ()) -> Self:
        """Return an engine with the same student and optimizer, but these losses. `LossPart.silent` still runs."""
        ...

    def zero_grad(self) -> None: ...

    def gradient_norm(self) -> float:
        """Return the norm of the full gradient, the same on every process."""
        ...

    def gradients_not_finite(self) -> list[str]:
        """Return the names of the parameters of all processes whose gradients have a NaN or an infinity."""
        ...

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the full gradient of each parameter on this process, by its name in the full model.

        Gathering a sharded gradient is a collective of the processes that share it.
        """
        ...


def add_up(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metric sums of several processes or evaluations into one.

    The value of `CHUNK_TOKENS`, the rows of a logits tile, is the largest one.
    """
    total: dict[str, float] = {}
    for named in sums:
        for name, value in named.items():
            both = (total.get(name, 0.0), value)
            total[name] = max(both) if name == CHUNK_TOKENS else sum(both)
    return total
