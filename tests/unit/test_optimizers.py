"""Optimizers other than AdamW: a step is that of torch's or torchao's own, and a checkpoint continues to the bit."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import causal_families
from kit.config_cases import refused_calls
from kit.families import build
from kit.layout_runs import assert_same_model, distill
from kit.runs import Command, forward_backward, run, session_of, write_run
from kit.tensors import assert_equal_tensors
from torch import nn
from torch._inductor import config as inductor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from stillhouse.checkpoint.checkpoint_folder import stored_tensors, verified
from stillhouse.checkpoint.save import load_checkpoint, save_checkpoint
from stillhouse.config import ConfigError, TrainConfig
from stillhouse.engine.optimizer import CombinedOptimizer, make_optimizer, make_step, require_optimizer, weight_kinds
from stillhouse.engine.state_folder import require_fit
from stillhouse.loops.session import Session
from stillhouse.models import Decoder
from stillhouse.output.progress import Progress
from stillhouse.parallel import Degrees, Layout

#: by optimizer, the tensors of its state in a checkpoint
MOMENTS = {
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "muon": {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"},
    "adafactor": {"step", "row_var", "col_var", "variance"},
    "adamw_8bit": {"step", "exp_avg", "exp_avg_sq", "codes", "scale"},
}
SETTINGS: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.95)}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its step for each shape, which takes seconds; uncompiled, it is the same arithmetic."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def reference(kind: str, model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    matrices = [weight for weight in named.values() if weight.dim() >= 2]
    vectors = [weight for weight in named.values() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if kind == "adafactor":
        return [torch.optim.Adafactor(groups, lr=rate)]
    if kind == "adamw_8bit":
        from torchao.optim import AdamW8bit

        return [AdamW8bit(groups, lr=rate, betas=(0.9, 0.95))]
    if kind == "adamw":
        return [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))]
    outside = re.compile("wte|wpe|embed|head")  # the names of GPT-2 and Llama
    inside = [weight for name, weight in named.items() if weight.dim() == 2 and not outside.search(name)]
    others = [weight for weight in matrices if not any(weight is one for one in inside)]
    groups[0]["params"] = others
    muon = torch.optim.Muon(inside, lr=rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", MOMENTS)
def test_steps_are_those_of_the_library(kind: str, family: str) -> None:
    model = build(family, vocab_size=256)
    other = copy.deepcopy(model)
    decoder = Decoder(model, verify=False)
    settings = TrainConfig(learning_rate=1e-2, optimizer=kind, **SETTINGS)
    optimizer = make_optimizer([decoder], settings)
    expected = reference(kind, other, 1e-2)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for step in range(3):
        torch.manual_seed(step)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        for one_optimizer in [optimizer, *expected]:
            make_step(one_optimizer, 1e-2 / (1 + step))
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        change = (two - before[name]).norm()
        assert change > 1e-3
        assert (one - two).norm() <= (1e-5 if kind == "muon" else 0) * change, name


#: family → the ends of the names of vectors with several dims, and of tables other than embedding and head
STACKED: dict[str, tuple[set[str], set[str]]] = {
    "gpt_oss": ({"gate_up_proj_bias", "down_proj_bias"}, set()),
    "mamba": ({"A_log"}, {"conv1d.weight"}),
    "zamba": ({"A_log", "D", "dt_proj_bias"}, {"conv1d.weight"}),
    "recurrent_gemma": ({"input_gate_bias", "recurrent_gate_bias"}, {"conv_1d.weight"}),
    "ernie4_5_moe": ({"e_score_correction_bias"}, set()),
    "chameleon": ({"q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"}, set()),
    "cohere": ({"q_norm.weight", "k_norm.weight"}, set()),
    "rwkv": ({"time_mix_key", "time_mix_value", "time_mix_receptance"}, set()),
    "dbrx": (set(), {"w1", "v1", "w2"}),
    "qwen3_next": (set(), {"conv1d.weight"}),
    "gemma3_text": (set(), set()),
}


@pytest.mark.parametrize("family", STACKED)
def test_the_module_decides_what_a_matrix_is(family: str) -> None:
    """Vectors and matrices may be stacked; routers and experts have matrices without `nn.Linear`."""
    model = causal_families.build(family, **({"use_qk_norm": True} if family == "cohere" else {}))
    decoder = Decoder(model, verify=False)
    kinds, (vectors, tables) = weight_kinds([decoder]), STACKED[family]
    names: dict[str, set[str]] = {"vector": set(), "table": set(), "matrix": set()}
    for name, weight in decoder.named_parameters():
        if weight.dim() == 1:
            assert kinds[weight] == "vector", name
        elif ".layers." in name or ".blocks." in name:
            end = next((end for end in (*vectors, *tables) if name.endswith(f".{end}")), name)
            names[kinds[weight]].add(end)
    assert names["vector"] == vectors
    assert names["table"] == tables
    assert not names["matrix"] & {*vectors, *tables}
    assert kinds[decoder.output_weight] == "table"
    optimizer = make_optimizer([decoder], TrainConfig(weight_decay=0.1))
    trained = [weight for weight in decoder.parameters() if weight.requires_grad]
    decay = {weight: group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    assert decay == {weight: 0.0 if kinds[weight] == "vector" else 0.1 for weight in trained}


def test_weights_of_unknown_names_have_weight_decay() -> None:
    module = nn.Module()
    names = {"kernel": (4, 8), "w1": (4, 8), "wi": (2, 4, 8), "router": (4, 8), "W_q": (4, 8), "pos_embed": (1, 4, 8)}
    vectors = {"shift": (1, 1, 8), "router_bias": (4, 8), "A_log": (4, 8)}
    for name, shape in (names | vectors).items():
        setattr(module, name, nn.Parameter(torch.ones(shape)))
    kinds = {name: weight_kinds([module])[weight] for name, weight in module.named_parameters()}
    assert kinds == dict.fromkeys(names, "table") | dict.fromkeys(vectors, "vector")


def test_muon_steps_each_matrix_of_a_stack_by_itself() -> None:
    """A step of torch's Muon with each expert's matrices as parameters of their own; the biases are AdamW's."""
    decoder = Decoder(causal_families.build("gpt_oss"), verify=False)
    optimizer = make_optimizer([decoder], TrainConfig(learning_rate=1e-2, optimizer="muon", **SETTINGS))
    assert isinstance(optimizer, CombinedOptimizer)
    named = {name: weight for name, weight in decoder.named_parameters() if ".experts." in name}
    others = {name: [nn.Parameter(part.detach().clone()) for part in weight] for name, weight in named.items()}
    matrices, vectors = ([part for parts in others.values() for part in parts if part.dim() == dim] for dim in (2, 1))
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95))
    for step in range(2):
        torch.manual_seed(step)
        for weight in decoder.parameters():
            weight.grad = torch.randn_like(weight)
        for name, parts in others.items():
            gradient = named[name].grad
            assert gradient is not None
            for part, part_gradient in zip(parts, gradient, strict=True):
                part.grad = part_gradient.clone()
        for one in (optimizer, muon, adamw):
            one.step()
    for name, weight in named.items():
        torch.testing.assert_close(weight.detach(), torch.stack(list(others[name])).detach(), rtol=1e-5, atol=1e-6)


def test_a_state_of_muon_with_other_matrices_is_named() -> None:
    """Earlier versions took the stacked biases of experts for matrices."""
    shared = {"optimizer.state.up.momentum_buffer"}
    muons, adamws = {"optimizer.state.up_bias.momentum_buffer"}, {"optimizer.state.up_bias.exp_avg"}
    now = {name: torch.empty(2, 3) for name in shared | adamws}
    for before, message in (
        (shared | muons, r"applied Muon to all weights with two dims.*stillhouse export step --out FOLDER"),
        (shared, "expected the student, the train.optimizer and the section objective"),  # a damaged checkpoint
        (adamws, "expected the student, the train.optimizer and the section objective"),  # of another optimizer
    ):
        properties = TensorProperties(torch.float32)
        stored = {name: TensorStorageMetadata(properties, torch.Size([2, 3]), []) for name in before}
        with pytest.raises(ValueError, match=message):
            require_fit(Path("step"), stored, now, is_complete=True)


@pytest.mark.parametrize("kind", MOMENTS)
def test_a_checkpoint_continues_to_the_bit(tmp_path: Path, kind: str) -> None:
    def started() -> Session:
        settings = {f"train.{name}": value for name, value in SETTINGS.items()}
        return session_of(tmp_path, tied=True, **{"train.optimizer": kind, "train.learning_rate": 1e-2, **settings})

    session = started()
    for _ in range(2):
        forward_backward(session)
        session.models.engine.update(1e-2)
    path = save_checkpoint(tmp_path / "saved", Progress(2), session.models.engine, session.data.tokenizer)
    kept = {name.rpartition(".")[2] for name in stored_tensors(path / "resume") if name.startswith("optimizer.")}
    assert kept == MOMENTS[kind]
    again = started()
    load_checkpoint(verified(path), again.models.engine)
    for started_session in (session, again):
        forward_backward(started_session)
        started_session.models.engine.update(5e-3)
    assert_equal_tensors(*(dict(one.models.student.named_parameters()) for one in (session, again)))


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, **{"train.steps": 1, "train.optimizer": "muon"})
    run("distill", tmp_path / "run.yaml")
    started_from = f"checkpoint.resume={tmp_path / 'out' / 'checkpoints' / 'step-00000001'}"
    other = [f"out={tmp_path / 'other'}", "train.optimizer=adamw", started_from]
    ended = run("distill", tmp_path / "run.yaml", *other, code=1)
    assert "expected the student, the train.optimizer and the section objective of the run that wrote" in ended.err
    ended = run("distill", tmp_path / "run.yaml", "train.optimizer=adamw", code=1)
    assert "another run, with a different train.optimizer" in ended.err


def without_compiling() -> None:
    """As TORCH_COMPILE_DISABLE=1, which torch reads when it is imported."""
    torch._dynamo.config.disable = True


def without_a_compiler() -> None:
    """As CXX=/nowhere, which torch reads when it is imported."""
    inductor.cpp.cxx = ("/nowhere",)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "words"), refused_calls("without a compiler"))
def test_without_a_compiler_8_bits_are_refused_by_name(tmp_path: Path, call: str, words: str) -> None:
    write_run(tmp_path, **{"train.optimizer": "adamw_8bit"})
    no_cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ended = Command("distill", tmp_path / "run.yaml", hook=eval(call), environment=no_cache)
    assert ended.wait(120) == 2, ended.err
    assert f"error: train.optimizer: {words}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("degrees", [Degrees(fsdp=2), Degrees(tensor=2), Degrees(replicate=2), Degrees(context=2)])
@pytest.mark.parametrize("kind", MOMENTS)
def test_a_layout_that_divides_weights_is_refused(tmp_path: Path, kind: str, degrees: Degrees) -> None:
    train = write_run(tmp_path, **{"train.optimizer": kind}).train
    require_optimizer(train, Layout(Degrees(pipeline=2)))
    if kind in ("adamw", "muon"):
        require_optimizer(train, Layout(degrees))
        return
    with pytest.raises(ConfigError, match=f"got {kind} under .*: expected adamw or muon") as caught:
        require_optimizer(train, Layout(degrees))
    assert caught.value.key == "train.optimizer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("muon", ["parallel.fsdp=2", "parallel.tensor=2", "parallel.pipeline=2"]),
        ("adafactor", ["parallel.pipeline=2"]),
        ("adamw_8bit", ["parallel.pipeline=2"]),
    ],
)
def test_checkpoints_move_between_layouts(tmp_path: Path, kind: str, layouts: list[str]) -> None:
    write_run(tmp_path, **{"train.optimizer": kind, "checkpoint.every": 1, "checkpoint.keep": 9})
    distill(tmp_path, "one", 1)
    for layout in layouts:
        first = f"checkpoint.resume={tmp_path / 'one' / 'checkpoints' / 'step-00000002'}"
        distill(tmp_path, layout, 2, layout, first)
        assert_same_model(tmp_path / "one", tmp_path / layout)
        then = f"checkpoint.resume={tmp_path / layout / 'checkpoints' / 'step-00000004'}"
        distill(tmp_path, f"{layout} again", 1, then)
        assert_same_model(tmp_path / "one", tmp_path / f"{layout} again")
