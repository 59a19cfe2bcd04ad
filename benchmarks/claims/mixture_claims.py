"""Claims of runs that mix or choose: texts of both models, teachers of unequal lengths, a part of the tokens.

The last two were measured with keys that do not exist any more; 68748665 is the last commit that has them.
"""

from collections.abc import Callable

from benchmarks.claims.claim import Claim, Difference, Figures
from benchmarks.claims.rollout_claims import (
    ANSWER_TOKENS,
    BEGINNER,
    EXACT,
    MAX_TOKENS,
    NOISY_TEACHER,
    REVERSAL,
    START,
    rollout,
)
from benchmarks.claims.seed_runs import SeedRuns

FORWARD, REVERSE = "skew_forward_kl(0.1)", "skew_reverse_kl(0.1)"
CONTRAST_NAME, FORWARD_NAME, REVERSE_NAME = "forward on the teacher's, reverse on the student's", "forward", "reverse"


def contrast(runs: SeedRuns) -> Figures:
    """Half of the texts of each step are the teacher's and half the student's, with three pairs of divergences."""
    teacher = runs.model(NOISY_TEACHER)
    written = runs.completions("written", runs.problems(REVERSAL), teacher, ANSWER_TOKENS[REVERSAL])
    settings = rollout(REVERSAL, 32) | {
        "student.model": str(runs.model(BEGINNER)),
        "teacher.model": str(teacher),
        "data.train": str(written),
        "train.learning_rate": 1e-3,
        "rollout.share": 0.5,
    }
    pairs = {CONTRAST_NAME: (FORWARD, REVERSE), FORWARD_NAME: (FORWARD, FORWARD), REVERSE_NAME: (REVERSE, REVERSE)}
    figures = {}
    for name, (dataset, student) in pairs.items():
        run = settings | {"objective.by_origin": {"dataset": dataset, "student": student}}
        values = runs.run(name, [REVERSAL], run, steps=40, rows=64, max_tokens=MAX_TOKENS[REVERSAL])[-1]
        figures[name] = {EXACT: values["exact_match/reversal"], "forward KL": values["forward_kl"]}
    return figures


CONTRAST = Claim(
    name="contrast",
    metrics={EXACT: EXACT, "forward KL": "held-out forward KL"},
    differences=(
        Difference(
            "exact match: the pair − the better one of the single divergences",
            lambda figures: (
                figures[CONTRAST_NAME][EXACT] - max(figures[FORWARD_NAME][EXACT], figures[REVERSE_NAME][EXACT])
            ),
            0.01,
        ),
    ),
    measure=contrast,
)


BALANCE = Claim(
    name="teacher-balance",
    metrics={
        "sums": "exact match, sums (short answers)",
        "reversal": "exact match, reversal (long answers)",
        "forward KL": "held-out forward KL, sums",
    },
    differences=(
        Difference(
            "exact match of sums: balance of documents − of tokens",
            lambda figures: figures["documents"]["sums"] - figures["tokens"]["sums"],
            0.02,
        ),
    ),
    earlier="claim-teacher-balance-2026-11-27.json",
)

ALL = "all tokens"


def _kept_gain(by: str) -> Callable[[Figures], float]:
    """The gain with the tokens of a rule, minus 0.8 of that with all tokens."""

    def difference(figures: Figures) -> float:
        start, whole, part = (figures[name][EXACT] for name in (START, ALL, f"20 % by {by}"))
        return part - start - 0.8 * (whole - start)

    return difference


TOKEN_SELECTION = Claim(
    name="token-selection",
    metrics={EXACT: EXACT},
    differences=[
        Difference(f"gain with 20 % by {by} − 0.8 × gain with all", _kept_gain(by))
        for by in ("teacher_entropy", "divergence")
    ],
    earlier="claim-token-selection-2026-11-27.json",
)
