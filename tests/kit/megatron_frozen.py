"""Students with an adapter: their base stays as it is, and may be the teacher."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stillhouse.megatron.engine import MegatronEngine
from stillhouse.megatron.trained import trained_parameters
from stillhouse.models import Decoder
from stillhouse.models.adapter import is_lora
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource, Runner, single_process_runner
from stillhouse.proofs.layouts import build_proven_runner


def one_process(student: Decoder, teacher: Decoder | None) -> Runner:
    """Return the runner of a single process. teacher: None if it is the base of the student's adapter."""
    if teacher is not None:
        return single_process_runner(student, teacher)
    source = ModelSource(lambda: student, is_proven=True, teacher_is_base=True)
    return build_proven_runner(Layout(), Mesh(Degrees(), torch.device("cpu"), of_one_process=True), source, None)


def require_frozen_base(engine: MegatronEngine, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Of all weights but an adapter's, the bytes stay, and there is no gradient and no state of the optimizer."""
    for name, tensor in before.items():
        assert is_lora(name) or tensor.equal(after[name]), name
    entries = trained_parameters(engine.student.student, engine.optimizer)
    trained = {entry.parameter for entry in entries}
    for name, parameter in engine.student.named_parameters():
        assert (parameter in trained) == parameter.requires_grad == hasattr(parameter, "main_grad"), name
        assert parameter.requires_grad == (".lora." in name), name
    assert not engine.student.student.unrounded
