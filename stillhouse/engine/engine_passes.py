"""The passes of an engine that depend on no library for parallelism: inputs, held-out metrics, other losses.

`TorchEngine` and the engines of add-ons add the step, the gradients and the state.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from stillhouse.config import TrainConfig
from stillhouse.data import MicroBatch
from stillhouse.engine.engine import StepOutput, add_up
from stillhouse.engine.loss import StepLoss
from stillhouse.engine.parts import LossPart
from stillhouse.models import OutputProcessor, evaluating
from stillhouse.objective import ObjectiveOutput, RoutedSignal, Signal, Signals, SortedTopK, SpanSignal
from stillhouse.objective.divergence import Divergence
from stillhouse.objective.formulas import forward_kl
from stillhouse.objective.signals import SparseSignal
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import DistributedStudent, StageInputs

#: AdamW with torch's default betas, without weight decay and clipping
DEFAULT_TRAIN = TrainConfig(betas=(0.9, 0.999), clip=None)


class EnginePasses:
    """What the engines share. student: distributed over the processes. The arguments are those of `TorchEngine`."""

    optimizer: Any

    def __init__(
        self,
        student: DistributedStudent,
        objective: ObjectiveSpec,
        *,
        train: TrainConfig,
        autocast: torch.dtype | None,
        chunk_tokens: int | None,
        parts: Sequence[LossPart],
    ):
        self.student, self.objective, self.parts = student, objective, tuple(parts)
        self._train, self.autocast, self._chunk_tokens = train, autocast, chunk_tokens

    def _step_loss(self, normalizer: float) -> StepLoss:
        return StepLoss(self.objective, normalizer, self._chunk_tokens, self.parts)

    def _inputs(
        self,
        micro_batches: Sequence[MicroBatch],
        signals: Sequence[Signals],
        processor: OutputProcessor,
        parts: Sequence[LossPart] = (),
        normalizer: float = 1.0,
    ) -> list[StageInputs]:
        """Raises ValueError unless there are signals for each micro-batch."""
        if not micro_batches or len(micro_batches) != len(signals):
            raise ValueError(
                f"{len(signals)} signals for {len(micro_batches)} micro-batches: expected one for each, and at least "
                "one"
            )
        return [
            StageInputs(micro_batch, of_teachers, processor, parts, normalizer, self.autocast)
            for micro_batch, of_teachers in zip(micro_batches, signals, strict=True)
        ]

    def _total(self, normalizer: float, sums_of_process: dict[str, float]) -> dict[str, float]:
        """Return `StepOutput.sums`."""
        sums = self._over_ranks(sums_of_process)
        terms = [term for part in self.parts for term in part.terms.items()]
        for name, term in terms if "loss" in sums else ():
            sums["loss"] += term.scale * sums.get(name, 0.0) / normalizer
        return sums

    def _over_ranks(self, sums_of_process: dict[str, float]) -> dict[str, float]:
        return add_up(self.student.ranks.gather(sums_of_process))

    # ---- passes without gradients

    def evaluate(
        self,
        held_out: Iterable[tuple[Sequence[MicroBatch], Sequence[Signals]]],
        *,
        of_teacher: bool = False,
        divergence: Divergence | None = None,
    ) -> dict[str, float]:
        outputs: list[ObjectiveOutput] = []
        parts = tuple(measured for part in self.parts if (measured := part.held_out()) is not None)
        for micro_batches, signals in held_out:
            loss = StepLoss(
                self._held_out_objective(signals, divergence or forward_kl()),
                chunk_tokens=self._chunk_tokens,
                parts=parts,
                with_teacher_cross_entropy=of_teacher,
            )
            outputs += self.process(loss, micro_batches, signals, parts)
            del micro_batches, signals  # free a teacher's large hidden states before the next ones are computed
        return StepOutput(outputs, named_metrics(outputs), self._over_ranks).sums

    def _held_out_objective(self, signals: Sequence[Signals], divergence: Divergence) -> ObjectiveSpec:
        """Return the cross-entropy; with signals, also the divergence or, for `SortedTopK` signals, `uld`."""
        # a micro-batch has no signal of a teacher that scores none of its documents
        named = {
            name: signal.signal if isinstance(signal, RoutedSignal) else signal
            for of_teachers in signals
            for name, signal in of_teachers.items()
        }
        if not named:
            return ObjectiveSpec(cross_entropy=1.0)
        first, shares = next(iter(named.values())), self.objective.teachers
        if isinstance(first, SortedTopK):
            return ObjectiveSpec(cross_entropy=1.0, uld=1.0, temperature=self.objective.temperature)
        return ObjectiveSpec(
            cross_entropy=1.0,
            divergence=divergence,
            temperature=1.0 if shares else _temperature(first),
            teachers={
                name: replace(shares[name], temperature=_temperature(signal))
                for name, signal in named.items()
                if name in shares
            },
            is_mixture=self.objective.is_mixture,
        )

    def process(
        self,
        processor: OutputProcessor,
        micro_batches: Sequence[MicroBatch],
        signals: Sequence[Signals],
        parts: Sequence[LossPart] = (),
    ) -> list[Any]:
        with evaluating(*self.student.decoders):
            results = self.student.forward(self._inputs(micro_batches, signals, processor, parts))
        return results if self.student.has_results else []

    def _not_finite(self, norm: Tensor, output: StepOutput) -> Tensor:
        """Return 1.0 if the gradient's norm or the step's loss is not finite on any process, otherwise 0.0.

        The result is a 0-D tensor on the device; the host does not wait for it.
        """
        terms = {"loss", *(name for part in self.parts for name in part.terms)}
        numbers = [norm, *(value for name, value in output.named if name in terms)]
        is_finite = torch.stack(numbers).isfinite().all()
        return (self.student.ranks.sum(1.0 - is_finite.float()) > 0).float()

    # ---- single losses

    @property
    def needs_teacher(self) -> bool:
        return self.objective.needs_teacher or any(part.needs_teacher for part in self.parts)

    def with_losses(self, objective: ObjectiveSpec, parts: Sequence[LossPart] = ()) -> Self:
        other = copy.copy(self)
        other.optimizer, other.objective = self.optimizer, objective
        others = [part for part in self.parts if type(part) not in {type(part) for part in parts}]
        other.parts = *parts, *(silent for part in others if (silent := part.silent()) is not None)
        return other


def named_metrics(outputs: Sequence[ObjectiveOutput]) -> list[tuple[str, Tensor]]:
    return [pair for output in outputs for pair in [("loss", output.loss), *output.metrics.items()]]


def _temperature(signal: Signal) -> float:
    """Return the temperature of a held-out divergence: that of a sparse signal, if it is known; otherwise 1."""
    sparse = signal.first if isinstance(signal, SpanSignal) else signal
    temperature = sparse.temperature if isinstance(sparse, SparseSignal) else None
    return 1.0 if temperature is None else temperature
