"""Problems for the objective's tests: leaves, teachers, terms, and functions that run a pass over them.

T tokens, D student width, V vocabulary, K ids per token.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from kit.divergence_formulas import TRIANGULAR
from torch import Tensor

from stillhouse.objective import (
    Continuation,
    Correction,
    CrossEntropy,
    DenseLogits,
    Distill,
    Divergence,
    Entropy,
    FullVocab,
    LogRatio,
    Mixture,
    ObjectiveOutput,
    OutputHead,
    PolicyGradient,
    Sampled,
    SampledKL,
    Signal,
    SpanSignal,
    Term,
    TopK,
    forward_kl,
    jsd,
    linear_objective,
    logits_objective,
    reverse_kl,
)
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.tile import compiled

F_DIVERGENCES = [
    "forward_kl",
    "reverse_kl",
    "jsd(0.3)",
    "jsd(0.9, normalized=True)",
    "jsd(1e-06, normalized=True)",
    "skew_forward_kl(0)",
    "skew_forward_kl(0.1)",
    "skew_reverse_kl(0)",
    "skew_reverse_kl(0.1)",
    "total_variation",
    "alpha_beta(0.4, 0.6)",
    "0.9*forward_kl + 0.1*jsd(0.5)",
    f"{TRIANGULAR}(0.3)",
]
EXPONENTS = ("0.2, 0.5", "2, 1", "0.7, 0", "0, 0.7", "0.5, -0.5", "-0.5, 0.5", "0, 0")
ALPHA_BETAS = [f"alpha_beta({exponents})" for exponents in EXPONENTS]
ALL_DIVERGENCES = F_DIVERGENCES + ALPHA_BETAS
#: divergences whose (p/q)^α does not overflow on peaked rows; see the docstring of alpha_beta
DIVERGENCES_OF_PEAKED_ROWS = F_DIVERGENCES + [expression for expression in ALPHA_BETAS if "-0.5" not in expression]
#: the default size of a problem
T, V, D = 37, 251, 16
TAILS = ["bucket", "renormalize", "drop"]
SIGNALS = ["full", "dense", *TAILS]
ALL_SIGNALS = [*SIGNALS, "mixture"]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 2.0},
    "both": {"scale": 3.0, "softcap": 5.0},
    "padded": {"vocab_size": 240},
}


@dataclass(frozen=True)
class Leaves:
    """The tensors that receive a gradient: hidden states [T, D], the head's weight [V, D] and bias [V]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Result:
    output: ObjectiveOutput
    gradients: dict[str, Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_leaves(
    tokens: int = T,
    vocabulary: int = V,
    width: int = D,
    *,
    dtype: torch.dtype = torch.float64,
    sharpness: float = 1.0,
    bias: bool = True,
    seed: int = 0,
) -> Leaves:
    """Make leaves whose logits have the standard deviation `sharpness`."""
    random = generator(seed)
    hidden = torch.randn(tokens, width, generator=random, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=random, dtype=torch.float64) * sharpness / width**0.5
    bias_V = torch.randn(vocabulary, generator=random, dtype=torch.float64) * 0.1
    return Leaves(hidden.to(dtype), weight.to(dtype), bias_V.to(dtype) if bias else None)


def make_labels(tokens: int = T, vocabulary: int = V, *, seed: int = 1) -> Tensor:
    """Make labels; every fifth one is absent."""
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator(seed))
    labels[::5] = -100
    return labels


def make_full(tokens: int = T, vocabulary: int = V, *, vocab_size: int | None = None, **options: Any) -> FullVocab:
    """Make a teacher of another width. The options are those of `make_leaves`."""
    leaves = make_leaves(tokens, vocabulary, 24, bias=False, seed=2, **options)
    return FullVocab(leaves.hidden, OutputHead(leaves.weight, vocab_size=vocab_size))


def make_topk(log_probs_TV: Tensor, entries: int = 8, *, tail: str = "bucket") -> TopK:
    """Take the teacher's top ids in random order. In every second row, the last id is absent."""
    log_p_TK, ids_TK = log_probs_TV.topk(entries, dim=1)
    order = torch.randperm(entries, generator=generator(3))
    log_p_TK, ids_TK = log_p_TK[:, order].contiguous(), ids_TK[:, order].contiguous()
    ids_TK[::2, -1] = -1
    outside_TV = log_probs_TV.scatter(1, ids_TK.clamp(min=0), -torch.inf)
    outside_TV[::2, 0] = torch.where((ids_TK[::2, :-1] == 0).any(1), -torch.inf, log_probs_TV[::2, 0])
    tail_T = torch.logsumexp(outside_TV, 1) if tail == "bucket" else None
    return TopK(ids_TK, log_p_TK, tail=tail, tail_log_prob_T=tail_T)  # type: ignore[arg-type]


def make_signal(
    kind: str,
    tokens: int = T,
    vocabulary: int = V,
    *,
    dtype: torch.dtype = torch.float64,
    sharpness: float = 1.0,
    temperature: float = 1.0,
    entries: int = 8,
) -> Signal:
    """Make a signal by its name in `SIGNALS`, or "mixture". Sparse signals and mixtures are at the temperature."""
    if kind == "full":
        return make_full(tokens, vocabulary, dtype=dtype, sharpness=sharpness)
    logits = torch.randn(tokens, vocabulary, generator=generator(4), dtype=torch.float64) * sharpness
    if kind == "dense":
        return DenseLogits(logits.to(dtype))
    if kind == "mixture":
        return make_mixture(tokens, vocabulary, dtype=dtype, sharpness=sharpness, temperature=temperature)
    return converted(make_topk(torch.log_softmax(logits / temperature, 1), entries, tail=kind), dtype)


def make_mixture(
    tokens: int = T,
    vocabulary: int = V,
    *,
    temperature: float = 1.0,
    weights: Sequence[float] = (3.0, 1.0, 0.5),
    **options: Any,
) -> Mixture:
    """Make a mixture of three teachers: two with heads of other widths, one of which has more rows, and logits."""
    wide = make_leaves(tokens, vocabulary + 5, 8, seed=9, **options)
    signals = [
        make_full(tokens, vocabulary, **options),
        FullVocab(wide.hidden, OutputHead(wide.weight, wide.bias, softcap=30.0)),
        make_signal("dense", tokens, vocabulary, **options),
    ]
    return Mixture(signals[: len(weights)], weights, temperature)


def some_weights(tokens: int = T) -> Tensor:
    weights_T = torch.rand(tokens, generator=generator(8))
    weights_T[::4] = 0
    return weights_T


def every_term(tokens: int = T, vocabulary: int = V, *, dtype: torch.dtype = torch.float64) -> list[Term]:
    """Make one term of each kind. Some have their own weights, and two share a signal."""
    full = make_full(tokens, vocabulary, dtype=dtype)
    row_weights_T = torch.rand(tokens, generator=generator(5)).to(dtype)
    return [
        CrossEntropy(make_labels(tokens, vocabulary), 0.3, label_smoothing=0.1, z_loss=1e-2),
        Distill(full, forward_kl(), 0.7, 1.5, scale_by_temperature_squared=True),
        Distill(full, 0.5 * forward_kl() + forward_kl(), 0.2, 1.5, weights_T=row_weights_T),
        Distill(make_signal("bucket", tokens, vocabulary, dtype=dtype), forward_kl(), 0.4),
        Distill(make_sampled(tokens, vocabulary, dtype), forward_kl(), 0.1, 0.8),
        Entropy(-0.05, 1.3),
    ]


def make_sampled(tokens: int = T, vocabulary: int = V, dtype: torch.dtype = torch.float64) -> Sampled:
    """Make sampled ids, some of which are absent."""
    ids_TM = torch.randint(-1, vocabulary, (tokens, 6), generator=generator(6))
    return Sampled(ids_TM, torch.rand(tokens, 6, generator=generator(7)).to(dtype))


def make_spans(tail: str = "bucket", temperature: float = 1.0) -> SpanSignal:
    """Every third row begins a span, the next one continues it, and the third one has no signal."""
    random = torch.Generator().manual_seed(3)
    log_p_TV = torch.log_softmax(2 * torch.randn(T, V, generator=random, dtype=torch.float64), 1)
    log_p_TK, ids_TK = log_p_TV.topk(8, 1)
    ids_TK[::2, -1] = -1
    tail_T = torch.log(-torch.expm1(log_p_TK.masked_fill(ids_TK < 0, -math.inf).logsumexp(1)))
    first = TopK(ids_TK, log_p_TK, tail, tail_T, temperature)  # type: ignore[arg-type]
    third_T = torch.arange(T) % 3
    continuation_T = torch.rand(T, generator=random) * (third_T == 1)
    return SpanSignal(first, (third_T == 0).double(), continuation_T.double())


def all_terms(tokens: int = T) -> list[Term]:
    """Make every term, and a divergence on every signal, float64."""
    divergences = [Distill(make_signal(signal, tokens), jsd(0.3)) for signal in ALL_SIGNALS]
    return [*divergences, *every_term(tokens), *other_terms(tokens).values()]


def other_terms(tokens: int = T, vocabulary: int = V, *, dtype: torch.dtype = torch.float64) -> dict[str, Term]:
    """Make every term that is no divergence on a signal of `SIGNALS`, by a name.

    Old and teacher log-probabilities are NaN where there is no label, because they must not be read there. Ratios of
    the student of `make_leaves` to the old policy lie on both sides of every limit.
    """
    labels_T = make_labels(tokens, vocabulary)
    known_NT = torch.randn(4, tokens, generator=generator(31), dtype=torch.float64) - math.log(vocabulary)
    known_NT = known_NT.masked_fill(labels_T < 0, math.nan).to(dtype)
    advantages_T = torch.randn(tokens, generator=generator(33), dtype=torch.float64).to(dtype)
    policy = partial(PolicyGradient, labels_T, advantages_T, known_NT[2])
    corrected = {"correction": Correction("truncated", 1.3), "old_log_probs_T": known_NT[2]}
    return {
        "cross_entropy": CrossEntropy(labels_T, 0.3),
        "label smoothing": CrossEntropy(labels_T, 0.6, label_smoothing=0.2),
        "z-loss": CrossEntropy(labels_T, 0.6, z_loss=0.3),
        "smoothing and z-loss": CrossEntropy(labels_T.int(), label_smoothing=0.2, z_loss=0.3),
        "entropy": Entropy(-0.4, 1.7),
        "sampled": Distill(make_sampled(tokens, vocabulary, dtype), forward_kl(), 0.7, 1.7),
        "k2": SampledKL(labels_T, known_NT[0], "k2"),
        "k3": SampledKL(labels_T, known_NT[0], "k3", 0.3, 1.7),
        "k2, corrected": SampledKL(labels_T, known_NT[0], "k2", 0.3, 1.2, sampling_temperature=0.8, **corrected),
        "k3, masked": SampledKL(
            labels_T, known_NT[0], "k3", correction=Correction("masked", 1.5), old_log_probs_T=known_NT[2]
        ),
        "policy": policy(),
        "narrow clip": policy(clip_low=0.0, clip_high=0.0, scale=2.0),
        "reference": policy(known_NT[3], clip_high=0.28, kl_scale=0.04, temperature=0.8),
        "dual clip": policy(dual_clip=1.3),
        "cispo": policy(clip_low=1.0, clip_high=0.5, surrogate="cispo"),
        "sequences": policy(sequence_ratios_T=known_NT[3].exp() * vocabulary, temperature=0.8),
        "masked": policy(surrogate="corrected", correction=Correction("masked", 3.0)),
        "log ratio": LogRatio(labels_T, known_NT[2], 0.8),
        "continuation": Continuation(labels_T, 0.3, 0.8, scale_by_temperature_squared=True),
        "zero outside": Distill(
            make_signal("zero", tokens, vocabulary, dtype=dtype, temperature=1.3, entries=min(8, vocabulary - 1)),
            reverse_kl(),
            0.7,
            1.3,
            scale_by_temperature_squared=True,
        ),
    }


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a term, signal or head with its floating-point tensors in another dtype."""
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a term, signal or head with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {name: mapped(part, change) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, Divergence):
        fields = [field for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(
            value, **{field.name: mapped(getattr(value, field.name), change) for field in fields}
        )
    return value


def trainable(leaves: Leaves) -> dict[str, Tensor]:
    """Return copies of the leaves that receive a gradient, by name."""
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in vars(leaves).items() if leaf is not None}


def run(
    objective: Callable[..., ObjectiveOutput],
    leaves: Leaves,
    terms: Sequence[Term],
    *,
    head: dict[str, Any] | None = None,
    upstream: float = 1.0,
    **options: Any,
) -> Result:
    """Run the objective on copies of the leaves, and return its output and gradients."""
    copies = trainable(leaves)
    head_of_copies = OutputHead(copies["weight"], copies.get("bias"), **(head or {}))
    output = objective(copies["hidden"], head_of_copies, terms, **options)
    (output.loss * upstream).backward()
    return Result(output, {name: leaf.grad for name, leaf in copies.items() if leaf.grad is not None})


@contextmanager
def rebuilt_terms() -> Iterator[None]:
    """Compute the rows of a chunk as on a GPU, from terms that are rebuilt from its tensors."""
    assert "cpu" not in compiled.ROW_DEVICES
    compiled.ROW_DEVICES.add("cpu")
    try:
        yield
    finally:
        compiled.ROW_DEVICES.discard("cpu")


def sums(output: ObjectiveOutput) -> dict[str, Tensor]:
    """Return the metrics that are sums over tokens."""
    return {name: total for name, total in output.metrics.items() if name != "chunk_tokens"}


def divergence_of(student: Tensor, signal: Signal, divergence: Divergence) -> tuple[float, Tensor]:
    """Return the divergence and its gradient with respect to the student's logits [T, V]."""
    logits = student.clone().requires_grad_()
    loss = logits_objective(logits, [Distill(signal, divergence)]).loss
    loss.backward()
    return loss.item(), logits.grad


def distance(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; ‖actual‖ if everything that is expected is 0."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    size = expected.norm()
    return float((actual - expected).norm() / (size if size > 0 else 1.0))


def exact(leaves: Leaves, terms: Sequence[Term], **options: Any) -> Result:
    """Compute the objective with plain autograd in float64, from the same numbers."""
    return run(dense_objective, converted(leaves, torch.float64), converted(list(terms), torch.float64), **options)


def assert_accurate(
    leaves: Leaves, terms: Sequence[Term], *, chunk_tokens: int | None = 9, tiny: float | None = None, **options: Any
) -> Result:
    """Assert that the chunked pass is as exact as plain autograd in the same dtype, relative to float64.

    Every gradient, value per token and the loss may have twice the error of plain autograd, plus `tiny`; for float64
    leaves 1e-11. Return the result of the chunked pass.
    """
    oracle = exact(leaves, terms, **options)
    fast = run(linear_objective, leaves, terms, chunk_tokens=chunk_tokens, **options)
    if leaves.hidden.dtype == leaves.weight.dtype == torch.float64:
        assert_same(fast, oracle, within=1e-11 if tiny is None else tiny)
        return fast
    tiny = 5e-7 if tiny is None else tiny
    plain = run(dense_objective, leaves, terms, **options)
    assert fast.gradients.keys() == oracle.gradients.keys()
    for name, gradient in oracle.gradients.items():
        assert fast.gradients[name].dtype == plain.gradients[name].dtype
        assert distance(fast.gradients[name], gradient) <= 2 * distance(plain.gradients[name], gradient) + tiny, name
    errors = 0.0
    for (name, value_T), term in zip(oracle.output.per_token.items(), terms, strict=True):
        assert fast.output.per_token[name].dtype == torch.float32
        plain_T = plain.output.per_token[name]
        assert distance(fast.output.per_token[name], value_T) <= 2 * distance(plain_T, value_T) + tiny, name
        # one number may be exact by chance, so the plain path's error of the loss is the error over its tokens
        errors += abs(term.scale) * float((plain_T.double() - value_T).abs().sum() + tiny * value_T.abs().sum())
    loss = fast.output.loss
    assert {number.dtype for number in (loss, *fast.output.metrics.values())} == {torch.float32}
    assert abs(loss.item() - oracle.output.loss.item()) <= 2 * errors / float(options.get("normalizer", 1.0))
    return fast


def assert_same(actual: Result, expected: Result, *, within: float = 1e-12) -> None:
    """Assert that loss, gradients and values per token are equal."""
    assert distance(actual.output.loss, expected.output.loss) <= within
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert actual.gradients[name].dtype == gradient.dtype
        assert distance(actual.gradients[name], gradient) <= within, name
    for name, values in expected.output.per_token.items():
        assert distance(actual.output.per_token[name], values) <= within, name
        totals = actual.output.metrics[name], expected.output.metrics[name]
        torch.testing.assert_close(*totals, rtol=within, atol=within)


OTHER_TERMS = list(other_terms())
