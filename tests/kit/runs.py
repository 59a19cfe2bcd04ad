"""Complete small runs for tests: model folders, data, a configuration, and the command line.

`write_run` writes a student, a teacher, data and a configuration to a folder. `run` runs `stillhouse` in the process
of the test; `Command` runs it in a process that the fork server starts, which has a pid and which tests can kill.
"""

import atexit
import functools
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from kit.families import build
from kit.fork_server import fork_server
from kit.toy_tokenizer import TEXT, toy_backend, toy_tokenizer
from ruamel.yaml import YAML

from stillhouse import cli
from stillhouse.config import ConfigError, RunConfig, dump_config, load_config
from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.engine.engine import StepOutput
from stillhouse.loops.held_out import held_out_metrics
from stillhouse.loops.session import Session
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.output.folder import WRITER
from stillhouse.run.run import prepare

LOSSES = ("loss/total_nats_per_token", "train/gradient_norm", "train/agreement", "tokens", "train/learning_rate")


def losses(out: Path) -> list[list[float]]:
    return [[line["step"], *(line[key] for key in LOSSES)] for line in metrics(out) if LOSSES[0] in line]


def evaluations(out: Path) -> list[list[float]]:
    return [[line["step"], line["eval/cross_entropy"]] for line in metrics(out) if "eval/tokens" in line]


def last_step(out: Path) -> int:
    """Return the step of the log's last complete line, while a run is writing."""
    if not (out / "metrics.jsonl").exists():
        return -1
    lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
    return json.loads(lines[-1])["step"] if lines else -1


def assert_same_run(out: Path, expected_out: Path) -> None:
    """Compare the models and the logged figures of two runs, which must be equal to the bit."""
    assert contents(out / "model") == contents(expected_out / "model")
    assert losses(out) == losses(expected_out)
    assert evaluations(out) == evaluations(expected_out)


MAX_TOKENS = 32
ROOT = Path(__file__).parents[2]


def save_model(
    folder: Path, family: str = "llama", *, change: Callable[[Any], None] | None = None, **options: Any
) -> Path:
    """Save a small model with a toy tokenizer as a Hugging Face folder. options: of `build_model`.

    `change` edits the model before that. Models without a change are built once per process, and then copied.
    """
    if change is not None:
        return build_model(folder, family, change, **options)
    return shutil.copytree(_model_of(family, **options), folder, dirs_exist_ok=True)


@functools.cache
def _model_of(family: str, **options: Any) -> Path:
    return build_model(Path(tempfile.mkdtemp(dir=_logs())), family, **options)


def build_model(
    folder: Path,
    family: str,
    change: Callable[[Any], object] = lambda _: None,
    *,
    text: tuple[str, ...] = tuple(TEXT),
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Path:
    """Build and save the model of `save_model`. text: what the tokenizer is trained on. options: of `build`."""
    tokenizer = toy_tokenizer(backend=toy_backend(text=text))
    model = build(family, vocab_size=len(tokenizer), dtype=dtype, **options)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_texts(path: Path, records: int = 40, seed: int = 0) -> Path:
    """Write different texts of one to eight words."""
    draw = random.Random(seed)
    words = " ".join(TEXT).split()
    texts = [f"{number} " + " ".join(draw.choices(words, k=draw.randint(1, 8))) for number in range(records)]
    return write_records(path, [{"text": text} for text in texts])


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_run(
    folder: Path,
    *,
    family: str = "llama",
    tied: bool | None = None,
    teacher: bool = True,
    cached: bool = False,
    **settings: Any,
) -> RunConfig:
    """Write `folder/run.yaml` and those models and data files that do not exist yet; return the configuration.

    settings: additional values by dotted key. The run has float32 models and 6 steps of 4 packed sequences of 32
    tokens, two sequences per micro-batch; the evaluation data are a file. cached: the teacher is a cache, which
    `settings` names.
    """
    if not (folder / "student").exists():
        save_model(folder / "student", family, tied=tied, seed=1)
    for name, records, seed in (("train.jsonl", 40, 0), ("eval.jsonl", 8, 1)):
        if not (folder / name).exists():
            write_texts(folder / name, records, seed)
    if teacher and not (folder / "teacher").exists():
        save_model(folder / "teacher", "qwen3", seed=2)
    defaults = {
        "student.model": str(folder / "student"),
        "data.train": str(folder / "train.jsonl"),
        "data.eval": str(folder / "eval.jsonl"),
        "data.max_tokens": MAX_TOKENS,
        "objective.loss": "0.3*cross_entropy + 0.7*jsd(0.5)" if teacher else "cross_entropy",
        "train.tokens_per_step": 4 * MAX_TOKENS,
        "train.micro_batch_tokens": 2 * MAX_TOKENS,
        "train.steps": 6,
        "train.learning_rate": 1e-3,
        "train.precision": "fp32",
        "device": "cpu",
        "out": str(folder / "out"),
    } | ({"teacher.model": str(folder / "teacher")} if teacher and not cached else {})
    layer: dict[str, Any] = {}
    for key, value in (defaults | settings).items():
        section, _, name = key.rpartition(".")
        (layer.setdefault(section, {}) if section else layer)[name] = value
    config = load_config(None, settings=layer)
    (folder / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    return config


def session_of(folder: Path, **settings: Any) -> Session:
    """Write a run (see `write_run`) and return its prepared session."""
    return prepare(write_run(folder, **settings), announce=False)


def forward_backward(
    session: Session, micro_batches: Sequence[MicroBatch] | None = None, objective: ObjectiveSpec | None = None
) -> StepOutput:
    """Run forward and backward of a step, by default of the first one, without an update."""
    if micro_batches is None:
        micro_batches = session.schedule.step_schedule.micro_batches(session.data.train, 0)
    engine = session.models.engine if objective is None else session.models.engine.with_losses(objective)
    step = micro_batches if isinstance(micro_batches, StepMicroBatches) else StepMicroBatches(micro_batches)
    return session.models.step(session.models.shard(step), engine)


def evaluate(session: Session, *, with_teacher: bool = False) -> dict[str, float]:
    """Return the metrics of the session's held-out documents."""
    held_out, tokens = session.data.evaluation, session.schedule.held_out_tokens
    assert held_out is not None
    return held_out_metrics(session.models, held_out, session.loss.spec, tokens, with_teacher=with_teacher)


REFUSED = YAML(typ="safe").load(Path(__file__).with_name("refused_runs.yaml").read_text(encoding="utf-8"))


def refused_runs(subject: str) -> list[Any]:
    """Return the parameters of a test: settings of each run of a list in refused_runs.yaml, and what is refused."""
    names = "settings", "key", "error"
    return [pytest.param(*(case.get(name) for name in names), id=case["error"]) for case in REFUSED[subject]]


def refused_changes(subject: str) -> list[Any]:
    """As `refused_runs`: an expression that changes something, and a part of the message."""
    return [pytest.param(case["change"], case["error"], id=case["error"]) for case in REFUSED[subject]]


@contextmanager
def refused(key: str, text: str) -> Iterator[None]:
    """Expect that the block refuses a configuration. text: a part of the message."""
    with pytest.raises(ConfigError, match=re.escape(text)) as raised:
        yield
    assert raised.value.key == key


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(out: Path) -> list[dict[str, Any]]:
    return json_lines(out / "metrics.jsonl")


def edit_json(path: Path, **values: Any) -> None:
    """Set values of a file's object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder by its relative path, except of those that name a process."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != WRITER)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class Command:
    """`stillhouse <arguments>` as a process. `hook`: a function that the process calls first, to cause a fault.

    environment: additional variables of the process.
    """

    def __init__(
        self,
        *arguments: str | Path,
        hook: Callable[..., None] | None = None,
        hook_arguments: tuple[Any, ...] = (),
        environment: dict[str, str] | None = None,
    ):
        self.log = _logs() / f"{time.monotonic_ns()}"
        texts = [str(argument) for argument in arguments]
        self.process = fork_server().Process(
            target=_child, args=(texts, str(self.log), environment or {}, hook, hook_arguments), daemon=True
        )
        self.process.start()

    def wait(self, seconds: float = 60) -> int:
        """Wait for the end of the process. A negative exit code is the signal that ended it."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.out}{self.err}")
        return self.process.exitcode

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    @property
    def out(self) -> str:
        return self._text(".out")

    @property
    def err(self) -> str:
        return self._text(".err")

    def _text(self, suffix: str) -> str:
        path = self.log.with_suffix(suffix)
        return path.read_text() if path.exists() else ""


@dataclass(frozen=True)
class Ended:
    """A command that has ended. code: the first exit code that is not 0. out, err: the texts of all its processes."""

    code: int
    out: str
    err: str


def run(*arguments: str | Path, code: int = 0) -> Ended:
    """Run a command in this process. Assert the expected exit code. The global state of the process is restored."""
    out, err = io.StringIO(), io.StringIO()
    states = random.getstate(), np.random.get_state()
    torch.set_num_threads(1)
    try:
        with patch.dict(os.environ), redirect_stdout(out), redirect_stderr(err), torch.random.fork_rng(devices=[]):
            actual = cli.run([str(argument) for argument in arguments])
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    ended = Ended(actual, out.getvalue(), err.getvalue())
    assert actual == code, ended
    assert (code == 0) == ("error: " not in ended.err)
    return ended


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.005)


@functools.cache
def _logs() -> Path:
    folder = tempfile.mkdtemp(prefix="stillhouse-test-")
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def _child(
    arguments: list[str],
    log: str,
    environment: dict[str, str],
    hook: Callable[..., None] | None,
    hook_arguments: tuple[Any, ...],
) -> None:
    os.environ |= environment
    for number, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(log + suffix, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    torch.set_num_threads(1)
    cli.SECONDS_FOR_FIRST = 0.0  # every rank prints its error at once, without waiting for rank 0
    if hook is not None:
        hook(*hook_arguments)
    sys.argv = ["stillhouse", *arguments]
    cli.main()
