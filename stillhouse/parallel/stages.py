"""Pipeline stages: decides which layers each stage gets, and removes all other layers from a decoder.

A stage keeps the module names of the full model. `backbone_cut.py` decides which models can be cut, and where.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from stillhouse.dry_run import replaceable
from stillhouse.models import Decoder
from stillhouse.models.families import ModelFacts, is_of_experts
from stillhouse.models.lm_head import PassThrough
from stillhouse.parallel.backbone_cut import AbsentLayer, BackboneCut, continue_with_received, remove_part


@dataclass(frozen=True)
class Stage:
    """Stage `number` of `count`. student, teacher: the numbers of each model's layers on the stage"""

    number: int
    count: int
    student: range
    teacher: range

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1


class HiddenSize(NamedTuple):
    """The width and the dtype of a model's hidden states."""

    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StagePlan:
    """Properties of the full models that a pipeline needs after the models have been cut.

    student, teacher: the sizes of the hidden states. `teacher` is None if no teacher runs in the stages.
    cuts: the cut of the student's backbone, and the cut of the teacher's backbone, or None without a teacher model.
    tied: whether the student's embedding (first stage) and its head (last stage) are trained as one weight.
    copies_embedding: whether the last stage trains a copy of the embedding, as its tied head or for MTP layers.
    """

    stages: list[Stage]
    student: HiddenSize
    teacher: HiddenSize | None
    cuts: tuple[BackboneCut, BackboneCut | None]
    tied: bool
    copies_embedding: bool


@dataclass(frozen=True)
class Cost:
    """A forward's multiplications per token: `layer` in each of `layers` layers, and `head` in the output head.

    passes: 1 if the model runs only forward, 3 if it runs forward and backward.
    """

    layers: int
    layer: float
    head: float
    passes: int


@replaceable
def split(stages: int, student: Cost, teacher: Cost | None) -> list[Stage]:
    """Return stages of nearly equal cost. The last stage has the heads; each stage has at least one student layer.

    Raises ValueError if there are more stages than layers of the student.
    """
    if stages > student.layers:
        raise ValueError(
            f"{stages} pipeline stages for a student of {student.layers} layers: expected at most one stage per layer"
        )
    models = [student] if teacher is None else [student, teacher]
    share = sum(model.passes * (model.layers * model.layer + model.head) for model in models) / stages
    # the budget for the layers of each stage: an equal share of the total, minus the heads' cost on the last stage
    room = [share] * (stages - 1) + [max(0.0, share - sum(model.passes * model.head for model in models))]
    cuts = []
    for layers, least in ((student.layers, 1), (0 if teacher is None else teacher.layers, 0)):
        borders = [0]
        for number, before in enumerate(accumulate(room), start=1):
            wanted = round(layers * before / sum(room))
            borders.append(min(max(wanted, borders[-1] + least), layers - least * (stages - number)))
        cuts.append([range(*border) for border in pairwise(borders)])
    return [Stage(number, stages, *layers) for number, layers in enumerate(zip(*cuts, strict=True))]


def cost_of(decoder: Decoder, passes: int) -> Cost:
    """Estimate a model's cost: one multiplication per token for each element of a weight that the token uses."""
    layers, chosen = decoder.layers(), ModelFacts(decoder.config).experts_per_token
    depths = 0 if decoder.mtp is None else decoder.mtp.depths
    named = [parameter for layer in layers for parameter in layer.named_parameters()]
    # the weights of a layer's experts are stacked: dim 0 is the expert
    products = sum(weight.numel() * (chosen / len(weight) if is_of_experts(name) else 1.0) for name, weight in named)
    layer, head = products / max(1, len(layers)), decoder.vocabulary_rows * decoder.width
    # each MTP depth costs an additional layer and an additional pass of the head, on the last stage
    return Cost(len(layers), layer, head + depths * (layer + head), passes)


def require_shared_states(name: str, cut: BackboneCut, stages: Sequence[range]) -> None:
    """Raise ValueError if a layer reads keys and values of a layer on another stage. stages: each stage's layers"""
    for reader, writer in cut.states.items():
        for number, layers in enumerate(stages, start=1):
            if reader in layers and writer not in layers:
                raise ValueError(
                    f"layer {reader} of the {name} reads keys and values of layer {writer}, and stage {number} of "
                    f"{len(stages)} begins with layer {layers.start}: expected fewer stages, or pipeline=1"
                )


def require_training(student: Decoder, stages: Sequence[Stage]) -> None:
    """Raise ValueError for a stage without trained layers, because torch's schedules send gradients to all stages."""
    layers = student.layers()
    for stage in stages:
        if not any(weight.requires_grad for number in stage.student for weight in layers[number].parameters()):
            raise ValueError(
                f"no parameter is trained on stage {stage.number + 1} of {stage.count}, layers {stage.student.start} "
                f"to {stage.student.stop - 1} of the student: expected an adapter in layers of every stage, "
                "or fewer stages"
            )


def require_pairs(student: Decoder, stages: Sequence[Stage]) -> None:
    """Raise ValueError if hidden-state matching compares layers of student and teacher on different stages."""
    for layer, teacher_layer in (pair for loss in student.layer_losses.values() for pair in loss.layer_pairs):
        stage = next(stage for stage in stages if layer in stage.student)
        if teacher_layer not in (layers := stage.teacher):
            expected = (
                f"teacher layer {layers.start} to {layers.stop - 1}" if layers else "another layer of the student"
            )
            raise ValueError(
                f"layer {layer} of the student is on stage {stage.number + 1} of {stage.count}, and layer "
                f"{teacher_layer} of the teacher is not: a pair of layers must be on one stage; expected "
                f"{expected}, or fewer stages"
            )


def keep_layers(
    decoder: Decoder, cut: BackboneCut, layers: range, *, first: bool, last: bool, norm: bool | None = None
) -> None:
    """Remove the parts of other stages from a decoder.

    cut: the result of `require_cuttable` for the decoder's configuration.
    layers: the numbers of this stage's layers.
    first: whether to keep the embedding and all that runs before the layers. If false, the decoder reads hidden
        states. A last stage with MTP layers keeps the embedding in any case.
    last: whether to keep the head. If false, the decoder returns hidden states.
    norm: whether to keep the final norm; by default the value of `last`.
    """
    backbone: Any = decoder.backbone
    modules = backbone.get_submodule(cut.layers)
    for number, layer in enumerate(modules):
        if number not in layers:
            modules[number] = AbsentLayer(layer, cut.returns_tuple)
    for loss in decoder.layer_losses.values():
        loss.keep(layers)
    for path in (() if first else cut.first + cut.beside) + (() if (last if norm is None else norm) else cut.last):
        remove_part(backbone, path)
    if not first:
        continue_with_received(backbone, modules[0])
        if not (last and decoder.mtp is not None):  # MTP layers read the embedding
            backbone.set_submodule(cut.embedding, PassThrough())
    decoder.keep_part(first=first, last=last)
