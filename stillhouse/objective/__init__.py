"""Objectives of post-training as weighted sums of terms, computed from hidden states and an output head.

The package depends only on torch. `reference.dense_objective` computes the same as `linear_objective`, in plain
autograd. In reading order:

    reference.py                         the whole computation, slow and short
    divergence.py, formulas.py           divergences, each as a value and a slope
    head.py, signals.py, terms.py        what a pass gets: the student's head, teachers' signals, weighted terms
    fused.py                             the pass, and its connection to autograd
    tile/chunks.py, tile/tile.py         its loop over chunks, and the work on one chunk
    tile/pointwise.py, tile/statistics.py    the sums over the vocabulary, and what follows from them for each row
    expression.py, spec.py               a run's objective as text, and its terms for a batch

The other files each add one kind of term, signal or check. `vocab.py` has the only collectives.
"""

from stillhouse.objective.divergence import Divergence
from stillhouse.objective.expression import parse_divergence
from stillhouse.objective.formulas import (
    acceptance,
    alpha_beta,
    forward_kl,
    jsd,
    reverse_kl,
    skew_forward_kl,
    skew_reverse_kl,
    total_variation,
)
from stillhouse.objective.fused import ObjectiveOutput, linear_objective, logits_objective, routed_objective
from stillhouse.objective.head import OutputHead, detached
from stillhouse.objective.importance_correction import Correction
from stillhouse.objective.log_probs import linear_log_probs
from stillhouse.objective.mixture import Mixture
from stillhouse.objective.sampled_terms import LogRatio, PolicyGradient, SampledKL
from stillhouse.objective.sampled_tokens import discounted_sum, sequence_ratios
from stillhouse.objective.signals import (
    TEACHER,
    Chosen,
    DenseLogits,
    FullVocab,
    RoutedSignal,
    Sampled,
    Signal,
    Signals,
    StudentHidden,
    TopK,
)
from stillhouse.objective.sorted_l1 import SortedL1, SortedTopK
from stillhouse.objective.spans import Continuation, SpanSignal
from stillhouse.objective.teacher_log_probs import teacher_log_probs
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
    "SortedL1",
    "SortedTopK",
    "SpanSignal",
    "StudentHidden",
    "Term",
    "TopK",
    "VocabShard",
    "acceptance",
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
