"""examples/megatron_gkd.py: whole runs under torchrun, and what a wrong configuration says."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("megatron.core", reason="megatron-core is not installed: `make test` does")

from stillhouse.config.errors import ConfigError

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "megatron_gkd.py"
VOCABULARY, N, S, K = 251, 8, 32, 7
CONFIG = """
student: {layers: 2, width: 32, heads: 4}
teacher: {model: {layers: 2, width: 48, heads: 4}}
data: tokens.safetensors
vocabulary: 251
objective: {loss: 0.3*cross_entropy + 0.7*jsd(0.5)}
parallel: {tensor: 2, pipeline: 2}
train: {steps: 7, micro_batches: 4, rows: 2, learning_rate: 3e-3}
"""
TOP_K = {"{model: {layers: 2, width: 48, heads: 4}}": "{top_k: said.safetensors}", "pipeline: 2": "sequence: false"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random = torch.Generator().manual_seed(0)
    save_file({"input_ids": torch.randint(VOCABULARY, (N, S + 1), generator=random)}, "tokens.safetensors")
    save_file({"input_ids": torch.zeros(N)}, "flat.safetensors")
    log_probs = torch.randn(N, S, VOCABULARY, generator=random).mul(3).log_softmax(-1)
    likeliest = log_probs.topk(K)
    tail = log_probs.scatter(-1, likeliest.indices, -torch.inf).logsumexp(-1)
    save_file({"ids": likeliest.indices, "log_probs": likeliest.values, "tail_log_prob": tail}, "said.safetensors")
    return tmp_path


def write(changes: dict[str, str]) -> str:
    text = CONFIG
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    Path("run.yaml").write_text(text)
    return "run.yaml"


@pytest.mark.parametrize(
    ("processes", "changes"),
    [pytest.param(4, {}, id="teacher in the stages"), pytest.param(2, TOP_K, id="top-k", marks=pytest.mark.slow)],
)
def test_the_loss_falls(folder: Path, processes: int, changes: dict[str, str]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    run = subprocess.run(
        [*launch, str(ROOT / "tests" / "cuda_is_cpu.py"), str(EXAMPLE), write(changes)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    losses = [float(each) for each in re.findall(r"step \d+: loss ([\d.]+) over 256 tokens", run.stdout)]
    assert len(losses) == 7
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"jsd(0.5)": "jds(0.5)"}, "objective.loss: unknown name 'jds'"),
        ({"jsd(0.5)": "jsd(0)"}, "objective.loss: .*forward_kl"),
        ({"steps: 7": "steps: seven"}, "train.steps: .*seven"),
        ({"steps: 7": "stepz: 7"}, "train.stepz"),
        ({"loss: 0.3": "tokens: all, loss: 0.3"}, "objective.tokens: has no effect here"),
        ({"{model: {layers": "{top_k: said.safetensors, model: {layers"}, "teacher: .*one of them"),
        ({"tensor: 2": "tensor: 3"}, "student: 2 layers over pipeline 2, 4 heads over tensor 3: expected whole"),
        ({"tokens.safetensors": "flat.safetensors"}, "data: input_ids of shape .* expected .N, S . 1. of int32"),
        ({"tokens.safetensors": "gone.safetensors"}, "data: cannot read gone.safetensors"),
        ({"tokens.safetensors": "run.yaml"}, "data: cannot read run.yaml"),
        ({"tokens.safetensors": "said.safetensors"}, "data: said.safetensors has .*expected input_ids as well"),
        (
            {"vocabulary: 251": "vocabulary: 200"},
            r"data: tokens.safetensors has token 2.*expected less than vocabulary, 200",
        ),
        (
            {"{model: {layers: 2, width: 48, heads: 4}}": "{top_k: tokens.safetensors}"},
            "teacher.top_k: .*expected ids, log_probs, tail_log_prob as well",
        ),
    ],
)
def test_a_wrong_configuration_is_refused(folder: Path, changes: dict[str, str], message: str) -> None:
    example: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    with pytest.raises(ConfigError, match=message):
        example["main"](write(changes))
