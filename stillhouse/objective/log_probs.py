"""Log-probabilities of given tokens: the student's, which are differentiable, and a teacher's, from its signal.

In an objective over sequences (for example with the exponential of a sum over tokens), the gradient at one token
depends on all tokens, so forward cannot compute it chunk by chunk. Therefore forward saves only its inputs, and
backward projects each chunk a second time. A dense teacher's hidden states are projected in chunks, without a
gradient. If the objective also has a divergence from the same teacher, this teacher's logits are computed twice.

T tokens, D width, V vocabulary, K ids per token.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from stillhouse.objective.fused_objective import check_device, check_leaves, linear_objective, logits_objective
from stillhouse.objective.head import OutputHead
from stillhouse.objective.sampled_terms import LogProb
from stillhouse.objective.signals import DenseLogits, FullVocab, Mixture, Signal, SparseSignal
from stillhouse.objective.terms import Entropy
from stillhouse.objective.vocab import VocabShard


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
        per_token = linear_objective(hidden_TD, head, terms).per_token
        return per_token["log_prob"], per_token["entropy"]

    @staticmethod
    def backward(ctx: Any, grad_log_probs_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("linear_log_probs has no second derivative: call backward without create_graph")
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


@torch.no_grad()
def teacher_log_probs(
    signal: Signal,
    labels_T: Tensor,
    temperature: float = 1.0,
    *,
    vocabulary: int | None = None,
    shard: VocabShard | None = None,
    valid_index: Tensor | None = None,
) -> Tensor:
    """Return the teacher's log p of labels_T at a temperature, [T], at least float32; 0 at a negative label.

    signal: `FullVocab`, `DenseLogits`, `Mixture`, or a `TopK` or `Chosen` whose ids include the label.
    vocabulary: the number of tokens with a probability (`common_vocabulary`), or None for all tokens of the teacher.
    shard: the student's shard; needed if `DenseLogits` have only this rank's columns.
    valid_index: the rows to compute; all rows with a label must be among them. None has the same meaning as in
        `linear_objective`. Only a signal with hidden states (`FullVocab`) uses these rows.

    Collectives: one all-gather per chunk for each `FullVocab` with a sharded head, also in a `Mixture`, and for each
    `DenseLogits` with only this rank's columns. All ranks get the same numbers.

    Raises ValueError for signals of other types, for a signal with probabilities at another temperature, and if a
    label is not among a sparse signal's ids. This last check waits for a GPU.
    """
    terms = [LogProb(labels_T, temperature)]
    if signal.tokens != len(labels_T):
        raise ValueError(
            f"a signal of {signal.tokens} tokens with {len(labels_T)} labels: expected one label for each token"
        )
    signal.require_temperature(temperature)
    weights_T = (labels_T >= 0).float()
    match signal:
        case FullVocab():
            head = signal.head if vocabulary is None else replace(signal.head, vocab_size=vocabulary)
            # the teacher's matrix products use the teacher's own dtype, even if autocast is on for the student
            with torch.autocast(signal.hidden_TE.device.type, enabled=False):
                output = linear_objective(signal.hidden_TE, head, terms, weights_T=weights_T, valid_index=valid_index)
            return output.per_token["log_prob"]
        case DenseLogits():
            logits_TV, shard = _real_columns(signal.logits_TV, vocabulary, shard)
            return logits_objective(logits_TV, terms, shard=shard, weights_T=weights_T).per_token["log_prob"]
        case Mixture():
            parts = [
                log_weight
                + teacher_log_probs(
                    member, labels_T, temperature, vocabulary=vocabulary, shard=shard, valid_index=valid_index
                )
                for member, log_weight in zip(signal.signals, signal.log_weights, strict=True)
            ]
            return torch.logsumexp(torch.stack(parts), 0).masked_fill(labels_T < 0, 0.0)
        case SparseSignal():
            return _sparse_log_probs(signal, labels_T)
    raise ValueError(
        f"{type(signal).__name__} does not contain the probability of the sampled token: expected FullVocab, "
        "DenseLogits, a Mixture of them, or TopK or Chosen with the sampled token among the ids. Only sampled_kl and "
        "policy_gradient(teacher_kl=…) need this probability; a divergence does not"
    )


def _real_columns(
    logits_TV: Tensor, vocabulary: int | None, shard: VocabShard | None
) -> tuple[Tensor, VocabShard | None]:
    """Return a dense teacher's logits, with −inf at padding, and the shard to which their columns belong."""
    columns = logits_TV.shape[1]
    if shard is None or shard.is_alone or columns == vocabulary:
        if vocabulary not in (None, columns):
            raise ValueError(
                f"teacher logits over {columns} tokens, student over {vocabulary}; expected the same vocabulary: cut "
                "padded columns off, or set vocab_size on the head"
            )
        return logits_TV, None
    rows, vocabulary = shard.stop - shard.start, shard.rows if vocabulary is None else vocabulary
    start, stop = shard.within(vocabulary)
    if columns not in (rows, stop - start):
        expected = f"{rows} (this rank's columns) or {vocabulary} (the columns of all ranks)"
        raise ValueError(f"teacher logits over {columns} tokens: expected {expected}")
    return pad(logits_TV[:, : stop - start], (0, rows - (stop - start)), value=-torch.inf), shard


def _sparse_log_probs(signal: SparseSignal, labels_T: Tensor) -> Tensor:
    has_label_T = labels_T >= 0
    is_label_TK = (signal.ids_TK == labels_T[:, None]) & has_label_T[:, None]
    missing_T = has_label_T & ~is_label_TK.any(1)
    if bool(missing_T.any()):
        raise ValueError(
            f"{type(signal).__name__} with {signal.ids_TK.shape[1]} ids per row: at {int(missing_T.sum())} of "
            f"{int(has_label_T.sum())} rows the sampled token is not among the ids; expected ids that include "
            "it (a server can return its log-probability in addition to the top K), or a loss that does not need it: "
            "a divergence, such as reverse_kl"
        )
    # if a row repeats the id, argmax gives its first position
    log_p_T = signal.log_probs_TK.gather(1, is_label_TK.byte().argmax(1, keepdim=True))[:, 0]
    return log_p_T.to(torch.promote_types(log_p_T.dtype, torch.float32)).masked_fill(~has_label_T, 0.0)
