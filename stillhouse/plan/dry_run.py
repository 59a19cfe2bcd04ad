"""The dry run of one rank in this process, from a job of `child.py` to its answer."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from stillhouse.config import ConfigError, RunConfig, StudentConfig, TeacherConfig, TrainConfig, load_config
from stillhouse.display import name_list
from stillhouse.engine.optimizer import require_optimizer
from stillhouse.engine.schedule import make_step_schedule
from stillhouse.libraries import imported
from stillhouse.models.document_packing import KERNELS, ROWS
from stillhouse.models.families import ModelFacts
from stillhouse.parallel import Layout, empty_decoder
from stillhouse.parallel.stages import cost_of
from stillhouse.plan.devices import DEVICES
from stillhouse.plan.rank_counts import LayoutSize, RankCounts
from stillhouse.plan.rank_step import rank_steps
from stillhouse.run.preflight import require_adapters
from stillhouse.run.setup import configured_layout, require_sharing


def whole(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a rank as JSON. Raises the errors of a run whose models do not fit their layout."""
    config, layout = planned(job)
    return counted(job, config, layout, operations_per_token(config.student, config.teacher_sections)).as_json()


def planned(job: Mapping[str, Any]) -> tuple[RunConfig, Layout]:
    """Return the configuration with all degrees of its layout. Raises ConfigError for an impossible layout."""
    config = load_config(None, settings=job["config"])
    layout = configured_layout(config.parallel, job["ranks"])
    parallel = config.parallel.model_copy(update={"fsdp": layout.degrees.fsdp})
    config = config.model_copy(update={"parallel": parallel})
    require_sharing(layout, torch.device("cuda"))
    require_optimizer(config.train, layout)
    teachers = config.teacher_sections.items()
    models = {"student": config.student.model} | {key: teacher.model for key, teacher in teachers if teacher.model}
    _require_separable(config.data.packing, models)
    if config.student.adapter is not None:
        require_adapters(config.student)
        imported("peft", "student.adapter")  # with bitsandbytes, which asks torch for CUDA when it is imported
    return config, layout


def _require_separable(packing: str, models: Mapping[str, str]) -> None:
    """Raise ConfigError for packed rows of a model with layers that only kernels of other packages keep apart.

    packing: `data.packing`. models: by the keys of their sections.
    """
    if packing == ROWS:
        return
    for section, model in models.items():
        if states := ModelFacts(empty_decoder(model).config).layers_with_state:
            raise ConfigError(
                "data.packing",
                f"got {packing}: {section}.model has layers ({name_list(states)}) that only kernels of "
                f"other packages, such as {name_list(KERNELS.values())}, keep apart in packed rows, and a plan runs "
                f"none of them: expected data.packing={ROWS}, which a run without them uses",
            )


def counted(job: Mapping[str, Any], config: RunConfig, layout: Layout, model_operations: float = 0.0) -> RankCounts:
    """Run a step of the job's rank under a configuration. model_operations: for each token."""
    tokens, micro_batches, fewest_tokens = _sizes(config.train, config.data.max_tokens, layout)
    properties = DEVICES[job["device"]].properties()
    # what is done in a first step alone is not counted
    _, steady = rank_steps(config, job["rank"], properties, job["document_tokens"], [fewest_tokens, tokens])
    counts = steady.counts
    return RankCounts(
        rank=job["rank"],
        layout=LayoutSize(asdict(layout.degrees), layout.stages, layout.schedule, layout.last_rank),
        micro_batches=micro_batches,
        tokens=tokens,
        model_operations=tokens * model_operations,
        kernels=sum(counts.kernels.values()),
        waits=dict(counts.waits),
        pageable=dict(counts.pageable),
        products=dict(counts.products),
        traffic=counts.traffic,
        messages=dict(counts.messages),
        sent=dict(counts.sent),
        peak=dict(counts.peak),
    )


def _sizes(train: TrainConfig, max_tokens: int, layout: Layout) -> tuple[int, int, int]:
    """Return the tokens of a step over all ranks, the micro-batches of a data rank, and the tokens of a step with as
    few micro-batches as there are stages.
    """
    data, rows = layout.degrees.data, max(1, train.tokens_per_step // max_tokens)
    schedule = make_step_schedule(train, rows, max_tokens, data, layout.stages)
    rows_of_all = schedule.rows_per_micro_batch * data
    return rows * max_tokens, -(-rows // rows_of_all), min(rows, rows_of_all * layout.stages) * max_tokens


def operations_per_token(student: StudentConfig, teachers: Mapping[str, TeacherConfig]) -> float:
    """Return two operations for each weight that a token uses: once in a teacher; in the student three times, or
    twice if an adapter is trained.
    """
    costs = [cost_of(empty_decoder(student.model), 3 if student.adapter is None else 2)]
    for teacher in teachers.values():
        if teacher.model is not None:
            costs.append(cost_of(empty_decoder(teacher.model), 1))
        elif teacher.signals_from == "student":
            costs.append(cost_of(empty_decoder(student.model), 1))
    return sum(2 * cost.passes * (cost.layers * cost.layer + cost.head) for cost in costs)
