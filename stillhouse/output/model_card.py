"""The model card of an exported student: its teacher, its data and its results.

The results and fingerprints come from the checkpoint, whose files match their hashes, and from the log, whose hash is
in the checkpoint. The counts of documents come from data.json. Paths are shortened to their last part.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import cached_file

import stillhouse
from stillhouse.config import ParallelConfig, RolloutConfig, RunConfig, StudentConfig, TeacherConfig, TrainConfig
from stillhouse.data.data_report import documents_in_words
from stillhouse.libraries import reading
from stillhouse.output.json_lines import parse_metrics, read_object
from stillhouse.output.progress import Progress

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHORT = 16  # the number of characters of a fingerprint on the card
_SPLITS = ("train", "dataset", "eval")
_UNREADABLE = "{} cannot be read; restore it, or export without a model card (--no-card)"


@dataclass(frozen=True)
class Exported:
    """The facts of an export that are stored neither in the run's folder nor in the checkpoint.

    objective: the objective in words.
    processes: the number of processes that wrote the checkpoint.
    adapter: "" (the student has no adapter), "merged" or "alone".
    """

    objective: str
    processes: int
    command: str
    dtype: str
    adapter: str
    has_template: bool


def model_card(run: Path, config: RunConfig, progress: Progress, exported: Exported) -> str:
    """The text of README.md. Raises ValueError if data.json is malformed or the log does not match the checkpoint."""
    student = config.student
    sections = [
        f"# {_short_name(student.model)}, distilled",
        _summary(student, config.data.chat_template, exported),
        "## Sources",
        _sources(run, student, config.teacher_sections, progress),
        "## Training",
        _training(config.train, config.rollout, config.parallel, progress, exported.processes, config.seed),
        "## Results",
        _results(run, progress),
        "## How it was made",
        f"Exported with stillhouse {stillhouse.__version__}:\n\n    {exported.command}",
    ]
    return f"---\n{_front_matter(student, exported)}\n---\n\n" + "\n\n".join(sections) + "\n"


def quoted_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file that the card quotes. Raises ValueError if the file is missing or malformed."""
    try:
        content = read_object(path)
    except ValueError as error:
        raise ValueError(f"{_UNREADABLE.format(path)}: {error}") from error
    if content is None:
        raise ValueError(f"{_UNREADABLE.format(path)}: there is no such file")
    return content


def _front_matter(student: StudentConfig, exported: Exported) -> str:
    path = cached_file(  # the card of the base model, if there is one
        student.model,
        "README.md",
        revision=student.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    license_keys: dict[str, Any] = {}
    if path is not None:
        with reading(f"the model card of {student.model} cannot be read"):
            base = ModelCard.load(path, ignore_metadata_errors=True).data
        values = {key: base.get(key) for key in ("license", "license_name", "license_link")}
        license_keys = {key: value for key, value in values.items() if isinstance(value, str)}
    data = ModelCardData(
        base_model=student.model if _is_hub_id(student.model) else None,
        library_name="peft" if exported.adapter == "alone" else "transformers",
        pipeline_tag="text-generation",
        tags=["stillhouse", "distillation"] + (["lora"] if exported.adapter else []),
        **license_keys,
    )
    return data.to_yaml().strip()


def _summary(student: StudentConfig, chat_template: str | None, exported: Exported) -> str:
    objective = exported.objective.partition(f": {student.model}")[0]
    kinds = {
        "": "All weights were trained.",
        "merged": "A LoRA was trained and is merged into the weights of its base.",
        "alone": "These files are a LoRA, which peft loads on top of its base.",
    }
    template = "the student's own"
    if chat_template is not None:
        template = f"of {Path(chat_template).name}, as in training"
    if not exported.has_template:
        template = "none, because the student has none"
    return (
        f"Objective: {objective}.\n\n{kinds[exported.adapter]} The weights here are {exported.dtype}. Chat template: "
        f"{template}."
    )


def _sources(run: Path, student: StudentConfig, teachers: Mapping[str, TeacherConfig], progress: Progress) -> str:
    rows = [("student before training", _short_name(student.model), progress.models.get("student"))]
    for section, teacher in teachers.items():
        kind = teacher.source_kind
        source = kind.title.format(_short_name(str(getattr(teacher, kind.key))))
        name = source
        if teacher.model is not None:
            bits = "" if teacher.quantize is None else f", {teacher.quantize}"
            name = f"{_short_name(teacher.model)}{bits}" + ("" if kind.runs_model else f", {source}")
        rows.append((section.replace("teachers.", "teacher "), name, progress.models.get(section)))
    counts = quoted_file(run / "data.json")
    for name, mark in progress.data.items():
        if name not in _SPLITS:  # the order of documents, and processors of media
            continue
        rows.append((f"data, {name}", _counts(counts.get(name), run / "data.json"), mark))
    lines = [f"| {what} | {name} | {f'`{mark[:_SHORT]}`' if mark else 'none'} |" for what, name, mark in rows]
    head = ["| | | fingerprint |", "| --- | --- | --- |"]
    return "\n".join(head + lines) + "\n\nA fingerprint is the beginning of a sha256 of the files or documents."


def _training(
    train: TrainConfig,
    rollout: RolloutConfig | None,
    parallel: ParallelConfig,
    progress: Progress,
    processes: int,
    seed: int,
) -> str:
    degrees = {key: value for key, value in parallel.model_dump().items() if isinstance(value, int)}
    used = ", ".join(f"{key} {value}" for key, value in degrees.items() if value > 1)
    layout = f"{processes} process{'es' if processes > 1 else ''}" + (f" ({used})" if used else "")
    size = f"{train.tokens_per_step:,} tokens"
    if rollout is not None and rollout.prompts_per_step is not None:
        size = f"{rollout.prompts_per_step:,} prompts with {rollout.samples_per_prompt:,} completions of each"
        size += "" if rollout.share == 1 else " and texts of the dataset"
    return (
        f"{progress.step:,} optimizer steps of {size}; {progress.tokens:,} target tokens "
        f"in all. Optimizer {train.optimizer}, peak learning rate {train.learning_rate:g}, schedule "
        f"{train.schedule}, precision {train.precision}, seed {seed}. Layout: {layout}."
    )


def _results(run: Path, progress: Progress) -> str:
    if not progress.metrics:
        return "The run had no held-out data."
    before = _first_evaluation(run, progress)
    columns: dict[str, Mapping[str, float | None]] = {f"step {progress.step}": progress.metrics}
    if before:  # a run that began with another run's checkpoint has no evaluation at step 0
        columns = {"step 0": before} | columns
    names = [name for name in sorted(progress.metrics) if not name.endswith("/tokens")]
    rows = [["held-out metric", *columns], ["---"] * (1 + len(columns))]
    for name in names:
        values = [metrics.get(name) for metrics in columns.values()]
        rows.append([name, *("" if value is None else f"{value:.4f}" for value in values)])
    return (
        "\n".join(f"| {' | '.join(row)} |" for row in rows)
        + "\n\nCross-entropies, divergences and entropies are in nats per token."
    )


def _first_evaluation(run: Path, progress: Progress) -> dict[str, float | None]:
    """The held-out metrics before training, from the log; empty if there are none. The log must match its hash in the
    checkpoint."""
    path = run / "metrics.jsonl"
    beginning = progress.saved_log(path)
    if beginning is None:
        raise ValueError(
            f"{path} is damaged: it does not begin with the lines that it had when step {progress.step} was saved; "
            "restore it, or export without a model card (--no-card)"
        )
    lines = (parse_metrics(line, str(path)) for line in beginning.splitlines())
    return next((line.values for line in lines if line.step == 0 and "eval/cross_entropy" in line.values), {})


def _counts(report: Any, path: Path) -> str:
    """The counts of one split. path: the file that contains `report`, for errors."""
    if not isinstance(report, dict):
        return "documents not counted"
    pieces, tokens = report.get("documents"), report.get("tokens")
    records = report.get("records", pieces)  # earlier folders of runs have no count of them
    if not isinstance(pieces, int) or not isinstance(tokens, int) or not isinstance(records, int):
        raise ValueError(f"{_UNREADABLE.format(path)}: expected numbers of documents and tokens")
    return f"{documents_in_words(records, pieces)}, {tokens:,} tokens"


def _is_hub_id(name: str) -> bool:
    return not os.path.isdir(name) and _HUB_ID.fullmatch(name) is not None


def _short_name(name: str) -> str:
    """A hub id, or the last part of a path, because the other parts may be private."""
    return name if _is_hub_id(name) else Path(name).name
