"""Jobs for ranks: the state of `MegatronEngine`: its checkpoints, and the optimizer's shards and their replicas."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from kit.megatron_engine_jobs import Job, megatron_engine, micro_batches, run, values
from kit.megatron_weights_jobs import Case, laid_out
from kit.shard_ranks import Rank
from torch import Tensor

from stillhouse.data import StepMicroBatches
from stillhouse.megatron.engine import MegatronEngine
from stillhouse.megatron.trained import MOMENTS, TrainedParameter, require_partition, trained_parameters
from stillhouse.megatron.weights import gather
from stillhouse.objective.spec import parse_objective


def saved_and_loaded(rank: Rank, case: Case) -> dict[str, float]:
    """A job: the differences of weights after a step from those that another engine reads from the checkpoint."""
    with laid_out(case):
        engine, other = (megatron_engine(Job(case), parse_objective("cross_entropy")) for _ in range(2))
        step = StepMicroBatches(micro_batches(0, uneven=False))
        shards = engine.student.shard(step)
        engine.forward_backward(shards, [{}] * len(shards), step.normalizer)
        engine.update(0.1)
        shared = [tempfile.mkdtemp()]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0]) / "checkpoint" / "resume"
        engine.save(folder)
        dist.barrier()
        before = values(other)
        other.load(folder, [])
        weights, loaded = values(engine), values(other)
    assert not all(torch.equal(before[name], weights[name]) for name in weights)
    return {name: float((loaded[name] - weight).abs().max()) for name, weight in weights.items()}


def resumed_in_another_layout(rank: Rank, cases: tuple[Case, Case]) -> dict[str, float]:
    """A job: the differences between the float32 weights and moments that an engine in bfloat16 saves after a step
    and those that an engine in another layout loads, and between the latter's parameters and its rounded weights.
    """
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    folder, states = Path(shared[0]) / "checkpoint" / "resume", []
    for number, case in enumerate(cases):
        with laid_out(case):
            engine = megatron_engine(Job(case), parse_objective("cross_entropy"), autocast=torch.bfloat16)
            if number == 0:
                run(engine, Job(case, "cross_entropy"), steps=1)
                engine.save(folder)
                dist.barrier()
            else:
                engine.load(folder, [])
            states.append(full_state(engine))
            parameters = values(engine)
    saved, loaded = states
    differences = {name: float((loaded[name] - tensor).abs().max()) for name, tensor in saved.items()}
    for name, tensor in parameters.items():
        differences[f"parameter.{name}"] = float((tensor - loaded[f"weight.{name}"].bfloat16()).abs().max())
    return differences


def full_state(engine: MegatronEngine) -> dict[str, Tensor]:
    """Return the full tensors of the optimizer's float32 weights and moments. A collective of all ranks."""
    chunks, state = engine.student.student, dict[str, Tensor]()
    entries = trained_parameters(chunks, engine.optimizer)
    for kind in ("weight", *MOMENTS):
        full = {entry.parameter: entry.collect(entry.values(kind), everywhere=True) for entry in entries}
        tensors = gather(chunks.models, chunks.table, engine.student.shapes, full.get)
        state |= {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
    return state


def replicas_apart(rank: Rank, job: Job) -> tuple[float, float]:
    """A job: after two steps in bfloat16, the largest differences of this rank's parameters from the optimizer's
    float32 weights, rounded, and of these weights from those of the first rank, which has them as a replica.
    """
    with laid_out(job.case):
        engine = megatron_engine(job, parse_objective(job.loss), autocast=torch.bfloat16)
        run(engine, job, steps=2)
        rounding = replicas = 0.0
        for entry in trained_parameters(engine.student.student, engine.optimizer):
            weight = entry.collect(entry.master.detach(), everywhere=True)
            assert weight is not None
            rounding = max(rounding, float((entry.parameter - weight.bfloat16()).abs().max()))
            of_first = weight.clone()
            dist.broadcast(of_first, 0)
            replicas = max(replicas, float((of_first - weight).abs().max()))
    return rounding, replicas


def wrong_partition(rank: Rank, ranges: tuple[slice, slice]) -> str:
    """A job: the message for two data ranks that have these elements of a parameter of six."""
    group = dist.group.WORLD
    assert group is not None
    elements, parameter = ranges[group.rank()], torch.nn.Parameter(torch.zeros(2, 3))
    master = torch.zeros(elements.stop - elements.start)
    try:
        require_partition([TrainedParameter((0, "norm"), (), parameter, group, 0, elements, None, master)])
    except ValueError as error:
        return str(error)
    return ""
