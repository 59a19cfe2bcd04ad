"""Everything a run needs, made ready in the order in which mistakes are cheapest to find.

The objective's expression, then the tokenizers, then the data, then the models: a misspelt divergence shows in a
second, a teacher of another tokenizer before any weight is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, DataConfig, ObjectiveConfig, RunConfig
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
from stillhouse.display import escaped
from stillhouse.models import (
    Decoder,
    check_document_length,
    check_saving,
)
from stillhouse.objective import ObjectiveOutput
from stillhouse.objective.recipe import Recipe, parse_recipe
from stillhouse.parallel import (
    Runner,
    Work,
    gathered,
    layout_of,
    local_rank,
    process_count,
    require_sharing,
    start,
    watchdog,
)
from stillhouse.train.agreement import require_same_configuration, require_same_sources
from stillhouse.train.build import build_runner, model_fingerprints, own_base, require_adapters, teacher_layout
from stillhouse.train.dealing import dealt_works
from stillhouse.train.logging import require_trackers
from stillhouse.train.schedule import Plan, make_plan
from stillhouse.train.step import ROUTER_LOSS, add_up, router_loss, summed_metrics


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
    models: dict[str, str]  # a hash of the tokenizer and of each model's files
    warnings: list[str] = field(default_factory=list)

    @property
    def student(self) -> Decoder:
        """The student, or its part on this process's first stage."""
        return self.runner.students()[0]

    @property
    def teacher(self) -> Decoder | None:
        """The same of the teacher; None where it is the student's own base, too."""
        return self.runner.teacher

    def works(
        self,
        sequences: PackedSequences,
        rows: Sequence[np.ndarray],
        recipe: Recipe,
        normalizer: float,
        *,
        training: bool,
    ) -> list[Work]:
        """What this process computes of micro-batches that are given by their packed sequences."""
        objective = self.config.objective
        return dealt_works(
            self.runner,
            sequences,
            rows,
            recipe,
            normalizer,
            self.device,
            training=training,
            router_aux_loss=objective.router_aux_loss,
            precision=self.precision,
            chunk_tokens=objective.chunk_tokens,
        )

    def step_works(self, step: int) -> list[Work]:
        """What this process computes of training step `step` (from 0)."""
        rows = list(self.plan.micro_batches(self.train, step))
        return self.works(self.train, rows, self.recipe, self.train.targets(rows), training=True)

    def totals(self, outputs: Sequence[ObjectiveOutput], works: Sequence[Work] = ()) -> dict[str, float]:
        """`summed_metrics` over all processes, the same on each, and what routers made of the works. Waits for the
        device once.
        """
        runner = self.runner
        own = summed_metrics(outputs if runner.has_results else ())
        if runner.is_counted:
            own |= router_loss(works)
        sums = add_up(gathered(own, None if runner.mesh is None else runner.mesh.everyone, self.device))
        if ROUTER_LOSS in sums:
            sums["loss"] += self.config.objective.router_aux_loss * sums[ROUTER_LOSS] / max(1.0, sums["tokens"])
        return sums

    def precision(self) -> torch.autocast:
        """The autocast of a run: bfloat16 products over float32 master weights, or nothing.

        The forward of every micro-batch asks for it, which tells the watchdog that the run makes progress.
        """
        watchdog.progress()
        enabled = self.config.train.precision == "bf16"
        # its cache would keep all layers' weights in bfloat16 until a forward ends, gathered ones too
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def prepare(config: RunConfig, *, announce: bool = True) -> Session:
    """Load and check everything. Raises ConfigError for the configuration, ValueError for what it points to.

    `announce`: print the resolved objective first of all, before anything is loaded.
    """
    recipe = parse_objective(config)
    if announce:
        print(in_words(config, recipe), flush=True)
    require_trackers(config.track)
    require_adapters(config.student)
    layout = layout_of(config.parallel, process_count())
    device, warnings = meet(config)
    watchdog.enter("reading the data", timed=False)
    torch.manual_seed(config.seed)
    tokenizer, more = load_tokenizers(config)
    warnings += more
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
    data = {which: documents.fingerprint() for which, documents in splits.items()}
    models = {"tokenizer": tokenizer_fingerprint(tokenizer), **model_fingerprints(config)}
    watchdog.enter("comparing data and models")
    require_same_sources({f"data.{which}": each for which, each in data.items()} | models, device)
    watchdog.enter("loading the models", timed=False)
    runner = build_runner(config, layout, device)
    for which, decoder in (("student", runner.students()[0]), ("teacher", runner.teacher)):
        if decoder is not None:
            warnings += check_vocabulary(tokenizer, decoder.vocabulary_rows, which)
            check_document_length(decoder, max_tokens, which)
            for documents in splits.values():
                documents.check_ids(decoder.vocabulary_rows, which)
    check_saving(runner.students()[0])
    return Session(
        config=config,
        recipe=recipe,
        device=device,
        tokenizer=tokenizer,
        tokenizer_hash=models["tokenizer"],
        train=train,
        evaluation=evaluation,
        plan=make_plan(config.train, len(train), max_tokens, layout.degrees.data, layout.stages),
        runner=runner,
        data=data,
        models=models,
        warnings=[escaped(warning) for warning in dict.fromkeys(warnings)],
    )


def meet(config: RunConfig) -> tuple[torch.device, list[str]]:
    """Connect the ranks of a job, after a layout that cannot be was refused; again, it only compares them.

    Returns this rank's device, and warnings about unlike versions. Raises ConfigError, also where the ranks were
    started with unlike configurations.
    """
    layout, apart = layout_of(config.parallel, process_count()), teacher_layout(config)
    device = choose_device(config.device)
    for each in (layout, apart):
        if each is not None:
            require_sharing(each, device)
    if process_count() > 1:
        start(device, config.train.timeout)
    return device, require_same_configuration(config, device)


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


def adapter_in_words(session: Session) -> str:
    teacher = "; the teacher is the same model without it, held once" if own_base(session.config) else ""
    return f"{session.student.lora}{teacher}"


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
    if device.type == "cuda" and process_count() > 1:
        if device.index is not None and name != f"cuda:{local_rank()}":
            raise ConfigError("device", f"got {name} for {process_count()} processes: expected cuda, one for each")
        device = torch.device("cuda", local_rank())
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


def data_reports(session: Session) -> dict[str, DataReport]:
    """What became of the records of each split."""
    reports = {"train": session.train.documents.report}
    if session.evaluation is not None:
        reports["eval"] = session.evaluation.documents.report
    return reports
