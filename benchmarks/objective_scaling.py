"""Measures how time and memory of the objective, its peers and the floor grow with tokens, vocabulary and ranks.

    python -m benchmarks.objective_scaling --threads 2
    python -m benchmarks.objective_scaling --redraw benchmarks/results/objective-scaling-<date>.json

One loss (`--case`) in float32 on a CPU, with smaller widths than benchmarks/objective.py, so that the whole benchmark
takes about a quarter of an hour on two cores. All libraries take turns at every point. If one pass of all of them
takes longer than `--limit-seconds`, there is only one turn. A library that takes longer than this by itself, or does
not fit into free memory, is left out of all larger points. The floor is the fastest of `--floor-rows` and
`--floor-panels`.

Ranks are processes that share `--threads` cores. Each rank holds its rows of both heads and has
max(1, threads / ranks) threads, so with more ranks than cores they wait for each other. `efficiency` is the time of
one rank with all threads divided by the ranks' time; 1 means that sharding costs nothing. Memory is per rank.

Writes benchmarks/results/objective-scaling-<date>.json and objective-scaling.png.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import (
    MAP_BLOCKS,
    WARM_UP_TOKENS,
    changed_environment,
    extra_bytes,
    relative_distance,
    resident_extra,
    run_pass,
    take_turns,
    timed,
)
from benchmarks.peers import (
    CASES,
    Inputs,
    Loss,
    Products,
    Sizes,
    contestants,
    make_inputs,
    make_stillhouse,
    stillhouse_output,
)
from benchmarks.record import RESULTS, result_file, write_result
from stillhouse.objective import VocabShard
from stillhouse.tools.parity import worst

CPU = torch.device("cpu")
#: float32 numbers per logit that a contestant holds at its peak, if its memory grows with T
NUMBERS_PER_LOGIT = {"pytorch": 9}
#: the share of the free memory that a contestant may need
USABLE = 0.85


def main() -> None:
    arguments = parse_arguments()
    picture = RESULTS / "objective-scaling.png"
    if arguments.redraw:
        draw(json.loads(Path(arguments.redraw).read_text(encoding="utf-8")), picture)
        return
    torch.set_num_threads(arguments.threads)
    result = measure(arguments)
    write_result(result_file("objective-scaling"), {"theme": "objective-scaling"} | result)
    draw(result, picture)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--case", choices=list(CASES), default="jsd")
    add("--width", type=int, default=192, help="of the student")
    add("--teacher-width", type=int, default=384)
    add("--tokens", type=int, nargs="*", default=[1 << n for n in range(10, 16)], help="at the first vocabulary")
    add("--vocabularies", type=int, nargs="+", default=[1 << n for n in range(15, 19)], help="at the first tokens")
    add("--ranks", type=int, nargs="*", default=[1, 2, 4])
    add("--rank-tokens", type=int, default=2048, help="tokens of the sharded passes, at the first vocabulary")
    add("--rounds", type=int, default=3)
    add("--limit-seconds", type=float, default=30.0)
    add("--floor-rows", type=int, nargs="+", default=[128, 512], help="chunk sizes of the floor")
    add(
        "--floor-panels",
        type=int,
        nargs="+",
        default=[1024],
        help="vocabulary rows of one of its products; 0 for all",
    )
    add("--threads", type=int, default=2)
    add("--redraw", metavar="FILE", help="draw the figure of a result again without measuring")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    def sizes(tokens: int, vocabulary: int) -> Sizes:
        return Sizes(tokens, arguments.width, arguments.teacher_width, vocabulary)

    first_vocabulary = arguments.vocabularies[0]
    over_tokens = sweep([sizes(tokens, first_vocabulary) for tokens in arguments.tokens], arguments)
    over_vocabulary = sweep(
        [sizes(arguments.tokens[0], vocabulary) for vocabulary in arguments.vocabularies], arguments
    )
    rank_sizes = sizes(arguments.rank_tokens, first_vocabulary)
    return {
        "sizes": vars(arguments),
        "over_tokens": over_tokens,
        "over_vocabulary": over_vocabulary,
        "rank_floor_seconds": seconds_of([], rank_sizes, arguments)["floor"],
        "over_ranks": over_ranks(rank_sizes, arguments),
    }


def sweep(points: list[Sizes], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the contestants' median seconds and peak extra bytes at each point, and why some were left out."""
    entries: list[dict[str, Any]] = []
    for sizes in points:
        left_out = too_much(sizes, entries[-1] if entries else None, arguments)
        losses, _ = contestants(CASES[arguments.case], CPU)
        names = [name for name in losses if name not in left_out]
        entry = asdict(sizes) | {
            "seconds": seconds_of(names, sizes, arguments),
            "extra_bytes": {name: extra_bytes(arguments.case, name, sizes, CPU, torch.float32) for name in names},
            "left_out": left_out,
        }
        print(json.dumps(entry), flush=True)
        entries.append(entry)
    return entries


def too_much(sizes: Sizes, before: dict[str, Any] | None, arguments: argparse.Namespace) -> dict[str, str]:
    """Return the contestants that must be left out at this point, with the reasons."""
    logits, at = sizes.tokens * sizes.vocabulary, f"T = {sizes.tokens}, V = {sizes.vocabulary}"
    reasons = dict(before["left_out"]) if before else {}
    for name, numbers in NUMBERS_PER_LOGIT.items():
        needed = 4 * numbers * logits
        if needed > USABLE * free_bytes():
            reasons.setdefault(name, f"needs about {needed / 2**30:.0f} GiB at {at}")
    if before:
        growth = logits / (before["tokens"] * before["vocabulary"])
        for name in before["seconds"].keys() - {"floor", "stillhouse"}:
            if (expected := before["seconds"][name] * growth) > arguments.limit_seconds:
                reasons.setdefault(name, f"a pass takes about {expected:.0f} s at {at}")
    return reasons


def free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def seconds_of(names: list[str], sizes: Sizes, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of each contestant and of the fastest floor."""
    inputs = make_inputs(sizes, CPU, torch.float32)
    losses, _ = contestants(CASES[arguments.case], CPU)
    floors: dict[str, Callable[[], Any]] = {
        f"floor/{rows}/{panel}": Products(inputs, rows, teacher=CASES[arguments.case].dense_teacher, panel=panel)
        for rows, panel in product(arguments.floor_rows, arguments.floor_panels)
    }
    few = make_inputs(replace(sizes, tokens=min(sizes.tokens, WARM_UP_TOKENS)), CPU, torch.float32)
    for name in names:  # the first call compiles
        run_pass(losses[name], few)
    tasks = floors | {name: partial(run_pass, losses[name], inputs) for name in names}
    seconds = take_turns(tasks, 1, CPU)
    if sum(second for (second,) in seconds.values()) < arguments.limit_seconds:
        seconds = take_turns(tasks, arguments.rounds, CPU)
    return {"floor": min(median(seconds[name]) for name in floors)} | {name: median(seconds[name]) for name in names}


def over_ranks(sizes: Sizes, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return per number of ranks: seconds, efficiency, the largest rank's extra bytes, distance from one rank."""
    entries: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        threads = max(1, arguments.threads // ranks)
        timings = on_ranks(time_rank, ranks, (sizes, arguments.case, arguments.rounds), threads, {})
        memory = on_ranks(remember_rank, ranks, (sizes, arguments.case), threads, MAP_BLOCKS)
        seconds = median(map(max, zip(*(timing["seconds"] for timing in timings), strict=True)))
        entry: dict[str, Any] = {
            "ranks": ranks,
            "threads_per_rank": threads,
            "seconds": seconds,
            "efficiency": entries[0]["seconds"] / seconds if entries else 1.0,
            "extra_bytes": max(entry["extra_bytes"] for entry in memory),
            "distance": worst(pair for timing in timings for pair in timing["distance"].items())[1],
        }
        print(json.dumps(entry), flush=True)
        entries.append(entry)
    return entries


def on_ranks(
    function: Callable[..., dict[str, Any]], ranks: int, arguments: tuple, threads: int, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """Call a function on each rank of a process group, in new processes, and return the results."""
    with (
        tempfile.TemporaryDirectory() as folder,
        changed_environment(environment | {"OMP_NUM_THREADS": str(threads)}),
    ):
        torch.multiprocessing.spawn(run_rank, (ranks, folder, threads, function, arguments), nprocs=ranks)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def run_rank(
    rank: int, ranks: int, folder: str, threads: int, function: Callable[..., Any], arguments: tuple
) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = function(*arguments)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def time_rank(sizes: Sizes, case: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of each pass on this rank, and the distance of its results from those of unsharded heads."""
    unsharded, shard_inputs, loss = sharded(sizes, case)
    values = [run_pass(loss, shard_inputs), *shard_inputs.gradients()]
    expected = [run_pass(make_stillhouse(CASES[case], CPU), unsharded), *unsharded.gradients()]
    expected[2] = expected[2][vocabulary_rows(sizes)]
    distances = [relative_distance(value, reference) for value, reference in zip(values, expected, strict=True)]
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        seconds.append(timed(partial(run_pass, loss, shard_inputs), CPU)[0])
    return {"seconds": seconds, "distance": dict(zip(("loss", "hidden_grad", "weight_grad"), distances, strict=True))}


def remember_rank(sizes: Sizes, case: str) -> dict[str, Any]:
    unsharded, shard_inputs, loss = sharded(sizes, case)
    del unsharded
    run_pass(loss, shard_inputs)
    dist.barrier()
    return {"extra_bytes": resident_extra(loss, shard_inputs)}


def sharded(sizes: Sizes, case: str) -> tuple[Inputs, Inputs, Loss]:
    """Return the unsharded inputs, this rank's inputs, and the loss on these, which is the same on every rank."""
    unsharded = make_inputs(sizes, CPU, torch.float32)
    rows = vocabulary_rows(sizes)
    shard = VocabShard(rows.start, rows.stop, dist.group.WORLD)
    shard_inputs = replace(
        unsharded,
        hidden_TD=unsharded.hidden_TD.detach().clone().requires_grad_(),
        weight_VD=unsharded.weight_VD.detach()[rows].clone().requires_grad_(),
        teacher_weight_VE=unsharded.teacher_weight_VE[rows].clone(),
    )
    return unsharded, shard_inputs, lambda inputs: stillhouse_output(CASES[case], inputs, shard).loss


def vocabulary_rows(sizes: Sizes) -> slice:
    """Return this rank's vocabulary rows in a balanced split."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return slice(sizes.vocabulary * rank // ranks, sizes.vocabulary * (rank + 1) // ranks)


COLOURS = {"stillhouse": "#1f5fbf", "pytorch": "#d9822b", "trl": "#3a9d5d", "floor": "#555555"}
LABELS = {
    "stillhouse": "Stillhouse",
    "pytorch": "plain PyTorch",
    "trl": "TRL",
    "floor": "floor: only the matrix products",
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw time per logit (above) and extra memory (below) over tokens, vocabulary and ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.5), sharex="col", sharey="row", layout="constrained")
    draw_sweep(axes[:, 0], result["over_tokens"], "tokens")
    draw_sweep(axes[:, 1], result["over_vocabulary"], "vocabulary")
    draw_ranks(axes[:, 2], result)
    label_axes(axes, result)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.supxlabel(caption(result["sizes"]), fontsize="small", color="#555555")
    figure.savefig(path, dpi=150)
    print(path)


def draw_sweep(column: Any, points: list[dict[str, Any]], along: str) -> None:
    for name in COLOURS:
        style = {"color": COLOURS[name], "label": LABELS[name], "marker": "o", "markersize": 4}
        timed_points = [point for point in points if name in point["seconds"]]
        if name == "floor":
            style |= {"linestyle": "--", "marker": ""}
        else:
            memory = [point["extra_bytes"][name] / 2**20 for point in timed_points]
            column[1].plot([point[along] for point in timed_points], memory, **style)
        per_logit = [1e9 * point["seconds"][name] / (point["tokens"] * point["vocabulary"]) for point in timed_points]
        column[0].plot([point[along] for point in timed_points], per_logit, **style)
    column[1].set_xscale("log", base=2)


def draw_ranks(column: Any, result: dict[str, Any]) -> None:
    """Draw only Stillhouse, because the peers gather the whole head on every rank."""
    points = result["over_ranks"]
    logits = result["sizes"]["rank_tokens"] * result["sizes"]["vocabularies"][0]
    style = {"color": COLOURS["stillhouse"], "marker": "o", "markersize": 4}
    ranks = [point["ranks"] for point in points]
    column[0].plot(ranks, [1e9 * point["seconds"] / logits for point in points], **style)
    column[0].axhline(1e9 * result["rank_floor_seconds"] / logits, color=COLOURS["floor"], linestyle="--")
    column[1].plot(ranks, [point["extra_bytes"] / 2**20 for point in points], **style)
    column[1].set_xscale("log", base=2)


def label_axes(axes: Any, result: dict[str, Any]) -> None:
    sizes = result["sizes"]
    tokens, rank_tokens, vocabulary = (
        in_thousands(size) for size in (sizes["tokens"][0], sizes["rank_tokens"], sizes["vocabularies"][0])
    )
    axes[0, 0].set(title=f"over tokens, V = {vocabulary}", ylabel="time, ns per logit (T × V)", ylim=(0, None))
    axes[0, 1].set(title=f"over vocabulary, T = {tokens}")
    axes[0, 2].set(title=f"sharded over ranks, T = {rank_tokens}, V = {vocabulary}")
    axes[1, 0].set(xlabel="tokens T", ylabel="peak extra memory")
    axes[1, 1].set(xlabel="vocabulary V")
    axes[1, 2].set(xlabel="ranks (memory is of one)")
    for column, ticks in enumerate((sizes["tokens"], sizes["vocabularies"], sizes["ranks"])):
        axes[1, column].set_xticks(ticks, [in_thousands(tick) for tick in ticks])
        axes[1, column].minorticks_off()
    axes[1, 0].set_yscale("log", base=2)
    axes[1, 0].yaxis.set_major_formatter(lambda mib, _: f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB")
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)


def caption(sizes: dict[str, Any]) -> str:
    return (
        f"{sizes['case']}, forward and backward, float32, D = {sizes['width']}, E = {sizes['teacher_width']}, "
        f"{sizes['threads']} CPU threads. A curve ends where a pass would not fit the free memory or take more than "
        f"{sizes['limit_seconds']:g} s."
    )


def in_thousands(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 else str(number)


if __name__ == "__main__":
    main()
