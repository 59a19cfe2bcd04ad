"""Cutting a decoder into pipeline stages: which layers go where, and a decoder with only some of its layers.

A stage keeps the model's own modules and names; layers that are elsewhere hand their input on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from stillhouse.models import Decoder
from stillhouse.models.head import NoHead
from stillhouse.parallel.loading import make_buffers

#: what transformers calls the parts of a base model that can be cut
PARTS = ("embed_tokens", "layers", "norm")
#: what a model that cannot be cut asks for
UNCUT = "expected parallel.pipeline=1, and teacher.parallel=null for a teacher"


@dataclass(frozen=True)
class Stage:
    """`number` of `count`, with a range of the student's layers and one of the teacher's."""

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


@dataclass(frozen=True)
class Cost:
    """Of a model's parts, in products per token: one layer, the head. `passes`: 1 forward, 3 with backward."""

    layers: int
    layer: float
    head: float
    passes: int


class Elsewhere(nn.Module):
    """In the place of a layer, or of the last norm, that is on another stage."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def split(stages: int, student: Cost, teacher: Cost | None) -> list[Stage]:
    """Stages of nearly equal cost, the head's share of the last one counted. Each has a layer of the student.

    Raises ValueError for more stages than the student has layers.
    """
    if stages > student.layers:
        raise ValueError(
            f"{stages} pipeline stages for a student of {student.layers} layers: expected at most one stage per layer"
        )
    models = [student] if teacher is None else [student, teacher]
    total = sum(each.passes * (each.layers * each.layer + each.head) for each in models)
    heads = sum(each.passes * each.head for each in models)
    # what is left of each stage for layers
    room = [total / stages] * (stages - 1) + [max(0.0, total / stages - heads)]
    student_cuts = _cuts(student.layers, room, least=1)
    teacher_cuts = _cuts(teacher.layers, room, least=0) if teacher is not None else [0] * (stages + 1)
    return [Stage(n, stages, range(*student_cuts[n : n + 2]), range(*teacher_cuts[n : n + 2])) for n in range(stages)]


def _cuts(layers: int, room: Sequence[float], least: int) -> list[int]:
    """Borders of the stages' layers, in proportion to their room."""
    cuts, before = [0], 0.0
    for number, each in enumerate(room, start=1):
        before += each
        wanted = round(layers * before / sum(room))
        cuts.append(min(max(wanted, cuts[-1] + least), layers - least * (len(room) - number)))
    return cuts


def cost_of(decoder: Decoder, passes: int) -> Cost:
    """From its weights: each number of a matrix is a product per token, of an expert's if the token chooses it."""
    layers, config = decoder.layers(), decoder.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_local_experts", 1)
    named = (each for layer in layers for each in layer.named_parameters())
    products = sum(each.numel() * (chosen if ".experts." in name else 1.0) for name, each in named)
    head = decoder.vocabulary_rows * config.hidden_size
    return Cost(len(layers), products / max(1, len(layers)), head, passes)


def forwards(teacher: Cost, student: Cost) -> float:
    """What the teacher's layers cost, in forwards of the student's."""
    return teacher.layers * teacher.layer / (student.layers * student.layer)


@torch.no_grad()
def require_cuttable(config: PreTrainedConfig) -> None:
    """Raise ValueError for a family that cannot be cut into stages.

    Its parts must have the names of transformers' plan for pipelines, and its backbone must do nothing beside them: a
    scaled embedding would be scaled again on every stage. Found out by running it without any part: it has to hand on
    what it is given.
    """
    plan = getattr(config.get_text_config(), "base_model_pp_plan", None)
    if not plan or set(PARTS) - plan.keys():
        raise ValueError(
            f"model type '{config.model_type}' has no pipeline plan in transformers that names "
            f"{', '.join(PARTS)}: {UNCUT}"
        )
    with torch.device("meta"):
        decoder = Decoder(AutoModelForCausalLM.from_config(config, trust_remote_code=False), verify=False)
    if missing := [part for part in PARTS if not hasattr(decoder.backbone, part)]:
        raise ValueError(
            f"the backbone of model type '{config.model_type}' has no {', '.join(missing)} of its own: {UNCUT}"
        )
    keep_layers(decoder, range(0), first=False, last=False)
    decoder.to_empty(device="cpu")
    make_buffers(decoder)
    given = torch.linspace(-1, 1, 4 * config.get_text_config().hidden_size, dtype=torch.float32).view(1, 4, -1)
    if not torch.equal(decoder(None, torch.arange(4)[None], inputs_embeds=given), given):
        raise ValueError(
            f"model type '{config.model_type}' changes its embeddings on the way to its first layer, which every "
            f"part of it would do again: {UNCUT}"
        )


def require_training(student: Decoder, stages: Sequence[Stage]) -> None:
    """Raise ValueError for a stage without anything that trains: torch's schedules send gradients through all."""
    layers = student.layers()
    for stage in stages:
        held = (parameter for number in stage.student for parameter in layers[number].parameters())
        if not any(parameter.requires_grad for parameter in held):
            raise ValueError(
                f"nothing trains on stage {stage.number + 1} of {stage.count}, layers {stage.student.start} to "
                f"{stage.student.stop - 1} of the student: expected an adapter in layers of every stage "
                "(student.adapter.targets), or a lower parallel.pipeline"
            )


def keep_layers(decoder: Decoder, layers: range, *, first: bool, last: bool) -> None:
    """Take from a decoder what is on other stages: it then takes hidden states if it is not the first, and gives
    hidden states if it is not the last. Of a family that `require_cuttable` accepts.
    """
    backbone: Any = decoder.backbone
    for number in range(len(backbone.layers)):
        if number not in layers:
            backbone.layers[number] = Elsewhere()
    if not last:
        backbone.norm, decoder.head = Elsewhere(), NoHead()
        decoder.pretrained.set_output_embeddings(None)
    if not first:
        backbone.embed_tokens = None
    decoder.tied = decoder.tied and first and last
