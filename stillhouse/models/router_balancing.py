"""The loss that balances the experts of a decoder.

For each sequence and layer, the loss is X · Σ_x f_x P_x over X experts. f_x is the share of tokens that choose expert
x; it has no gradient. P_x is the mean probability of expert x. This is eq. 4 of Fedus et al. 2021 (arXiv:2101.03961),
but f counts all K choices of a token, and each sequence has its own loss, as in eq. 17 of DeepSeek-V3
(arXiv:2412.19437). The loss of a balanced sequence is K. A micro-batch has complete sequences, so the loss does not
depend on how a step is split into micro-batches or over data and pipeline ranks. Context ranks sum their choices with
an all-reduce. The loss is linear in P, so each context rank computes only the summands of its tokens' probabilities.

B sequences, S tokens of a sequence on this rank, T = B·S, X experts, K chosen experts per token.
"""

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
        """Whether routers must add the loss in the current forward."""
        return self.current.value is not None and torch.is_grad_enabled()

    def with_balance(self, name: str, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return a router's scores with unchanged values, and with its loss in their autograd graph.

        logits [N·L, X], chosen [N·L, K]: the values for the N rows of L columns that the layers get.

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
        """Forward hook of a layer: raise ValueError if a router of the layer was not called and so has no loss."""
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
