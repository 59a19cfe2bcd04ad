"""Mistakes of a user give one short error, the right exit code and no traceback; the folder does not change."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.runs import Command, contents, metrics, run, save_model, session_of, wait_for, write_records, write_run

from stillhouse.config import ConfigError

USAGE, FAILED = 2, 1


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_run(tmp_path)
    return tmp_path


def fails(folder: Path, *arguments: str, code: int, command: str = "distill") -> str:
    """Run a failing command on the folder's run.yaml, check that the folder did not change, and return the error."""
    before = contents(folder)
    failed = run(command, folder / "run.yaml", *arguments, code=code)
    assert contents(folder) == before
    assert failed.err.count("error: ") == 1
    return failed.err.partition("error: ")[2]


def test_check_fails_as_the_run_would(here: Path) -> None:
    error = fails(here, "objective.loss=forward_kll", code=USAGE, command="check")
    assert error.startswith("objective.loss: unknown name 'forward_kll'; did you mean forward_kl?")
    assert error == fails(here, "objective.loss=forward_kll", code=USAGE)
    error = fails(here, f"data.train={here}/nowhere.jsonl", code=USAGE, command="check")
    assert error == fails(here, f"data.train={here}/nowhere.jsonl", code=USAGE)


@pytest.mark.parametrize("which", ["student", "teacher"])
@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj.weight", *(slow(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))],
)
def test_weights_that_are_not_finite(here: Path, which: str, name: str) -> None:
    def change(model: Any) -> None:
        model.get_parameter(name).view(-1)[5] = math.nan if which == "student" else math.inf

    damaged = save_model(here / "damaged", tied=False, change=change)
    part = name.rpartition("weight")[0].removeprefix("model.").removeprefix("lm_head.")
    with pytest.raises(ValueError, match=rf"^{which}: .*1 of the .*{part}.* are NaN or infinite: expected finite"):
        session_of(here, **{f"{which}.model": str(damaged)})


def test_more_tokens_than_the_model_has_positions(here: Path) -> None:
    model = save_model(here / "short", "gpt2")
    more = {"data.max_tokens": 200, "train.micro_batch_tokens": 200, "train.tokens_per_step": 400}
    with pytest.raises(ConfigError, match=r"^data\.max_tokens: student has learned positions for 128 tokens: expect"):
        session_of(here, **{"student.model": str(model)}, **more)
    # one document per row has no more tokens than a document, although a micro-batch of such rows has
    rows = {"data.max_tokens": 128, "data.packing": "rows"}
    rows |= {"train.micro_batch_tokens": 512, "train.tokens_per_step": 1024}
    assert session_of(here, **{"student.model": str(model)}, **rows).data.train.max_tokens > 128


def test_records_that_are_skipped_are_counted(here: Path) -> None:
    path = here / "x.jsonl"
    path.write_text('{"text": "The still is heated slowly"}\n{"text": "the heads\n{"text": 3}\n{"text": "tails"}\n')
    skipped = run("distill", here / "run.yaml", f"data.train={path}", "data.on_error=skip", "train.steps=1")
    assert f"2 skipped, the first: {path}:2: not valid JSON" in skipped.out
    assert json.loads((here / "out" / "data.json").read_text())["train"]["skipped"] == 2


@pytest.mark.parametrize("which", ["student", "teacher"])
def test_a_held_out_token_without_a_row(here: Path, which: str) -> None:
    """Added tokens beyond the head's rows are accepted until a training or evaluation text contains one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder in ("student", "teacher"):
        tokenizer = AutoTokenizer.from_pretrained(here / folder)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        tokenizer.save_pretrained(here / folder)
    run("check", here / "run.yaml")
    other = here / ("teacher" if which == "student" else "student")
    wider = AutoModelForCausalLM.from_pretrained(other)
    wider.resize_token_embeddings(401)
    wider.save_pretrained(other)
    write_records(here / "eval.jsonl", [{"text": "the still"}, {"text": "an <image> of it"}])
    error = fails(here, code=FAILED)
    assert error.startswith(f"{here}/eval.jsonl:2: token id 400 has no row in the {which}'s head of 400 rows")


def test_an_out_that_holds_another_run(here: Path) -> None:
    run("distill", here / "run.yaml")
    for command in ("distill", "check"):
        error = fails(here, "seed=5", "objective.loss=reverse_kl", code=FAILED, command=command)
        loss = '"0.3*cross_entropy + 0.7*jsd(0.5)" in the folder, now "reverse_kl"'
        values = f"objective.loss ({loss}), seed (0 in the folder, now 5)"
        assert error.startswith(f"out: {here}/out contains another run, with a different {values}; choose another")


def test_an_empty_folder_is_fine(here: Path) -> None:
    (here / "out").mkdir()
    run("distill", here / "run.yaml", "train.steps=1")


@pytest.mark.slow
def test_the_installed_module_does_it_too(here: Path) -> None:
    """This test starts the module in a new process, as a shell does. Libraries print nothing."""
    command = [sys.executable, "-m", "stillhouse", "distill", str(here / "run.yaml"), "train.steps=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("minimise 0.3 × cross-entropy + 0.7 × jsd(0.5) of teacher and student, ")
    assert (here / "out" / "model" / "model.safetensors").exists()
    assert done.stderr == ""


def test_a_folder_that_another_process_is_writing_to(here: Path) -> None:
    first = Command("distill", here / "run.yaml", "train.steps=2000", "checkpoint.every=0")
    wait_for(lambda: len(metrics(here / "out")) > 2 if (here / "out" / "metrics.jsonl").exists() else False)
    second = run("distill", here / "run.yaml", "train.steps=2000", "checkpoint.every=0", code=FAILED)
    writer = f"process {first.process.pid} on {socket.gethostname()}"
    assert f"error: out: another process ({writer}) is writing to {here / 'out'}; wait until it ends" in second.err
    first.send(signal.SIGKILL)
    first.wait()
    again = run("distill", here / "run.yaml", "train.steps=2000", "checkpoint.every=0", "train.steps=2", code=FAILED)
    # the lock ended with its process; the folder still contains the first run
    assert "contains another run" in again.err


def test_another_number_of_processes_than_the_layout_needs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is only one, without torchrun" in fails(here, "parallel.fsdp=2", code=USAGE)
    monkeypatch.setenv("WORLD_SIZE", "8")
    error = fails(here, "parallel.tensor=3", code=USAGE)
    assert error.startswith("parallel: fsdp 2 × tensor 3 needs 6 processes, but torchrun started 8")


def test_out_of_memory_names_the_key_to_lower(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward, where it is most frequent, raises the GPU allocator's error; this test needs no GPU."""

    def backward(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    failed = run("distill", here / "run.yaml", code=FAILED)
    assert "error: CUDA out of memory. Tried to allocate 2.00 GiB. Lower train.micro_batch_tokens" in failed.err


def test_held_out_documents_that_are_trained_on_are_a_warning(here: Path) -> None:
    overrides = "train.steps=1", f"data.eval={here / 'train.jsonl'}", f"out={here / 'same'}"
    same = run("distill", here / "run.yaml", *overrides)
    assert "held-out documents are also in the training data" in same.out
    assert "also in the training data" not in run("distill", here / "run.yaml", "train.steps=1").out
