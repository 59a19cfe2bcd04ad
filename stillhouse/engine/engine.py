"""The interface of training engines, which the loops, `check` and `parity` use in the same way under every layout.

    output = engine.forward_backward(micro_batches, signals, normalizer)     adds the step's gradient
    norm = engine.update(learning_rate, output)                              clips the gradient, steps the optimizer
    sums = engine.evaluate(held_out)                                         metric sums of held-out documents

The loss of a micro-batch is a sum over its tokens, divided by the number of target tokens of the whole step. So the
step's loss and gradient do not depend on how the step is split into micro-batches.

An `EngineKind` registers an engine (`engine_kind.py`; torch's is in `torch_engine_kind.py`).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from stillhouse.config import TrainConfig
from stillhouse.data import MicroBatch
from stillhouse.engine.loss import StepLoss
from stillhouse.engine.losses import LossPart
from stillhouse.engine.state_folder import write_tensors
from stillhouse.models import OutputProcessor, evaluating
from stillhouse.objective import ObjectiveOutput, RoutedSignal, Signal, Signals, SpanSignal
from stillhouse.objective.divergence import Divergence
from stillhouse.objective.divergences import forward_kl
from stillhouse.objective.metrics import CHUNK_TOKENS
from stillhouse.objective.signals import SparseSignal
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import DistributedStudent, StageInputs
from stillhouse.signals import WeightAverage

#: AdamW with torch's default betas, without weight decay and clipping
DEFAULT_TRAIN = TrainConfig(betas=(0.9, 0.999), clip=None)


class StepOutput:
    """The result of one forward and backward over a step's micro-batches.

    outputs: the objective's outputs for this process's micro-batches, with detached losses. It is empty on processes
        without the last pipeline stage, and on all tensor ranks except the first, because tensor ranks have the same
        tokens.
    named: names and values of this process's metrics and losses. A value is a 0-D tensor; values with the same name
        are added up.
    total: a collective of all processes. Its argument is the metric sums of this process; it returns `sums`.
    """

    def __init__(
        self,
        outputs: Sequence[ObjectiveOutput] = (),
        named: Sequence[tuple[str, Tensor]] = (),
        total: Callable[[dict[str, float]], dict[str, float]] = dict,
    ):
        self.outputs, self.named, self._total = outputs, named, total
        self._values: list[float] | None = None

    @cached_property
    def sums(self) -> dict[str, float]:
        """Metric sums over all tokens of the step, the same on every process. The key of the loss is `loss`.

        The first access is a collective of all processes. The host waits for the device, unless `read` was called.
        """
        if self._values is None:
            self.read()
        assert self._values is not None
        pairs = zip(self.named, self._values, strict=True)
        return self._total(add_up([{name: value} for (name, _), value in pairs]))

    def read(self, *numbers: Tensor) -> list[float]:
        """Return the values of 0-D tensors. One copy to the host contains them and the values in `named`, so the host
        waits for the device only once.
        """
        tensors = [*numbers, *(value for _, value in self.named)]
        values: list[float] = torch.stack(tensors).tolist() if tensors else []
        self._values = values[len(numbers) :]
        return values[: len(numbers)]


@dataclass(frozen=True)
class SavedTensors:
    """Facts about the tensors that `Engine.save` has written.

    elements: the number of elements in the weights, optimizer states and averages of all processes. An element that
        several processes have counts once.
    without_moments: the names of the parameters without optimizer state, because they never had a gradient.
    """

    elements: int
    without_moments: list[str]


class Engine(ABC):
    """Trains a student on micro-batches and the teachers' signals for them. The methods are collectives.

    train: the optimizer's settings, and the norm above which the gradient is clipped.
    autocast: the dtype of matrix products, or None for the dtype of the weights.
    chunk_tokens, parts: see `StepLoss`.
    average: the moving average of the student's weights, or None if no teacher uses it. `update` also updates it.
    """

    optimizer: Any

    def __init__(
        self,
        student: DistributedStudent,
        objective: ObjectiveSpec,
        *,
        train: TrainConfig = DEFAULT_TRAIN,
        autocast: torch.dtype | None = None,
        chunk_tokens: int | None = None,
        parts: Sequence[LossPart] = (),
        average: WeightAverage | None = None,
    ):
        self.student, self.objective, self.parts = student, objective, tuple(parts)
        self._train, self.autocast, self._chunk_tokens, self.average = train, autocast, chunk_tokens, average

    @abstractmethod
    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], signals: Sequence[Signals], normalizer: float
    ) -> StepOutput:
        """Add the gradient of the micro-batches' losses to the student's gradient.

        signals: the signals of each micro-batch.
        normalizer: the step's number of target tokens, summed over all processes.
        """

    @abstractmethod
    def update(self, learning_rate: float, output: StepOutput | None = None) -> float:
        """Clip the gradient, apply it to the weights, then set every gradient to None.

        Returns the norm of the full gradient before clipping, the same on every process. Raises NotFiniteError on
        every process if the gradient or the loss is not finite; weights and moments then keep their values.

        output: the output of the step that added the gradient. If it is None, only the gradient is checked.
        """

    @property
    @abstractmethod
    def _state(self) -> Any:
        """An object, such as `TorchState`, that has the weights, the optimizer's state and the random states as named
        tensors.
        """

    def require_finite(self) -> None:
        """Raise ValueError on all ranks, with the name of a tensor, if the state to be saved is not finite."""
        names = sorted({name for names in self.student.ranks.gather(self._state.not_finite()) for name in names})
        if names:
            more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
            raise ValueError(
                f"'{names[0]}'{more} not finite after the update, so no checkpoint of this step is written. "
                "The last checkpoint is intact. The usual remedy is a run in another folder with a lower "
                "train.learning_rate"
            )

    def bytes_to_save(self, *, all_moments: bool = False) -> int:
        """Return the size of a checkpoint in bytes, including its exported student.

        all_moments: whether the optimizer's state of weights that were not yet updated is also counted.
        """
        size: int = self._state.bytes_to_write(all_moments=all_moments)
        return size

    def save(self, folder: Path) -> SavedTensors:
        """Write the weights, the optimizer's state and the random states to a folder that all processes share.

        Call `require_finite` first, because a run cannot continue from a state that is not finite.
        """
        state = self._state
        write_tensors(folder, state.tensors(), self.student.ranks)
        return SavedTensors(state.element_count(), state.parameters_without_moments())

    def load(self, folder: Path, without_moments: Sequence[str]) -> None:
        """Restore a state that `save` wrote under any layout. Raises ValueError for the state of another model.

        without_moments: the value in the `SavedTensors` of this state.
        """
        self._state.read(folder, without_moments)

    @abstractmethod
    def zero_grad(self) -> None: ...

    @abstractmethod
    def gradient_norm(self) -> float:
        """Return the norm of the full gradient, the same on every process."""

    @abstractmethod
    def gradients_not_finite(self) -> list[str]:
        """Return the names of the parameters of all processes whose gradients have a NaN or an infinity."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the name in the full model and the unsharded gradient of each parameter on this process. A collective
        of the processes that share a sharded gradient.
        """

    def evaluate(
        self,
        held_out: Iterable[tuple[Sequence[MicroBatch], Sequence[Signals]]],
        *,
        with_teacher: bool = False,
        divergence: Divergence | None = None,
    ) -> dict[str, float]:
        """Return metric sums over all held-out target tokens, the same on every process.

        The metrics are the cross-entropy and, with signals, the forward KL or another `divergence`. The engine's
        objective has no effect, except for its shares of several teachers. The temperature is 1; the divergence from
        a sparse signal has the signal's temperature. The losses of `LossPart.held_out` add more metrics.

        held_out: yields groups of micro-batches, each group with its signals.
        with_teacher: whether the teacher's cross-entropy on the labels is also returned. If it is true, the signals
            must be exact (`FullVocab`).
        """
        outputs: list[ObjectiveOutput] = []
        parts = tuple(measured for part in self.parts if (measured := part.held_out()) is not None)
        for micro_batches, signals in held_out:
            objective = self._held_out_objective(signals, divergence or forward_kl())
            loss = StepLoss(objective, 1.0, self._chunk_tokens, parts, with_teacher)
            outputs += self.process(loss, micro_batches, signals, parts)
            del micro_batches, signals  # free a teacher's large hidden states before the next ones are computed
        sums = StepOutput(outputs, _named_metrics(outputs)).sums
        return add_up(self.student.ranks.gather(sums))

    def _held_out_objective(self, signals: Sequence[Signals], divergence: Divergence) -> ObjectiveSpec:
        # use all micro-batches, because a micro-batch has no signal of a teacher that scores none of its documents
        named = {
            name: signal.signal if isinstance(signal, RoutedSignal) else signal
            for teacher_signals in signals
            for name, signal in teacher_signals.items()
        }
        if not named:
            return ObjectiveSpec(cross_entropy=1.0)
        first, shares = next(iter(named.values())), self.objective.teachers
        scored = {name: _temperature(signal) for name, signal in named.items() if name in shares}
        return ObjectiveSpec(
            cross_entropy=1.0,
            divergence=divergence,
            temperature=1.0 if shares else _temperature(first),
            teachers={name: replace(shares[name], temperature=value) for name, value in scored.items()},
            is_mixture=self.objective.is_mixture,
        )

    def process(
        self,
        processor: OutputProcessor,
        micro_batches: Sequence[MicroBatch],
        signals: Sequence[Signals],
        parts: Sequence[LossPart] = (),
    ) -> list[Any]:
        """Run an output processor on each micro-batch, without gradients and in eval mode, and return its results.
        The list is empty on processes without results (see `StepOutput.outputs`).

        processor: its argument `context` is a `DistillTargets`.
        parts: the losses inside layers. The MTP layers run only if one of them is an `MtpLoss`.
        """
        with evaluating(*self.student.decoders):
            results = self.student.forward(self._inputs(micro_batches, signals, processor, parts))
        return results if self.student.has_results else []

    @property
    def needs_teacher(self) -> bool:
        return self.objective.needs_teacher or any(part.needs_teacher for part in self.parts)

    def with_losses(self, objective: ObjectiveSpec, parts: Sequence[LossPart] = ()) -> Self:
        """Return a copy of this engine with other losses. Each of this engine's parts whose type is not in `parts` is
        replaced by its `LossPart.silent` version, or removed if there is none.
        """
        other = copy.copy(self)
        other.optimizer, other.objective = self.optimizer, objective
        others = [part for part in self.parts if type(part) not in {type(part) for part in parts}]
        other.parts = *parts, *(silent for part in others if (silent := part.silent()) is not None)
        return other

    def _step_inputs(
        self, micro_batches: Sequence[MicroBatch], signals: Sequence[Signals], normalizer: float
    ) -> list[StageInputs]:
        loss = StepLoss(self.objective, normalizer, self._chunk_tokens, self.parts)
        return self._inputs(micro_batches, signals, loss, self.parts, normalizer)

    def _step_output(
        self, outputs: Sequence[ObjectiveOutput], losses: Sequence[tuple[str, Tensor]], normalizer: float
    ) -> StepOutput:
        """Return this process's output of a step. losses: the names and values of the losses inside layers."""
        for output in outputs:
            output.loss.detach_()
        outputs = outputs if self.student.has_results else []
        named = [*_named_metrics(outputs), *(losses if self.student.is_counted else [])]
        return StepOutput(outputs, named, partial(self._total, normalizer))

    def _inputs(
        self,
        micro_batches: Sequence[MicroBatch],
        signals: Sequence[Signals],
        processor: OutputProcessor,
        parts: Sequence[LossPart] = (),
        normalizer: float = 1.0,
    ) -> list[StageInputs]:
        if not micro_batches or len(micro_batches) != len(signals):
            counts = f"{len(signals)} signals for {len(micro_batches)} micro-batches"
            raise ValueError(f"{counts}: expected one signal per micro-batch, and at least one micro-batch")
        pairs = zip(micro_batches, signals, strict=True)
        return [StageInputs(*pair, processor, parts, normalizer, self.autocast) for pair in pairs]

    def _not_finite(self, norm: Tensor, output: StepOutput) -> Tensor:
        """Return 1.0 if the gradient's norm or the step's loss is not finite on at least one process, otherwise 0.0.

        The result is a 0-D tensor on the device, and the host does not wait for it.
        """
        terms = {"loss", *(name for part in self.parts for name in part.terms)}
        numbers = [norm, *(value for name, value in output.named if name in terms)]
        is_finite = torch.stack(numbers).isfinite().all()
        return (self.student.ranks.sum(1.0 - is_finite.float()) > 0).float()

    def _total(self, normalizer: float, sums_of_process: dict[str, float]) -> dict[str, float]:
        sums = add_up(self.student.ranks.gather(sums_of_process))
        terms = [term for part in self.parts for term in part.terms.items()]
        for name, term in terms if "loss" in sums else ():
            sums["loss"] += term.scale * sums.get(name, 0.0) / normalizer
        return sums


def add_up(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the metric sums of several processes or evaluations. For `CHUNK_TOKENS`, take the largest value."""
    total: dict[str, float] = {}
    for name, value in (pair for named in sums for pair in named.items()):
        both = (total.get(name, 0.0), value)
        total[name] = max(both) if name == CHUNK_TOKENS else sum(both)
    return total


def _named_metrics(outputs: Sequence[ObjectiveOutput]) -> list[tuple[str, Tensor]]:
    return [pair for output in outputs for pair in [("loss", output.loss), *output.metrics.items()]]


def _temperature(signal: Signal) -> float:
    """Return the temperature of a held-out divergence: a sparse signal's temperature if it is known, otherwise 1."""
    sparse = signal.first if isinstance(signal, SpanSignal) else signal
    temperature = sparse.temperature if isinstance(sparse, SparseSignal) else None
    return 1.0 if temperature is None else temperature
