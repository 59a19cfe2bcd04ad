"""The interface of a training engine. The loops, `check` and `parity` use it in the same way under every layout.

    output = engine.forward_backward(micro_batches, signals, normalizer)     adds the step's gradient
    norm = engine.update(learning_rate, output)                              clips the gradient, steps the optimizer
    sums = engine.evaluate(held_out)                                         metric sums of held-out documents

The loss of a micro-batch is a sum over its tokens, divided by the number of target tokens of the whole step. So the
step's loss and gradient do not depend on how the step is split into micro-batches. `engine_kind.py` has
the interface of an entry of `stillhouse.engines`, which builds an engine.
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
from stillhouse.objective.divergence import Divergence
from stillhouse.objective.metric_keys import CHUNK_TOKENS
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import DistributedStudent


class StepOutput:
    """The result of one forward and backward over a step's micro-batches.

    outputs: the objective's outputs for this process's micro-batches, with detached losses. Empty without the last
        pipeline stage, and on all tensor ranks except the first, because tensor ranks have the same tokens.
    named: the metrics and losses of this process's micro-batches, as 0-D tensors that are added up by name.
    total: returns `sums` for the sums of this process. A collective of all processes.
    """

    def __init__(
        self,
        outputs: Sequence[ObjectiveOutput] = (),
        named: Sequence[tuple[str, Tensor]] = (),
        total: Callable[[dict[str, float]], dict[str, float]] = dict,
    ):
        self.outputs, self.named, self._total = outputs, named, total
        self._sums_of_process: dict[str, float] | None = None

    @cached_property
    def sums(self) -> dict[str, float]:
        """Metric sums over all tokens of the step, the same on every process. The key of the loss is `loss`.

        The first access is a collective of all processes. It waits for the device, unless `read` has done so.
        """
        if self._sums_of_process is None:
            self.read()
        assert self._sums_of_process is not None
        return self._total(self._sums_of_process)

    def read(self, *numbers: Tensor) -> list[float]:
        """Return the values of 0-D tensors. `named` is read in the same copy, so the device is waited for once."""
        tensors = [*numbers, *(value for _, value in self.named)]
        values: list[float] = torch.stack(tensors).tolist() if tensors else []
        names = [name for name, _ in self.named]
        self._sums_of_process = add_up(
            [{name: value} for name, value in zip(names, values[len(numbers) :], strict=True)]
        )
        return values[: len(numbers)]


@dataclass(frozen=True)
class SavedTensors:
    """elements: the number of elements in the weights and moments of all processes; each element counts once.
    without_moments: the names of the parameters without optimizer state, because they never had a gradient.
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

    def update(self, learning_rate: float, output: StepOutput | None = None) -> float:
        """Clip the gradient, apply it to the weights, then set every gradient to None.

        Returns the norm of the full gradient before clipping, the same on every process. Raises NotFiniteError on
        every process for a gradient or a loss that is not finite; no weight and no moment is changed then.

        output: the output of the step that added the gradient. None: only the gradient is checked.
        """
        ...

    def evaluate(
        self,
        held_out: Iterable[tuple[Sequence[MicroBatch], Sequence[Signals]]],
        *,
        of_teacher: bool = False,
        divergence: Divergence | None = None,
    ) -> dict[str, float]:
        """Return metric sums over all held-out target tokens, the same on every process.

        The metrics are the cross-entropy and, with signals, the forward KL. They do not depend on the engine's
        objective. Their temperature is 1, but the forward KL from a sparse signal has the signal's temperature. For
        signals with sorted probabilities, `uld` at the objective's temperature replaces the forward KL. The losses
        of `LossPart.held_out` add their own metrics.

        held_out: yields groups of micro-batches, each group with its signals.
        of_teacher: also return the teacher's cross-entropy on the labels; the signals must be exact (`FullVocab`).
        divergence: in place of the forward KL; None: the forward KL.
        """
        ...

    def require_finite(self) -> None:
        """Raise ValueError on all ranks, naming a tensor, if a checkpoint would have state that is not finite."""
        ...

    def bytes_to_save(self, *, all_moments: bool = False) -> int:
        """Return the bytes of a checkpoint with the exported student.

        all_moments: count the optimizer's state of all trained weights, also of those that had no step yet.
        """
        ...

    def save(self, folder: Path) -> SavedTensors:
        """Write the weights, the optimizer's state and the random states to a folder that all processes share.

        Call `require_finite` first: a run could not continue from state that is not finite.
        """
        ...

    def load(self, folder: Path, without_moments: Sequence[str]) -> None:
        """Restore a state that `save` wrote under any layout. Raises ValueError for the state of another model."""
        ...

    def process(
        self,
        processor: OutputProcessor,
        micro_batches: Sequence[MicroBatch],
        signals: Sequence[Signals],
        parts: Sequence[LossPart] = (),
    ) -> list[Any]:
        """Run an output processor on each micro-batch, without gradients and in eval mode, and return its results.

        The list is empty on processes without results (see `StepOutput.outputs`).

        processor: its context is `DistillTargets`.
        parts: the other losses of this pass. The MTP layers run only if an `MtpLoss` is among them.
        """
        ...

    @property
    def needs_teacher(self) -> bool:
        """Whether a step needs a teacher's signals."""
        ...

    def with_losses(self, objective: ObjectiveSpec, parts: Sequence[LossPart] = ()) -> Self:
        """Return this engine with other losses. Parts that are not replaced stay as `LossPart.silent` versions."""
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

        For a sharded gradient this is a collective of the processes that share it.
        """
        ...


def add_up(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the metric sums of several processes or evaluations; of `CHUNK_TOKENS`, take the largest value."""
    total: dict[str, float] = {}
    for named in sums:
        for name, value in named.items():
            both = (total.get(name, 0.0), value)
            total[name] = max(both) if name == CHUNK_TOKENS else sum(both)
    return total
