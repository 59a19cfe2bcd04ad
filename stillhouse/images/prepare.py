"""Prepares a run whose data has images: proves that the models read the images, and adds positions to the data.

The proof needs the plain model's result for single documents (`proof.py`), also if the model is distributed. Under
context parallelism, every process runs each single document without context parallelism. In a pipeline, no process
has the whole model. But the first stage runs the code of the whole backbone with the images, so it knows the
arguments with which the plain model calls each layer, such as positions of several axes or masks for the images. For
a single document, the later stages run their layers with these arguments in place of their own, so that the result
equals the plain model's. Packed documents run as in training.

S tokens of a document, B rows, D width.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from stillhouse.config import ConfigError, RunConfig, as_config_error
from stillhouse.config.servers import server_kinds
from stillhouse.data import MicroBatch
from stillhouse.data.media import MediaInputs
from stillhouse.data.micro_batch import NO_LABEL
from stillhouse.engine.engine import Engine
from stillhouse.images.proof import (
    CANNOT_RUN,
    ImageDocument,
    ImageModel,
    PackedDocuments,
    WholeModel,
    document_positions,
    prove_image_model,
    run_alone,
)
from stillhouse.libraries import reading
from stillhouse.loops.session import Data
from stillhouse.models import Decoder, ProofError
from stillhouse.models.document_packing import PackingError, library_errors
from stillhouse.models.forward_modes import autocast_dtype
from stillhouse.models.layer_hooks import hidden_of, hooked, numbered_layers
from stillhouse.models.model_checks import prefixed, typename
from stillhouse.objective import TEACHER, Signals
from stillhouse.parallel import Runner
from stillhouse.parallel.apply.context_parallel import whole_sequences
from stillhouse.parallel.backbone_cut import AbsentLayer
from stillhouse.parallel.ranks import Ranks
from stillhouse.parallel.runner import reshard
from stillhouse.parallel.teacher_student_pair import IN_STAGE, model_inputs
from stillhouse.proofs.layouts import ProbeForward, probe_precision
from stillhouse.run.setup import RunSetup
from stillhouse.signals import SignalSource, SignalStore

_HIDDEN, _ARGUMENTS = "hidden", "arguments"
#: `{}` is replaced by the expected value of the key
NOT_WITH_IMAGES = "the data has images, which this key does not support yet: expected {}, or data without images"


def require_image_layout(setup: RunSetup, media_inputs: MediaInputs) -> None:
    """Raise ConfigError for a layout that cannot read images. If a teacher has other tokens of images than the
    student, also raise it for a loss that needs the teacher's hidden states in the student's rows.
    """
    for section in setup.own_layouts:
        raise ConfigError(f"{section}.parallel", NOT_WITH_IMAGES.format("null"))
    if not media_inputs.teachers:
        return
    for axis in ("pipeline", "context"):
        if getattr(setup.layout.degrees, axis) > 1:
            raise ConfigError(
                f"parallel.{axis}",
                "the data has images, and a teacher has other tokens of images than the student, or no tokens of "
                "images: expected 1, or teachers with the student's processor of images",
            )
    if setup.config.objective.hidden:
        raise ConfigError(
            "objective.hidden",
            "the data has images, and the teacher has other tokens of images than the student: expected []",
        )


def require_image_support(config: RunConfig) -> None:
    """Raise ConfigError for a part of the configuration that cannot be used with images."""
    expected, rollout = NOT_WITH_IMAGES, config.rollout
    if rollout is not None and rollout.urls and not server_kinds()[rollout.engine].reads_images:
        title = server_kinds()[rollout.engine].title
        raise ConfigError(
            "rollout.engine",
            f"the data has images, and {title} would read them with a processor of its own, which cannot be proved "
            "to be the student's: expected transformers, stillhouse with a server that was started with --generate "
            "--images, or documents without images",
        )
    if config.parallel.engine != "torch":
        raise ConfigError("parallel.engine", expected.format("torch"))
    if config.parallel.context > 1 and rollout is not None:
        raise ConfigError("parallel.context", expected.format("1 with a rollout"))
    for section, teacher in config.teacher_sections.items():
        if teacher.cross_tokenizer is not None:
            raise ConfigError(f"{section}.cross_tokenizer", expected.format("null"))


def with_images_proven(
    data: Data, engine: Engine, source: SignalSource, stores: Mapping[str, SignalStore] | None = None
) -> Data:
    """Prove the models of this job on documents with images, and return the data with the models' axis positions.
    stores: the signal stores, by the keys of the teachers' sections.

    A collective of all processes. If the data has no images, it is returned unchanged. Raises ConfigError under
    pipeline or context parallelism if a teacher is outside of the student's layout. Raises ProofError with the
    model's name if a model does not read images exactly, or if it has the student's processor but other positions.
    """
    if (inputs := data.train.media_inputs) is None:
        return data
    student = engine.student
    for axis in ("pipeline", "context"):
        if getattr(student.layout.degrees, axis) > 1 and source.decoders:
            raise ConfigError(
                f"parallel.{axis}",
                NOT_WITH_IMAGES.format("1, or one teacher in the student's layout, in a cache or on a server"),
            )
    documents = inputs.processor.example_documents()
    positions = [document_positions(student.decoders[0], document) for document in documents]
    teachers = dict(inputs.teachers)
    for section, model in _models(engine, source):
        name, decoder = section.partition(".")[2], model.decoders[0]
        inputs_of_model = inputs if section == "student" else inputs.teachers.get(name, inputs)
        if inputs_of_model is None:  # the model reads no images
            continue
        examples = documents
        if inputs_of_model is not inputs:
            examples = inputs_of_model.processor.example_documents()
            teachers[name] = MediaInputs(inputs_of_model.processor, decoder.axis_positions)
        elif not all(map(_is_equal, positions, (document_positions(decoder, document) for document in documents))):
            raise ProofError(
                f"{section}: its rotary positions of images are not those of the student, although it has the same "
                "processor: expected a model of the student's family"
            )
        agreed = partial(student.ranks.all_raise, PackingError, ProofError)
        with prefixed(section, ProofError):
            prove_image_model(model, examples, inputs_of_model.processor.join, agreed)
        for part in model.decoders:
            reshard(part)  # the optimizer must get the sharded weights, and no backward follows that reshards them
    for section, store in (stores or {}).items():
        with as_config_error(section):
            store.require_positions(positions)
    return data.with_media_inputs(MediaInputs(inputs.processor, student.decoders[0].axis_positions, teachers))


def _is_equal(positions_SA: Tensor | None, others_SA: Tensor | None) -> bool:
    if positions_SA is None or others_SA is None:
        return positions_SA is others_SA
    return torch.equal(positions_SA, others_SA)


def _models(engine: Engine, source: SignalSource) -> Iterator[tuple[str, ImageModel]]:
    runner = engine.student
    assert isinstance(runner, Runner), "images under another engine than torch's"
    if runner.layout.degrees.pipeline > 1 or runner.layout.degrees.context > 1:
        yield from staged_models(runner)
        return
    yield "student", WholeModel(runner.decoders[0], probe_precision(runner))
    others = {"teacher": runner.teacher, **source.decoders}
    # if a teacher's signals are in a cache, only its output head is in this job
    for name, decoder in others.items():
        if decoder is not None and decoder.layers():
            yield name, WholeModel(decoder, autocast_dtype(decoder.pretrained))


class StagedModel(ImageModel):
    """The student, or a teacher in the student's stages, under a layout with several stages or several context ranks.

    stages: the parts of the model on this process, by the numbers of their stages.
    """

    def __init__(
        self, runner: Runner, stages: Mapping[int, Decoder], signals: Signals, precision: torch.dtype | None
    ):
        self.stages, self.decoders, self.precision = stages, list(stages.values()), precision
        self._runner, self._forward = runner, ProbeForward(runner, signals)
        self._pipeline = runner.mesh.group("pipeline")
        self._context = runner.mesh.group("context")
        self._agreed = partial(runner.ranks.all_raise, PackingError, ProofError)

    def alone(self, document: ImageDocument) -> Tensor:
        """Return the hidden states [S, D] of the plain model on all processes. Raises ProofError on all processes if
        a stage cannot run its layers as the plain model does.
        """
        tensors: dict[str, Tensor] = {}
        arguments: dict[int, dict[str, Any]] = {}
        for number in range(self._runner.layout.stages):
            content = b""
            with self._agreed():
                if (decoder := self.stages.get(number)) is not None:
                    hidden_1SD = tensors.get(_HIDDEN)
                    with whole_sequences(decoder, self._context):
                        if hidden_1SD is None:
                            result = _first_stage(decoder, document, self._runner.layout.stages)
                        else:
                            result = {_HIDDEN: _later_stage(decoder, hidden_1SD, arguments)}
                    content = save({name: tensor.cpu().contiguous() for name, tensor in result.items()})
            if self._pipeline is not None:
                content = next(filter(None, Ranks(self._pipeline, self._runner.device).exchange(content)))
            tensors = {name: tensor.to(self._runner.device) for name, tensor in load(content).items()}
            if number == 0:
                arguments = _decoded(tensors)
        return tensors[_HIDDEN][0]

    def packed(self, documents: PackedDocuments, images: Mapping[str, Tensor]) -> Tensor | None:
        count, (rows, columns) = documents.is_padding_BS.numel(), documents.is_padding_BS.shape
        context = self._runner.layout.degrees.context
        micro_batch = MicroBatch(
            inputs=documents.inputs,
            labels_T=torch.full((count,), NO_LABEL),
            weights_T=torch.zeros(count),
            document_T=-documents.is_padding_BS.flatten().long(),
            valid_index=torch.zeros(0, dtype=torch.int64),
            media=images,
        )
        padded = micro_batch.padded(rows, -(-columns // context) * context)
        micro_batch = padded.part(self._runner.mesh.coordinate("context"), context).to(self._runner.device)
        with self._agreed():  # otherwise, the other stages would wait for a first stage that raises an error
            if (first := self.stages.get(0)) is not None:
                with library_errors(CANNOT_RUN.format(typename(first.pretrained))):
                    first(**model_inputs(micro_batch, None), head=False)
        hidden = self._forward.hidden(micro_batch)
        return hidden[-1] if hidden else None


def staged_models(runner: Runner) -> Iterator[tuple[str, StagedModel]]:
    """Yield the student of a runner, then the teacher if its layers are in the student's stages. A collective."""
    students = {number: pair.student for number, pair in runner.pairs.items()}
    yield "student", StagedModel(runner, students, {}, probe_precision(runner))
    teachers = {number: pair.teacher for number, pair in runner.pairs.items() if pair.teacher is not None}
    if runner.ranks.largest(int(any(teacher.layers() for teacher in teachers.values()))):
        precision = autocast_dtype(next(iter(teachers.values())).pretrained)
        yield "teacher", StagedModel(runner, teachers, {TEACHER: IN_STAGE}, precision)


def _first_stage(decoder: Decoder, document: ImageDocument, stages: int) -> dict[str, Tensor]:
    """Return the hidden states [1, S, D] after the first stage, and the arguments of the layers of later stages."""
    layers, outputs = numbered_layers(decoder), list[Tensor]()
    inputs: list[tuple[Tensor, dict[str, Any]]] = []  # the hidden states, and all other arguments by name or number

    def before(_: nn.Module, places: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden, *others = _named(places, options)
        inputs.append((hidden[1], dict(others)))

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(lambda _, __, out: outputs.append(hidden_of(out))) for layer in layers]
    with hooked(*hooks):
        hidden_1SD = run_alone(decoder, document)
    read = [*(hidden for hidden, _ in inputs[1:]), hidden_1SD]
    absent = [number for number, layer in enumerate(layers) if isinstance(layer, AbsentLayer)]
    for number in absent:
        if not torch.equal(outputs[number].to(read[number].dtype), read[number]):
            raise ProofError(
                f"{typename(decoder.pretrained)} adds features of images after its layer {number}, and the first of "
                f"{stages} stages has only {absent[0]} of its layers: expected fewer stages, or pipeline=1"
            )
    return {_HIDDEN: hidden_1SD, **_encoded(decoder, {number: inputs[number][1] for number in absent})}


def _later_stage(decoder: Decoder, hidden_1SD: Tensor, arguments: Mapping[int, Mapping[str, Any]]) -> Tensor:
    """Return the hidden states [1, S, D] after a stage whose layers get these arguments."""

    def replaced(number: int, _: nn.Module, places: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        (name, hidden_BSD), *others = _named(places, options)
        values = {name: hidden_BSD, **dict(others), **arguments[number]}
        return (tuple(values.pop(str(place)) for place in range(len(places))), values)

    hooks = [
        layer.register_forward_pre_hook(partial(replaced, number), with_kwargs=True)
        for number, layer in enumerate(numbered_layers(decoder))
        if not isinstance(layer, AbsentLayer)
    ]
    what = f"{typename(decoder.pretrained)} cannot run a later stage with images"
    with hooked(*hooks), reading(what, passes=ProofError):
        hidden_BSD: Tensor = decoder(None, inputs_embeds=hidden_1SD, head=False)
    return hidden_BSD


def _named(places: Sequence[Any], options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return a layer's arguments, the hidden states first. A positional argument has its number as its name."""
    named = {str(number): value for number, value in enumerate(places)} | dict(options)
    first = "0" if places else "hidden_states"
    return [(first, named.pop(first)), *named.items()]


def _encoded(decoder: Decoder, arguments: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the tensors among the arguments of layers, each tensor once, and their places as a JSON text. Raises
    ProofError for a value of a type that can contain tensors but is neither a tensor nor a list of tensors.
    """
    unique: dict[int, tuple[str, Tensor]] = {}  # the tensor's new name and the tensor, by its `id`
    places: dict[int, dict[str, Any]] = {}
    for number, layer_arguments in arguments.items():
        places[number] = {}
        for name, value in layer_arguments.items():
            members = [value] if isinstance(value, Tensor) else value
            if value is None:
                places[number][name] = None
            elif isinstance(members, list | tuple) and all(isinstance(member, Tensor) for member in members):
                numbers = [unique.setdefault(id(member), (str(len(unique)), member))[0] for member in members]
                places[number][name] = numbers[0] if isinstance(value, Tensor) else numbers
            elif not (isinstance(value, bool | int | float | str) or (isinstance(value, Mapping) and not value)):
                raise ProofError(
                    f"layer {number} of {typename(decoder.pretrained)} reads '{name}' of type "
                    f"{type(value).__name__}, which the first stage cannot send to later stages: expected "
                    "attention=sdpa, or pipeline=1"
                )
    text = torch.frombuffer(bytearray(json.dumps(places).encode()), dtype=torch.uint8)
    return {_ARGUMENTS: text, **dict(unique.values())}


def _decoded(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Any]]:
    """Return the arguments of each layer from the result of `_encoded`: tensors, tuples of tensors, and None."""
    arguments: dict[int, dict[str, Any]] = {}
    for number, places in json.loads(tensors[_ARGUMENTS].cpu().numpy().tobytes()).items():
        values: dict[str, Any] = {}
        for name, place in places.items():
            if isinstance(place, list):
                values[name] = tuple(tensors[member] for member in place)
            else:
                values[name] = None if place is None else tensors[place]
        arguments[int(number)] = values
    return arguments
