"""The engine on FSDP2, tensor, context, expert and pipeline parallelism of PyTorch, with the interface `Engine`."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from stillhouse.config import TrainConfig
from stillhouse.data import MicroBatch
from stillhouse.engine.engine import SavedTensors, StepOutput, add_up
from stillhouse.engine.loss import StepLoss
from stillhouse.engine.optimizer import embedding_weights, make_optimizer, make_step, skips_by_flag
from stillhouse.engine.parts import LossPart
from stillhouse.engine.state_folder import write_state
from stillhouse.engine.torch_state import TorchState
from stillhouse.models import NotFiniteError, OutputProcessor, evaluating
from stillhouse.models.dtensors import gathered_tensor, local
from stillhouse.objective import ObjectiveOutput, RoutedSignal, Signal, Signals, SortedTopK, SpanSignal
from stillhouse.objective.formulas import forward_kl
from stillhouse.objective.signals import SparseSignal
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import Runner, StageInputs
from stillhouse.signals.weight_average import WeightAverage

#: AdamW with torch's default betas, without weight decay and clipping
DEFAULT_TRAIN = TrainConfig(betas=(0.9, 0.999), clip=None)


class TorchEngine:
    """train: the optimizer's settings, and the norm above which the gradient is clipped.
    autocast: the dtype of matrix products; the weights keep their own dtype. None: the dtype of the weights.
    chunk_tokens: rows of a logits tile; None: chosen by a memory budget.
    parts: the losses beside the objective.
    average: the moving average of the student's weights, if a teacher needs it. `update` also updates it.
    """

    def __init__(
        self,
        student: Runner,
        objective: ObjectiveSpec,
        *,
        train: TrainConfig = DEFAULT_TRAIN,
        autocast: torch.dtype | None = None,
        chunk_tokens: int | None = None,
        parts: Sequence[LossPart] = (),
        average: WeightAverage | None = None,
    ):
        self.student, self.objective, self.parts = student, objective, tuple(parts)
        self._train, self.autocast = train, autocast
        self._chunk_tokens, self.average = chunk_tokens, average

    # ---- the step

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], signals: Sequence[Signals], normalizer: float
    ) -> StepOutput:
        runner = self.student
        loss = StepLoss(self.objective, normalizer, self._chunk_tokens, self.parts)
        inputs = self._inputs(micro_batches, signals, loss, self.parts, normalizer)
        with runner.gradients_summed():
            if runner.pipeline is not None:
                results = runner.pipeline.forward_backward(inputs)
            else:
                results = []
                for pair, of_one in runner.one_by_one(inputs):
                    results.append(pair(of_one))
                    results[-1].output.loss.backward()
        outputs = [result.output for result in results if result.output is not None]
        for output in outputs:
            output.loss.detach_()
        losses = [named for result in results for named in result.losses] if runner.is_counted else []
        outputs = outputs if runner.has_results else []
        return StepOutput(outputs, [*_named_metrics(outputs), *losses], partial(self._total, normalizer))

    def update(self, learning_rate: float, output: StepOutput | None = None) -> float:
        output = StepOutput() if output is None else output
        # the gradient, and so its norm, may be in host memory
        device_norm = self.student.clip(self._train.clip or 0.0).to(self.student.device)
        not_finite = self._not_finite(device_norm, output)
        steps_before_reading = skips_by_flag(self.optimizer)
        if steps_before_reading:
            make_step(self.optimizer, learning_rate, not_finite)
        norm, is_not_finite = output.read(device_norm, not_finite)
        if is_not_finite:
            raise NotFiniteError.of_gradient(norm)
        if not steps_before_reading:
            make_step(self.optimizer, learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        return norm

    def _not_finite(self, norm: Tensor, output: StepOutput) -> Tensor:
        """Return 1.0 if the gradient's norm or the step's loss is not finite on any process, otherwise 0.0.

        The result is a 0-D tensor on the device; the host does not wait for it.
        """
        terms = {"loss", *(name for part in self.parts for name in part.terms)}
        numbers = [norm, *(value for name, value in output.named if name in terms)]
        is_finite = torch.stack(numbers).isfinite().all()
        return (self.student.ranks.sum(1.0 - is_finite.float()) > 0).float()

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        parameters = (parameter for _, parameter in self.student.named_parameters())
        return make_optimizer(parameters, self._train, embedding_weights(self.student.decoders))

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
        self, held_out: Iterable[tuple[Sequence[MicroBatch], Sequence[Signals]]], *, of_teacher: bool = False
    ) -> dict[str, float]:
        outputs: list[ObjectiveOutput] = []
        parts = tuple(measured for part in self.parts if (measured := part.held_out()) is not None)
        for micro_batches, signals in held_out:
            loss = StepLoss(
                self._held_out_objective(signals),
                chunk_tokens=self._chunk_tokens,
                parts=parts,
                with_teacher_cross_entropy=of_teacher,
            )
            outputs += self.process(loss, micro_batches, signals, parts)
            del micro_batches, signals  # free a teacher's large hidden states before the next ones are computed
        return StepOutput(outputs, _named_metrics(outputs), self._over_ranks).sums

    def _held_out_objective(self, signals: Sequence[Signals]) -> ObjectiveSpec:
        """Return the cross-entropy; with signals, also the forward KL or, for `SortedTopK` signals, `uld`."""
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
            divergence=forward_kl(),
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

    # ---- gradients

    def zero_grad(self) -> None:
        self.student.zero_grad()

    def gradient_norm(self) -> float:
        return float(self.student.clip(0.0))

    def gradients_not_finite(self) -> list[str]:
        names = [
            self.student.shared_name(name)
            for name, parameter in self.student.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(local(parameter.grad)).all())
        ]
        return list(dict.fromkeys(name for of_rank in self.student.ranks.gather(names) for name in of_rank))

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, parameter in self.student.named_parameters():
            gradient = parameter.grad
            full_gradient = None if gradient is None else gathered_tensor(gradient, self.student.device)
            yield self.student.shared_name(name), full_gradient

    # ---- state

    @property
    def _state(self) -> TorchState:
        return TorchState(self.student, self.optimizer, self.average)

    def bytes_to_save(self) -> int:
        return self._state.bytes_to_write()

    def save(self, folder: Path) -> SavedTensors:
        state = self._state
        write_state(folder, state.tensors(), self.student.ranks)
        return SavedTensors(state.element_count(), state.parameters_without_moments())

    def load(self, folder: Path, without_moments: Sequence[str]) -> None:
        self._state.read(folder, without_moments)


def _named_metrics(outputs: Sequence[ObjectiveOutput]) -> list[tuple[str, Tensor]]:
    return [pair for output in outputs for pair in [("loss", output.loss), *output.metrics.items()]]


def _temperature(signal: Signal) -> float:
    """Return the temperature of a held-out divergence: that of a sparse signal, if it is known; otherwise 1."""
    sparse = signal.first if isinstance(signal, SpanSignal) else signal
    known = sparse.temperature if isinstance(sparse, SparseSignal) else None
    return 1.0 if known is None else known
