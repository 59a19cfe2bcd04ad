"""The load-balancing loss of a mixture of experts, computed in the routers, on any pipeline stage.

For each sequence and layer, the loss is X · Σ_x f_x P_x over X experts. f_x is the share of tokens that choose expert
x; it has no gradient. P_x is the mean probability of expert x. (Fedus et al. 2021, arXiv:2101.03961, eq. 4, but f
counts all K choices of a token; per sequence as in DeepSeek-V3, arXiv:2412.19437, eq. 17.) The loss of a balanced
sequence is K. A micro-batch contains complete sequences, so the loss does not depend on how a step is split into
micro-batches or over data and pipeline ranks. Context ranks sum their choices with an all-reduce. The loss is linear
in P, so each context rank computes only the summands of its own tokens' probabilities.

B sequences, S tokens of each (on a context rank: its part of them), X experts, K chosen experts per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stillhouse.models.families import router_classes, text_config
from stillhouse.models.layer_hooks import LayerLossModule, with_loss


@dataclass
class RouterAuxLoss:
    """The inputs and results of load balancing for one micro-batch.

    counts_BS: bool, false for padding. targets_B: the weight of each sequence's loss; under context parallelism, this
    rank's share of the weight. scale: the training loss contains scale · (sum of `losses`). group: the context ranks,
    which have the other parts of the sequences. losses: the forward pass writes the weighted loss of each router,
    divided by the decoder's number of routers, but not by the step's number of targets.
    """

    counts_BS: Tensor
    targets_B: Tensor
    scale: float
    group: ProcessGroup | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


class RouterBalance(LayerLossModule):
    """Connects the routers of a decoder to the `RouterAuxLoss` of the current micro-batch, with forward hooks.

    routers: the number of routers of the full decoder, over all pipeline stages.
    """

    name = "router_balance"

    def __init__(self, routers: int):
        super().__init__()
        self.routers = routers

    def attach(self, layer: nn.Module, routers: Mapping[str, nn.Module]) -> None:
        """Register the hooks on a layer and on its routers. routers: by the names of their losses."""
        for name, router in routers.items():
            router.register_forward_hook(partial(self._add_loss, name))
        layer.register_forward_hook(partial(self._require_losses, list(routers)))

    def _add_loss(self, name: str, router: nn.Module, _: tuple[Any, ...], outputs: Any) -> Any:
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

        logits, chosen: the logits [N·L, X] and the chosen experts [N·L, K] of the layers' rows.
        Raises ValueError for a router that has already added this loss.
        """
        loss, recomputing = self.current.value, self.current.recomputing
        if not recomputing and name in loss.losses:
            raise ValueError(
                f"router '{name}' ran twice with one RouterAuxLoss: expected a model that runs each router once, and "
                "a new RouterAuxLoss for each forward"
            )
        packed = self.current.packed_tokens
        value = _loss(packed(logits), packed(chosen), loss) / self.routers
        if not recomputing:
            loss.losses[name] = value.detach()
        with_value: Tensor = with_loss(scores, loss.scale * value)
        return with_value

    def _require_losses(self, names: list[str], layer: nn.Module, _: tuple[Any, ...], __: Any) -> None:
        """Forward hook of a layer: raise ValueError if a router in it was not called and has no loss."""
        loss = self.current.value
        if loss is None or self.current.recomputing or not torch.is_grad_enabled():
            return
        for name in names:
            if name not in loss.losses:
                raise ValueError(
                    f"{type(layer).__name__} ran without calling its router '{name}' under gradients, so the router "
                    "has no auxiliary loss: expected a layer that calls its router as a module, and recomputation "
                    "only by Decoder.gradient_checkpointing_enable"
                )


def balance_routers(decoder: Any) -> None:
    """Prepare the routers of an unsharded decoder for a load-balancing loss, by adding a `RouterBalance`.

    Raises ValueError for a model without softmax routers or without transformers' `router_aux_loss_coef`.
    """
    config, kinds = text_config(decoder.config), router_classes(decoder.pretrained)
    named = [(name, module) for name, module in decoder.named_modules() if isinstance(module, kinds)]
    if not named or not hasattr(config, "router_aux_loss_coef"):
        raise ValueError(
            f"model type '{config.model_type}' has no routers with an auxiliary loss: expected a mixture of experts "
            "whose configuration has router_aux_loss_coef"
        )
    balance, layers = RouterBalance(len(named)), set(decoder.layers())
    for name, layer in decoder.named_modules():
        if layer in layers:
            balance.attach(layer, {path: router for path, router in named if path.startswith(f"{name}.")})
    decoder.add_layer_loss(balance)


def _loss(logits_TX: Tensor, chosen_TK: Tensor, inputs: RouterAuxLoss) -> Tensor:
    """Return the loss summed over sequences, each weighted by its targets."""
    (rows, tokens), experts = inputs.counts_BS.shape, logits_TX.shape[-1]
    counts_BS1 = inputs.counts_BS[..., None].float()
    chosen_TX = torch.zeros_like(logits_TX, dtype=torch.float32).scatter_(1, chosen_TK, 1.0)
    choices_BX = (chosen_TX.view(rows, tokens, experts) * counts_BS1).sum(1)
    sums = torch.cat([choices_BX, counts_BS1.sum(1), inputs.targets_B[:, None].float()], 1)
    if inputs.group is not None:
        dist.all_reduce(sums, group=inputs.group)
    choices_BX, length_B1, targets_B1 = sums.split([experts, 1, 1], 1)
    probability_BX = (logits_TX.float().softmax(-1).view(rows, tokens, experts) * counts_BS1).sum(1)
    return (targets_B1 / length_B1.clamp_min(1).square() * choices_BX * probability_BX).sum() * experts
