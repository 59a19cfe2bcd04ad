"""Misuse of the objective: each error names the given value and the expected one."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit.objective_cases import D, T, V, make_full, make_labels, make_leaves, make_sorted, make_spans
from kit.rollout_cases import Batch, fused, make_batch, without
from torch import Tensor

from stillhouse.engine.loss import StepLoss
from stillhouse.objective import (
    TEACHER,
    Chosen,
    Continuation,
    Correction,
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    FullVocab,
    LogRatio,
    Mixture,
    OutputHead,
    PolicyGradient,
    Sampled,
    SampledKL,
    SortedL1,
    Term,
    TopK,
    VocabShard,
    discounted_sum,
    forward_kl,
    jsd,
    linear_log_probs,
    linear_objective,
    logits_objective,
    reverse_kl,
    skew_forward_kl,
    skew_reverse_kl,
)
from stillhouse.objective.divergence import Divergence, Sides, WeightedSum
from stillhouse.objective.metric_keys import ADVANTAGES, IS_SAMPLED, OLD_LOG_PROBS
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.spec import ObjectiveSpec, TeacherShare, parse_objective


class Chi2(Divergence):
    """Σ (p − q)² / p, without its definition."""

    def balanced(self, pair: Sides) -> Tensor:
        return (pair.p - pair.q).square() / pair.p

    def balanced_slope(self, pair: Sides) -> Tensor:
        return 2 * pair.q * (pair.q - pair.p) / pair.p


NAN = math.nan
HEAD = OutputHead(torch.zeros(V, 1))
CE = [CrossEntropy(make_labels())]
KL = forward_kl()
ZERO_T = torch.zeros(T)
SORTED = make_sorted(torch.randn(T, V).log_softmax(1), 8)
TWO_SIGNALS = {"math": make_full(), "code": make_full()}
IDS, LOG_PROBS = torch.zeros(T, 4, dtype=torch.int64), torch.zeros(T, 4)
ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: objective(hidden=torch.zeros(T, 9)), "hidden_TD of shape (37, 9): expected [tokens, 16]"),
    (lambda: objective(hidden=torch.zeros(2, T, D)), "hidden_TD of shape (2, 37, 16)"),
    (lambda: OutputHead(torch.zeros(V)), "head weight of shape (251,)"),
    (lambda: OutputHead(torch.zeros(())), "head weight of shape ()"),
    (lambda: OutputHead(torch.zeros(V, D), torch.zeros(9)), "head bias of shape (9,): expected (251,)"),
    (lambda: OutputHead(torch.zeros(V, D), vocab_size=252), "vocab_size=252: expected 1 to 251"),
    (lambda: OutputHead(torch.zeros(V, D), softcap=0.0), "softcap=0.0"),
    (lambda: OutputHead(torch.zeros(V, D), softcap=NAN), "softcap=nan"),
    (lambda: OutputHead(torch.zeros(V, D), softcap=math.inf), "softcap=inf: expected a positive number, or None"),
    (lambda: OutputHead(torch.zeros(V, D), scale=NAN), "scale=nan: expected a finite number"),
    (lambda: OutputHead(torch.zeros(V, D), scale=-math.inf), "scale=-inf"),
    (lambda: OutputHead(torch.zeros(V, D), scale=True), "scale=True"),
    (lambda: objective(weights_T=torch.ones(T, requires_grad=True)), "weights_T requires grad: expected a"),
    (lambda: objective([*CE, Entropy(1.0, weights_T=torch.ones(T, requires_grad=True))]), "terms[1].weights_T"),
    (lambda: objective(normalizer=torch.ones((), requires_grad=True)), "normalizer requires grad"),
    (lambda: SampledKL(make_labels(), LOG_PROBS[:, 0], temperature=math.inf), "temperature=inf"),
    (lambda: SampledKL(make_labels(), LOG_PROBS[:, 0], scale=NAN), "scale=nan"),
    (lambda: Distill(TopK(IDS, LOG_PROBS, tail="zero"), KL), "tail='zero' with forward_kl: expected reverse_kl"),
    (lambda: policy(dual_clip=1.0), "dual_clip=1.0: expected a number above 1"),
    (lambda: policy(dual_clip=NAN), "dual_clip=nan"),
    (lambda: policy(dual_clip=3.0, surrogate="cispo"), "dual_clip=3.0 with surrogate='cispo'"),
    (lambda: policy(surrogate="gspo"), "surrogate='gspo': expected 'clip', 'cispo' or 'corrected'"),
    (lambda: objective([CrossEntropy(torch.zeros(9, dtype=torch.int64))]), "terms[0] (cross_entropy) has 9 tokens,"),
    (lambda: CrossEntropy(torch.zeros(2, 9, dtype=torch.int64)), "labels_T of shape (2, 9)"),
    (lambda: CrossEntropy(torch.zeros(9)), "dtype torch.float32: expected one id per token"),
    (lambda: objective([CrossEntropy(torch.full((T,), 251))]), "labels_T holds 251: expected labels below 251"),
    (lambda: objective([CrossEntropy(torch.full((T,), 250))], vocab_size=250), "expected labels below 250"),
    (lambda: CrossEntropy(make_labels(), label_smoothing=1.0), "label_smoothing=1.0"),
    (lambda: CrossEntropy(make_labels(), z_loss=-1.0), "z_loss=-1.0"),
    (lambda: CrossEntropy(make_labels(), z_loss=NAN), "z_loss=nan: expected a finite number"),
    (lambda: objective(weights_T=torch.ones(9)), "weights_T of shape (9,): expected (37,)"),
    (lambda: objective(weights_T=torch.ones(T, 1)), "weights_T of shape (37, 1): expected (37,)"),
    (lambda: objective([Entropy(1.0, weights_T=torch.ones(9))]), "terms[0].weights_T of shape (9,)"),
    (lambda: objective(valid_index=torch.ones(T, dtype=torch.bool)), "valid_index of shape (37,) and dtype"),
    (lambda: objective([]), "no terms: expected at least one"),
    (lambda: objective([Chi2()]), "terms[0] is of type Chi2, which is no term: expected Distill(signal, Chi2(…)), a"),  # type: ignore[list-item]
    (lambda: objective([CE[0], "kl"]), "terms[1] is of type str, which is no term: expected a subclass of Term"),  # type: ignore[list-item]
    (lambda: objective(CE[0]), "terms is of type CrossEntropy: expected a list of terms"),  # type: ignore[arg-type]
    (lambda: dense_objective(ZERO_T[:, None], HEAD, [Chi2()]), "terms[0] is of type Chi2, which is no term"),  # type: ignore[list-item]
    (lambda: Distill(make_full(), Chi2()), "divergence is of type Chi2, which has no `definition`: expected a class"),
    (lambda: Distill(make_full(), 0.5 * KL + Chi2()), "divergence is of type Chi2, which has no `definition`"),
    (lambda: Distill(make_full(), "kl"), "one's own is a frozen dataclass that derives from Divergence and has"),  # type: ignore[arg-type]
    (lambda: StepLoss(KL), "objective is of type ForwardKL: expected an ObjectiveSpec, such as"),  # type: ignore[arg-type]
    (lambda: objective(normalizer=0), "normalizer=0: expected the positive number"),
    (lambda: objective(normalizer=-3.0), "normalizer=-3.0: expected the positive number"),
    (lambda: objective(normalizer=torch.zeros(())), "normalizer=0"),
    (lambda: objective(normalizer=NAN), "normalizer=nan"),
    (lambda: objective(normalizer=math.inf), "normalizer=inf"),
    (lambda: objective(normalizer=np.float32("nan")), "normalizer=nan"),
    (lambda: CrossEntropy(make_labels(), NAN), "scale=nan: expected a finite number"),
    (lambda: Distill(make_full(), KL, NAN), "scale=nan"),
    (lambda: Entropy(NAN), "scale=nan"),
    (lambda: Entropy(-math.inf), "scale=-inf"),
    (lambda: Entropy(True), "scale=True"),
    (lambda: objective(weights_T=torch.ones(T).index_fill(0, torch.tensor([3]), NAN)), "weights_T holds NaN or"),
    (lambda: objective([Entropy(1.0, weights_T=torch.full((T,), math.inf))]), "terms[0].weights_T holds NaN or"),
    (lambda: objective(valid_index=torch.tensor([4, 7, 4, 4])), "valid_index holds 2 of its 4 rows again: expected"),
    (lambda: objective(valid_index=torch.tensor([0, -1])), "valid_index holds rows -1 to 0: expected rows from 0"),
    (lambda: objective(valid_index=torch.tensor([0, T])), "expected rows from 0 to 36"),
    (lambda: objective(chunk_tokens=0), "chunk_tokens=0: expected 1 or more"),
    (lambda: FullVocab(torch.zeros(T, 9), OutputHead(torch.zeros(V, 24))), "hidden_TE of shape (37, 9): expected"),
    (lambda: objective([Distill(make_full(36), KL)]), "terms[0] (forward_kl) has 36 tokens, the student 37"),
    (lambda: objective([Distill(DenseLogits(torch.zeros(T, 256)), KL)]), "teacher logits over 256 tokens, student"),
    (lambda: linear_objective(torch.zeros(T, 8), torch.nn.Linear(8, V), CE), "head is of type Linear: expected"),  # type: ignore[arg-type]
    (lambda: Distill(torch.zeros(T, V), KL), "signal is of type Tensor: expected what a teacher's `signal(ids)`"),  # type: ignore[arg-type]
    (lambda: Distill(make_full(), forward_kl), "expected one such as forward_kl() or jsd(0.5)"),  # type: ignore[arg-type]
    (lambda: DenseLogits(torch.zeros(2, T, V)), "logits_TV of shape (2, 37, 251)"),
    (lambda: objective([Distill(make_full(vocab_size=240), KL)], vocab_size=250), "vocab_size [240, 250]; expected"),
    (lambda: objective([Distill(make_full(vocabulary=240), KL)], vocab_size=250), "vocab_size=250 on one side, 240"),
    (lambda: TopK(IDS, LOG_PROBS[:, :3]), "ids_TK of shape (37, 4) and log_probs_TK of shape (37, 3)"),
    (lambda: TopK(IDS[:, :0], LOG_PROBS[:, :0]), "one entry or more"),
    (lambda: TopK(LOG_PROBS, LOG_PROBS), "ids_TK of dtype torch.float32: expected int32 or int64"),
    (lambda: TopK(IDS, LOG_PROBS, tail="floor"), "tail='floor': expected one of bucket, renormalize, drop, zero"),  # type: ignore[arg-type]
    (lambda: TopK(IDS, LOG_PROBS, tail_log_prob_T=torch.zeros(T, 1)), "tail_log_prob_T of shape (37, 1): expected"),
    (lambda: Sampled(IDS, LOG_PROBS[0]), "ids_TM of shape (37, 4) and weights_TM of shape (4,)"),
    (lambda: Distill(Sampled(IDS, LOG_PROBS), reverse_kl()), "estimate forward_kl only, not reverse_kl"),
    (lambda: Distill(make_full(), KL, temperature=0.0), "temperature=0.0: expected a positive number"),
    (lambda: Entropy(1.0, temperature=NAN), "temperature=nan"),
    (lambda: Distill(Chosen(IDS, LOG_PROBS, temperature=1.0), KL, temperature=2.0), "taken at temperature 1.0, the"),
    (lambda: Distill(Mixture([make_full()], [1.0], 1.5), KL), "were taken at temperature 1.5, the term needs"),
    (lambda: Mixture([make_full()], [1.0], 0.0), "temperature=0.0: expected a positive"),
    (lambda: Mixture([], []), "a mixture of 0 signals with 0 weights: expected one signal"),
    (lambda: Mixture([make_full()], [0.5, 0.5]), "a mixture of 1 signals with 2 weights: expected one signal or"),
    (lambda: Mixture(2 * [make_full()], [1, 0.0]), "weights[1]=0.0: expected a positive number"),
    (lambda: Mixture([make_full()], [-1.0]), "weights[0]=-1.0"),
    (lambda: Mixture([make_full()], [NAN]), "weights[0]=nan"),
    (lambda: Mixture([make_full()], [math.inf]), "weights[0]=inf"),
    (lambda: Mixture([make_full()], [True]), "weights[0]=True"),
    (lambda: Mixture([make_full(), TopK(IDS, LOG_PROBS)], [1, 1]), "signals[1] is of type TopK: expected FullVocab"),
    (lambda: Mixture([Mixture([make_full()], [1])], [1]), "signals[0] is a Mixture: expected FullVocab or"),
    (lambda: Mixture([make_full(), make_full(36)], [1, 1]), "signals[1] has 36 tokens, signals[0] 37"),
    (lambda: objective([Distill(Mixture([make_full(36)], [1]), KL)]), "terms[0] (forward_kl) has 36 tokens, the"),
    (lambda: objective([Distill(Mixture([DenseLogits(torch.zeros(T, 256))], [1]), KL)]), "teacher logits over 256"),
    (
        lambda: objective([Distill(Mixture([make_full(vocab_size=240), make_full(vocab_size=250)], [1, 1]), KL)]),
        "vocab_size [240, 250]; expected one number",
    ),
    (lambda: logits_objective(torch.zeros(2, T, V), CE), "logits_TV of shape (2, 37, 251)"),
    (lambda: SampledKL(make_labels(), ZERO_T, "k4"), "estimator='k4': expected 'k2'"),  # type: ignore[arg-type]
    (lambda: SampledKL(make_labels(), torch.zeros(T + 1)), "teacher_log_probs_T of shape (38,)"),
    (lambda: SampledKL(make_labels(), torch.zeros(T, requires_grad=True)), "requires grad: expected a constant"),
    (lambda: SampledKL(make_labels(), ZERO_T - math.inf), "holds -inf at a sampled token"),
    (lambda: PolicyGradient(make_labels(), ZERO_T.long(), ZERO_T), "advantages_T of"),
    (lambda: policy(clip_low=1.5), "clip_low=1.5"),
    (lambda: policy(kl_scale=0.1), "without reference_log"),
    (lambda: linear_log_probs(torch.zeros(T, D), OutputHead(torch.zeros(V, D)), ZERO_T), "labels_T of"),
    (lambda: Correction("tis"), "correction 'tis': expected one of none, truncated, masked"),  # type: ignore[arg-type]
    (lambda: Correction("masked", 1.0), "limit=1.0 of the correction: expected a number above 1"),
    (lambda: Correction("masked", NAN), "limit=nan"),
    (lambda: SampledKL(make_labels(), ZERO_T, correction=Correction("masked")), "correction='masked' without"),
    (lambda: policy(correction=Correction("masked")), "correction='masked' with surrogate='clip'"),
    (lambda: discounted_sum(torch.zeros(3), torch.zeros(4), 0.5), "values_T of shape (3,)"),
    (lambda: discounted_sum(ZERO_T, ZERO_T, 1.5), "discount=1.5: expected a number from 0 to 1"),
    (lambda: LogRatio(make_labels(), ZERO_T + NAN), "old_log_probs_T holds nan at a sampled"),
    (
        lambda: of_batch(replace(parse_objective("sampled_kl"), correction=Correction("masked")), OLD_LOG_PROBS),
        "old_log_probs is missing in per_token",
    ),
    *(
        (
            lambda text=text, missing=missing: of_batch(parse_objective(text), missing),
            f"{missing} is missing in per_token",
        )
        for text, missing in (
            ("sampled_kl", IS_SAMPLED),
            ("policy_gradient", ADVANTAGES),
            ("policy_gradient", OLD_LOG_PROBS),
            ("policy_gradient(teacher_kl=1)", OLD_LOG_PROBS),
        )
    ),
    (lambda: fused(parse_objective("sampled_kl"), make_leaves(), make_batch(), None), "signal is missing"),
    *(
        (lambda text=text: parse_objective(text).terms(make_labels(), {}), "signal is missing")
        for text in ("cross_entropy + forward_kl", "uld", "sampled_kl", "policy_gradient(teacher_kl=1)")
    ),
    (lambda: parse_objective("forward_kl").terms(make_labels(), TWO_SIGNALS), "signals of math, code: expected one"),
    (lambda: mixture_of("math", "prose").terms(make_labels(), TWO_SIGNALS), "expected those of math, prose"),
    (
        lambda: mixture_of("math", "code", "prose").terms(make_labels(), TWO_SIGNALS),
        "expected those of math, code, prose, all of which a mixture needs",
    ),
    (lambda: fused(parse_objective("cross_entropy"), make_leaves(), short_batch(), None), "per_token['is_sampled']"),
    (
        lambda: replace(parse_objective("policy_gradient(teacher_kl=1)"), discount=0.5).terms(
            make_labels(), {TEACHER: make_full()}, make_batch().per_token
        ),
        "discount=0.5 without document_T",
    ),
    (
        lambda: parse_objective("uld").terms(make_labels(), {TEACHER: make_spans()}),
        "uld with SpanSignal: expected the sorted probabilities",
    ),
    (
        lambda: parse_objective("forward_kl").terms(make_labels(), {TEACHER: SORTED}),
        "forward_kl with sorted probabilities:",
    ),
    (lambda: replace(make_spans(), first_weights_T=torch.ones(3)), "first_weights_T of shape (3,): expected (37,)"),
    (lambda: replace(SORTED, weights_T=torch.ones(3)), "weights_T of shape (3,): expected (37,)"),
    (lambda: replace(SORTED, log_probs_TK=torch.ones(T, 0)), "log_probs_TK of shape (37, 0)"),
    (lambda: SortedL1(SORTED, temperature=0.0), "temperature=0"),
    (lambda: Continuation(make_labels(), NAN), "scale=nan"),
    (lambda: objective([Continuation(torch.full((T,), V))]), "labels_T holds 251: expected labels below 251"),
    (lambda: Distill(make_full(), KL, label=""), "label='': expected a name without '#'"),
    (lambda: Distill(make_full(), KL, label="a#2"), "label='a#2': expected a name without '#'"),
    *((lambda c=c: c * KL, "expected a positive number") for c in (0.0, -1.0, NAN, math.inf)),
    (lambda: True * KL, "expected a positive number"),
    (lambda: KL * False, "expected a positive number"),
    (lambda: WeightedSum(((True, KL),)), "expected a positive number"),
    (lambda: jsd(NAN), "nan"),
    (lambda: skew_forward_kl(NAN), "nan"),
    (lambda: skew_reverse_kl(NAN), "nan"),
]


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


@pytest.mark.parametrize(("call", "words"), ERRORS, ids=lambda case: case if isinstance(case, str) else "")
def test_errors_name_what_came_and_what_was_expected(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def test_a_shard_that_does_not_fit_is_refused() -> None:
    head = OutputHead(torch.zeros(V, D), shard=VocabShard(0, V, None))
    assert linear_objective(torch.zeros(T, D), head, CE).loss > 0
    with pytest.raises(ValueError, match=f"{V} rows: expected {2 * V}"):
        replace(head, shard=VocabShard(0, 2 * V, None))
    with pytest.raises(ValueError, match="row 0 is held by none"):
        logits_objective(torch.zeros(T, V), CE, shard=VocabShard(V, 2 * V, None))
    with pytest.raises(ValueError, match="start ≤ stop"):
        VocabShard(5, 3, None)


#: the tensor on the meta device, and its name in the message
ON_META: list[tuple[Callable[[], Any], str]] = [
    (lambda: objective(hidden=meta(T, D)), "hidden_TD"),
    (lambda: linear_objective(torch.zeros(T, D), OutputHead(meta(V, D)), CE), "head.weight_VD"),
    (lambda: linear_objective(torch.zeros(T, D), OutputHead(torch.zeros(V, D), meta(V)), CE), "head.bias"),
    (lambda: linear_objective(meta(T, D), OutputHead(meta(V, D)), CE), "hidden_TD"),
    (lambda: logits_objective(meta(T, V), CE), "logits_TV"),
    (lambda: objective([CrossEntropy(make_labels().to("meta"))]), "terms[0].labels_T"),
    (lambda: objective([*CE, Entropy(1.0, weights_T=meta(T))]), "terms[1].weights_T"),
    (lambda: objective([Distill(unloaded(), KL)]), "terms[0].signal.head.weight_VD"),
    (
        lambda: objective([Distill(Mixture([make_full(), unloaded()], [1, 1]), KL)]),
        "terms[0].signal.signals[1].head.weight_VD",
    ),
    (lambda: objective([Distill(TopK(IDS.to("meta"), LOG_PROBS), KL)]), "terms[0].signal.ids_TK"),
    (lambda: objective(weights_T=meta(T)), "weights_T"),
    (lambda: objective(valid_index=torch.arange(T, device="meta")), "valid_index"),
    (lambda: objective(normalizer=meta()), "normalizer"),
    (lambda: linear_log_probs(torch.zeros(T, D), OutputHead(meta(V, D)), make_labels()), "head.weight_VD"),
    (
        lambda: linear_log_probs(torch.zeros(T, D), OutputHead(torch.zeros(V, D)), make_labels().to("meta")),
        "labels_T",
    ),
]


@pytest.mark.parametrize(("call", "name"), ON_META, ids=lambda case: case if isinstance(case, str) else "")
def test_tensors_without_numbers_are_refused_by_name(call: Callable[[], Any], name: str) -> None:
    """A head that was built on the meta device and never loaded would give arbitrary numbers."""
    with pytest.raises(ValueError, match=f"{re.escape(name)} is on the meta device, which holds no numbers"):
        call()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_mixed_devices_are_refused_by_name() -> None:
    head = OutputHead(torch.zeros(V, D, device="cuda"))
    with pytest.raises(
        ValueError, match=r"head.weight_VD is on cuda:0, hidden_TD on cpu: expected both on one device"
    ):
        linear_objective(torch.zeros(T, D), head, CE)
    with pytest.raises(ValueError, match=r"terms\[0\].labels_T is on cpu, hidden_TD on cuda:0"):
        linear_objective(torch.zeros(T, D, device="cuda"), head, CE)
    # weights_T and valid_index may be on the CPU, where batches are built
    assert (
        linear_objective(
            torch.zeros(T, D, device="cuda"),
            head,
            [Entropy(1.0)],
            weights_T=torch.ones(T),
            valid_index=torch.arange(T),
        ).loss
        > 0
    )


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
