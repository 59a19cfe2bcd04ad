"""The loss inside a training loop: incoming gradients, graphs used twice, frozen parts, autocast, loss scaling.

And differentiable log-probabilities of given tokens, against plain autograd over all logits. T tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    HEADS,
    D,
    Leaves,
    T,
    V,
    all_terms,
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
    trainable,
)
from kit.tensors import assert_equal_tensors, assert_near
from torch import Tensor, nn

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    ObjectiveOutput,
    OutputHead,
    jsd,
    linear_log_probs,
    linear_objective,
    logits_objective,
)
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.tile import chunks


def differentiable(leaves: Leaves) -> tuple[Tensor, OutputHead]:
    bias = None if leaves.bias is None else leaves.bias.requires_grad_()
    return leaves.hidden.requires_grad_(), OutputHead(leaves.weight.requires_grad_(), bias)


def test_a_second_backward_is_the_same_as_the_first_and_has_no_gradient_itself() -> None:
    hidden, head = differentiable(make_leaves())
    loss = linear_objective(hidden, head, every_term()).loss
    inputs = (hidden, head.weight_VD)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, inputs, create_graph=True)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    again = torch.autograd.grad(loss, inputs, torch.tensor(2.0, dtype=loss.dtype), retain_graph=True)
    last = torch.autograd.grad(loss, inputs)
    for one, two, three in zip(first, again, last, strict=True):
        assert torch.equal(2 * one, two)
        assert torch.equal(one, three)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("together", [True, False])
def test_two_losses_from_one_hidden_state_and_one_head(together: bool) -> None:
    """A backbone computes the hidden state, so the hidden state is not a leaf."""

    def gradients(objective: Callable[..., ObjectiveOutput]) -> list[Tensor]:
        leaves = make_leaves()
        hidden, head = differentiable(leaves)
        backbone = torch.randn(D, D, generator=generator(3), dtype=torch.float64).requires_grad_()
        states = torch.tanh(hidden @ backbone)
        losses = [
            objective(states, head, [CrossEntropy(make_labels())]).loss,
            objective(states.flip(0), head, [Distill(make_full(), jsd(0.3), 0.7)]).loss,
        ]
        if together:
            (losses[0] + 0.5 * losses[1]).backward()
        else:
            losses[0].backward(retain_graph=True)
            (0.5 * losses[1]).backward()
        return [
            leaf.grad
            for leaf in (hidden, backbone, head.weight_VD, head.bias)
            if leaf is not None and leaf.grad is not None
        ]

    for actual, expected in zip(gradients(linear_objective), gradients(dense_objective), strict=True):
        assert distance(actual, expected) < 1e-12


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_only_the_loss_is_differentiable_and_without_grad_the_values_are_the_same(context: Any) -> None:
    expected = run(linear_objective, make_leaves(), every_term()).output
    assert expected.loss.requires_grad
    assert expected.loss.shape == ()
    assert not any(value.requires_grad for value in (*expected.metrics.values(), *expected.per_token.values()))
    assert all(values.shape == (T,) for values in expected.per_token.values())
    hidden, head = differentiable(make_leaves())
    with context():
        output = linear_objective(hidden, head, every_term())
    assert not output.loss.requires_grad
    assert torch.equal(output.loss, expected.loss)
    assert_equal_tensors(output.metrics, expected.metrics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_input_is_overwritten_and_teachers_receive_no_gradient(dtype: torch.dtype) -> None:
    leaves, weights_T = make_leaves(dtype=dtype), torch.ones(T)
    terms = [*every_term(dtype=dtype), Distill(make_signal("bucket", dtype=dtype), jsd(0.3))]
    of_teachers = tensors_of([signal for term in terms for signal in term.signals()])
    for tensor in of_teachers:
        tensor.requires_grad_(tensor.is_floating_point())
    hidden, head = differentiable(leaves)
    logits = torch.randn(T, V).to(dtype).requires_grad_()
    valid_index, normalizer = torch.arange(T), torch.tensor(3.0)
    inputs = [hidden, head.weight_VD, head.bias, logits, weights_T, valid_index, normalizer, *tensors_of(terms)]
    before = [(tensor.detach().clone(), tensor._version) for tensor in inputs if tensor is not None]
    first = linear_objective(hidden, head, terms, weights_T=weights_T, valid_index=valid_index, normalizer=normalizer)
    second = logits_objective(logits, terms, weights_T=weights_T, normalizer=normalizer)
    (first.loss + second.loss).backward()
    for tensor, (copy, version) in zip([tensor for tensor in inputs if tensor is not None], before, strict=True):
        assert torch.equal(tensor.detach(), copy)
        assert tensor._version == version
    assert len(of_teachers) > 5
    assert all(tensor.grad is None for tensor in of_teachers)


def tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_of(part)]
    return tensors_of(list(vars(value).values())) if hasattr(value, "__dict__") else []


def test_views_and_strides_do_not_matter() -> None:
    leaves = make_leaves()
    expected = run(linear_objective, leaves, every_term())
    wide = torch.zeros(2, D, T, dtype=torch.float64)
    wide[1] = leaves.hidden.t()
    wide.requires_grad_()
    weight = leaves.weight.t().contiguous().requires_grad_()
    output = linear_objective(wide[1].t(), OutputHead(weight.t(), leaves.bias), every_term(), chunk_tokens=10)
    output.loss.backward()
    assert distance(wide.grad[1].t(), expected.gradients["hidden"]) < 1e-12
    assert (wide.grad[0] == 0).all()
    assert distance(weight.grad.t(), expected.gradients["weight"]) < 1e-12


EMPTY: dict[str, dict[str, Any]] = {
    "no tokens": {},
    "no labels": {},
    "no weights": {"weights_T": torch.zeros(T)},
    "empty valid_index": {"valid_index": torch.zeros(0, dtype=torch.int64)},
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_micro_batch_is_zero_and_still_reaches_every_leaf(case: str) -> None:
    """It has the metrics of another one, because metrics are summed by key over micro-batches and ranks."""
    tokens, labels_T = 0 if case == "no tokens" else T, torch.full((T,), -1)
    terms = [CrossEntropy(labels_T, z_loss=0.1)] if case == "no labels" else all_terms(tokens)
    others = [CrossEntropy(make_labels(), z_loss=0.1)] if case == "no labels" else all_terms()
    result = run(linear_objective, make_leaves(tokens), terms, normalizer=100.0, **EMPTY[case])
    assert result.output.loss.item() == 0
    assert result.gradients.keys() == {"hidden", "weight", "bias"}
    assert all((gradient == 0).all() for gradient in result.gradients.values())
    assert case == "no labels" or not any(sums(result.output).values())
    other = run(linear_objective, make_leaves(), others).output
    assert result.output.metrics.keys() == other.metrics.keys()
    assert result.output.per_token.keys() == other.per_token.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_neither_loss_nor_gradients_on_a_cpu(dtype: torch.dtype) -> None:
    leaves, terms = make_leaves(dtype=torch.float32), every_term(dtype=torch.float32)
    expected = run(linear_objective, leaves, terms)
    with torch.autocast("cpu", dtype):
        actual = run(linear_objective, leaves, terms)
    assert_same(actual, expected, within=1e-6)
    assert actual.output.loss.dtype == torch.float32


def test_autocast_around_a_backbone() -> None:
    """Hidden states are in half precision, master weights in float32; each gradient has its tensor's dtype."""
    backbone, leaves = nn.Linear(D, D), make_leaves(dtype=torch.float32)
    weight = leaves.weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = backbone(leaves.hidden)
        assert hidden.dtype == torch.bfloat16
        linear_objective(hidden, OutputHead(weight), every_term(dtype=torch.float32)).loss.backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    terms = [converted(term, torch.float64) for term in every_term(dtype=torch.float32)]
    dense_objective(exact[0], OutputHead(exact[1]), terms).loss.backward()
    assert weight.grad.dtype == torch.float32
    assert distance(weight.grad, exact[1].grad) < 1e-5


@pytest.mark.parametrize("small", ["normalizer", "weights_T"])
def test_loss_scaling_saves_gradients_that_float16_would_lose(small: str) -> None:
    """With a float32 layer, float16 hidden states and 1e9 tokens per step, every gradient is 0 without the scaler."""

    options: dict[str, Any] = {"normalizer": 1e9} if small == "normalizer" else {"weights_T": torch.full((T,), 1e-9)}

    def layer_gradient(dtype: torch.dtype, scale: float) -> Tensor:
        leaves = make_leaves(dtype=torch.float32)
        layer = (torch.randn(D, D, generator=generator(3)) / 4).requires_grad_()
        hidden, head = (leaves.hidden @ layer).to(dtype), OutputHead(leaves.weight.to(dtype).requires_grad_())
        loss = linear_objective(hidden, head, [CrossEntropy(make_labels())], **options).loss
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD([layer], lr=1.0))
        return layer.grad

    assert (layer_gradient(torch.float16, 1.0) == 0).all()
    assert distance(layer_gradient(torch.float16, 2.0**30), layer_gradient(torch.float32, 1.0)) < 2e-3


def plain_log_probs(
    leaves: Leaves, labels_T: Tensor, temperature: float, head: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    options = dict(head)
    rows = options.pop("vocab_size", V)
    logits_TV = OutputHead(leaves.weight, leaves.bias, **options).logits(leaves.hidden)[:, :rows]
    log_q_TV = torch.log_softmax(logits_TV / temperature, 1)
    log_q_T = log_q_TV.gather(1, labels_T.clamp_min(0)[:, None])[:, 0].masked_fill(labels_T < 0, 0.0)
    return log_q_T, -(log_q_TV.exp() * log_q_TV).sum(1)


def sequence_objective(log_q_T: Tensor, entropy_T: Tensor) -> Tensor:
    """Compute an objective that is not a sum over tokens."""
    return (
        (log_q_T[:20].sum() / 20).exp() - (log_q_T[20:].mean() * entropy_T.sum()).tanh() + entropy_T.square().mean()
    )


def of_leaves(make: Any, leaves: Leaves) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    copies = trainable(leaves)
    log_q_T, entropy_T = make(Leaves(copies["hidden"], copies["weight"], copies.get("bias")))
    sequence_objective(log_q_T, entropy_T).backward()
    return log_q_T, entropy_T, {name: leaf.grad for name, leaf in copies.items()}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_logits(head: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks.TILE_ROWS, "cpu", (1, 10))
    options, labels_T = HEADS[head], make_labels(vocabulary=240)

    def fused(new: Leaves) -> tuple[Tensor, Tensor]:
        head = OutputHead(new.weight, new.bias, **options)
        return linear_log_probs(new.hidden, head, labels_T, temperature=temperature)

    expected = of_leaves(lambda new: plain_log_probs(new, labels_T, temperature, options), make_leaves())
    actual = of_leaves(fused, make_leaves())
    assert distance(actual[0], expected[0]) < 1e-12
    assert distance(actual[1], expected[1]) < 1e-12
    assert_near(actual[2], expected[2], 1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_log_probs_in_bfloat16_are_as_exact_as_plain_ones(autocast: bool) -> None:
    """The reference is float64 on the same numbers. Backward computes in the dtype of forward."""
    dtype = torch.float32 if autocast else torch.bfloat16
    leaves, labels_T = make_leaves(dtype=dtype, bias=False), make_labels()
    exact = of_leaves(
        lambda new: plain_log_probs(new, labels_T, 1.0, {}),
        Leaves(leaves.hidden.double(), leaves.weight.double(), None),
    )

    def called(make: Any) -> Any:
        def inside(new: Leaves) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return make(new)

        return inside

    plain = of_leaves(called(lambda new: plain_log_probs(new, labels_T, 1.0, {})), leaves)
    actual = of_leaves(called(lambda new: linear_log_probs(new.hidden, OutputHead(new.weight), labels_T)), leaves)
    assert actual[0].dtype == torch.float32
    for name, gradient in exact[2].items():
        assert actual[2][name].dtype == dtype
        assert distance(actual[2][name], gradient) <= distance(plain[2][name], gradient) + 1e-3, name
