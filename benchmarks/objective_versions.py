"""Compares the speed of two versions of the objective, forward and backward, in CPU seconds of the process.

    git worktree add ../before 8c93100
    python -m benchmarks.objective_versions --before ../before --before-commit 8c93100 --threads 2

Each version runs in a separate process, with the root of its source tree first on the path. The two take turns, pass
by pass, because a shared machine's speed drifts. The result is the median over rounds of new/old of neighbouring
passes. Times are CPU seconds of all threads, so waiting on a loaded machine does not count. The two versions are also
timed without gradients ("values"). Writes benchmarks/results/objective-versions-<date>.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch

ROOT = Path(__file__).parents[1]
EXPRESSIONS = (
    "forward_kl",
    "reverse_kl",
    "jsd(0.5)",
    "skew_forward_kl(0.1)",
    "skew_reverse_kl(0.1)",
    "total_variation",
    "alpha_beta(0.4, 0.6)",
    "0.9*forward_kl + 0.1*reverse_kl",
)
OTHERS = ("cross_entropy", "top_k")


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve:
        serve(arguments)
        return
    result = compare(arguments)
    for row in result["cases"]:
        print(
            f"{row['case']:36s} {row['what']:9s} new/old {row['ratio']:.3f}  ({row['ratio_of_minima']:.3f} of minima)"
        )
    from benchmarks.record import result_file, write_result

    write_result(result_file("objective-versions"), result)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--before", type=Path, help="root of the older source tree")
    add("--before-commit", help="its commit, for the result file")
    add("--tokens", type=int, default=512)
    add("--width", type=int, default=512, help="of the student")
    add("--teacher-width", type=int, default=1024)
    add("--vocabulary", type=int, default=32768)
    add("--rounds", type=int, default=15)
    add("--threads", type=int, default=2)
    add("--cases", nargs="+", default=[*EXPRESSIONS, *OTHERS])
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds}: expected 2 or more, for quartiles of the ratios")
    return arguments


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    versions = {"old": start(arguments.before, arguments), "new": start(ROOT, arguments)}
    rows = []
    for case in arguments.cases:
        for what in ("gradient", "values"):
            for process in versions.values():
                ask(process, case, what)  # the first call compiles
            seconds: dict[str, list[float]] = {name: [] for name in versions}
            for turn in range(arguments.rounds):
                for name in list(versions) if turn % 2 else list(reversed(versions)):
                    seconds[name].append(ask(versions[name], case, what))
            ratios = [new / old for new, old in zip(seconds["new"], seconds["old"], strict=True)]
            minima = {name: min(second) for name, second in seconds.items()}
            rows.append(
                {
                    "case": case,
                    "what": what,
                    "ratio": statistics.median(ratios),
                    "ratio_quartiles": statistics.quantiles(ratios, n=4),
                    "ratio_of_minima": minima["new"] / minima["old"],
                    "seconds": {name: statistics.median(second) for name, second in seconds.items()},
                }
            )
            print(rows[-1]["case"], what, f"{rows[-1]['ratio']:.3f}", flush=True)
    for process in versions.values():
        process.communicate("", timeout=60)
    sizes = {
        name: value
        for name, value in vars(arguments).items()
        if name not in ("before", "before_commit", "serve", "cases")
    }
    return {
        "theme": "objective: time of a pass, new version / old version",
        "before": arguments.before_commit,
        "sizes": sizes,
        "cases": rows,
    }


def start(root: Path, arguments: argparse.Namespace) -> "subprocess.Popen[str]":
    sizes = ("tokens", "width", "teacher_width", "vocabulary", "threads")
    options = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in sizes]
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--serve", *options],
        env={**os.environ, "PYTHONPATH": str(root.resolve())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process: "subprocess.Popen[str]", case: str, what: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([case, what]), file=process.stdin, flush=True)
    return float(process.stdout.readline())


def serve(arguments: argparse.Namespace) -> None:
    """Time one pass for each line of the input: [case, "gradient" or "values"]."""
    from stillhouse.objective import OutputHead, linear_objective

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.width, requires_grad=True)
    weight = (torch.randn(arguments.vocabulary, arguments.width) / arguments.width**0.5).requires_grad_()
    terms = {case: make_terms(case, arguments) for case in arguments.cases}
    lines: IO[str] = sys.stdin
    for line in lines:
        case, what = json.loads(line)
        began = time.process_time()
        with torch.set_grad_enabled(what == "gradient"):
            loss = linear_objective(hidden, OutputHead(weight), terms[case], normalizer=arguments.tokens).loss
        if what == "gradient":
            loss.backward()
        print(time.process_time() - began, flush=True)
        hidden.grad = weight.grad = None


def make_terms(case: str, arguments: argparse.Namespace) -> list[Any]:
    from stillhouse.objective import (
        CrossEntropy,
        Distill,
        FullVocab,
        OutputHead,
        TopK,
        parse_divergence,
        reverse_kl,
    )

    tokens, vocabulary, width = arguments.tokens, arguments.vocabulary, arguments.teacher_width
    if case == "cross_entropy":
        return [CrossEntropy(torch.randint(0, vocabulary, (tokens,)))]
    if case == "top_k":
        log_p, ids = torch.randn(tokens, vocabulary).log_softmax(1).topk(64, dim=1)
        return [Distill(TopK(ids, log_p), reverse_kl())]
    head = OutputHead(torch.randn(vocabulary, width) / width**0.5)
    return [Distill(FullVocab(torch.randn(tokens, width), head), parse_divergence(case))]


if __name__ == "__main__":
    main()
