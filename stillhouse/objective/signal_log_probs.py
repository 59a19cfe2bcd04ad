"""A teacher's log-probability of each row's label, from any signal that includes this label.

For a dense signal, the teacher's hidden states are projected in chunks and without a gradient. So if the objective
also has a divergence from the same teacher, this teacher's logits are computed twice.

T tokens, V vocabulary, K ids per token.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from stillhouse.objective.fused_objective import linear_objective, logits_objective
from stillhouse.objective.mixture import Mixture
from stillhouse.objective.sampled_terms import LogProb, check_sampled_tokens
from stillhouse.objective.signals import DenseLogits, FullVocab, Signal, SparseSignal, check_temperature
from stillhouse.objective.vocab import VocabShard


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
    vocabulary: the number of tokens with a probability (`common_vocabulary`); None: all tokens of the teacher.
    shard: the student's shard; needed if `DenseLogits` have only this rank's columns.
    valid_index: the rows to compute; must include all rows with a label. None: on a CPU, the rows with a label are
        computed; on a GPU, all rows.

    Collectives: one all-gather per chunk for each `FullVocab` with a sharded head, also in a `Mixture`, and for each
    `DenseLogits` with only this rank's columns. All ranks get the same numbers.

    Raises ValueError for other signals, for a sparse signal at another temperature, and if a label is not among a
    sparse signal's ids. This last check synchronises with a GPU.
    """
    check_sampled_tokens(labels_T)
    check_temperature(temperature)
    if signal.tokens != len(labels_T):
        raise ValueError(f"a signal of {signal.tokens} tokens with {len(labels_T)} labels: expected one for each row")
    signal.require_temperature(temperature)
    match signal:
        case FullVocab():
            head = signal.head if vocabulary is None else replace(signal.head, vocab_size=vocabulary)
            terms, weights_T = [LogProb(labels_T, temperature)], _has_label(labels_T)
            # the teacher's matrix products use the teacher's own dtype, even if autocast is on for the student
            with torch.autocast(signal.hidden_TE.device.type, enabled=False):
                output = linear_objective(signal.hidden_TE, head, terms, weights_T=weights_T, valid_index=valid_index)
            return output.per_token["log_prob"]
        case DenseLogits():
            return _logits_log_probs(signal.logits_TV, labels_T, temperature, vocabulary, shard)
        case Mixture():
            options: dict[str, Any] = {"vocabulary": vocabulary, "shard": shard, "valid_index": valid_index}
            parts = [
                log_weight + teacher_log_probs(member, labels_T, temperature, **options)
                for member, log_weight in zip(signal.signals, signal.log_weights, strict=True)
            ]
            return torch.logsumexp(torch.stack(parts), 0).masked_fill(labels_T < 0, 0.0)
        case SparseSignal():
            return _sparse_log_probs(signal, labels_T)
    raise ValueError(
        f"{type(signal).__name__} does not give the probability of a certain token: expected FullVocab, DenseLogits, "
        "a Mixture of them, or TopK or Chosen with the sampled token among the ids; sampled_kl and "
        "policy_gradient(teacher_kl=…) need it, a divergence or uld does not"
    )


def _logits_log_probs(
    logits_TV: Tensor, labels_T: Tensor, temperature: float, vocabulary: int | None, shard: VocabShard | None
) -> Tensor:
    columns = logits_TV.shape[1]
    if shard is None or shard.is_alone or columns == vocabulary:
        shard = None
        if vocabulary not in (None, columns):
            raise ValueError(
                f"teacher logits over {columns} tokens, student over {vocabulary}; expected the same vocabulary: cut "
                "padded columns off, or set vocab_size on the head"
            )
    else:
        rows = shard.stop - shard.start
        start, stop = shard.within(shard.rows if vocabulary is None else vocabulary)
        if columns not in (rows, stop - start):
            raise ValueError(
                f"teacher logits over {columns} tokens: expected those of this rank, {rows}, or of all ranks, "
                f"{shard.rows if vocabulary is None else vocabulary}"
            )
        # padding rows of the vocabulary get no probability
        logits_TV = pad(logits_TV[:, : stop - start], (0, rows - (stop - start)), value=-torch.inf)
    terms, weights_T = [LogProb(labels_T, temperature)], _has_label(labels_T)
    return logits_objective(logits_TV, terms, shard=shard, weights_T=weights_T).per_token["log_prob"]


def _sparse_log_probs(signal: SparseSignal, labels_T: Tensor) -> Tensor:
    has_label_T = labels_T >= 0
    is_label_TK = (signal.ids_TK == labels_T[:, None]) & has_label_T[:, None]
    missing_T = has_label_T & ~is_label_TK.any(1)
    if bool(missing_T.any()):
        raise ValueError(
            f"{type(signal).__name__} with {signal.ids_TK.shape[1]} ids per row: at {int(missing_T.sum())} of "
            f"{int(has_label_T.sum())} rows the sampled token is not among them; expected top_k with the actual "
            "token (a server gives its log-probability beside the top ones), or another loss: a divergence such as "
            "reverse_kl needs only the ids that are there"
        )
    # if a row repeats the id, argmax gives its first position
    log_p_T = signal.log_probs_TK.gather(1, is_label_TK.byte().argmax(1, keepdim=True))[:, 0]
    return log_p_T.to(torch.promote_types(log_p_T.dtype, torch.float32)).masked_fill(~has_label_T, 0.0)


def _has_label(labels_T: Tensor) -> Tensor:
    return (labels_T >= 0).float()
