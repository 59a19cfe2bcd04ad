"""Claims of runs that mix or choose: texts of both models, teachers of unequal lengths, a part of the tokens."""

from collections.abc import Callable

from benchmarks.claims.claim import Claim, Difference, Figures
from benchmarks.claims.divergence_claims import SUMS_STUDENT, SUMS_TEACHER
from benchmarks.claims.rollout_claims import (
    ANSWER_TOKENS,
    BEGINNER,
    EXACT,
    MAX_TOKENS,
    NOISY_TEACHER,
    REVERSAL,
    START,
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
        # Rows of similar lengths would give each step documents of one task, so that nothing could be balanced.
        "data.packing": "packed",
        "train.micro_batch_tokens": MAX_TOKENS[REVERSAL] * 16,
    }
    figures = {}
    for balance in ("tokens", "documents", "gradient"):
        run = settings | {"teachers.balance": balance}
        values = runs.run(balance, [SUMS, REVERSAL], run, steps=250, rows=40, max_tokens=MAX_TOKENS[REVERSAL])[-1]
        figures[balance] = {task: values[f"exact_match/{task}"] for task in ("sums", "reversal")}
        figures[balance]["forward KL"] = values["forward_kl/sums"]
    return figures


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
    measure=teacher_balance,
)

ALL, GATES = "all tokens", ("teacher_entropy", "student_entropy", "divergence")


def token_selection(runs: SeedRuns) -> Figures:
    """On-policy distillation with all tokens, and with a fifth of them, which three rules choose."""
    settings = rollout(REVERSAL, 64) | {
        "student.model": str(runs.model(BEGINNER)),
        "teacher.model": str(runs.model(TEACHER)),
        "data.train": str(runs.problems(REVERSAL)),
        "train.learning_rate": 1e-3,
    }
    gates = {ALL: {}} | {f"20 % by {by}": {"objective.token_gate": {"keep": 0.2, "by": by}} for by in GATES}
    figures: dict[str, dict[str, float]] = {}
    for name, gate in gates.items():
        sizes = {"steps": 80, "rows": 64, "max_tokens": MAX_TOKENS[REVERSAL]}
        before, after = runs.run(name.replace(" %", ""), [REVERSAL], settings | gate, **sizes)
        figures[START] = {EXACT: before["exact_match/reversal"]}
        figures[name] = {EXACT: after["exact_match/reversal"]}
    return figures


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
    measure=token_selection,
)
