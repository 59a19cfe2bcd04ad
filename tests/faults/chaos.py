"""A campaign of random faults. After each fault, the run ends bit-equal to an undisturbed run, or an error names it.

    make chaos

The campaign starts small real runs in one process, under fsdp, tensor, pipeline and context parallelism, and with a
LoRA. During a run, one rank or all ranks are killed, stopped or asked to end, or the disk becomes full. In other
trials the run is killed at a random moment; then a file of its folder is damaged, deleted, cut or replaced by one of
an older checkpoint, or a model is replaced. After the fault, the same command is started again.
"""

import argparse
import collections
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.ranks import Ranks
from kit.runs import contents, metrics, save_model, write_run

STEPS, EVERY = 12, 3
#: LIMIT: seconds after which a run of this size counts as hung. TIMEOUT: seconds in which a rank must answer
LIMIT, TIMEOUT = 150, 6
DISK = 64_000_000
#: the text of an error after which the run resumes from the previous checkpoint; it must end bit-equal, too
FALLBACK = "checkpoint.fallback=true"


@dataclass(frozen=True)
class Layout:
    processes: int
    overrides: tuple[str, ...] = ()
    adapter: bool = False


LAYOUTS = {
    "one process": Layout(1),
    "fsdp 2": Layout(2, ("parallel.fsdp=2",)),
    "tensor 2": Layout(2, ("parallel.tensor=2",)),
    "pipeline 2": Layout(2, ("parallel.pipeline=2",)),
    "context 2": Layout(2, ("parallel.context=2",)),
    "LoRA, fsdp 2": Layout(2, ("parallel.fsdp=2",), adapter=True),
}


@dataclass(frozen=True)
class Trial:
    """One fault and its outcome, one of `OUTCOMES`."""

    layout: str
    fault: str
    where: str
    outcome: str
    message: str = ""


#: "bit-equal" and "refused" are right; after a fault that damages no file, only "bit-equal" is right
OUTCOMES = ("bit-equal", "refused", "silent", "traceback", "hung", "not resumed")
GOOD = OUTCOMES[:2]


class Hung(Exception):
    """A job that did not end."""


def at_once() -> None:
    """Let every rank print its error at once, without waiting for rank 0."""
    from stillhouse import cli

    cli.SECONDS_FOR_FIRST = 0.0


@dataclass(frozen=True)
class Case:
    """A layout's configuration, the results of an undisturbed run, and its duration."""

    name: str
    layout: Layout
    folder: Path
    model: dict[str, bytes]
    figures: list[dict[str, Any]]
    seconds: float

    def start(self, out: Path, *overrides: str) -> Ranks:
        arguments = ["distill", self.folder / "run.yaml", f"out={out}", *self.layout.overrides, *overrides]
        return Ranks(self.layout.processes, *arguments, hook=at_once)

    def is_undisturbed(self, out: Path) -> bool:
        return contents(out / "model") == self.model and figures(out) == self.figures


def prepare(name: str, root: Path) -> Case:
    layout, folder = LAYOUTS[name], root / name.replace(",", "").replace(" ", "-")
    folder.mkdir()
    adapter = {"student.adapter": {"r": 4, "dropout": 0.1}} if layout.adapter else {}
    settings = {"train.steps": STEPS, "checkpoint.every": EVERY, "checkpoint.keep": 3, "train.timeout": TIMEOUT}
    write_run(folder, family="gpt2" if layout.processes == 1 else "llama", **settings, **adapter)
    case = Case(name, layout, folder, {}, [], 0.0)
    started, out = time.monotonic(), folder / "undisturbed"
    ranks = case.start(out)
    assert ranks.wait(LIMIT) == [0] * layout.processes, ranks.texts
    return Case(name, layout, folder, contents(out / "model"), figures(out), time.monotonic() - started)


def figures(out: Path) -> list[dict[str, Any]]:
    """Return the log's record of each step, without the values that depend on time."""
    clock = ("seconds", "speed/tokens_per_second")
    return [{key: value for key, value in line.items() if key not in clock} for line in metrics(out)]


def ended(ranks: Ranks) -> list[int]:
    try:
        return ranks.wait(LIMIT, grace=5)
    except AssertionError as error:
        raise Hung(str(error)) from error


def log_lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_moment(case: Case, ranks: Ranks, out: Path, draw: random.Random) -> str:
    """Wait for a random moment: some time after the start, after a step, or within a save."""
    kind, end = draw.choice(["time", "step", "save"]), time.monotonic() + LIMIT
    line, delay = draw.randrange(1, STEPS + 4), draw.uniform(0, 1.2 * case.seconds)
    saves, seen = draw.randrange(1, STEPS // EVERY + 1), set[str]()

    def reached() -> bool:
        if kind == "time":
            return time.monotonic() - started >= delay
        if kind == "step":
            return log_lines(out) >= line
        seen.update(path.name for path in (out / "checkpoints").glob("*.partial"))
        return len(seen) >= saves

    started = time.monotonic()
    while not reached() and time.monotonic() < end:
        if all(command.process.exitcode is not None for command in ranks):
            break
        time.sleep(0.002)
    return {"time": f"after {delay:.1f} s", "step": f"at line {line}", "save": f"in save {saves}"}[kind]


Fault = Callable[[Case, Path, random.Random], str]

# faults during a run: each function returns where the fault happened, after the job has ended


def send(case: Case, out: Path, draw: random.Random, number: signal.Signals, everyone: bool) -> str:
    ranks = case.start(out)
    where = wait_for_moment(case, ranks, out, draw)
    rank = None if everyone else draw.randrange(case.layout.processes)
    ranks.send(number, rank)
    codes = ended(ranks)
    require_no_traceback(ranks)
    return f"{where}, {'all ranks' if rank is None else f'rank {rank}'}, exit codes {codes}"


def kill_one(case: Case, out: Path, draw: random.Random) -> str:
    return send(case, out, draw, signal.SIGKILL, everyone=False)


def kill_all(case: Case, out: Path, draw: random.Random) -> str:
    return send(case, out, draw, signal.SIGKILL, everyone=True)


def stop_one(case: Case, out: Path, draw: random.Random) -> str:
    """Stop one rank, so that it hangs until it is killed, as a launcher does after the other ranks have ended.

    If all other ranks end with exit code 0, they needed nothing more from this rank and the run is complete. The rank
    is then continued.
    """
    ranks = case.start(out)
    where = wait_for_moment(case, ranks, out, draw)
    rank = draw.randrange(case.layout.processes)
    ranks.send(signal.SIGSTOP, rank)
    if case.layout.processes == 1:
        ranks.send(signal.SIGKILL, rank)
    others, end = [process.process for process in ranks if process is not ranks[rank]], time.monotonic() + LIMIT
    while time.monotonic() < end and {other.exitcode for other in others} <= {None, 0}:
        if all(other.exitcode == 0 for other in others):
            ranks.send(signal.SIGCONT, rank)
            break
        time.sleep(0.05)
    codes = ended(ranks)
    require_no_traceback(ranks)
    return f"{where}, rank {rank}, exit codes {codes}"


def terminate_one(case: Case, out: Path, draw: random.Random) -> str:
    return send(case, out, draw, signal.SIGTERM, everyone=False)


def terminate_all(case: Case, out: Path, draw: random.Random) -> str:
    return send(case, out, draw, draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]), everyone=True)


def full_disk(case: Case, out: Path, draw: random.Random) -> str:
    """Run on a disk that is probably too small; enlarge the disk before the run is started again."""
    whole = sum(len(content) for content in contents(case.folder / "undisturbed").values())
    size = int(draw.uniform(0.02, 1.1) * whole)
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(out)], check=True)
    ranks = case.start(out)
    codes = ended(ranks)
    require_no_traceback(ranks)
    subprocess.run(["mount", "-o", f"remount,size={DISK}", str(out)], check=True)
    return f"{size:,} bytes, exit codes {codes}"


# faults in the folder of a killed run: each function returns what it changed


def interrupted(case: Case, out: Path, draw: random.Random, saves: int = 1) -> None:
    """Kill a run after at least `saves` checkpoints and before its end."""
    line = draw.randrange((EVERY + 1) * saves + 2, STEPS + 3)
    ranks, end = case.start(out), time.monotonic() + LIMIT
    while log_lines(out) < line and time.monotonic() < end:
        time.sleep(0.002)
    ranks.send(signal.SIGKILL)
    ended(ranks)


def any_file(out: Path, draw: random.Random) -> Path:
    """Choose a file at random; in most cases it is one that the run reads when it resumes."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.stat().st_size]
    newest = max(path for path in (out / "checkpoints").iterdir() if path.suffix == "")
    read = [*(newest / "resume").iterdir(), newest / "state.json", out / "metrics.jsonl", out / "config.yaml"]
    return draw.choice(sorted(read) if draw.random() < 0.6 else files)


def flip_a_byte(case: Case, out: Path, draw: random.Random) -> str:
    interrupted(case, out, draw)
    path = any_file(out, draw)
    raw = bytearray(path.read_bytes())
    place = draw.randrange(len(raw))
    raw[place] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)
    return f"byte {place} of {path.relative_to(out)}"


def delete_a_file(case: Case, out: Path, draw: random.Random) -> str:
    interrupted(case, out, draw)
    path = any_file(out, draw)
    path.unlink()
    return str(path.relative_to(out))


def cut_a_file(case: Case, out: Path, draw: random.Random) -> str:
    interrupted(case, out, draw)
    path = any_file(out, draw)
    raw = path.read_bytes()
    path.write_bytes(raw[: draw.randrange(len(raw))])
    return str(path.relative_to(out))


def stale_file(case: Case, out: Path, draw: random.Random) -> str:
    """Replace a file of the newest checkpoint by that of an older one."""
    interrupted(case, out, draw, saves=2)
    every = sorted(path for path in (out / "checkpoints").iterdir() if path.suffix == "")
    older, newest = every[0], every[-1]
    path = draw.choice([path for path in sorted(older.rglob("*")) if path.is_file()])
    shutil.copy(path, newest / path.relative_to(older))
    return f"{path.relative_to(out)} into {newest.name}"


def replaced_model(case: Case, out: Path, draw: random.Random) -> str:
    interrupted(case, out, draw)
    which = draw.choice(["student", "teacher"])
    family = json.loads((case.folder / which / "config.json").read_text())["model_type"]
    (case.folder / which).rename(case.folder / f"{which}.kept")
    save_model(case.folder / which, family, seed=draw.randrange(10, 10**6))
    return which


DURING = [kill_one, kill_all, stop_one, terminate_one, terminate_all, full_disk]
AFTER = [flip_a_byte, delete_a_file, cut_a_file, stale_file, replaced_model]


class Traceback(Exception):
    """A rank of the run has printed a traceback."""


def require_no_traceback(ranks: Ranks) -> None:
    if "Traceback" in ranks.err:
        raise Traceback(ranks.err[-3000:])


def attempt(case: Case, fault: Fault, out: Path, draw: random.Random) -> Trial:
    """Cause one fault, and run the same command again."""
    name, where = fault.__name__.replace("_", " "), ""
    try:
        where = fault(case, out, draw)
        again = case.start(out)
        codes = ended(again)
        require_no_traceback(again)
        first = again[0].err.strip()
        if codes == [0] * len(codes):
            outcome = "bit-equal" if case.is_undisturbed(out) else "silent"
        elif fault in DURING or not set(codes) <= {1, 2} or not first.startswith("error: ") or "\n" in first:
            outcome = "not resumed"
        elif FALLBACK in first:
            codes = ended(case.start(out, FALLBACK))
            outcome = "refused" if codes == [0] * len(codes) and case.is_undisturbed(out) else "not resumed"
        else:
            outcome = "refused"
        return Trial(case.name, name, where, outcome, first.replace(str(case.folder), "…"))
    except Hung as error:
        return Trial(case.name, name, where, "hung", str(error)[-3000:])
    except Traceback as error:
        return Trial(case.name, name, where, "traceback", str(error))
    finally:
        for which in ("student", "teacher"):
            if (kept := case.folder / f"{which}.kept").exists():
                shutil.rmtree(case.folder / which)
                kept.rename(case.folder / which)
        if os.path.ismount(out):
            subprocess.run(["umount", "-l", str(out)], check=True)
        shutil.rmtree(out, ignore_errors=True)


def campaign(faults: int, seed: int, layouts: list[str], root: Path, minutes: float) -> list[Trial]:
    """Try every fault under every layout in turn, as often as `minutes` allow."""
    draw, end = random.Random(seed), time.monotonic() + 60 * minutes
    cases = [prepare(name, root) for name in layouts]
    kinds = [fault for fault in DURING + AFTER if fault is not full_disk or os.geteuid() == 0]
    trials: list[Trial] = []
    for number in range(faults):
        if time.monotonic() > end:
            break
        case, fault = cases[number % len(cases)], kinds[number // len(cases) % len(kinds)]
        trial = attempt(case, fault, case.folder / f"out-{number}", random.Random(draw.random()))
        trials.append(trial)
        print(f"{number + 1}/{faults} {trial.layout}: {trial.fault} ({trial.where}): {trial.outcome}", flush=True)
        if trial.outcome not in GOOD:
            print(trial.message, flush=True)
    return trials


def table(trials: list[Trial], by: str) -> dict[str, dict[str, int]]:
    """Count the outcomes of each kind of fault, or of each layout."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for trial in trials:
        counts[getattr(trial, by)][trial.outcome] += 1
    return {key: dict(count) for key, count in counts.items()}


def command(
    campaign: Callable[..., list[Trial]], names: list[str], *, plural: str, faults: int, good: tuple[str, ...],
    about: str,
) -> None:  # fmt: skip
    """The command of a campaign over named layouts or settings; ends with code 1 if an outcome is not good."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=faults)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no trial after this many minutes")
    parser.add_argument(f"--{plural}", dest="names", nargs="*", default=names, choices=names)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    arguments = parser.parse_args()
    started, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="stillhouse-chaos-"))
    try:
        trials = campaign(arguments.faults, arguments.seed, arguments.names, root, arguments.minutes)
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
            f"by_{plural.removesuffix('s')}": table(trials, "layout"),
            "trials": [asdict(trial) for trial in trials],
        }
        write_result(arguments.out, content)
    sys.exit(1 if [trial for trial in trials if trial.outcome not in good] else 0)


if __name__ == "__main__":
    command(campaign, list(LAYOUTS), plural="layouts", faults=200, good=GOOD, about=__doc__)
