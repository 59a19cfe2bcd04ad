"""python lengths_job.py FOLDER…: the first step of the runs in these folders, with the kernels of `kernel_stubs`.

Writes step.safetensors to a run's folder: the gradients of the student's parameters, and as metadata the loss and how
student and teacher pack documents, and with which attention. Variable-length attention is its reference.
"""

import sys
from pathlib import Path

from kit.runs import forward_backward
from kit.varlen_reference import use_reference
from safetensors.torch import save_file

from stillhouse.config import load_config
from stillhouse.run.run import prepare

use_reference()
for folder in map(Path, sys.argv[1:]):
    session = prepare(load_config(folder / "run.yaml"), announce=False)
    loss = forward_backward(session).sums["loss"]
    assert session.models.teacher is not None
    decoders = (session.models.student, session.models.teacher)
    packings = [decoder.packing for decoder in decoders]
    parameters = session.models.student.pretrained.named_parameters()
    save_file(
        {name: weight.grad.contiguous() for name, weight in parameters if weight.grad is not None},
        folder / "step.safetensors",
        {
            "loss": repr(loss),
            "packings": " ".join(packing.name for packing in packings),
            "attentions": " ".join(str(decoder.config._attn_implementation) for decoder in decoders),
            "reason": str(packings[0]),
        },
    )
