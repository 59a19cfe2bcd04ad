"""The counts of a rank from steps of models with few layers.

A step is run with one layer of each model on a stage, with a second layer of the student, and with a second layer
of the teacher. All counts are linear in the numbers of layers. Memory is, as long as its peak is at the same moment
of the step. So the counts of all layers follow from three short steps. The layers of a model must be alike.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stillhouse.config import ConfigError, RunConfig
from stillhouse.dry_run import dry_run
from stillhouse.models import Decoder
from stillhouse.parallel import SCHEMES, Layout, empty_decoder
from stillhouse.parallel.stages import Cost, Stage, cost_of, split
from stillhouse.plan.dry_run import counted, operations_per_token, planned
from stillhouse.plan.rank_counts import RankCounts

#: the counts with several values
_MAPS = ("waits", "pageable", "products", "messages", "sent", "peak")
#: the number of layers on a stage in the steps: (student, teacher)
_SIZES = {"base": (1, 1), "student": (2, 1), "teacher": (1, 2)}


def shapes(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes of both models, by section: `Cost`, and the width. Raises ConfigError if layers differ."""
    config, _ = planned(job)
    return {name: _shape(name, decoder) for name, decoder in _decoders(config).items()}


def parts(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of the three steps, by name, as JSON."""
    config, layout = planned(job)
    return {name: counts.as_json() for name, counts in _parts(job, config, layout).items()}


def estimated(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a rank with all layers, from three steps.

    Raises the errors of a run whose models do not fit their layout.
    """
    config, layout = planned(job)
    decoders = _decoders(config)
    costs = [cost_of(decoder, 3 if name == "student" else 1) for name, decoder in decoders.items()]
    stages = split(layout.stages, costs[0], costs[1] if len(costs) > 1 else None)
    scheme, pipeline = SCHEMES[layout.schedule], layout.degrees.pipeline
    numbers = scheme.stages_of(job["rank"] * pipeline // job["ranks"], pipeline) if layout.stages > 1 else [0]
    per_rank = len(numbers)
    student = sum(len(stages[number].student) for number in numbers) / per_rank - 1
    teacher = sum(len(stages[number].teacher) for number in numbers) / per_rank - 1
    steps = _parts(job, config, layout)
    base = steps["base"]
    total = added(base, (student, difference(steps["student"], base)), (teacher, difference(steps["teacher"], base)))
    return replace(
        total, model_operations=base.tokens * operations_per_token(config.student, config.teacher_sections)
    ).as_json()


def difference(left: RankCounts, right: RankCounts) -> dict[str, Any]:
    """Return what a step counts more than another one, by the name of the count."""
    result: dict[str, Any] = {"kernels": left.kernels - right.kernels, "traffic": left.traffic - right.traffic}
    for field in _MAPS:
        ours, others = getattr(left, field), getattr(right, field)
        result[field] = {key: ours.get(key, 0) - others.get(key, 0) for key in {**ours, **others}}
    return result


def added(counts: RankCounts, *parts: tuple[float, Mapping[str, Any]]) -> RankCounts:
    """Return counts with multiples of differences."""
    for factor, part in parts:
        values: dict[str, Any] = {}
        for field, more in part.items():
            before = getattr(counts, field)
            if isinstance(more, Mapping):
                values[field] = {key: before.get(key, 0) + factor * more.get(key, 0) for key in {**before, **more}}
            else:
                values[field] = before + factor * more
        counts = replace(counts, **values)
    return counts


def _parts(job: Mapping[str, Any], config: RunConfig, layout: Layout) -> dict[str, RankCounts]:
    sizes = _SIZES if config.teacher is not None else {"base": (1, 1), "student": (2, 1)}
    steps = {}
    for name, (student, teacher) in sizes.items():
        with _few_layers(config, layout.stages, student, teacher) as small:
            steps[name] = counted(job, small, layout)
    return {"teacher": steps["base"]} | steps


def _shape(section: str, decoder: Decoder) -> dict[str, Any]:
    layers = decoder.layers()
    forms = {tuple(sorted((name, weight.shape) for name, weight in layer.named_parameters())) for layer in layers}
    kinds = set(getattr(decoder.config, "layer_types", None) or ())
    if len(forms) > 1 or len(kinds) > 1:
        raise ConfigError(
            f"{section}.model", "its layers differ, and --fit counts a few of them: expected a plan of single layouts"
        )
    layer = sum(weight.numel() for weight in layers[0].parameters())
    cost = cost_of(decoder, 3 if section == "student" else 1)
    return asdict(cost) | {"layer_elements": layer, "width": decoder.width, "tied": decoder.tied}


def _decoders(config: RunConfig) -> dict[str, Decoder]:
    sections = {"student": config.student.model}
    if config.teacher is not None and config.teacher.model is not None:
        sections["teacher"] = config.teacher.model
    return {section: empty_decoder(model) for section, model in sections.items()}


@contextmanager
def _few_layers(config: RunConfig, stages: int, student: int, teacher: int) -> Iterator[RunConfig]:
    """Within the block, the models have so many layers on each stage."""

    def even(count: int, student_cost: Cost, teacher_cost: Cost | None) -> list[Stage]:
        numbers = range(count)
        layers = 0 if teacher_cost is None else teacher
        return [
            Stage(n, count, range(n * student, (n + 1) * student), range(n * layers, (n + 1) * layers))
            for n in numbers
        ]

    with tempfile.TemporaryDirectory() as folder, dry_run({split: even}):
        small = config.student.model_copy(
            update={"model": _written(config.student.model, folder, "student", student * stages)}
        )
        changed: dict[str, Any] = {"student": small}
        if config.teacher is not None:
            path = _written(str(config.teacher.model), folder, "teacher", teacher * stages)
            changed["teacher"] = config.teacher.model_copy(update={"model": path})
        yield config.model_copy(update=changed)


def _written(model: str, parent: str, name: str, layers: int) -> str:
    """Write the configuration of a model with fewer layers; return its folder."""
    values = json.loads((Path(model) / "config.json").read_text())
    values["tie_word_embeddings"] = empty_decoder(model).tied  # the files may have another head than the embedding
    language = values.get("text_config", values)  # beside that of a vision tower
    for key, value in language.items():
        if isinstance(value, list) and key.endswith("layer_types"):
            language[key] = [value[0]] * layers
    language["num_hidden_layers"] = layers
    folder = Path(parent) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)
