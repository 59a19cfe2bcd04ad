"""A loss between hidden states: layers of the student are trained to match the outputs of the teacher's layers.

    mse       mean over the width of (P h − g)²     FitNets, arXiv:1412.6550; TinyBERT, arXiv:1909.10351, eq. 8
    cosine    1 − cos(P h, g)                       DistilBERT, arXiv:1910.01108, section 3

h is the output of the student's layer and g the output of the teacher's layer, at the same token. P is a trained
matrix [E, D] between models of different widths, and the identity between models of the same width. The loss is a
weighted sum over target tokens, divided by the step's number of target tokens, in float32.

The two layers of a pair must be on the same pipeline stage.

B rows, S tokens per row, T = B·S, D width of the student, E width of the teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stillhouse.models.dtensors import name_seed, set_from_global
from stillhouse.models.layer_hooks import LayerLossModule, hidden_of, with_loss

#: prefix of the names of pairs
HIDDEN = "hidden_"


@dataclass(frozen=True)
class HiddenPair:
    """A layer of the student, the layer of the teacher that it has to match, and the loss between them.

    student, teacher: numbers of layers, from 0 on; −1 is the last layer. kind: "mse" or "cosine". scale: the factor
    of this loss in the training loss.
    """

    student: int
    teacher: int
    kind: str = "mse"
    scale: float = 1.0

    @property
    def name(self) -> str:
        """The name of the pair's projector, and of its loss in a step's sums."""
        return f"{HIDDEN}{self.student}_{self.teacher}_{self.kind}"


@dataclass
class HiddenMatchLoss:
    """The inputs and results of the hidden-state loss for one micro-batch on one stage.

    weights_T: the weights of the target tokens. normalizer: the number of target tokens of the step. teacher_BSE: the
    outputs of the teacher's layers by layer number. losses: for each pair, the weighted sum over tokens, without the
    pair's scale; the forward pass fills it.
    """

    weights_T: Tensor
    normalizer: float
    teacher_BSE: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)


class HiddenMatch(LayerLossModule):
    """The projectors of a student, and the hooks of its layers.

    layers: all layers of the student. pairs: the pairs on this stage, with different names and with layer numbers
    from 0 on. all_pairs: the pairs of all stages. projectors: the matrices P by the pairs' names; empty for models of
    the same width.
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
        """Forward hook of a student's layer: adds the pair's loss to the graph and records it."""
        loss = self.current.value
        if loss is None or not torch.is_grad_enabled():
            return output
        hidden_BSD = self.current.packed(hidden_of(output))
        teacher_TE = loss.teacher_BSE[pair.teacher].flatten(0, 1)
        with torch.autocast(hidden_BSD.device.type, enabled=False):
            hidden_TE = hidden_BSD.flatten(0, 1).float()
            if pair.name in self.projectors:
                hidden_TE = self.projectors[pair.name](hidden_TE)  # FSDP gathers the weight in the module's forward
            value = (distance(pair.kind, hidden_TE, teacher_TE.float()) * loss.weights_T).sum()
        if not self.current.recomputing:
            loss.losses[pair.name] = value.detach()
        return with_loss(output, pair.scale / loss.normalizer * value)


def distance(kind: str, hidden_TE: Tensor, teacher_TE: Tensor) -> Tensor:
    """Return the loss of each token [T]; kind: "mse" or "cosine"."""
    if kind == "mse":
        return (hidden_TE - teacher_TE).square().mean(1)
    return 1 - F.cosine_similarity(hidden_TE, teacher_TE, dim=1)
