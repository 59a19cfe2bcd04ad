"""The losses inside a decoder's layers: one compares hidden states with a teacher's, the other balances experts.

Hidden states: layers of the student are trained to match the outputs of the teacher's layers.

    mse       mean over the width of (P h − g)²     FitNets, arXiv:1412.6550; TinyBERT, arXiv:1909.10351, eq. 8
    cosine    1 − cos(P h, g)                       DistilBERT, arXiv:1910.01108, section 3

h is the output of the student's layer and g the output of the teacher's layer, at the same token. P is a trained
matrix [E, D] between models of different widths, and the identity between models of the same width. The loss is a
weighted sum over target tokens, divided by the step's number of target tokens, in float32. The two layers of a pair
must be on the same pipeline stage.

Balance of experts: for each sequence and layer, the loss is X · Σ_x f_x P_x over X experts. f_x is the share of
tokens that choose expert x; it has no gradient. P_x is the mean probability of expert x. This is eq. 4 of Fedus et
al. 2021 (arXiv:2101.03961), but f counts all K choices of a token, and sequences are separate as in eq. 17 of
DeepSeek-V3 (arXiv:2412.19437). The loss of a balanced sequence is K. A micro-batch has complete sequences, so the
loss does not depend on how a step is split into micro-batches or over data and pipeline ranks. Context ranks sum
their choices with an all-reduce. The loss is linear in P, so each context rank computes only the summands of its
tokens' probabilities.

B sequences, S tokens of a sequence on this rank, T = B·S, X experts, K chosen experts per token, D width of the
student, E width of the teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from stillhouse.models.dtensors import name_seed, set_from_global
from stillhouse.models.families import router_classes, text_config
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
        """Forward hook of a student's layer: adds the pair's loss to the graph and records it."""
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


@dataclass
class RouterAuxLoss:
    """The inputs and results of load balancing for one micro-batch.

    targets_B: the weight of each sequence's loss; under context parallelism, this rank's share of the weight.
    scale: the training loss contains scale · (sum of `losses`).
    losses: the weighted loss of each router, which the forward pass writes. It is divided by the decoder's number of
        routers, but not by the step's number of targets.
    """

    counts_BS: Tensor  # whether a token counts; false for padding
    targets_B: Tensor
    scale: float
    group: ProcessGroup | None = None  # the context ranks, which share the sequences
    losses: dict[str, Tensor] = field(default_factory=dict)


class RouterBalance(LayerLossModule):
    """Connects the routers of a decoder to the `RouterAuxLoss` of the current micro-batch, with forward hooks."""

    name = "router_balance"

    def __init__(self, routers: int):
        super().__init__()
        self.routers = routers  # the number of routers in the full decoder, over all pipeline stages

    def add_loss(self, name: str, router: nn.Module, _: tuple[Any, ...], outputs: Any) -> Any:
        """Forward hook of a router. outputs: its logits, and the scores and indices of the chosen experts."""
        if not self.is_active:
            return outputs
        if not isinstance(outputs, tuple) or len(outputs) != 3:
            raise ValueError(
                f"router '{name}' ({type(router).__name__}) returned a {type(outputs).__name__}: expected a tuple of "
                "its logits and the scores and indices of the chosen experts"
            )
        logits, scores, chosen = outputs
        return logits, self.with_balance(name, logits, scores, chosen), chosen

    @property
    def is_active(self) -> bool:
        """Whether routers have to add the loss."""
        return self.current.value is not None and torch.is_grad_enabled()

    def with_balance(self, name: str, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return a router's scores with unchanged values, and with its loss in their autograd graph.

        logits [N·L, X], chosen [N·L, K]: the values of the layers' rows.

        Raises ValueError if the router has already added this loss.
        """
        loss, recomputing = self.current.value, self.current.recomputing
        if not recomputing and name in loss.losses:
            raise ValueError(
                f"router '{name}' ran twice with one RouterAuxLoss: expected a model that runs each router once, and "
                "a new RouterAuxLoss for each forward"
            )
        logits_TX, chosen_TK = self.current.packed_tokens(logits), self.current.packed_tokens(chosen)
        (rows, tokens), experts = loss.counts_BS.shape, logits_TX.shape[-1]
        counts_BS1 = loss.counts_BS[..., None].float()
        chosen_TX = torch.zeros_like(logits_TX, dtype=torch.float32).scatter_(1, chosen_TK, 1.0)
        choices_BX = (chosen_TX.view(rows, tokens, experts) * counts_BS1).sum(1)
        sums = torch.cat([choices_BX, counts_BS1.sum(1), loss.targets_B[:, None].float()], 1)
        if loss.group is not None:
            dist.all_reduce(sums, group=loss.group)
        choices_BX, length_B1, targets_B1 = sums.split([experts, 1, 1], 1)
        probability_BX = (logits_TX.float().softmax(-1).view(rows, tokens, experts) * counts_BS1).sum(1)
        # a sum over sequences, where each sequence is weighted by its targets
        total = (targets_B1 / length_B1.clamp_min(1).square() * choices_BX * probability_BX).sum() * experts
        value = total / self.routers
        if not recomputing:
            loss.losses[name] = value.detach()
        with_value: Tensor = with_loss(scores, loss.scale * value)
        return with_value

    def require_losses(self, names: list[str], layer: nn.Module, _: tuple[Any, ...], __: Any) -> None:
        """Forward hook of a layer: raise ValueError if one of its routers has no loss, because it was not called."""
        for name in names if self.is_active and not self.current.recomputing else ():
            if name not in self.current.value.losses:
                raise ValueError(
                    f"{type(layer).__name__} ran without calling its router '{name}' under gradients, so the router "
                    "has no auxiliary loss: expected a layer that calls its router as a module, and recomputation "
                    "only by Decoder.gradient_checkpointing_enable"
                )


def balance_routers(decoder: Any) -> None:
    """Prepare the routers of an unsharded decoder for a load-balancing loss, by adding a `RouterBalance`. Raises
    ValueError for a model without softmax routers or without transformers' `router_aux_loss_coef`.
    """
    kinds = router_classes(decoder.pretrained)
    named = [(name, module) for name, module in decoder.named_modules() if isinstance(module, kinds)]
    if not named:
        raise ValueError(
            f"model type '{text_config(decoder.config).model_type}' has no routers with an auxiliary loss: expected "
            "a mixture of experts whose configuration has router_aux_loss_coef"
        )
    balance, layers = RouterBalance(len(named)), set(decoder.layers())
    for name, layer in decoder.named_modules():
        if layer in layers:
            inside = {path: router for path, router in named if path.startswith(f"{name}.")}
            for path, router in inside.items():
                router.register_forward_hook(partial(balance.add_loss, path))
            layer.register_forward_hook(partial(balance.require_losses, list(inside)))
    decoder.add_layer_loss(balance)
