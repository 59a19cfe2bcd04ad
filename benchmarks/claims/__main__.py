"""Measures claims of the field, and writes docs/claims.md from all result files.

    python -m benchmarks.claims gkd          one claim, three seeds, one thread
    python -m benchmarks.claims              all claims that have no result file yet (make claims)

The figures of each finished seed, and the models and runs, are kept in a folder (--keep), so that an interrupted
measurement goes on where it was. A finished claim is benchmarks/results/claim-NAME-<date>.json; it is measured again
only with --again and an empty folder.
"""

import argparse
import json
import os
from pathlib import Path

import torch

from benchmarks.claims.catalog import CLAIMS
from benchmarks.claims.claim import Claim, verdict_of
from benchmarks.claims.page import write_page
from benchmarks.claims.seed_runs import SeedRuns
from benchmarks.record import RESULTS, result_file, write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(CLAIMS)}; none: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--again", action="store_true", help="measure a claim although it has a result file")
    parser.add_argument("--keep", type=Path, default=Path(".claims"), help="folder of models and runs")
    parser.add_argument("--divisor", type=int, default=1, help="divides steps and problems, for a rehearsal")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - CLAIMS.keys():
        parser.error(f"got {', '.join(sorted(unknown))}, expected names of {', '.join(CLAIMS)}")
    if arguments.divisor != 1 and "BENCHMARK_RESULTS" not in os.environ:
        parser.error("the results of a rehearsal have no meaning: set BENCHMARK_RESULTS to a folder for them")
    torch.set_num_threads(1)
    for claim in CLAIMS.values():
        measured = claim.result_file(RESULTS) is not None and not arguments.again
        if claim.name in (arguments.names or CLAIMS) and claim.measure is not None and not measured:
            measure(claim, arguments.seeds, arguments.keep, arguments.divisor)
    if arguments.divisor == 1:
        write_page()


def measure(claim: Claim, seeds: list[int], keep: Path, divisor: int) -> None:
    """Measure those seeds of a claim that are not finished, and write its result file."""
    assert claim.measure is not None
    finished = {}
    for seed in seeds:
        path = keep / claim.name / f"seed-{seed}.json"
        if not path.exists():
            runs = SeedRuns(keep / "models", keep / claim.name / f"seed-{seed}", seed, divisor)
            figures = json.dumps(claim.measure(runs), indent=1)
            path.write_text(figures, encoding="utf-8")
        finished[str(seed)] = json.loads(path.read_text(encoding="utf-8"))
    verdict = verdict_of(claim, list(finished.values()))
    print(f"{claim.name}: {verdict}")
    write_result(result_file(f"claim-{claim.name}"), {"claim": claim.name, "verdict": verdict, "seeds": finished})


if __name__ == "__main__":
    main()
