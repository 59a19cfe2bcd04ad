"""`stillhouse check` shows each loss alone: their gradients add up to that of the step."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.runs import session_of, write_run

from stillhouse.libraries import is_supported
from stillhouse.loops.session import Session
from stillhouse.tools.check import print_check, single_losses, verdict

LOSS = "0.3*cross_entropy + 0.1*z_loss + 0.7*jsd(0.5) + 0.01*entropy"
needs_mtp = pytest.mark.skipif(not is_supported("multi-token prediction"), reason="needs a later transformers")
HIDDEN = [{"student": 1, "teacher": 1, "loss": "mse", "scale": 0.1}]


def gradient(session: Session, engine: Any) -> torch.Tensor:
    engine.zero_grad()
    micro_batches = session.models.shard(session.schedule.step_schedule.micro_batches(session.data.train, 0))
    session.models.step(micro_batches, engine)
    found = [parameter.grad for _, parameter in session.models.student.named_parameters() if parameter.requires_grad]
    return torch.cat([torch.zeros(1) if gradient is None else gradient.flatten().double() for gradient in found])


@pytest.mark.parametrize(
    ("family", "settings", "names"),
    [
        ("qwen3_moe", {"objective.router_aux_loss": 0.1}, ["objective.router_aux_loss"]),
        ("llama", {"objective.hidden": HIDDEN}, ["objective.hidden"]),
        pytest.param("qwen3", {"student.mtp": {"depths": 1, "scale": 0.3}}, ["student.mtp"], marks=needs_mtp),
        pytest.param(
            *("qwen3", {"student.mtp": {"depths": 1}, "objective.hidden": HIDDEN}),
            ["student.mtp", "objective.hidden"],
            marks=needs_mtp,
        ),
        ("llama", {}, []),
    ],
)
def test_the_gradients_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, settings: dict[str, Any], names: list[str]
) -> None:
    settings = {"objective.loss": LOSS, **settings}
    session = session_of(tmp_path, family=family, **settings)
    engine = session.models.engine
    whole = gradient(session, engine)
    alone = {name: gradient(session, other) for name, other in single_losses(engine) if name != "cross_entropy"}
    assert [name for name in alone if name.startswith(("objective.", "student."))] == names
    assert all(float(one.norm()) > 0 for one in alone.values())
    total = torch.stack(list(alone.values())).sum(0)
    assert (total - whole).norm() <= 1e-5 * whole.norm()
    print_check(write_run(tmp_path, family=family, **settings))
    shown = capsys.readouterr().out
    for name in names:
        (norm,) = re.findall(rf"^  {re.escape(name)} +gradient norm (\S+)$", shown, re.MULTILINE)
        assert float(norm) == pytest.approx(float(alone[name].norm()), rel=1e-3)


def test_a_loss_that_hardly_counts_is_named() -> None:
    assert verdict({"forward_kl": 2.0}) is None
    assert (
        verdict({"forward_kl": 2.0, "cross_entropy": 0.1})
        == "no gradient is more than 30 times smaller than the largest"
    )
    words = verdict({"forward_kl": 2.0, "cross_entropy": 0.05, "with z_loss": 1e-9, "policy_gradient": 0.0})
    assert words == (
        "the gradient of cross_entropy is 40 times smaller than that of forward_kl, so it has almost no "
        "effect: multiply its coefficient by about 40 for an equal effect, or remove it; the gradient of "
        "policy_gradient is 0 in this step (which is normal if all completions of a prompt have "
        "the same reward)"
    )
    assert "than that of cross_entropy (which is normal while the student is new)" in str(
        verdict({"cross_entropy": 2.0, "jsd(0.5)": 0.05})
    )
    # a regulariser is named only as the largest
    assert verdict({"policy_gradient": 1.0, "entropy": 1e-5}) is None
    of_two = verdict({"policy_gradient": 1.0, "forward_kl": 2.0, "entropy": 1e-5, "objective.router_aux_loss": 1e-5})
    assert of_two == "no gradient is more than 30 times smaller than the largest"
    assert "of entropy, so it has almost no effect" in str(verdict({"policy_gradient": 1.0, "entropy": 40.0}))
    words = verdict({"forward_kl (dataset)": 2.0, "reverse_kl (student)": 0.0})
    cause = "(which is normal if no document of the step is the student's)"
    assert words == f"the gradient of reverse_kl (student) is 0 in this step {cause}"
