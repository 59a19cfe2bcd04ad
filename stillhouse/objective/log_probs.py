"""Differentiable log-probabilities of given tokens, and entropies, for objectives that the caller computes.

In an objective over sequences (a sum before an exponential, a mean over a group), the gradient at one token depends
on all tokens, so forward cannot compute it chunk by chunk. Therefore forward saves only its inputs, and backward
projects each chunk a second time.

T tokens, D width.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stillhouse.objective.fused_objective import linear_objective
from stillhouse.objective.head import OutputHead
from stillhouse.objective.input_checks import check_device, check_leaves
from stillhouse.objective.sampled_terms import LogProb, check_sampled_tokens
from stillhouse.objective.signals import check_temperature
from stillhouse.objective.terms import Entropy


def linear_log_probs(
    hidden_TD: Tensor, head: OutputHead, labels_T: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log q of labels_T and the entropy of q in nats, [T] each, at least float32.

    q = softmax(logits / temperature). Both results are differentiable in the hidden states and the head; there is no
    second derivative. A negative label has log-probability 0. Neither forward nor backward stores the logits of all
    tokens. Over a sharded head, all ranks call this with the same tokens and get the same numbers.

    Raises ValueError for shapes that do not match and for labels beyond the vocabulary (checked only on a CPU).
    """
    check_leaves({"hidden_TD": hidden_TD, "head.weight_VD": head.weight_VD, "head.bias": head.bias})
    check_device("labels_T", labels_T, "hidden_TD", hidden_TD)
    check_sampled_tokens(labels_T)
    check_temperature(temperature)
    return _LogProbs.apply(hidden_TD, head.weight_VD, head.bias, head, labels_T, temperature)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: OutputHead,
        labels_T: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        device = hidden_TD.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.head, ctx.temperature = head, temperature
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, labels_T)
        terms = [LogProb(labels_T, temperature), Entropy(1.0, temperature)]
        made = linear_objective(hidden_TD, head, terms).per_token
        return made["log_prob"], made["entropy"]

    @staticmethod
    def backward(ctx: Any, grad_log_probs_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("log-probabilities have no second derivative here: call backward without create_graph")
        *saved, labels_T = ctx.saved_tensors
        leaves: list[Any] = [
            None if leaf is None else leaf.detach().requires_grad_(needed)
            for leaf, needed in zip(saved, ctx.needs_input_grad, strict=False)
        ]
        hidden_TD, weight_VD, bias_V = leaves
        head = replace(ctx.head, weight_VD=weight_VD, bias=bias_V)
        terms = [
            LogProb(labels_T, ctx.temperature, weights_T=grad_log_probs_T),
            Entropy(1.0, ctx.temperature, weights_T=grad_entropy_T),
        ]
        device, dtype, enabled = ctx.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled):
            loss = linear_objective(hidden_TD, head, terms).loss
        loss.backward()
        return *(None if leaf is None else leaf.grad for leaf in leaves), None, None, None
