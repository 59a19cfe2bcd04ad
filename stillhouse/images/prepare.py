"""Prepares a run whose data has images: proves that its models read them, and gives the data their positions."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from stillhouse.config import ConfigError, RunConfig, as_config_error
from stillhouse.config.servers import server_kinds
from stillhouse.data.media import MediaInputs
from stillhouse.engine.engine import Engine
from stillhouse.images.proof import ImageModel, WholeModel, document_positions, prove_image_model
from stillhouse.images.staged_models import staged_models
from stillhouse.loops.session import Data
from stillhouse.models import ProofError
from stillhouse.models.document_packing import PackingError
from stillhouse.models.forward_modes import autocast_dtype
from stillhouse.models.model_checks import prefixed
from stillhouse.parallel import Runner
from stillhouse.parallel.runner import reshard
from stillhouse.proofs.layouts import probe_precision
from stillhouse.run.setup import RunSetup
from stillhouse.signals import SignalSource, SignalStore

#: a mistake in a configuration whose data has images; `{}` is what was expected
NOT_WITH_IMAGES = "the data has images, which this cannot read yet: expected {}, or documents without images"


def require_image_layout(setup: RunSetup, media_inputs: MediaInputs) -> None:
    """Raise ConfigError for a layout that does not read images, and for a loss that needs the teacher's hidden states
    in the student's rows if the teacher has other rows.
    """
    for section in setup.own_layouts:
        raise ConfigError(f"{section}.parallel", NOT_WITH_IMAGES.format("null"))
    degrees = setup.layout.degrees
    for axis in ("pipeline", "context"):
        if media_inputs.teachers and getattr(degrees, axis) > 1:
            raise ConfigError(
                f"parallel.{axis}",
                "the data has images, and a teacher has other tokens of images than the student, or none: expected "
                "1, or teachers with the student's processor of images",
            )
    if media_inputs.teachers and setup.config.objective.hidden:
        raise ConfigError(
            "objective.hidden",
            "the data has images, and the teacher has other tokens of images than the student: expected []",
        )


def require_image_support(config: RunConfig) -> None:
    """Raise ConfigError for a part of the configuration that cannot be used with images."""
    expected = NOT_WITH_IMAGES
    if config.rollout is not None and config.rollout.urls and not server_kinds()[config.rollout.engine].reads_images:
        title = server_kinds()[config.rollout.engine].title
        raise ConfigError(
            "rollout.engine",
            f"the data has images, and {title} would read them with a processor of its own, which cannot be proved "
            "to be the student's: expected transformers, stillhouse with a server that was started with --generate "
            "--images, or documents without images",
        )
    if config.parallel.engine != "torch":
        raise ConfigError("parallel.engine", expected.format("torch"))
    if config.parallel.context > 1 and config.rollout is not None:
        raise ConfigError("parallel.context", expected.format("1 with a rollout"))
    for section, teacher in config.teacher_sections.items():
        if teacher.cross_tokenizer is not None:
            raise ConfigError(f"{section}.cross_tokenizer", expected.format("null"))


def with_images_proven(
    data: Data, engine: Engine, source: SignalSource, stores: Mapping[str, SignalStore] | None = None
) -> Data:
    """Prove the models of this job on documents with images, and return the data with the models' axis positions.

    stores: the signal stores, by the keys of the teachers' sections

    A collective of all processes. Without images, this returns the same data. Raises ConfigError for a pipeline or
    context parallelism with teachers outside of the student's layout, and ProofError, naming the model, for a model
    that does not read images exactly, or that has the student's processor and other positions.
    """
    if (inputs := data.train.media_inputs) is None:
        return data
    student = engine.student
    degrees = student.layout.degrees
    for axis in ("pipeline", "context"):
        if getattr(degrees, axis) > 1 and source.decoders:
            raise ConfigError(
                f"parallel.{axis}",
                NOT_WITH_IMAGES.format("1, or one teacher in the student's layout, in a cache or on a server"),
            )
    documents = inputs.processor.example_documents()
    positions = [document_positions(student.decoders[0], document) for document in documents]
    teachers = dict(inputs.teachers)
    for section, model in _models(engine, source):
        name, decoder = section.partition(".")[2], model.decoders[0]
        inputs_of_model = inputs if section == "student" else inputs.teacher_inputs(name)
        if inputs_of_model is None:  # it reads no images
            continue
        examples = documents
        if inputs_of_model is not inputs:
            examples = inputs_of_model.processor.example_documents()
            teachers[name] = MediaInputs(inputs_of_model.processor, decoder.axis_positions)
        elif not all(map(_is_equal, positions, (document_positions(decoder, document) for document in documents))):
            raise ProofError(
                f"{section}: its rotary positions of images are not those of the student, whose processor it has: "
                "expected a model of its family"
            )
        agreed = partial(student.ranks.all_raise, PackingError, ProofError)
        with prefixed(section, ProofError):
            prove_image_model(model, examples, inputs_of_model.processor.join, agreed)
        for part in model.decoders:
            reshard(part)  # no backward follows; the optimizer must get the sharded weights
    for section, store in (stores or {}).items():
        with as_config_error(section):
            store.require_positions(positions)
    return data.with_media_inputs(MediaInputs(inputs.processor, student.decoders[0].axis_positions, teachers))


def _is_equal(positions_SA: Tensor | None, others_SA: Tensor | None) -> bool:
    if positions_SA is None or others_SA is None:
        return positions_SA is others_SA
    return torch.equal(positions_SA, others_SA)


def _models(engine: Engine, source: SignalSource) -> Iterator[tuple[str, ImageModel]]:
    """Yield names and models of the student and of its teachers in this job."""
    runner = engine.student
    assert isinstance(runner, Runner), "images under another engine than torch's"
    if runner.layout.degrees.pipeline > 1 or runner.layout.degrees.context > 1:
        yield from staged_models(runner)
        return
    yield "student", WholeModel(runner.decoders[0], probe_precision(runner))
    others = {"teacher": runner.teacher, **source.decoders}
    # of a teacher in a cache, only the output head is in this job
    for name, decoder in others.items():
        if decoder is not None and decoder.layers():
            yield name, WholeModel(decoder, autocast_dtype(decoder.pretrained))
