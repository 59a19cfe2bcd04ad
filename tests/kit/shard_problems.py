"""Problems for the objective over vocabulary shards. Each rank builds them from a name and plain arguments.

T tokens, V vocabulary, K ids and M sampled ids per token.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from kit.divergence_formulas import TRIANGULAR
from kit.objective_cases import (
    SIGNALS,
    Leaves,
    T,
    V,
    every_term,
    generator,
    make_full,
    make_labels,
    make_leaves,
    make_signal,
    other_terms,
    some_weights,
)
from kit.shard_cases import Logits, Problem, cut

from stillhouse.objective import (
    TEACHER,
    Chosen,
    CrossEntropy,
    DenseLogits,
    Distill,
    Entropy,
    FullVocab,
    Mixture,
    OutputHead,
    Sampled,
    Term,
    TopK,
    forward_kl,
    jsd,
    parse_divergence,
    total_variation,
)
from stillhouse.objective.metrics import IS_SAMPLED, POLICY_VERSION
from stillhouse.objective.spec import ObjectiveSpec, parse_objective

#: uneven shards of 251 rows; over 4 ranks they are those of DTensor
SHARDS = {2: cut(0, 100, V), 3: cut(0, 1, 170, V), 4: cut(0, 63, 126, 189, V)}
FOUR = SHARDS[4]
#: a rank without a row, one with a single row, and two with more
NARROW = cut(0, 0, 1, 170, V)


def distillation(
    expression: str,
    signal: str,
    dtype: torch.dtype = torch.float32,
    sharpness: float = 1.0,
    vocabulary: int = V,
    vocab_size: int | None = None,
) -> Problem:
    """vocab_size: of the student's head; its other rows, and those of a teacher with a head, are padding."""
    real = vocabulary if signal == "full" else vocab_size or vocabulary
    teacher = make_signal(
        signal, vocabulary=real, dtype=dtype, sharpness=sharpness, temperature=1.7, entries=min(8, real - 1)
    )
    leaves = make_leaves(vocabulary=vocabulary, dtype=dtype, sharpness=sharpness)
    options = {"weights_T": some_weights(), "normalizer": 23.0}
    terms: list[Term] = [Distill(teacher, parse_divergence(expression), 0.7, 1.7)]
    return Problem(leaves, terms, {"vocab_size": vocab_size}, options)


#: the terms of `other_terms`, in groups that share a pass
GROUPS = {
    "labels": ["cross_entropy", "label smoothing", "z-loss", "smoothing and z-loss", "continuation"],
    "entropy": ["entropy"],
    "sampled ids": ["sampled"],
    "one token": [
        "k2",
        "k3",
        "k2, corrected",
        "k3, masked",
        "policy",
        "reference",
        "dual clip",
        "cispo",
        "masked",
        "log ratio",
    ],
    "zero outside": ["zero outside"],
}
OTHER_TERMS = [*GROUPS, "all"]


def other_term(group: str, vocabulary: int = V, dtype: torch.dtype = torch.float32, tokens: int = T) -> Problem:
    terms = other_terms(tokens, vocabulary, dtype=dtype)
    chosen = [terms[name] for name in GROUPS.get(group, ())] or every_term(tokens, vocabulary, dtype=dtype)
    leaves = make_leaves(tokens, vocabulary, dtype=dtype)
    return Problem(leaves, chosen, options={"weights_T": some_weights(tokens)})


def by_origin(signal: str) -> Problem:
    """Skewed KL in two directions, one at the dataset's rows and one at the student's."""
    teacher = make_signal(signal, dtype=torch.float32)
    parts = {"dataset": parse_objective("cross_entropy + skew_forward_kl(0.1)")}
    spec = ObjectiveSpec.from_origins(parts | {"student": parse_objective("skew_reverse_kl(0.1)")})
    per_token = {IS_SAMPLED: (torch.arange(T) % 3 == 0).float(), POLICY_VERSION: -torch.ones(T)}
    terms = spec.terms(make_labels(), {TEACHER: teacher}, per_token)
    return Problem(make_leaves(dtype=torch.float32), terms, options={"weights_T": some_weights()})


def through_head(head: tuple[tuple[str, float], ...], bias: bool) -> Problem:
    problem = other_term("all")
    return replace(problem, leaves=make_leaves(dtype=torch.float32, bias=bias), head=dict(head))


def heads_of(student_rows: int, teacher_rows: int, student_size: int | None, teacher_size: int | None) -> Problem:
    """Heads with different row counts and padding. Two terms share one teacher head; a third has one with a bias."""
    vocabulary = min(each for each in (student_rows, teacher_rows, student_size, teacher_size) if each is not None)
    one = make_full(vocabulary=teacher_rows, vocab_size=teacher_size, dtype=torch.float32)
    bias_V = torch.randn(teacher_rows, generator=generator(11))
    two = FullVocab(one.hidden_TE.flip(0), replace(one.head, bias=bias_V))
    terms: list[Term] = [
        Distill(one, forward_kl(), 0.5, 1.3), Distill(one, jsd(0.3), 0.5), Distill(two, total_variation(), 0.5),
        CrossEntropy(make_labels(vocabulary=vocabulary), label_smoothing=0.1, z_loss=1e-2),
        Distill(make_signal("bucket", vocabulary=vocabulary, dtype=torch.float32), forward_kl()),
    ]  # fmt: skip
    return Problem(make_leaves(vocabulary=student_rows, dtype=torch.float32), terms, {"vocab_size": student_size})


def mixture_of(expression: str, student_rows: int, teacher_rows: tuple[int, int], size: int | None) -> Problem:
    """A mixture of two teachers whose heads have different row counts, next to a term with one of them alone."""
    one = make_full(vocabulary=teacher_rows[0], dtype=torch.float32)
    wide = make_leaves(vocabulary=teacher_rows[1], width=8, dtype=torch.float32, seed=9)
    two = FullVocab(wide.hidden, OutputHead(wide.weight, wide.bias, softcap=5.0))
    terms: list[Term] = [
        Distill(Mixture([one, two], [0.3, 0.7], 1.3), parse_divergence(expression), 0.5, 1.3),
        Distill(two, forward_kl(), 0.5),
    ]
    return Problem(make_leaves(vocabulary=student_rows, dtype=torch.float32), terms, head={"vocab_size": size})


def masked_mixture(expression: str, first: int, last: int) -> Problem:
    """One teacher has logits of −inf from column `first` to `last`, the other one in every fifth column."""
    columns_V = torch.arange(V)
    one_TV, two_TV = (torch.randn(T, V, generator=generator(seed)) * 3 for seed in (4, 14))
    one_TV[:, first : last + 1] = -torch.inf
    two_TV[:, columns_V % 5 == 0] = -torch.inf
    mixture = Mixture([DenseLogits(one_TV), DenseLogits(two_TV)], [1, 2], 2.0)
    return Problem(make_leaves(dtype=torch.float32), [Distill(mixture, parse_divergence(expression), 0.7, 2.0)])


#: a token's ids, most of them next to the borders of FOUR
IDS = {
    "at the borders": (62, 63, 125, 126, 188, 189, 0, 250),
    "twice": (63, 62, 63, 189, 189, 0, 0, 250),
    "absent": (-1, 63, -1, 62, 300, 189, 251, -1),
    "none at all": (-1, 300, -1, 251),
    "one": (188,),
    "in the first shard": tuple(range(8)),
    "in the second shard": tuple(range(63, 71)),
    "in the last shard": tuple(range(243, 251)),
    "a whole shard and one": tuple(range(125, 190)),
}


def top_k(ids: str, tail: str, expression: str, send_tail: bool, vocab_size: int | None = None) -> Problem:
    """Every token has the same ids in another order. A repeated id has another log-probability than the first one."""
    logits_TV = torch.randn(T, vocab_size or V, generator=generator(4)) * 3
    log_p_TV = torch.log_softmax(logits_TV, 1)
    ids_TK = torch.stack([torch.tensor(IDS[ids]).roll(t) for t in range(T)])
    log_p_TK = log_p_TV.gather(1, ids_TK.clamp(0, log_p_TV.shape[1] - 1))
    known_TV = torch.zeros_like(log_p_TV, dtype=torch.bool)
    for t, row in enumerate(ids_TK.tolist()):
        for k, each in enumerate(row):
            log_p_TK[t, k] -= row[:k].count(each)
            if 0 <= each < log_p_TV.shape[1]:
                known_TV[t, each] = True
    # without a known id the tail's log-mass must be exactly 0, but a sum over the vocabulary would be rounded
    tail_T = torch.logsumexp(log_p_TV.masked_fill(known_TV, -torch.inf), 1) * known_TV.any(1) if send_tail else None
    kind = Chosen if ids == "one" else TopK
    signal = kind(ids_TK.int() if ids == "twice" else ids_TK, log_p_TK, tail, tail_T)  # type: ignore[arg-type]
    leaves = make_leaves(dtype=torch.float32)
    # rows without a known id have no divergence; the entropy gives them a gradient
    terms: list[Term] = [Distill(signal, parse_divergence(expression)), Entropy(0.1)]
    return Problem(leaves, terms, head={"vocab_size": vocab_size})


def labelled(first: int, last: int) -> Problem:
    """All labels and sampled ids lie between first and last, inclusive."""
    labels_T = torch.randint(first, last + 1, (T,), generator=generator(1))
    labels_T[3] = -100
    ids_TM = torch.randint(first, last + 1, (T, 6), generator=generator(6))
    draws = Sampled(ids_TM, torch.rand(T, 6, generator=generator(7)))
    terms: list[Term] = [
        CrossEntropy(labels_T, label_smoothing=0.1, z_loss=1e-2),
        CrossEntropy(labels_T.int(), 0.5),
        Distill(draws, forward_kl()),
    ]
    return Problem(make_leaves(dtype=torch.float32), terms)


def weighted(weights: str, valid_index: bool = False) -> Problem:
    """Terms with their own weights, which are multiplied by the objective's weights, and a mixture."""
    patterns = {
        "some are zero": some_weights(),
        "one is not": torch.zeros(T).index_fill(0, torch.tensor([30]), 0.7),
        "all are zero": torch.zeros(T),
        "none": None,
    }
    options: dict[str, Any] = {"weights_T": patterns[weights], "normalizer": torch.tensor(19)}
    if valid_index:
        options["valid_index"] = (torch.ones(T) if weights == "none" else patterns[weights]).nonzero()[:, 0]
    mixture = Distill(make_signal("mixture", dtype=torch.float32), jsd(0.3), 0.4)
    return Problem(make_leaves(dtype=torch.float32), [*every_term(dtype=torch.float32), mixture], options=options)


def with_nan() -> Problem:
    """Return `weighted`, with NaN in the hidden states whose weight is 0."""
    problem = weighted("some are zero")
    assert isinstance(problem.leaves, Leaves)
    hidden = problem.leaves.hidden.masked_fill((some_weights() == 0)[:, None], torch.nan)
    return replace(problem, leaves=replace(problem.leaves, hidden=hidden))


def of_tokens(tokens: int, frozen: tuple[str, ...] = (), upstream: float = 1.0) -> Problem:
    leaves, terms = make_leaves(tokens, dtype=torch.float32), every_term(tokens, dtype=torch.float32)
    return Problem(leaves, terms, frozen=frozen, upstream=upstream)


def from_logits(expression: str, masked: str) -> Problem:
    """Logits with −inf in some columns. The labels are columns without −inf."""
    random = generator(12)
    logits_TV = torch.randn(T, V, generator=random, dtype=torch.float64) * 3
    teacher_TV = torch.randn(T, V, generator=random, dtype=torch.float64) * 3
    columns_V = torch.arange(V)
    mask_TV = {
        "nothing": torch.zeros(T, V, dtype=torch.bool),
        "columns": (columns_V % 7 == 0).expand(T, V),
        "a shard": ((columns_V >= 63) & (columns_V < 126)).expand(T, V),
        "the teacher's": (columns_V % 7 == 0).expand(T, V),
        "tokens' own": (columns_V + torch.arange(T)[:, None]) % 5 == 0,
    }[masked]
    if masked != "the teacher's":
        logits_TV = logits_TV.masked_fill(mask_TV, -torch.inf)
    labels_T = (~mask_TV).long().argmax(1).index_fill(0, torch.tensor([2]), -100)
    teacher = DenseLogits(teacher_TV.masked_fill(mask_TV, -torch.inf).float())
    terms: list[Term] = [
        Distill(teacher, parse_divergence(expression), 0.7, 1.3),
        CrossEntropy(labels_T, 0.3, z_loss=1e-2),
        Entropy(0.1),
    ]
    return Problem(Logits(logits_TV.float()), terms, options={"weights_T": some_weights()})


ONE_ROUND = ["forward_kl", "reverse_kl", "0.9*forward_kl + 0.1*reverse_kl"]
TWO_ROUNDS = [
    "jsd(0.3)", "skew_forward_kl(0.1)", "skew_reverse_kl(0.1)", "total_variation", "forward_kl + jsd(0.3)",
    "alpha_beta(0.4, 0.6)", "alpha_beta(0, 0)", f"0.5*{TRIANGULAR}(0.3)",
]  # fmt: skip
TOKENS = 24


def counted(terms: str) -> Problem:
    """24 tokens.

    terms: "one round", all terms that need one collective per chunk; "all", these and `TWO_ROUNDS`; a name of
        `GROUPS`; or "divergence on signal".
    """
    return Problem(make_leaves(TOKENS, dtype=torch.float32), list(_counted(terms)))


def _counted(terms: str) -> Iterator[Term]:
    match terms:
        case name if name in GROUPS:
            yield from other_term(name, tokens=TOKENS).terms
        case "one round":
            signals = {each: make_signal(each, TOKENS, dtype=torch.float32) for each in SIGNALS}
            yield from other_terms(TOKENS, dtype=torch.float32).values()
            yield from every_term(TOKENS, dtype=torch.float32)
            for kind, signal in signals.items():
                expressions = ONE_ROUND if kind in ("full", "dense") else [*ONE_ROUND, *TWO_ROUNDS]
                yield from (Distill(signal, parse_divergence(each), 0.2) for each in expressions)
        case "all":
            yield from _counted("one round")
            full, dense = (make_signal(each, TOKENS, dtype=torch.float32) for each in ("full", "dense"))
            yield from (Distill(full, parse_divergence(each), 0.2, 1.3) for each in TWO_ROUNDS)
            yield from (Distill(dense, parse_divergence(each), 0.2) for each in TWO_ROUNDS)
        case _:
            expression, signal = terms.split(" on ")
            yield Distill(make_signal(signal, TOKENS, dtype=torch.float32), parse_divergence(expression))
