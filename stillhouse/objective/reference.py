"""The objective in plain autograd: all logits at once, without slopes and chunks; slow, short, and exact in float64.

`dense_objective` has the signature of `linear_objective`, and tests compare their results. The only formulas that the
two have in common are those of the teacher's tail and of the values of divergences. Other tests compare these values
with textbook formulas.

T tokens, V vocabulary, K ids per token.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stillhouse.objective.divergence import Divergence, sides
from stillhouse.objective.fused_objective import ObjectiveOutput
from stillhouse.objective.head import OutputHead, common_vocabulary
from stillhouse.objective.metrics import unique_names
from stillhouse.objective.row_temperatures import RowTemperatures, Temperatures
from stillhouse.objective.sampled_terms import (
    Continuation,
    Correction,
    LogRatio,
    PolicyGradient,
    SampledKL,
    SampledTerm,
)
from stillhouse.objective.signals import DenseLogits, FullVocab, Mixture, Sampled, Signal, SparseSignal, teacher_tail
from stillhouse.objective.sparse import LOG_ZERO
from stillhouse.objective.terms import CrossEntropy, Distill, Entropy, Term, require_terms


def dense_objective(
    hidden_TD: Tensor,
    head: OutputHead,
    terms: Sequence[Term],
    *,
    weights_T: Tensor | None = None,
    normalizer: float | Tensor = 1.0,
    valid_index: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> ObjectiveOutput:
    """Compute `linear_objective` from the logits of all tokens. The metrics are only the terms' values and `tokens`.

    `chunk_tokens` is ignored. `valid_index` is used only if `weights_T` is None: its rows then have weight 1, and all
    other rows have weight 0.
    """
    require_terms(terms)
    heads = [head, *(teacher_head for term in terms for signal in term.signals() for teacher_head in signal.heads())]
    if any(one.shard is not None and not one.shard.is_alone for one in heads):
        raise ValueError("a head is sharded over several ranks: expected heads with all rows; gather the rows first")
    vocabulary = common_vocabulary(heads)
    dtype = torch.promote_types(torch.promote_types(hidden_TD.dtype, head.weight_VD.dtype), torch.float32)
    if weights_T is None:
        weights_T = hidden_TD.new_full((len(hidden_TD),), 1.0 if valid_index is None else 0.0)
        weights_T = weights_T if valid_index is None else weights_T.index_fill(0, valid_index, 1.0)
    weights_T = weights_T.to(dtype)
    counted = [term.counted(slice(None), weights_T) for term in terms]
    # a row that no term counts can contain NaN, and 0·NaN would make the head's gradient NaN
    hidden_TD = torch.where(torch.stack(counted).any(0)[:, None], hidden_TD, 0)
    logits_TV = _logits(hidden_TD, head, vocabulary, dtype)
    loss, metrics, per_token = logits_TV.new_zeros(()), {"tokens": (weights_T != 0).sum().to(dtype)}, {}
    for name, term, counted_T in zip(unique_names(terms), terms, counted, strict=True):
        term_weights_T = weights_T if term.weights_T is None else weights_T * term.weights_T.to(dtype)
        # rows that are not counted must get no gradient, because 0·inf would be NaN
        attached_TV = torch.where(counted_T[:, None], logits_TV, logits_TV.detach())
        value_T = _value(term, attached_TV, vocabulary)
        value_T = torch.where(term_weights_T == 0, torch.zeros_like(value_T), value_T)
        total = (term_weights_T * value_T).sum()
        if term.scale:  # a term of scale 0 is only a metric; 0 times an infinite value would be NaN
            loss = loss + term.scale * total
        metrics[name] = total.detach()
        per_token[name] = value_T.detach()
    return ObjectiveOutput(loss / normalizer, metrics, per_token)


def _logits(hidden: Tensor, head: OutputHead, vocabulary: int, dtype: torch.dtype) -> Tensor:
    bias = None if head.bias is None else head.bias.to(dtype)
    float_head = OutputHead(head.weight_VD.to(dtype), bias, scale=head.scale, softcap=head.softcap)
    return float_head.logits(hidden.to(dtype))[:, :vocabulary]


def _value(term: Term, logits_TV: Tensor, vocabulary: int) -> Tensor:
    temperature: Temperatures = term.temperatures if isinstance(term, SampledTerm) else term.temperature
    log_q_TV = torch.log_softmax(logits_TV / _column(temperature), 1)
    match term:
        case CrossEntropy():
            return _cross_entropy(term, logits_TV)
        case Entropy():
            return -(log_q_TV.exp() * log_q_TV.masked_fill(log_q_TV == -math.inf, 0)).sum(1)
        case Distill():
            value_T = _distill(term.signal, term.divergence, log_q_TV, term.temperature, vocabulary)
        case Continuation():
            value_T = -_at_labels(log_q_TV, term.labels_T).masked_fill(term.labels_T < 0, 0.0)
        case SampledKL() | PolicyGradient() | LogRatio():
            has_label_T = term.labels_T >= 0
            log_q_T = _at_labels(log_q_TV, term.labels_T)
            value_T = _at_sampled(term, log_q_T[has_label_T], has_label_T)
            if isinstance(term, SampledKL) and term.old_log_probs_T is not None:
                sampling = term.temperature if term.sampling_temperature is None else term.sampling_temperature
                at_sampling_TV = torch.log_softmax(logits_TV / _column(sampling), 1)
                sampled_log_q_T = _at_labels(at_sampling_TV, term.labels_T)[has_label_T]
                value_T = _correction(term.correction, sampled_log_q_T, term.old_log_probs_T[has_label_T]) * value_T
            return torch.zeros_like(log_q_T).index_put((has_label_T,), value_T)
        case _:
            raise TypeError(f"no reference for {type(term).__name__}: expected a term of stillhouse.objective")
    return value_T * term.factor


def _column(temperature: Temperatures) -> float | Tensor:
    """Return the temperature as a divisor of logits [T, V]."""
    if not isinstance(temperature, RowTemperatures):
        return temperature
    values = torch.tensor(temperature.values, dtype=torch.float64, device=temperature.number_T.device)
    return values[temperature.number_T.long()][:, None]


def _cross_entropy(term: CrossEntropy, logits_TV: Tensor) -> Tensor:
    value_T = torch.nn.functional.cross_entropy(
        logits_TV,
        term.labels_T.masked_fill(term.labels_T < 0, -100).long(),
        reduction="none",
        label_smoothing=term.label_smoothing,
    )
    z_T = torch.logsumexp(logits_TV, 1).square()
    return value_T + term.z_loss * torch.where(term.labels_T >= 0, z_T, torch.zeros_like(z_T))


def _at_labels(log_q_TV: Tensor, labels_T: Tensor) -> Tensor:
    return log_q_TV.gather(1, labels_T.clamp_min(0)[:, None].long())[:, 0]


def _correction(correction: Correction, log_q_T: Tensor, old_log_probs_T: Tensor) -> Tensor:
    """Return the constant weight of each sampled token, computed one token at a time."""
    weights = []
    for log_q, old in zip(log_q_T.tolist(), old_log_probs_T.tolist(), strict=True):
        ratio = math.exp(min(log_q - old, 700.0))
        inside = 1 / correction.limit <= ratio <= correction.limit
        truncated, masked = min(ratio, correction.limit), ratio if inside else 0.0
        weights.append({"none": 1.0, "truncated": truncated, "masked": masked}[correction.kind])
    return log_q_T.new_tensor(weights)


def _at_sampled(term: SampledKL | PolicyGradient | LogRatio, log_q_T: Tensor, has_label_T: Tensor) -> Tensor:
    if isinstance(term, LogRatio):
        return (log_q_T.detach() - term.old_log_probs_T[has_label_T].to(log_q_T.dtype)).abs()
    if isinstance(term, SampledKL):
        r_T = term.teacher_log_probs_T[has_label_T].to(log_q_T.dtype) - log_q_T
        return r_T.square() / 2 if term.estimator == "k2" else r_T.exp() - 1 - r_T
    advantages_T = term.advantages_T[has_label_T].to(log_q_T.dtype)
    ratio_T = torch.exp(log_q_T - term.old_log_probs_T[has_label_T].to(log_q_T.dtype))
    if term.sequence_ratios_T is not None:  # the value is the sequence's ratio, the derivative is ratio · ∂log q
        ratio_T = term.sequence_ratios_T[has_label_T].to(log_q_T.dtype) * (log_q_T - log_q_T.detach()).exp()
    clipped_T = torch.clamp(ratio_T, 1 - term.clip_low, 1 + term.clip_high)
    gain_T = torch.min(ratio_T * advantages_T, clipped_T * advantages_T)
    if term.surrogate == "cispo":
        gain_T = clipped_T.detach() * advantages_T * log_q_T
    elif term.surrogate == "corrected":
        gain_T = _correction(term.correction, ratio_T.log(), torch.zeros_like(ratio_T)) * advantages_T * log_q_T
    elif term.dual_clip is not None:
        gain_T = torch.where(advantages_T < 0, torch.max(gain_T, term.dual_clip * advantages_T), gain_T)
    value_T = -gain_T
    if term.reference_log_probs_T is None:
        return value_T
    r_T = term.reference_log_probs_T[has_label_T].to(log_q_T.dtype) - log_q_T
    return value_T + term.kl_scale * (r_T.exp() - 1 - r_T)


def _distill(signal: Signal, divergence: Divergence, log_q_TV: Tensor, temperature: float, vocabulary: int) -> Tensor:
    match signal:
        case FullVocab() | DenseLogits() | Mixture():
            with torch.no_grad():
                log_p_TV = _teacher_log_probs(signal, temperature, vocabulary, log_q_TV.dtype)
            return divergence.balanced(sides(log_p_TV, log_q_TV)).sum(1)
        case SparseSignal():
            return torch.stack([_sparse_row(signal, t, divergence, log_q_TV[t]) for t in range(len(log_q_TV))])
        case Sampled():
            present = (signal.ids_TM >= 0) & (signal.ids_TM < vocabulary)
            log_q_TM = log_q_TV.gather(1, signal.ids_TM.masked_fill(~present, 0).long())
            return -torch.where(present, signal.weights_TM.to(log_q_TV.dtype) * log_q_TM, 0).sum(1)
    raise TypeError(f"no reference for {type(signal).__name__}: expected a signal of stillhouse.objective")


def _teacher_log_probs(signal: Signal, temperature: float, vocabulary: int, dtype: torch.dtype) -> Tensor:
    match signal:
        case FullVocab():
            logits_TV = _logits(signal.hidden_TE, signal.head, vocabulary, dtype)
            return torch.log_softmax(logits_TV / temperature, 1)
        case DenseLogits():
            return torch.log_softmax(signal.logits_TV.to(dtype) / temperature, 1)
        case Mixture():
            parts = [
                log_weight + _teacher_log_probs(member, temperature, vocabulary, dtype)
                for member, log_weight in zip(signal.signals, signal.log_weights, strict=True)
            ]
            return torch.logsumexp(torch.stack(parts), 0)
    raise TypeError(f"no reference for {type(signal).__name__}: expected a signal of stillhouse.objective")


def _sparse_row(signal: SparseSignal, token: int, divergence: Divergence, log_q_V: Tensor) -> Tensor:
    """Return the value of one token, computed with plain Python dicts and lists, one outcome at a time."""
    log_p_of = {}
    for entry, token_id in enumerate(signal.ids_TK[token].tolist()):
        if 0 <= token_id < len(log_q_V) and token_id not in log_p_of:
            log_p_of[token_id] = signal.log_probs_TK[token, entry].detach().to(log_q_V.dtype)
    if not log_p_of:
        return log_q_V.new_zeros(())
    ids = torch.tensor(list(log_p_of), device=log_q_V.device)
    log_p_K, log_q_K = torch.stack(list(log_p_of.values())), log_q_V[ids]
    if signal.tail == "zero":
        log_p_V = torch.full_like(log_q_V, LOG_ZERO).index_put((ids,), torch.log_softmax(log_p_K, 0).clamp(LOG_ZERO))
        return (log_q_V.exp() * (log_q_V.masked_fill(log_q_V == -math.inf, 0) - log_p_V)).sum()
    if signal.tail == "renormalize":
        log_p_K, log_q_K = torch.log_softmax(log_p_K, 0), torch.log_softmax(log_q_K, 0)
    if signal.tail == "drop":
        return divergence.value(log_p_K, log_q_K).sum()
    outside = torch.ones_like(log_q_V, dtype=torch.bool).index_fill(0, ids, False)
    if signal.tail == "bucket" and outside.any():
        log_q_tail = torch.logsumexp(log_q_V[outside], 0, keepdim=True)
        row = slice(token, token + 1)
        log_p_tail = teacher_tail(signal.rows(row), log_p_K[None], log_q_tail.detach())
        log_p_K, log_q_K = torch.cat([log_p_K, log_p_tail]), torch.cat([log_q_K, log_q_tail])
    return divergence.balanced(sides(log_p_K, log_q_K)).sum()
