"""`stillhouse plan --fit`: searches layouts, micro-batch sizes and recomputation for the fastest plans that fit.

1. Two processes run short steps on one device (`dry_run.py`), with and without recomputation.
2. From their counts, the time and the memory of every candidate are estimated by arithmetic.
3. The fastest candidates are run under their layouts with few layers on a stage, and the counts are extrapolated.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stillhouse.config import ParallelConfig, RunConfig, load_config
from stillhouse.plan.devices import LAUNCH, LINKS, PRODUCTS, TRAFFIC, Device
from stillhouse.plan.layout_plan import DryRuns, Job, Machine, Plan, planned_job, successful
from stillhouse.plan.prediction import FIRST, LAST, RankCounts, bubble_share

#: the number of layouts that are printed, and the number that are run
BEST, TRIED = 5, 8
#: the search divides sequences over context ranks only if they have at least this many tokens
LONG = 16384
#: the numbers of rows of a micro-batch that are tried
_ROWS = (1, 2, 4, 8)
#: a candidate is run only if its estimated memory is at most this multiple of the usable memory. The multiple is
#: above 1, because estimates are rough
_ROUGH = 1.15


@dataclass(frozen=True)
class Candidate:
    """A layout, the rows of a micro-batch, and whether the student's layers are recomputed in backward."""

    pipeline: int
    fsdp: int
    context: int
    tensor: int
    rows: int
    recompute: bool
    max_tokens: int
    sequences: int

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a data rank in a step."""
        return -(-self.sequences // (self.rows * self.fsdp))

    @property
    def parallel(self) -> dict[str, Any]:
        """The keys of the section `parallel` that this candidate decides."""
        degrees = {"pipeline": self.pipeline, "fsdp": self.fsdp, "context": self.context, "tensor": self.tensor}
        return degrees | {"replicate": 1, "expert": 1, "schedule": "1f1b"}

    def overrides(self, parallel: ParallelConfig, max_tokens: int) -> list[str]:
        """Return this candidate's overrides for a configuration with this section `parallel` and data.max_tokens."""
        values = {key: value for key, value in self.parallel.items() if value != getattr(parallel, key)}
        tokens = f"train.micro_batch_tokens={self.rows * max_tokens}"
        recompute = f"train.activation_checkpointing={str(self.recompute).lower()}"
        return [*(f"parallel.{key}={value}" for key, value in values.items()), tokens, recompute]

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the configuration with this candidate's values."""
        tokens = {"micro_batch_tokens": self.rows * self.max_tokens, "activation_checkpointing": self.recompute}
        return dict(config) | {"parallel": config["parallel"] | self.parallel, "train": config["train"] | tokens}


def fit(config: RunConfig, machine: Machine, document_tokens: int) -> list[Plan]:
    """Return plans of the fastest layouts that fit, the best first. The list is empty if no layout fits.

    The counts of a plan are from steps with few layers.

    Raises ConfigError for models that no layout can run.
    """
    job = planned_job(config, machine, document_tokens)
    planned = load_config(None, settings=job["config"])  # an on-policy run gets another data.max_tokens
    with DryRuns() as runs:
        rough = _measured(job, planned.data.max_tokens, runs)
        candidates = _candidates(
            planned.data.max_tokens, planned.train.tokens_per_step, machine, rough.student.layers
        )
        ranked = sorted((rough.seconds(candidate, machine), number) for number, candidate in enumerate(candidates))
        limit = _ROUGH * machine.device.usable
        chosen = [candidates[number] for _, number in ranked if rough.memory(candidates[number]) <= limit]
        plans = _estimated(job, chosen[:TRIED], machine, runs)
    plans = sorted((pair for pair in plans if pair[1].fits), key=lambda pair: pair[1].prediction.seconds)[:BEST]
    tokens = config.data.max_tokens
    return [replace(plan, overrides=candidate.overrides(config.parallel, tokens)) for candidate, plan in plans]


def _candidates(max_tokens: int, tokens_per_step: int, machine: Machine, layers: int) -> list[Candidate]:
    """Return all candidates whose degrees divide the ranks, with at least one micro-batch for each pipeline stage.

    layers: the number of the student's layers.
    """
    sequences = max(1, tokens_per_step // max_tokens)
    contexts = _divisors(machine.gpus_per_node) if max_tokens >= LONG else [1]
    candidates = []
    for pipeline in _divisors(machine.ranks):
        tensors = _divisors(min(machine.gpus_per_node, machine.ranks // pipeline))
        for tensor, context, rows in itertools.product(tensors, contexts, _ROWS):
            fsdp, rest = divmod(machine.ranks, pipeline * tensor * context)
            if rest or pipeline > layers or tensor * context > machine.gpus_per_node:
                continue
            if rows * fsdp * pipeline <= sequences:
                shape = (pipeline, fsdp, context, tensor, rows)
                candidates += [Candidate(*shape, recompute, max_tokens, sequences) for recompute in (False, True)]
    return candidates


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _measured(job: Job, tokens: int, runs: DryRuns) -> "Rough":
    """Run short steps on one device, with and without recomputation. tokens: the length of a sequence."""
    values = job["config"]
    degrees_of_one = dict.fromkeys(("pipeline", "fsdp", "context", "tensor", "replicate", "expert"), 1)
    parallel = values["parallel"] | degrees_of_one | {"gather_dtype": None, "offload": False, "schedule": "1f1b"}
    jobs = []
    for recompute in (False, True):
        train = {"micro_batch_tokens": tokens, "tokens_per_step": 2 * tokens, "activation_checkpointing": recompute}
        settings = values | {"parallel": parallel, "train": values["train"] | train}
        jobs.append(job | {"kind": "parts", "ranks": 1, "config": settings})
    *steps, shapes = [successful(answer) for answer in runs.answers([*jobs, jobs[0] | {"kind": "shapes"}])]
    plain, recomputed = ({name: RankCounts.from_json(part) for name, part in step.items()} for step in steps)
    models = {
        name: _Shape(shape["layers"], shape["layer_elements"], shape["head"] * (2 - shape["tied"]), shape["width"])
        for name, shape in shapes.items()
    }
    return Rough(plain, recomputed, models["student"], models.get("teacher", _Shape()), tokens)


def _estimated(
    job: Job, candidates: list[Candidate], machine: Machine, runs: DryRuns
) -> list[tuple[Candidate, Plan]]:
    """Run candidates with few layers, and return them with their plans, except for layouts that a run refuses."""
    jobs, owners = [], []
    for candidate in candidates:
        values = candidate.settings(job["config"])
        # more micro-batches would not change the peak memory: the first stage holds one micro-batch for each stage,
        # and the gradients of an earlier micro-batch
        shown = min(candidate.micro_batches, candidate.pipeline + 1)
        tokens = shown * candidate.rows * candidate.fsdp * candidate.max_tokens
        settings = values | {"train": values["train"] | {"tokens_per_step": tokens}}
        for rank in dict.fromkeys((0, machine.ranks - machine.ranks // candidate.pipeline)):
            jobs.append(job | {"kind": "estimated", "rank": rank, "config": settings})
            owners.append(candidate)
    plans = []
    for candidate, pairs in itertools.groupby(zip(owners, runs.answers(jobs), strict=True), lambda pair: pair[0]):
        answers = [answer for _, answer in pairs]
        if not any("error" in answer for answer in answers):
            counts = [_step_counts(RankCounts.from_json(answer), candidate) for answer in answers]
            ranks = dict(zip((FIRST, LAST), counts, strict=False))
            plans.append((candidate, Plan(machine, ranks, job["has_tower"], job["completions"])))
    return plans


def _step_counts(counts: RankCounts, candidate: Candidate) -> RankCounts:
    """Return the counts of a candidate's step. counts: the counts of a step with fewer micro-batches"""
    factor = candidate.micro_batches / counts.micro_batches

    def scaled(values: Mapping[str, float]) -> dict[str, float]:
        return {key: value * factor for key, value in values.items()}

    return replace(
        counts,
        micro_batches=candidate.micro_batches,
        tokens=candidate.sequences * candidate.max_tokens,
        model_operations=counts.model_operations / counts.tokens * candidate.sequences * candidate.max_tokens,
        kernels=round(counts.kernels * factor),
        traffic=counts.traffic * factor,
        products=scaled(counts.products),
        messages={key: round(count) for key, count in scaled(counts.messages).items()},
        sent=scaled(counts.sent),
    )


class _Shape(NamedTuple):
    """A model's number of layers, weight elements of a layer, weight elements of embedding and head (rest), width."""

    layers: int = 0
    layer: float = 0.0
    rest: float = 0.0
    width: int = 0


@dataclass(frozen=True)
class Rough:
    """Estimates candidates by arithmetic, from steps of two micro-batches of one row on one device.

    plain, recomputed: the counts of the short steps by name (`dry_run.parts`), without and with recomputation.
    row: the number of tokens of a row.
    """

    plain: Mapping[str, RankCounts]
    recomputed: Mapping[str, RankCounts]
    student: _Shape
    teacher: _Shape
    row: int

    def seconds(self, candidate: Candidate, machine: Machine) -> float:
        """Estimate the time of a step, in seconds."""
        steps = self.recomputed if candidate.recompute else self.plain
        student, teacher, device = self.student, self.teacher, machine.device
        one_layer, with_student, with_teacher = (
            _seconds(steps[name], device, candidate) for name in ("base", "student", "teacher")
        )
        all_layers = one_layer + (student.layers - 1) * (with_student - one_layer)
        all_layers += max(0, teacher.layers - 1) * (with_teacher - one_layer)
        share = candidate.micro_batches / candidate.pipeline
        computing = all_layers * share
        # a student layer has two sums over tensor ranks in forward, two in backward and two in a recomputed forward
        widths = (6 if candidate.recompute else 4) * student.layers * student.width
        summed = 2 * (widths + 2 * teacher.layers * teacher.width) * 2 * candidate.rows * self.row / candidate.context
        exposed = share * (candidate.tensor - 1) / candidate.tensor * summed / (device.nvlink * LINKS)
        # FSDP's messages on all stages: two gathers and one reduction of student layers, one gather of teacher layers
        elements, teacher_elements = (model.layers * model.layer + model.rest for model in (student, teacher))
        gathered = (12 * elements + 2 * teacher_elements) / candidate.tensor
        sharded = gathered * share if candidate.fsdp * candidate.context > 1 else 0.0
        groups_per_machine = max(1, machine.gpus_per_node // (candidate.tensor * candidate.context))
        is_local = machine.ranks <= machine.gpus_per_node * candidate.pipeline
        speed = LINKS * (device.nvlink if is_local else min(device.nvlink, device.network * groups_per_machine))
        exposed += max(0.0, sharded / speed - computing)
        return (computing + exposed) / (1 - bubble_share(candidate.pipeline, "1f1b", candidate.micro_batches))

    def memory(self, candidate: Candidate) -> float:
        """Estimate the largest memory of a rank, in bytes."""
        steps = self.recomputed if candidate.recompute else self.plain
        student, teacher, base = self.student, self.teacher, steps["base"]
        shards = candidate.fsdp * candidate.context * candidate.tensor
        rest, teacher_rest = (model.rest / max(1, candidate.pipeline / 2) for model in (student, teacher))
        states = 16 * (student.layers / candidate.pipeline * student.layer + rest)
        states += 2 * (teacher.layers / candidate.pipeline * teacher.layer + teacher_rest)
        gathered = (8 * (student.layer + rest / 2) + 2 * teacher.rest / 2) / candidate.tensor
        tokens = candidate.rows / (candidate.tensor * candidate.context)
        in_flight = min(candidate.pipeline, candidate.micro_batches)
        per_layer = steps["student"].peak.get("activations", 0) - base.peak.get("activations", 0)
        layers = student.layers / candidate.pipeline
        activations = tokens * (layers * in_flight * per_layer + base.peak.get("activations", 0))
        tile = base.peak.get("tile", 0)
        return states / shards + gathered * (candidate.fsdp * candidate.context > 1) + activations + tile


def _seconds(step: RankCounts, device: Device, candidate: Candidate) -> float:
    """Return the seconds of a candidate's micro-batch. step: the counts of two micro-batches of one row"""
    products = sum(step.products.values()) / (device.bfloat16 * PRODUCTS)
    computing = products + step.traffic / (device.bandwidth * TRAFFIC)
    return max(computing * candidate.rows / (candidate.tensor * candidate.context), step.kernels * LAUNCH) / 2
