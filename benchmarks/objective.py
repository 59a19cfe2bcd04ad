"""Compares speed and memory of the objective with its peers, and with the products that every exact loss needs.

    python -m benchmarks.objective --threads 2
    python -m benchmarks.objective --device cuda --dtype bf16 --tokens 8192 --width 2048 --teacher-width 4096 \
        --vocabulary 128256

Every contestant (benchmarks/peers.py) computes the same loss from the same inputs, forward and backward. First, the
distance of its loss and gradients from ours is measured; the result contains it beside the time.
benchmarks/measure.py describes the measurement of time and memory. Ratios compare neighbouring passes of the same
round, because the speed of a shared machine drifts. The result is the median over rounds; it also contains the ratios
of minima.

The floor is the time of the same matrix products without other work. It is the fastest of several chunk sizes, with
logits that are whole or split into panels of the vocabulary. On a GPU, the targets use an even lower floor: 2TV(3D +
E) operations at the rate of a large square product. A loss without a dense teacher is compared with the floor without
the teacher's product.

The first call in this process is timed separately. On a CPU, two new processes time it again: one without compiled
code on disk, and one without a C++ compiler, which must give the same numbers.
Writes benchmarks/results/objective-<date>.json, on a GPU objective-cuda-<vocabulary>-<date>.json.
"""

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.aims import aims
from benchmarks.measure import extra_bytes, in_fresh_process, relative_distance, run_pass, take_turns, timed
from benchmarks.peers import (
    CASES,
    Inputs,
    Loss,
    Products,
    Sizes,
    adds_half_products,
    contestants,
    make_inputs,
    stillhouse_output,
)
from stillhouse.tools.parity import worst

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: a contestant whose gradient has a larger relative distance from ours computes another loss
SAME = {"fp32": 1e-3, "bf16": 3e-2}
#: the products of a case with a dense teacher, and those of the student only
FLOORS = ("floor", "student_floor")
MIB = 1 << 20
COLUMNS = [
    "case",
    "contestant",
    "seconds",
    "min–max",
    "/floor",
    "minima",
    "/ours",
    "first s",
    "extra MiB",
    "distance",
]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    result = measure(arguments)
    print_result(result)
    save(result, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, default=2048)
    add("--width", type=int, default=512, help="of the student")
    add("--teacher-width", type=int, default=1024)
    add("--vocabulary", type=int, default=32768)
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE", help=", ".join(CASES))
    add("--rounds", type=int, default=15, help="of ours and the floor")
    add("--peer-rounds", type=int, default=5, help="of everyone, the first of those")
    add("--floor-rows", type=int, nargs="+", default=[256, 512, 1024], help="chunk sizes of the floor")
    add("--floor-rounds", type=int, default=3, help="after which the fastest of them is known")
    add("--floor-panels", type=int, nargs="+", default=None, help="vocabulary rows of a product; 0 for all")
    add("--square", type=int, default=None, help="of the product that gives the matrix rate (4096; on a GPU 8192)")
    add("--memory-tokens", type=int, nargs="*", default=[1024, 8192, 32768], help="where memory should be flat")
    add("--skip", nargs="*", choices=["memory", "first_call", "peers"], default=[])
    add("--dtype", choices=list(DTYPES), default="fp32")
    add("--device", default="cpu")
    add("--threads", type=int, default=2)
    arguments = parser.parse_args()
    arguments.floor_panels = arguments.floor_panels or ([0] if arguments.device.startswith("cuda") else [0, 1024])
    if arguments.dtype != "fp32" and not arguments.device.startswith("cuda"):
        parser.error(f"--dtype {arguments.dtype} on {arguments.device}: expected fp32, or a GPU")
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    sizes = Sizes(arguments.tokens, arguments.width, arguments.teacher_width, arguments.vocabulary)
    inputs = make_inputs(sizes, device, dtype)
    entrants, absent = {}, {}
    for name in arguments.cases:
        entrants[name], absent[name] = contestants(CASES[name], device)
        if "peers" in arguments.skip:
            entrants[name] = {"stillhouse": entrants[name]["stillhouse"]}
    cases = {}
    for name, losses in entrants.items():
        cases[name] = first_calls(losses, inputs, absent[name])
        first = {contestant: entry["first_call_seconds"] for contestant, entry in cases[name].items()}
        print(f"{name}: seconds of the first call {first}", flush=True)
    floor = floors(inputs, sizes, arguments)
    seconds = time_all(entrants, inputs, floor, arguments)
    inputs.clear_gradients()
    for name, entries in cases.items():
        add_times(name, entries, seconds, floor)
        entries["stillhouse"]["chunk_tokens"] = chunk_tokens(name, inputs)
    memory = {} if "memory" in arguments.skip else measure_memory(cases, sizes, arguments)
    compiled = "first_call" not in arguments.skip and device.type == "cpu"
    result = {
        "sizes": vars(arguments) | {"peers": peer_versions()},
        "floor": floor,
        "cases": cases,
        "absent": absent,
        "memory_over_tokens": memory,
        "first_call": measure_first_call(arguments.cases, sizes, arguments.threads) if compiled else {},
    }
    return result | {"aims": aims(result, on_cpu=device.type == "cpu")}


def first_calls(losses: dict[str, Loss], inputs: Inputs, absent: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the seconds of each contestant's first call in a case, and its distance from ours, which runs first.

    A contestant that needs more memory than the device has moves from `losses` to `absent`.
    """
    entries: dict[str, dict[str, Any]] = {}
    ours: list[Tensor] = []
    for name, loss in list(losses.items()):
        try:
            seconds, value = timed(partial(run_pass, loss, inputs), inputs.weight_VD.device)
        except torch.OutOfMemoryError as error:
            absent[name] = str(error)
            del losses[name]
            inputs.clear_gradients()
            continue
        values = [value, *inputs.gradients()]
        ours = ours or values
        distances = [relative_distance(value, expected) for value, expected in zip(values, ours, strict=True)]
        entries[name] = {
            "first_call_seconds": round(seconds, 4),
            "distance": dict(zip(("loss", "hidden_grad", "weight_grad"), distances, strict=True)),
        }
    return entries


def chunk_tokens(case: str, inputs: Inputs) -> float:
    """Return the number of rows of a tile that our pass chose."""
    return float(stillhouse_output(CASES[case], inputs).metrics["chunk_tokens"])


def time_all(
    entrants: dict[str, dict[str, Loss]], inputs: Inputs, floor: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds per round of `case/contestant` and of `case/floor`, which runs next to ours."""
    fastest = {kind: products(inputs, kind, *floor[kind]["fastest"]) for kind in FLOORS}
    tasks: dict[str, Callable[[], Any]] = {}
    for case, losses in entrants.items():
        tasks[f"{case}/floor"] = fastest[floor_kind(case)]
        tasks |= {f"{case}/{name}": partial(run_pass, loss, inputs) for name, loss in losses.items()}
    device = inputs.weight_VD.device
    seconds = take_turns(tasks, arguments.peer_rounds, device)
    ours = {name: work for name, work in tasks.items() if name.endswith(("/floor", "/stillhouse"))}
    for name, more in take_turns(ours, arguments.rounds - arguments.peer_rounds, device).items():
        seconds[name] += more
    return seconds


def products(inputs: Inputs, kind: str, rows: int, panel: int) -> Products:
    return Products(inputs, rows, teacher=kind == "floor", panel=panel)


def floor_kind(case: str) -> str:
    return "floor" if CASES[case].dense_teacher else "student_floor"


def square_operands(arguments: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    side = square_side(arguments)
    left, right = (torch.randn(side, side, device=device, dtype=DTYPES[arguments.dtype]) for _ in range(2))
    return left, right


def square_side(arguments: argparse.Namespace) -> int:
    return arguments.square or (8192 if arguments.device.startswith("cuda") else 4096)


def floors(inputs: Inputs, sizes: Sizes, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the floors with and without the teacher: fastest chunk and panel, all seconds, and time by flops."""
    device = inputs.weight_VD.device
    ways = list(product(arguments.floor_rows, arguments.floor_panels))
    tasks: dict[str, Callable[[], Any]] = {"square": partial(torch.mm, *square_operands(arguments, device))}
    tasks |= {f"{kind}/{way}": products(inputs, kind, *way) for kind in FLOORS for way in ways}
    for work in tasks.values():
        work()
    seconds = take_turns(tasks, arguments.floor_rounds, device)
    rate = 2 * square_side(arguments) ** 3 / statistics.median(seconds["square"])
    result: dict[str, Any] = {"matrix_rate_gflops": round(rate / 1e9, 1)}
    if arguments.dtype != "fp32":
        result["addmm_adds_to_float32"] = adds_half_products(device)
    for kind in FLOORS:
        fastest = min(ways, key=lambda way: statistics.median(seconds[f"{kind}/{way}"]))
        result[kind] = {
            "fastest": fastest,
            "rows_panel": [[*way, spread(seconds[f"{kind}/{way}"])] for way in ways],
            "by_flops": sizes.product_flops(teacher=kind == "floor") / rate,
        }
    return result


def spread(seconds: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "rounds": seconds}


def add_times(
    case: str, entries: dict[str, dict[str, Any]], seconds: dict[str, list[float]], floor: dict[str, Any]
) -> None:
    """Add the seconds, and their ratios in each round to the floor, to the floor by flops, and to ours."""
    at_floor, ours = seconds[f"{case}/floor"], seconds[f"{case}/stillhouse"]
    for name, entry in entries.items():
        contestant = seconds[f"{case}/{name}"]
        entry["seconds"] = spread(contestant)
        entry["over_floor"] = median_ratio(contestant, at_floor)
        entry["over_floor_rounds"] = [one / other for one, other in zip(contestant, at_floor, strict=False)]
        entry["over_floor_of_minima"] = min(contestant) / min(at_floor)
        entry["over_floor_by_flops"] = statistics.median(contestant) / floor[floor_kind(case)]["by_flops"]
        entry["over_ours"] = median_ratio(contestant, ours)
        entry["over_ours_of_minima"] = min(contestant) / min(ours)
    entries["stillhouse"]["floor_seconds"] = spread(at_floor)


def median_ratio(these: list[float], those: list[float]) -> float:
    """Return the median ratio of two contestants over the first rounds, in which both took part."""
    return statistics.median(one / other for one, other in zip(these, those, strict=False))


def measure_memory(cases: dict[str, dict[str, Any]], sizes: Sizes, arguments: argparse.Namespace) -> dict[int, int]:
    """Add the contestants' peak extra bytes to their entries. Return ours over T, for the case that needs most."""
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    for case, entries in cases.items():
        for name, entry in entries.items():
            entry["extra_bytes"] = extra_bytes(case, name, sizes, device, dtype)
    most = max(cases, key=lambda case: cases[case]["stillhouse"]["extra_bytes"])
    over_tokens = {}
    for tokens in arguments.memory_tokens:
        at = Sizes(tokens, sizes.width, sizes.teacher_width, sizes.vocabulary)
        over_tokens[tokens] = extra_bytes(most, "stillhouse", at, device, dtype)
    return over_tokens


def measure_first_call(cases: list[str], sizes: Sizes, threads: int) -> dict[str, Any]:
    """Time our first call in new processes: without compiled code on disk, then also without a C++ compiler."""
    results = {}
    for name, compiler in (("cold", {}), ("no_compiler", {"CXX": "no-such-compiler"})):
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCH_EXTENSIONS_DIR": folder}
            results[name] = in_fresh_process(call_twice, cases, sizes, threads, environment=caches | compiler)
    losses = {name: [entry["loss"] for entry in result["cases"].values()] for name, result in results.items()}
    pairs = zip(losses["cold"], losses["no_compiler"], strict=True)
    _, largest = worst(enumerate(abs(there / here - 1) for here, there in pairs))
    return results | {"largest_difference_of_loss": largest}


def call_twice(cases: list[str], sizes: Sizes, threads: int) -> dict[str, Any]:
    """Return the seconds of the first and second call of each case, its loss, and the warnings."""
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    inputs = make_inputs(sizes, cpu, torch.float32)
    entries = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for case in cases:
            loss = contestants(CASES[case], cpu)[0]["stillhouse"]
            (first, value), (second, _) = (timed(partial(run_pass, loss, inputs), cpu) for _ in range(2))
            entries[case] = {"first_seconds": first, "second_seconds": second, "loss": float(value)}
    return {"cases": entries, "warnings": [str(warning.message) for warning in caught]}


def peer_versions() -> dict[str, str | None]:
    return {name: installed_version(name) for name in ("trl", "liger-kernel", "triton", "accelerate")}


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def print_result(result: dict[str, Any]) -> None:
    print(f"rate of a square product: {result['floor']['matrix_rate_gflops'] / 1e3:.0f} TFLOP/s")
    for kind in FLOORS:
        floor = result["floor"][kind]
        rows, panel = floor["fastest"]
        seconds = min(entry["median"] for *_, entry in floor["rows_panel"])
        shape = f"chunks of {rows} and panels of {panel or 'all'} rows"
        print(f"{kind}: {seconds:.4f} s, fastest with {shape}; by flops {floor['by_flops']:.4f} s")
    same = SAME[result["sizes"]["dtype"]]
    rows = [
        row(case, name, entry, same) for case, entries in result["cases"].items() for name, entry in entries.items()
    ]
    print_table(COLUMNS, rows)
    print()
    print_table(["aim", "value", "wanted", "met"], [aim_row(aim) for aim in result["aims"]])


def row(case: str, name: str, entry: dict[str, Any], same: float) -> list[str]:
    seconds, distance = entry["seconds"], worst(entry["distance"].items())[1]
    return [
        case,
        name,
        f"{seconds['median']:.4f}",
        f"{seconds['min']:.4f}–{seconds['max']:.4f}",
        f"{entry['over_floor']:.2f}",
        f"{entry['over_floor_of_minima']:.2f}",
        f"{entry['over_ours']:.2f}",
        f"{entry['first_call_seconds']:.2f}",
        f"{entry['extra_bytes'] / MIB:.1f}" if "extra_bytes" in entry else "",
        f"{distance:.0e}" + ("" if distance <= same else "  NOT THE SAME"),
    ]


def aim_row(entry: dict[str, Any]) -> list[str]:
    bounds = [(">=", entry["at_least"]), ("<=", entry["at_most"])]
    wanted = " ".join(f"{sign} {bound:.3g}" for sign, bound in bounds if bound is not None)
    return [entry["aim"], f"{entry['value']:.3g}", wanted, "yes" if entry["met"] else "NO"]


def print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(cells[column]) for cells in [header, *rows]) for column in range(len(header))]
    for cells in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def save(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Save the result. If the package's other requirements are missing, print it instead."""
    kind = torch.device(arguments.device).type
    name = "objective" if kind == "cpu" else f"objective-{kind}-{arguments.vocabulary}"
    try:
        from benchmarks.record import result_file, write_result
    except ImportError as error:
        print(f"no header and no file: {error}", json.dumps(result), sep="\n")
        return
    write_result(result_file(name), {"theme": "objective"} | result, arguments.device)


if __name__ == "__main__":
    main()
