"""Misuse of the objective: each error names the given value and the expected one."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from kit.objective_cases import D, T, V, make_full, make_labels, make_leaves
from torch import Tensor

from stillhouse.objective import (
    Chosen,
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    FullVocab,
    Mixture,
    OutputHead,
    PolicyGradient,
    Sampled,
    SampledKL,
    Term,
    TopK,
    VocabShard,
    forward_kl,
    linear_log_probs,
    linear_objective,
    logits_objective,
    reverse_kl,
)

NAN = math.nan
CE = [CrossEntropy(make_labels())]
KL = forward_kl()
IDS, LOG_PROBS = torch.zeros(T, 4, dtype=torch.int64), torch.zeros(T, 4)
ERRORS: dict[str, tuple[Any, str]] = {
    "hidden width": (
        lambda: objective(hidden=torch.zeros(T, 9)),
        "hidden_TD of shape (37, 9): expected [tokens, 16]",
    ),
    "hidden dims": (lambda: objective(hidden=torch.zeros(2, T, D)), "hidden_TD of shape (2, 37, 16)"),
    "head dims": (lambda: OutputHead(torch.zeros(V)), "head weight of shape (251,)"),
    "head scalar": (lambda: OutputHead(torch.zeros(())), "head weight of shape ()"),
    "bias": (lambda: OutputHead(torch.zeros(V, D), torch.zeros(9)), "head bias of shape (9,): expected (251,)"),
    "vocab_size": (lambda: OutputHead(torch.zeros(V, D), vocab_size=252), "vocab_size=252: expected 1 to 251"),
    "softcap": (lambda: OutputHead(torch.zeros(V, D), softcap=0.0), "softcap=0.0"),
    "nan softcap": (lambda: OutputHead(torch.zeros(V, D), softcap=NAN), "softcap=nan"),
    "infinite softcap": (
        lambda: OutputHead(torch.zeros(V, D), softcap=math.inf),
        "softcap=inf: expected a positive number, or None for none",
    ),
    "nan head scale": (lambda: OutputHead(torch.zeros(V, D), scale=NAN), "scale=nan: expected a finite number"),
    "infinite head scale": (lambda: OutputHead(torch.zeros(V, D), scale=-math.inf), "scale=-inf"),
    "bool as head scale": (lambda: OutputHead(torch.zeros(V, D), scale=True), "scale=True"),
    "weights that require grad": (
        lambda: objective(weights_T=torch.ones(T, requires_grad=True)),
        "weights_T requires grad: expected a constant; detach it",
    ),
    "own weights that require grad": (
        lambda: objective([*CE, Entropy(1.0, weights_T=torch.ones(T, requires_grad=True))]),
        "terms[1].weights_T requires grad",
    ),
    "normalizer that requires grad": (
        lambda: objective(normalizer=torch.ones((), requires_grad=True)),
        "normalizer requires grad",
    ),
    "infinite temperature": (
        lambda: SampledKL(make_labels(), LOG_PROBS[:, 0], temperature=math.inf),
        "temperature=inf",
    ),
    "nan scale of draws": (lambda: SampledKL(make_labels(), LOG_PROBS[:, 0], scale=NAN), "scale=nan"),
    "tail zero": (
        lambda: Distill(TopK(IDS, LOG_PROBS, tail="zero"), forward_kl()),
        "tail='zero' with forward_kl: expected reverse_kl",
    ),
    "dual clip": (lambda: policy(dual_clip=1.0), "dual_clip=1.0: expected a number above 1"),
    "nan dual clip": (lambda: policy(dual_clip=NAN), "dual_clip=nan"),
    "dual clip of cispo": (lambda: policy(dual_clip=3.0, surrogate="cispo"), "dual_clip=3.0 with surrogate='cispo'"),
    "surrogate": (lambda: policy(surrogate="gspo"), "surrogate='gspo': expected 'clip', 'cispo' or 'corrected'"),
    "labels": (
        lambda: objective([CrossEntropy(torch.zeros(9, dtype=torch.int64))]),
        "terms[0] (cross_entropy) has 9 tokens, the student 37",
    ),
    "labels' dims": (lambda: CrossEntropy(torch.zeros(2, 9, dtype=torch.int64)), "labels_T of shape (2, 9)"),
    "labels' dtype": (
        lambda: CrossEntropy(torch.zeros(9)),
        "labels_T of dtype torch.float32: expected int32 or int64",
    ),
    "label too large": (
        lambda: objective([CrossEntropy(torch.full((T,), 251))]),
        "labels_T holds 251: expected labels below 251",
    ),
    "label beyond the real rows": (
        lambda: objective([CrossEntropy(torch.full((T,), 250))], vocab_size=250),
        "expected labels below 250",
    ),
    "smoothing": (lambda: CrossEntropy(make_labels(), label_smoothing=1.0), "label_smoothing=1.0"),
    "z-loss": (lambda: CrossEntropy(make_labels(), z_loss=-1.0), "z_loss=-1.0"),
    "nan z-loss": (lambda: CrossEntropy(make_labels(), z_loss=NAN), "z_loss=nan: expected a finite number"),
    "weights": (lambda: objective(weights_T=torch.ones(9)), "weights_T of shape (9,): expected (37,)"),
    "weights' dims": (lambda: objective(weights_T=torch.ones(T, 1)), "weights_T of shape (37, 1): expected (37,)"),
    "own weights": (lambda: objective([Entropy(1.0, weights_T=torch.ones(9))]), "terms[0].weights_T of shape (9,)"),
    "mask as index": (
        lambda: objective(valid_index=torch.ones(T, dtype=torch.bool)),
        "valid_index of shape (37,) and dtype torch.bool",
    ),
    "no terms": (lambda: objective([]), "no terms: expected at least one"),
    "normalizer": (lambda: objective(normalizer=0), "normalizer=0: expected the positive number"),
    "negative normalizer": (lambda: objective(normalizer=-3.0), "normalizer=-3.0: expected the positive number"),
    "normalizer as a tensor": (lambda: objective(normalizer=torch.zeros(())), "normalizer=0"),
    "nan normalizer": (lambda: objective(normalizer=NAN), "normalizer=nan"),
    "infinite normalizer": (lambda: objective(normalizer=math.inf), "normalizer=inf"),
    "normalizer of another kind": (lambda: objective(normalizer=np.float32("nan")), "normalizer=nan"),
    "nan scale": (lambda: CrossEntropy(make_labels(), NAN), "scale=nan: expected a finite number"),
    "nan scale of a distillation": (lambda: Distill(make_full(), forward_kl(), NAN), "scale=nan"),
    "nan scale of an entropy": (lambda: Entropy(NAN), "scale=nan"),
    "infinite scale": (lambda: Entropy(-math.inf), "scale=-inf"),
    "bool as scale": (lambda: Entropy(True), "scale=True"),
    "nan weight": (
        lambda: objective(weights_T=torch.ones(T).index_fill(0, torch.tensor([3]), NAN)),
        "weights_T holds NaN or infinity",
    ),
    "infinite own weight": (
        lambda: objective([Entropy(1.0, weights_T=torch.full((T,), math.inf))]),
        "terms[0].weights_T holds NaN or infinity",
    ),
    "repeated rows": (
        lambda: objective(valid_index=torch.tensor([4, 7, 4, 4])),
        "valid_index holds 2 of its 4 rows again: expected each row once",
    ),
    "rows below the first": (
        lambda: objective(valid_index=torch.tensor([0, -1])),
        "valid_index holds rows -1 to 0: expected rows from 0 to 36",
    ),
    "rows beyond the last": (lambda: objective(valid_index=torch.tensor([0, T])), "expected rows from 0 to 36"),
    "chunk": (lambda: objective(chunk_tokens=0), "chunk_tokens=0: expected 1 or more"),
    "teacher's width": (
        lambda: FullVocab(torch.zeros(T, 9), OutputHead(torch.zeros(V, 24))),
        "hidden_TE of shape (37, 9): expected [tokens, 24]",
    ),
    "teacher's tokens": (
        lambda: objective([Distill(make_full(36), forward_kl())]),
        "terms[0] (forward_kl) has 36 tokens, the student 37",
    ),
    "teacher's columns": (
        lambda: objective([Distill(DenseLogits(torch.zeros(T, 256)), forward_kl())]),
        "teacher logits over 256 tokens, student over 251",
    ),
    "a module as the head": (
        lambda: linear_objective(torch.zeros(T, 8), torch.nn.Linear(8, V), CE),  # type: ignore[arg-type]
        "head is of type Linear: expected OutputHead(lm_head.weight, lm_head.bias)",
    ),
    "logits as the signal": (
        lambda: Distill(torch.zeros(T, V), forward_kl()),  # type: ignore[arg-type]
        "signal is of type Tensor: expected what a teacher's `signal(ids)` returns",
    ),
    "a divergence that was not called": (
        lambda: Distill(make_full(), forward_kl),  # type: ignore[arg-type]
        "expected one such as forward_kl() or jsd(0.5)",
    ),
    "teacher's dims": (lambda: DenseLogits(torch.zeros(2, T, V)), "logits_TV of shape (2, 37, 251)"),
    "two vocabularies": (
        lambda: objective([Distill(make_full(vocab_size=240), forward_kl())], vocab_size=250),
        "vocab_size [240, 250]; expected one number",
    ),
    "vocabulary beyond the teacher": (
        lambda: objective([Distill(make_full(vocabulary=240), forward_kl())], vocab_size=250),
        "vocab_size=250 on one side, 240 rows on another",
    ),
    "entries": (lambda: TopK(IDS, LOG_PROBS[:, :3]), "ids_TK of shape (37, 4) and log_probs_TK of shape (37, 3)"),
    "no entries": (lambda: TopK(IDS[:, :0], LOG_PROBS[:, :0]), "one entry or more"),
    "ids' dtype": (lambda: TopK(LOG_PROBS, LOG_PROBS), "ids_TK of dtype torch.float32: expected int32 or int64"),
    "tail": (
        lambda: TopK(IDS, LOG_PROBS, tail="floor"),
        "tail='floor': expected one of bucket, renormalize, drop, zero",
    ),  # type: ignore[arg-type]
    "tail's shape": (
        lambda: TopK(IDS, LOG_PROBS, tail_log_prob_T=torch.zeros(T, 1)),
        "tail_log_prob_T of shape (37, 1): expected (37,)",
    ),
    "draws": (lambda: Sampled(IDS, LOG_PROBS[0]), "ids_TM of shape (37, 4) and weights_TM of shape (4,)"),
    "draws' divergence": (
        lambda: Distill(Sampled(IDS, LOG_PROBS), reverse_kl()),
        "estimate forward_kl only, not reverse_kl",
    ),
    "temperature": (
        lambda: Distill(make_full(), forward_kl(), temperature=0.0),
        "temperature=0.0: expected a positive number",
    ),
    "nan temperature": (lambda: Entropy(1.0, temperature=NAN), "temperature=nan"),
    "other temperature": (
        lambda: Distill(Chosen(IDS, LOG_PROBS, temperature=1.0), forward_kl(), temperature=2.0),
        "taken at temperature 1.0, the term asks for 2.0",
    ),
    "other temperature than the mixture's": (
        lambda: Distill(Mixture([make_full()], [1.0], 1.5), forward_kl()),
        "the mixture's distributions are taken at temperature 1.5, the term asks for 1.0; expected the same",
    ),
    "mixture's temperature": (lambda: Mixture([make_full()], [1.0], 0.0), "temperature=0.0: expected a positive"),
    "mixture of nothing": (lambda: Mixture([], []), "a mixture of 0 signals with 0 weights: expected one signal"),
    "mixture's number of weights": (
        lambda: Mixture([make_full()], [0.5, 0.5]),
        "a mixture of 1 signals with 2 weights: expected one signal or more, and one weight for each",
    ),
    "mixture's weight": (lambda: Mixture(2 * [make_full()], [1, 0.0]), "weights[1]=0.0: expected a positive number"),
    "negative weight of a mixture": (lambda: Mixture([make_full()], [-1.0]), "weights[0]=-1.0"),
    "nan weight of a mixture": (lambda: Mixture([make_full()], [NAN]), "weights[0]=nan"),
    "infinite weight of a mixture": (lambda: Mixture([make_full()], [math.inf]), "weights[0]=inf"),
    "bool as weight of a mixture": (lambda: Mixture([make_full()], [True]), "weights[0]=True"),
    "top-k in a mixture": (
        lambda: Mixture([make_full(), TopK(IDS, LOG_PROBS)], [1, 1]),
        "signals[1] is of type TopK: expected FullVocab or DenseLogits",
    ),
    "mixture in a mixture": (
        lambda: Mixture([Mixture([make_full()], [1])], [1]),
        "signals[0] is a Mixture: expected FullVocab or DenseLogits",
    ),
    "mixture's tokens": (
        lambda: Mixture([make_full(), make_full(36)], [1, 1]),
        "signals[1] has 36 tokens, signals[0] 37",
    ),
    "tokens of a mixture": (
        lambda: objective([Distill(Mixture([make_full(36)], [1]), forward_kl())]),
        "terms[0] (forward_kl) has 36 tokens, the student 37",
    ),
    "columns in a mixture": (
        lambda: objective([Distill(Mixture([DenseLogits(torch.zeros(T, 256))], [1]), forward_kl())]),
        "teacher logits over 256 tokens, student over 251",
    ),
    "vocabularies in a mixture": (
        lambda: objective([Distill(Mixture([make_full(vocab_size=240), make_full(vocab_size=250)], [1, 1]), KL)]),
        "vocab_size [240, 250]; expected one number",
    ),
    "logits' dims": (lambda: logits_objective(torch.zeros(2, T, V), CE), "logits_TV of shape (2, 37, 251)"),
}


def objective(terms: list[Term] = CE, hidden: Tensor | None = None, **options: Any) -> None:  # type: ignore[assignment]
    leaves = make_leaves(dtype=torch.float32)
    head = OutputHead(leaves.weight, leaves.bias, vocab_size=options.pop("vocab_size", None))
    linear_objective(leaves.hidden if hidden is None else hidden, head, terms, **options)


def policy(**options: Any) -> PolicyGradient:
    return PolicyGradient(make_labels(), LOG_PROBS[:, 0], LOG_PROBS[:, 1], **options)


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_what_came_and_what_was_expected(case: str) -> None:
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_shard_that_does_not_fit_is_refused() -> None:
    whole = OutputHead(torch.zeros(V, D), shard=VocabShard(0, V, None))
    assert linear_objective(torch.zeros(T, D), whole, CE).loss > 0
    with pytest.raises(ValueError, match=f"{V} rows: expected {2 * V}"):
        dataclasses.replace(whole, shard=VocabShard(0, 2 * V, None))
    with pytest.raises(ValueError, match="row 0 is held by none"):
        logits_objective(torch.zeros(T, V), CE, shard=VocabShard(V, 2 * V, None))
    with pytest.raises(ValueError, match="start ≤ stop"):
        VocabShard(5, 3, None)


#: the tensor on the meta device, and its name in the message
ON_META: dict[str, tuple[Any, str]] = {
    "hidden": (lambda: objective(hidden=torch.zeros(T, D, device="meta")), "hidden_TD"),
    "head": (
        lambda: linear_objective(torch.zeros(T, D), OutputHead(torch.zeros(V, D, device="meta")), CE),
        "head.weight_VD",
    ),
    "bias": (
        lambda: linear_objective(torch.zeros(T, D), OutputHead(torch.zeros(V, D), torch.zeros(V, device="meta")), CE),
        "head.bias",
    ),
    "everything": (
        lambda: linear_objective(torch.zeros(T, D, device="meta"), OutputHead(torch.zeros(V, D, device="meta")), CE),
        "hidden_TD",
    ),
    "logits": (lambda: logits_objective(torch.zeros(T, V, device="meta"), CE), "logits_TV"),
    "labels": (lambda: objective([CrossEntropy(make_labels().to("meta"))]), "terms[0].labels_T"),
    "own weights": (
        lambda: objective([*CE, Entropy(1.0, weights_T=torch.ones(T, device="meta"))]),
        "terms[1].weights_T",
    ),
    "teacher's head": (
        lambda: objective(
            [Distill(FullVocab(torch.zeros(T, 24), OutputHead(torch.zeros(V, 24, device="meta"))), KL)]
        ),
        "terms[0].signal.head.weight_VD",
    ),
    "head in a mixture": (
        lambda: objective(
            [
                Distill(
                    Mixture(
                        [make_full(), FullVocab(torch.zeros(T, 24), OutputHead(torch.zeros(V, 24, device="meta")))],
                        [1, 1],
                    ),
                    KL,
                )
            ]
        ),
        "terms[0].signal.signals[1].head.weight_VD",
    ),
    "teacher's ids": (
        lambda: objective([Distill(TopK(IDS.to("meta"), LOG_PROBS), KL)]),
        "terms[0].signal.ids_TK",
    ),
    "weights": (lambda: objective(weights_T=torch.ones(T, device="meta")), "weights_T"),
    "rows": (lambda: objective(valid_index=torch.arange(T, device="meta")), "valid_index"),
    "normalizer": (lambda: objective(normalizer=torch.ones((), device="meta")), "normalizer"),
    "log-probabilities": (
        lambda: linear_log_probs(torch.zeros(T, D), OutputHead(torch.zeros(V, D, device="meta")), make_labels()),
        "head.weight_VD",
    ),
    "log-probabilities' labels": (
        lambda: linear_log_probs(torch.zeros(T, D), OutputHead(torch.zeros(V, D)), make_labels().to("meta")),
        "labels_T",
    ),
}


@pytest.mark.parametrize("case", ON_META)
def test_tensors_without_numbers_are_refused_by_name(case: str) -> None:
    """A head that was built on the meta device and never loaded would give arbitrary numbers."""
    call, name = ON_META[case]
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
        "hidden_TD": (lambda each: linear_objective(each, OutputHead(weight, bias), CE).loss, hidden),
        "head.weight_VD": (lambda each: linear_objective(hidden, OutputHead(each, bias), CE).loss, weight),
        "head.bias": (lambda each: linear_objective(hidden, OutputHead(weight, each), CE).loss, bias),
        "logits_TV": (lambda each: logits_objective(each, CE).loss, torch.zeros(T, V)),
    }
    call, primal = calls[leaf]
    with pytest.raises(ValueError, match=rf"{leaf} carries a forward-mode tangent \(torch.func.jvp\)"):
        torch.func.jvp(call, (primal,), (torch.ones_like(primal),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode tangent"):
        call(torch.autograd.forward_ad.make_dual(primal, torch.ones_like(primal)))
    if leaf == "hidden_TD":
        with pytest.raises(ValueError, match="forward-mode tangent"):
            torch.func.jvp(
                lambda each: linear_log_probs(each, OutputHead(weight), make_labels())[0], (primal,), (primal + 1,)
            )
