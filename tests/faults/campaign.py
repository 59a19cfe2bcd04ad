"""Campaigns of random faults: each trial causes one fault in a real run and starts what has ended again.

`chaos.py` and `chaos_rollouts.py` have the runs, the faults and the outcomes that are right.
"""

import argparse
import collections
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.ranks import Ranks
from kit.runs import contents, metrics

#: seconds after which a run of this size counts as hung
LIMIT = 150
#: size of a full disk after it was enlarged
DISK = 64_000_000
#: the values of the log that depend on time
TIMED = (
    "seconds",
    "speed/step_seconds",
    "speed/tokens_per_second",
    "speed/sampled_tokens_per_second",
    "speed/reward_seconds",
    "speed/waiting",
)


@dataclass(frozen=True)
class Trial:
    """One fault of a case, where it happened, and its outcome."""

    case: str
    fault: str
    where: str
    outcome: str
    message: str = ""


class Failed(Exception):
    """A run that hung or printed a traceback. outcome: which of them."""

    def __init__(self, outcome: str, text: str):
        super().__init__(text[-3000:])
        self.outcome = outcome


@dataclass
class Case(ABC):
    """A run with checkpoints. seconds: the duration of the undisturbed run in `folder/undisturbed`.

    faults: the names of its faults in the order of a campaign. steps, every: of the run and of its checkpoints.
    """

    name: str
    folder: Path
    processes: int
    faults: Sequence[str]
    steps: int
    every: int
    seconds: float = 0.0

    @property
    def undisturbed(self) -> Path:
        return self.folder / "undisturbed"

    def run_undisturbed(self) -> None:
        started = time.monotonic()
        ranks = self.start(self.undisturbed)
        assert ranks.wait(LIMIT) == [0] * self.processes, ranks.texts
        self.seconds = time.monotonic() - started

    def is_bit_equal(self, out: Path) -> bool:
        same_model = contents(out / "model") == contents(self.undisturbed / "model")
        return same_model and figures(out) == figures(self.undisturbed)

    @abstractmethod
    def start(self, out: Path) -> Ranks:
        """Start the run, or continue it."""

    @abstractmethod
    def end(self, fault: str, out: Path, ranks: Ranks, codes: list[int]) -> tuple[str, str]:
        """Start again what has ended. Return the outcome and a message. ranks, codes: of the disturbed run."""

    @abstractmethod
    def restore(self, out: Path) -> None:
        """Undo what a fault of the run in `out` has changed outside this folder."""

    @abstractmethod
    def close(self) -> None:
        """End what serves the run."""


#: causes a fault in a run that it starts; returns the run, and where the fault happened
Fault = Callable[[Any, Path, random.Random], tuple[Ranks, str]]


def figures(out: Path) -> list[dict[str, Any]]:
    """Return the log's record of each step, without the values that depend on time."""
    return [{key: value for key, value in line.items() if key not in TIMED} for line in metrics(out)]


def ended(ranks: Ranks) -> list[int]:
    """Return the exit codes. Raises Failed if a rank hangs or has printed a traceback."""
    try:
        codes = ranks.wait(LIMIT, grace=5)
    except AssertionError as error:
        raise Failed("hung", str(error)) from error
    if "Traceback" in ranks.err:
        raise Failed("traceback", ranks.err)
    return codes


def log_lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_moment(case: Case, ranks: Ranks, out: Path, draw: random.Random) -> str:
    """Wait for a random moment: some time after the start, some milliseconds after a step, or within a save."""
    kind, end = draw.choice(["time", "step", "save"]), time.monotonic() + LIMIT
    line, more, delay = draw.randrange(case.steps + 4), draw.uniform(0, 0.3), draw.uniform(0, 1.2 * case.seconds)
    saves, seen = draw.randrange(1, case.steps // case.every + 1), set[str]()

    def reached() -> bool:
        if kind == "time":
            return time.monotonic() - started >= delay
        if kind == "step":
            return log_lines(out) >= line
        seen.update(path.name for path in (out / "checkpoints").glob("*.partial"))
        return len(seen) >= saves

    started = time.monotonic()
    while not reached() and time.monotonic() < end and all(rank.process.exitcode is None for rank in ranks):
        time.sleep(0.002)
    if kind == "step":
        time.sleep(more)
    where = {"time": f"after {delay:.1f} s", "step": f"{1000 * more:.0f} ms after line {line}"}
    return where.get(kind, f"in save {saves}")


def full_disk(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    """Run on a disk that is probably too small; enlarge the disk before the run is started again."""
    needed = sum(len(content) for content in contents(case.undisturbed).values())
    size = int(draw.uniform(0.02, 1.1) * needed)
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(out)], check=True)
    ranks = case.start(out)
    ended(ranks)
    subprocess.run(["mount", "-o", f"remount,size={DISK}", str(out)], check=True)
    return ranks, f"{size:,} bytes"


def possible(faults: Sequence[str]) -> list[str]:
    """Return the faults that this user can cause: only root may mount a small disk."""
    return [fault for fault in faults if fault != "full disk" or os.geteuid() == 0]


def attempt(case: Case, faults: dict[str, Fault], fault: str, out: Path, draw: random.Random) -> Trial:
    """Cause one fault, and start what has ended again."""
    where = ""
    try:
        ranks, where = faults[fault](case, out, draw)
        codes = ended(ranks)
        where += f", exit codes {codes}"
        outcome, message = case.end(fault, out, ranks, codes)
    except Failed as error:
        outcome, message = error.outcome, str(error)
    finally:
        case.restore(out)
        if os.path.ismount(out):
            subprocess.run(["umount", "-l", str(out)], check=True)
        shutil.rmtree(out, ignore_errors=True)
    return Trial(case.name, fault, where, outcome, message.replace(str(case.folder), "…"))


@dataclass(frozen=True)
class Campaign:
    """prepare: makes a case by its name in a folder. faults: by name. good: the outcomes that are right."""

    prepare: Callable[[str, Path], Case]
    faults: dict[str, Fault]
    good: tuple[str, ...]

    def run(
        self,
        count: int,
        seed: int,
        names: Sequence[str],
        root: Path,
        minutes: float = math.inf,
        only: Sequence[str] = (),
    ) -> list[Trial]:
        """Try `count` faults, of each case in turn all of its faults or those in `only`; none after `minutes`."""
        draw, end = random.Random(seed), time.monotonic() + 60 * minutes
        trials: list[Trial] = []
        for place, name in enumerate(names):
            if time.monotonic() > end:
                break
            case = self.prepare(name, root)
            try:
                for number in range(place, count, len(names)):
                    faults = [fault for fault in case.faults if fault in only] or case.faults
                    fault = faults[(number // len(names) + place) % len(faults)]
                    out = case.folder / f"out-{number}"
                    trials.append(attempt(case, self.faults, fault, out, random.Random(draw.random())))
                    self.show(trials, count)
                    if time.monotonic() > end:
                        break
            finally:
                case.close()
        return trials

    def show(self, trials: list[Trial], count: int) -> None:
        last = trials[-1]
        print(f"{len(trials)}/{count} {last.case}: {last.fault} ({last.where}): {last.outcome}", flush=True)
        if last.outcome not in self.good:
            print(last.message, flush=True)

    def command(self, names: Sequence[str], *, plural: str, count: int, about: str) -> None:
        """The command of a campaign over named cases; ends with code 1 if an outcome is not good."""
        parser = argparse.ArgumentParser(description=about.partition("\n")[0])
        parser.add_argument("--faults", type=int, default=count)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--minutes", type=float, default=math.inf, help="start no trial after this many minutes")
        parser.add_argument("--only", nargs="*", default=(), choices=sorted(self.faults), help="faults to try")
        parser.add_argument(f"--{plural}", dest="names", nargs="*", default=names, choices=names)
        parser.add_argument("--out", type=Path, help="result file (JSON)")
        arguments = parser.parse_args()
        started, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="stillhouse-chaos-"))
        try:
            trials = self.run(
                arguments.faults, arguments.seed, arguments.names, root, arguments.minutes, arguments.only
            )
        finally:
            shutil.rmtree(root, ignore_errors=True)
        for fault, counts in table(trials, "fault").items():
            print(f"{fault:<18}" + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
        if arguments.out is not None:
            from record import write_result

            content = {
                "faults": len(trials),
                "seed": arguments.seed,
                "minutes": round((time.monotonic() - started) / 60, 1),
                "outcomes": dict(collections.Counter(trial.outcome for trial in trials)),
                "by_fault": table(trials, "fault"),
                f"by_{plural.removesuffix('s')}": table(trials, "case"),
                "trials": [asdict(trial) for trial in trials],
            }
            write_result(arguments.out, content)
        sys.exit(any(trial.outcome not in self.good for trial in trials))


def table(trials: list[Trial], by: str) -> dict[str, dict[str, int]]:
    """Count the outcomes of each kind of fault, or of each case."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for trial in trials:
        counts[getattr(trial, by)][trial.outcome] += 1
    return {key: dict(count) for key, count in counts.items()}
