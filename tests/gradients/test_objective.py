"""The chunked pass against plain autograd over all logits in float64: loss, gradients and values per token.

Every case follows one rule (`assert_accurate`): in float64 both are equal; in another dtype, the chunked pass has at
most twice the error of plain autograd in that dtype. T tokens, D student width, V vocabulary.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    ALL_DIVERGENCES,
    ALL_SIGNALS,
    DIVERGENCES_OF_PEAKED_ROWS,
    DTYPES,
    HEADS,
    OTHER_TERMS,
    D,
    T,
    V,
    all_terms,
    assert_accurate,
    assert_same,
    every_term,
    make_full,
    make_labels,
    make_leaves,
    make_signal,
    other_terms,
    run,
    some_weights,
    sums,
)
from kit.tensors import Largest
from torch import Tensor

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    Entropy,
    OutputHead,
    Term,
    TopK,
    forward_kl,
    jsd,
    linear_objective,
    parse_divergence,
)
from stillhouse.objective.tile import chunks
from stillhouse.objective.tile.logits_provider import HeadLogits

#: (divergence, signal, dtype, standard deviation of the logits)
CELLS = [
    *((divergence, signal, "float64", 1.0) for divergence in ALL_DIVERGENCES for signal in ALL_SIGNALS),
    *((divergence, signal, "float32", 1.0) for divergence in ALL_DIVERGENCES for signal in ("full", "mixture")),
    *((text, signal, "float32", 50.0) for text in DIVERGENCES_OF_PEAKED_ROWS for signal in ("full", "mixture")),
    *(
        ("jsd(0.3)", signal, dtype, sharpness)
        for signal in ALL_SIGNALS
        for dtype in ("float32", "bfloat16", "float16")
        for sharpness in (1.0, 50.0)
    ),
]


#: without weights, a chunk is a slice of the rows, otherwise an index of those with a weight
OPTIONS: list[dict[str, Any]] = [{}, {"weights_T": some_weights(), "normalizer": 23.0}]


@pytest.mark.parametrize(("expression", "signal", "dtype", "sharpness"), CELLS)
def test_every_divergence_on_every_signal(expression: str, signal: str, dtype: str, sharpness: float) -> None:
    leaves = make_leaves(dtype=DTYPES[dtype], sharpness=sharpness)
    signal_dtype = DTYPES[dtype] if dtype == "float64" or signal in ("full", "dense", "mixture") else torch.float32
    teacher = make_signal(signal, dtype=signal_dtype, sharpness=sharpness, temperature=1.7)
    assert_accurate(leaves, [Distill(teacher, parse_divergence(expression), 0.7, 1.7)], **OPTIONS[dtype == "float64"])


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("term", OTHER_TERMS)
def test_every_other_term(term: str, dtype: str, chunk_tokens: int | None) -> None:
    """In a sum with a cross-entropy; the numbers that come with the batch are float32 at least."""
    leaves, wide = make_leaves(dtype=DTYPES[dtype]), DTYPES["float64" if dtype == "float64" else "float32"]
    terms = [CrossEntropy(make_labels(), 0.2), other_terms(dtype=wide)[term]]
    assert_accurate(leaves, terms, chunk_tokens=chunk_tokens, tiny=TINY[dtype], **OPTIONS[dtype == "float64"])


#: the gradient of the sorted distance is a sum of signs
TINY = {"float64": 1e-11, "float32": 1e-6, "bfloat16": 1e-3}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bias", [True, False])
def test_sum_of_terms_through_every_head(head: str, bias: bool) -> None:
    leaves, rows = make_leaves(bias=bias), HEADS[head].get("vocab_size", V)
    mixture = Distill(make_signal("mixture", vocabulary=rows), jsd(0.3))
    terms = [*every_term(vocabulary=rows), *other_terms(vocabulary=rows).values(), mixture]
    options: dict[str, Any] = {"weights_T": some_weights(), "normalizer": torch.tensor(19)}
    result = assert_accurate(leaves, terms, head=HEADS[head], chunk_tokens=10, **options)
    assert result.gradients["weight"][:rows].any(1).all()
    assert not result.gradients["weight"][rows:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sharpness", [1.0, 50.0])
def test_sum_of_terms(sharpness: float, dtype: str) -> None:
    leaves, terms = make_leaves(dtype=DTYPES[dtype], sharpness=sharpness), every_term(dtype=DTYPES[dtype])
    assert_accurate(leaves, terms, head={"scale": 0.5, "softcap": 30.0}, normalizer=29.0, weights_T=torch.ones(T))


@pytest.mark.parametrize("signal", [*ALL_SIGNALS, "other terms", *(name for name in HEADS if name != "plain")])
def test_gradients_against_finite_differences(signal: str) -> None:
    """All divergences on a signal, or all other terms, or both kinds through a head, in several chunks.

    Autograd of the oracle may be wrong in the same way as the pass, a finite difference is not.
    """
    tokens, vocabulary, width = 3, 7, 2
    head = {"vocab_size": 5} if signal == "padded" else HEADS.get(signal, {})
    rows = head.get("vocab_size", vocabulary)
    terms = [term for name, term in other_terms(tokens, rows).items() if name not in WITH_CONSTANT_WEIGHTS]
    if signal in ALL_SIGNALS:
        teacher = make_signal(signal, tokens, rows, temperature=1.7, entries=4)
        terms = [Distill(teacher, parse_divergence(text), 0.7, 1.7, True) for text in ALL_DIVERGENCES]
    elif signal in HEADS:
        terms += [Distill(make_signal("full", tokens, rows), jsd(0.3), 0.7)]
    leaves, weights_T = make_leaves(tokens, vocabulary, width), torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        student = OutputHead(weight, bias, **head)
        return linear_objective(hidden, student, terms, weights_T=weights_T, normalizer=3.7, chunk_tokens=2).loss

    inputs = tuple(leaf.requires_grad_() for leaf in vars(leaves).values())
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=True)


#: terms whose gradient takes a weight for a constant that depends on the student
WITH_CONSTANT_WEIGHTS = ("k2, corrected", "k3, masked", "cispo", "masked", "sequences")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 36, 1000])
def test_chunk_size_and_valid_index_change_nothing(chunk_tokens: int) -> None:
    leaves, terms, weights_T = make_leaves(), all_terms(), some_weights()
    expected = run(linear_objective, leaves, terms, weights_T=weights_T)
    for valid_index in (None, weights_T.nonzero()[:, 0]):
        actual = run(
            linear_objective, leaves, terms, weights_T=weights_T, valid_index=valid_index, chunk_tokens=chunk_tokens
        )
        assert_same(actual, expected, within=1e-11)
        torch.testing.assert_close(sums(actual.output), sums(expected.output), rtol=1e-11, atol=1e-11)
        assert actual.output.metrics["chunk_tokens"] == min(chunk_tokens, int((weights_T != 0).sum()))
    assert expected.output.metrics["chunk_tokens"] == (weights_T != 0).sum()
    alone = assert_accurate(make_leaves(), every_term(), valid_index=torch.tensor([3, 4, 30]))
    assert alone.output.metrics["tokens"] == 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.bfloat16])
def test_weights_of_any_dtype(dtype: torch.dtype) -> None:
    weights_T = (torch.arange(T) % 3).to(dtype)
    terms: list[Term] = [CrossEntropy(make_labels(), weights_T=weights_T), Entropy(0.1)]
    assert_accurate(make_leaves(dtype=torch.float32), terms, weights_T=weights_T)


@pytest.mark.parametrize("signal", ["full", "bucket"])
def test_nothing_of_the_size_of_all_logits_is_made(signal: str) -> None:
    tokens, vocabulary, chunk = 512, 640, 16
    leaves = make_leaves(tokens, vocabulary, 8, dtype=torch.float32)
    teacher = make_signal("full", tokens, vocabulary, dtype=torch.float32)
    if signal != "full":
        ids = torch.randint(0, vocabulary, (tokens, 8))
        teacher = TopK(ids, torch.full((tokens, 8), -3.0), tail=signal)  # type: ignore[arg-type]
    terms = [CrossEntropy(make_labels(tokens, vocabulary), z_loss=0.1), Distill(teacher, jsd(0.3)), Entropy(0.1)]
    with Largest() as largest:
        run(linear_objective, leaves, terms, chunk_tokens=chunk, weights_T=some_weights(tokens))
    # the widest tensors may be the [T, 24] teacher's hidden states or a tile, of 1/32 of the logits each
    assert largest.numbers <= max(chunk * vocabulary, tokens * 24, vocabulary * 24) < tokens * vocabulary / 20


@pytest.mark.parametrize(
    ("needs", "products"),
    [(("hidden", "weight", "bias"), 3), (("hidden",), 2), (("weight",), 2), (("bias",), 1), ((), 1)],
    ids=str,
)
def test_matrix_products_are_those_that_are_needed(needs: tuple[str, ...], products: int) -> None:
    """Each chunk needs the products of the logits, the hidden states' gradient and, unless frozen, the head's.

    Terms with one teacher share its tile: all of them need one more product.
    """
    leaves, full = make_leaves(dtype=torch.float32), make_full(dtype=torch.float32)
    of_teacher = [Distill(full, forward_kl()), Distill(full, jsd(0.3)), Entropy(0.1)]
    tensors = {name: leaf.requires_grad_(name in needs) for name, leaf in vars(leaves).items()}
    head = OutputHead(tensors["weight"], tensors["bias"])
    for others in ([], of_teacher[:1], of_teacher):
        with Largest() as recorder:
            terms = [CrossEntropy(make_labels(), z_loss=0.1), *others]
            output = linear_objective(tensors["hidden"], head, terms, chunk_tokens=20)
            if needs:
                output.loss.backward()
        assert recorder.products == 2 * (products + bool(others))
        assert output.loss.requires_grad == bool(needs)
        assert {name for name, leaf in tensors.items() if leaf.grad is not None} == set(needs)


def test_labels_of_rows_without_weight_may_be_anything() -> None:
    weights_T = torch.ones(T)
    weights_T[3] = 0
    labels_T = make_labels()
    expected = run(linear_objective, make_leaves(), [CrossEntropy(labels_T)], weights_T=weights_T)
    labels_T = labels_T.index_fill(0, torch.tensor([3]), 10**6)
    assert_same(run(linear_objective, make_leaves(), [CrossEntropy(labels_T)], weights_T=weights_T), expected)


PLAIN_LOSS = """
log_q = torch.log_softmax(student_head(hidden) / tau, -1)  # [T, V]
with torch.no_grad():
    log_p = torch.log_softmax(teacher_head(teacher_hidden) / tau, -1)  # [T, V]
kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
loss = (kl * mask).sum() / mask_sum_of_the_step
"""


def test_the_loss_of_the_documentation_is_the_one_of_plain_logits() -> None:
    """The loss that docs/objective.md shows has the value and the gradients of one from plain logits."""
    page = (Path(__file__).parents[2] / "docs" / "objective.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    losses, gradients = [], []
    for code, result in ((PLAIN_LOSS, "loss"), (shown, "output.loss")):
        leaves, teacher = make_leaves(bias=False), make_full()
        names: dict[str, Any] = {
            "torch": torch,
            "F": torch.nn.functional,
            "hidden": leaves.hidden.requires_grad_(),
            "student_head": torch.nn.Linear(D, V, bias=False, dtype=torch.float64),
            "teacher_head": torch.nn.Linear(24, V, bias=False, dtype=torch.float64),
            "teacher_hidden": teacher.hidden_TE,
            "tau": 1.7,
            "mask": (make_labels() >= 0).double(),
            "mask_sum_of_the_step": 29.0,
        }
        names["student_head"].weight = torch.nn.Parameter(leaves.weight)
        names["teacher_head"].weight = torch.nn.Parameter(teacher.head.weight_VD)
        exec(code, names)
        loss = eval(result, names)
        losses.append(loss.detach())
        if result == "loss":
            loss.backward()
        gradients.append((names["hidden"].grad, names["student_head"].weight.grad))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_rows_of_a_tile_follow_the_budget_between_two_bounds(device: str) -> None:
    kind = "cpu" if device == "meta" else device
    fewest, most = chunks.TILE_ROWS[kind]
    source = HeadLogits(torch.zeros(1, 1), OutputHead(torch.zeros(1, 1)), [])
    source.device = torch.device(device)
    source.vocabulary = 1 << 30
    assert chunks.tile_rows(source, 10 * most) == fewest
    source.vocabulary = 10
    assert chunks.tile_rows(source, 10 * most) == most
    source.vocabulary = chunks.TILE_BYTES[kind] // 4 // (most - 1)
    # on a GPU, addresses of a chunk's rows are multiples of 16 bytes
    unit = 8 if kind == "cuda" else 1
    assert most - 1 - unit < chunks.tile_rows(source, 10**9) <= most - 1
    # tokens are distributed evenly, so the last chunk does not have only a few rows
    source.vocabulary = 10
    assert chunks.tile_rows(source, most + 2) == most // 2 + unit
    assert chunks.tile_rows(source, 0) == most
