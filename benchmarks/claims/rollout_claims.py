"""Claims of on-policy distillation: a forgotten task, the number of prompts, whose prefixes, and GKD's grid."""

from typing import Any

from benchmarks.claims.claim import Claim, Difference, Figures
from benchmarks.claims.seed_runs import SeedRuns, TinyModel

EXACT = "exact match"

REVERSAL, BRACKETS, SUMS = "reversal(2:5)", "brackets(2:3)", "sums(2:2)"
#: the longest problem with its answer, rounded up, and the longest answer with the end of sequence
MAX_TOKENS = {REVERSAL: 24, BRACKETS: 24, SUMS: 12}
ANSWER_TOKENS = {REVERSAL: 7, SUMS: 4}

#: solves nearly all problems of reversal; has several modes; has begun to learn
TEACHER, NOISY_TEACHER = TinyModel(REVERSAL, 250), TinyModel(REVERSAL, 250, right=0.7)
BEGINNER = TinyModel(REVERSAL, 100)


def rollout(task: str, prompts: int, samples: int = 1) -> dict[str, Any]:
    """The settings of a run that completes prompts of a task."""
    return {
        "rollout.max_new_tokens": ANSWER_TOKENS[task],
        "rollout.prompts_per_step": prompts,
        "rollout.samples_per_prompt": samples,
    }


BEFORE, LATER, RESTORED = "trained on reversal", "then trained on brackets", "then distilled from the earlier self"
BOTH = "or distilled from both selves, on prompts of both"


def forgetting(runs: SeedRuns) -> Figures:
    """The exact match in both tasks, after each of the trainings."""
    earlier = runs.model(TEACHER)
    later = {
        "student.model": str(earlier),
        "data.train": str(runs.problems(BRACKETS)),
        "objective.loss": "cross_entropy",
        "train.learning_rate": 2e-3,
        "train.schedule": "linear",
        "train.warmup": 50,
    }
    restored = rollout(REVERSAL, 64) | {
        "student.model": str(runs.folder / "later" / "model"),
        "teacher.model": str(earlier),
        "data.train": str(runs.problems(REVERSAL)),
        "train.learning_rate": 5e-4,
    }
    both = {key: value for key, value in restored.items() if key != "teacher.model"} | {
        "data.train": str(runs.mixed_problems([BRACKETS, REVERSAL])),
        "teachers.reversal": {"model": str(earlier)},
        "teachers.brackets": {"model": restored["student.model"]},
        "teachers.route": "task",
        "rollout.max_new_tokens": 6,  # as many as fit behind the longest prompt of brackets
    }
    sizes, tasks = {"rows": 64, "max_tokens": MAX_TOKENS[BRACKETS]}, [BRACKETS, REVERSAL]
    first, second = runs.run("later", tasks, later, steps=250, **sizes)
    third = runs.run("restored", tasks, restored, steps=80, **sizes)[-1]
    fourth = runs.run("both", tasks, both, steps=80, **sizes)[-1]
    return {
        name: {task: values[f"exact_match/{task}"] for task in ("reversal", "brackets")}
        for name, values in ((BEFORE, first), (LATER, second), (RESTORED, third), (BOTH, fourth))
    }


FORGETTING = Claim(
    name="forgetting",
    metrics={"reversal": "exact match, reversal", "brackets": "exact match, brackets"},
    differences=(
        Difference(
            "reversal: after the distillation − before it",
            lambda figures: figures[RESTORED]["reversal"] - figures[LATER]["reversal"],
            0.1,
        ),
        Difference(
            "reversal: after the distillation − earlier self + 0.1",
            lambda figures: figures[RESTORED]["reversal"] - figures[BEFORE]["reversal"] + 0.1,
        ),
        Difference(
            "brackets: after the distillation − before it + 0.1",
            lambda figures: figures[RESTORED]["brackets"] - figures[LATER]["brackets"] + 0.1,
        ),
    ),
    measure=forgetting,
)

START, MANY, ONE = "before", "64 prompts, 1 sample of each", "1 prompt, 64 samples"


def one_prompt(runs: SeedRuns) -> Figures:
    """The exact match on all held-out problems, with all prompts and with one of the longest."""
    settings = {
        "student.model": str(runs.model(BEGINNER)),
        "teacher.model": str(runs.model(TEACHER)),
        "train.learning_rate": 1e-3,
    }
    ways = {MANY: (64, 1, 0), "8 prompts, 8 samples of each": (8, 8, 8), ONE: (1, 64, 1)}
    figures: dict[str, dict[str, float]] = {}
    for name, (prompts, samples, different) in ways.items():
        data = runs.problems(REVERSAL, different, only_length=5) if different else runs.problems(REVERSAL)
        run = settings | rollout(REVERSAL, prompts, samples) | {"data.train": str(data)}
        sizes = {"steps": 80, "rows": prompts * samples, "max_tokens": MAX_TOKENS[REVERSAL]}
        before, after = runs.run(name, [REVERSAL], run, **sizes)
        figures[START] = {EXACT: before["exact_match/reversal"]}
        figures[name] = {EXACT: after["exact_match/reversal"]}
    return figures


ONE_PROMPT = Claim(
    name="one-prompt",
    metrics={EXACT: EXACT},
    differences=(
        Difference(
            "gain with one prompt − 0.8 × gain with many",
            lambda figures: (
                figures[ONE][EXACT] - figures[START][EXACT] - 0.8 * (figures[MANY][EXACT] - figures[START][EXACT])
            ),
        ),
    ),
    measure=one_prompt,
)

DIRECTIONS = ("forward_kl", "reverse_kl")


def prefix_and_direction(runs: SeedRuns) -> Figures:
    """A small student of a teacher that has imitated some wrong answers, in the four combinations."""
    teacher = runs.model(NOISY_TEACHER)
    problems = runs.problems(REVERSAL)
    written = runs.completions("written", problems, teacher, ANSWER_TOKENS[REVERSAL])
    sources = {
        "teacher's prefixes": {"data.train": str(written)},
        "student's prefixes": {"data.train": str(problems)} | rollout(REVERSAL, 64),
    }
    settings = {
        "student.model": str(runs.model(BEGINNER)),
        "teacher.model": str(teacher),
        "train.learning_rate": 1e-3,
        "eval.prompts": {
            "data": str(runs.problems(REVERSAL, 200, held_out=True)),
            "count": 200,
            "max_new_tokens": ANSWER_TOKENS[REVERSAL],
            "temperature": 1.0,
        },
    }
    figures = {}
    for source, data in sources.items():
        for direction in DIRECTIONS:
            run = settings | data | {"objective.loss": direction}
            sizes = {"steps": 40, "rows": 64, "max_tokens": MAX_TOKENS[REVERSAL]}
            values = runs.run(f"{source} {direction}", [REVERSAL], run, **sizes)[-1]
            figures[f"{source}, {direction}"] = {
                EXACT: values["exact_match/reversal"],
                "entropy": values["student_entropy"],
                "length": values["prompts/completion_tokens"],
            }
    return figures


def _direction(figures: Figures, metric: str) -> float:
    """Reverse minus forward KL, mean of both sources of prefixes."""
    forward, reverse = (
        sum(figures[f"{source}, {direction}"][metric] for source in ("teacher's prefixes", "student's prefixes")) / 2
        for direction in DIRECTIONS
    )
    return reverse - forward


def _source(figures: Figures, metric: str) -> float:
    """The student's minus the teacher's prefixes, mean of both directions."""
    teacher, student = (
        sum(figures[f"{source}, {direction}"][metric] for direction in DIRECTIONS) / 2
        for source in ("teacher's prefixes", "student's prefixes")
    )
    return student - teacher


PREFIX_AND_DIRECTION = Claim(
    name="prefix-and-direction",
    metrics={EXACT: EXACT, "entropy": "entropy", "length": "length"},
    differences=(
        Difference("entropy: forward KL − reverse KL", lambda figures: -_direction(figures, "entropy"), 0.02),
        Difference("exact match: reverse KL − forward KL", lambda figures: _direction(figures, EXACT), 0.02),
        Difference(
            "exact match: student's prefixes − teacher's prefixes", lambda figures: _source(figures, EXACT), 0.02
        ),
    ),
    measure=prefix_and_direction,
)
