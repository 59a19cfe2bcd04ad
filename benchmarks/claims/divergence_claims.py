"""Claims of divergences and of teachers: GKD's grid, ABKD's grid, and the size of the teacher."""

import statistics
from typing import Any

from benchmarks.claims.claim import Claim, Difference, Figures
from benchmarks.claims.rollout_claims import (
    ANSWER_TOKENS,
    BEGINNER,
    EXACT,
    MAX_TOKENS,
    NOISY_TEACHER,
    REVERSAL,
    SUMS,
    rollout,
)
from benchmarks.claims.seed_runs import SeedRuns, TinyModel

GKD_LOSSES, SHARES = ("forward_kl", "jsd(0.5)", "reverse_kl"), (0.0, 0.5, 1.0)
#: an imperfect teacher of sums, the same one for all seeds, and its student, which has begun to learn
SUMS_TEACHER, SUMS_STUDENT = TinyModel("sums(2:3)", 700, width=96, layers=3, rows=128), TinyModel(SUMS, 150)


def gkd(runs: SeedRuns) -> Figures:
    """Nine cells: the share of the student's completions, and the divergence."""
    settings = {
        "student.model": str(runs.model(SUMS_STUDENT)),
        "teacher.model": str(runs.model(SUMS_TEACHER, seed=0)),
        "data.train": str(runs.problems(SUMS)),
        "train.learning_rate": 2e-3,
    }
    figures = {}
    for share in SHARES:
        for loss in GKD_LOSSES:
            run: dict[str, Any] = settings | {"objective.loss": loss}
            if share:
                run |= rollout(SUMS, round(64 * share)) | {"rollout.share": share}
            sizes = {"steps": 60, "rows": 64, "max_tokens": MAX_TOKENS[SUMS]}
            values = runs.run(f"share {share:g} {loss}", [SUMS], run, **sizes)[-1]
            figures[f"λ = {share:g}, {loss}"] = {
                EXACT: values["exact_match/sums"],
                "forward KL": values["forward_kl"],
            }
    return figures


def _of_share(figures: Figures, share: float) -> float:
    """The exact match, mean over the divergences."""
    return statistics.fmean(figures[f"λ = {share:g}, {loss}"][EXACT] for loss in GKD_LOSSES)


GKD = Claim(
    name="gkd",
    metrics={EXACT: EXACT, "forward KL": "held-out forward KL"},
    differences=(
        Difference(
            "exact match, mean of the divergences: λ = 1 − λ = 0",
            lambda figures: _of_share(figures, 1) - _of_share(figures, 0),
            0.02,
        ),
        Difference(
            "exact match, mean of the divergences: λ = 0.5 − λ = 0",
            lambda figures: _of_share(figures, 0.5) - _of_share(figures, 0),
            0.02,
        ),
    ),
    measure=gkd,
)

#: (α, β); (1, 0) is forward KL, (0, 1) reverse KL, and the third is the paper's for instructions
GRID = ((1, 0), (0, 1), (0.2, 0.7), (0.2, 0.2), (0.5, 0.2), (0.5, 0.5), (0.8, 0.2), (0.5, 0.8), (0.8, 0.7))
NAMES = {point: f"α = {point[0]:g}, β = {point[1]:g}" for point in GRID}
FORWARD, REVERSE, PAPER = (NAMES[point] for point in GRID[:3])


def alpha_beta(runs: SeedRuns) -> Figures:
    """Nine points of the alpha-beta divergence on the teacher's completions."""
    teacher = runs.model(NOISY_TEACHER)
    written = runs.completions("written", runs.problems(REVERSAL), teacher, ANSWER_TOKENS[REVERSAL])
    settings = {
        "student.model": str(runs.model(BEGINNER)),
        "teacher.model": str(teacher),
        "data.train": str(written),
        "train.learning_rate": 1e-3,
    }
    figures = {}
    for (alpha, beta), name in NAMES.items():
        run = settings | {"objective.loss": f"alpha_beta({alpha}, {beta})"}
        values = runs.run(name, [REVERSAL], run, steps=40, rows=64, max_tokens=MAX_TOKENS[REVERSAL])[-1]
        figures[name] = {
            EXACT: values["exact_match/reversal"],
            "forward KL": values["forward_kl"],
            "entropy": values["student_entropy"],
        }
    return figures


ALPHA_BETA = Claim(
    name="alpha-beta",
    metrics={EXACT: EXACT, "forward KL": "held-out forward KL", "entropy": "entropy"},
    differences=(
        Difference(
            "exact match: α = 0.2, β = 0.7 − the better one of forward and reverse KL",
            lambda figures: figures[PAPER][EXACT] - max(figures[FORWARD][EXACT], figures[REVERSE][EXACT]),
            0.01,
        ),
    ),
    measure=alpha_beta,
)

#: width and layers of the teachers, from small to large
TEACHERS = ((16, 1), (32, 1), (32, 2), (64, 2), (96, 2))


def teacher_size(runs: SeedRuns) -> Figures:
    """The held-out cross-entropy of teachers and of their students, which begin with the same weights."""
    settings = {
        "student.model": str(runs.model(TinyModel(REVERSAL, 50, width=32, layers=1))),
        "data.train": str(runs.problems(REVERSAL)),
        "objective.loss": "forward_kl",
        "train.learning_rate": 2e-3,
    }
    figures = {}
    for width, layers in TEACHERS:
        teacher = runs.model(TinyModel(REVERSAL, 250, width=width, layers=layers))
        name = f"width {width}, {layers} layer{'s' if layers > 1 else ''}"
        sizes = {"steps": 60, "rows": 64, "max_tokens": MAX_TOKENS[REVERSAL]}
        values = runs.run(name, [REVERSAL], settings | {"teacher.model": str(teacher)}, **sizes)[-1]
        figures[name] = {
            "teacher": values["teacher_cross_entropy"],
            "student": values["cross_entropy"],
            "student exact": values["exact_match/reversal"],
        }
    return figures


def _best_teacher_is_worse(figures: Figures) -> float:
    """The student's cross-entropy with the best teacher, minus that with the second best teacher."""
    best, second = sorted(figures.values(), key=lambda values: values["teacher"])[:2]
    return best["student"] - second["student"]


TEACHER_SIZE = Claim(
    name="teacher-size",
    metrics={
        "teacher": "the teacher's cross-entropy",
        "student": "the student's",
        "student exact": "the student's exact match",
    },
    differences=(
        Difference(
            "the student's cross-entropy: with the best teacher − with the second best", _best_teacher_is_worse, 0.01
        ),
    ),
    measure=teacher_size,
)
