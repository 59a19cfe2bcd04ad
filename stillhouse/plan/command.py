"""`stillhouse plan`: the command, and a plan as plain text."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from stillhouse.cli.arguments import configured, load_arguments, misused
from stillhouse.display import counted, escaped, print_escaped
from stillhouse.plan.devices import DEVICES, GIB, RESERVED

if TYPE_CHECKING:
    from stillhouse.plan.layout_plan import Plan
    from stillhouse.plan.prediction import RankCounts

#: the purposes of memory, in the order of their rows in the table
_PURPOSES = ("student weights", "teacher weights", "optimizer", "gradients", "activations", "teacher activations")
_WIDTH = 18


@click.command()
@configured
@click.option(
    "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes of the job, one per GPU."
)
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True, help="GPUs per machine.")
@click.option("--device", default="h100", show_default=True, help="GPU: rtx4090, a100, h100, h200 or b200.")
@click.option(
    "--document-tokens",
    type=click.IntRange(2),
    default=512,
    show_default=True,
    help="Tokens of each document; in an on-policy run, tokens of each prompt.",
)
@click.option("--fit", is_flag=True, help="Search layouts and micro-batches; print the five fastest plans that fit.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    arguments: tuple[str, ...],
    *,
    ranks: int,
    gpus_per_node: int,
    device: str,
    document_tokens: int,
    fit: bool,
    as_json: bool,
    **flags: str | None,
) -> None:
    """Plan a job on GPUs that this machine does not have.

    Runs a step of the first, an inner and the last pipeline stage with tensors that have no values, in processes
    without a GPU. Prints the memory, kernels, messages and waits of each stage, and a predicted time. Needs only the
    models' config.json, and neither data nor weights. The exit code is 2 if the job needs more memory than a GPU
    has. For an on-policy run, only the training step is planned.

    \b
    stillhouse plan run.yaml --ranks 64
    stillhouse plan run.yaml parallel.tensor=2 --ranks 64 --device h200
    stillhouse plan run.yaml --ranks 64 --fit
    """
    if device not in DEVICES:
        raise misused(f"--device: got {device!r}, expected one of {', '.join(DEVICES)}")
    config = load_arguments(arguments, flags, needs=())
    from stillhouse.config import ConfigError
    from stillhouse.plan import fit as layout_search
    from stillhouse.plan.layout_plan import Machine, plan_layout, planned_job

    machine = Machine(ranks, gpus_per_node, device)
    if not fit:
        result = plan_layout(planned_job(config, machine, document_tokens))
        print_escaped(json.dumps(result.as_json(), indent=2) if as_json else "\n".join(lines(result)))
        if not result.fits:
            raise ConfigError(None, does_not_fit(result))
        return
    fits = layout_search.fit(config, machine, document_tokens)
    if not fits:
        raise ConfigError(
            "parallel",
            f"no layout of {ranks} × {machine.device.title} fits: expected more --ranks, a --device with "
            "more memory, a smaller data.max_tokens, or a larger train.tokens_per_step, which gives a step more "
            "sequences",
        )
    if as_json:
        print_escaped(json.dumps([{"overrides": plan.overrides} | plan.as_json() for plan in fits], indent=2))
    else:
        print_escaped("\n".join(fit_lines(fits)))


def lines(plan: "Plan") -> Iterator[str]:
    """Return the lines of a plan: the step, the memory, the work and the messages of each rank."""
    ranks, device, prediction = plan.ranks, plan.machine.device, plan.prediction
    first = next(iter(ranks.values()))
    machines = -(-plan.machine.ranks // plan.machine.gpus_per_node)
    yield _row("layout", f"{first.layout}: {plan.machine.ranks} × {device.title} in {counted(machines, 'machine')}")
    yield _row("step", f"{first.tokens:,} tokens, {counted(first.micro_batches, 'micro-batch')} on a data rank")
    bubble = f", pipeline bubble {prediction.bubble:.0%}" if first.layout.degrees["pipeline"] > 1 else ""
    bound = prediction.times[prediction.slowest].bound
    yield _row("predicted", f"{two_digits(prediction.seconds)} s per step, bound by {bound}{bubble}")
    rate = two_digits(prediction.tokens_per_second)
    yield _row("speed", f"{rate} tokens/s, {prediction.model_share:.0%} of the peak in bfloat16 (MFU)")
    if plan.has_tower:
        yield _row("images", "not counted, nor the activations of the vision tower: a plan's documents are texts")
    if plan.completions is not None:
        yield _row("completions", f"{plan.completions}; only the training step is planned")
        yield _row("", "not counted: generating completions, computing rewards, and waiting for completions")
    yield ""
    yield _cells("", [f"{name} stage" for name in ranks] if len(ranks) > 1 else ["every rank"])
    yield _cells("rank", [str(rank.rank) for rank in ranks.values()])
    yield _cells("peak memory", [_gib(rank.memory) for rank in ranks.values()])
    for purpose in dict.fromkeys([*_PURPOSES, *(purpose for rank in ranks.values() for purpose in rank.peak)]):
        sizes = [rank.peak.get(purpose, 0) for rank in ranks.values()]
        if max(sizes) >= 0.005 * GIB:
            yield _cells(f"  {purpose}", [_gib(size) for size in sizes])
    yield _cells("  free", [_gib(device.usable - rank.memory) for rank in ranks.values()])
    times = prediction.times.values()
    yield _cells("time", [f"{two_digits(time.seconds)} s" for time in times])
    yield _cells("  products", [f"{two_digits(time.products)} s" for time in times])
    yield _cells("  other kernels", [f"{two_digits(time.traffic)} s" for time in times])
    yield _cells("  exposed messages", [f"{two_digits(time.exposed)} s" for time in times])
    yield _cells("  bound by", [time.bound for time in times])
    operations = [sum(rank.products.values()) / 1e12 for rank in ranks.values()]
    yield _cells("operations", [f"{two_digits(count)} T" for count in operations])
    yield _cells("memory traffic", [f"{two_digits(rank.traffic / 1e9)} GB" for rank in ranks.values()])
    yield _cells("kernels", [f"{rank.kernels:,}" for rank in ranks.values()])
    yield from _messages_and_waits(list(ranks.values()))


def _messages_and_waits(ranks: Sequence["RankCounts"]) -> Iterator[str]:
    keys = dict.fromkeys(key for rank in ranks for key in rank.sent)
    rows = [(key, [rank.sent.get(key, 0.0) for rank in ranks]) for key in keys]
    rows = [(key, sizes) for key, sizes in rows if max(sizes) >= 1e6]
    if rows:
        yield "messages"
    for key, sizes in sorted(rows, key=lambda row: -max(row[1])):
        units = [(1e9, "GB") if size >= 1e8 else (1e6, "MB") for size in sizes]
        texts = [f"{two_digits(size / unit)} {name}" for size, (unit, name) in zip(sizes, units, strict=True)]
        counts = [rank.messages.get(key, 0) for rank in ranks]
        yield _cells(f"  {key}", [f"{count:,}: {text}" for count, text in zip(counts, texts, strict=True)])
    yield _cells("waits of the host", [str(sum(rank.waits.values())) for rank in ranks])
    places: Counter[str] = Counter()
    for rank in ranks:
        places |= Counter(rank.waits) | Counter(rank.pageable)  # for each place, the largest count of a rank
    yield from (f"  {count} × {escaped(place)}" for place, count in places.items())


def does_not_fit(plan: "Plan") -> str:
    """Return an error message with the needed and the available memory, and with the settings that reduce memory."""
    device, memory = plan.machine.device, plan.largest.memory
    return (
        f"{plan.largest.layout} needs {_gib(memory)} on rank {plan.largest.rank}, and the {device.title} has "
        f"{_gib(device.usable)} ({_gib(device.memory)} minus {_gib(RESERVED)} for CUDA, NCCL and gaps): expected a "
        "smaller train.micro_batch_tokens, train.activation_checkpointing=true or more sharding, which --fit tries"
    )


def fit_lines(plans: Sequence["Plan"]) -> Iterator[str]:
    """Return the lines of several plans, the best first, with the overrides of each plan."""
    yield f"{'s per step':>10}{'tokens/s':>12}{'MFU':>6}{'peak memory':>14}{'bound by':>11}  overrides"
    for plan in plans:
        prediction = plan.prediction
        bound = prediction.times[prediction.slowest].bound
        figures = f"{two_digits(prediction.seconds):>10}{two_digits(prediction.tokens_per_second):>12}"
        share, memory = f"{prediction.model_share:.0%}", _gib(plan.largest.memory)
        yield f"{figures}{share:>6}{memory:>14}{bound:>11}  {' '.join(plan.overrides)}"
    yield "These are estimates from steps with few layers. Without --fit, a plan with a line's overrides runs all."


def two_digits(value: float) -> str:
    """Return a number with two significant digits, because a prediction is not more precise."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.1e}")
    decimals = 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, decimals)}f}"


def _row(name: str, value: str) -> str:
    return f"{name:<16}{escaped(value, lines=True)}"


def _cells(name: str, values: list[str]) -> str:
    return (f"{name:<32}" + "".join(f"{value:>{_WIDTH}}" for value in values)).rstrip()


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
