"""A plan as plain text."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from stillhouse.display import escaped
from stillhouse.plan.devices import GIB, RESERVED, Device
from stillhouse.plan.layout_plan import Plan
from stillhouse.plan.rank_counts import RankCounts

#: purposes of memory in the order of the table
_PURPOSES = ("student weights", "teacher weights", "optimizer", "gradients", "activations", "teacher activations")
_WIDTH = 18


def lines(plan: Plan) -> Iterator[str]:
    """Return the lines of a plan: the step, the memory, the work and the messages of each rank."""
    ranks, device, prediction = plan.ranks, plan.machine.device, plan.prediction
    first = next(iter(ranks.values()))
    machines = -(-plan.machine.ranks // plan.machine.gpus_per_node)
    yield _row("layout", f"{first.layout}: {plan.machine.ranks} × {device.title} in {_count(machines, 'machine')}")
    yield _row("step", f"{first.tokens:,} tokens, {_count(first.micro_batches, 'micro-batch')} on a data rank")
    bubble = f", pipeline bubble {prediction.bubble:.0%}" if first.layout.degrees["pipeline"] > 1 else ""
    bound = prediction.times[prediction.slowest].bound
    yield _row("predicted", f"{two_digits(prediction.seconds)} s per step, bound by {bound}{bubble}")
    rate = two_digits(prediction.tokens_per_second)
    yield _row("speed", f"{rate} tokens/s, {prediction.model_share:.0%} of the peak in bfloat16 (MFU)")
    if plan.has_tower:
        yield _row("images", "not counted, nor the activations of the vision tower: the documents are texts")
    if plan.completions is not None:
        yield _row("completions", f"{plan.completions}; the plan is of the training step alone")
        yield _row("", "not counted: the generation of completions, their rewards, and a wait for them")
    yield ""
    yield _cells("", [f"{name} stage" for name in ranks] if len(ranks) > 1 else ["every rank"])
    yield _cells("rank", [str(rank.rank) for rank in ranks.values()])
    yield from _memory(ranks, device)
    yield from _work(plan)
    yield from _messages(ranks)
    yield from _waits(ranks)


def _memory(ranks: Mapping[str, RankCounts], device: Device) -> Iterator[str]:
    yield _cells("peak memory", [_gib(rank.memory) for rank in ranks.values()])
    named = dict.fromkeys([*_PURPOSES, *(purpose for rank in ranks.values() for purpose in rank.peak)])
    for purpose in named:
        sizes = [rank.peak.get(purpose, 0) for rank in ranks.values()]
        if max(sizes) >= 0.005 * GIB:
            yield _cells(f"  {purpose}", [_gib(size) for size in sizes])
    yield _cells("  free", [_gib(device.usable - rank.memory) for rank in ranks.values()])


def _work(plan: Plan) -> Iterator[str]:
    ranks, times = plan.ranks.values(), plan.prediction.times.values()
    yield _cells("time", [f"{two_digits(time.seconds)} s" for time in times])
    yield _cells("  products", [f"{two_digits(time.products)} s" for time in times])
    yield _cells("  other kernels", [f"{two_digits(time.traffic)} s" for time in times])
    yield _cells("  exposed messages", [f"{two_digits(time.exposed)} s" for time in times])
    yield _cells("  bound by", [time.bound for time in times])
    yield _cells("operations", [f"{two_digits(sum(rank.products.values()) / 1e12)} T" for rank in ranks])
    yield _cells("memory traffic", [f"{two_digits(rank.traffic / 1e9)} GB" for rank in ranks])
    yield _cells("kernels", [f"{rank.kernels:,}" for rank in ranks])


def _messages(ranks: Mapping[str, RankCounts]) -> Iterator[str]:
    keys = dict.fromkeys(key for rank in ranks.values() for key in rank.sent)
    rows = [(key, [rank.sent.get(key, 0.0) for rank in ranks.values()]) for key in keys]
    rows = [(key, sizes) for key, sizes in rows if max(sizes) >= 1e6]
    if rows:
        yield _cells("messages", ["" for _ in ranks])
    for key, sizes in sorted(rows, key=lambda row: -max(row[1])):
        counts = [rank.messages.get(key, 0) for rank in ranks.values()]
        yield _cells(f"  {key}", [f"{count:,}: {_bytes(size)}" for count, size in zip(counts, sizes, strict=True)])


def _waits(ranks: Mapping[str, RankCounts]) -> Iterator[str]:
    yield _cells("waits of the host", [str(sum(rank.waits.values())) for rank in ranks.values()])
    places: Counter[str] = Counter()
    for rank in ranks.values():
        for place, count in [*rank.waits.items(), *rank.pageable.items()]:
            places[place] = max(places[place], count)
    yield from (f"  {count} × {escaped(place)}" for place, count in places.items())


def does_not_fit(plan: Plan) -> str:
    """Say how much memory is missing, and what to do."""
    device, memory = plan.machine.device, plan.largest.memory
    return (
        f"{plan.largest.layout} needs {_gib(memory)} on rank {plan.largest.rank}, and the {device.title} has "
        f"{_gib(device.usable)} ({_gib(device.memory)} without {_gib(RESERVED)} for CUDA, NCCL and gaps): expected "
        "smaller train.micro_batch_tokens, train.activation_checkpointing=true or more sharding; --fit searches them"
    )


def fit_lines(fits: Sequence[tuple[Sequence[str], Plan]]) -> Iterator[str]:
    """Return the lines of several plans with the overrides that give them, the best first."""
    yield f"{'s per step':>10}{'tokens/s':>12}{'MFU':>6}{'peak memory':>14}{'bound by':>11}  overrides"
    for overrides, plan in fits:
        prediction = plan.prediction
        bound = prediction.times[prediction.slowest].bound
        figures = f"{two_digits(prediction.seconds):>10}{two_digits(prediction.tokens_per_second):>12}"
        share, memory = f"{prediction.model_share:.0%}", _gib(plan.largest.memory)
        yield f"{figures}{share:>6}{memory:>14}{bound:>11}  {' '.join(overrides)}"
    yield "The figures are from steps of models with few layers; a plan of one of these lines runs all layers."


def two_digits(value: float) -> str:
    """Return a number with two significant digits, because a prediction has no more."""
    if value == 0:
        return "0"
    text = f"{float(f'{value:.1e}'):,.6f}"
    whole, _, fraction = text.partition(".")
    if len(whole.replace(",", "").lstrip("-")) >= 2:
        return whole
    leading = len(fraction) - len(fraction.lstrip("0"))
    return f"{whole}.{fraction[: 1 if whole != '0' else leading + 2]}"


def _row(name: str, value: str) -> str:
    return f"{name:<16}{escaped(value, lines=True)}"


def _cells(name: str, values: list[str]) -> str:
    return (f"{name:<32}" + "".join(f"{value:>{_WIDTH}}" for value in values)).rstrip()


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _bytes(size: float) -> str:
    return f"{two_digits(size / 1e9)} GB" if size >= 1e8 else f"{two_digits(size / 1e6)} MB"
