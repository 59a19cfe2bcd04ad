"""`stillhouse plan --fit`: searches layouts, sizes of micro-batches and recomputation for the fastest that fits.

1. Two processes run short steps on one device (`few_layers.py`), with and without recomputation.
2. From their counts, the time and the memory of every candidate are estimated by arithmetic.
3. The fastest candidates are run with few layers on a stage, under their layouts, and their counts are added up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stillhouse.config import ParallelConfig, RunConfig, load_config
from stillhouse.plan.devices import LAUNCH, LINKS, PRODUCTS, TRAFFIC, Device
from stillhouse.plan.layout_plan import DryRuns, Job, Machine, Plan, has_tower, planned_job, successful
from stillhouse.plan.prediction import bubble_share, predict
from stillhouse.plan.rank_counts import FIRST, LAST, LayoutSize, RankCounts

#: the number of layouts that are printed, and the number that are run
BEST, TRIED = 5, 8
#: sequences of at least so many tokens may be divided over ranks
LONG = 16384
#: the most rows of a micro-batch
_ROWS = 8
#: the largest part of the memory that a candidate's estimate may need, because the estimate is rough
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
        """The number of a data rank in a step."""
        return -(-self.sequences // (self.rows * self.fsdp))

    @property
    def layout(self) -> LayoutSize:
        axes = {"pipeline": self.pipeline, "replicate": 1, "fsdp": self.fsdp, "context": self.context}
        return LayoutSize(axes | {"tensor": self.tensor, "expert": 1}, self.pipeline, "1f1b", self.pipeline - 1)

    @property
    def parallel(self) -> dict[str, Any]:
        """The keys of the section `parallel` that this candidate decides."""
        degrees = {"pipeline": self.pipeline, "fsdp": self.fsdp, "context": self.context, "tensor": self.tensor}
        return degrees | {"replicate": 1, "expert": 1, "schedule": "1f1b"}

    def overrides(self, parallel: ParallelConfig, max_tokens: int) -> list[str]:
        """The candidate as arguments of a command that reads a configuration with these values from a file."""
        values = {key: value for key, value in self.parallel.items() if value != getattr(parallel, key)}
        tokens = f"train.micro_batch_tokens={self.rows * max_tokens}"
        recompute = f"train.activation_checkpointing={str(self.recompute).lower()}"
        return [*(f"parallel.{key}={value}" for key, value in values.items()), tokens, recompute]

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration with this candidate's values."""
        tokens = {"micro_batch_tokens": self.rows * self.max_tokens, "activation_checkpointing": self.recompute}
        return dict(config) | {"parallel": config["parallel"] | self.parallel, "train": config["train"] | tokens}


@dataclass(frozen=True)
class Fit:
    """A layout and its plan, from steps with few layers. overrides: of the configuration, which give the layout."""

    overrides: list[str]
    plan: Plan


def fit(config: RunConfig, machine: Machine, document_tokens: int) -> list[Fit]:
    """Return the fastest layouts that fit, the best first; empty if none fits.

    Raises ConfigError for models that no layout can run.
    """
    job = planned_job(config, machine, document_tokens)
    planned = load_config(None, settings=job["config"])  # an on-policy run has other sequences
    with DryRuns() as runs:
        rough = _measured(job, planned.data.max_tokens, runs)
        candidates = _candidates(planned.data.max_tokens, planned.train.tokens_per_step, machine, rough)
        ranked = sorted((rough.seconds(candidate, machine), number) for number, candidate in enumerate(candidates))
        limit = _ROUGH * machine.device.usable
        chosen = [candidates[number] for _, number in ranked if rough.memory(candidates[number]) <= limit]
        plans = list(_estimated(job, chosen[:TRIED], machine, runs))
    fits = [
        Fit(candidate.overrides(config.parallel, config.data.max_tokens), plan)
        for candidate, plan in plans
        if plan.fits
    ]
    return sorted(fits, key=lambda fit: fit.plan.prediction.seconds)[:BEST]


def _candidates(max_tokens: int, tokens_per_step: int, machine: Machine, rough: "Rough") -> list[Candidate]:
    """Return all candidates whose degrees divide the ranks, and whose micro-batches suffice for the pipeline."""
    sequences = max(1, tokens_per_step // max_tokens)
    contexts = _divisors(machine.gpus_per_node) if max_tokens >= LONG else [1]
    candidates = []
    for pipeline in _divisors(machine.ranks):
        for tensor in _divisors(min(machine.gpus_per_node, machine.ranks // pipeline)):
            for context in contexts:
                fsdp, rest = divmod(machine.ranks, pipeline * tensor * context)
                if rest or pipeline > rough.layers("student") or tensor * context > machine.gpus_per_node:
                    continue
                for rows in (rows for rows in (1, 2, 4, _ROWS) if rows * fsdp * pipeline <= sequences):
                    shape = (pipeline, fsdp, context, tensor, rows)
                    candidates += [Candidate(*shape, recompute, max_tokens, sequences) for recompute in (False, True)]
    return candidates


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _measured(job: Job, tokens: int, runs: DryRuns) -> "Rough":
    """Run short steps on one device, with and without recomputation. tokens: of a sequence."""
    values = job["config"]
    degrees_of_one = dict.fromkeys(("pipeline", "fsdp", "context", "tensor", "replicate", "expert"), 1)
    parallel = values["parallel"] | degrees_of_one | {"gather_dtype": None, "offload": False, "schedule": "1f1b"}
    jobs = []
    for recompute in (False, True):
        train = {"micro_batch_tokens": tokens, "tokens_per_step": 2 * tokens, "activation_checkpointing": recompute}
        settings = values | {"parallel": parallel, "train": values["train"] | train}
        jobs.append(job | {"kind": "parts", "ranks": 1, "config": settings})
    *steps, shapes = [successful(answer) for answer in runs.answers([*jobs, jobs[0] | {"kind": "shapes"}])]
    counts = [{name: RankCounts.from_json(part) for name, part in answer.items()} for answer in steps]
    return Rough(counts[0], counts[1], shapes, tokens)


def _estimated(
    job: Job, candidates: list[Candidate], machine: Machine, runs: DryRuns
) -> Iterator[tuple[Candidate, Plan]]:
    """Run candidates with few layers. Layouts that a run refuses are left out."""
    jobs, owners = [], []
    for candidate in candidates:
        values = candidate.settings(job["config"])
        # the first stage holds as many micro-batches as there are stages, and the gradients of one before them
        shown = min(candidate.micro_batches, candidate.pipeline + 1)
        tokens = shown * candidate.rows * candidate.fsdp * candidate.max_tokens
        settings = values | {"train": values["train"] | {"tokens_per_step": tokens}}
        last = machine.ranks - machine.ranks // candidate.pipeline
        for rank in dict.fromkeys((0, last)):
            jobs.append(job | {"kind": "estimated", "rank": rank, "config": settings})
            owners.append((candidate, rank))
    answers = runs.answers(jobs)
    for candidate in candidates:
        rank_answers = {
            rank: answer for (owner, rank), answer in zip(owners, answers, strict=True) if owner is candidate
        }
        if any("error" in answer for answer in rank_answers.values()):
            continue
        counts = {rank: RankCounts.from_json(answer) for rank, answer in rank_answers.items()}
        ranks = {LAST if rank else FIRST: _step_counts(step, candidate) for rank, step in counts.items()}
        prediction = predict(ranks, machine.device, machine.gpus_per_node)
        yield candidate, Plan(machine, ranks, prediction, has_tower(job), job["completions"])


def _step_counts(counts: RankCounts, candidate: Candidate) -> RankCounts:
    """Return the counts of all micro-batches of a step."""
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


@dataclass(frozen=True)
class Rough:
    """Estimates of candidates by arithmetic, from steps of two micro-batches of one row on one device.

    plain, recomputed: the counts of the steps with few layers, by name (`few_layers.parts`).
    shapes: of the models, by section.
    """

    plain: Mapping[str, RankCounts]
    recomputed: Mapping[str, RankCounts]
    shapes: Mapping[str, Mapping[str, Any]]
    row: int

    def layers(self, section: str) -> int:
        return self.shapes[section]["layers"] if section in self.shapes else 0

    def seconds(self, candidate: Candidate, machine: Machine) -> float:
        """Estimate the time of a step."""
        steps = self.recomputed if candidate.recompute else self.plain
        base, device = steps["base"], machine.device
        alone, with_student, with_teacher = (
            _seconds(step, device, candidate) for step in (base, steps["student"], steps["teacher"])
        )
        student, teacher = self.layers("student"), self.layers("teacher")
        whole = alone + (student - 1) * (with_student - alone) + max(0, teacher - 1) * (with_teacher - alone)
        computing = whole * candidate.micro_batches / candidate.pipeline
        exposed = self._tensor_seconds(candidate, device) * candidate.micro_batches / candidate.pipeline
        sharded = self._gathered_bytes(candidate) * candidate.micro_batches / candidate.pipeline
        groups_per_machine = max(1, machine.gpus_per_node // (candidate.tensor * candidate.context))
        is_local = machine.ranks <= machine.gpus_per_node * candidate.pipeline
        speed = LINKS * (device.nvlink if is_local else min(device.nvlink, device.network * groups_per_machine))
        exposed += max(0.0, sharded / speed - computing)
        return (computing + exposed) / (1 - bubble_share(candidate.layout, candidate.micro_batches))

    def memory(self, candidate: Candidate) -> float:
        """Estimate the largest memory of a rank."""
        steps = self.recomputed if candidate.recompute else self.plain
        base = steps["base"]
        student, teacher = (self.layers(section) / candidate.pipeline for section in ("student", "teacher"))
        shards = candidate.fsdp * candidate.context * candidate.tensor
        rest = self._rest("student") / max(1, candidate.pipeline / 2)
        states = 16 * (student * self._layer("student") + rest)
        states += 2 * (teacher * self._layer("teacher") + self._rest("teacher") / max(1, candidate.pipeline / 2))
        gathered = (8 * (self._layer("student") + rest / 2) + 2 * self._rest("teacher") / 2) / candidate.tensor
        tokens = candidate.rows / (candidate.tensor * candidate.context)
        in_flight = min(candidate.pipeline, candidate.micro_batches)
        per_layer = steps["student"].peak.get("activations", 0) - base.peak.get("activations", 0)
        activations = tokens * (student * in_flight * per_layer + base.peak.get("activations", 0))
        tile = base.peak.get("tile", 0)
        return states / shards + gathered * (candidate.fsdp * candidate.context > 1) + activations + tile

    def _layer(self, section: str) -> float:
        return self.shapes[section]["layer_elements"] if section in self.shapes else 0.0

    def _rest(self, section: str) -> float:
        """The elements of the embedding and of the head."""
        if section not in self.shapes:
            return 0.0
        shape = self.shapes[section]
        return shape["head"] * (1 if shape["tied"] else 2)

    def _tensor_seconds(self, candidate: Candidate, device: Device) -> float:
        """The sums over tensor ranks of a micro-batch: two of a layer in forward, and two in backward."""
        if candidate.tensor == 1:
            return 0.0
        tokens = 2 * candidate.rows * self.row / candidate.context
        others = (candidate.tensor - 1) / candidate.tensor
        sums = {"student": (6 if candidate.recompute else 4), "teacher": 2}
        total = sum(
            sums[section] * self.layers(section) * tokens * 2 * shape["width"]
            for section, shape in self.shapes.items()
        )
        return others * total / (device.nvlink * LINKS)

    def _gathered_bytes(self, candidate: Candidate) -> float:
        """The bytes of FSDP's messages of a micro-batch over all stages: two gathers of a student's layer and a
        reduction, and one gather of a teacher's.
        """
        if candidate.fsdp * candidate.context == 1:
            return 0.0
        student = 12 * (self.layers("student") * self._layer("student") + self._rest("student"))
        teacher = 2 * (self.layers("teacher") * self._layer("teacher") + self._rest("teacher"))
        return (student + teacher) / candidate.tensor


def _seconds(step: RankCounts, device: Device, candidate: Candidate) -> float:
    """The time of one of a candidate's micro-batches, from a step of two micro-batches of one row."""
    products = sum(step.products.values()) / (device.bfloat16 * PRODUCTS)
    computing = products + step.traffic / (device.bandwidth * TRAFFIC)
    return max(computing * candidate.rows / (candidate.tensor * candidate.context), step.kernels * LAUNCH) / 2
