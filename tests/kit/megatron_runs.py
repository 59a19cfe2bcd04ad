"""Runs of `stillhouse distill` on Megatron-Core, for the comparison with runs of the other engine.

megatron-core is the real one, on a CPU; every rank replaces the CUDA devices that it requests (`cuda_is_cpu.py`).
"""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kit.causal_families import of_config
from kit.layout_runs import assert_same_weights
from kit.ranks import Ranks
from kit.runs import metrics, run
from kit.signal_hooks import signal_at
from kit.toy_tokenizer import TEXT, toy_backend, toy_tokenizer

from stillhouse.cli.arguments import quiet_libraries
from stillhouse.megatron.engine_kind import quiet_megatron

#: the context manager stays open until the process ends
_OPEN = ExitStack()
LIMIT = 240
LAYOUTS = {
    "llama": ["parallel.pipeline=2"],
    "qwen3": ["parallel.tensor=2"],
    "qwen3_moe": ["parallel.fsdp=2", "parallel.expert=2"],
}


def without_cuda() -> None:
    quiet_libraries()  # the next line but one imports Megatron-Core before the command line does
    quiet_megatron()
    from kit.cuda_is_cpu import cuda_is_cpu

    _OPEN.enter_context(cuda_is_cpu())


def megatron(
    folder: Path, out: str, processes: int, *overrides: str, hook: Callable[..., None] | None = None, **options: Any
) -> Path:
    """Run the configuration of a folder on Megatron-Core, and return the run's folder.

    hook: a function that calls `without_cuda`. options: of `Ranks`.
    """
    arguments = ("distill", folder / "run.yaml", f"out={folder / out}", "parallel.engine=megatron", *overrides)
    ranks = Ranks(processes, *arguments, hook=hook or without_cuda, **options)
    assert ranks.wait(LIMIT) == [0] * processes, ranks.texts
    # Megatron-Core's own notices are no news for users
    assert not [line for line in ranks.err.splitlines() if "Warning:" in line or "DEPRECATED" in line], ranks.err
    return folder / out


def _killed_without_cuda(step: int) -> None:
    without_cuda()
    signal_at(step, signal.SIGKILL)


def kill(folder: Path, *overrides: str) -> Path:
    """Kill a run on Megatron-Core at its third step, after the checkpoint of the second."""
    out = folder / "killed"
    arguments = ("distill", folder / "run.yaml", f"out={out}", "parallel.engine=megatron", *overrides)
    ranks = Ranks(2, *arguments, hook=_killed_without_cuda, hook_arguments=(3,))
    assert -signal.SIGKILL in ranks.wait(LIMIT, grace=1)
    return out


def assert_parity(folder: Path) -> list[str]:
    """Compare the gradients of all layouts of two processes; return the rows of the table."""
    ranks = Ranks(2, "parity", folder / "run.yaml", "parallel.engine=megatron", hook=without_cuda)
    assert ranks.wait(LIMIT) == [0] * 2, ranks.texts
    rows = [line for line in ranks[0].out.splitlines() if line.endswith("  same")]
    assert all(float(line.split()[-2]) <= 1e-5 for line in rows), rows
    return rows


def save_student(folder: Path, family: str) -> None:
    """Save a student of a family that only `causal_families.py` has, with the tokenizer of `write_run`'s models."""
    from kit.megatron_weights_jobs import Case, model_config  # needs Megatron-Core

    tokenizer = toy_tokenizer(backend=toy_backend(text=tuple(TEXT)))
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    options = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, **special}
    of_config(model_config(Case(family, options=options))).save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "student")


def assert_same_runs(folder: Path, *layout: str) -> None:
    """Run the configuration of a folder with both engines: in this process, and on Megatron-Core in two."""
    run("distill", folder / "run.yaml", f"out={folder / 'torch'}")
    assert_same(megatron(folder, "megatron", 2, *layout), folder / "torch")


def assert_same(one: Path, other: Path) -> None:
    """Compare what the steps of two runs have logged, and their exported weights."""
    assert_same_steps(one, other)
    assert_same_weights(one, other)


def assert_near_losses(one: Path, other: Path) -> None:
    """Compare the losses of two runs in bfloat16."""
    for line, expected in zip(metrics(one), metrics(other), strict=True):
        losses = {name: value for name, value in expected.items() if name.startswith("loss/")}
        assert {name: line[name] for name in losses} == pytest.approx(losses, rel=1e-2), expected["step"]


def assert_same_steps(one: Path, other: Path) -> None:
    """Compare what the steps of two runs have logged."""
    for line, expected in zip(metrics(one), metrics(other), strict=True):
        for name, value in expected.items():
            if name.startswith(("loss/", "eval/")) or name == "train/gradient_norm":
                tolerance = 1e-4 if name == "train/gradient_norm" else 1e-5
                assert line[name] == pytest.approx(value, rel=tolerance, abs=1e-7), (name, expected["step"])
