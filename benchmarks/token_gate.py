"""Measures what a token gate, and an objective for each origin, add to a pass: forward and backward of the objective.

    python -m benchmarks.token_gate --tokens 1024 --vocabulary 32768
    python -m benchmarks.token_gate --device cuda --dtype bf16 --tokens 8192 --width 2048 --teacher-width 4096 \
        --vocabulary 151936

The contestants of a loss take turns in one process, and the order is reversed in every second round, because a shared
machine's speed drifts. A gated pass includes the histogram of its statistic. On a CPU, the time is the process's CPU
seconds, so that waiting on a loaded machine does not count. The result is the median over rounds of the quotient of
neighbouring passes. Because this quotient still varies by several percent on a shared CPU, the seconds in the gate's
own functions are measured, too (`in_gate`, on a CPU only). Writes benchmarks/results/token_gate-<date>.json, on a GPU
token_gate-cuda-<date>.json.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.measure import synchronize
from benchmarks.record import result_file, write_result
from stillhouse.objective import TEACHER, FullVocab, OutputHead, Signals, linear_objective
from stillhouse.objective.metric_keys import GATE, IS_SAMPLED, POLICY_VERSION
from stillhouse.objective.spec import ObjectiveSpec, parse_objective
from stillhouse.objective.token_gate import (
    GateStatistic,
    GateThreshold,
    TokenGate,
    TokenGateSettings,
    histogram,
    threshold_of,
)

LOSSES = ("forward_kl", "jsd(0.5)", "0.3*cross_entropy + 0.7*reverse_kl")
#: skewed KL in one direction for all rows, against one direction for each origin
ONE_ORIGIN = "skew_forward_kl(0.1)"
ORIGINS = {"dataset": ONE_ORIGIN, "student": "skew_reverse_kl(0.1)"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Inputs:
    hidden_TD: Tensor
    head: OutputHead
    labels_T: Tensor
    signals: Signals
    per_token: dict[str, Tensor]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    inputs = make_inputs(arguments)
    rows: list[dict[str, Any]] = []
    for loss in arguments.losses:
        plain = parse_objective(loss)
        gates = {by: replace(plain, token_gate=TokenGateSettings(0.2, by)) for by in get_args(GateStatistic)}
        rows += compare(loss, plain, gates, inputs, arguments)
    by_origin = ObjectiveSpec.of_origins({origin: parse_objective(loss) for origin, loss in ORIGINS.items()})
    rows += compare(ONE_ORIGIN, parse_objective(ONE_ORIGIN), {"by_origin": by_origin}, inputs, arguments)
    for row in rows:
        ratios = f"{row['quotient'] - 1:+.2%}, {row['quotient_of_minima'] - 1:+.2%} of the minima"
        if row["in_gate"] is not None:
            ratios += f", {row['in_gate']:.2%} in the gate"
        print(f"{row['loss']:36s} {row['with']:16s} {ratios}, of {row['plain_seconds']:.4f} s")
    name = "token_gate" if inputs.hidden_TD.device.type == "cpu" else "token_gate-cuda"
    result = {"theme": "token_gate", "sizes": vars(arguments), "kept": 0.2, "rows": rows}
    write_result(result_file(name), result, arguments.device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--losses", nargs="*", default=list(LOSSES))
    add("--tokens", type=int, default=1024)
    add("--width", type=int, default=512, help="of the student")
    add("--teacher-width", type=int, default=1024)
    add("--vocabulary", type=int, default=32768)
    add("--rounds", type=int, default=15)
    add("--dtype", choices=list(DTYPES), default="fp32")
    add("--device", default="cpu")
    add("--threads", type=int, default=2)
    return parser.parse_args()


def make_inputs(arguments: argparse.Namespace) -> Inputs:
    torch.manual_seed(0)
    options: Any = {"device": arguments.device, "dtype": DTYPES[arguments.dtype]}
    tokens, vocabulary = arguments.tokens, arguments.vocabulary
    hidden_TD = torch.randn(tokens, arguments.width, **options).requires_grad_()
    weight_VD = (torch.randn(vocabulary, arguments.width, **options) / arguments.width**0.5).requires_grad_()
    hidden_TE = torch.randn(tokens, arguments.teacher_width, **options)
    weight_VE = 3 * torch.randn(vocabulary, arguments.teacher_width, **options) / arguments.teacher_width**0.5
    labels_T = torch.randint(vocabulary, (tokens,), device=arguments.device)
    numbers_T = torch.arange(tokens, device=arguments.device)
    return Inputs(
        hidden_TD,
        OutputHead(weight_VD),
        labels_T,
        {TEACHER: FullVocab(hidden_TE, OutputHead(weight_VE))},
        {IS_SAMPLED: (numbers_T % 2).float(), POLICY_VERSION: (numbers_T % 2).float() - 1},
    )


def run_pass(spec: ObjectiveSpec, threshold: GateThreshold | None, inputs: Inputs) -> Tensor | None:
    """Run forward and backward; return the histogram of a gate's statistic."""
    inputs.hidden_TD.grad = inputs.head.weight_VD.grad = None
    per_token = inputs.per_token if spec.by_origin else None
    terms = spec.terms(inputs.labels_T, inputs.signals, per_token, threshold=threshold)
    output = linear_objective(inputs.hidden_TD, inputs.head, terms, normalizer=len(inputs.labels_T))
    output.loss.backward()
    return histogram(output.per_token[GATE]) if spec.token_gate is not None else None


@contextmanager
def timed_gate(seconds: list[float]) -> Iterator[None]:
    """Append the CPU seconds of every call of the gate's functions."""
    with ExitStack() as patches:
        for owner, name in ((TokenGate, "add_to"), (TokenGate, "factors"), (sys.modules[__name__], "histogram")):
            function = getattr(owner, name)

            def timed(*arguments: Any, function: Callable[..., Any] = function) -> Any:
                started = time.process_time()
                result = function(*arguments)
                seconds.append(time.process_time() - started)
                return result

            patches.enter_context(patch.object(owner, name, timed))
        yield


def in_gate(spec: ObjectiveSpec, task: Callable[[], Any], device: torch.device) -> float | None:
    """Return the share of a pass's CPU seconds in the gate's functions, the median of five; None on a GPU."""
    if spec.token_gate is None or device.type != "cpu":
        return None
    shares = []
    for _ in range(5):
        seconds: list[float] = []
        with timed_gate(seconds):
            of_pass = seconds_of(task, device)
        shares.append(sum(seconds) / of_pass)
    return statistics.median(shares)


def compare(
    loss: str, plain: ObjectiveSpec, others: dict[str, ObjectiveSpec], inputs: Inputs, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    tasks: dict[str, Callable[[], Any]] = {"plain": partial(run_pass, plain, None, inputs)}
    for name, spec in others.items():
        counts_B = run_pass(spec, None, inputs)
        threshold = None if counts_B is None else threshold_of(counts_B.tolist(), 0.2)
        tasks[name] = partial(run_pass, spec, threshold, inputs)
    for task in tasks.values():
        task()  # the first call compiles
    device = inputs.hidden_TD.device
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(arguments.rounds):
        for name in tasks if turn % 2 == 0 else reversed(tasks):
            seconds[name].append(seconds_of(tasks[name], device))
    return [
        {
            "loss": loss,
            "with": name,
            "in_gate": in_gate(spec, tasks[name], device),
            "quotient": statistics.median(map(quotient, seconds[name], seconds["plain"])),
            "quotient_of_minima": min(seconds[name]) / min(seconds["plain"]),
            "plain_seconds": statistics.median(seconds["plain"]),
            "rounds": {"plain": seconds["plain"], name: seconds[name]},
        }
        for name, spec in others.items()
    ]


def quotient(one: float, other: float) -> float:
    return one / other


def seconds_of(task: Callable[[], Any], device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    synchronize(device)
    started = clock()
    task()
    synchronize(device)
    return clock() - started


if __name__ == "__main__":
    main()
