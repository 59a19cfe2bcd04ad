"""The chunked pass against plain autograd over all logits: loss, gradients, values, shapes, memory, errors."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    ALL_DIVERGENCES,
    SIGNALS,
    TAILS,
    D,
    Leaves,
    T,
    V,
    assert_same,
    converted,
    distance,
    every_term,
    generator,
    make_full,
    make_labels,
    make_leaves,
    make_signal,
    run,
    sums,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    Entropy,
    OutputHead,
    Term,
    TopK,
    chunks,
    forward_kl,
    jsd,
    linear_objective,
    logits_objective,
    parse_divergence,
)
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.source import HeadRows


def some_weights(tokens: int = T) -> Tensor:
    weights_T = torch.rand(tokens, generator=generator(8))
    weights_T[::4] = 0
    return weights_T


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("expression", ALL_DIVERGENCES)
def test_every_divergence_on_every_signal(expression: str, signal: str) -> None:
    teacher = make_signal(signal, temperature=1.7)
    terms = [Distill(teacher, parse_divergence(expression), 0.7, 1.7)]
    options: dict[str, Any] = {"weights_T": some_weights(), "normalizer": 23.0}
    actual = run(linear_objective, make_leaves(), terms, chunk_tokens=8, **options)
    assert_same(actual, run(dense_objective, make_leaves(), terms, **options), within=1e-11)


@pytest.mark.parametrize(
    "head",
    [{}, {"scale": 0.25}, {"softcap": 2.0}, {"scale": 3.0, "softcap": 5.0}, {"vocab_size": 240}],
    ids=str,
)
@pytest.mark.parametrize("bias", [True, False])
def test_sum_of_terms_through_every_head(head: dict[str, Any], bias: bool) -> None:
    leaves = make_leaves(bias=bias)
    terms = every_term(vocabulary=head.get("vocab_size", V))
    options: dict[str, Any] = {"weights_T": some_weights(), "normalizer": torch.tensor(19)}
    actual = run(linear_objective, leaves, terms, head=head, chunk_tokens=10, **options)
    expected = run(dense_objective, leaves, terms, head=head, **options)
    assert_same(actual, expected)
    if "vocab_size" in head:
        assert actual.gradients["weight"][240:].abs().max() == 0


def test_term_names_are_numbered() -> None:
    output = run(linear_objective, make_leaves(), every_term()).output
    assert set(output.per_token) == {
        "cross_entropy",
        "forward_kl",
        "0.5*forward_kl + forward_kl",
        "forward_kl#2",
        "sampled_cross_entropy",
        "entropy",
    }


def test_logits_objective_equals_the_pass_from_hidden_states() -> None:
    leaves, terms, weights_T = make_leaves(), every_term(), some_weights()
    expected = run(linear_objective, leaves, terms, weights_T=weights_T, normalizer=5)
    hidden, weight, bias = (
        leaf.requires_grad_() for leaf in (leaves.hidden, leaves.weight, leaves.bias) if leaf is not None
    )
    output = logits_objective(OutputHead(weight, bias).logits(hidden), terms, weights_T=weights_T, normalizer=5)
    output.loss.backward()
    assert distance(output.loss, expected.output.loss) < 1e-13
    for name, leaf in zip(("hidden", "weight", "bias"), (hidden, weight, bias), strict=True):
        assert leaf.grad is not None
        assert distance(leaf.grad, expected.gradients[name]) < 1e-12
    assert output.metrics.keys() == expected.output.metrics.keys()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 36, 37, 1000, None])
def test_chunk_size_and_valid_index_change_nothing(chunk_tokens: int | None) -> None:
    leaves, terms, weights_T = make_leaves(dtype=torch.float32), every_term(dtype=torch.float32), some_weights()
    expected = run(linear_objective, leaves, terms, weights_T=weights_T)
    for valid_index in (None, weights_T.nonzero()[:, 0]):
        actual = run(
            linear_objective, leaves, terms, weights_T=weights_T, valid_index=valid_index, chunk_tokens=chunk_tokens
        )
        assert_same(actual, expected, within=1e-6)
        for name, total in sums(expected.output).items():
            torch.testing.assert_close(actual.output.metrics[name], total, rtol=1e-6, atol=1e-6)


def test_valid_index_alone_says_which_rows_count() -> None:
    leaves, terms, valid_index = make_leaves(), every_term(), torch.tensor([3, 4, 30])
    actual = run(linear_objective, leaves, terms, valid_index=valid_index)
    assert_same(actual, run(dense_objective, leaves, terms, valid_index=valid_index))
    assert actual.output.metrics["tokens"] == 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.bfloat16])
def test_weights_of_any_dtype(dtype: torch.dtype) -> None:
    weights_T = (torch.arange(T) % 3).to(dtype)
    terms: list[Term] = [CrossEntropy(make_labels(), weights_T=weights_T), Entropy(0.1)]
    leaves = make_leaves(dtype=torch.float32)
    assert_same(
        run(linear_objective, leaves, terms, weights_T=weights_T),
        run(dense_objective, leaves, terms, weights_T=weights_T),
        within=1e-5,
    )


def test_terms_own_weights_multiply_the_objectives() -> None:
    leaves, weights_T, own_T = make_leaves(), some_weights(), torch.rand(T, generator=generator(9))
    own = [Distill(make_full(), jsd(0.3), weights_T=own_T)]
    whole = [Distill(make_full(), jsd(0.3))]
    actual = run(linear_objective, leaves, own, weights_T=weights_T)
    expected = run(linear_objective, leaves, whole, weights_T=weights_T.double() * own_T)
    assert distance(actual.output.loss, expected.output.loss) < 1e-6
    assert distance(actual.gradients["hidden"], expected.gradients["hidden"]) < 1e-6


def test_micro_batches_add_up() -> None:
    """Losses are sums over tokens with one normaliser per step, so splitting the batch changes nothing."""
    leaves, terms = make_leaves(dtype=torch.float64), [CrossEntropy(make_labels(), 0.3), Entropy(0.1)]
    whole = run(linear_objective, leaves, terms, normalizer=29.0)
    total, weight_grad = 0.0, torch.zeros_like(leaves.weight)
    for rows in (slice(0, 5), slice(5, 6), slice(6, T)):
        part = [CrossEntropy(make_labels()[rows], 0.3), Entropy(0.1)]
        result = run(linear_objective, Leaves(leaves.hidden[rows], leaves.weight, leaves.bias), part, normalizer=29.0)
        total += result.output.loss.item()
        weight_grad += result.gradients["weight"]
    assert total == pytest.approx(whole.output.loss.item(), rel=1e-13)
    assert distance(weight_grad, whole.gradients["weight"]) < 1e-13


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm)


class Recorder(TorchDispatchMode):
    """Counts matrix products and records the size of the largest tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in PRODUCTS
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.itemsize)
        return result


@pytest.mark.parametrize("signal", ["full", *TAILS])
def test_nothing_of_the_size_of_all_logits_is_made(signal: str) -> None:
    tokens, vocabulary, chunk = 512, 640, 16
    leaves = make_leaves(tokens, vocabulary, 8, dtype=torch.float32)
    teacher = make_signal("full", tokens, vocabulary, dtype=torch.float32)
    if signal != "full":
        ids = torch.randint(0, vocabulary, (tokens, 8))
        teacher = TopK(ids, torch.full((tokens, 8), -3.0), tail=signal)  # type: ignore[arg-type]
    terms = [CrossEntropy(make_labels(tokens, vocabulary), z_loss=0.1), Distill(teacher, jsd(0.3)), Entropy(0.1)]
    with Recorder() as recorder:
        run(linear_objective, leaves, terms, chunk_tokens=chunk, weights_T=some_weights(tokens))
    # the widest tensors may be the [T, 24] teacher's hidden states or a tile, of 1/32 of the logits each
    assert recorder.largest <= max(chunk * vocabulary, tokens * 24, vocabulary * 24)
    assert recorder.largest < tokens * vocabulary / 20


@pytest.mark.parametrize(
    ("needs", "products"),
    [(("hidden", "weight", "bias"), 3), (("hidden",), 2), (("weight",), 2), (("bias",), 1), ((), 1)],
    ids=str,
)
def test_matrix_products_are_those_that_are_needed(needs: tuple[str, ...], products: int) -> None:
    """Each chunk needs the products of the logits, the hidden states' gradient and, unless frozen, the head's."""
    leaves = make_leaves(dtype=torch.float32)
    tensors = {name: leaf.requires_grad_(name in needs) for name, leaf in vars(leaves).items()}
    head = OutputHead(tensors["weight"], tensors["bias"])
    with Recorder() as recorder:
        output = linear_objective(tensors["hidden"], head, [CrossEntropy(make_labels())], chunk_tokens=20)
        if needs:
            output.loss.backward()
    assert recorder.products == 2 * products
    assert output.loss.requires_grad == bool(needs)
    assert {name for name, leaf in tensors.items() if leaf.grad is not None} == set(needs)


def test_a_teachers_head_is_projected_once_for_two_terms() -> None:
    full = make_full()
    terms = [Distill(full, forward_kl()), Distill(full, jsd(0.3))]
    with torch.no_grad(), Recorder() as recorder:
        linear_objective(make_leaves().hidden, OutputHead(make_leaves().weight), terms, chunk_tokens=20)
    assert recorder.products == 2 * 2


def test_a_sum_of_terms_costs_the_products_of_one() -> None:
    """Cross-entropy with z-loss, two divergences and the entropy share one tile."""
    full, counts = make_full(), []
    one: list[Term] = [Distill(full, forward_kl())]
    several = [CrossEntropy(make_labels(), z_loss=0.1), *one, Distill(full, jsd(0.3)), Entropy(0.1)]
    for terms in (one, several):
        with Recorder() as recorder:
            run(linear_objective, make_leaves(), terms, chunk_tokens=20)
        counts.append(recorder.products)
    assert counts == [2 * 4, 2 * 4]


def test_labels_of_rows_without_weight_may_be_anything() -> None:
    weights_T = torch.ones(T)
    weights_T[3] = 0
    labels_T = make_labels()
    expected = run(linear_objective, make_leaves(), [CrossEntropy(labels_T)], weights_T=weights_T)
    labels_T = labels_T.index_fill(0, torch.tensor([3]), 10**6)
    assert_same(run(linear_objective, make_leaves(), [CrossEntropy(labels_T)], weights_T=weights_T), expected)


def test_oracle_conversion_keeps_terms_whole() -> None:
    """This tests a helper of the tests: a float64 copy of each term gives the same values."""
    double = [converted(term, torch.float64) for term in every_term(dtype=torch.float32)]
    assert [term.name for term in double] == [term.name for term in every_term()]
    assert all(term.signal.heads()[0].weight_VD.dtype == torch.float64 for term in double[1:3])


def test_the_two_losses_of_the_documentation_are_equal() -> None:
    """docs/objective.md shows a loss from plain logits and one from the package: values and gradients are equal."""
    page = (Path(__file__).parents[2] / "docs" / "objective.md").read_text(encoding="utf-8")
    before, after = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    losses, gradients = [], []
    for code, result in ((before, "loss"), (after, "output.loss")):
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
    source = HeadRows(torch.zeros(1, 1), OutputHead(torch.zeros(1, 1)), [])
    source.device = torch.device(device)
    source.vocabulary = 1 << 30
    assert chunks.tile_rows(source, 10 * most) == fewest
    source.vocabulary = 10
    assert chunks.tile_rows(source, 10 * most) == most
    source.vocabulary = chunks.TILE_BYTES[kind] // 4 // (most - 1)
    assert chunks.tile_rows(source, 10**9) in (most - 1, most - 2)
    # tokens are distributed evenly, so the last chunk does not have only a few rows
    source.vocabulary = 10
    assert chunks.tile_rows(source, most + 2) == most // 2 + 1
    assert chunks.tile_rows(source, 0) == most


def test_the_choice_of_rows_is_in_the_metrics() -> None:
    for given, chosen in ((None, T), (10, 10), (1000, T)):
        output = run(linear_objective, make_leaves(), [Entropy(1.0)], chunk_tokens=given).output
        assert output.metrics["chunk_tokens"] == chosen
