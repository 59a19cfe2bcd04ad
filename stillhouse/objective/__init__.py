"""Objectives of post-training as weighted sums of terms, computed from hidden states and an output head.

The only dependency of the package is torch. `reference.dense_objective` computes the same loss as `linear_objective`,
in plain autograd. In reading order:

    reference.py                         the whole computation, slow and short
    divergence.py, divergences.py        divergences, each as a value and a slope
    head.py, signals.py, terms.py        the inputs of a pass: the student's head, teachers' signals, weighted terms
    fused_objective.py                   the pass over all tokens, and its connection to autograd
    tile/chunks.py, tile/tile.py         the loop over chunks of tokens, and the work on one chunk
    tile/pointwise.py, tile/statistics.py    the sums over the vocabulary, and the statistics of each row
    divergence_parameters.py, policy_parameters.py    the arguments in an objective's text, without torch
    expression.py, spec.py               a run's objective as text (without torch), and its terms for a batch

The other files add further kinds of terms and signals, metrics, numerics and kernels. Only `vocab.py` calls
collectives. A public name is imported at its first use, so that a run can check its objective as text before it
imports torch.
"""

from typing import TYPE_CHECKING

from stillhouse.first_use import names_at_first_use

if TYPE_CHECKING:
    from stillhouse.objective.public import *  # noqa: F403

__getattr__, __dir__ = names_at_first_use(__name__)
