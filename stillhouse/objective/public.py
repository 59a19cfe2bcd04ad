"""The public names of the package, which `__init__.py` imports at their first use."""

from stillhouse.objective.divergence import Divergence
from stillhouse.objective.divergences import (
    alpha_beta,
    forward_kl,
    jsd,
    parse_divergence,
    reverse_kl,
    skew_forward_kl,
    skew_reverse_kl,
    total_variation,
)
from stillhouse.objective.fused_objective import ObjectiveOutput, linear_objective, logits_objective, routed_objective
from stillhouse.objective.head import OutputHead, detached
from stillhouse.objective.log_probs import linear_log_probs, teacher_log_probs
from stillhouse.objective.sampled_terms import Continuation, Correction, LogRatio, PolicyGradient, SampledKL
from stillhouse.objective.sampled_tokens import discounted_sum, sequence_ratios
from stillhouse.objective.signals import (
    TEACHER,
    Chosen,
    DenseLogits,
    FullVocab,
    Mixture,
    RoutedSignal,
    Sampled,
    Signal,
    Signals,
    SpanSignal,
    StudentHidden,
    TopK,
)
from stillhouse.objective.terms import CrossEntropy, Distill, Entropy, Term
from stillhouse.objective.tile.kernels import use_kernels
from stillhouse.objective.vocab import VocabShard

__all__ = [
    "TEACHER",
    "Chosen",
    "Continuation",
    "Correction",
    "CrossEntropy",
    "DenseLogits",
    "Distill",
    "Divergence",
    "Entropy",
    "FullVocab",
    "LogRatio",
    "Mixture",
    "ObjectiveOutput",
    "OutputHead",
    "PolicyGradient",
    "RoutedSignal",
    "Sampled",
    "SampledKL",
    "Signal",
    "Signals",
    "SpanSignal",
    "StudentHidden",
    "Term",
    "TopK",
    "VocabShard",
    "alpha_beta",
    "detached",
    "discounted_sum",
    "forward_kl",
    "jsd",
    "linear_log_probs",
    "linear_objective",
    "logits_objective",
    "parse_divergence",
    "reverse_kl",
    "routed_objective",
    "sequence_ratios",
    "skew_forward_kl",
    "skew_reverse_kl",
    "teacher_log_probs",
    "total_variation",
    "use_kernels",
]
