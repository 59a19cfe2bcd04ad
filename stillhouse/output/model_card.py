"""The model card of an exported student: its teacher, its data and its results.

The results and fingerprints come from the checkpoint, whose files match their hashes, and from the log, whose hash is
in the checkpoint. The counts of documents come from data.json. Paths are shortened to their last part, except a
relative path of the run in the command of the export.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import cached_file

import stillhouse
from stillhouse.config import RunConfig, StudentConfig, TeacherConfig
from stillhouse.data.data_report import documents_in_words
from stillhouse.display import model_folder_name
from stillhouse.libraries import reading
from stillhouse.output.json_lines import parse_metrics, read_object
from stillhouse.output.metrics import known_metric
from stillhouse.output.progress import Progress

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHORT = 16  # the number of characters of a fingerprint on the card
_SPLITS = ("train", "dataset", "eval")
_UNREADABLE = "{} cannot be read; restore it, or export without a model card (--no-card)"


def model_card(
    run: Path,
    config: RunConfig,
    progress: Progress,
    *,
    objective: str,
    processes: int,
    command: str,
    dtype: str,
    adapter: str,
    has_template: bool,
) -> str:
    """Return the text of README.md. Raises ValueError if data.json or the log is damaged.

    objective: the objective in words. processes: the number of processes that wrote the checkpoint.
    command, dtype: the command of the export, and the dtype of the exported weights.
    adapter: "" (the student has no adapter), "merged" or "alone".
    """
    student, train = config.student, config.train
    weights = {
        "": "All weights were trained.",
        "merged": "A LoRA was trained and is merged into the weights of its base.",
        "alone": "These files are a LoRA, which peft loads on top of its base.",
    }[adapter]
    template = "the student's own"
    if config.data.chat_template is not None:
        template = f"of {Path(config.data.chat_template).name}, as in training"
    if not has_template:
        template = "none, because the student has none"
    size = f"at most {train.tokens_per_step:,} tokens"
    if (rollout := config.rollout) is not None and rollout.prompts_per_step is not None:
        size = f"{rollout.prompts_per_step:,} prompts with {rollout.samples_per_prompt:,} completions of each"
        size += "" if rollout.share == 1 else " and texts of the dataset"
    degrees = {key: value for key, value in config.parallel.model_dump().items() if isinstance(value, int)}
    used = ", ".join(f"{key} {value}" for key, value in degrees.items() if value > 1)
    layout = f"{processes} process{'es' if processes > 1 else ''}" + (f" ({used})" if used else "")
    sections = [
        f"# {_short_name(student.model)}, distilled",
        f"Objective: {objective.partition(f': {student.model}')[0]}.",
        f"{weights} The weights in this folder are {dtype}. Chat template: {template}.",
        "## Sources",
        _sources(run, student, config.teacher_sections, progress),
        "## Training",
        f"{progress.step:,} optimizer steps of {size}; {progress.tokens:,} target tokens in all. Optimizer "
        f"{train.optimizer}, peak learning rate {train.learning_rate:g}, schedule {train.schedule}, precision "
        f"{train.precision}, seed {config.seed}. Layout: {layout}.",
        "## Results",
        _results(run, progress),
        "## How it was made",
        f"Exported with stillhouse {stillhouse.__version__}:\n\n    {command}",
    ]
    return f"---\n{_front_matter(student, adapter)}\n---\n\n" + "\n\n".join(sections) + "\n"


def quoted_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file that the card quotes. Raises ValueError if the file is missing or malformed."""
    try:
        content = read_object(path)
    except ValueError as error:
        raise ValueError(f"{_UNREADABLE.format(path)}: {error}") from error
    if content is None:
        raise ValueError(f"{_UNREADABLE.format(path)}: there is no such file")
    return content


def _front_matter(student: StudentConfig, adapter: str) -> str:
    path = cached_file(  # the base model's card, if it has one
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
        library_name="peft" if adapter == "alone" else "transformers",
        pipeline_tag="text-generation",
        tags=["stillhouse", "distillation"] + (["lora"] if adapter else []),
        **license_keys,
    )
    return data.to_yaml().strip()


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
        if name not in _SPLITS:  # other hashes are those of the order of documents and of media processors
            continue
        words, report = "documents not counted", counts.get(name)
        if isinstance(report, dict):
            pieces, tokens = report.get("documents"), report.get("tokens")
            records = report.get("records", pieces)  # folders of earlier versions do not have this count
            if not isinstance(pieces, int) or not isinstance(tokens, int) or not isinstance(records, int):
                unreadable = _UNREADABLE.format(run / "data.json")
                raise ValueError(f"{unreadable}: expected numbers of documents and tokens")
            words = f"{documents_in_words(records, pieces)}, {tokens:,} tokens"
        rows.append((f"data, {name}", words, mark))
    lines = [f"| {what} | {name} | {f'`{mark[:_SHORT]}`' if mark else 'none'} |" for what, name, mark in rows]
    head = ["| | | fingerprint |", "| --- | --- | --- |"]
    return "\n".join(head + lines) + "\n\nA fingerprint is the beginning of a sha256 of the files or documents."


def _results(run: Path, progress: Progress) -> str:
    """Return a table of held-out metrics at the end and, from the log, before training. Checks the log's hash."""
    if not progress.metrics:
        return "The run had no held-out data."
    path = run / "metrics.jsonl"
    beginning = progress.saved_log(path)
    if beginning is None:
        raise ValueError(
            f"{path} is damaged: it does not begin with the lines that it had when step {progress.step} was saved; "
            "restore it, or export without a model card (--no-card)"
        )
    lines = (parse_metrics(line, str(path)) for line in beginning.splitlines())
    # a run that began with another run's checkpoint has no evaluation at step 0
    first = next((line.values for line in lines if line.step == 0 and "eval/cross_entropy" in line.values), None)
    columns: dict[str, Mapping[str, float | None]] = {} if first is None else {"step 0": first}
    columns[f"step {progress.step}"] = progress.metrics
    rows = [["held-out metric", *columns, "unit"], ["---"] * (2 + len(columns))]
    for name in sorted(progress.metrics):
        if not name.endswith("/tokens"):
            values = [metrics.get(name) for metrics in columns.values()]
            figures = ["" if value is None else f"{value:.4f}" for value in values]
            rows.append([name, *figures, known_metric(name).unit])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _is_hub_id(name: str) -> bool:
    return not os.path.isdir(name) and _HUB_ID.fullmatch(name) is not None


def _short_name(name: str) -> str:
    """A hub id, or the name of the model's folder, because the other parts of the path may be private."""
    return name if _is_hub_id(name) else model_folder_name(name)
