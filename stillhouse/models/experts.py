"""The load-balancing loss of a mixture of experts, computed in the routers on whichever stage they are.

For each sequence and layer the loss is X · Σ_x f_x P_x over X experts. f_x is how often expert x is chosen per token;
it is a constant. P_x is the mean probability of expert x (Fedus et al. 2021, arXiv:2101.03961, eq. 4, with all K
choices of a token counted in f; per sequence as in DeepSeek-V3, arXiv:2412.19437, eq. 17). The loss of a balanced
sequence is K. A micro-batch contains whole sequences, so the loss does not depend on how a step is split into
micro-batches or over data and pipeline ranks. The choices are summed over context ranks; the loss is linear in P, so
each context rank adds the contribution of its own tokens' probabilities.

An autograd function adds the loss to the graph: its forward returns the router's scores unchanged, and its backward
gives the loss a gradient of 1. So no pipeline stage has to pass the loss to the next one.

B sequences, S tokens of each (on a context rank: its part of them), X experts, K chosen experts per token.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.utils.output_capturing import OutputRecorder

from stillhouse.models.decoder import Decoder


@dataclass
class RouterAuxLoss:
    """The inputs and results of load balancing for one micro-batch.

    counts_BS: bool, false for padding. targets_B: the weight of each sequence's loss; under context parallelism, this
    rank's share of it. scale: the minimised loss contains scale · (sum of the weighted losses). group: the context
    ranks, which hold the other parts of the sequences. losses: one for each router, weighted and divided by the
    number of routers of the decoder, still to be divided by the step's targets; the forward pass fills it.
    """

    counts_BS: Tensor
    targets_B: Tensor
    scale: float
    group: ProcessGroup | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


def balance_routers(decoder: Decoder) -> None:
    """Let the decoder's forward take `balance=RouterAuxLoss(…)` and train its routers with that loss.

    Raises ValueError for a model without softmax routers or without transformers' `router_aux_loss_coef`.
    """
    config = decoder.config.get_text_config()
    kinds = _router_classes(decoder)
    named = [(name, module) for name, module in decoder.named_modules() if isinstance(module, kinds)]
    if not named or not hasattr(config, "router_aux_loss_coef"):
        raise ValueError(
            f"model type '{config.model_type}' has no routers with an auxiliary loss: expected a mixture of experts "
            "whose configuration has router_aux_loss_coef"
        )
    layers = set(decoder.layers())
    for name, layer in decoder.named_modules():
        if layer in layers:
            inside = [(at, router) for at, router in named if at.startswith(f"{name}.")]
            _Balancer(len(named)).attach(layer, inside)


class _Balancer:
    """Connects the routers of one layer to the `RouterAuxLoss` of the current micro-batch.

    The layer passes its keyword arguments on to its attention, where a hook takes `balance` out of them. Gradient
    checkpointing recomputes a layer in backward, after other micro-batches have run: it repeats the layer with the
    same arguments, but without the layer's own hooks.
    """

    def __init__(self, layers: int):
        self.layers = layers
        self.balance: RouterAuxLoss | None = None

    def attach(self, layer: nn.Module, routers: list[tuple[str, nn.Module]]) -> None:
        layer.register_forward_pre_hook(self._begin)
        for child in layer.children():
            child.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.register_forward_hook(self._end, with_kwargs=True)
        for name, router in routers:
            router.register_forward_hook(lambda _, __, outputs, name=name: self._leave(name, outputs))

    def _begin(self, _: nn.Module, __: tuple[Any, ...]) -> None:
        self.balance = None

    def _enter(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        self.balance = options.pop("balance", self.balance)
        return arguments, options

    def _end(self, layer: nn.Module, _: tuple[Any, ...], options: dict[str, Any], __: Any) -> None:
        if options.get("balance") is not self.balance:
            raise ValueError(
                f"{type(layer).__name__} does not hand its arguments on to its attention, with which the routers' "
                "auxiliary loss would come: expected objective.router_aux_loss=0 for this model"
            )

    def _leave(self, name: str, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """outputs: the router's logits, and the scores and indices of the chosen experts."""
        balance = self.balance
        if balance is None or not torch.is_grad_enabled():
            return outputs
        logits, scores, chosen = outputs
        loss = _loss(logits, chosen, balance) / self.layers
        balance.losses[name] = loss.detach()
        return logits, _Learn.apply(scores, balance.scale * loss), chosen


def _loss(logits_TX: Tensor, chosen_TK: Tensor, balance: RouterAuxLoss) -> Tensor:
    """Return the loss summed over sequences, each weighted by its targets."""
    (rows, tokens), experts = balance.counts_BS.shape, logits_TX.shape[-1]
    counts_BS1 = balance.counts_BS[..., None].float()
    chosen_TX = torch.zeros_like(logits_TX, dtype=torch.float32).scatter_(1, chosen_TK, 1.0)
    choices_BX = (chosen_TX.view(rows, tokens, experts) * counts_BS1).sum(1)
    whole = torch.cat([choices_BX, counts_BS1.sum(1), balance.targets_B[:, None].float()], 1)
    if balance.group is not None:
        dist.all_reduce(whole, group=balance.group)
    choices_BX, length_B1, targets_B1 = whole.split([experts, 1, 1], 1)
    probability_BX = (logits_TX.float().softmax(-1).view(rows, tokens, experts) * counts_BS1).sum(1)
    return (targets_B1 / length_B1.clamp_min(1).square() * choices_BX * probability_BX).sum() * experts


class _Learn(torch.autograd.Function):
    """Returns the scores unchanged and gives `loss` a gradient of 1 in backward."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = (loss.shape, loss.dtype, loss.device)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.loss
        return grad, torch.ones(shape, dtype=dtype, device=device)


def _router_classes(decoder: Decoder) -> tuple[type[nn.Module], ...]:
    """The router classes whose logits transformers records, if the logits are the router's first output."""
    recorded = (getattr(decoder.pretrained, "_can_record_outputs", None) or {}).get("router_logits")
    if isinstance(recorded, OutputRecorder) and recorded.index == 0:
        return (recorded.target_class,)
    return ()
