"""The load-balancing loss of `models/layer_losses.py` in Megatron-Core's routers.

Megatron-Core's own losses are means over the tokens of a rank, and count the padding of rows. This loss is a sum over
sequences, as with the other engine.

N rows, L columns of a row, S of them on this tensor rank, T = S·N; X experts, K chosen experts per token.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from stillhouse.models.layer_losses import RouterBalance
from stillhouse.parallel.layer_loss_interface import LayerLoss


def add_balance(balance: RouterBalance, chunks: Sequence[nn.Module]) -> None:
    """Register hooks that add the current loss of `balance` in the routers of the chunks.

    A layer that backward computes again adds the loss only then, because only then it has gradients. So `balance`
    must have the micro-batch's loss again when the micro-batch's backward begins (`current_in_backward`).
    """
    for name, router in _routers(chunks).items():
        router.register_forward_hook(partial(_add_loss, balance, name))


def current_in_backward(balance: RouterBalance, output: Tensor) -> None:
    """Set the current loss of `balance` again when the gradient of a chunk's output arrives.

    This is before the backward of the chunk's layers, which other micro-batches' forward passes may precede.
    """
    current = balance.current

    def set_current(gradient: Tensor) -> None:
        balance.current = current

    output.register_hook(set_current)


def require_losses(chunks: Sequence[nn.Module], losses: Sequence[LayerLoss]) -> None:
    """Raise ValueError unless each router of the chunks has added each loss. losses: one for each micro-batch"""
    routers = _routers(chunks)
    for loss in losses:
        if len(loss.losses()) != len(routers):
            raise ValueError(
                f"{len(loss.losses())} of {len(routers)} routers of Megatron-Core added the load-balancing loss: "
                "expected all of them, in a forward pass with gradients or in one that backward computes again"
            )


def _routers(chunks: Sequence[nn.Module]) -> dict[str, TopKRouter]:
    return {
        f"{number}.{name}": module
        for number, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter)
    }


def _add_loss(balance: RouterBalance, name: str, router: TopKRouter, inputs: tuple[Any, ...], outputs: Any) -> Any:
    """Forward hook of a router. inputs: begins with the hidden states [S, N, D]. outputs: the experts' factors [T, X]
    of each token, and which experts it has chosen.
    """
    if not balance.is_active:
        return outputs
    scores_TX, is_chosen_TX = outputs
    logits_SNX = router.gating(inputs[0])  # the router does not return its logits
    logits_SNX.register_hook(lambda gradient: gradient.contiguous())  # the backward of `gating` views it
    chosen_SNK = is_chosen_TX.int().topk(router.topk).indices.unflatten(0, logits_SNX.shape[:2])
    logits_TX, chosen_TK = (_in_rows(router, values).flatten(0, 1) for values in (logits_SNX, chosen_SNK))
    return balance.with_balance(name, logits_TX, scores_TX, chosen_TK), is_chosen_TX


def _in_rows(router: TopKRouter, values: Tensor) -> Tensor:
    """Return values [S, N, …] of this tensor rank's tokens as those of all columns of the rows, [N, L, …].

    Each tensor rank computes the loss of all tokens, and its gradient for its own tokens.
    """
    if router.config.sequence_parallel:
        values = gather_from_sequence_parallel_region(
            values, tensor_parallel_output_grad=False, group=router.tp_group
        )
    return values.transpose(0, 1)
