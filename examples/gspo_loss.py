"""A loss of whole sequences in your own loop: GSPO (arXiv:2507.18071), from log-probabilities without logits."""

import torch

from stillhouse import linear_log_probs


def gspo_loss(hidden, head, labels, old_log_probs, sequence, advantages, clip_low=3e-4, clip_high=4e-4):
    """sequence: of each token, the number of its sequence, [T]; advantages: of each sequence, [S]."""
    log_probs, _ = linear_log_probs(hidden, head, labels)
    is_sampled = labels >= 0  # not of the prompt, not padded
    log_ratios = torch.where(is_sampled, log_probs - old_log_probs, 0.0)
    zeros = torch.zeros_like(advantages)
    tokens = zeros.index_add(0, sequence, is_sampled.to(zeros.dtype))
    ratio = torch.exp(zeros.index_add(0, sequence, log_ratios) / tokens.clamp(min=1))
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return -gain.sum() / len(advantages)
