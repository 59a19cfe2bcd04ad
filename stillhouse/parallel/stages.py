"""Cutting a decoder into pipeline stages: which layers go where, and a decoder with only some of its layers.

A stage keeps the model's own modules and names; layers that are elsewhere hand their input on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stillhouse.models import Decoder
from stillhouse.models.head import NoHead

#: what transformers calls the parts of a base model that can be cut
PARTS = ("embed_tokens", "layers", "norm")


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
    """From its weights: a number of a matrix is a product per token; only the experts that a token meets count."""
    config = decoder.config.get_text_config()
    share = (getattr(config, "num_experts_per_tok", None) or 1) / (getattr(config, "num_experts", None) or 1)
    layers = decoder.layers()
    products = sum(
        parameter.numel() * (share if ".experts." in name else 1)
        for layer in layers
        for name, parameter in layer.named_parameters()
    )
    return Cost(len(layers), products / len(layers), decoder.vocabulary_rows * config.hidden_size, passes)


def keep_layers(decoder: Decoder, layers: range, *, first: bool, last: bool) -> None:
    """Take from a decoder what is on other stages: it then takes hidden states if it is not the first, and gives
    hidden states if it is not the last.

    Raises ValueError for a model whose parts have other names than transformers' plan for pipelines says.
    """
    plan = getattr(decoder.config.get_text_config(), "base_model_pp_plan", None)
    if not plan or set(PARTS) - plan.keys():
        raise ValueError(
            f"model type '{decoder.config.model_type}' has no pipeline plan in transformers that names "
            f"{', '.join(PARTS)}: expected parallel.pipeline=1"
        )
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
