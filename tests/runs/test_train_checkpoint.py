"""Checkpoints: they are written completely or not at all. Tests of their content, and of which ones are kept."""

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import loading_memory
from kit.families import build
from kit.runs import Command, contents, forward_backward, metrics, run, session_of, write_run
from kit.toy_tokenizer import toy_tokenizer
from safetensors.torch import load_file

from stillhouse.checkpoint import checkpoint_folder
from stillhouse.checkpoint import save as checkpoint
from stillhouse.checkpoint.checkpoint_folder import prune, verified
from stillhouse.checkpoint.export_weights import save_from_checkpoint
from stillhouse.checkpoint.save import load_checkpoint, save_checkpoint
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.loops.session import Session
from stillhouse.models import Decoder
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.output import disk
from stillhouse.output.disk import atomic_folder
from stillhouse.output.progress import Progress, State, write_state
from stillhouse.parallel import empty_decoder, single_process_runner

KNOWN_FILES = {".safetensors", ".json", ".jinja"}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


OPTIMIZER = {"train.learning_rate": 1e-2, "train.weight_decay": 0.1, "train.betas": [0.9, 0.95]}


def stepped(session: Session) -> torch.optim.Optimizer:
    """Take one optimizer step, so that the optimizer has a state to save, and return the optimizer."""
    forward_backward(session)
    session.models.engine.update(1e-2)
    return session.models.engine.optimizer


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gpt2", True), ("gpt2", False)])
def test_a_checkpoint_restores_weights_optimizer_and_random_state(tmp_path: Path, family: str, tied: bool) -> None:
    session = session_of(tmp_path, family=family, tied=tied, **OPTIMIZER)
    assert session.models.student.tied == tied
    optimizer = stepped(session)
    progress = Progress(7, 1234, 5.5, {"eval/cross_entropy": 2.5}, {"train": "abc"})
    path = save_checkpoint(tmp_path / "saved", progress, session.models.engine, session.data.tokenizer)
    numbers = torch.rand(4)
    again = session_of(tmp_path, family=family, tied=tied, **OPTIMIZER)
    other = again.models.engine.optimizer
    assert load_checkpoint(verified(path), again.models.engine) == progress
    assert torch.equal(torch.rand(4), numbers)
    assert again.models.student.tied == tied
    assert (
        again.models.student.head.linear.weight is again.models.student.pretrained.get_input_embeddings().weight
    ) == tied
    pairs = list(zip(session.models.student.named_parameters(), again.models.student.named_parameters(), strict=True))
    for (name, one), (_, two) in pairs:
        assert torch.equal(one, two), name
        assert one.dtype == two.dtype == torch.float32
        assert optimizer.state[one].keys() == other.state[two].keys()
        assert all(torch.equal(moment, other.state[two][key]) for key, moment in optimizer.state[one].items())
        assert float(other.state[two]["step"]) == 1
    assert [group["weight_decay"] for group in other.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in other.param_groups] == [1e-2, 1e-2]


@pytest.mark.parametrize("case", ["unused", "frozen"])
def test_parameters_without_a_gradient_are_no_obstacle(tmp_path: Path, case: str) -> None:
    """An image model's vision tower, for example, gets no gradient from text."""

    def prepared() -> Session:
        session = session_of(tmp_path, **OPTIMIZER)
        if case == "unused":
            session.models.student.backbone.register_parameter("tower", torch.nn.Parameter(torch.ones(3)))
        else:
            session.models.student.head.requires_grad_(False)
        return session

    session = prepared()
    optimizer = stepped(session)
    path = save_checkpoint(tmp_path / "saved", Progress(1), session.models.engine, session.data.tokenizer)
    again = prepared()
    other = again.models.engine.optimizer
    load_checkpoint(verified(path), again.models.engine)
    for one, two in zip(session.models.student.parameters(), again.models.student.parameters(), strict=True):
        assert torch.equal(one, two)
        assert one.requires_grad == two.requires_grad
        assert (one in optimizer.state) == (two in other.state)
        assert all(torch.equal(moment, other.state[two][key]) for key, moment in optimizer.state.get(one, {}).items())


def fake(folder: Path, step: int, **figures: float) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    write_state(path, State(Progress(step, metrics={f"eval/{k}": v for k, v in figures.items()}), {}, []))
    return path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma3", "phi3", "cohere", "gpt2"])
@pytest.mark.parametrize("file_bytes", [10**6, 40_000])
def test_files_written_one_by_one_are_those_that_transformers_writes(
    tmp_path: Path, family: str, tied: bool, file_bytes: int
) -> None:
    """The bytes are the same, both for one file and for several files with an index."""
    model = build(family, tied=tied, dtype=torch.bfloat16)
    model.generation_config.max_length = 77
    engine = TorchEngine(single_process_runner(Decoder(model, verify=False), None), ObjectiveSpec())
    path = save_checkpoint(tmp_path, Progress(), engine, toy_tokenizer())
    (tmp_path / "written").mkdir()
    save_from_checkpoint(tmp_path / "written", engine.student.decoders[0], path / "resume", file_bytes)
    model.save_pretrained(tmp_path / "expected", max_shard_size=file_bytes)
    files = contents(tmp_path / "written")
    assert len([name for name in files if name.endswith(".safetensors")]) > 1 or file_bytes == 10**6
    assert files == contents(tmp_path / "expected")


@pytest.mark.skipif(not loading_memory.SUPPORTED, reason="no /proc to read the peak from")
@pytest.mark.slow
def test_one_file_is_in_memory_at_a_time(tmp_path: Path) -> None:
    size, layer = loading_memory.save(tmp_path / "large", 1024)
    decoder = Decoder.from_pretrained(tmp_path / "large", verify=False)
    engine = TorchEngine(single_process_runner(decoder, None), ObjectiveSpec())
    path = save_checkpoint(tmp_path, Progress(), engine, toy_tokenizer())
    (tmp_path / "written").mkdir()
    part, limit = empty_decoder(tmp_path / "large"), int(1.25 * layer * loading_memory.MIB)
    save = functools.partial(save_from_checkpoint, tmp_path / "written", part, path / "resume", limit)
    peak, _ = loading_memory.growth(save)
    print(f"{size:.0f} MiB in files of {1.25 * layer:.0f}: {peak:.0f} at its largest")
    # the peak contains the file that is written and some pages of the files that are read
    assert layer < peak < 0.75 * size


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (1, None, [7]),
        (2, None, [6, 7]),
        (1, "eval/cross_entropy", [2, 7]),
        (2, "eval/agreement", [3, 6, 7]),
        (1, "eval/forward_kl", [7]),
        (1, "eval/exact_match/sums", [6, 7]),
        (1, "eval/exact_match/reversal", [7]),
        (99, "eval/agreement", [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path, keep: int, best: str | None, left: list[int]) -> None:
    """The best is the earliest of those with the lowest value; of an agreement or a task, with the highest one."""
    figures = [(3.0, 0.1), (1.0, 0.3), (2.0, 0.5), (1.0, 0.5), (1.5, 0.2), (4.0, 0.0)]
    for step, (loss, agreement) in enumerate(figures, start=1):
        fake(tmp_path, step, cross_entropy=loss, agreement=agreement, **{"exact_match/sums": 0.9 - agreement})
    fake(tmp_path, 7)
    prune(tmp_path, keep, best)
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(text: str, error: bool) -> None:
        with atomic_folder(tmp_path / "x" / "model") as partial:
            (partial / "a").write_text(text)
            if error:
                raise KeyError(text)

    with pytest.raises(KeyError):
        write("one", error=True)
    assert not (tmp_path / "x" / "model").exists()
    write("two", error=False)
    with pytest.raises(KeyError):
        write("three", error=True)
    assert (tmp_path / "x" / "model" / "a").read_text() == "two"
    write("four", error=False)
    assert contents(tmp_path / "x") == {"model/a": b"four"}


def kill_while_saving(function: str, step: int) -> None:
    """Make the process kill itself while it writes the checkpoint of `step`, at a call of `function`."""
    module = checkpoint if hasattr(checkpoint, function) else disk
    original = getattr(module, function)

    @functools.wraps(original)
    def wrapped(first: Any, *others: Any) -> Any:
        if f"step-{step:08d}" in str(first):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(first, *others)

    setattr(module, function, wrapped)


def test_there_is_no_pickle_in_a_run(complete_run: Path) -> None:
    out = complete_run / "out"
    assert names(out / "checkpoints") == ["step-00000002", "step-00000004", "step-00000006"]
    for folder in [out / "model", *(out / "checkpoints").iterdir()]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files
        for path in files:
            assert path.suffix in KNOWN_FILES, path
            if path.suffix == ".safetensors":
                load_file(path)
            elif path.suffix == ".json":
                json.loads(path.read_text())
    assert names(out / "checkpoints" / "step-00000002") == ["resume", "state.json", "student"]


@pytest.mark.parametrize("function", ["save_student", "flush"])
def test_a_kill_while_saving_loses_only_what_came_after_the_last_one(
    tmp_path: Path, complete_run: Path, function: str
) -> None:
    """The kill comes between writing resume/ and the student, or just before the folder gets its final name."""
    settings = [complete_run / "run.yaml", f"out={tmp_path}/out"]
    killed = Command("distill", *settings, hook=kill_while_saving, hook_arguments=(function, 4))
    assert killed.wait() == -signal.SIGKILL
    folder = tmp_path / "out" / "checkpoints"
    assert names(folder) == ["step-00000002", "step-00000004.partial"]
    assert (folder / "step-00000004.partial" / "resume").is_dir()
    assert (folder / "step-00000004.partial" / "state.json").exists() == (function == "flush")
    assert metrics(tmp_path / "out")[-1]["step"] == 4
    again = run("distill", *settings)
    assert f"resuming from {folder}/step-00000002" in again.out
    assert names(folder) == names(complete_run / "out" / "checkpoints")
    assert contents(tmp_path / "out" / "model") == contents(complete_run / "out" / "model")


def kill_before_pruned(step: int) -> None:
    """Make the process kill itself while it removes the checkpoint of `step`."""
    original = checkpoint_folder.shutil.rmtree

    def wrapped(path: Any, *others: Any, **settings: Any) -> None:
        if f"step-{step:08d}" in str(path):
            (Path(path) / "state.json").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        original(path, *others, **settings)

    checkpoint_folder.shutil.rmtree = wrapped


def test_a_kill_while_an_old_one_is_removed_does_not_leave_half_of_it_behind(
    tmp_path: Path, complete_run: Path
) -> None:
    settings = [complete_run / "run.yaml", f"out={tmp_path}/out", "checkpoint.keep=1", "checkpoint.best=null"]
    killed = Command("distill", *settings, hook=kill_before_pruned, hook_arguments=(2,))
    assert killed.wait() == -signal.SIGKILL
    assert names(tmp_path / "out" / "checkpoints") == ["step-00000002.partial", "step-00000004"]
    run("distill", *settings)
    assert names(tmp_path / "out" / "checkpoints") == ["step-00000006"]
    assert contents(tmp_path / "out" / "model") == contents(complete_run / "out" / "model")


@pytest.mark.parametrize("settings", [{"family": "gpt2"}, {"tied": True}], ids=["family", "tie"])
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, complete_run: Path, settings: dict[str, Any]
) -> None:
    write_run(tmp_path, **settings)
    path = complete_run / "out" / "checkpoints" / "step-00000004"
    failed = run("distill", tmp_path / "run.yaml", f"checkpoint.resume={path}", code=1)
    assert f"error: {path} does not fit this student" in failed.err
