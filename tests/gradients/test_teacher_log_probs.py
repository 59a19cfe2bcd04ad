"""A teacher's log-probability of sampled tokens from every signal: against plain log-softmax, over shards, refusals.

T tokens, V vocabulary, K ids per token.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.config_cases import assert_refused, refused_calls
from kit.objective_cases import (
    T,
    V,
    distance,
    generator,
    make_full,
    make_labels,
    make_leaves,
    make_mixture,
    make_signal,
)
from kit.processor_cases import OpenHeads
from kit.rollout_cases import fused, make_batch, spec_of
from kit.shard_cases import Borders, Layout, local_terms, shard_of
from kit.shard_problems import FOUR, NARROW
from kit.shard_ranks import GATHER, Collectives, Rank, RankPool, shared_pool
from kit.tensors import assert_near
from torch import Tensor

from stillhouse import objective
from stillhouse.objective import (
    Chosen,
    DenseLogits,
    Distill,
    FullVocab,
    Mixture,
    OutputHead,
    RoutedSignal,
    Signal,
    TopK,
    forward_kl,
    teacher_log_probs,
)
from stillhouse.objective.reference import _teacher_log_probs
from stillhouse.objective.spec import TeacherShare, parse_objective
from stillhouse.objective.tile import chunks


def signal_of(kind: str, vocabulary: int = V, temperature: float = 1.0) -> Signal:
    """Return a signal by its name in `make_signal`, or top-k ids of which the first is the label."""
    if kind == "mixture":
        return make_mixture(vocabulary=vocabulary, temperature=temperature)
    if kind != "top-k":
        return make_signal(kind, vocabulary=vocabulary)
    others_TK = torch.arange(T)[:, None] + torch.arange(5) * 7
    ids_TK = torch.cat([make_labels(vocabulary=vocabulary).clamp(min=0)[:, None], others_TK], 1)
    log_p_TV = torch.log_softmax(make_leaves(T, 1, vocabulary).hidden / temperature, 1)
    return TopK(ids_TK, log_p_TV.gather(1, ids_TK), "drop", temperature=temperature)


def rollouts(rank: Rank, job: tuple[str, str, int, Layout]) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Run a spec's processor; returns this rank's loss and gradients."""
    case, kind, vocabulary, layout = job
    if rank.number >= len(layout.student):
        return None
    leaves, shard = make_leaves(), shard_of(rank, layout.student)
    rows = slice(shard.start, shard.stop)
    local = type(leaves)(leaves.hidden, leaves.weight[rows], None if leaves.bias is None else leaves.bias[rows])
    batch, signal = make_batch(vocabulary=vocabulary), local_signal(rank, layout, signal_of(kind))
    output, gradients = fused(spec_of(case), local, batch, signal, 16, shard=shard, vocab_size=vocabulary)
    return output.loss.detach(), gradients


def log_probs(rank: Rank, job: tuple[str, Layout]) -> tuple[Tensor, dict[str, int]] | None:
    """Return a teacher's log-probabilities, and the collectives that they took after the borders were known."""
    kind, layout = job
    if rank.number >= len(layout.student):
        return None
    signal, shard = local_signal(rank, layout, signal_of(kind, temperature=1.3)), shard_of(rank, layout.student)
    options: dict[str, Any] = {"vocabulary": V, "shard": shard}
    teacher_log_probs(signal, make_labels(), 1.3, **options)
    with Collectives() as collectives:
        actual_T = teacher_log_probs(signal, make_labels(), 1.3, **options)
    return actual_T, dict(collectives.counts)


def local_signal(rank: Rank, layout: Layout, signal: Signal) -> Signal:
    if not isinstance(signal, Mixture | FullVocab) and "logits_TV" not in vars(signal):
        return signal
    (term,) = local_terms(rank, layout, [Distill(signal, forward_kl(), temperature=signal.temperature or 1.0)])
    return term.signals()[0]


LABELS = make_labels()
HAS_LABEL = LABELS >= 0


@pytest.fixture(scope="module")
def pool() -> RankPool:
    return shared_pool()


def plain(signal: Signal, temperature: float, vocabulary: int = V, labels_T: Tensor = LABELS) -> Tensor:
    log_p_TV = _teacher_log_probs(signal, temperature, vocabulary, torch.float64)
    return log_p_TV.gather(1, labels_T.clamp_min(0)[:, None])[:, 0].masked_fill(labels_T < 0, 0.0)


def with_head(**options: Any) -> FullVocab:
    leaves = make_leaves(width=24, seed=2)
    return FullVocab(leaves.hidden, OutputHead(leaves.weight, leaves.bias, **options))


DENSE: dict[str, Callable[[float], Signal]] = {
    "full": lambda _: make_full(),
    "capped": lambda _: with_head(scale=0.7, softcap=2.0),
    "logits": lambda _: DenseLogits(torch.randn(T, V, generator=generator(90), dtype=torch.float64)),
    "mixture": lambda temperature: make_mixture(temperature=temperature),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", DENSE)
def test_dense_signals(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks.TILE_ROWS, "cpu", (1, 10))
    signal = DENSE[kind](temperature)
    actual_T = teacher_log_probs(signal, LABELS, temperature, vocabulary=V)
    assert distance(actual_T, plain(signal, temperature)) < 1e-12
    assert not actual_T.requires_grad
    for index in (HAS_LABEL.nonzero()[:, 0], torch.arange(T)):
        # not to the bit: some CPUs sum a product of fewer rows in another order
        chosen_T = teacher_log_probs(signal, LABELS, temperature, vocabulary=V, valid_index=index)
        assert distance(chosen_T, actual_T) < 1e-14
        assert torch.equal(chosen_T == 0, actual_T == 0)


def test_a_teacher_with_more_rows_than_the_student() -> None:
    """Its padding has no probability, as in a divergence."""
    signal, labels_T = make_full(vocabulary=V + 9), make_labels()
    actual_T = teacher_log_probs(signal, labels_T, vocabulary=V)
    assert distance(actual_T, plain(signal, 1.0)) < 1e-12
    assert distance(teacher_log_probs(signal, labels_T), plain(signal, 1.0, V + 9)) < 1e-12
    assert distance(actual_T, plain(signal, 1.0, V + 9)) > 1e-3


def test_rows_without_a_label_are_not_read() -> None:
    full = make_full()
    hidden_TE = full.hidden_TE.masked_fill(~HAS_LABEL[:, None], torch.nan)
    assert torch.equal(teacher_log_probs(replace(full, hidden_TE=hidden_TE), LABELS), teacher_log_probs(full, LABELS))
    none_T = torch.full((T,), -1)
    for signal in (full, make_mixture(), sparse(TopK)):
        assert (teacher_log_probs(signal, none_T) == 0).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16(autocast: bool) -> None:
    full = make_full(dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual_T = teacher_log_probs(full, LABELS)
    assert actual_T.dtype == torch.float32
    wide = FullVocab(full.hidden_TE.double(), OutputHead(full.head.weight_VD.double()))
    assert distance(actual_T, plain(wide, 1.0)) < 1e-6


def test_logits_of_minus_infinity() -> None:
    logits_TV = torch.randn(T, V, generator=generator(91), dtype=torch.float64)
    logits_TV[:, ::3] = -torch.inf
    labels_T = LABELS.masked_fill(LABELS % 3 == 0, 1)
    actual_T = teacher_log_probs(DenseLogits(logits_TV), labels_T)
    assert actual_T.isfinite().all()
    assert distance(actual_T, plain(DenseLogits(logits_TV), 1.0, labels_T=labels_T)) < 1e-12
    impossible = teacher_log_probs(DenseLogits(logits_TV), torch.full((T,), 3))
    assert (impossible == -torch.inf).all()
    batch = make_batch()
    with pytest.raises(ValueError, match="teacher_log_probs_T holds -inf at a sampled token"):
        fused(parse_objective("sampled_kl"), make_leaves(), batch, DenseLogits(logits_TV))


def sparse(kind: type[TopK] | type[Chosen], temperature: float | None = None) -> TopK | Chosen:
    """Five ids per row, the label at the third and again at the fifth place, where its log-probability is wrong."""
    ids_TK = (LABELS.clamp(min=0)[:, None] + torch.tensor([1, 2, 0, 3, 0])) % V
    log_p_TK = torch.randn(T, 5, generator=generator(92), dtype=torch.float64) - 4
    return kind(ids_TK, log_p_TK, temperature=temperature)


@pytest.mark.parametrize("kind", [TopK, Chosen])
def test_ids_that_include_the_label(kind: type[TopK] | type[Chosen]) -> None:
    signal = sparse(kind, 0.7)
    expected_T = torch.where(HAS_LABEL, signal.log_probs_TK[:, 2], 0.0)
    assert torch.equal(teacher_log_probs(signal, LABELS, 0.7), expected_T)
    narrow = teacher_log_probs(replace(signal, log_probs_TK=signal.log_probs_TK.bfloat16()), LABELS, 0.7)
    assert narrow.dtype == torch.float32


@pytest.mark.parametrize(("call", "message"), refused_calls("teacher's log-probabilities"))
def test_signals_that_are_refused(call: str, message: str) -> None:
    assert_refused(f"teacher_log_probs({call}, LABELS)", message, vars(objective) | globals())


def test_a_sampled_token_that_is_not_among_the_ids() -> None:
    signal = sparse(TopK)
    ids_TK = signal.ids_TK.clone()
    ids_TK[[1, 6]] = -1
    ids_TK[0] = -1  # a row without a label needs none
    message = (
        "TopK with 5 ids per row: at 2 of 29 rows the sampled token is not among the ids; expected ids that include"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        teacher_log_probs(replace(signal, ids_TK=ids_TK), LABELS)


def test_only_rows_that_count_must_have_their_token() -> None:
    """A row of weight 0, or of the dataset, may hold any ids."""
    signal, batch = sparse(TopK), make_batch()
    counts_T = batch.is_sampled_T & (batch.weights_T != 0)
    some = replace(signal, ids_TK=signal.ids_TK.masked_fill(~counts_T[:, None], -1))
    for text in ("sampled_kl", "policy_gradient(teacher_kl=1)"):
        _, actual = fused(parse_objective(text), make_leaves(), batch, some)
        _, expected = fused(parse_objective(text), make_leaves(), batch, signal)
        for name, gradient in expected.items():
            assert gradient.norm() > 0
            assert torch.equal(actual[name], gradient)


BOTH = "sampled_kl(k3) + policy_gradient(teacher_kl=0.7)"


def two_teachers() -> dict[str, FullVocab]:
    other = make_leaves(width=8, seed=9)
    return {"code": make_full(), "prose": FullVocab(other.hidden, OutputHead(other.weight, other.bias))}


def test_a_weighted_sum_of_teachers() -> None:
    """The objective is linear in the teachers' parts, so its gradient is the sum of separate ones."""
    batch, leaves, signals = make_batch(), make_leaves(), two_teachers()
    batch = replace(
        batch, per_token={name: value_T for name, value_T in batch.per_token.items() if name != "advantages"}
    )
    shares = {"code": TeacherShare(2.0), "prose": TeacherShare(0.5, temperature=1.4)}
    spec = replace(parse_objective(BOTH), discount=0.5)
    output, actual = fused(replace(spec, teachers=shares), leaves, batch, signals)
    assert {"sampled_forward_kl/code", "sampled_forward_kl/prose", "policy_gradient"} <= output.per_token.keys()
    _, one = fused(spec, leaves, batch, signals["code"])
    _, other = fused(replace(spec, temperature=1.4), leaves, batch, signals["prose"])
    assert_near(actual, {name: 2.0 * gradient + 0.5 * other[name] for name, gradient in one.items()}, 1e-12)


def test_a_mixture_of_teachers() -> None:
    batch, leaves, signals = make_batch(), make_leaves(), two_teachers()
    shares = {"code": TeacherShare(3.0), "prose": TeacherShare(1.0)}
    spec = replace(parse_objective(BOTH + " + reverse_kl"), sampling_temperature=0.8, discount=0.5)
    mixed = replace(spec, teachers=shares, is_mixture=True)
    _, actual = fused(mixed, leaves, batch, signals)
    parts = []
    for text, temperature in (("sampled_kl(k3) + reverse_kl", 1.0), ("policy_gradient(teacher_kl=0.7)", 0.8)):
        log_p_TV = _teacher_log_probs(
            Mixture(list(signals.values()), [3, 1], temperature), temperature, V, torch.float64
        )
        one = replace(parse_objective(text), sampling_temperature=0.8, discount=0.5)
        parts.append(fused(one, leaves, batch, DenseLogits(temperature * log_p_TV))[1])
    assert_near(actual, {name: gradient + parts[1][name] for name, gradient in parts[0].items()}, 1e-12)


def test_each_token_has_its_teacher() -> None:
    """Routed signals: a teacher's other rows are not read, and a discount stays within a document."""
    batch, leaves, signals = make_batch(), make_leaves(), two_teachers()
    valid_T = batch.weights_T != 0
    is_code_T = batch.document_T != 1
    rows = {"code": (valid_T & is_code_T).nonzero()[:, 0], "prose": (valid_T & ~is_code_T).nonzero()[:, 0]}
    routed, heads = dict[str, Signal](), OpenHeads()
    for name, full in signals.items():
        hidden_TE = torch.full_like(full.hidden_TE, torch.nan)
        hidden_TE[rows[name]] = full.hidden_TE[rows[name]]
        routed[name] = RoutedSignal(heads.signal(name, replace(full, hidden_TE=hidden_TE)), rows[name])
    shares = {"code": TeacherShare(2.0), "prose": TeacherShare(0.5, temperature=1.4)}
    spec = replace(parse_objective("cross_entropy + reverse_kl + " + BOTH), discount=0.5, teachers=shares)
    output, actual = fused(spec, leaves, batch, routed, 5)
    assert (heads.most, heads.names) == (1, [])  # a head is open while its rows are computed
    assert [output.metrics[f"tokens/{name}"] for name in rows] == [len(index) for index in rows.values()]
    assert output.metrics["sampled"] == pytest.approx(float(batch.weights_T[batch.is_sampled_T].sum()))
    parts = []
    for name, is_its_T in (("code", is_code_T), ("prose", ~is_code_T)):
        its = replace(batch, weights_T=batch.weights_T * is_its_T)
        parts.append(fused(spec, leaves, its, {name: signals[name]})[1])
    assert_near(actual, {name: gradient + parts[1][name] for name, gradient in parts[0].items()}, 1e-12)


@pytest.mark.parametrize("borders", [FOUR, NARROW], ids=["four", "narrow"])
@pytest.mark.parametrize(("kind", "gathers"), [("full", 1), ("dense", 1), ("mixture", 3), ("top-k", 0)])
def test_shards(pool: RankPool, kind: str, gathers: int, borders: Borders) -> None:
    """The teacher's heads and logits are sharded like the student's head, or whole on every rank."""
    signal = signal_of(kind, temperature=1.3)
    expected_T = teacher_log_probs(signal, LABELS, 1.3) if kind == "top-k" else plain(signal, 1.3)
    for layout, collectives in ((Layout(borders), gathers), (Layout(borders, "whole"), 0)):
        answers = pool.call(log_probs, (kind, layout))
        for actual_T, counts in answers:
            assert distance(actual_T, expected_T) < 1e-12
            assert torch.equal(actual_T, answers[0][0])
            assert counts.get(GATHER, 0) == sum(counts.values()) == collectives


@pytest.mark.parametrize("borders", [FOUR, NARROW], ids=["four", "narrow"])
def test_gradients_over_shards(pool: RankPool, borders: Borders) -> None:
    cases = [
        ("k3, masked", "top-k", V),
        ("everything", "full", V),
        ("discount", "full", 240),
        ("k2", "dense", V),
        ("k2", "dense", 240),
        ("sequence", "full", V),
        ("penalty", "full", 240),
    ]
    for case, kind, vocabulary in cases:
        batch = make_batch(vocabulary=vocabulary)
        answers = pool.call(rollouts, (case, kind, vocabulary, Layout(borders)))
        signal = signal_of(kind)
        if isinstance(signal, DenseLogits):
            signal = DenseLogits(signal.logits_TV[:, :vocabulary])
        output, expected = fused(spec_of(case), make_leaves(), batch, signal, vocab_size=vocabulary)
        for (start, stop), (actual_loss, gradients) in zip(borders, answers, strict=True):
            assert distance(actual_loss, output.loss) < 1e-12, (case, kind)
            assert distance(gradients["hidden"], expected["hidden"]) < 1e-11, (case, kind)
            assert distance(gradients["weight"], expected["weight"][start:stop]) < 1e-11, (case, kind)
