"""The contexts of output processors: targets at further depths of multi-token prediction, context shards, refusals.

B rows of two documents each, S tokens per row, T = B·S.
"""

import re

import pytest
import torch
from kit import processor_cases
from kit.config_cases import refused_calls
from kit.objective_cases import generator
from kit.processor_cases import LABELS_BS, LABELS_T, POSITIONS_BS, B, S, T

from stillhouse.engine.loss import StepLoss
from stillhouse.models import processors
from stillhouse.models.processors import DistillTargets, Targets
from stillhouse.objective import TEACHER, DenseLogits
from stillhouse.objective.spec import parse_objective

DISTILLATION = StepLoss(parse_objective("forward_kl"))
MISSING = "is missing: expected a number for each of 34 tokens"


def test_shift_for_mtp_of_equal_rows() -> None:
    one_1S = torch.arange(S)[None]
    one, every = (Targets(LABELS_BS).shift_for_mtp(ids, 1).at(1) for ids in (one_1S, one_1S.expand(B, S)))
    assert torch.equal(one.labels_T, every.labels_T)
    assert torch.equal(one.labels_T.view(B, S)[:, :-1], LABELS_BS[:, 1:])


def test_shift_for_mtp_stays_within_documents() -> None:
    """The expected values are written by hand: the documents' ends, and the teacher's values of the right row."""
    weights_BS = torch.rand(B, S, generator=generator(6))
    signal = DenseLogits(torch.arange(T).float()[:, None])  # each row's value is its number
    context = DistillTargets(LABELS_BS, weights_BS, signals={TEACHER: signal}).shift_for_mtp(POSITIONS_BS, 2)
    document_T = ((POSITIONS_BS == 0).cumsum(1) + 10 * torch.arange(B)[:, None]).flatten().tolist()
    for depth in (1, 2):
        shifted = context.at(depth)
        assert shifted.weights_T is not None
        for row in range(T):
            if row + depth < T and document_T[row + depth] == document_T[row]:
                assert shifted.labels_T[row] == LABELS_T[row + depth]
                assert shifted.weights_T[row] == weights_BS.flatten()[row + depth]
                assert shifted.signals[TEACHER].logits_TV[row] == row + depth  # type: ignore[attr-defined]
            else:
                assert shifted.labels_T[row] < 0
                assert shifted.weights_T[row] == 0
    index_T = torch.tensor([20, 3, 4])
    part = context.rows(index_T)
    for depth in (0, 1, 2):
        assert torch.equal(part.at(depth).labels_T, context.at(depth).labels_T[index_T])
        cut, uncut = (targets.at(depth).signals[TEACHER].logits_TV for targets in (part, context))  # type: ignore[attr-defined]
        assert torch.equal(cut, uncut[index_T])


@pytest.mark.parametrize(("call", "message"), refused_calls("targets"))
def test_errors(call: str, message: str) -> None:
    make = eval(call, vars(processors) | vars(processor_cases) | globals())
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
