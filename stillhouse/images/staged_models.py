"""Runs documents with images through a model whose layers or sequences are distributed, to prove it.

Under context parallelism, every process runs the documents alone without it. In a pipeline, no process has the whole
model. But the first stage runs the code of the whole backbone with the images, so it knows with which arguments the
plain model calls each layer: positions of several axes, or masks for the images. For a document alone, the later
stages run their layers with these arguments in place of those that they compute themselves. The result is that of the
plain model. Packed documents run under the layout, as in training.

S tokens of a document, B rows, D width.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from stillhouse.data import MicroBatch
from stillhouse.data.micro_batch import NO_LABEL
from stillhouse.images.proof import ImageDocument, PackedDocuments, image_packing_errors, run_alone
from stillhouse.libraries import reading
from stillhouse.models import Decoder, ProofError
from stillhouse.models.document_packing import PackingError
from stillhouse.models.families import layer_list
from stillhouse.models.forward_modes import autocast_dtype
from stillhouse.models.layer_hooks import hidden_of, hooked
from stillhouse.models.model_checks import typename
from stillhouse.objective import TEACHER, Signals
from stillhouse.parallel.apply.context_parallel import whole_sequences
from stillhouse.parallel.backbone_cut import AbsentLayer
from stillhouse.parallel.ranks import Ranks
from stillhouse.parallel.runner import Runner
from stillhouse.parallel.teacher_student_pair import IN_STAGE, model_inputs
from stillhouse.proofs.layouts import ProbeForward, probe_precision

_HIDDEN, _ARGUMENTS = "hidden", "arguments"


class StagedModel:
    """The student, or the teacher in its stages, as a model for `prove_image_model`.

    The layout has several stages or several context ranks.

    stages: its parts on this process, by the numbers of their stages.
    precision: the dtype of its matrix products; None: that of its weights.
    """

    def __init__(
        self, runner: Runner, stages: Mapping[int, Decoder], signals: Signals, precision: torch.dtype | None
    ):
        self.stages, self.precision = stages, precision
        self._runner, self._forward = runner, ProbeForward(runner, signals)
        self._pipeline = runner.mesh.group("pipeline")
        self._context = runner.mesh.group("context")

    @property
    def decoders(self) -> Sequence[Decoder]:
        return list(self.stages.values())

    def alone(self, document: ImageDocument) -> Tensor:
        """Return the hidden states [S, D] of the plain model, on all processes.

        Raises ProofError on all processes if a stage cannot run its layers as the plain model does.
        """
        tensors: dict[str, Tensor] = {}
        arguments: dict[int, dict[str, Any]] = {}
        for number in range(self._runner.layout.stages):
            content = b""
            with self._raised():
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
        """Return the hidden states [B, S, D] under the layout; None on processes without the last stage."""
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
        with self._raised():  # the other stages would wait for a first stage that raises an error in the pipeline
            if (first := self.stages.get(0)) is not None:
                with image_packing_errors(first):
                    first(**model_inputs(micro_batch, None), head=False)
        hidden = self._forward.hidden(micro_batch)
        return hidden[-1] if hidden else None

    @contextmanager
    def _raised(self) -> Iterator[None]:
        with self._runner.ranks.all_raise(PackingError, ProofError):
            yield


def staged_models(runner: Runner) -> Iterator[tuple[str, StagedModel]]:
    """Yield the student of a runner, then the teacher if its layers are in the student's stages. A collective."""
    students = {number: pair.student for number, pair in runner.pairs.items()}
    yield "student", StagedModel(runner, students, {}, probe_precision(runner))
    teachers = {number: pair.teacher for number, pair in runner.pairs.items() if pair.teacher is not None}
    if runner.ranks.largest(int(any(teacher.layers() for teacher in teachers.values()))):
        precision = autocast_dtype(next(iter(teachers.values())).pretrained)
        yield "teacher", StagedModel(runner, teachers, {TEACHER: IN_STAGE}, precision)


@dataclass
class _Calls:
    """How a backbone calls its layers, in order. arguments: all but the hidden states, by name or place"""

    inputs: list[Tensor] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def before(self, _: nn.Module, places: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden, *arguments = _named(places, options)
        self.inputs.append(hidden[1])
        self.arguments.append(dict(arguments))

    def after(self, _: nn.Module, __: Any, output: Any) -> None:
        self.outputs.append(hidden_of(output))


def _first_stage(decoder: Decoder, document: ImageDocument, stages: int) -> dict[str, Tensor]:
    """Return the hidden states [1, S, D] after the first stage, and the arguments of the layers of later stages."""
    calls, layers = _Calls(), _layers(decoder)
    hooks = [layer.register_forward_pre_hook(calls.before, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(calls.after) for layer in layers]
    with hooked(*hooks):
        hidden_1SD = run_alone(decoder, document)
    read = [*calls.inputs[1:], hidden_1SD]
    absent = [number for number, layer in enumerate(layers) if isinstance(layer, AbsentLayer)]
    for number in absent:
        if not torch.equal(calls.outputs[number].to(read[number].dtype), read[number]):
            raise ProofError(
                f"{typename(decoder.pretrained)} adds features of images behind its layer {number}, and the first of "
                f"{stages} stages has only {absent[0]} of its layers: expected fewer stages, or pipeline=1"
            )
    return {_HIDDEN: hidden_1SD, **_encoded(decoder, {number: calls.arguments[number] for number in absent})}


def _later_stage(decoder: Decoder, hidden_1SD: Tensor, arguments: Mapping[int, Mapping[str, Any]]) -> Tensor:
    """Return the hidden states [1, S, D] after a stage whose layers get these arguments."""

    def given(
        number: int, _: nn.Module, places: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (name, hidden_BSD), *others = _named(places, options)
        values = {name: hidden_BSD, **dict(others), **arguments[number]}
        return (tuple(values.pop(str(place)) for place in range(len(places))), values)

    hooks = [
        layer.register_forward_pre_hook(partial(given, number), with_kwargs=True)
        for number, layer in enumerate(_layers(decoder))
        if not isinstance(layer, AbsentLayer)
    ]
    described = typename(decoder.pretrained)
    with hooked(*hooks), reading(f"{described} cannot run a later stage with images", passes=ProofError):
        hidden_BSD: Tensor = decoder(None, inputs_embeds=hidden_1SD, head=False)
    return hidden_BSD


def _named(places: Sequence[Any], options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return a layer's arguments, first its hidden states, with their names, or their numbers if they have none."""
    named = {str(number): value for number, value in enumerate(places)} | dict(options)
    first = "0" if places else "hidden_states"
    return [(first, named.pop(first)), *named.items()]


def _layers(decoder: Decoder) -> nn.ModuleList:
    layers = layer_list(decoder.pretrained)
    assert layers is not None, "a pipeline of a model whose layers are not known"
    return layers


def _encoded(decoder: Decoder, arguments: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the tensors among arguments of layers, each one once, and a text that says where they belong.

    Raises ProofError for a value that has tensors but is not one, or a list of them.
    """
    unique: dict[int, Tensor] = {}
    places: dict[int, dict[str, Any]] = {}

    def place_of(tensor: Tensor) -> str:
        unique[id(tensor)] = tensor
        return str(list(unique).index(id(tensor)))

    for number, layer_arguments in arguments.items():
        places[number] = {}
        for name, value in layer_arguments.items():
            if value is None or isinstance(value, Tensor):
                places[number][name] = None if value is None else place_of(value)
            elif isinstance(value, list | tuple) and all(isinstance(member, Tensor) for member in value):
                places[number][name] = [place_of(member) for member in value]
            elif not (isinstance(value, bool | int | float | str) or (isinstance(value, Mapping) and not value)):
                raise ProofError(
                    f"layer {number} of {typename(decoder.pretrained)} reads '{name}' of type "
                    f"{type(value).__name__}, which cannot be compared between stages: expected attention sdpa, or "
                    "pipeline=1"
                )
    text = torch.frombuffer(bytearray(json.dumps(places).encode()), dtype=torch.uint8)
    return {_ARGUMENTS: text, **{str(place): tensor for place, tensor in enumerate(unique.values())}}


def _decoded(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Any]]:
    """Return the arguments of `_encoded`, by layer."""

    def value_of(place: Any) -> Any:
        if isinstance(place, list):
            return tuple(tensors[member] for member in place)
        return None if place is None else tensors[place]

    places = json.loads(tensors[_ARGUMENTS].cpu().numpy().tobytes()).items()
    return {int(number): {name: value_of(place) for name, place in named.items()} for number, named in places}
