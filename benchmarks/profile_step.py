"""Profiles one training step: kernels by their time, launches and waits for the device by their place in the code.

    python -m benchmarks.profile_step --device cuda --precision bf16 --student 1024 28 --teacher 4096 36

The step is that of the training loop, after steps that compile everything. One more step runs with CUDA's debug mode
for synchronization, which warns at each call that waits for the device; the result lists the places of these calls.
Two more steps are timed without the profiler, since the profiler makes a step slower.
Writes benchmarks/results/profile-<date>.txt, and the trace as profile-<date>.trace.json.gz if it is small.
"""

import argparse
import itertools
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.random_session import (
    add_arguments,
    flops,
    make_session,
    request_plan,
    synchronize,
    utilization,
)
from benchmarks.record import header, result_file
from stillhouse.loops.session import Session
from stillhouse.plan.layout_plan import Plan
from stillhouse.signals import RequestedSteps

KERNELS, PLACES, CALLS = 40, 20, 20
LARGEST_TRACE = 10 << 20
#: steps that are not profiled: two that compile, two that are timed, one that lists the waits
WARM_UP, TIMED = 2, 2
#: kinds of kernels by parts of their names, in this order
KINDS = {
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk"),
    "attention": ("fmha", "flash", "attention"),
    "compiled": ("triton",),
    "optimizer and clipping": ("multi_tensor",),
    "copies": ("memcpy", "copy"),
    "memset": ("memset",),
    "sums": ("reduce",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        planned = request_plan(arguments, Path(folder))
        session = make_session(arguments, Path(folder), WARM_UP + TIMED + 2)
        sections = measure(session, arguments)
        sections[-1] += plan_lines(planned)
    path = result_file("profile").with_suffix(".txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    values = header(torch.device(arguments.device)) | vars(arguments)
    first = [f"{key}: {value}" for key, value in values.items()]
    path.write_text(
        "\n".join([*first, *(line for lines in sections for line in ["", *lines])]) + "\n", encoding="utf-8"
    )
    # what somebody needs who sees only the last lines of the output
    waits, kernels, _calls, summary = sections
    print(*waits[:6], *kernels[1:9], *summary, path, sep="\n")


def measure(session: Session, arguments: argparse.Namespace) -> list[list[str]]:
    """Return the sections of the result, each a list of lines."""
    device, steps = session.models.device, training_steps(session)
    seconds = [timed_step(steps, device) for _ in range(WARM_UP + TIMED)]
    print(f"seconds of the first steps: {', '.join(f'{second:.3f}' for second in seconds)}", flush=True)
    with waits_for_device(device) as waits:
        next(steps)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        profiled = timed_step(steps, device)
    save_trace(profiler)
    averages = profiler.key_averages()
    kernels = [entry for entry in averages if entry.device_type == DeviceType.CUDA]
    busy, best = sum(entry.self_device_time_total for entry in kernels) / 1e6, min(seconds[WARM_UP:])
    operations = flops(session, arguments)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    summary = [
        f"attention: student {session.models.student.config._attn_implementation}, "
        f"teacher {session.models.teacher and session.models.teacher.config._attn_implementation}",
        f"step: {best * 1e3:.1f} ms ({profiled * 1e3:.1f} ms with the profiler), {operations / 1e12:.2f} TFLOP, "
        f"share of the peak {utilization(operations, best, device)}, peak memory {peak:.2f} GiB",
        f"device busy {busy * 1e3:.1f} ms; kernels: {sum(entry.count for entry in kernels)}; "
        f"{session.schedule.train_config.tokens_per_step / best:.0f} tokens per second",
        " | ".join(f"{kind} {spent / 1e3:.1f} ms" for kind, spent in by_kind(kernels).most_common()),
    ]
    return [wait_lines(waits), kernel_lines(kernels or list(averages)), call_lines(averages), summary]


def training_steps(session: Session) -> Iterator[None]:
    """Run a step of the training loop at each request."""
    engine, schedule = session.models.engine, session.schedule.step_schedule
    sharded = (
        session.models.shard(schedule.micro_batches(session.data.train, step)) for step in range(schedule.steps)
    )
    requests = RequestedSteps(session.models.source_for(engine), sharded)
    for micro_batches, signals in requests:
        output = engine.forward_backward(micro_batches, signals.result(), micro_batches.all_ranks.normalizer)
        requests.build_next()
        engine.update(1e-5, output)
        assert output.sums["tokens"] > 0
        yield


def timed_step(steps: Iterator[None], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    next(steps)
    synchronize(device)
    return time.perf_counter() - started


@contextmanager
def waits_for_device(device: torch.device) -> Iterator[Counter[str]]:
    """Count the calls that wait for the device, by their innermost places in this project and in transformers."""
    places: Counter[str] = Counter()

    def show(message: Any, *_: Any, **__: Any) -> None:
        # not torch's notice about the mode, which has the word "synchronizing", too
        if "called a synchronizing" in str(message):
            frames = [frame for frame in traceback.extract_stack() if is_shown(frame.filename)]
            short = [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}" for frame in frames]
            places[" < ".join(itertools.islice(reversed(short), 3)) or "outside of Python"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def is_shown(filename: str) -> bool:
    folders = Path(filename).parts
    return ("stillhouse" in folders or "transformers" in folders) and "benchmarks" not in folders


def save_trace(profiler: profile) -> None:
    path = result_file("profile").with_suffix(".trace.json.gz")
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    if path.stat().st_size > LARGEST_TRACE:
        print(f"the trace has {path.stat().st_size >> 20} MiB and is not kept")
        path.unlink()


def plan_lines(planned: "Future[Plan] | None") -> list[str]:
    if planned is None:
        return []
    largest, prediction = planned.result().largest, planned.result().prediction
    return [
        f"plan of this step: peak memory {largest.memory / 2**30:.2f} GiB, {prediction.seconds * 1e3:.1f} ms, "
        f"{largest.kernels} kernels, {sum(largest.waits.values())} waits for the device"
    ]


def wait_lines(waits: Counter[str]) -> list[str]:
    lines = [f"{count:6}  {place}" for place, count in waits.most_common(PLACES)]
    return [f"calls that wait for the device in a step: {sum(waits.values())}", *lines]


def kernel_lines(entries: list[Any]) -> list[str]:
    """The entries with the most time of their own, on the device or, without one, on the CPU."""
    on_device = any(entry.self_device_time_total for entry in entries)

    def spent(entry: Any) -> float:
        return entry.self_device_time_total if on_device else entry.self_cpu_time_total

    total = sum(map(spent, entries)) or 1.0
    lines = [
        f"{spent(entry) / 1e3:9.2f} ms {100 * spent(entry) / total:5.1f} % {entry.count:6}  {entry.key[:120]}"
        for entry in sorted(entries, key=spent, reverse=True)[:KERNELS]
    ]
    return [f"kernels by time ({total / 1e3:.1f} ms in all), with the number of their launches", *lines]


def call_lines(averages: Any) -> list[str]:
    """The calls of CUDA's runtime and driver by their number, with the CPU's time."""
    calls = [entry for entry in averages if entry.device_type == DeviceType.CPU and entry.key.startswith("cu")]
    lines = [
        f"{entry.count:7}  {entry.self_cpu_time_total / 1e3:9.2f} ms  {entry.key}"
        for entry in sorted(calls, key=lambda entry: entry.count, reverse=True)[:CALLS]
    ]
    return ["calls of CUDA in a step, with their time on the CPU", *lines]


def by_kind(kernels: list[Any]) -> Counter[str]:
    """Return the microseconds of each kind of kernel."""
    spent: Counter[str] = Counter()
    for entry in kernels:
        name = entry.key.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "elementwise")
        spent[kind] += entry.self_device_time_total
    return spent


if __name__ == "__main__":
    main()
