"""Shows that a version of the source tree computes what another one computes.

    python -m benchmarks.unchanged record --tree ../before --commit 3ee60bb
    python -m benchmarks.unchanged record --tree . --commit work
    python -m benchmarks.unchanged compare benchmarks/results/unchanged-{3ee60bb,work}.json
    python -m benchmarks.unchanged resume --before ../before --before-commit 748633f --tree . --commit work
    python -m benchmarks.unchanged speed --before ../before --before-commit 748633f --tree . --commit work

`record` runs the cases of `cases.py` with the command line of a source tree. It writes what they have computed
(losses, gradient norms, evaluations, weights) and what they have needed (collectives, compilations, memory).
`compare` prints the differences between two recordings. `resume` checks that a tree reads what an older one has
written, and `speed` measures the steps of both; their results are unchanged-resume-<date>.json and
unchanged-speed-<date>.json. The exit code is 1 if there is a difference. Nothing here imports stillhouse, so every
version can be measured.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.unchanged import records
from benchmarks.unchanged.cases import CASES
from benchmarks.unchanged.compare import TOLERANCES, compare, equal_bits
from benchmarks.unchanged.resume import checks
from benchmarks.unchanged.runs import RunError, Tree, measure
from benchmarks.unchanged.speed import measure_speed

#: one-process runs at a time
WORKERS = 2


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the sums in a recording are those of one thread
    sys.exit(arguments.run(arguments))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    record = commands.add_parser("record", help="run the cases with a source tree")
    record.add_argument("--tree", type=Path, required=True, help="root of the source tree")
    record.add_argument("--commit", required=True, help="its name in the result file")
    record.add_argument("--out", type=Path, help="[default: benchmarks/results/unchanged-<commit>.json]")
    record.set_defaults(run=record_cases)
    comparison = commands.add_parser("compare", help="compare two recordings")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    comparison.set_defaults(run=compare_files)
    for command in (record, comparison):
        command.add_argument("--only", type=names, default=list(CASES), help="names of cases, with commas")
    resume = commands.add_parser("resume", help="check that a tree reads what an older one has written")
    resume.set_defaults(run=resume_checks)
    speed = commands.add_parser("speed", help="measure the steps of two trees in turns")
    speed.add_argument("--rounds", type=int, default=11)
    speed.add_argument("--tokens", type=int, default=2048, help="of a step, at least 512")
    speed.add_argument("--threads", type=int, default=2)
    speed.set_defaults(run=compare_speed)
    for command in (resume, speed):
        command.add_argument("--before", type=Path, required=True, help="root of the older source tree")
        command.add_argument("--before-commit", required=True, help="its name in the result file")
        command.add_argument("--tree", type=Path, required=True, help="root of the newer source tree")
        command.add_argument("--commit", required=True, help="its name in the result file")
    return parser.parse_args()


def names(text: str) -> list[str]:
    """Return names of cases from a text with commas between them."""
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in CASES]:
        raise argparse.ArgumentTypeError(f"no case {', '.join(unknown)}; expected some of {', '.join(CASES)}")
    return chosen


def record_cases(arguments: argparse.Namespace) -> int:
    """Write the file, and return 1 if a case has failed."""
    path = arguments.out or records.RESULTS / f"unchanged-{arguments.commit}.json"
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder:
        tree = Tree(arguments.tree.resolve(), Path(folder))
        cases = dict(measured(arguments.only, tree))
    in_order = {name: cases[name] for name in arguments.only}
    records.write(path, records.header(theme="unchanged", commit=arguments.commit, cases=in_order))
    return int(any("error" in case for case in cases.values()))


def measured(chosen: Sequence[str], tree: Tree) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the record of each case. Runs of one process run two at a time, others one after another.

    Their inputs are written before: models are drawn from torch's global random state, which threads share.
    """
    for name in chosen:
        CASES[name].write(tree.work / name)

    def measured_case(name: str) -> tuple[str, dict[str, Any]]:
        record = measure(CASES[name], tree, tree.work / name)
        print(f"{name:28}{record['seconds']:6.1f} s  {record.get('error', 'measured')}", flush=True)
        return name, record

    together = [name for name in chosen if CASES[name].processes == 1]
    with ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(measured_case, together)
    yield from (measured_case(name) for name in chosen if name not in together)


def compare_files(arguments: argparse.Namespace) -> int:
    """Print the differences, and return 1 if there is one."""
    before, after = (records.read(path) for path in (arguments.before, arguments.after))
    print(f"tolerances: {TOLERANCES}")
    for key in ("cpu", *records.LIBRARIES):
        if before[key] != after[key]:
            print(f"note: {key} is {before[key]} in the first file and {after[key]} in the second one")
    one, other = (
        {name: case for name, case in file["cases"].items() if name in arguments.only} for file in (before, after)
    )
    lines = list(compare(one, other))
    print("\n".join(lines) or f"no difference in {len(one)} cases; {equal_bits(one, other)} of them equal to the bit")
    return int(bool(lines))


def resume_checks(arguments: argparse.Namespace) -> int:
    """Run the checks, print a line for each, and return 1 if one has differences."""
    results: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder:
        before, after = (Tree(root.resolve(), Path(folder)) for root in (arguments.before, arguments.tree))
        for number, (name, check) in enumerate(checks(before, after)):
            try:
                results[name] = check(Path(folder) / str(number))
            except RunError as error:
                results[name] = [str(error).replace(folder, "")]
            print(f"{name}: {'; '.join(results[name]) or 'the same'}", flush=True)
    content = records.header(theme="unchanged: resume", **commits(arguments), differences=results)
    records.write(records.dated("unchanged-resume"), content)
    return int(any(results.values()))


def compare_speed(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder:
        work = Path(folder)
        before, after = (Tree(root.resolve(), work, arguments.threads) for root in (arguments.before, arguments.tree))
        result = measure_speed(before, after, work / "run", arguments.rounds, arguments.tokens)
    for name in ("cpu", "wall"):
        print(f"{name}: new/old {result[name]['new/old']:.3f}, quartiles {result[name]['quartiles']}")
    content = records.header(theme="unchanged: speed", **commits(arguments), threads=arguments.threads, **result)
    records.write(records.dated("unchanged-speed"), content)
    return 0


def commits(arguments: argparse.Namespace) -> dict[str, str]:
    return {"before": arguments.before_commit, "commit": arguments.commit}


if __name__ == "__main__":
    main()
