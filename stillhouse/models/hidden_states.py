"""The loss between hidden states: layers of the student are trained to match the outputs of the teacher's layers.

    mse       mean over the width of (P h − g)²     FitNets, arXiv:1412.6550; TinyBERT, arXiv:1909.10351, eq. 8
    cosine    1 − cos(P h, g)                       DistilBERT, arXiv:1910.01108, section 3

h is the output of the student's layer and g the output of the teacher's layer, at the same token. P is a trained
matrix [E, D] between models of different widths, and the identity between models of the same width. The loss is a
weighted sum over target tokens, divided by the step's number of target tokens, in float32. The two layers of a pair
must be on the same pipeline stage.

B sequences, S tokens of a sequence on this rank, T = B·S, D width of the student, E width of the teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stillhouse.models.dtensors import name_seed, set_from_global
from stillhouse.models.layer_hooks import LayerLossModule, hidden_of, numbered_layers, with_loss

#: the prefix of the names of pairs
HIDDEN = "hidden_"


@dataclass(frozen=True)
class HiddenPair:
    """A layer of the student, and the teacher's layer that it has to match. Layers are numbered from 0; −1 is the
    last layer.
    """

    student: int
    teacher: int
    kind: str = "mse"  # or "cosine"
    scale: float = 1.0  # the factor of this loss in the training loss

    @property
    def name(self) -> str:
        """The name of the pair's projector, and of its loss in a step's sums."""
        return f"{HIDDEN}{self.student}_{self.teacher}_{self.kind}"


@dataclass
class HiddenMatchLoss:
    """The inputs and results of the hidden-state loss for one micro-batch on one stage.

    losses: the weighted sum over tokens for each pair, without the pair's scale. The forward pass adds the entries.
    """

    weights_T: Tensor  # the weights of the target tokens
    normalizer: float  # the number of target tokens of the step
    teacher_BSE: dict[int, Tensor] = field(default_factory=dict)  # the outputs of the teacher's layers, by number
    losses: dict[str, Tensor] = field(default_factory=dict)


class HiddenMatch(LayerLossModule):
    """The projectors of a student, and the hooks of its layers.

    layers: all layers of the student.
    pairs: the pairs on this stage, with different names and without negative layer numbers.
    all_pairs: the pairs of all stages.
    projectors: the matrices P by the pairs' names; empty for equal widths.
    """

    name = "hidden_match"

    def __init__(self, layers: Sequence[nn.Module], pairs: Sequence[HiddenPair], projectors: nn.ModuleDict):
        super().__init__()
        self.all_pairs = self.pairs = tuple(pairs)
        self.layer_pairs = [(pair.student, pair.teacher) for pair in pairs]
        self.projectors = projectors
        for pair in self.pairs:
            layers[pair.student].register_forward_hook(partial(self._add_loss, pair))

    def keep(self, layers: range) -> None:
        """Remove the pairs of other stages. layers: the numbers of the student's layers on this stage."""
        for pair in self.pairs:
            if pair.student not in layers and pair.name in self.projectors:
                del self.projectors[pair.name]
        self.pairs = tuple(pair for pair in self.pairs if pair.student in layers)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialise the projectors with rows of norm about 1, independently of the layout (`name_seed`)."""
        for name, projector in self.projectors.items():
            weight = projector.get_parameter("weight")
            generator = torch.Generator().manual_seed(name_seed(seed, f"hidden_match {name}"))
            set_from_global(weight, torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)

    def _add_loss(self, pair: HiddenPair, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of a student's layer: adds the pair's loss to the graph and records its value."""
        loss = self.current.value
        if loss is None or not torch.is_grad_enabled():
            return output
        hidden_TD = self.current.packed_tokens(hidden_of(output).flatten(0, 1))
        teacher_TE = loss.teacher_BSE[pair.teacher].flatten(0, 1).float()
        with torch.autocast(hidden_TD.device.type, enabled=False):
            hidden_TE = hidden_TD.float()
            if pair.name in self.projectors:
                hidden_TE = self.projectors[pair.name](hidden_TE)  # FSDP gathers the weight in the module's forward
            if pair.kind == "mse":
                distance_T = (hidden_TE - teacher_TE).square().mean(1)
            else:
                distance_T = 1 - F.cosine_similarity(hidden_TE, teacher_TE, dim=1)
            value = (distance_T * loss.weights_T).sum()
        if not self.current.recomputing:
            loss.losses[pair.name] = value.detach()
        return with_loss(output, pair.scale / loss.normalizer * value)


def match_hidden(student: Any, pairs: Sequence[HiddenPair], teacher_layers: int, teacher_width: int) -> None:
    """Prepare layers of an unsharded `Decoder` for the hidden-state loss, by adding a `HiddenMatch`.

    Raises ValueError for a layer that a model does not have, for a repeated pair, and for a student whose layers
    cannot be found.
    """
    layers, width = numbered_layers(student), student.width
    for pair in pairs:
        for which, value, count in (
            ("student", pair.student, len(layers)),
            ("teacher", pair.teacher, teacher_layers),
        ):
            if not -count <= value < count:
                raise ValueError(
                    f"layer {value} of the {which}, which has {count} layers: expected 0 to {count - 1}, "
                    f"or -{count} to -1"
                )
    numbered = [
        replace(pair, student=pair.student % len(layers), teacher=pair.teacher % teacher_layers) for pair in pairs
    ]
    names = [pair.name for pair in numbered]
    if twice := next((pair for pair in numbered if names.count(pair.name) > 1), None):
        raise ValueError(
            f"layers {twice.student} of the student and {twice.teacher} of the teacher have the loss {twice.kind} "
            "more than once: expected every pair once, with the sum of the scales"
        )
    device = student.pretrained.device
    # float32, because the loss is computed in float32
    projectors = {
        name: nn.Linear(width, teacher_width, bias=False, device=device, dtype=torch.float32)
        for name in (names if width != teacher_width else ())
    }
    student.add_layer_loss(HiddenMatch(list(layers), numbered, nn.ModuleDict(projectors)))
