"""The engine on FSDP2, tensor, context, expert and pipeline parallelism of PyTorch, and its state as named tensors.

`state_folder.py` reads and writes these tensors. Under FSDP, tensor or expert parallelism a rank has only a shard of
a tensor, as a DTensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.data import MicroBatch
from stillhouse.engine.engine import Engine, StepOutput
from stillhouse.engine.optimizer import empty_state, make_optimizer, make_step, skips_by_flag, state_tensors
from stillhouse.engine.state_folder import AVERAGE, MOMENT, RANDOM, WEIGHT, read_in_place, require_fit, stored_tensors
from stillhouse.models import NotFiniteError
from stillhouse.models.dtensors import gathered_tensor, local
from stillhouse.objective import Signals
from stillhouse.parallel import Runner
from stillhouse.parallel.gradients import copies
from stillhouse.signals import WeightAverage


class TorchEngine(Engine):
    """Trains a student that a `Runner` distributes."""

    student: Runner

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], signals: Sequence[Signals], normalizer: float
    ) -> StepOutput:
        runner = self.student
        inputs = self._step_inputs(micro_batches, signals, normalizer)
        with runner.gradients_summed():
            if runner.pipeline is not None:
                results = runner.pipeline.forward_backward(inputs)
            else:
                results = []
                for pair, stage_inputs in runner.one_by_one(inputs):
                    results.append(pair(stage_inputs))
                    results[-1].output.loss.backward()
        outputs = [result.output for result in results if result.output is not None]
        return self._step_output(outputs, [named for result in results for named in result.losses], normalizer)

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
            full = None if gradient is None else gathered_tensor(gradient, self.student.device)
            yield self.student.shared_name(name), full

    @property
    def _state(self) -> "TorchState":
        return TorchState(self.student, self.optimizer, self.average)


@dataclass(frozen=True)
class TorchState:
    """The state of a runner, its optimizer and, if the run has one, the average of the student's weights."""

    runner: Runner
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None = None

    def read(self, folder: Path, without_moments: Sequence[str]) -> None:
        """Read the state from a folder in place. without_moments: the parameters without moments in the folder."""
        stored = stored_tensors(folder)
        self.optimizer.state.clear()
        for name, parameter in self._trained().items():
            if name not in without_moments:  # DCP reads into these zeros
                self.optimizer.state[parameter] = empty_state(self.optimizer, parameter)
        updated = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        assert self.optimizer.state.keys() <= updated, "the optimizer has weights that FSDP gathered, not shards"
        wanted = self.student_weights() | self._moments() | self._averages()
        require_fit(folder.parent, stored, wanted, is_complete=self.runner.layout.stages == 1)
        # a random state is absent if the checkpoint was written on another type of device, or by fewer ranks
        tensors = wanted | {name: value for name, value in self._random_states().items() if name in stored}
        read_in_place(folder, tensors)
        self._restore(tensors)

    def tensors(self) -> dict[str, Any]:
        """Return this rank's tensors, which may be shards, by name (see `state_folder.py`)."""
        return self.student_weights() | self._random_states() | self._averages() | self._moments()

    def student_weights(self) -> dict[str, Any]:
        """Return this rank's parameters and buffers of the student. A tied head has the embedding's name.

        If the student has an adapter, frozen parameters and the scales of quantized ones are omitted, because the
        base model's files have them. The name of a scale begins with the name of its weight.
        """
        weights: dict[str, Any] = {}
        for student in self.runner.decoders:
            named = () if student.lora is None else student.named_parameters()
            frozen = {name for name, parameter in named if not parameter.requires_grad}
            for name, value in student.state_dict().items():
                if name not in frozen and name.partition(".weight.")[0] + ".weight" not in frozen:
                    weights.setdefault(f"{WEIGHT}{self.runner.shared_name(name)}", value)
        return weights

    def bytes_to_write(self, *, all_moments: bool = False) -> int:
        """Return the bytes of all tensors, plus the student's weights a second time for the folder `student` (see
        `Engine.bytes_to_save`).
        """
        size = 0.0
        for name, value in self.tensors().items():
            size += self._share_of(value) * value.element_size() * (2 if name.startswith(WEIGHT) else 1)
        for parameter in self._trained().values() if all_moments else ():
            if parameter not in self.optimizer.state:  # one at a time, because memory may be too small for all
                moments = state_tensors(empty_state(self.optimizer, parameter)).values()
                size += sum(self._share_of(value) * value.element_size() for value in moments)
        return round(sum(self.runner.ranks.gather(size)))

    def element_count(self) -> int:
        """Return the number of elements in the weights, moments and averages of all ranks; copies count once."""
        runner, tensors = self.runner, self.tensors()
        names = {name for name in tensors if not name.startswith(RANDOM)}
        if runner.pipeline is not None and runner.pipeline.embedding_copy is not None and 0 not in runner.pairs:
            # the last stage has a copy of the embedding, but only the first stage's embedding is saved
            shared = runner.decoders[0].embedding_name
            moments = {name for name in names if name.startswith(f"{MOMENT}{shared}.")}
            names -= {f"{WEIGHT}{shared}", f"{AVERAGE}{shared}"} | moments
        return round(sum(runner.ranks.gather(sum(self._share_of(tensors[name]) for name in names))))

    def parameters_without_moments(self) -> list[str]:
        """Return the parameters of all ranks without optimizer state, because they never had a gradient."""
        names = [name for name, parameter in self._trained().items() if parameter not in self.optimizer.state]
        return sorted({name for rank_names in self.runner.ranks.gather(names) for name in rank_names})

    def _averages(self) -> dict[str, Tensor]:
        """Return the averages of this rank's trained weights. A tied weight has the average of its first copy."""
        averages: dict[str, Tensor] = {}
        for name, value in ({} if self.average is None else self.average.tensors).items():
            averages.setdefault(f"{AVERAGE}{self.runner.shared_name(name)}", value)
        return averages

    def _moments(self) -> dict[str, Any]:
        # the optimizer's hyper-parameters are not saved: they come from the configuration
        return {
            f"{MOMENT}{name}.{key}": value
            for name, parameter in self._trained().items()
            for key, value in state_tensors(self.optimizer.state.get(parameter, {})).items()
        }

    def _random_states(self) -> dict[str, Tensor]:
        """Return the states of this process's random generators. The names contain the first rank of this
        tensor-parallel group, so that all its ranks load the same state: dropout must drop the same elements of the
        hidden states that these ranks replicate.
        """
        ranks, device = self.runner.ranks, self.runner.device
        rank = "" if ranks.size == 1 else f".{ranks.rank - self.runner.mesh.coordinate('tensor')}"
        states = {f"{RANDOM}cpu{rank}": torch.get_rng_state()}
        if device.type == "cuda":
            states[f"{RANDOM}cuda{rank}"] = torch.cuda.get_rng_state(device)
        return states

    def _restore(self, tensors: Mapping[str, Any]) -> None:
        """Restore the random generators, and the second copies of tied weights with their moments and averages.
        tensors: the tensors that DCP has read. DCP has already restored all other state in place.
        """
        runner, parameters = self.runner, self._trained()
        for name, value in ({} if self.average is None else self.average.tensors).items():
            first = tensors[f"{AVERAGE}{runner.shared_name(name)}"]
            if value is not first:
                local(value).copy_(local(first))
        for name, parameter in runner.named_parameters():
            if not parameter.requires_grad:
                continue
            first = parameters[runner.shared_name(name)]
            if parameter is not first:
                local(parameter.detach()).copy_(local(first.detach()))
                if first in self.optimizer.state:
                    moments = self.optimizer.state[first]
                    self.optimizer.state[parameter] = {key: moment.clone() for key, moment in moments.items()}
        for name in self._random_states().keys() & tensors.keys():
            if name.startswith(f"{RANDOM}cpu"):
                torch.set_rng_state(tensors[name])
            else:
                torch.cuda.set_rng_state(tensors[name], runner.device)

    def not_finite(self) -> list[str]:
        """Return the names of this rank's tensors with a NaN or an infinity."""
        tensors = self.tensors().items()
        return [name for name, value in tensors if value.is_floating_point() and not local(value).isfinite().all()]

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return this rank's trained parameters by their names in a checkpoint; for a tied weight, its first copy."""
        parameters: dict[str, nn.Parameter] = {}
        for name, parameter in self.runner.named_parameters():
            if parameter.requires_grad:
                parameters.setdefault(self.runner.shared_name(name), parameter)
        return parameters

    def _share_of(self, tensor: Any) -> float:
        """Return the number of a tensor's elements on this rank, divided by the number of ranks that have them."""
        degrees = self.runner.layout.degrees
        return local(tensor).numel() / copies(tensor, degrees.processes // degrees.pipeline)
