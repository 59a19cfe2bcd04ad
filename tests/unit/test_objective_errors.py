"""Misuse of the objective: each error names the given value and the expected one."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit import objective_cases
from kit.config_cases import assert_refused, refused_calls
from kit.objective_cases import D, T, V, make_full, make_labels, make_leaves
from kit.rollout_cases import Batch, fused, make_batch, without
from torch import Tensor

from stillhouse.engine import loss
from stillhouse.objective import (
    CrossEntropy,
    DenseLogits,
    Entropy,
    FullVocab,
    OutputHead,
    PolicyGradient,
    Term,
    VocabShard,
    divergence,
    forward_kl,
    linear_log_probs,
    linear_objective,
    logits_objective,
    metrics,
    public,
    reference,
    reverse_kl,
    spec,
)
from stillhouse.objective.divergence import Divergence, Sides
from stillhouse.objective.metrics import IS_SAMPLED
from stillhouse.objective.spec import ObjectiveSpec, TeacherShare, parse_objective
from stillhouse.objective.tile.tile import TermResult, Tile
from stillhouse.objective.tile.tile_plan import TilePlan


class Chi2(Divergence):
    """Σ (p − q)² / p, without its definition."""

    def balanced(self, pair: Sides) -> Tensor:
        return (pair.p - pair.q).square() / pair.p

    def balanced_slope(self, pair: Sides) -> Tensor:
        return 2 * pair.q * (pair.q - pair.p) / pair.p


#: what the calls in messages.yaml may name, besides the names of this module
NAMES = {
    name: value
    for module in (dataclasses, metrics, divergence, reference, spec, loss, objective_cases, public)
    for name, value in vars(module).items()
} | {"math": math, "np": np}
NAN = math.nan
HEAD = OutputHead(torch.zeros(V, 1))
CE = [CrossEntropy(make_labels())]
KL = forward_kl()
ZERO_T = torch.zeros(T)
TWO_SIGNALS = {"math": make_full(), "code": make_full()}
IDS, LOG_PROBS = torch.zeros(T, 4, dtype=torch.int64), torch.zeros(T, 4)


def objective(terms: list[Term] = CE, hidden: Tensor | None = None, **options: Any) -> None:  # type: ignore[assignment]
    leaves = make_leaves(dtype=torch.float32)
    head = OutputHead(leaves.weight, leaves.bias, vocab_size=options.pop("vocab_size", None))
    linear_objective(leaves.hidden if hidden is None else hidden, head, terms, **options)


def meta(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta")


def unloaded() -> FullVocab:
    return FullVocab(torch.zeros(T, 24), OutputHead(meta(V, 24)))


def mixture_of(*teachers: str) -> ObjectiveSpec:
    shares = dict.fromkeys(teachers, TeacherShare(1.0))
    return replace(parse_objective("forward_kl"), teachers=shares, is_mixture=True)


def of_batch(spec: ObjectiveSpec, missing: str) -> None:
    fused(spec, make_leaves(), without(make_batch(), missing), make_full())


def short_batch() -> Batch:
    return replace(make_batch(), per_token={IS_SAMPLED: torch.ones(T - 1)})


def policy(**options: Any) -> PolicyGradient:
    return PolicyGradient(make_labels(), LOG_PROBS[:, 0], LOG_PROBS[:, 1], **options)


@pytest.mark.parametrize(("call", "text"), refused_calls("objective"))
def test_errors_name_what_came_and_what_was_expected(call: str, text: str) -> None:
    assert_refused(call, text, NAMES | globals())


def test_a_shard_that_does_not_fit_is_refused() -> None:
    head = OutputHead(torch.zeros(V, D), shard=VocabShard(0, V, None))
    assert linear_objective(torch.zeros(T, D), head, CE).loss > 0
    with pytest.raises(ValueError, match=f"{V} rows: expected {2 * V}"):
        replace(head, shard=VocabShard(0, 2 * V, None))
    with pytest.raises(ValueError, match="row 0 is held by no rank"):
        logits_objective(torch.zeros(T, V), CE, shard=VocabShard(V, 2 * V, None))
    with pytest.raises(ValueError, match="start ≤ stop"):
        VocabShard(5, 3, None)


@pytest.mark.parametrize(("call", "name"), refused_calls("objective on meta"))
def test_tensors_without_numbers_are_refused_by_name(call: str, name: str) -> None:
    """A head that was built on the meta device and never loaded would give arbitrary numbers."""
    assert_refused(call, f"{name} is on the meta device, which holds no numbers", NAMES | globals())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_mixed_devices_are_refused_by_name() -> None:
    head = OutputHead(torch.zeros(V, D, device="cuda"))
    message = r"head.weight_VD is on cuda:0, hidden_TD on cpu: expected both on one device"
    with pytest.raises(ValueError, match=message):
        linear_objective(torch.zeros(T, D), head, CE)
    with pytest.raises(ValueError, match=r"terms\[0\].labels_T is on cpu, hidden_TD on cuda:0"):
        linear_objective(torch.zeros(T, D, device="cuda"), head, CE)
    # weights_T and valid_index may be on the CPU, where batches are built
    options = {"weights_T": torch.ones(T), "valid_index": torch.arange(T)}
    assert linear_objective(torch.zeros(T, D, device="cuda"), head, [Entropy(1.0)], **options).loss > 0


@pytest.mark.parametrize("leaf", ["hidden_TD", "head.weight_VD", "head.bias", "logits_TV"])
def test_forward_mode_is_refused(leaf: str) -> None:
    """The forward pass computes the gradients for backward, so a forward-mode tangent would silently be 0."""
    hidden, weight, bias = torch.zeros(T, D), torch.zeros(V, D), torch.zeros(V)
    calls: dict[str, tuple[Any, Tensor]] = {
        "hidden_TD": (lambda leaf: linear_objective(leaf, OutputHead(weight, bias), CE).loss, hidden),
        "head.weight_VD": (lambda leaf: linear_objective(hidden, OutputHead(leaf, bias), CE).loss, weight),
        "head.bias": (lambda leaf: linear_objective(hidden, OutputHead(weight, leaf), CE).loss, bias),
        "logits_TV": (lambda leaf: logits_objective(leaf, CE).loss, torch.zeros(T, V)),
    }
    call, primal = calls[leaf]
    with pytest.raises(ValueError, match=rf"{leaf} carries a forward-mode tangent \(torch.func.jvp\)"):
        torch.func.jvp(call, (primal,), (torch.ones_like(primal),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode tangent"):
        call(torch.autograd.forward_ad.make_dual(primal, torch.ones_like(primal)))
    if leaf == "hidden_TD":
        with pytest.raises(ValueError, match="forward-mode tangent"):
            torch.func.jvp(
                lambda leaf: linear_log_probs(leaf, OutputHead(weight), make_labels())[0], (primal,), (primal + 1,)
            )


class ReadsTooMuch(Entropy):
    """A term that reads logits at ids, which it has not requested."""

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        return TermResult(tile.log_probs_at(torch.zeros(37, dtype=torch.int64), self.temperature)[:, 0], {})


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
