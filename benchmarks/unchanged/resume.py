"""Checks that a newer version reads what an older one has written, and that the two talk to each other.

1. Runs that the older version has begun, and that were killed, are resumed by the newer version. They have to end
   with the losses and weights of the older version's uninterrupted run.
2. Caches of a teacher's signals by the older version are read by the newer one.
3. A server of one version is the teacher of a run of the other version.

What one process computes has to be equal to the bit. Runs of two processes and runs with a server may differ by the
tolerances of their cases.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.unchanged.cases import CASES, Case
from benchmarks.unchanged.compare import number_differences, weight_differences
from benchmarks.unchanged.runs import FROM_CACHE, RunError, Tree, load_tensors, read_metrics, summary_of

#: cases of runs that are resumed
RESUMED = (
    "dense",
    "lora",
    "mtp",
    "teacher_ema",
    "on_policy_one_step_off",
    "fsdp_2",
    "pipeline_2_1f1b",
)
CACHED = ("cache_hidden", "cache_top_k", "cache_sampled")
SERVED = ("served_hidden", "served_top_k")
#: a run of six steps with a checkpoint after the third one, which is killed after the fifth one
STEPS = {"train.steps": 6, "checkpoint.every": 3}
KILLED_AFTER = 5

Check = Callable[[Path], list[str]]


def checks(before: Tree, after: Tree) -> Iterator[tuple[str, Check]]:
    """Yield each check with its name. A check gets a path for its folder and returns the differences."""
    for name in RESUMED:
        case = CASES[name]
        yield f"resume {name}", partial(resumed, replace(case, settings={**case.settings, **STEPS}), before, after)
    for name in CACHED:
        yield f"read {name}", partial(cached, CASES[name], before, after)
    for name in SERVED:
        yield f"old server, new run: {name}", partial(served, CASES[name], before, after)
        yield f"new server, old run: {name}", partial(served, CASES[name], after, before)


def resumed(case: Case, before: Tree, after: Tree, folder: Path) -> list[str]:
    case.write(folder)
    before.run(folder, "distill", "run.yaml", "out=whole", processes=case.processes)
    try:
        before.run(folder, "distill", "run.yaml", processes=case.processes, kill_after_step=KILLED_AFTER)
        return ["the run of the older version was not killed"]
    except RunError:
        checkpoints = sorted(path.name for path in (folder / "out" / "checkpoints").iterdir())
    if len(checkpoints) != 1:
        return [f"the killed run has the checkpoints {checkpoints}; expected that of step 3 alone"]
    output = after.run(folder, "distill", "run.yaml", processes=case.processes)
    lines = [] if f"resuming from out/checkpoints/{checkpoints[0]}" in output else ["the newer version started anew"]
    return lines + run_differences(folder / "whole", folder / "out", case.tolerance)


def cached(case: Case, before: Tree, after: Tree, folder: Path) -> list[str]:
    case.write(folder)
    before.run(folder, "cache", "run.yaml", "--out", "cache", *(case.cache or ()))
    for tree, out in ((before, "old"), (after, "new")):
        tree.run(folder, "distill", "run.yaml", f"out={out}", *FROM_CACHE)
    return run_differences(folder / "old", folder / "new", case.tolerance)


def served(case: Case, server: Tree, runner: Tree, folder: Path) -> list[str]:
    """Compare a run with the other version's server with a run with its own version's server."""
    case.write(folder)
    for tree, out in ((runner, "same"), (server, "other")):
        with tree.serve(folder, "teacher") as address:
            runner.run(folder, "distill", "run.yaml", f"out={out}", f"teacher.url={address}", "teacher.model=null")
    return run_differences(folder / "same", folder / "other", case.tolerance)


def run_differences(expected: Path, actual: Path, tolerance: float) -> list[str]:
    """Return the differences between the metrics and the final weights of two runs."""
    one, other = (contents(out) for out in (expected, actual))
    lines = list(number_differences("metrics", one["metrics"], other["metrics"], tolerance))
    lines += weight_differences(one["weights"], other["weights"], tolerance)
    if not tolerance and one["sha256"] != other["sha256"]:
        lines.append("the exported weights have another hash")
    return lines


def contents(out: Path) -> dict[str, Any]:
    summary = summary_of(load_tensors(out / "model"))
    return {"metrics": read_metrics(out), "weights": summary["weights"], "sha256": summary["weights_sha256"]}
