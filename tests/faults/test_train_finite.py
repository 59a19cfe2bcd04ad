"""A loss or gradient that is not finite stops the run before it changes a weight; the error names its source."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.documents import LINE, odd_id, vanishing, with_odd_line
from kit.fused_adamw import state_of, use_fused_adamw
from kit.runs import MAX_TOKENS, forward_backward, metrics, run, save_model, session_of, write_records, write_run
from kit.tensors import assert_equal_tensors
from torch import Tensor

from stillhouse.checkpoint.checkpoint_folder import checkpoints
from stillhouse.engine.engine import StepOutput
from stillhouse.loops.off_policy import train
from stillhouse.loops.session import Session
from stillhouse.models import NotFiniteError
from stillhouse.output.folder import RunFolder, init_run_dir

SETTINGS = {"train.steps": 8, "checkpoint.every": 1, "checkpoint.keep": 100, "checkpoint.best": None}
#: whether the optimizer steps before the host reads the norm, and skips the step by a flag on the device, as on a GPU
by_flag = pytest.mark.parametrize("fused", [False, True], ids=["read first", "by flag"])


def odd_session(folder: Path, *, fused: bool = False, **settings: Any) -> Session:
    with_odd_line(folder)
    session = session_of(folder, **SETTINGS | {"data.train": str(folder / "odd.jsonl")} | settings)
    if fused:
        use_fused_adamw(session.models.engine)
    return session


def odd_step(session: Session) -> int:
    """Return the first step, counted from 1, that trains on the odd line."""
    document = session.data.train.documents.sources.index(f"{session.values['data.train']}:{LINE}")
    for step in range(session.schedule.step_schedule.steps):
        for rows in session.schedule.step_schedule.micro_batches(session.data.train, step).rows:
            if any(document in session.data.train.members(row) for row in rows):
                return step + 1
    raise AssertionError("no step of this run trains on the odd line")


def train_in(session: Session, **others: Any) -> None:
    folder = RunFolder(Path(str(session.values["out"])))
    init_run_dir(folder, "")
    train(session, folder, **others)


@by_flag
def test_a_loss_names_its_term_and_its_line(tmp_path: Path, fused: bool) -> None:
    """Documents that became NaN because they share a row with the odd document are not named."""
    session = odd_session(tmp_path, fused=fused)
    assert session.models.teacher is not None
    with torch.no_grad():
        session.models.teacher.pretrained.get_input_embeddings().weight[odd_id()] = math.nan
    seen: list[dict[str, Tensor]] = []
    optimized = torch.optim.AdamW.step
    step = odd_step(session)
    assert 1 < step < session.schedule.step_schedule.steps

    def watched(*arguments: Any, **settings: Any) -> Any:
        result = optimized(*arguments, **settings)
        seen.append(state_of(session.models.engine))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", watched)
        with pytest.raises(ValueError, match=f"^step {step}: the loss is not finite") as caught:
            train_in(session)
    message = str(caught.value)
    assert f": jsd(0.5) on {tmp_path}/odd.jsonl:{LINE}. " in message
    assert "cross_entropy" not in message
    assert len(seen) == step - 1 + fused
    assert_equal_tensors(state_of(session.models.engine), seen[step - 2])
    names = [path.name for path in checkpoints(tmp_path / "out" / "checkpoints")]
    assert names == [f"step-{number:08d}" for number in range(1, step)]
    assert metrics(tmp_path / "out")[-1]["step"] == step - 1


def test_more_than_one_term_and_an_infinite_student(tmp_path: Path) -> None:
    """The student has an infinite weight: both terms are infinite, and each one still names the right document."""
    session = odd_session(tmp_path, **{"train.micro_batch_tokens": 4 * MAX_TOKENS, "checkpoint.every": 0})
    with torch.no_grad():
        session.models.student.pretrained.get_input_embeddings().weight[odd_id()] = math.inf
    with pytest.raises(ValueError, match=f"^step {odd_step(session)}: the loss is not finite") as caught:
        train_in(session)
    where = f"{tmp_path}/odd.jsonl:{LINE}"
    assert f": cross_entropy on {where}; jsd(0.5) on {where}. " in str(caught.value)


@by_flag
def test_a_gradient_with_a_finite_loss_names_parameter_and_line(tmp_path: Path, fused: bool) -> None:
    save_model(tmp_path / "student", tied=False, seed=1, change=vanishing)
    write_records(tmp_path / "eval.jsonl", [{"text": "the heads"}])
    session = odd_session(tmp_path, fused=fused)
    with pytest.raises(ValueError, match=f"^step {odd_step(session)}: the gradient is not finite") as caught:
        train_in(session)
    message = str(caught.value)
    assert "gradient norm nan" in message or "gradient norm inf" in message
    assert "(loss nan" not in message
    assert "gradient of backbone." in message
    assert f"more) on {tmp_path}/odd.jsonl:{LINE}. " in message
    assert all(bool(weight.isfinite().all()) for weight in session.models.student.parameters())
    assert all(parameter.grad is None for parameter in session.models.student.parameters())


@by_flag
def test_steps_after_a_skipped_one_are_as_without_it(tmp_path: Path, fused: bool) -> None:
    """An infinite loss with a finite gradient is refused, too; an infinite metric that is no loss is not."""
    sessions = [session_of(tmp_path, **{"train.clip": 1e-3}) for _ in range(2)]
    for session, losses in zip(sessions, ([0.0, 0.0], [0.0, math.inf, 0.0]), strict=True):
        if fused:
            use_fused_adamw(session.models.engine)
        for loss in losses:
            output = forward_backward(session)
            more = (("loss", torch.tensor(loss)), ("entropy", torch.tensor(math.inf)))
            changed = StepOutput(named=[*output.named, *more])
            norm = session.models.engine.gradient_norm()
            if loss == 0.0:
                assert session.models.engine.update(1e-2, changed) == norm
                continue
            with pytest.raises(NotFiniteError) as caught:
                session.models.engine.update(1e-2, changed)
            assert caught.value.norm == norm
            session.models.engine.zero_grad()
    assert_equal_tensors(state_of(sessions[1].models.engine), state_of(sessions[0].models.engine))


def huge(model: Any) -> None:
    """Set a finite weight whose mean in a layer norm is infinite."""
    model.get_input_embeddings().weight[odd_id()] = 3e38


def test_the_command_fails_with_1_and_the_run_can_continue_in_another_folder(tmp_path: Path) -> None:
    save_model(tmp_path / "student", "gpt2", tied=False, seed=1, change=huge)
    write_records(tmp_path / "eval.jsonl", [{"text": "the heads"}])
    session = odd_session(tmp_path)
    step = odd_step(session)
    failed = run("distill", tmp_path / "run.yaml", code=1)
    assert f"error: step {step}: the loss is not finite" in failed.err
    assert f"{tmp_path}/odd.jsonl:{LINE}" in failed.err
    newest = checkpoints(tmp_path / "out" / "checkpoints")[-1]
    assert newest.name == f"step-{step - 1:08d}"
    assert not (tmp_path / "out" / "model").exists()
    again = run("distill", tmp_path / "run.yaml", code=1)
    assert f"resuming from {newest}" in again.out
    assert f"error: step {step}: the loss is not finite" in again.err
    steps = [line["step"] for line in metrics(tmp_path / "out") if "loss/total_nats_per_token" in line]
    assert steps == list(range(1, step))

    clean = write_records(tmp_path / "clean.jsonl", [{"text": f"{number} the heads"} for number in range(40)])
    changed = [f"data.train={clean}", "train.learning_rate=1e-4", f"out={tmp_path}/other"]
    run("distill", tmp_path / "run.yaml", *changed, f"checkpoint.resume={newest}")
    assert (tmp_path / "other" / "model" / "model.safetensors").exists()
    assert next(line["step"] for line in metrics(tmp_path / "other")) == step
    run("distill", tmp_path / "run.yaml", changed[0], f"out={tmp_path}/clean")  # without that line, the run ends well


@pytest.mark.parametrize("loss", ["forward_kl", "0.5*cross_entropy + 0.5*forward_kl"])
def test_a_first_step_without_a_gradient_is_warned_of(tmp_path: Path, loss: str) -> None:
    """A student with an adapter that is not trained is its own teacher."""
    student = str(tmp_path / "student")
    settings = {"objective.loss": loss, "student.adapter": {"r": 2}, "teacher.model": student, "train.steps": 2}
    write_run(tmp_path, **settings)
    shown = run("distill", tmp_path / "run.yaml").out
    first = next(line for line in metrics(tmp_path / "out") if line["step"] == 1)
    assert ("the gradient of step 1 is 0" in shown) == (loss == "forward_kl") == (first["train/gradient_norm"] == 0)
