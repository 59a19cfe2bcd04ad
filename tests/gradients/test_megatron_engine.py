"""Steps of the engine on Megatron-Core equal those of the other engine in one process.

Compared are each step's loss, metrics and gradient norm, held-out metrics, the first step's gradients, and the
weights after two steps with clipping and weight decay. megatron-core is the real one, on a CPU.
"""

import kit
import pytest
import torch
from kit import slow
from kit.shard_ranks import message_of, on_ranks

pytest.importorskip("megatron.core")

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from kit.megatron_engine_jobs import (
    TRAIN,
    Difference,
    Job,
    compare,
    decoder,
    distance,
    megatron_engine,
    one_process,
    parts,
    reordered,
    run,
    values,
)
from kit.megatron_weights_jobs import Case, laid_out
from kit.shard_ranks import Rank
from ruamel.yaml import YAML
from torch import Tensor

from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.megatron.adapter import LoraBranch
from stillhouse.megatron.build import build_megatron_student
from stillhouse.megatron.engine import MegatronEngine
from stillhouse.megatron.state import MOMENTS, TrainedParameter, require_partition, trained_parameters
from stillhouse.megatron.weights import gather, local_blocks
from stillhouse.models import Decoder
from stillhouse.models.adapter import ALL_LINEAR
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel import Layout, Mesh, ModelSource
from stillhouse.signals import WeightAverage
from stillhouse.tools.parity import worst


def refused_teacher(rank: Rank, family: str) -> str:
    """A job: the message for a teacher of a family without a conversion."""
    student = Case("qwen3", tensor=2)
    with laid_out(student):
        sources = [
            ModelSource(partial(decoder, Job(case), 0), name=name)
            for name, case in (("student", student), ("teacher", Case(family)))
        ]
        mesh = Mesh(student.degrees, torch.device("cpu"))
        return message_of(build_megatron_student, Layout(student.degrees), mesh, *sources)


@dataclass
class Distances:
    """Of the first step's gradients from those in float64, relative to the norm of the latter.

    float32, bfloat16: of the other engine in one process. megatron: by the dtype of the residual stream.
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


def unlike(engine: MegatronEngine, expected: Decoder) -> Iterator[Tensor]:
    """Yield the differences of the optimizer's float32 weights from those of a full model."""
    chunks, tensors = engine.student.student, expected.state_dict()
    full = {
        entry.parameter: entry.collect(entry.master.detach(), everywhere=True)
        for entry in trained_parameters(chunks, engine.optimizer)
    }
    for block, part in local_blocks(chunks.models, chunks.table, full.get):
        yield (part - tensors[block.name][block.index]).abs().max()


def float32_weights(engine: MegatronEngine) -> dict[str, Tensor]:
    return {
        "{}.{}".format(*entry.key): entry.collect(entry.master.detach(), everywhere=True)
        for entry in trained_parameters(engine.student.student, engine.optimizer)
    }


def without_an_adapters_part(rank: Rank, job: Job) -> str:
    """A job: the message for an adapter that is not applied to the projections to queries, keys and values."""
    added = LoraBranch.add

    def add(branch: LoraBranch, *arguments: Any) -> tuple[Tensor, Any]:
        return arguments[-1] if "k_proj" in branch.A else added(branch, *arguments)

    with laid_out(job.case), patch.object(LoraBranch, "add", add):
        return message_of(megatron_engine, job, parse_objective("cross_entropy"))


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


def masters_apart(rank: Rank, job: Job) -> tuple[float, float, float]:
    """A job: after two steps in bfloat16, the largest differences of this rank's parameters from the optimizer's
    float32 weights, rounded, of these weights from those of the first rank, which has them as a replica, and of an
    average of the student from the average of these weights.
    """
    spec = parse_objective(job.loss)
    with laid_out(job.case):
        student = megatron_engine(job, spec, autocast=torch.bfloat16).student
        average = WeightAverage(student, decay=0.5)
        engine = MegatronEngine(student, spec, train=TRAIN, average=average)
        expected = float32_weights(engine)
        for _ in range(2):
            run(engine, job, steps=1)
            expected = {name: expected[name].lerp(weight, 0.5) for name, weight in float32_weights(engine).items()}
        rounding = replicas = 0.0
        for entry in trained_parameters(student.student, engine.optimizer):
            weight = entry.collect(entry.master.detach(), everywhere=True)
            assert weight is not None
            rounding = max(rounding, float((entry.parameter - weight.bfloat16()).abs().max()))
            of_first = weight.clone()
            dist.broadcast(of_first, 0)
            replicas = max(replicas, float((of_first - weight).abs().max()))
    averaged = max(float((average.tensors[name] - weight).abs().max()) for name, weight in expected.items())
    return rounding, replicas, averaged


def wrong_partition(rank: Rank, ranges: tuple[slice, slice]) -> str:
    """A job: the message for two data ranks that have these elements of a parameter of six."""
    group = dist.group.WORLD
    assert group is not None
    elements, parameter = ranges[group.rank()], torch.nn.Parameter(torch.zeros(2, 3))
    master = torch.zeros(elements.stop - elements.start)
    return message_of(
        require_partition, [TrainedParameter((0, "norm"), (), parameter, group, 0, elements, None, master)]
    )


LIMIT = 180.0


def job_of(row: dict[str, Any]) -> Job:
    of_case = {key: row.pop(key) for key in Case.__dataclass_fields__ if key in row and key != "options"}
    return Job(Case(**of_case, options=row.pop("model", {})), **row)


TABLE = YAML(typ="safe").load(Path(kit.__file__).with_name("megatron_cases.yaml").read_text(encoding="utf-8"))
QUICK = list(map(job_of, TABLE["quick"]))
SLOW = list(map(job_of, [*TABLE["slow"], *(row | {"loss": "cross_entropy"} for row in TABLE["families"])]))
# in the order of the numbers of processes, so that cases share them
SLOW.sort(key=lambda job: job.case.processes)


@pytest.mark.parametrize("job", [*QUICK, *map(slow, SLOW)], ids=lambda job: job.name)
def test_steps_are_those_of_the_other_engine(job: Job) -> None:
    answer = on_ranks(compare, job.case.processes, job, limit=LIMIT)
    differences: list[Difference] = answer
    for rank, difference in enumerate(differences):
        assert not difference.decay, rank
        for sums in (*difference.sums, difference.evaluation):
            assert worst(sums.items())[1] <= 1e-5, (rank, sums)
        assert difference.norm <= 1e-4, rank
        assert worst(difference.gradients.items())[1] <= 1e-5, (rank, difference.gradients)
        assert worst(difference.weights.items())[1] <= 1e-4, (rank, difference.weights)


@pytest.mark.parametrize("model_type", ["qwen3", *map(slow, ["deepseek_v3", "gemma2", "gpt_oss"])])
def test_the_order_of_packed_documents_changes_nothing(model_type: str) -> None:
    """Hidden states of every token are the same, too, not only the sum of gradients."""
    job = Job(Case(model_type, data=2), "cross_entropy")
    for hidden, gradients in on_ranks(reordered, 2, job, limit=LIMIT):
        assert hidden <= 1e-5
        assert worst(gradients.items())[1] <= 1e-5


def test_an_adapter_is_proven_with_values_that_change_the_logits() -> None:
    """The first B of a run is 0."""
    job = Job(Case("qwen3", tensor=2, tied=True), adapter=ALL_LINEAR)
    for message in on_ranks(without_an_adapters_part, 2, job, limit=LIMIT):
        assert "the logits of Megatron-Core differ from those of transformers" in message


@pytest.mark.slow
def test_parameters_replicas_and_averages_are_of_the_float32_weights() -> None:
    """An average of weights that were rounded to bfloat16 would differ by up to 2e-3 of their size."""
    job = Job(Case("qwen3", data=4, replicas=2))
    for rounding, replicas, average in on_ranks(masters_apart, 4, job, limit=LIMIT):
        assert rounding == replicas == 0.0
        assert average < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        (Case("qwen3", tied=True, data=2, replicas=2), Case("qwen3", tied=True, pipeline=2, chunks=2)),
        (Case("gpt_oss", tensor=2, expert=2, sequence=True), Case("gpt_oss", data=2, expert=2)),
    ],
    ids=["replicas", "experts"],
)
def test_a_checkpoint_in_bfloat16_is_read_by_another_layout(cases: tuple[Case, Case]) -> None:
    """The float32 weights and the moments are the same to the bit, and the parameters are their rounding."""
    for differences in on_ranks(resumed_in_another_layout, 2, cases, limit=LIMIT):
        assert worst(differences.items())[1] == 0.0, differences


@pytest.mark.parametrize(
    ("ranges", "held"),
    [
        ((slice(0, 3), slice(3, 6)), ""),
        ((slice(0, 3), slice(4, 6)), "[(0, 3), (4, 6)]"),
        ((slice(0, 3), slice(2, 6)), "[(0, 3), (2, 6)]"),
        ((slice(0, 5), slice(5, 5)), "[(0, 5)]"),
    ],
)
def test_elements_that_no_data_rank_has_once_are_refused(ranges: tuple[slice, slice], held: str) -> None:
    expected = f"the data ranks have the elements {held} of parameter 'norm': expected each of its 6 elements once"
    assert on_ranks(wrong_partition, 2, ranges) == [expected if held else ""] * 2


@pytest.mark.slow
def test_the_model_that_has_no_conversion_is_named() -> None:
    for message in on_ranks(refused_teacher, 2, "gemma", limit=LIMIT):
        assert message.startswith("teacher.model: model_type 'gemma' has no conversion to Megatron-Core: expected")


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        Job(Case("qwen3", data=2)),
        Job(Case("qwen3_moe", data=2, expert=2), router_aux=0.5, fixed_experts=True, recompute=True),
        Job(Case("qwen3", tensor=2, sequence=True), adapter=ALL_LINEAR),
    ],
    ids=lambda job: job.name,
)
def test_bfloat16_is_as_near_to_float64_as_the_other_engine(job: Job) -> None:
    """The optimizer's weights are those of the folder, in float32, although the parameters are rounded.

    With experts, this is measured where rounding does not change which experts are chosen: both engines do that.
    """
    answer = on_ranks(distances, job.case.processes, job, limit=LIMIT)
    for of_rank in answer:
        assert of_rank.float32 < 1e-5 < of_rank.bfloat16
        for residual_dtype, limit in ((None, 1.25), (torch.bfloat16, 1.5)):  # Megatron-Core rounds the weights, too
            assert of_rank.megatron[residual_dtype] < limit * of_rank.bfloat16, of_rank
        assert of_rank.weights == 0
