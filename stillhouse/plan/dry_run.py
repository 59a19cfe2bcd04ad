"""Dry-runs one rank in this process. Each kind of job of `child.py` has a function, which returns the answer.

In place of a step with all layers, `estimated` runs three short steps: with one layer of each model on a stage, with
a second layer of the student, and with a second layer of the teacher. All counts are linear in the numbers of layers;
memory is linear if its peak is at the same point of each step. All layers of a model must be alike.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from stillhouse.config import ConfigError, load_config
from stillhouse.display import name_list
from stillhouse.dry_run import dry_run
from stillhouse.engine.optimizer import require_optimizer
from stillhouse.engine.schedule import make_step_schedule
from stillhouse.libraries import imported
from stillhouse.models.document_packing import KERNELS, ROWS
from stillhouse.models.families import ModelFacts
from stillhouse.parallel import SCHEMES, empty_decoder
from stillhouse.parallel.stages import Cost, Stage, cost_of, split
from stillhouse.plan.devices import DEVICES
from stillhouse.plan.prediction import LayoutSize, RankCounts
from stillhouse.plan.rank_step import PlannedRank, rank_steps
from stillhouse.run.preflight import require_adapters
from stillhouse.run.setup import configured_layout, require_sharing

#: the fields of `RankCounts` that are mappings
_MAPS = ("waits", "pageable", "products", "messages", "sent", "peak")
#: the number of layers on a stage in the short steps: (student, teacher)
_SIZES = {"base": (1, 1), "student": (2, 1), "teacher": (1, 2)}


def planned(job: Mapping[str, Any]) -> PlannedRank:
    """Return a job's rank. Raises ConfigError for an impossible layout, and for layers that a plan cannot run."""
    config = load_config(None, settings=job["config"])
    layout = configured_layout(config.parallel, job["ranks"])
    parallel = config.parallel.model_copy(update={"fsdp": layout.degrees.fsdp})
    config = config.model_copy(update={"parallel": parallel})
    require_sharing(layout, torch.device("cuda"))
    require_optimizer(config.train, layout)
    result = PlannedRank(config, job["rank"], job["ranks"], job["device"], job["document_tokens"])
    for section, model in result.models.items() if config.data.packing != ROWS else ():
        if states := ModelFacts(empty_decoder(model).config).layers_with_state:
            raise ConfigError(
                "data.packing",
                f"got {config.data.packing}: {section}.model has layers ({name_list(states)}) that need kernels of "
                f"other packages, such as {name_list(KERNELS.values())}, to separate packed documents, and a plan "
                f"does not run these kernels: expected data.packing={ROWS}, which a run without them uses",
            )
    if config.student.adapter is not None:
        require_adapters(config.student)
        imported("peft", "student.adapter")  # before `fake_cuda`: peft imports bitsandbytes, which asks for CUDA
    return result


def whole(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a rank, for JSON. Raises the errors of a run whose models do not fit their layout."""
    rank = planned(job)
    return asdict(_counted(rank, rank.operations_per_token))


def shapes(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `Cost` and the sizes of each model, by section. Raises ConfigError if layers of a model differ."""
    answer = {}
    for section, model in planned(job).models.items():
        decoder = empty_decoder(model)
        layers = decoder.layers()
        forms = {tuple(sorted((name, weight.shape) for name, weight in layer.named_parameters())) for layer in layers}
        if len(forms) > 1 or len(set(getattr(decoder.config, "layer_types", None) or ())) > 1:
            raise ConfigError(
                f"{section}.model",
                "its layers differ, and --fit runs only a few of them: expected a plan without --fit",
            )
        cost = cost_of(decoder, 3 if section == "student" else 1)
        elements = sum(weight.numel() for weight in layers[0].parameters())
        answer[section] = asdict(cost) | {"layer_elements": elements, "width": decoder.width, "tied": decoder.tied}
    return answer


def parts(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of the three short steps, by name, for JSON."""
    return {name: asdict(counts) for name, counts in _short_steps(planned(job)).items()}


def estimated(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a rank with all layers, from the three short steps.

    Raises the errors of a run whose models do not fit their layout.
    """
    rank = planned(job)
    layout, pipeline = rank.layout, rank.layout.degrees.pipeline
    costs = [
        cost_of(empty_decoder(model), 3 if section == "student" else 1) for section, model in rank.models.items()
    ]
    stages = split(layout.stages, costs[0], costs[1] if len(costs) > 1 else None)
    numbers = [0]
    if layout.stages > 1:
        numbers = SCHEMES[layout.schedule].stages_of(rank.rank * pipeline // rank.ranks, pipeline)
    student = sum(len(stages[number].student) for number in numbers) / len(numbers) - 1
    teacher = sum(len(stages[number].teacher) for number in numbers) / len(numbers) - 1
    steps = _short_steps(rank)
    base = steps["base"]
    # for student and teacher: (the mean number of layers on a stage) − 1, and the step with two layers of this model
    second_layers = [(student, steps["student"]), (teacher, steps["teacher"])]

    def total(before: Any, others: list[Any]) -> Any:
        """Extrapolate a count: for each layer of a model after the first, add as much as the second layer added."""
        if isinstance(before, Mapping):
            keys = dict.fromkeys(key for counts in (before, *others) for key in counts)
            return {key: total(before.get(key, 0), [other.get(key, 0) for other in others]) for key in keys}
        pairs = zip(second_layers, others, strict=True)
        return before + sum(layers * (other - before) for (layers, _), other in pairs)

    names = ("kernels", "traffic", *_MAPS)
    sums = {name: total(getattr(base, name), [getattr(step, name) for _, step in second_layers]) for name in names}
    return asdict(replace(base, model_operations=base.tokens * rank.operations_per_token, **sums))


def _counted(planned: PlannedRank, model_operations: float = 0.0) -> RankCounts:
    """Run a step of a rank, and return its counts. model_operations: the number of operations for each token"""
    config, layout = planned.config, planned.layout
    data, rows = layout.degrees.data, max(1, config.train.tokens_per_step // config.data.max_tokens)
    schedule = make_step_schedule(config.train, rows, config.data.max_tokens, data, layout.stages)
    rows_of_all = schedule.rows_per_micro_batch * data
    # the first step is not counted, because some of its work is done only once; one micro-batch per stage suffices
    step_rows = [min(rows, rows_of_all * layout.stages), rows]
    tokens = [count * config.data.max_tokens for count in step_rows]
    _, counts = rank_steps(planned, DEVICES[planned.device].properties(), tokens)
    return RankCounts(
        rank=planned.rank,
        layout=LayoutSize(asdict(layout.degrees), layout.stages, layout.schedule, layout.last_rank),
        micro_batches=-(-rows // rows_of_all),
        tokens=tokens[-1],
        model_operations=tokens[-1] * model_operations,
        kernels=sum(counts.kernels.values()),
        traffic=counts.traffic,
        **{name: dict(getattr(counts, name)) for name in _MAPS},
    )


def _short_steps(planned: PlannedRank) -> dict[str, RankCounts]:
    steps = {
        name: _short_step(planned, *sizes)
        for name, sizes in _SIZES.items()
        if name != "teacher" or name in planned.models
    }
    return {"teacher": steps["base"]} | steps


def _short_step(planned: PlannedRank, student: int, teacher: int) -> RankCounts:
    """Return the counts of a step of models that have these numbers of layers on each stage."""
    config, stages = planned.config, planned.layout.stages

    def even(count: int, student_cost: Cost, teacher_cost: Cost | None) -> list[Stage]:
        layers = 0 if teacher_cost is None else teacher
        return [
            Stage(n, count, range(n * student, (n + 1) * student), range(n * layers, (n + 1) * layers))
            for n in range(count)
        ]

    with tempfile.TemporaryDirectory() as parent, dry_run({split: even}):
        changed = {}
        for section, model in planned.models.items():
            folder = Path(parent) / section
            _write_short_model(model, folder, stages * (student if section == "student" else teacher))
            changed[section] = getattr(config, section).model_copy(update={"model": str(folder)})
        return _counted(replace(planned, config=config.model_copy(update=changed)))


def _write_short_model(model: str, folder: Path, layers: int) -> None:
    """Write the configuration of a model with fewer layers."""
    values = json.loads((Path(model) / "config.json").read_text())
    values["tie_word_embeddings"] = empty_decoder(model).tied  # weights with different values are not tied
    language = values.get("text_config", values)  # the section of a vision-language model
    for key, value in language.items():
        if isinstance(value, list) and key.endswith("layer_types"):
            language[key] = [value[0]] * layers
    language["num_hidden_layers"] = layers
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
