"""The overhead of the training loop: tokens per second of a run, compared with the sum of its parts.

    python -m benchmarks.training --threads 2

The run is a real one, `train()` on a session; its times are read from its log. The parts are called separately on the
same micro-batches: teacher forward, student forward, objective with its gradient, student backward, clipped update.
Both take turns in one process, so that a change of the machine's speed affects both. The medians are compared.
Models are random; data are random tokens in full rows of several documents (benchmarks/random_session.py). On a GPU,
the result has the share of the device's peak that the run reaches, and its peak memory.
Writes benchmarks/results/training-<date>.json, on a GPU training-cuda-<date>.json.
"""

import argparse
import contextlib
import io
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_session import (
    add_arguments,
    flops,
    make_session,
    parameters,
    synchronize,
    utilization,
)
from benchmarks.record import result_file, write_result
from benchmarks.training_runs import metrics
from stillhouse.data import MicroBatch
from stillhouse.loops.off_policy import train
from stillhouse.loops.session import Session
from stillhouse.models import Decoder, evaluating
from stillhouse.objective import TEACHER, FullVocab, linear_objective
from stillhouse.output.folder import RunFolder, init_run_dir
from stillhouse.parallel.teacher_student_pair import model_inputs

#: more bytes than the checkpoints of all turns of a run
MOST_SAVED = 30 << 30
PARTS = ("teacher_forward", "student_forward", "objective", "student_backward", "optimizer")


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        session = make_session(arguments, Path(folder), arguments.steps + 1)
        result = measure(session, arguments)
    for key, value in result.items():
        print(f"{key}: {json.dumps(value)}")
    name = "training" if arguments.device == "cpu" else "training-cuda"
    name += f"-{arguments.attention}" if arguments.attention else ""
    name += "-compiled" if arguments.compile else ""
    name += "-deterministic" if arguments.deterministic else ""
    write_result(result_file(name), {"theme": "training"} | result, arguments.device)


def in_memory() -> str | None:
    """Return a folder in memory, if it has enough space: a run saves a checkpoint at its end, which takes time."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > MOST_SAVED else None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=2, help="measured in each turn, after one that is not")
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


def measure(session: Session, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let the run and the parts take turns. The first step of each turn is not counted."""
    tokens = session.schedule.train_config.tokens_per_step
    run_seconds: list[float] = []
    part_seconds: list[dict[str, float]] = []
    for turn in range(arguments.turns):
        part_seconds += itertools.islice(steps_by_hand(session), 1, arguments.steps + 1)
        print(json.dumps({part: round(seconds, 4) for part, seconds in part_seconds[-1].items()}), flush=True)
        if session.models.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(session.models.device)
        run_seconds += steps_of_a_run(session, turn)
    parts = {part: statistics.median(seconds[part] for seconds in part_seconds) for part in PARTS}
    by_hand = statistics.median(sum(seconds.values()) for seconds in part_seconds)
    run, operations, device = statistics.median(run_seconds), flops(session, arguments), session.models.device
    return {
        "ratio": round(by_hand / run, 4),
        "run_tokens_per_second": round(tokens / run, 1),
        "parts_tokens_per_second": round(tokens / by_hand, 1),
        "run_step_seconds": [round(second, 4) for second in run_seconds],
        "parts_step_seconds": [round(sum(second.values()), 4) for second in part_seconds],
        "median_part_seconds": {part: round(seconds, 4) for part, seconds in parts.items()},
        "teraflops_of_a_step": round(operations / 1e12, 3),
        "utilization": utilization(operations, run, device),
        "utilization_of_parts": utilization(operations, by_hand, device),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
        if device.type == "cuda"
        else None,
        "sizes": vars(arguments)
        | {
            "student_parameters": parameters(session.models.student),
            "teacher_parameters": parameters(teacher_of(session)),
        },
    }


def steps_of_a_run(session: Session, turn: int) -> list[float]:
    """Return the seconds between consecutive lines of the run's log."""
    folder = RunFolder(Path(str(session.values["out"])) / str(turn))
    init_run_dir(folder, "")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train(session, folder)
    return [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(metrics(folder.path))]


def steps_by_hand(session: Session) -> Iterator[dict[str, float]]:
    """Time each part of the same steps separately, on micro-batches that have been built before."""
    for step in range(session.schedule.step_schedule.steps):
        micro_batches = session.models.shard(session.schedule.step_schedule.micro_batches(session.data.train, step))
        seconds = dict.fromkeys(PARTS, 0.0)
        for batch in micro_batches:
            micro_batch_by_hand(session, batch, micro_batches.all_ranks.normalizer, seconds)

        def update() -> None:
            session.models.engine.update(1e-5)

        timed(session, seconds, "optimizer", update)
        yield seconds


def micro_batch_by_hand(session: Session, batch: MicroBatch, normalizer: int, seconds: dict[str, float]) -> None:
    inputs, teacher = model_inputs(batch, None), teacher_of(session)

    def teacher_forward() -> FullVocab:
        with torch.no_grad(), evaluating(teacher):
            return FullVocab(teacher(**inputs, head=False).flatten(0, 1), teacher.output_head())

    def student_forward() -> torch.Tensor:
        with autocast(session):
            hidden: torch.Tensor = session.models.student(**inputs, head=False)
        return hidden

    signal = timed(session, seconds, "teacher_forward", teacher_forward)
    hidden = timed(session, seconds, "student_forward", student_forward)
    leaf_TD = hidden.detach().flatten(0, 1).requires_grad_()

    def objective() -> None:
        terms = session.loss.spec.terms(batch.labels_T, {TEACHER: signal})
        weights = {"weights_T": batch.weights_T, "valid_index": batch.valid_index}
        with autocast(session):
            output = linear_objective(
                leaf_TD, session.models.student.output_head(), terms, normalizer=normalizer, **weights
            )
        output.loss.backward()

    timed(session, seconds, "objective", objective)
    assert leaf_TD.grad is not None
    gradient = leaf_TD.grad.view_as(hidden)
    timed(session, seconds, "student_backward", lambda: hidden.backward(gradient))


def autocast(session: Session) -> torch.autocast:
    enabled = session.schedule.train_config.precision == "bf16"
    return torch.autocast(session.models.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def timed(session: Session, seconds: dict[str, float], part: str, work: Callable[[], Any]) -> Any:
    synchronize(session.models.device)
    started = time.perf_counter()
    result = work()
    synchronize(session.models.device)
    seconds[part] += time.perf_counter() - started
    return result


def teacher_of(session: Session) -> Decoder:
    assert session.models.teacher is not None
    return session.models.teacher


if __name__ == "__main__":
    main()
