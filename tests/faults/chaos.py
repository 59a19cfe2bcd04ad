"""A campaign of random faults. After each fault, the run ends bit-equal to an undisturbed run, or an error names it.

    make chaos

The campaign starts small real runs in one process, under fsdp, tensor, pipeline and context parallelism, with a LoRA,
and on Megatron-Core. During a run, one rank or all ranks are killed, stopped or asked to end, or the disk becomes
full. In other trials the run is killed at a random moment; then a file of its folder is damaged, deleted, cut or
replaced by one of an older checkpoint, or a model is replaced. After the fault, the same command is started again.
"""

import json
import random
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import campaign
from campaign import LIMIT, Campaign, Fault, ended, full_disk, log_lines, possible, wait_for_moment
from kit.megatron_runs import without_cuda
from kit.ranks import Ranks
from kit.runs import save_model, write_run

STEPS, EVERY = 8, 2
#: seconds in which a rank must answer
TIMEOUT = 6
#: the text of an error after which the run resumes from the previous checkpoint; it must end bit-equal, too
FALLBACK = "checkpoint.fallback=true"
#: the other outcomes are silent, traceback, hung and not resumed
GOOD = ("bit-equal", "refused")

#: the additional overrides of each layout
LAYOUTS = {
    "one process": (),
    "fsdp 2": ("parallel.fsdp=2",),
    "tensor 2": ("parallel.tensor=2",),
    "pipeline 2": ("parallel.pipeline=2",),
    "context 2": ("parallel.context=2",),
    "LoRA, fsdp 2": ("parallel.fsdp=2", "student.adapter={r: 4, dropout: 0.1}"),
    "Megatron-Core, fsdp 2": ("parallel.engine=megatron", "parallel.fsdp=2", "train.precision=bf16"),
    "Megatron-Core, tensor 2": ("parallel.engine=megatron", "parallel.tensor=2", "parallel.sequence=true"),
}


@dataclass
class Case(campaign.Case):
    overrides: tuple[str, ...] = ()

    def start(self, out: Path, *overrides: str) -> Ranks:
        arguments = ["distill", self.folder / "run.yaml", f"out={out}", *self.overrides, *overrides]
        return Ranks(self.processes, *arguments, hook=without_cuda if "Megatron-Core" in self.name else None)

    def end(self, fault: str, out: Path, ranks: Ranks, codes: list[int]) -> tuple[str, str]:
        """A fault that damages no file may not be refused."""
        again = self.start(out)
        codes = ended(again)
        first = again[0].err.strip()
        if not any(codes):
            return "bit-equal" if self.is_bit_equal(out) else "silent", first
        if fault in DURING or not set(codes) <= {1, 2} or not first.startswith("error: ") or "\n" in first:
            return "not resumed", first
        if FALLBACK not in first:
            return "refused", first
        is_resumed = not any(ended(self.start(out, FALLBACK))) and self.is_bit_equal(out)
        return "refused" if is_resumed else "not resumed", first

    def restore(self, out: Path) -> None:
        for which in ("student", "teacher"):
            if (kept := self.folder / f"{which}.kept").exists():
                shutil.rmtree(self.folder / which)
                kept.rename(self.folder / which)

    def close(self) -> None:
        """No server belongs to the run."""


def prepare(name: str, root: Path) -> Case:
    folder, processes = root / name.replace(",", "").replace(" ", "-"), 1 if name == "one process" else 2
    folder.mkdir()
    settings = {"train.steps": STEPS, "checkpoint.every": EVERY, "checkpoint.keep": 3, "train.timeout": TIMEOUT}
    write_run(folder, family="gpt2" if processes == 1 else "llama", **settings)
    case = Case(name, folder, processes, possible(list(FAULTS)), STEPS, EVERY, overrides=LAYOUTS[name])
    case.run_undisturbed()
    return case


# faults during a run


def send(case: Case, out: Path, draw: random.Random, *, numbers: Sequence[int], everyone: bool) -> tuple[Ranks, str]:
    """Send one of the signals to one rank, or to all."""
    ranks = case.start(out)
    where = wait_for_moment(case, ranks, out, draw)
    rank = None if everyone else draw.randrange(case.processes)
    ranks.send(draw.choice(numbers), rank)
    return ranks, f"{where}, {'all ranks' if rank is None else f'rank {rank}'}"


def stop_one(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    """Stop one rank, so that it hangs until it is killed, as a launcher does after the other ranks have ended.

    If all other ranks end with exit code 0, they needed nothing more from this rank and the run is complete. The rank
    is then continued.
    """
    ranks, where = send(case, out, draw, numbers=[signal.SIGSTOP], everyone=False)
    rank = int(where[-1])
    if case.processes == 1:
        ranks.send(signal.SIGKILL, rank)
    others, end = [process.process for process in ranks if process is not ranks[rank]], time.monotonic() + LIMIT
    while time.monotonic() < end and {other.exitcode for other in others} <= {None, 0}:
        if all(other.exitcode == 0 for other in others):
            ranks.send(signal.SIGCONT, rank)
            break
        time.sleep(0.05)
    return ranks, where


# faults in the folder of a killed run


def interrupted(case: Case, out: Path, draw: random.Random, saves: int = 1) -> Ranks:
    """Kill a run after at least `saves` checkpoints and before its end."""
    line = draw.randrange((EVERY + 1) * saves + 2, STEPS + 3)
    ranks, end = case.start(out), time.monotonic() + LIMIT
    while log_lines(out) < line and time.monotonic() < end:
        time.sleep(0.002)
    ranks.send(signal.SIGKILL)
    ended(ranks)
    return ranks


def checkpoints(out: Path) -> list[Path]:
    return sorted(path for path in (out / "checkpoints").iterdir() if path.suffix == "")


def damaged_file(case: Case, out: Path, draw: random.Random, *, damage: str) -> tuple[Ranks, str]:
    """Flip a bit of a file, cut it or delete it; in most cases it is one that the run reads when it resumes."""
    ranks = interrupted(case, out, draw)
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.stat().st_size]
    newest = checkpoints(out)[-1]
    read = [*(newest / "resume").iterdir(), newest / "state.json", out / "metrics.jsonl", out / "config.yaml"]
    path = draw.choice(sorted(read) if draw.random() < 0.6 else files)
    raw = bytearray(path.read_bytes())
    place = draw.randrange(len(raw))
    path.unlink()
    if damage == "flip":
        raw[place] ^= 1 << draw.randrange(8)
    if damage != "delete":
        path.write_bytes(raw[:place] if damage == "cut" else raw)
    return ranks, f"byte {place} of {path.relative_to(out)}"


def stale_file(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    """Replace a file of the newest checkpoint by that of an older one."""
    ranks = interrupted(case, out, draw, saves=2)
    older, *_, newest = checkpoints(out)
    path = draw.choice([path for path in sorted(older.rglob("*")) if path.is_file()])
    shutil.copy(path, newest / path.relative_to(older))
    return ranks, f"{path.relative_to(out)} into {newest.name}"


def replaced_model(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    ranks = interrupted(case, out, draw)
    which = draw.choice(["student", "teacher"])
    family = json.loads((case.folder / which / "config.json").read_text())["model_type"]
    (case.folder / which).rename(case.folder / f"{which}.kept")
    save_model(case.folder / which, family, seed=draw.randrange(10, 10**6))
    return ranks, which


DURING: dict[str, Fault] = {
    "kill one": partial(send, numbers=[signal.SIGKILL], everyone=False),
    "kill all": partial(send, numbers=[signal.SIGKILL], everyone=True),
    "stop one": stop_one,
    "terminate one": partial(send, numbers=[signal.SIGTERM], everyone=False),
    "terminate all": partial(send, numbers=[signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], everyone=True),
    "full disk": full_disk,
}
AFTER: dict[str, Fault] = {
    "flip a byte": partial(damaged_file, damage="flip"),
    "delete a file": partial(damaged_file, damage="delete"),
    "cut a file": partial(damaged_file, damage="cut"),
    "stale file": stale_file,
    "replaced model": replaced_model,
}
FAULTS = DURING | AFTER
CAMPAIGN = Campaign(prepare, FAULTS, GOOD)

if __name__ == "__main__":
    CAMPAIGN.command(list(LAYOUTS), plural="layouts", count=200, about=__doc__)
