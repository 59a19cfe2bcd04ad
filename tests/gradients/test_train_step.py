"""A step's loss and gradient against a plain computation: transformers' logits, log_softmax, and one backward."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.family_steps import plain
from kit.runs import MAX_TOKENS, forward_backward, metrics, save_model, session_of, write_records
from kit.tensors import assert_near
from torch import Tensor
from transformers import AutoModelForCausalLM

from stillhouse.data import MicroBatch, PackedSequences, StepMicroBatches
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.loops.off_policy import train
from stillhouse.loops.session import Session
from stillhouse.models import Decoder
from stillhouse.models.processors import DistillTargets
from stillhouse.objective import TEACHER, FullVocab, OutputHead, Signal
from stillhouse.output.folder import RunFolder, init_run_dir
from stillhouse.parallel import single_process_runner
from stillhouse.signals import InStageTeacher

WORDS = ["The", "still", "is", "heated", "slowly", "and", "what", "boils", "first", "leaves", "first", "the", "heads"]


def prompted(folder: Path, **settings: Any) -> Session:
    """A run on prompts of different lengths, which are masked, and completions, which are trained on."""
    rows = [
        {"prompt": " ".join(WORDS[: n % 5 + 1]) + " ", "completion": " ".join(WORDS[n % 7 : n % 7 + n % 4 + 1])}
        for n in range(24)
    ]
    write_records(folder / "prompts.jsonl", rows)
    wide = {"data.train": str(folder / "prompts.jsonl"), "student.dtype": "float64", "teacher.dtype": "float64"}
    return session_of(folder, **wide | settings)


def step_batches(session: Session, step: int = 0) -> list[MicroBatch]:
    return list(session.schedule.step_schedule.micro_batches(session.data.train, step))


def gradients_of(session: Session, batches: list[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    """Return the step's loss and its gradients by the parameter's name in the Hugging Face model."""
    session.models.student.zero_grad()
    loss = forward_backward(session, batches).sums["loss"]
    named = session.models.student.pretrained.named_parameters()
    return loss, {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize(
    ("dtype", "micro", "tied"),
    [
        *(("float64", micro, tied) for micro in (1, 2, 4) for tied in (True, False)),
        *(("float32", micro, None) for micro in (1, 4)),
    ],
)
def test_a_steps_gradient_is_the_plain_one(tmp_path: Path, dtype: str, micro: int, tied: bool | None) -> None:
    """To the precision of the dtype, which the weights and the normaliser have, too."""
    settings = {"student.dtype": dtype, "teacher.dtype": dtype, "train.micro_batch_tokens": micro * MAX_TOKENS}
    session = prompted(tmp_path, tied=tied, **settings)
    batches = step_batches(session)
    sums, count = forward_backward(session, batches).sums, sum(batch.valid_tokens for batch in batches)
    assert sums["tokens"] == count
    # in the log, a term is unscaled, and the total is scaled
    expected_loss = (0.3 * sums["cross_entropy"] + 0.7 * sums["jsd(0.5)"]) / count
    assert sums["loss"] == pytest.approx(expected_loss, rel=1e-6 if dtype == "float64" else 1e-5)
    assert len(batches) == 4 // micro
    assert 0 < count < sum(batch.input_ids_BS.numel() for batch in batches) / 2
    loss, gradients = gradients_of(session, batches)
    expected_loss, expected = plain(session, tmp_path, "float64", AutoModelForCausalLM.from_pretrained)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    single, total = (1e-10, 1e-10) if dtype == "float64" else (1e-5, 2e-6)
    assert_near(gradients, expected, single)
    actual, wanted = (torch.cat([named[name].flatten() for name in gradients]) for named in (gradients, expected))
    assert (actual - wanted).norm() / wanted.norm() < total


def test_the_next_step_is_packed_before_the_host_waits_for_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def recorded(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            events.append(event)
            return function(*arguments)

        return call

    monkeypatch.setattr(PackedSequences, "micro_batch", recorded("pack", PackedSequences.micro_batch))
    monkeypatch.setattr(TorchEngine, "_total", recorded("wait", TorchEngine._total))
    session = prompted(tmp_path, **{"train.steps": 3, "train.micro_batch_tokens": 4 * MAX_TOKENS, "data.eval": 0})
    init_run_dir(folder := RunFolder(tmp_path / "out"), "")
    events.clear()
    train(session, folder)
    assert events == ["pack", "pack", "wait", "pack", "wait", "wait"]


def test_the_whole_loss_curve_does_not_depend_on_the_micro_batch(tmp_path: Path) -> None:
    curves, weights = [], []
    for micro in (64, 128, 512):
        changed = {"train.tokens_per_step": 512, "train.micro_batch_tokens": micro, "train.steps": 5}
        session = prompted(tmp_path, **changed, out=str(tmp_path / f"out{micro}"))
        folder = RunFolder(tmp_path / f"out{micro}")
        init_run_dir(folder, "")
        train(session, folder)
        keys = ("loss/total_nats_per_token", "loss/cross_entropy_nats_per_token", "loss/jsd(0.5)_nats_per_token")
        figures = (*keys, "train/gradient_norm", "train/student_entropy_nats", "train/agreement", "tokens")
        lines = [line for line in metrics(folder.path) if keys[0] in line]
        curves.append([[line[key] for key in figures] for line in lines])
        weights.append(torch.cat([parameter.detach().flatten() for parameter in session.models.student.parameters()]))
    assert len(curves[0]) == 5
    assert curves[0][0][0] > curves[0][-1][0]
    for curve, weight in zip(curves[1:], weights[1:], strict=True):
        np.testing.assert_allclose(curve, curves[0], rtol=1e-6)
        assert (weight - weights[0]).norm() / weights[0].norm() < 1e-10


def teacher_signal(session: Session, batch: MicroBatch) -> FullVocab:
    """Return the teacher's signal that the student's processor gets."""

    def processor(*, hidden_states: Tensor, head: OutputHead, context: DistillTargets, depth: int = 0) -> Signal:
        with context.signals[TEACHER].opened(head) as opened:
            return opened

    micro_batches = session.models.shard(StepMicroBatches([batch]))
    signals = session.models.source.request(micro_batches).result()
    (signal,) = session.models.engine.process(processor, micro_batches, signals)
    return signal


def test_the_teacher_has_no_dropout_whatever_mode_it_is_put_in(tmp_path: Path) -> None:
    save_model(tmp_path / "teacher", "gpt2", seed=2)
    session = session_of(tmp_path)
    (batch, *_), teacher = step_batches(session), session.models.teacher
    assert teacher is not None
    assert teacher.config.resid_pdrop > 0
    expected = teacher_signal(session, batch).hidden_TE
    session.models.student.train()
    teacher.train()
    assert torch.equal(teacher_signal(session, batch).hidden_TE, expected)
    torch.testing.assert_close(gradients_of(session, [batch])[0], gradients_of(session, [batch])[0], rtol=0, atol=0)


def test_no_gradient_reaches_the_teacher_and_a_run_leaves_it_as_it_was(tmp_path: Path) -> None:
    session = session_of(tmp_path, **{"train.steps": 3, "train.weight_decay": 0.1})
    assert session.models.teacher is not None
    before = {name: weight.clone() for name, weight in session.models.teacher.state_dict().items()}
    init_run_dir(RunFolder(tmp_path / "out"), "")
    student = {name: weight.clone() for name, weight in session.models.student.state_dict().items()}
    train(session, RunFolder(tmp_path / "out"))
    assert all(torch.equal(weight, before[name]) for name, weight in session.models.teacher.state_dict().items())
    assert not any(torch.equal(weight, student[name]) for name, weight in session.models.student.state_dict().items())
    for parameter in session.models.teacher.parameters():
        assert parameter.grad is None
        assert not parameter.requires_grad


def test_bfloat16_is_for_products_only(tmp_path: Path) -> None:
    """Master weights and gradients are float32. The step is close to the float32 step but not equal to it."""
    exact = session_of(tmp_path)
    loss, expected = gradients_of(exact, step_batches(exact))
    rounded = session_of(tmp_path, **{"train.precision": "bf16"})
    rounded_loss, gradients = gradients_of(rounded, step_batches(rounded))
    assert all(parameter.dtype == torch.float32 for parameter in rounded.models.student.parameters())
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    assert rounded_loss == pytest.approx(loss, rel=0.01)
    assert rounded_loss != loss
    flat, exact_flat = (torch.cat([named[name].flatten() for name in expected]) for named in (gradients, expected))
    assert 0 < (flat - exact_flat).norm() / exact_flat.norm() < 0.1
    rounded.models.engine.update(1e-3)
    moments = [state["exp_avg_sq"] for state in rounded.models.engine.optimizer.state.values()]
    assert moments
    assert all(moment.dtype == torch.float32 for moment in moments)


def test_a_float32_teacher_stays_float32_beside_a_bfloat16_student(tmp_path: Path) -> None:
    session = session_of(tmp_path, **{"train.precision": "bf16"})
    (batch, *_), teacher = step_batches(session), session.models.teacher
    assert teacher is not None
    expected = teacher.signal(batch.input_ids_BS, batch.position_ids_BS).hidden_TE
    assert torch.equal(teacher_signal(session, batch).hidden_TE, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputed_activations_give_the_same_gradient(tmp_path: Path, family: str) -> None:
    """GPT-2 has dropout: the recomputation must draw the same random numbers as the forward."""
    results = []
    for recompute in (False, True):
        session = session_of(tmp_path, family=family, **{"train.activation_checkpointing": recompute})
        torch.manual_seed(5)
        results.append(gradients_of(session, step_batches(session)))
    assert results[0][0] == results[1][0]
    assert_near(results[1][1], results[0][1], 1e-6)


def test_micro_batches_without_targets(tmp_path: Path) -> None:
    """Alone, they give every parameter an exact zero; beside another micro-batch, they change nothing."""
    session = session_of(tmp_path)
    batch, other, *_ = step_batches(session)
    loss, gradients = gradients_of(session, [batch.without_targets()])
    assert loss == 0
    assert len(gradients) == len(list(session.models.student.pretrained.parameters()))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())
    loss, expected = gradients_of(session, [batch])
    with_empty_loss, gradients = gradients_of(session, [batch, other.without_targets()])
    assert with_empty_loss == loss
    assert_near(gradients, expected, 0)


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e9])
def test_clipping_is_of_the_whole_gradient(tmp_path: Path, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, **{"train.clip": limit})
    _, before = gradients_of(session, step_batches(session))
    norm = torch.cat([gradient.flatten() for gradient in before.values()]).double().norm()
    # the gradient that the optimizer gets
    applied: list[torch.Tensor] = []
    parameters = [parameter for parameter in session.models.student.parameters() if parameter.grad is not None]
    monkeypatch.setattr(
        session.models.engine.optimizer,
        "step",
        lambda: applied.extend(parameter.grad.flatten() for parameter in parameters),
    )
    assert session.models.engine.update(1e-3) == pytest.approx(float(norm), rel=1e-6)
    expected = limit if 0 < limit < norm else norm
    assert float(torch.cat(applied).double().norm()) == pytest.approx(float(expected), rel=1e-5)


def test_matrices_decay_and_vectors_do_not(tmp_path: Path) -> None:
    session = session_of(tmp_path, tied=True, **{"train.learning_rate": 0.1, "train.weight_decay": 0.5})
    before = {name: parameter.detach().clone() for name, parameter in session.models.student.named_parameters()}
    for parameter in session.models.student.parameters():
        parameter.grad = torch.zeros_like(parameter)
    session.models.engine.update(0.2)  # the learning rate of this step, not the initial one
    for name, parameter in session.models.student.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.9 if parameter.dim() >= 2 else 1.0))
        assert parameter.grad is None


def test_a_teacher_with_more_rows_than_the_student_is_fine(tmp_path: Path) -> None:
    """Models of one tokenizer may have 151,936 and 152,064 rows; the padded rows get no probability."""
    save_model(tmp_path / "student", seed=1)
    save_model(tmp_path / "teacher", "qwen3", seed=2, change=lambda model: model.resize_token_embeddings(416))
    session = session_of(tmp_path)
    assert session.models.teacher is not None
    assert (session.models.student.vocabulary_rows, session.models.teacher.vocabulary_rows) == (400, 416)
    with_padding = gradients_of(session, step_batches(session))
    model = session.models.teacher.pretrained
    model.resize_token_embeddings(400)
    runner = single_process_runner(session.models.student, Decoder(model))
    engine = TorchEngine(runner, session.loss.spec)
    session = replace(session, models=replace(session.models, engine=engine, source=InStageTeacher()))
    without = gradients_of(session, step_batches(session))
    assert with_padding[0] == pytest.approx(without[0], rel=1e-6)
    assert_near(with_padding[1], without[1], 1e-5)
