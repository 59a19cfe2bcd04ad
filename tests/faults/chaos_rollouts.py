"""A campaign of random faults in on-policy runs: nothing is lost, nothing is trained twice.

    make chaos

At a random moment the trainer, a server that writes completions, the teacher's server or all of them are killed,
asked to end or stopped for some seconds, or the disk becomes full; or the reward or the environment calls
`sys.exit(0)`, raises an error, or does not return, and the run is asked to end; or processes of `rollout.workers`
are killed or stopped; or a server drips, nests or lies. Then what has ended is started again with the same command.
A run whose completions are written in its own process must end bit-equal to an undisturbed one. With servers, each
sample must have been trained exactly once (`wrong_in`) and no token may be older than the bound; where the
schedule determines the completions, the weights are those of the undisturbed run, but for rounding.
"""

import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import campaign
from campaign import Campaign, Failed, Fault, ended, figures, full_disk, log_lines, possible, wait_for_moment
from kit.damaged_checkpoints import DAMAGES
from kit.faulty_proxy import Proxy, proxy_to
from kit.layout_runs import weights
from kit.on_policy_runs import write_on_policy_run
from kit.ranks import Ranks, free_port
from kit.runs import ROOT, Command, wait_for
from kit.signal_hooks import record_trained, trained, wrong_in
from kit.stub_servers import HOSTILE, QuietHandler, listen
from kit.user_functions import FAULT, workers_of

from stillhouse.loops import weights_on_servers
from stillhouse.rollout.publish import version_folder

STEPS, EVERY, PROMPTS, SAMPLES = 8, 2, 4, 2
#: seconds in which a server must answer, and a rank; what is stopped is continued after at most STOPPED seconds, and
#: a server that has ended comes back after at most AWAY seconds
PATIENCE, TIMEOUT, STOPPED, AWAY = 6, 20, 4.0, 9.0
#: seconds in which a worker must answer, and after which it has imported its functions, for which it has 10 minutes
WORKER_PATIENCE, STARTED = 6, 1.5
#: connections that say nothing, more than a server has places for
SILENT = 2100
#: the largest difference of a weight where completions were written in other batches
CLOSE = 1e-5
#: so often a command may be started again after it was ended by the fault
STARTS = 2
GOOD = ("bit-equal", "close", "once each")


@dataclass(frozen=True)
class Setting:
    """writer, teacher, rewarder: whether a server writes the completions, scores them, and gives their rewards.
    processes: of the trainer.
    """

    schedule: str
    more: dict[str, Any] = field(default_factory=dict)
    writer: bool = False
    teacher: bool = False
    rewarder: bool = False
    processes: int = 1

    @property
    def verdict(self) -> str:
        """What a run must be in the end."""
        if not self.writer and not self.teacher:
            return "bit-equal"
        # completions that are written while weights change are not determined
        return "once each" if self.writer and self.schedule in ("async", "two_step_off") else "close"

    @property
    def faults(self) -> list[str]:
        has_functions = "rollout.reward" in self.more or "rollout.environment" in self.more
        kinds = list(OF_FUNCTIONS) if has_functions else []
        kinds += ["killed workers", "stopped workers"] if "rollout.workers" in self.more else []
        kinds += ["kill", "kill", "terminate", "stop and continue", "full disk"]
        kinds += ["half open"] if self.writer or self.teacher else []
        kinds += ["hostile answers"] * 2 if self.writer or self.teacher or self.rewarder else []
        return possible(kinds + (["damaged weights"] * 2 if self.writer else []))


_REWARD = {"rollout.reward": "kit.user_functions:length", "objective.loss": "policy_gradient + 0.5*reverse_kl"}
_REWARDER = {"objective.loss": "policy_gradient + 0.5*reverse_kl", "rollout.timeout": PATIENCE}
_TURNS = {"rollout.environment": "kit.user_functions:echo", "rollout.stop": ["e", "a", "i"]}
_WORKERS = {"rollout.workers": 2, "rollout.worker_timeout": WORKER_PATIENCE}

SETTINGS = {
    "sync": Setting("sync"),
    "one_step_off": Setting("one_step_off"),
    "two_step_off": Setting("two_step_off"),
    "async": Setting("async"),
    "one_step_off, reward": Setting("one_step_off", _REWARD),
    "sync, reward, workers": Setting("sync", _REWARD | _WORKERS),
    "one_step_off, reward, workers": Setting("one_step_off", _REWARD | _WORKERS),
    "async, several turns, workers": Setting("async", _TURNS | _REWARD | _WORKERS | {"rollout.workers": 3}),
    "async, several turns": Setting("async", _TURNS),
    "one_step_off, reward, fsdp 2": Setting("one_step_off", _REWARD | {"parallel.fsdp": 2}, processes=2),
    "one_step_off, reward server": Setting("one_step_off", _REWARDER, rewarder=True),
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

    def __init__(self, *arguments: Any):
        self.port = free_port()
        self.arguments = ("serve", *arguments, "--port", self.port, "--device", "cpu")
        self.url = f"http://127.0.0.1:{self.port}"
        self.command: Command | None = None

    @property
    def is_running(self) -> bool:
        return self.command is not None and self.command.process.exitcode is None

    def ensure(self) -> None:
        """Start it if it has ended, and wait until it is ready."""
        if not self.is_running:
            if self.command is not None and "Traceback" in self.command.err:
                raise Failed("traceback", self.command.err)
            self.command = started = Command(*self.arguments)
            wait_for(lambda: "serving on" in started.out or started.process.exitcode is not None, 90)
            assert "serving on" in started.out, started.out + started.err

    def send(self, number: signal.Signals) -> None:
        if self.is_running:
            assert self.command is not None
            self.command.send(number)


class Rewards(QuietHandler):
    """A server that gives the length of a completion as its reward."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.reply(200, {"reward": len(request["completion"])})


@dataclass
class Case(campaign.Case):
    """proxies: before the servers, with the next answers that are not theirs."""

    setting: Setting = field(kw_only=True)
    services: dict[str, Service] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def behind_proxy(self, name: str, url: str) -> str:
        self.proxies[name], address = self.stack.enter_context(proxy_to(url))
        return address

    def start(self, out: Path, hook: Callable[..., None] = record_trained, *arguments: Any) -> Ranks:
        """arguments: of the hook in addition to the record's path."""
        self.ensure()
        return Ranks(
            self.processes,
            *("distill", self.folder / "run.yaml", f"out={out}"),
            hook=hook,
            hook_arguments=(str(out.with_suffix(".trained")), *arguments),
            environment={FAULT: str(out.with_suffix(".fault"))},
        )

    def ensure(self) -> None:
        for service in self.services.values():
            service.ensure()

    def restore(self, out: Path) -> None:
        out.with_suffix(".trained").unlink(missing_ok=True)

    def close(self) -> None:
        for service in self.services.values():
            service.send(signal.SIGKILL)
        self.stack.close()

    def end(self, fault: str, out: Path, ranks: Ranks, codes: list[int]) -> tuple[str, str]:
        """Start the run until it is complete."""
        lines = ""
        for _ in range(STARTS):
            if not any(codes):
                break
            # a process that nothing has killed says why it ends
            if not ranks.err.strip() and not set(codes) & {-signal.SIGKILL, -signal.SIGTERM, 0}:
                return "no message", ""
            lines += ranks.err.strip().replace(f"{ROOT}/", "") + "\n"
            ranks = self.start(out)
            codes = ended(ranks)
        if any(codes):
            return "not resumed", lines + ranks.err
        outcome, problem = self.verdict(out)
        return outcome, f"{problem}\n{lines}".strip()

    def verdict(self, out: Path) -> tuple[str, str]:
        """The verdict on a complete run, and what is wrong with it."""
        bound = 4 if self.setting.schedule == "async" else 2
        steps = trained(out.with_suffix(".trained"))
        if problem := wrong_in(steps, STEPS, STEPS * PROMPTS * SAMPLES, bound):
            return "wrong samples", problem
        logged, expected = ([figure["step"] for figure in figures(run)] for run in (out, self.undisturbed))
        if logged != expected:
            return "wrong log", str(logged)
        verdict = self.setting.verdict
        if verdict == "close" and self.setting.schedule == "one_step_off":
            # what a server had not finished at the checkpoint was asked for again, of newer weights
            verdict = "close" if steps == trained(self.undisturbed.with_suffix(".trained")) else "once each"
        distance = difference(out, self.undisturbed)
        is_different = {"bit-equal": not self.is_bit_equal(out), "close": distance > CLOSE}
        if is_different.get(verdict, False):
            return "different", f"largest difference {distance}"
        return verdict, ""


def difference(one: Path, other: Path) -> float:
    """The largest difference of two final models' weights."""
    first, second = weights(one), weights(other)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def prepare(name: str, root: Path) -> Case:
    setting, folder = SETTINGS[name], root / name.replace(",", "").replace(" ", "-")
    settings: dict[str, Any] = {
        "data.eval": 0,
        "rollout.schedule": setting.schedule,
        "rollout.max_staleness": 4 if setting.schedule == "async" else 2,
        "rollout.max_new_tokens": 9,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.prompts_per_step": PROMPTS,
        "train.steps": STEPS,
        "train.timeout": TIMEOUT,
        "checkpoint.every": EVERY,
    } | setting.more
    write_on_policy_run(folder)  # for the models that the servers have
    case = Case(name, folder, setting.processes, setting.faults, STEPS, EVERY, setting=setting)
    if setting.writer:
        case.services["writer"] = Service(folder / "student", "--generate")
        url = case.behind_proxy("writer", case.services["writer"].url)
        settings |= {"rollout.engine": "stillhouse", "rollout.url": url, "rollout.timeout": PATIENCE}
    if setting.teacher:
        case.services["teacher"] = Service(folder / "teacher")
        url = case.behind_proxy("teacher", case.services["teacher"].url)
        settings |= {"teacher.url": url, "teacher.timeout": PATIENCE}
    if setting.rewarder:
        rewards = listen(Rewards)
        case.stack.callback(rewards.shutdown)
        url = case.behind_proxy("rewarder", f"http://127.0.0.1:{rewards.server_port}")
        settings["rollout.reward"] = f"{url}/reward"
    write_on_policy_run(folder, cached=setting.teacher, **settings)
    try:
        case.run_undisturbed()
        verdict, problem = case.verdict(case.undisturbed)
        assert verdict in GOOD, problem
    except BaseException:
        case.close()
        raise
    return case


def signalled(case: Case, out: Path, draw: random.Random, *, number: signal.Signals) -> tuple[Ranks, str]:
    """Send a signal to a rank, all ranks, a server or everything. Servers come back after some seconds."""
    ranks = case.start(out)
    where = wait_for_moment(case, ranks, out, draw)
    target = draw.choice(["rank", "ranks", "everything", *case.services, *case.services])
    hit = [service for name, service in case.services.items() if target in (name, "everything")]
    rank = draw.randrange(case.processes) if target == "rank" else None
    if target in ("rank", "ranks", "everything"):
        ranks.send(number, rank)
    for service in hit:
        service.send(number)
    away = draw.uniform(0, STOPPED if number == signal.SIGSTOP else AWAY)
    time.sleep(away if hit or number == signal.SIGSTOP else 0)
    if number == signal.SIGSTOP:
        ranks.send(signal.SIGCONT)
    for service in hit:
        if number == signal.SIGSTOP:
            service.send(signal.SIGCONT)
        else:
            assert service.command is not None
            service.command.wait(60)
    case.ensure()
    where += f", {target if rank is None else f'rank {rank}'}"
    return ranks, where + (f", away for {away:.1f} s" if hit or number == signal.SIGSTOP else "")


def misbehaving(case: Case, out: Path, draw: random.Random, *, kind: str) -> tuple[Ranks, str]:
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


def lost_workers(case: Case, out: Path, draw: random.Random, *, number: signal.Signals) -> tuple[Ranks, str]:
    """In each step, kill or stop a process of rewards and environments. More often, a call would be lost twice."""
    ranks, hit, lines, seen = case.start(out), 0, 0, dict[int, float]()
    while (process := ranks[0].process).exitcode is None:
        seen = {worker: seen.get(worker, time.monotonic()) for worker in workers_of(process.pid or 0)}
        workers = [worker for worker in seen if time.monotonic() - seen[worker] > STARTED]
        if log_lines(out) > lines and workers:
            with suppress(ProcessLookupError):
                os.kill(draw.choice(workers), number)
            hit, lines = hit + 1, log_lines(out)
        time.sleep(draw.uniform(0, 0.1))
    return ranks, f"{hit} processes"


def half_open(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    """Open more connections to a server than it has places for, with nothing or half a header, until the run ends."""
    ranks = case.start(out)
    where = wait_for_moment(case, ranks, out, draw)
    name = draw.choice(sorted(case.services))
    with ExitStack() as clients:
        for _ in range(SILENT):
            address = ("127.0.0.1", case.services[name].port)
            client = clients.enter_context(socket.create_connection(address, timeout=30))
            with suppress(ConnectionError):  # it was closed for a newer one
                client.sendall(draw.choice([b"", b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\nx: "]))
        ended(ranks)
    return ranks, f"{where}, {name}"


def hostile_answers(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    """Up to three answers of a server are such as no server should give."""
    ranks = case.start(out)
    where, name = wait_for_moment(case, ranks, out, draw), draw.choice(sorted(case.proxies))
    kinds = draw.choices(sorted(HOSTILE), k=draw.randint(1, 3))
    case.proxies[name].faults = [HOSTILE[kind] for kind in kinds]
    ended(ranks)
    case.proxies[name].faults = []
    return ranks, f"{where}, {name}: {', '.join(kinds)}"


def record_and_damage(record: str, kind: str, version: int) -> None:
    """A hook of the trainer: the folder of this version is damaged before the servers are told of it."""
    record_trained(record)
    publish = weights_on_servers.publish

    def publishing(student: Any, folder: Path, number: int, **options: Any) -> Path:
        final = publish(student, folder, number, **options)
        if number == version and os.environ.get("RANK", "0") == "0":
            DAMAGES[kind](final, version_folder(folder, number - 1))
        return final

    weights_on_servers.publish = publishing  # type: ignore[attr-defined]


def damaged_weights(case: Case, out: Path, draw: random.Random) -> tuple[Ranks, str]:
    kind, version = draw.choice(sorted(DAMAGES)), draw.randrange(1, STEPS)
    return case.start(out, record_and_damage, kind, version), f"{kind}, version {version}"


#: of runs with a reward or an environment
OF_FUNCTIONS: dict[str, Fault] = {
    "hanging function": partial(misbehaving, kind="hang"),
    "exiting function": partial(misbehaving, kind="exit"),
    "failing function": partial(misbehaving, kind="fail"),
}
FAULTS: dict[str, Fault] = OF_FUNCTIONS | {
    "kill": partial(signalled, number=signal.SIGKILL),
    "terminate": partial(signalled, number=signal.SIGTERM),
    "stop and continue": partial(signalled, number=signal.SIGSTOP),
    "full disk": full_disk,
    "half open": half_open,
    "hostile answers": hostile_answers,
    "killed workers": partial(lost_workers, number=signal.SIGKILL),
    "stopped workers": partial(lost_workers, number=signal.SIGSTOP),
    "damaged weights": damaged_weights,
}
CAMPAIGN = Campaign(prepare, FAULTS, GOOD)

if __name__ == "__main__":
    CAMPAIGN.command(list(SETTINGS), plural="settings", count=60, about=__doc__)
