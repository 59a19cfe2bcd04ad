"""A campaign of random faults in on-policy runs: nothing is lost, nothing is trained twice.

    make chaos

At a random moment the trainer, a server that writes completions, the teacher's server or all of them are killed,
asked to end or stopped for some seconds, or the disk becomes full; or the reward or the environment calls
`sys.exit(0)`, raises an error, or does not return, and the run is asked to end. Then what has ended is started again
with the same command. A run whose completions are written in its own process must end bit-equal to an undisturbed
one. With servers, each sample must have been trained exactly once (`trained_record.py`) and no token may be older
than the bound; where the schedule determines the completions, the weights are those of the undisturbed run, but for
rounding.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos import DISK, LIMIT, Hung, Traceback, Trial, command, ended, log_lines, require_no_traceback
from kit.ranks import Ranks, free_port
from kit.runs import ROOT, Command, contents, metrics, wait_for, write_records, write_run
from kit.trained_record import record_trained, trained, wrong_in
from safetensors.torch import load_file

from stillhouse.engine import torch_engine
from stillhouse.generation.published import MANIFEST
from stillhouse.generation.weights import version_folder

STEPS, EVERY, PROMPTS, SAMPLES = 8, 2, 4, 2
#: seconds in which a server must answer, and a rank; what is stopped is continued after at most STOPPED seconds, and
#: a server that has ended comes back after at most AWAY seconds
PATIENCE, TIMEOUT, STOPPED, AWAY = 6, 20, 4.0, 9.0
#: connections that say nothing, more than a server has places for
SILENT = 2100
WEIGHTS = "model.safetensors"
#: the largest difference of a weight where completions were written in other batches
CLOSE = 1e-5
#: so often a command may be started again after it was ended by the fault
STARTS = 2
GOOD = ("bit-equal", "close", "once each")


#: the variable of a run's processes with the path of a file that says how a reward or environment is to misbehave
FAULT = "STILLHOUSE_CHAOS_FAULT"


def length(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """A reward, which changes its record."""
    misbehave()
    record["seen"] = record.get("seen", 0) + 1
    return float(len(completion) * record["seen"])


def echo(prompt: str, completion: str, record: dict[str, Any]) -> str | None:
    """An environment that answers twice, and changes its record."""
    misbehave()
    record["turns"] = record.get("turns", 0) + 1
    return None if completion.count("!") >= 2 else record["turns"] * " no!"


def misbehave() -> None:
    """Do once what the file says."""
    path = Path(os.environ[FAULT])
    if not path.exists():
        return
    kind = path.read_text()
    path.unlink()
    if kind == "exit":
        sys.exit(0)
    while kind == "hang":
        try:
            time.sleep(LIMIT)
        except Exception:  # noqa: BLE001  as the code of users does
            continue
    raise KeyError(kind)


@dataclass(frozen=True)
class Setting:
    """writer, teacher: whether a server writes the completions, and scores them. processes: of the trainer."""

    schedule: str
    more: dict[str, Any] = field(default_factory=dict)
    writer: bool = False
    teacher: bool = False
    processes: int = 1

    @property
    def verdict(self) -> str:
        """What a run must be in the end."""
        if not self.writer and not self.teacher:
            return "bit-equal"
        # completions that are written while weights change are not determined
        return "once each" if self.writer and self.schedule in ("async", "two_step_off") else "close"

    @property
    def has_functions(self) -> bool:
        """Whether the run has a reward or an environment."""
        return "rollout.reward" in self.more or "rollout.environment" in self.more


_REWARD = {"rollout.reward": "chaos_rollouts:length", "objective.loss": "policy_gradient + 0.5*reverse_kl"}
_TURNS = {"rollout.environment": "chaos_rollouts:echo", "rollout.stop": ["e", "a", "i"]}

SETTINGS = {
    "sync": Setting("sync"),
    "one_step_off": Setting("one_step_off"),
    "two_step_off": Setting("two_step_off"),
    "async": Setting("async"),
    "one_step_off, reward": Setting("one_step_off", _REWARD),
    "async, several turns": Setting("async", _TURNS),
    "one_step_off, reward, fsdp 2": Setting("one_step_off", _REWARD | {"parallel.fsdp": 2}, processes=2),
    "one_step_off, fsdp 2": Setting("one_step_off", {"parallel.fsdp": 2}, processes=2),
    "sync, served": Setting("sync", writer=True),
    "one_step_off, served": Setting("one_step_off", writer=True),
    "async, served, several turns, reward": Setting("async", _TURNS | _REWARD, writer=True),
    "one_step_off, served, teacher served": Setting("one_step_off", writer=True, teacher=True),
    "async, served, teacher served, fsdp 2": Setting(
        "async", {"parallel.fsdp": 2}, writer=True, teacher=True, processes=2
    ),
}


class Service:
    """A `stillhouse serve` that is started again on the same port."""

    def __init__(self, name: str, *arguments: Any):
        self.name = name
        self.arguments = ("serve", *arguments, "--port", free_port(), "--device", "cpu")
        self.url = f"http://127.0.0.1:{self.arguments[-3]}"
        self.command: Command | None = None

    @property
    def is_running(self) -> bool:
        return self.command is not None and self.command.process.exitcode is None

    def ensure(self) -> None:
        """Start it if it has ended, and wait until it is ready."""
        if not self.is_running:
            if self.command is not None and "Traceback" in self.command.err:
                raise Traceback(self.command.err[-3000:])
            self.command = started = Command(*self.arguments)
            wait_for(lambda: "serving on" in started.out or started.process.exitcode is not None, 90)
            assert "serving on" in started.out, started.out + started.err

    def send(self, number: signal.Signals) -> None:
        if self.is_running:
            assert self.command is not None
            self.command.send(number)


@dataclass(frozen=True)
class Case:
    """A setting's configuration and servers, the results of an undisturbed run, and its duration."""

    name: str
    setting: Setting
    folder: Path
    services: dict[str, Service]
    seconds: float = 0.0

    @property
    def undisturbed(self) -> Path:
        return self.folder / "undisturbed"

    def start(self, out: Path, hook: Callable[..., None] = record_trained, *given: Any) -> Ranks:
        """given: arguments of the hook in addition to the record's path."""
        record = out.with_suffix(".trained")
        arguments = ("distill", self.folder / "run.yaml", f"out={out}")
        return Ranks(
            self.setting.processes,
            *arguments,
            hook=hook,
            hook_arguments=(str(record), *given),
            environment={FAULT: str(out.with_suffix(".fault"))},
        )

    def ensure(self) -> None:
        for service in self.services.values():
            service.ensure()

    def close(self) -> None:
        for service in self.services.values():
            service.send(signal.SIGKILL)

    def outcome(self, out: Path) -> tuple[str, str]:
        """The verdict on a complete run, and what is wrong with it."""
        bound = 4 if self.setting.schedule == "async" else 2
        steps = trained(out.with_suffix(".trained"))
        if problem := wrong_in(steps, STEPS, STEPS * PROMPTS * SAMPLES, bound):
            return "wrong samples", problem
        if [figure["step"] for figure in figures(out)] != [figure["step"] for figure in figures(self.undisturbed)]:
            return "wrong log", str([figure["step"] for figure in figures(out)])
        verdict = self.setting.verdict
        if verdict == "close" and self.setting.schedule == "one_step_off":
            # what a server had not finished at the checkpoint was asked for again, of newer weights
            verdict = "close" if steps == trained(self.undisturbed.with_suffix(".trained")) else "once each"
        if verdict == "bit-equal" and (
            contents(out / "model") != contents(self.undisturbed / "model")
            or figures(out) != figures(self.undisturbed)
        ):
            return "different", f"largest difference {difference(out, self.undisturbed)}"
        if verdict == "close" and (found := difference(out, self.undisturbed)) > CLOSE:
            return "different", f"largest difference {found}"
        return verdict, ""


def figures(out: Path) -> list[dict[str, Any]]:
    """The log's record of each step, without the values that depend on time."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("seconds", "speed/"))}
        for line in metrics(out)
    ]


def difference(one: Path, other: Path) -> float:
    """The largest difference of two final models' weights."""
    first, second = (load_file(out / "model" / "model.safetensors") for out in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def prepare(name: str, root: Path) -> Case:
    setting, folder = SETTINGS[name], root / name.replace(",", "").replace(" ", "-")
    folder.mkdir()
    records = [{"prompt": f"Two and {number} is", "completion": f" {number + 2}."} for number in range(15)]
    write_records(folder / "train.jsonl", records)
    settings: dict[str, Any] = {
        "objective.loss": "reverse_kl",
        "data.eval": 0,
        "data.max_tokens": 37,
        "rollout.schedule": setting.schedule,
        "rollout.max_staleness": 4 if setting.schedule == "async" else 2,
        "rollout.max_new_tokens": 9,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.prompts_per_step": PROMPTS,
        "train.tokens_per_step": 37,
        "train.micro_batch_tokens": 74,
        "train.steps": STEPS,
        "train.timeout": TIMEOUT,
        "checkpoint.every": EVERY,
    } | setting.more
    write_run(folder)  # for the models that the servers have
    services = {}
    if setting.writer:
        services["writer"] = Service("writer", folder / "student", "--generate")
        settings |= {"rollout.engine": "stillhouse", "rollout.url": services["writer"].url}
        settings["rollout.timeout"] = PATIENCE
    if setting.teacher:
        services["teacher"] = Service("teacher", folder / "teacher")
        settings |= {"teacher.url": services["teacher"].url, "teacher.timeout": PATIENCE}
    write_run(folder, cached=setting.teacher, **settings)
    case = Case(name, setting, folder, services)
    try:
        case.ensure()
        started = time.monotonic()
        ranks = case.start(case.undisturbed)
        assert ranks.wait(LIMIT) == [0] * setting.processes, ranks.texts
        verdict, problem = case.outcome(case.undisturbed)
        assert verdict in GOOD, problem
    except BaseException:
        case.close()
        raise
    return replace(case, seconds=time.monotonic() - started)


def wait_for_moment(case: Case, ranks: Ranks, out: Path, draw: random.Random) -> str:
    """Wait for a random moment: some time after the start, or after a step and some milliseconds."""
    kind, end = draw.choice(["time", "step", "step"]), time.monotonic() + LIMIT
    line, more = draw.randrange(STEPS + 1), draw.uniform(0, 0.3)
    delay = draw.uniform(0, 1.2 * case.seconds)
    started = time.monotonic()
    while time.monotonic() < end and all(rank.process.exitcode is None for rank in ranks):
        if time.monotonic() - started >= delay if kind == "time" else log_lines(out) >= line:
            break
        time.sleep(0.002)
    if kind == "step":
        time.sleep(more)
    return f"after {delay:.1f} s" if kind == "time" else f"{1000 * more:.0f} ms after line {line}"


Fault = Callable[[Case, Path, random.Random], tuple[Ranks, str]]


def signalled(number: signal.Signals, case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    """Send a signal to a rank, all ranks, a server or everything. Servers come back after some seconds."""
    ranks = case.start(out)
    where = wait_for_moment(case, ranks, out, draw)
    target = draw.choice(["rank", "ranks", "everything", *case.services, *case.services])
    hit = [service for name, service in case.services.items() if target in (name, "everything")]
    rank = draw.randrange(case.setting.processes) if target == "rank" else None
    if target in ("rank", "ranks", "everything"):
        ranks.send(number, rank)
    for service in hit:
        service.send(number)
    away = draw.uniform(0, STOPPED if number == signal.SIGSTOP else AWAY)
    time.sleep(away if hit or number == signal.SIGSTOP else 0)
    if number == signal.SIGSTOP:
        ranks.send(signal.SIGCONT)
        for service in hit:
            service.send(signal.SIGCONT)
    for service in hit:
        if number != signal.SIGSTOP:
            assert service.command is not None
            service.command.wait(60)
    where += f", {target if rank is None else f'rank {rank}'}"
    return ranks, where + (f", away for {away:.1f} s" if hit or number == signal.SIGSTOP else "")


def kill(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    return signalled(signal.SIGKILL, case, out, draw)


def terminate(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    return signalled(signal.SIGTERM, case, out, draw)


def stop_and_continue(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    return signalled(signal.SIGSTOP, case, out, draw)


def full_disk(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    """Run on a disk that is probably too small; enlarge the disk before the run is started again."""
    whole = sum(len(content) for content in contents(case.undisturbed).values())
    size = int(draw.uniform(0.02, 1.1) * whole)
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(out)], check=True)
    ranks = case.start(out)
    ended(ranks)
    subprocess.run(["mount", "-o", f"remount,size={DISK}", str(out)], check=True)
    return ranks, f"{size:,} bytes"


def misbehaving(kind: str, case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    """Let the reward or the environment misbehave at its next call."""
    ranks = case.start(out)
    where, path = wait_for_moment(case, ranks, out, draw), out.with_suffix(".fault")
    path.with_suffix(".partial").write_text(kind)
    path.with_suffix(".partial").rename(path)
    while path.exists() and all(rank.process.exitcode is None for rank in ranks):
        time.sleep(0.002)
    if path.exists():  # the run has ended before that
        path.unlink(missing_ok=True)
        where += ", not called"
    elif kind == "hang":
        time.sleep(draw.uniform(0, 1))
        ranks.send(signal.SIGTERM)
    return ranks, where


def hanging_function(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    return misbehaving("hang", case, out, draw)


def exiting_function(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    return misbehaving("exit", case, out, draw)


def failing_function(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    return misbehaving("fail", case, out, draw)


def half_open(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    """Open more connections to a server than it has places for, with nothing or half a header, until the run ends."""
    ranks = case.start(out)
    where = wait_for_moment(case, ranks, out, draw)
    service = draw.choice(sorted(case.services.values(), key=lambda each: each.name))
    address = ("127.0.0.1", int(service.url.rpartition(":")[2]))
    with ExitStack() as clients:
        for _ in range(SILENT):
            client = clients.enter_context(socket.create_connection(address, timeout=30))
            with suppress(ConnectionError):  # it was closed for a newer one
                client.sendall(draw.choice([b"", b"GET /v1/info HTTP/1.1\r\nhost: x\r\nx: "]))
        ended(ranks)
    return ranks, f"{where}, {service.name}"


def record_and_damage(record: str, kind: str, version: int) -> None:
    """A hook of the trainer: the folder of this version is damaged before the servers are told of it."""
    record_trained(record)
    publish = torch_engine.publish

    def publishing(runner: Any, folder: Path, number: int, **options: Any) -> Path:
        final = publish(runner, folder, number, **options)
        if number == version and os.environ.get("RANK", "0") == "0":
            DAMAGES[kind](final, version_folder(folder, number - 1))
        return final

    torch_engine.publish = publishing  # type: ignore[attr-defined]


def _manifest_of(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _older(final: Path, before: Path) -> None:
    """The version before, as it is."""
    shutil.rmtree(final)
    shutil.copytree(before, final)


def _older_with_this_number(final: Path, before: Path) -> None:
    """The version before under this one's number: all hashes are right."""
    _older(final, before)
    _manifest_of(final, lambda manifest: manifest.update(version=manifest["version"] + 1))


def _older_files(final: Path, before: Path) -> None:
    shutil.copy(before / WEIGHTS, final / WEIGHTS)


def _pipe(final: Path, before: Path) -> None:
    (final / WEIGHTS).unlink()
    os.mkfifo(final / WEIGHTS)


def _link(final: Path, before: Path) -> None:
    (final / WEIGHTS).unlink()
    (final / WEIGHTS).symlink_to("/dev/zero")


def _elsewhere(final: Path, before: Path) -> None:
    _manifest_of(final, lambda manifest: manifest["files"].update({f"../{before.name}/{WEIGHTS}": "0" * 64}))


def _cut(final: Path, before: Path) -> None:
    os.truncate(final / WEIGHTS, 1000)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    fault.__name__.strip("_").replace("_", " "): fault
    for fault in (_older, _older_with_this_number, _older_files, _pipe, _link, _elsewhere, _cut)
}


def damaged_weights(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    kind, version = draw.choice(sorted(DAMAGES)), draw.randrange(1, STEPS)
    return case.start(out, record_and_damage, kind, version), f"{kind}, version {version}"


FAULTS = [kill, kill, terminate, stop_and_continue, full_disk]
#: further ones for runs with a reward or an environment
OF_FUNCTIONS = [hanging_function, exiting_function, failing_function]


def faults_of(setting: Setting) -> list[Fault]:
    of_functions = OF_FUNCTIONS if setting.has_functions else []
    kinds: list[Fault] = [fault for fault in [*of_functions, *FAULTS] if fault is not full_disk or os.geteuid() == 0]
    kinds += [half_open] if setting.writer or setting.teacher else []
    return kinds + ([damaged_weights, damaged_weights] if setting.writer else [])


def codes_of(ranks: Ranks) -> list[int]:
    codes = ended(ranks)
    require_no_traceback(ranks)
    return codes


def attempt(case: Case, fault: Fault, out: Path, draw: random.Random) -> Trial:
    """Cause one fault; start what has ended until the run is complete."""
    name, where, lines = fault.__name__.replace("_", " "), "", ""
    try:
        case.ensure()
        ranks, where = fault(case, out, draw)
        case.ensure()
        codes = codes_of(ranks)
        where += f", exit codes {codes}"
        for _ in range(STARTS):
            if set(codes) == {0}:
                break
            # a process that nothing has killed says why it ends
            if not ranks.err.strip() and not set(codes) & {-signal.SIGKILL, -signal.SIGTERM, 0}:
                return Trial(case.name, name, where, "no message")
            lines += ranks.err.strip().replace(str(case.folder), "…").replace(f"{ROOT}/", "") + "\n"
            case.ensure()
            ranks = case.start(out)
            codes = codes_of(ranks)
        if set(codes) != {0}:
            return Trial(case.name, name, where, "not resumed", lines + ranks.err)
        outcome, problem = case.outcome(out)
        return Trial(case.name, name, where, outcome, f"{problem}\n{lines}".strip())
    except Hung as error:
        return Trial(case.name, name, where, "hung", str(error)[-3000:])
    except Traceback as error:
        return Trial(case.name, name, where, "traceback", str(error))
    finally:
        if os.path.ismount(out):
            subprocess.run(["umount", "-l", str(out)], check=True)
        shutil.rmtree(out, ignore_errors=True)
        out.with_suffix(".trained").unlink(missing_ok=True)


def campaign(faults: int, seed: int, settings: list[str], root: Path, minutes: float) -> list[Trial]:
    """Try every setting in turn with every fault, as often as `minutes` allow."""
    draw, end = random.Random(seed), time.monotonic() + 60 * minutes
    trials: list[Trial] = []
    for place, name in enumerate(settings):
        if time.monotonic() > end:
            break
        case, kinds = prepare(name, root), faults_of(SETTINGS[name])
        try:
            for number in range(place, faults, len(settings)):
                fault = kinds[(number // len(settings) + place) % len(kinds)]
                trial = attempt(case, fault, case.folder / f"out-{number}", random.Random(draw.random()))
                trials.append(trial)
                print(f"{len(trials)}/{faults} {name}: {trial.fault} ({trial.where}): {trial.outcome}", flush=True)
                if trial.outcome not in GOOD:
                    print(trial.message, flush=True)
                if time.monotonic() > end:
                    break
        finally:
            case.close()
    return trials


if __name__ == "__main__":
    command(campaign, list(SETTINGS), plural="settings", faults=60, good=GOOD, about=__doc__)
