"""Everything a run needs, made ready in the order in which mistakes are cheapest to find.

The objective's expression, then the tokenizers, then the data, then the models: a misspelt divergence shows in a
second, a teacher of another tokenizer before any weight is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, DataConfig, ObjectiveConfig, RunConfig, StudentConfig, TeacherConfig
from stillhouse.data import (
    DataReport,
    Documents,
    PackedSequences,
    check_same_tokenizer,
    check_vocabulary,
    load_documents,
    load_tokenizer,
    tokenizer_fingerprint,
)
from stillhouse.models import Decoder, check_document_length, check_finite_weights
from stillhouse.objective import ObjectiveOutput
from stillhouse.objective.recipe import Recipe, parse_recipe
from stillhouse.parallel import (
    Layout,
    Mesh,
    Origin,
    Runner,
    alone,
    empty_decoder,
    fill,
    gathered,
    join,
    lay_out,
    layout_of,
    local_folder,
    local_rank,
    process_count,
    require_offload,
)
from stillhouse.train.logging import require_trackers
from stillhouse.train.schedule import Plan, make_plan
from stillhouse.train.step import add_up, summed_metrics


@dataclass
class Session:
    """One run, ready to start. `evaluation` is None where none was asked for, `teacher` where none was given."""

    config: RunConfig
    recipe: Recipe
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    tokenizer_hash: str
    train: PackedSequences
    evaluation: PackedSequences | None
    plan: Plan
    runner: Runner
    data: dict[str, str]  # a hash of each split's documents
    warnings: list[str] = field(default_factory=list)

    @property
    def student(self) -> Decoder:
        """The student, or its part on this process's first stage."""
        return self.runner.students()[0]

    @property
    def teacher(self) -> Decoder | None:
        """The same of the teacher."""
        return self.runner.teacher

    def totals(self, outputs: Sequence[ObjectiveOutput]) -> dict[str, float]:
        """`summed_metrics` over all processes, the same on each. Waits for the device once."""
        mesh = self.runner.mesh
        own = summed_metrics(outputs if self.runner.has_results else ())
        return add_up(gathered(own, None if mesh is None else mesh.everyone, self.device))

    def precision(self) -> torch.autocast:
        """The autocast of a run: bfloat16 products over float32 master weights, or nothing."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16")


def prepare(config: RunConfig, *, announce: bool = True) -> Session:
    """Load and check everything. Raises ConfigError for the configuration, ValueError for what it points to.

    `announce`: print the resolved objective first of all, before anything is loaded.
    """
    recipe = parse_objective(config)
    if announce:
        print(in_words(config, recipe), flush=True)
    require_trackers(config.track)
    layout = layout_of(config.parallel, process_count())
    device = choose_device(config.device)
    require_offload(layout, device)
    torch.manual_seed(config.seed)
    tokenizer, warnings = load_tokenizers(config)
    train_documents, evaluation_documents = load_data(config.data, config.objective, tokenizer)
    splits = {"train": train_documents} | ({} if evaluation_documents is None else {"eval": evaluation_documents})
    for documents in splits.values():
        warnings += documents.report.warnings
    if evaluation_documents is not None and (shared := evaluation_documents.overlap(train_documents)):
        warnings.append(
            f"{shared:,} of the {len(evaluation_documents):,} held-out documents are trained on too: "
            "held-out figures will look better than they are"
        )
    max_tokens = config.data.max_tokens
    train = PackedSequences(train_documents, max_tokens=max_tokens, seed=config.seed)
    evaluation = None
    if evaluation_documents is not None:
        evaluation = PackedSequences(evaluation_documents, max_tokens=max_tokens, seed=config.seed, shuffle=False)
    mesh = join(layout, device)
    runner = alone(*load_models(config, device)) if mesh is None else lay_out_models(config, layout, mesh, device)
    for which, decoder in (("student", runner.students()[0]), ("teacher", runner.teacher)):
        if decoder is not None:
            warnings += check_vocabulary(tokenizer, decoder.vocabulary_rows, which)
            check_document_length(decoder, max_tokens, which)
            for documents in splits.values():
                documents.check_ids(decoder.vocabulary_rows, which)
    return Session(
        config=config,
        recipe=recipe,
        device=device,
        tokenizer=tokenizer,
        tokenizer_hash=tokenizer_fingerprint(tokenizer),
        train=train,
        evaluation=evaluation,
        plan=make_plan(config.train, len(train), max_tokens, layout.degrees.data, layout.stages),
        runner=runner,
        data={which: documents.fingerprint() for which, documents in splits.items()},
        warnings=list(dict.fromkeys(warnings)),
    )


def parse_objective(config: RunConfig) -> Recipe:
    """The recipe of `objective.loss`, for which there is a teacher if it needs one."""
    objective = config.objective
    try:
        recipe = parse_recipe(objective.loss, objective.temperature, objective.scale_by_temperature_squared)
    except ValueError as error:
        raise ConfigError("objective.loss", str(error)) from error
    if config.teacher is None:
        if recipe.needs_teacher:
            raise ConfigError("teacher", f"objective.loss '{objective.loss}' needs a teacher: set teacher.model")
        if config.data.eval and config.checkpoint.best not in ("eval/cross_entropy", None):
            raise ConfigError(
                "checkpoint.best",
                f"got {config.checkpoint.best} without a teacher: expected eval/cross_entropy or null",
            )
    return recipe


def in_words(config: RunConfig, recipe: Recipe) -> str:
    """The resolved objective: the first line that a run prints."""
    teacher = f" ← {config.teacher.model}" if config.teacher and recipe.needs_teacher else ""
    over = "over the full vocabulary, " if recipe.needs_teacher else ""
    return (
        f"minimise {recipe.in_words()}, {over}temperature {recipe.temperature:g}, "
        f"mean over {config.objective.tokens} tokens of each step: "
        f"{config.student.model}{teacher}"
    )


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Raises ConfigError for a device that this machine does not have."""
    if name == "auto":
        name = f"cuda:{local_rank()}" if torch.cuda.is_available() else "cpu"
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError("device", f"got {name}, and this machine has {count} CUDA devices; expected auto or cpu")
    return device


def load_tokenizers(config: RunConfig) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The student's tokenizer, after the teacher's has been found to be the same."""
    student = config.student
    tokenizer = load_tokenizer(student.model, student.revision, student.trust_remote_code)
    if config.teacher is None:
        return tokenizer, []
    teacher = config.teacher
    other = load_tokenizer(teacher.model, teacher.revision, teacher.trust_remote_code)
    return tokenizer, check_same_tokenizer(tokenizer, other)


def load_data(
    data: DataConfig, objective: ObjectiveConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Documents, Documents | None]:
    """The documents to train on and the held-out ones."""

    def load(source: str) -> Documents:
        return load_documents(
            source, tokenizer, max_tokens=data.max_tokens, tokens=objective.tokens, on_error=data.on_error
        )

    train = load(data.train)
    if isinstance(data.eval, str):
        return train, load(data.eval)
    return train.split(data.eval) if data.eval else (train, None)


def load_models(config: RunConfig, device: torch.device) -> tuple[Decoder, Decoder | None]:
    """Student and teacher on the device, their weights finite."""
    student = _trained(_load("student", config.student, device), config)
    return student, None if config.teacher is None else _load("teacher", config.teacher, device)


def lay_out_models(config: RunConfig, layout: Layout, mesh: Mesh, device: torch.device) -> Runner:
    """The same over processes, each of which reads its own part."""
    student, teacher = _origin("student", config.student, device, layout.offload), None
    if config.teacher is not None:
        teacher = _origin("teacher", config.teacher, device, layout.offload)
    make = student.make
    try:
        return lay_out(layout, mesh, replace(student, make=lambda: _trained(make(), config)), teacher)
    except ValueError as error:
        raise ConfigError("parallel", str(error)) from error


def _origin(which: str, model: StudentConfig | TeacherConfig, device: torch.device, offload: bool) -> Origin:
    if model.trust_remote_code:
        raise ConfigError(
            f"{which}.trust_remote_code", "got true under torchrun: expected a model of transformers' own"
        )
    folder = local_folder(model.model, model.revision)

    def weights(decoder: Decoder) -> None:
        fill(decoder, folder, device, offload=offload)
        check_finite_weights(decoder, which)

    return Origin(partial(empty_decoder, folder, dtype=model.dtype, attention=model.attention), weights)


def _trained(student: Decoder, config: RunConfig) -> Decoder:
    if config.train.activation_checkpointing:
        student.gradient_checkpointing_enable()
    return student.train()


def data_reports(session: Session) -> dict[str, DataReport]:
    """What became of the records of each split."""
    reports = {"train": session.train.documents.report}
    if session.evaluation is not None:
        reports["eval"] = session.evaluation.documents.report
    return reports


def _load(which: str, model: StudentConfig | TeacherConfig, device: torch.device) -> Decoder:
    try:
        decoder = Decoder.from_pretrained(
            model.model,
            revision=model.revision,
            dtype=model.dtype,
            attention=model.attention,
            trust_remote_code=model.trust_remote_code,
            device=device,
        )
    except ValueError as error:
        raise ValueError(f"{which}: {error}") from error
    check_finite_weights(decoder, which)
    return decoder
