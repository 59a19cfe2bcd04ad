"""Pipeline stages: decides which layers each stage gets, and removes all other layers from a decoder.

A stage keeps the model's modules and their names. Layers of other stages are replaced by `PassThrough`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from stillhouse.libraries import reading
from stillhouse.models import Decoder
from stillhouse.models.lm_head import PassThrough
from stillhouse.models.model_parts import STAGE_PARTS, experts_per_token, is_of_experts, parallel_plan
from stillhouse.models.pretrained import auto_class
from stillhouse.parallel.sharded_loading import make_buffers

#: the advice in error messages for models that cannot be cut into stages
UNCUT = "expected pipeline=1, and no separate layout for a teacher"


@dataclass(frozen=True)
class Stage:
    """Stage `number` of `count`. student, teacher: the numbers of their layers on the stage"""

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

    def empty(self, shape_BS: tuple[int, int], device: torch.device) -> Tensor:
        return torch.empty(*shape_BS, self.width, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class StagePlan:
    """Properties of the full models that a pipeline needs after the models have been cut.

    student, teacher: the sizes of the hidden states; teacher=None: no teacher's layers run in the stages.
    tied: whether the student's embedding (first stage) and its head (last stage) are trained as one weight.
    copies_embedding: whether the last stage trains a copy of the embedding, as its tied head or for MTP layers.
    teacher_cost: see `relative_cost`.
    """

    stages: list[Stage]
    student: HiddenSize
    teacher: HiddenSize | None
    tied: bool
    copies_embedding: bool
    teacher_cost: float


@dataclass(frozen=True)
class Cost:
    """The multiplications of a forward per token: `layer` for each of `layers` layers, and `head` for the head.

    passes: 1 if the model runs only forward, 3 if it runs forward and backward.
    """

    layers: int
    layer: float
    head: float
    passes: int


def split(stages: int, student: Cost, teacher: Cost | None) -> list[Stage]:
    """Return stages of nearly equal cost. The last stage has the heads; each stage has at least one student layer.

    Raises ValueError if there are more stages than layers of the student.
    """
    if stages > student.layers:
        raise ValueError(
            f"{stages} pipeline stages for a student of {student.layers} layers: expected at most one stage per layer"
        )
    models = [student] if teacher is None else [student, teacher]
    total = sum(model.passes * (model.layers * model.layer + model.head) for model in models)
    heads = sum(model.passes * model.head for model in models)
    # what the layers of each stage may cost: an equal share of the total; on the last stage, less the heads' cost
    room = [total / stages] * (stages - 1) + [max(0.0, total / stages - heads)]
    student_cuts = _cuts(student.layers, room, least=1)
    teacher_cuts = _cuts(teacher.layers, room, least=0) if teacher is not None else [0] * (stages + 1)
    return [Stage(n, stages, range(*student_cuts[n : n + 2]), range(*teacher_cuts[n : n + 2])) for n in range(stages)]


def _cuts(layers: int, room: Sequence[float], least: int) -> list[int]:
    """Return the first layer of each stage, and the end of the last stage.

    room: what the layers of each stage may cost. A stage gets layers in proportion to it, but at least `least`.
    """
    cuts, before = [0], 0.0
    for number, stage_room in enumerate(room, start=1):
        before += stage_room
        wanted = round(layers * before / sum(room))
        cuts.append(min(max(wanted, cuts[-1] + least), layers - least * (len(room) - number)))
    return cuts


def cost_of(decoder: Decoder, passes: int) -> Cost:
    """Estimate a model's cost: one multiplication per token for each element of a weight. The weights of experts are
    scaled by the share of experts that a token uses.
    """
    layers, chosen = decoder.layers(), experts_per_token(decoder.config)
    depths = 0 if decoder.mtp is None else decoder.mtp.depths
    named = [parameter for layer in layers for parameter in layer.named_parameters()]
    # the weights of a layer's experts are stacked: dim 0 is the expert
    products = sum(weight.numel() * (chosen / len(weight) if is_of_experts(name) else 1.0) for name, weight in named)
    layer, head = products / max(1, len(layers)), decoder.vocabulary_rows * decoder.width
    # each MTP depth costs an additional layer and an additional pass of the head, on the last stage
    return Cost(len(layers), layer, head + depths * (layer + head), passes)


def relative_cost(teacher: Cost, student: Cost) -> float:
    """Return the cost of a forward of the teacher's layers, divided by the cost for the student's layers."""
    return teacher.layers * teacher.layer / (student.layers * student.layer)


@torch.no_grad()
def require_cuttable(config: PreTrainedConfig) -> None:
    """Raise ValueError for a family that cannot be cut into stages.

    Transformers' pipeline plan must name the parts of the backbone. The backbone must not compute anything outside
    these parts, because every stage would repeat this computation. So a backbone without its parts must return its
    input unchanged.
    """
    if set(STAGE_PARTS) - parallel_plan(config, "pp").keys():
        raise ValueError(
            f"model type '{config.model_type}' has no pipeline plan in transformers that names "
            f"{', '.join(STAGE_PARTS)}: {UNCUT}"
        )
    with torch.device("meta"):
        decoder = Decoder(auto_class(config).from_config(config, trust_remote_code=False), verify=False)
    if missing := [part for part in STAGE_PARTS if not hasattr(decoder.backbone, part)]:
        raise ValueError(f"the backbone of model type '{config.model_type}' has no {', '.join(missing)}: {UNCUT}")
    keep_layers(decoder, range(0), first=False, last=False)
    decoder.to_empty(device="cpu")
    make_buffers(decoder)
    embeds = torch.linspace(-1, 1, 4 * decoder.width, dtype=torch.float32).view(1, 4, -1)
    with reading(f"model type '{config.model_type}' cannot run without its embeddings: {UNCUT}"):
        output = decoder.backbone(
            input_ids=None,
            inputs_embeds=embeds,
            position_ids=torch.arange(4)[None],
            use_cache=False,
            return_dict=True,
        )
    if not torch.equal(output.last_hidden_state, embeds):
        raise ValueError(
            f"model type '{config.model_type}' changes its embeddings before its first layer, and every stage would "
            f"repeat this change: {UNCUT}"
        )


def is_cuttable(config: PreTrainedConfig) -> bool:
    """Whether `require_cuttable` accepts a model of this family."""
    try:
        require_cuttable(config)
    except ValueError:
        return False
    return True


def require_training(student: Decoder, stages: Sequence[Stage]) -> None:
    """Raise ValueError for a stage without trained layers, because torch's schedules send gradients to all stages."""
    layers = student.layers()
    for stage in stages:
        held = (parameter for number in stage.student for parameter in layers[number].parameters())
        if not any(parameter.requires_grad for parameter in held):
            raise ValueError(
                f"no parameter is trained on stage {stage.number + 1} of {stage.count}, layers {stage.student.start} "
                f"to {stage.student.stop - 1} of the student: expected an adapter in layers of every stage, "
                "or fewer stages"
            )


def require_pairs(student: Decoder, stages: Sequence[Stage]) -> None:
    """Raise ValueError if hidden-state matching compares layers of student and teacher on different stages."""
    for layer, of_teacher in (pair for loss in student.layer_losses.values() for pair in loss.layer_pairs):
        stage = next(stage for stage in stages if layer in stage.student)
        if of_teacher not in stage.teacher:
            layers = stage.teacher
            expected = f"one of {layers.start} to {layers.stop - 1}" if layers else "a layer that is on its stage"
            raise ValueError(
                f"layer {layer} of the student is on stage {stage.number + 1} of {stage.count}, and layer "
                f"{of_teacher} of the teacher is not: hidden states are compared on one stage; expected "
                f"{expected}, or fewer stages"
            )


def keep_layers(decoder: Decoder, layers: range, *, first: bool, last: bool, norm: bool | None = None) -> None:
    """Remove the parts of other stages from a decoder. The decoder's family must pass `require_cuttable`.

    first: keep the embedding; if False, the decoder reads hidden states. A last stage with MTP layers keeps it, too.
    last: keep the head; if False, the decoder returns hidden states.
    norm: keep the final norm; None: as `last`.
    """
    backbone: Any = decoder.backbone
    for number in range(len(backbone.layers)):
        if number not in layers:
            backbone.layers[number] = PassThrough()
    for loss in decoder.layer_losses.values():
        loss.keep(layers)
    if not (last if norm is None else norm):
        backbone.norm = PassThrough()
    if not first and not (last and decoder.mtp is not None):  # MTP layers read the embedding
        backbone.embed_tokens = None
    decoder.keep_part(first=first, last=last)
