"""Jobs for ranks: the rounding of steps of `MegatronEngine` in bfloat16, and its float32 weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from kit.megatron_engine_jobs import TRAIN, Job, decoder, megatron_engine, parts, run
from kit.megatron_frozen import one_process
from kit.megatron_weights_jobs import laid_out
from kit.shard_ranks import Rank
from torch import Tensor

from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.megatron.engine import MegatronEngine
from stillhouse.megatron.trained import trained_parameters
from stillhouse.megatron.weights import local_blocks
from stillhouse.models import Decoder
from stillhouse.objective.spec import parse_objective
from stillhouse.signals.weight_average import WeightAverage


@dataclass
class Distances:
    """Of the first step's gradients from those in float64, relative to the norm of the latter.

    float32, bfloat16: those of the other engine in one process. megatron: by the dtype of the residual stream.
    weights: the largest difference between the float32 weights before the first step and the loaded ones.
    """

    float32: float
    bfloat16: float
    megatron: dict[torch.dtype | None, float]
    weights: float


def distances(rank: Rank, job: Job) -> Distances:
    """A job: the rounding of a step that computes in bfloat16."""
    spec, case = parse_objective(job.loss), job.case

    def of_torch(dtype: torch.dtype, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
        models = [decoder(job, seed).to(dtype) for seed in range(2)]
        for model in models:
            model.config._experts_implementation = "eager"  # the others have no float64
        runner = one_process(models[0], None if job.adapter else models[1])
        engine = TorchEngine(runner, spec, train=TRAIN, autocast=autocast, parts=parts(job, runner))
        return run(engine, job, steps=1).gradients

    exact = of_torch(torch.float64)
    megatron: dict[torch.dtype | None, float] = {}
    weights = 0.0
    for residual_dtype in (None, torch.bfloat16):
        with laid_out(case):
            engine = megatron_engine(job, spec, autocast=torch.bfloat16, residual_dtype=residual_dtype)
            weights = max(weights, *map(float, unlike(engine, decoder(job, 0))))
            megatron[residual_dtype] = distance(run(engine, job, steps=1).gradients, exact)
    return Distances(
        distance(of_torch(torch.float32), exact),
        distance(of_torch(torch.float32, torch.bfloat16), exact),
        megatron,
        weights,
    )


def distance(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    squares = [float((gradients[name].double() - gradient).square().sum()) for name, gradient in exact.items()]
    return (sum(squares) / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5


def unlike(engine: MegatronEngine, expected: Decoder) -> Iterator[Tensor]:
    """Yield the differences of the optimizer's float32 weights from those of a full model."""
    chunks, tensors = engine.student.student, expected.state_dict()
    full = {
        entry.parameter: entry.collect(entry.master.detach(), everywhere=True)
        for entry in trained_parameters(chunks, engine.optimizer)
    }
    for block, part in local_blocks(chunks.models, chunks.table, full.get):
        yield (part - tensors[block.name][block.index]).abs().max()


def average_apart(rank: Rank, job: Job) -> float:
    """A job: the largest difference of an average of weights from that of the optimizer's float32 weights."""
    spec = parse_objective(job.loss)
    with laid_out(job.case):
        student = megatron_engine(job, spec, autocast=torch.bfloat16).student
        average = WeightAverage(student, decay=0.5)
        engine = MegatronEngine(student, spec, train=TRAIN, average=average)
        expected = float32_weights(engine)
        for _ in range(2):
            run(engine, job, steps=1)
            expected = {name: expected[name].lerp(weight, 0.5) for name, weight in float32_weights(engine).items()}
    return max(float((average.tensors[name] - weight).abs().max()) for name, weight in expected.items())


def float32_weights(engine: MegatronEngine) -> dict[str, Tensor]:
    return {
        "{}.{}".format(*entry.key): entry.collect(entry.master.detach(), everywhere=True)
        for entry in trained_parameters(engine.student.student, engine.optimizer)
    }
