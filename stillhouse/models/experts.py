"""The load balancing of a mixture of experts: a loss that arises in the routers, wherever their layers are.

For each sequence and layer, X · Σ_x f_x P_x of X experts: f_x the choices of expert x per token, a constant, P_x its
mean probability (Fedus et al. 2021, arXiv:2101.03961, eq. 4, with the K choices of a token counted in f; per sequence
as in DeepSeek-V3, arXiv:2412.19437, eq. 17). It is K for a balanced sequence. A sequence lies whole in a micro-batch,
so the loss does not depend on how a step was cut: not into micro-batches, and not over data or pipeline ranks. Over
context ranks the choices are summed; the loss is linear in P, so each adds what its own tokens' probabilities give.

It enters by autograd: the router's scores hand on their gradient and give the loss one of its own. No stage has to
pass it on.

B sequences, S tokens of each (of a context rank: its part), X experts, K chosen ones.
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
class Balance:
    """The load balancing of one micro-batch.

    counts_BS: bool, the tokens that count; padding does not. targets_B: of each sequence's part here, what its loss
    is weighted by. scale: what the sum of the weighted losses is multiplied with before it is minimised. group: of
    the processes that have the sequences' other parts. losses: of each layer, mean over layers and weighted, to be
    divided by the step's targets; filled in the forward pass.
    """

    counts_BS: Tensor
    targets_B: Tensor
    scale: float
    group: ProcessGroup | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


def balance_routers(decoder: Decoder) -> None:
    """From here on the decoder takes `balance=Balance(…)`, and its routers learn from it.

    Raises ValueError for a model without routers that a softmax and transformers' `router_aux_loss_coef` belong to.
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
    """The routers of one layer, and the balance of the micro-batch that goes through.

    The arguments that a layer hands on to its attention bring it: a layer that is recomputed in backward, when other
    micro-batches have gone through, is computed with those again, though its own hooks are not.
    """

    def __init__(self, layers: int):
        self.layers = layers
        self.balance: Balance | None = None

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
        """outputs: the router's logits, and the scores and numbers of the chosen experts."""
        balance = self.balance
        if balance is None or not torch.is_grad_enabled():
            return outputs
        logits, scores, chosen = outputs
        loss = _loss(logits, chosen, balance) / self.layers
        balance.losses[name] = loss.detach()
        return logits, _Learn.apply(scores, balance.scale * loss), chosen


def _loss(logits_TX: Tensor, chosen_TK: Tensor, balance: Balance) -> Tensor:
    """Summed over sequences, weighted by their targets."""
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
    """Scores as they are, and a loss that counts."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = (loss.shape, loss.dtype, loss.device)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.loss
        return grad, torch.ones(shape, dtype=dtype, device=device)


def _router_classes(decoder: Decoder) -> tuple[type[nn.Module], ...]:
    """What transformers' own collection of router logits looks at, where those are a router's first output."""
    recorded = (getattr(decoder.pretrained, "_can_record_outputs", None) or {}).get("router_logits")
    if isinstance(recorded, OutputRecorder) and recorded.index == 0:
        return (recorded.target_class,)
    return ()
