"""Claims of runs that mix: the teacher's and the student's texts, and two teachers of unequal lengths."""

from benchmarks.claims.claim import Claim, Difference, Figures
from benchmarks.claims.divergence_claims import SUMS_STUDENT, SUMS_TEACHER
from benchmarks.claims.rollout_claims import (
    ANSWER_TOKENS,
    BEGINNER,
    EXACT,
    MAX_TOKENS,
    NOISY_TEACHER,
    REVERSAL,
    SUMS,
    TEACHER,
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


def teacher_balance(runs: SeedRuns) -> Figures:
    """A student that has begun to learn sums, with a teacher of sums and one of reversal."""
    settings = {
        "student.model": str(runs.model(SUMS_STUDENT)),
        "teachers.sums": {"model": str(runs.model(SUMS_TEACHER, seed=0))},
        "teachers.reversal": {"model": str(runs.model(TEACHER))},
        "teachers.route": "task",
        "data.train": str(runs.mixed_problems([SUMS, REVERSAL])),
        "objective.loss": "forward_kl",
        "train.learning_rate": 2e-3,
    }
    figures = {}
    for balance in ("tokens", "documents", "gradient"):
        run = settings | {"teachers.balance": balance}
        values = runs.run(balance, [SUMS, REVERSAL], run, steps=60, rows=64, max_tokens=MAX_TOKENS[REVERSAL])[-1]
        figures[balance] = {task: values[f"exact_match/{task}"] for task in ("sums", "reversal")}
    return figures


BALANCE = Claim(
    name="teacher-balance",
    metrics={"sums": "exact match, sums (short answers)", "reversal": "exact match, reversal (long answers)"},
    differences=(
        Difference(
            "exact match of sums: balance of documents − of tokens",
            lambda figures: figures["documents"]["sums"] - figures["tokens"]["sums"],
            0.02,
        ),
    ),
    measure=teacher_balance,
)
