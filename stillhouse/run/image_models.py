"""Prepares a run whose data has images: proves that its models read them, and gives the data their positions."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stillhouse.config import ConfigError, as_config_error
from stillhouse.data.render.image_processor import ImageProcessor
from stillhouse.engine.engine import Engine
from stillhouse.models import ProofError
from stillhouse.models.document_packing import PackingError
from stillhouse.models.forward_modes import autocast_dtype
from stillhouse.models.image_proof import ImageModel, WholeModel, document_positions, prove_image_model
from stillhouse.models.model_checks import prefixed
from stillhouse.parallel import Runner
from stillhouse.parallel.runner import reshard
from stillhouse.parallel.runner_proof import probe_precision
from stillhouse.parallel.staged_images import staged_models
from stillhouse.run.inputs import RunData
from stillhouse.run.setup import RunSetup
from stillhouse.signals import SignalSource, SignalStore

_EXPECTED = "the data has images, which this cannot read yet: expected {}, or documents without images"


def require_image_layout(setup: RunSetup, processor: ImageProcessor) -> None:
    """Raise ConfigError for a layout that does not read images, or for a teacher with another processor of images."""
    for section in setup.own_layouts:
        raise ConfigError(f"{section}.parallel", _EXPECTED.format("null"))
    own = _settings(processor)
    for section, teacher in setup.teachers.items():
        if teacher.model is None or section in setup.stores:
            continue
        other = ImageProcessor.find(
            str(teacher.model),
            processor.tokenizer,
            revision=teacher.revision,
            trust_remote_code=teacher.trust_remote_code,
        )
        if other is None or _settings(other) != own:
            found = "no processor of images" if other is None else "another processor of images than student.model"
            raise ConfigError(f"{section}.model", f"it has {found}: expected the processor of student.model")


def with_images_proven(
    data: RunData, engine: Engine, source: SignalSource, stores: Mapping[str, SignalStore] | None = None
) -> RunData:
    """Prove the models of this job on documents with images, and return the data with the student's axis positions.

    stores: the signal stores, by the keys of the teachers' sections

    A collective of all processes. Without images, this returns the same data. Raises ConfigError for a pipeline with
    teachers outside of its stages, and ProofError, naming the model, for a model that does not read images exactly,
    or not at the student's positions.
    """
    if (inputs := data.train.image_inputs) is None:
        return data
    student, processor = engine.student, inputs.processor
    if student.layout.stages > 1 and source.decoders:
        raise ConfigError(
            "parallel.pipeline",
            _EXPECTED.format("1, or one teacher in the student's stages, in a cache or on a server"),
        )
    documents = processor.example_documents()
    positions = [document_positions(student.decoders[0], document) for document in documents]
    for name, model in _models(engine, source):
        decoder = model.decoders[0]
        if not all(map(_is_equal, positions, (document_positions(decoder, document) for document in documents))):
            raise ProofError(
                f"{name}: its rotary positions of images are not those of the student: expected a model of its family"
            )
        agreed = partial(student.ranks.all_raise, PackingError, ProofError)
        with prefixed(name, ProofError):
            prove_image_model(model, documents, processor.join, agreed)
        for part in model.decoders:
            reshard(part)  # no backward follows; the optimizer must get the sharded weights
    for section, store in (stores or {}).items():
        with as_config_error(section):
            store.require_positions(positions)
    return data.with_axis_positions(student.decoders[0].axis_positions)


def _is_equal(positions_SA: Tensor | None, others_SA: Tensor | None) -> bool:
    if positions_SA is None or others_SA is None:
        return positions_SA is others_SA
    return torch.equal(positions_SA, others_SA)


def _settings(processor: ImageProcessor) -> dict[str, Any]:
    settings: dict[str, Any] = processor.processor.image_processor.to_dict()
    return settings


def _models(engine: Engine, source: SignalSource) -> Iterator[tuple[str, ImageModel]]:
    """Yield names and models of the student and of its teachers in this job."""
    runner = engine.student
    assert isinstance(runner, Runner), "images under another engine than torch's"
    if runner.layout.stages > 1:
        yield from staged_models(runner)
        return
    yield "student", WholeModel(runner.decoders[0], probe_precision(runner))
    others = {"teacher": runner.teacher, **source.decoders}
    # of a teacher in a cache, only the output head is in this job
    for name, decoder in others.items():
        if decoder is not None and decoder.layers():
            yield name, WholeModel(decoder, autocast_dtype(decoder.pretrained))
