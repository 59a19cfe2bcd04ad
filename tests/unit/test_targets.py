"""The contexts of output processors: targets at further depths of multi-token prediction, context shards, refusals.

B rows of two documents each, S tokens per row, T = B·S.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
from kit.processor_cases import LABELS_BS, POSITIONS_BS, SOME_T, at_depth

from stillhouse.engine.loss import StepLoss
from stillhouse.models.processors import DistillTargets, PolicyTargets, Targets, cross_entropy, selected_log_probs
from stillhouse.objective.spec import parse_objective

DISTILLATION = StepLoss(parse_objective("forward_kl"))
MISSING = "is missing: expected a number for each of 34 tokens"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolicyTargets(LABELS_BS, old_log_probs_T=SOME_T), f"advantages_T {MISSING}"),
        (lambda: PolicyTargets(LABELS_BS, advantages_T=SOME_T), f"old_log_probs_T {MISSING}"),
        (
            lambda: at_depth(cross_entropy(), Targets(LABELS_BS)),
            "depth 1 of multi-token prediction with targets of 0 further depths: expected targets.shift_for_mtp(",
        ),
        (
            lambda: at_depth(selected_log_probs(), Targets(LABELS_BS).shift_for_mtp(POSITIONS_BS, 2), 3),
            "targets of 2 further depths: expected targets.shift_for_mtp(position_ids, 3)",
        ),
        (lambda: at_depth(DISTILLATION, DistillTargets(LABELS_BS)), "depth 1 of multi-token prediction"),
        (
            lambda: Targets(LABELS_BS).shift_for_mtp(POSITIONS_BS[:, 1:], 1),
            "position_ids of shape (2, 16) for 34 labels: expected [B, S], all rows whole",
        ),
    ],
    ids=["advantages", "old", "ahead", "further", "taught", "rows"],
)
def test_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
