"""The engine on FSDP2, tensor, context, expert and pipeline parallelism of PyTorch, with the interface `Engine`."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.engine.engine import Engine, SavedTensors, StepOutput, named_metrics
from stillhouse.engine.optimizer import make_optimizer, make_step, skips_by_flag
from stillhouse.engine.state_folder import write_tensors
from stillhouse.engine.torch_state import TorchState
from stillhouse.models import NotFiniteError
from stillhouse.models.dtensors import gathered_tensor, local
from stillhouse.objective import Signals
from stillhouse.parallel import Runner


class TorchEngine(Engine):
    """Trains a student that a `Runner` distributes."""

    student: Runner

    # ---- the step

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], signals: Sequence[Signals], normalizer: float
    ) -> StepOutput:
        runner = self.student
        loss = self._step_loss(normalizer)
        inputs = self._inputs(micro_batches, signals, loss, self.parts, normalizer)
        with runner.gradients_summed():
            if runner.pipeline is not None:
                results = runner.pipeline.forward_backward(inputs)
            else:
                results = []
                for pair, stage_inputs in runner.one_by_one(inputs):
                    results.append(pair(stage_inputs))
                    results[-1].output.loss.backward()
        outputs = [result.output for result in results if result.output is not None]
        for output in outputs:
            output.loss.detach_()
        losses = [named for result in results for named in result.losses] if runner.is_counted else []
        outputs = outputs if runner.has_results else []
        return StepOutput(outputs, [*named_metrics(outputs), *losses], partial(self._total, normalizer))

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
            raise NotFiniteError.in_gradient(norm)
        if not steps_before_reading:
            make_step(self.optimizer, learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        return norm

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.student.decoders, self._train)

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
        return list(dict.fromkeys(name for rank_names in self.student.ranks.gather(names) for name in rank_names))

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, parameter in self.student.named_parameters():
            gradient = parameter.grad
            full_gradient = None if gradient is None else gathered_tensor(gradient, self.student.device)
            yield self.student.shared_name(name), full_gradient

    # ---- state

    @property
    def _state(self) -> TorchState:
        return TorchState(self.student, self.optimizer, self.average)

    def require_finite(self) -> None:
        self._state.require_finite()

    def bytes_to_save(self, *, all_moments: bool = False) -> int:
        return self._state.bytes_to_write(all_moments=all_moments)

    def save(self, folder: Path) -> SavedTensors:
        state = self._state
        write_tensors(folder, state.tensors(), self.student.ranks)
        return SavedTensors(state.element_count(), state.parameters_without_moments())

    def load(self, folder: Path, without_moments: Sequence[str]) -> None:
        self._state.read(folder, without_moments)
