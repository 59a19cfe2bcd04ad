"""The loss between hidden states: its gradients against plain autograd, runs with it, and what is refused.

B rows, S tokens per row, T = B·S; D, E widths of student and teacher.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.config_cases import assert_refused, refused_calls
from kit.layout_runs import distill
from kit.runs import contents, forward_backward, metrics, run, save_model, session_of, write_run
from kit.teacher_gradients import named_gradients
from kit.toy_tokenizer import toy_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, Qwen3Config

from stillhouse.config import ConfigError
from stillhouse.loops.session import Session
from stillhouse.models import Decoder, HiddenPair, match_hidden
from stillhouse.models.hidden_states import HiddenMatch
from stillhouse.models.layer_hooks import numbered_layers
from stillhouse.parallel.stages import Stage, require_pairs

PAIRS: list[dict[str, Any]] = [
    {"student": 0, "teacher": 1, "scale": 0.7},
    {"student": -1, "teacher": -1, "loss": "cosine", "scale": 0.3},
]

NAMES = ["hidden_0_1_mse", "hidden_1_2_cosine"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a teacher that is wider than the student."""
    folder, tokenizer = tmp_path_factory.mktemp("hidden"), toy_tokenizer()
    torch.manual_seed(3)
    wide = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=80, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=20, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(wide).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    write_run(folder)
    return folder


def outputs(decoder: Decoder, inputs: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """The outputs [B, S, D] of all layers, and the logits, by a plain forward of the Hugging Face model."""
    hidden: list[Tensor] = []

    def keep(_: object, __: object, output: Any) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in numbered_layers(decoder)]
    logits = decoder.pretrained(**inputs, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return hidden, logits


def expected_loss(session: Session) -> Tensor:
    """The loss of the first step: cross-entropy, and the distances of both pairs, from tensors of all tokens."""
    match, teacher = session.models.student.layer_loss(HiddenMatch), session.models.teacher
    assert teacher is not None
    step = session.schedule.step_schedule.micro_batches(session.data.train, 0)
    total = torch.zeros((), dtype=torch.float64)
    for batch in step:
        student_hidden, logits_BSV = outputs(session.models.student, batch.inputs)
        with torch.no_grad():
            teacher_hidden, _ = outputs(teacher, batch.inputs)
        log_q_TV = logits_BSV.double().log_softmax(-1).flatten(0, 1)
        label_T = batch.labels_T.clamp(min=0)
        loss_T = -log_q_TV.gather(1, label_T[:, None])[:, 0]
        for pair in match.pairs:
            kind, scale = pair.kind, pair.scale
            hidden_TE = (
                student_hidden[pair.student].double().flatten(0, 1) @ match.projectors[pair.name].weight.double().T
            )
            target_TE = teacher_hidden[pair.teacher].double().flatten(0, 1)
            if kind == "mse":
                loss_T = loss_T + scale * (hidden_TE - target_TE).square().mean(1)
            else:
                loss_T = loss_T + scale * (1 - cosine_similarity(hidden_TE, target_TE))
        total = total + (loss_T * batch.weights_T).sum()
    return total / step.normalizer


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_those_of_plain_autograd(folder: Path, recomputed: bool) -> None:
    settings = {"objective.loss": "cross_entropy", "objective.hidden": PAIRS}
    settings["train.activation_checkpointing"] = recomputed
    session = session_of(folder, **settings)
    loss = expected_loss(session)
    loss.backward()
    reference = {name: gradient.clone() for name, gradient in named_gradients(session.models.student).items()}
    session.models.engine.zero_grad()
    sums = forward_backward(session).sums
    assert sums["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert sums["hidden_0_1_mse"] > 0
    gradients = named_gradients(session.models.student)
    assert gradients.keys() == reference.keys()
    assert {f"hidden_match.projectors.{name}.weight" for name in NAMES} < gradients.keys()
    torch.testing.assert_close(gradients, reference, rtol=2e-5, atol=1e-6)


def test_a_run_with_hidden_states_is_resumed_exactly_and_exports_a_plain_model(folder: Path) -> None:
    undisturbed, parts = ({"out": str(folder / name), "checkpoint.every": 3} for name in ("whole", "parts"))
    path = folder / "run.yaml"
    write_run(folder, **{"objective.hidden": PAIRS, **undisturbed})
    run("distill", path)
    write_run(folder, **{"objective.hidden": PAIRS, **parts, "train.steps": 6})
    run("distill", path)
    final = folder / "parts" / "checkpoints" / "step-00000006"
    for removed in (final, folder / "parts" / "model"):
        shutil.rmtree(removed)
    assert "resuming from" in run("distill", path).out
    assert contents(folder / "whole" / "model") == contents(folder / "parts" / "model")
    steps = [record for record in metrics(folder / "whole") if "loss/total_nats_per_token" in record]
    assert steps[-1]["loss/hidden_0_1_mse_per_token"] < 0.95 * steps[0]["loss/hidden_0_1_mse_per_token"]
    with safe_open(folder / "whole" / "model" / "model.safetensors", framework="pt") as file:
        assert not [name for name in file.keys() if "hidden_match" in name]  # noqa: SIM118
    AutoModelForCausalLM.from_pretrained(folder / "whole" / "model")


def test_the_projector_of_another_pair_is_refused(folder: Path) -> None:
    """It has the shape of this pair's one."""
    path, first = folder / "run.yaml", str(folder / "first")
    write_run(folder, **{"objective.hidden": [PAIRS[0]], "out": first, "train.steps": 1})
    run("distill", path)
    resume = f"{first}/checkpoints/step-00000001"
    for number, other in enumerate(
        [[{"student": 0, "teacher": 2}], [{"student": 0, "teacher": 1, "loss": "cosine"}]]
    ):
        out = str(folder / f"second {number}")
        write_run(folder, **{"objective.hidden": other, "out": out, "checkpoint.resume": resume})
        assert "some losses in objective have trained weights of their own" in run("distill", path, code=1).err


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"student.init": {"from": "random"}}, {"student.dtype": "bfloat16", "train.precision": "bf16"}]
)
def test_projectors_of_two_processes_are_those_of_one(folder: Path, settings: dict[str, Any]) -> None:
    """Also beside weights of another dtype, and beside random ones. The rate is nearly zero."""
    write_run(folder, **{"objective.hidden": PAIRS, "train.steps": 1, "train.learning_rate": 1e-30}, **settings)
    name, projectors = "-".join(settings), {}
    for processes in (1, 2):
        distill(folder, f"{name} {processes}", processes, "checkpoint.every=1")
        resume = folder / f"{name} {processes}" / "checkpoints" / "step-00000001" / "resume"
        tensors = [load_file(file) for file in sorted(resume.glob("*.safetensors"))]
        for pair_name in NAMES:
            key = f"student.hidden_match.projectors.{pair_name}.weight"
            projectors[pair_name, processes] = torch.cat([stored[key] for stored in tensors if key in stored])
    for pair_name in NAMES:
        assert torch.equal(projectors[pair_name, 1], projectors[pair_name, 2])
        assert float(projectors[pair_name, 1].norm(dim=1).mean()) == pytest.approx(1, abs=0.05)


def test_models_of_one_width_need_no_projector(tmp_path: Path) -> None:
    decoder = Decoder.from_pretrained(save_model(tmp_path / "model"))
    width, layers = decoder.config.hidden_size, decoder.config.num_hidden_layers
    match_hidden(decoder, [HiddenPair(-1, 0)], layers, width)
    match = decoder.layer_loss(HiddenMatch)
    assert not list(match.parameters())
    assert match.pairs == (HiddenPair(layers - 1, 0),)


def test_pairs_on_different_stages_are_refused(tmp_path: Path) -> None:
    decoder = Decoder.from_pretrained(save_model(tmp_path / "model"))
    match_hidden(decoder, [HiddenPair(0, 5)], 6, 64)
    stages = [Stage(0, 2, range(0, 1), range(0, 4)), Stage(1, 2, range(1, 2), range(4, 6))]
    message = r"layer 0 of the student is on stage 1 of 2, and layer 5 of the teacher.*expected teacher layer 0 to 3"
    with pytest.raises(ValueError, match=message):
        require_pairs(decoder, stages)


@pytest.mark.parametrize(("pairs", "message"), refused_calls("hidden states"))
def test_what_is_refused(folder: Path, pairs: str, message: str) -> None:
    call = f"session_of(folder, **{{'objective.hidden': {pairs}}})"
    assert_refused(call, message, globals() | {"folder": folder}, ConfigError)


def test_another_objective_compares_no_hidden_states(folder: Path) -> None:
    session = session_of(folder, **{"objective.loss": "cross_entropy", "objective.hidden": PAIRS})
    assert "hidden_0_1_mse" in forward_backward(session).sums
    session.models.engine.zero_grad()
    alone = session_of(folder, **{"objective.loss": "cross_entropy"})
    other = session.models.engine.with_losses(session.models.engine.objective)
    micro_batches = session.models.shard(session.schedule.step_schedule.micro_batches(session.data.train, 0))
    signals = session.models.source_for(other).request(micro_batches).result()
    sums = other.forward_backward(micro_batches, signals, micro_batches.all_ranks.normalizer).sums
    assert sums == forward_backward(alone).sums
