"""The quantities that terms request from a pass; a term may read only those it has requested."""

import pytest
import torch

from stillhouse.objective import DenseLogits, OutputHead, linear_objective
from stillhouse.objective.formulas import forward_kl, jsd, reverse_kl
from stillhouse.objective.terms import Entropy
from stillhouse.objective.tile.tile import TermResult, Tile
from stillhouse.objective.tile.tile_plan import TilePlan


class ReadsTooMuch(Entropy):
    """A term that reads logits at ids, which it has not requested."""

    def add_to(self, tile: Tile, weights_C: torch.Tensor) -> TermResult:
        return TermResult(tile.log_probs_at(torch.zeros(37, dtype=torch.int64), self.temperature)[:, 0], {})


def test_a_repeated_request_is_computed_once() -> None:
    signal, other, labels_T = DenseLogits(torch.zeros(37, 251)), DenseLogits(torch.ones(37, 251)), torch.arange(37)
    plan = TilePlan()
    for _ in range(2):
        plan.logits_at(labels_T)
        plan.entropy(1.0)
        plan.pair(jsd(0.3), signal, 2.0)
        plan.pair(forward_kl(), signal, 2.0)
    plan.pair(forward_kl(), other, 2.0)
    plan.close()
    assert plan.pointwise.temperatures == (1.0, 2.0)
    assert plan.pointwise.teachers == ((1, 2.0), (2, 2.0))
    assert list(plan.signals) == [signal, other]
    assert [ids is labels_T for ids in plan.ids] == [True]
    assert (plan.pair(jsd(0.3), signal, 2.0), plan.pair(forward_kl(), other, 2.0)) == (0, 2)
    assert plan.pointwise.two_sweep == [0]
    assert list(plan.pointwise.renormalizable) == [1, 2]


def test_a_quantity_that_no_term_requested_cannot_be_read() -> None:
    signal = DenseLogits(torch.zeros(37, 251))
    plan = TilePlan()
    plan.pair(forward_kl(), signal, 2.0)
    plan.close()
    for read in (
        lambda: plan.softmax(1.0),
        lambda: plan.entropy(2.0),
        lambda: plan.teacher(DenseLogits(torch.zeros(37, 251)), 2.0),
        lambda: plan.pair(reverse_kl(), signal, 2.0),
        lambda: plan.logits_at(torch.arange(37)),
    ):
        with pytest.raises(LookupError, match="no term has requested it"):
            read()


def test_a_term_that_reads_what_it_did_not_request_is_refused() -> None:
    head = OutputHead(torch.randn(251, 16))
    with pytest.raises(LookupError, match=r"expected a request for it in Term\.request"):
        linear_objective(torch.randn(37, 16), head, [ReadsTooMuch(1.0)])
