"""Documents that are packed with their lengths, by the slow kernels in `kernel_stubs`, against plain transformers.

transformers reads which kernels are installed when it is imported. So another process runs the steps, and this one,
in which no kernel is installed, runs transformers' functions on one document at a time.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kit.causal_families import build
from kit.family_steps import of_pair, plain, require_equal
from kit.runs import ROOT, write_texts
from safetensors import safe_open
from safetensors.torch import load_file

from stillhouse.config import load_config
from stillhouse.models import Decoder
from stillhouse.run.run import prepare

#: the pair with sdpa, of a run whose configuration names it
SDPA = ("falcon_h1", "zamba2")
STUBS = ROOT / "tests" / "kernel_stubs"
ONE_STEP = {"train.steps": None, "train.epochs": 1, "train.tokens_per_step": 8192}
#: student and teacher → how they pack documents. Jamba's kernels do not separate documents, gpt-oss has no sdpa, and
#: Mamba 2 no attention
PAIRS = {
    ("qwen3_5_text", "nemotron_h"): "lengths lengths",
    ("kimi_linear", "qwen3"): "cu_seqlens packed",
    ("bailing_hybrid", "qwen3_next"): "cu_seqlens lengths",
    ("olmo_hybrid", "jamba"): "lengths rows",
    ("bamba", "gpt_oss"): "lengths masked",
    ("falcon_h1", "zamba2"): "lengths lengths",
    ("mamba2", "lfm2"): "lengths lengths",
    ("lfm2_moe", "qwen3"): "lengths packed",
}


def steps(folders: Sequence[Path], *modules: str) -> None:
    """Run the steps in a process that imports these modules of the stubs."""
    path = folders[0].parent / f"path of {len(modules)}"
    path.mkdir()
    for name in ("segments.py", *modules):
        (path / name).symlink_to(STUBS / name)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (path, ROOT, ROOT / "tests")))}
    command = [sys.executable, str(ROOT / "tests" / "kit" / "lengths_job.py"), *map(str, folders)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def metadata(folder: Path) -> dict[str, str]:
    with safe_open(folder / "step.safetensors", "pt") as file:
        return dict(file.metadata())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The folders of runs whose only step has all documents: a run in rows orders them in another way."""
    of_pairs = {pair: tmp_path_factory.mktemp("of_pair") for pair in PAIRS}
    for (student, teacher), folder in of_pairs.items():
        write_texts(folder / "train.jsonl", 12, seed=0)
        attention = "sdpa" if (student, teacher) == SDPA else None
        of_models = {f"{section}.attention": attention for section in ("student", "teacher")}
        of_pair(folder, student, teacher, **ONE_STEP, **of_models)
    steps([*of_pairs.values()], "fla", "causal_conv1d.py", "mamba_ssm")
    return of_pairs


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_a_step_of_documents_with_lengths_is_the_plain_one(
    runs: dict[tuple[str, str], Path], pair: tuple[str, str]
) -> None:
    folder = runs[pair]
    written, gradients = metadata(folder), load_file(folder / "step.safetensors")
    assert written["packings"] == PAIRS[pair]
    for family, attention in zip(pair, written["attentions"].split(), strict=True):
        expected = "sdpa" if pair == SDPA or family == "jamba" else "varlen"
        assert attention == ("eager" if family in ("gpt_oss", "mamba2") else expected)
    expected_loss, expected = plain(prepare(load_config(folder / "run.yaml"), announce=False), folder)
    assert float(written["loss"]) == pytest.approx(expected_loss, rel=1e-5)
    require_equal(gradients, expected)


@pytest.mark.slow
def test_a_missing_kernel_is_named(tmp_path: Path) -> None:
    """DeltaNet layers need the kernel of their convolution, too."""
    of_pair(tmp_path / "run", "qwen3_5_text", "qwen3", **ONE_STEP)
    steps([tmp_path / "run"], "fla")
    written = metadata(tmp_path / "run")
    assert written["packings"] == "rows packed"
    assert "without `causal-conv1d`" in written["reason"] or "without `causal_conv1d`" in written["reason"]


def test_without_kernels_the_reason_says_so() -> None:
    reason = str(Decoder(build("qwen3_5_text")).packing)
    assert reason.startswith("one per row, because ")
    assert "layers that mix tokens without attention (linear_attention) lets documents that share a row" in reason
    assert "is installed (causal-conv1d, flash-linear-attention, mamba-ssm)" in reason
