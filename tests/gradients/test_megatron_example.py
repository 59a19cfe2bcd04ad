"""examples/megatron_gkd.py: a run on four ranks equals plain training in one process; a wrong configuration fails."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed: `make test` does")

from kit.megatron_example import load_example
from kit.megatron_models import Layout, laid_out

from stillhouse.config.errors import ConfigError

KIT = Path(__file__).parents[1] / "kit"
VOCABULARY, N, S, K = 251, 12, 32, 7
TENSOR, STEPS, MICRO_BATCHES, ROWS = 2, 7, 4, 2
#: the second value is Megatron's default
LEARNING_RATE, WEIGHT_DECAY = 3e-3, 0.01
CONFIG = f"""
student: {{layers: 2, width: 32, heads: 4}}
teacher: {{model: {{layers: 2, width: 48, heads: 4}}}}
data: tokens.safetensors
vocabulary: {VOCABULARY}
objective: {{loss: 0.3*cross_entropy + 0.7*jsd(0.5)}}
parallel: {{tensor: {TENSOR}, pipeline: 2}}
train: {{steps: {STEPS}, micro_batches: {MICRO_BATCHES}, rows: {ROWS}, learning_rate: {LEARNING_RATE}}}
"""
TEACHER = "{model: {layers: 2, width: 48, heads: 4}}"
TOP_K = {TEACHER: "{top_k: top_k.safetensors}", ", pipeline: 2": ""}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random = torch.Generator().manual_seed(0)
    save_file({"input_ids": torch.randint(VOCABULARY, (N, S + 1), generator=random)}, "tokens.safetensors")
    save_file({"input_ids": torch.zeros(N)}, "flat.safetensors")
    log_probs = torch.randn(N, S, VOCABULARY, generator=random).mul(3).log_softmax(-1)
    top_k = log_probs.topk(K)
    tail = log_probs.scatter(-1, top_k.indices, -torch.inf).logsumexp(-1)
    save_file({"ids": top_k.indices, "log_probs": top_k.values, "tail_log_prob": tail}, "top_k.safetensors")
    return tmp_path


def write(changes: dict[str, str]) -> str:
    text = CONFIG
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    Path("run.yaml").write_text(text)
    return "run.yaml"


@dataclass
class Training:
    """losses, gradient_norms: one per step. weights: those after the last step."""

    losses: list[float]
    gradient_norms: list[float]
    weights: dict[str, Tensor]


@pytest.mark.parametrize(
    ("data_ranks", "changes"),
    [
        pytest.param(1, {}, id="teacher in the stages", marks=pytest.mark.slow),
        pytest.param(2, TOP_K, id="top-k", marks=pytest.mark.slow),
    ],
)
def test_every_step_is_that_of_plain_training_in_one_process(
    folder: Path, data_ranks: int, changes: dict[str, str]
) -> None:
    """Two tensor ranks, with two stages or two data ranks, equal plain logits, the formula and torch's AdamW."""
    training, start = run_example(write(changes))
    expected = train_plainly(start, data_ranks)
    assert training.losses == pytest.approx(expected.losses, rel=1e-6)
    assert training.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-5)
    assert training.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        change = (weight - start["student"][name]).norm()
        assert (training.weights[name] - weight).norm() < 1e-3 * change, name


def run_example(config: str) -> tuple[Training, dict[str, dict[str, Tensor]]]:
    """Run the example on four ranks. Return its training, and the initial weights of both models."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    run = subprocess.run(
        [*launch, str(KIT / "megatron_example.py"), config, "."],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{KIT.parents[1]}:{KIT.parent}"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    line = r"step \d+: loss ([\d.]+) over \d+ tokens, gradient norm ([\d.]+)"
    losses, gradient_norms = zip(*re.findall(line, run.stdout), strict=True)
    ranks = [torch.load(f"{rank}.pt") for rank in range(4)]
    models = {name: gathered_weights([rank[name] for rank in ranks]) for name in ranks[0]}
    return Training([*map(float, losses)], [*map(float, gradient_norms)], models.pop("trained")), models


def gathered_weights(ranks: list[dict[str, tuple[Tensor, int | None]]]) -> dict[str, Tensor]:
    """Put the parts of the tensor ranks together. Assert that replicated weights are equal on all ranks."""
    parts: dict[str, dict[int, Tensor]] = {}
    dims: dict[str, int | None] = {}
    for rank, weights in enumerate(ranks):
        for name, (weight, dim) in weights.items():
            dims[name] = dim
            place = 0 if dim is None else rank % TENSOR
            assert torch.equal(parts.setdefault(name, {}).setdefault(place, weight), weight), name
    gathered = {name: torch.cat([*shards.values()], dims[name] or 0) for name, shards in parts.items()}
    # the vocabulary was padded to a multiple of the tensor ranks
    return {
        name: weight[:VOCABULARY] if "word_embed" in name or "output" in name else weight
        for name, weight in gathered.items()
    }


def train_plainly(start: dict[str, dict[str, Tensor]], data_ranks: int) -> Training:
    """Do the same training in this process, with Megatron's model without parallelism and no code of the example.

    All rows of a step are one batch.
    """
    example = load_example()
    config = example.read_config("run.yaml").model_copy(update={"parallel": example.LayoutSection()})
    rows, positions_BS = {**load_file("tokens.safetensors"), **load_file("top_k.safetensors")}, torch.arange(S)[None]
    training = Training([], [], {})
    with one_process():
        student = example.build(config, config.student, S, seed=0)
        student.load_state_dict(start["student"], strict=False)
        teacher = None
        if config.teacher.model is not None:
            teacher = example.build(config, config.teacher.model, S, seed=1)
            teacher.load_state_dict(start["teacher"], strict=False)
        optimizer = torch.optim.AdamW(student.parameters(), LEARNING_RATE, (0.9, 0.999), 1e-8, WEIGHT_DECAY)
        count = data_ranks * MICRO_BATCHES * ROWS
        for step in range(STEPS):
            index_B = torch.arange(step * count, (step + 1) * count) % N
            batch = {name: column[index_B] for name, column in rows.items()}
            inputs, labels = (batch["input_ids"][:, :-1], positions_BS, None), batch["input_ids"][:, 1:]
            log_q = student(*inputs).log_softmax(-1)
            if teacher is None:
                p, q = top_k_and_tail(batch, log_q.exp())
            else:
                p, q = teacher(*inputs).detach().softmax(-1), log_q.exp()
            cross_entropy = -log_q.gather(-1, labels[..., None]).sum()
            loss = (0.3 * cross_entropy + 0.7 * jensen_shannon(p, q)) / labels.numel()
            optimizer.zero_grad()
            loss.backward()
            training.losses.append(loss.item())
            training.gradient_norms.append(nn.utils.clip_grad_norm_(student.parameters(), 1.0).item())
            optimizer.step()
        training.weights = {name: weight.detach() for name, weight in student.named_parameters()}
    return training


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    m = (p + q) / 2
    return 0.5 * (p * (p / m).log()).sum() + 0.5 * (q * (q / m).log()).sum()


def top_k_and_tail(batch: dict[str, Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the teacher's and the student's probabilities of K tokens and of all other tokens together."""
    inside = q.gather(-1, batch["ids"])
    p = torch.cat([batch["log_probs"], batch["tail_log_prob"][..., None]], -1).exp()
    return p, torch.cat([inside, 1 - inside.sum(-1, keepdim=True)], -1)


@contextmanager
def one_process() -> Iterator[None]:
    """Create a process group of one process, because Megatron's layers need a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with laid_out(Layout()):
            yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("jsd(0.5)", "jds(0.5)", "objective.loss: unknown name 'jds'"),
        ("jsd(0.5)", "jsd(0)", "objective.loss: .*forward_kl"),
        ("steps: 7", "steps: seven", "train.steps: .*seven"),
        ("steps: 7", "stepz: 7", "train.stepz"),
        ("loss: 0.3", "tokens: all, loss: 0.3", "objective.tokens: has no effect here"),
        ("{model: {", "{top_k: top_k.safetensors, model: {", "teacher: expected exactly one of model and top_k"),
        (
            "tensor: 2",
            "tensor: 3",
            "student: 2 layers over 2 pipeline ranks, 4 heads over 3 tensor ranks: expected",
        ),
        ("tokens.safetensors", "flat.safetensors", "data: input_ids of shape .* expected .N, S . 1. of int32"),
        ("tokens.safetensors", "gone.safetensors", "data: cannot read gone.safetensors"),
        ("tokens.safetensors", "run.yaml", "data: cannot read run.yaml"),
        ("tokens.safetensors", "top_k.safetensors", "data: top_k.safetensors has .*, but not input_ids"),
        (
            "vocabulary: 251",
            "vocabulary: 200",
            "data: tokens.safetensors has token 2.*less than vocabulary, 200",
        ),
        (TEACHER, "{top_k: tokens.safetensors}", "teacher.top_k: .* has input_ids, but not ids, log_probs, tail"),
    ],
)
def test_a_wrong_configuration_is_refused(folder: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_example().main(write({old: new}))
