"""A loss between hidden states: layers of the student learn the outputs of layers of the teacher.

    mse       mean over the width of (P h − g)²     FitNets, arXiv:1412.6550; TinyBERT, arXiv:1909.10351, eq. 8
    cosine    1 − cos(P h, g)                       DistilBERT, arXiv:1910.01108, section 3

h is the output of the student's layer and g that of the teacher's, at the same token. P is a trained matrix [E, D]
between models of different widths, and the identity between models of the same width. The loss is a sum over target
tokens with their weights, divided by the step's number of target tokens, in float32.

A pair of layers must be on one stage of a pipeline.

B rows, S tokens per row, T = B·S, D width of the student, E width of the teacher.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stillhouse.models.decoder import Decoder
from stillhouse.models.dtensors import name_seed, set_from_global
from stillhouse.models.layer_hooks import AddLoss, Running, hooked
from stillhouse.models.model_checks import layer_list

#: the beginning of the names of pairs
HIDDEN = "hidden_"


@dataclass(frozen=True)
class HiddenPair:
    """A layer of the student, the layer of the teacher that it learns, and the loss between them.

    student, teacher: numbers of layers from 0 on; the last layer is −1. kind: "mse" or "cosine". scale: the factor of
    this loss in the minimised loss.
    """

    student: int
    teacher: int
    kind: str = "mse"
    scale: float = 1.0

    @property
    def name(self) -> str:
        """The name of the pair's loss among a step's sums, and of its projector."""
        return f"{HIDDEN}{self.student}_{self.teacher}_{self.kind}"


@dataclass
class HiddenMatchLoss:
    """The inputs and results of the hidden-state loss for one micro-batch on one stage.

    weights_T: of the target tokens. normalizer: the target tokens of the whole step. teacher_BSE: the outputs of the
    teacher's layers by their numbers. losses: of each pair, the weighted sum over tokens, without the pair's scale;
    the forward pass fills it.
    """

    weights_T: Tensor
    normalizer: float
    teacher_BSE: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)


class HiddenMatch(nn.Module):
    """The projectors of a student, and the hooks of its layers.

    pairs: those on this stage, with different names and layer numbers from 0 on. all_pairs: those of all stages.
    projectors: by the name of the pair, those between different widths. So a checkpoint's projector is never that of
    another pair.
    """

    def __init__(self, pairs: Sequence[HiddenPair], projectors: nn.ModuleDict):
        super().__init__()
        self.all_pairs = self.pairs = tuple(pairs)
        self.projectors = projectors
        self.running = Running[HiddenMatchLoss]()

    def attach(self, layers: Sequence[nn.Module]) -> None:
        """Register the hooks. layers: all layers of the student."""
        for pair in self.pairs:
            layers[pair.student].register_forward_hook(partial(self._add_loss, pair))

    def keep(self, layers: range) -> None:
        """Remove the pairs whose student's layers are on other stages."""
        for pair in self.pairs:
            if pair.student not in layers and pair.name in self.projectors:
                del self.projectors[pair.name]
        self.pairs = tuple(pair for pair in self.pairs if pair.student in layers)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Initialise the projectors on this process, with rows of a length of about 1.

        The values depend on the seed and the pair's name, and not on the layout (`name_seed`).
        """
        for name, projector in self.projectors.items():
            weight = projector.get_parameter("weight")
            generator = torch.Generator().manual_seed(name_seed(seed, f"hidden_match {name}"))
            set_from_global(weight, torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)

    @property
    def teacher_layers(self) -> set[int]:
        """The numbers of the teacher's layers that the pairs need."""
        return {pair.teacher for pair in self.pairs}

    def _add_loss(self, pair: HiddenPair, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of a student's layer."""
        loss, recomputing = self.running.current
        if loss is None or not torch.is_grad_enabled():
            return output
        hidden_BSD = output[0] if isinstance(output, tuple) else output
        teacher_TE = loss.teacher_BSE[pair.teacher].flatten(0, 1)
        with torch.autocast(hidden_BSD.device.type, enabled=False):
            hidden_TE = hidden_BSD.flatten(0, 1).float()
            if pair.name in self.projectors:
                hidden_TE = self.projectors[pair.name](hidden_TE)  # a call, so that FSDP gathers the weight
            value = (distance(pair.kind, hidden_TE, teacher_TE.float()) * loss.weights_T).sum()
        if not recomputing:
            loss.losses[pair.name] = value.detach()
        hidden_BSD = AddLoss.apply(hidden_BSD, pair.scale / loss.normalizer * value)
        return (hidden_BSD, *output[1:]) if isinstance(output, tuple) else hidden_BSD


def distance(kind: str, hidden_TE: Tensor, teacher_TE: Tensor) -> Tensor:
    """Return the loss of each token [T]; kind: "mse" or "cosine"."""
    if kind == "mse":
        return (hidden_TE - teacher_TE).square().mean(1)
    return 1 - F.cosine_similarity(hidden_TE, teacher_TE, dim=1)


def match_hidden(student: Decoder, pairs: Sequence[HiddenPair], teacher_layers: int, teacher_width: int) -> None:
    """Let layers of a whole student learn the outputs of a teacher's layers, in the context `student.matching`.

    pairs: negative numbers count from the last layer. Raises ValueError for a layer that a model does not have, for
    a pair that is given twice, and for a student whose layers cannot be found.
    """
    layers, width = numbered_layers(student), student.config.get_text_config().hidden_size
    numbered = tuple(
        replace(
            pair,
            student=_number(pair.student, len(layers), "student"),
            teacher=_number(pair.teacher, teacher_layers, "teacher"),
        )
        for pair in pairs
    )
    names = [pair.name for pair in numbered]
    if twice := next((pair for pair in numbered if names.count(pair.name) > 1), None):
        raise ValueError(
            f"layers {twice.student} of the student and {twice.teacher} of the teacher have the loss {twice.kind} "
            "more than once: expected every pair once, with the sum of the scales"
        )
    device = student.pretrained.device
    # the loss is computed in float32, so that rounding to the student's dtype would gain nothing
    projectors = {
        name: nn.Linear(width, teacher_width, bias=False, device=device, dtype=torch.float32)
        for name in (names if width != teacher_width else ())
    }
    match = HiddenMatch(numbered, nn.ModuleDict(projectors))
    match.attach(layers)
    student.hidden_match = match
    student.running_losses.append(match.running)


def numbered_layers(decoder: Decoder) -> list[nn.Module]:
    """Return all layers of a decoder; on a stage of a pipeline, with empty modules in place of absent layers.

    Raises ValueError for a model whose layers are not in one list.
    """
    return list(decoder.backbone.get_submodule(layers_name(decoder)))  # type: ignore[call-overload]


def layers_name(decoder: Decoder) -> str:
    """Return the name in the backbone of the list of a decoder's layers.

    Raises ValueError for a model whose layers are not in one list.
    """
    layers = layer_list(decoder.pretrained)
    if layers is None:
        raise ValueError(
            f"model type '{decoder.config.model_type}' has not exactly one list of "
            f"{decoder.config.get_text_config().num_hidden_layers} layers: expected one, so that layers are found by "
            "their numbers"
        )
    return next(name for name, module in decoder.backbone.named_modules() if module is layers)


def recorded(decoder: Decoder, numbers: Iterable[int], into: dict[int, Tensor]) -> AbstractContextManager[None]:
    """Return a context in which a forward of the decoder writes the outputs [B, S, D] of some layers into a dict."""
    layers = numbered_layers(decoder)
    return hooked(*(layers[number].register_forward_hook(partial(_record, number, into)) for number in numbers))


def _record(number: int, into: dict[int, Tensor], _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
    into[number] = output[0] if isinstance(output, tuple) else output


def _number(number: int, layers: int, which: str) -> int:
    if not -layers <= number < layers:
        raise ValueError(
            f"layer {number} of the {which}, which has {layers} layers: expected 0 to {layers - 1}, "
            f"or -{layers} to -1"
        )
    return number % layers
