"""Computes the numbers of docs/cluster.md: Qwen3-32B into Qwen3-8B on-policy, on four machines of eight H100s.

    python -m benchmarks.cluster

The trainer's figures are the plans of the recipe (`python -m benchmarks.recipes` makes them). Those of the servers
are formulas with the planner's device and its shares of the peak and of the bandwidth. Nothing here is measured.
"""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

from benchmarks.recipes import planned_recipes, plans
from benchmarks.scaling import STUDENT, TEACHER, weights
from stillhouse.plan.devices import DEVICES, GIB, PRODUCTS, TRAFFIC

RECIPE = "qwen3_32b_to_8b_on_policy"
DEVICE = DEVICES["h100"]
GPUS = 8
#: completions of a step in the recipe, and in the job of the page; and the mean of their tokens
COMPLETIONS, MEAN_TOKENS = (64 * 4, 256 * 4), 1024
COLUMNS = ("machines: teacher + writers + trainer", "completions", "teacher", "writers", "trainer", "a step")


def main() -> None:
    splits = sorted(set(permutations((1, 1, 2))), reverse=True)
    rows = [row(split, completions) for split in splits for completions in COMPLETIONS]
    for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows):
        print(f"| {' | '.join(cells)} |")
    print()
    for name, text in sizes():
        print(f"{name}: {text}")


def row(split: tuple[int, int, int], completions: int) -> tuple[str, ...]:
    """The tokens per second of each part, and the step's time where all parts work at the same time."""
    teacher, writers, trainer = (machines * GPUS for machines in split)
    rates = {
        "teacher": teacher_rate(teacher),
        "writers": writer_rate(writers, completions),
        "trainer": plan(trainer)["tokens_per_second"],
    }
    slowest = min(rates, key=lambda part: rates[part])
    step = f"{completions * MEAN_TOKENS / rates[slowest]:.0f} s, bound by the {slowest}"
    shown = (f"{rate / 1000:.0f},000 tokens/s" for rate in rates.values())
    return (" + ".join(map(str, split)), f"{completions:,}", *shown, step)


def teacher_rate(gpus: int) -> float:
    """Tokens per second that a teacher scores: 2 operations for each weight and token."""
    return gpus * DEVICE.bfloat16 * PRODUCTS / (2 * weights(TEACHER))


def writer_rate(gpus: int, completions: int) -> float:
    """Tokens per second of writers with one GPU each, while all completions of a step are under way.

    For one token of each completion, a GPU reads its weights, and keys and values of on average half a completion.
    """
    key_value_bytes = 4 * STUDENT.layers * STUDENT.keys
    read = 2 * weights(STUDENT) + completions / gpus * MEAN_TOKENS / 2 * key_value_bytes
    return completions * DEVICE.bandwidth * TRAFFIC / read


def plan(ranks: int) -> dict[str, Any]:
    """The plan of the recipe's trainer with this number of ranks."""
    results = plans()
    (result,) = (results[recipe.key] for recipe in planned_recipes([RECIPE]) if results[recipe.key]["ranks"] == ranks)
    return result


def sizes() -> Iterator[tuple[str, str]]:
    for ranks in (GPUS, 2 * GPUS):
        yield f"trainer of {ranks} GPUs, memory of each", f"{plan(ranks)['peak_bytes'] / GIB:.1f} GiB"
    for name, factor in (
        ("a version of the weights, in float32", 1),
        (f"what {GPUS} writers read of a version", GPUS),
        ("two versions in the folder, and the one that is being written", 3),
    ):
        yield name, f"{factor * 4 * weights(STUDENT) / 1e9:.1f} GB"
    tokens = COMPLETIONS[-1] * MEAN_TOKENS
    yield f"hidden states of {tokens:,} tokens, in bfloat16", f"{2 * TEACHER.width * tokens / 1e9:.1f} GB"


if __name__ == "__main__":
    main()
