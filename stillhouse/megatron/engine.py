"""The engine on Megatron-Core, with the interface `Engine`.

Megatron-Core's schedules run the passes, its `DistributedDataParallel` sums the gradients, and its optimizer (AdamW)
makes the step. A loss is a sum that is divided by the step's normalizer. Megatron-Core does not divide it again.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate
from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.engine.engine import Engine, StepOutput
from stillhouse.engine.losses import RouterBalancing
from stillhouse.engine.losses.mtp import MtpLoss
from stillhouse.engine.optimizer import weight_kinds
from stillhouse.megatron.state import MegatronState, require_partition, trained_parameters
from stillhouse.megatron.student import MegatronStudent
from stillhouse.megatron.weights import gather, local_blocks
from stillhouse.models import NotFiniteError
from stillhouse.objective import Signals
from stillhouse.objective.spec import ObjectiveSpec


class MegatronEngine(Engine):
    student: MegatronStudent

    def __init__(
        self,
        student: MegatronStudent,
        objective: ObjectiveSpec,
        *,
        autocast: torch.dtype | None = None,
        **options: Any,
    ):
        """Create the engine.

        options: see `Engine`.

        Raises ValueError for an option that is not supported here.
        """
        super().__init__(student, objective, **options)
        # only for direct callers: the configuration of a run with these options is refused before models are loaded
        others = [part.key for part in self.parts if not isinstance(part, (MtpLoss, RouterBalancing))]
        if self._train.optimizer != "adamw" or others:
            raise ValueError(
                "parallel.engine: megatron: expected train.optimizer: adamw, and no other losses than the objective, "
                "the loss of MTP layers and the routers' load balancing"
            )
        if autocast not in (None, dtype := student.student.transformer.params_dtype):
            raise ValueError(f"autocast to {autocast} of parameters in {dtype}: expected parameters in {autocast}")
        if self.average is not None:
            for (number, name), weight in student.student.unrounded.items():
                self.average.tensors[f"{number}.{name}"].copy_(weight)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], signals: Sequence[Signals], normalizer: float
    ) -> StepOutput:
        inputs = self._step_inputs(micro_batches, signals, normalizer)
        # a pass ends with a sum over all ranks, which must not include the gradients of earlier passes a second time
        earlier = [gradient.clone() for gradient in self.student.gradients] if self.student.has_gradient else []
        self._zero_buffers()
        outputs, losses = self.student.forward_backward(inputs)
        for gradient, earlier_gradient in zip(self.student.gradients, earlier, strict=bool(earlier)):
            gradient.add_(earlier_gradient)
        self.student.has_gradient = True
        return self._step_output(outputs, losses, normalizer)

    def update(self, learning_rate: float, output: StepOutput | None = None) -> float:
        output = StepOutput() if output is None else output
        device_norm = self._device_norm()
        norm, is_not_finite = output.read(device_norm, self._not_finite(device_norm, output))
        if is_not_finite:
            raise NotFiniteError.in_gradient(norm)
        if self._train.clip:
            scale = min(1.0, self._train.clip / (norm + 1e-6))
            for gradient in self.student.gradients:
                gradient.mul_(scale)
        for group in self.optimizer.param_groups:
            # Megatron-Core's own scheduler, which is not used, would set these two values
            group["lr"] = learning_rate
            group["weight_decay"] = self._train.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self.zero_grad()
        if self.average is not None:
            self.average.update(self._weights() if self.student.student.transformer.bf16 else None)
        return norm

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's weights in float32. A collective of the data ranks."""
        for entry in trained_parameters(self.student.student, self.optimizer):
            full = entry.collect(entry.master.detach(), everywhere=True)
            assert full is not None
            yield "{}.{}".format(*entry.key), full

    @cached_property
    def optimizer(self) -> Any:
        train = self._train
        chunks = self.student.student
        settings = OptimizerConfig(
            optimizer="adam",
            bf16=chunks.transformer.bf16,
            params_dtype=chunks.transformer.params_dtype,
            use_distributed_optimizer=True,
            lr=train.learning_rate,
            weight_decay=train.weight_decay,
            adam_beta1=train.betas[0],
            adam_beta2=train.betas[1],
            adam_eps=train.eps,
            clip_grad=0.0,
        )
        # Megatron-Core exempts only parameters with one dim from weight decay, but an expert's bias is a 1-row matrix
        decoder = self.student.decoders[0]
        kinds = weight_kinds([decoder])
        names = {name for name, parameter in decoder.named_parameters() if kinds[parameter] == "vector"}
        blocks = [block for block in chunks.table.blocks if block.name in names]
        vectors = {chunks.models[block.chunk].get_parameter(block.parameter) for block in blocks}
        overrides: Any = {ParamKey(predicate=ParamPredicate("vector", vectors.__contains__)): {"wd_mult": 0.0}}
        optimizer = get_megatron_optimizer(settings, [*chunks.wrapped], overrides)
        with torch.no_grad():
            entries = trained_parameters(chunks, optimizer)
            require_partition(entries)
            for entry in entries:
                # Megatron-Core has initialised the optimizer's float32 weights with the rounded weights
                if (weight := chunks.unrounded.pop(entry.key, None)) is not None:
                    entry.master.copy_(entry.on_rank(weight))
        return optimizer

    # ---- gradients

    def zero_grad(self) -> None:
        self._zero_buffers()
        self.student.has_gradient = False

    def gradient_norm(self) -> float:
        return float(self._device_norm())

    def gradients_not_finite(self) -> list[str]:
        chunks = self.student.student
        names = [
            block.name
            for block, gradient in local_blocks(
                chunks.models, chunks.table, lambda one: getattr(one, "main_grad", None)
            )
            if not bool(gradient.isfinite().all())
        ]
        return list(dict.fromkeys(name for rank_names in self.student.ranks.gather(names) for name in rank_names))

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        chunks = self.student.student
        full: dict[Tensor, Tensor | None] = {
            entry.parameter: entry.collect(entry.on_rank(entry.parameter.main_grad), everywhere=True)  # type: ignore[attr-defined]
            for entry in trained_parameters(chunks, self.optimizer)
        }
        yield from gather(chunks.models, chunks.table, self.student.shapes, lambda one: full.get(one)).items()

    # ---- state

    @property
    def _state(self) -> MegatronState:
        return MegatronState(self.student, trained_parameters(self.student.student, self.optimizer), self.average)

    def _zero_buffers(self) -> None:
        for model in self.student.student.wrapped:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _device_norm(self) -> Tensor:
        self.optimizer.prepare_grads()
        return torch.as_tensor(self.optimizer.get_grad_norm(), dtype=torch.float32, device=self.student.device)
