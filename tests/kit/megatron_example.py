"""Loads examples/megatron_gkd.py; as a script, runs it on one rank and saves its models' weights.

    torchrun --nproc-per-node 4 tests/kit/megatron_example.py run.yaml folder

Writes folder/<rank>.pt: the weights of student and teacher before training, and those of the student after it.
"""

import os
import re
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from kit.cuda_is_cpu import cuda_is_cpu
from megatron.core.models.gpt import GPTModel
from torch import Tensor

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_gkd.py"


def load_example() -> ModuleType:
    spec = util.spec_from_file_location("megatron_gkd", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def run(config: str, folder: str) -> None:
    example, saved = load_example(), dict[str, Any]()
    build = example.build

    def recorded(*arguments: Any, seed: int) -> GPTModel:
        model = build(*arguments, seed=seed)
        saved["student" if seed == 0 else "teacher"] = weights(model)
        return model

    with cuda_is_cpu(), patch.object(example, "build", recorded):
        saved["trained"] = weights(example.main(config).module)
    torch.save(saved, Path(folder) / f"{os.environ['RANK']}.pt")


def weights(model: GPTModel) -> dict[str, tuple[Tensor, int | None]]:
    """Return this rank's weights, each with the dim along which tensor parallelism splits it (None: it is not split).

    The names are those of a model without a pipeline: layers are numbered over all stages.
    """
    first = model.decoder.layers[0].layer_number - 1

    def global_name(name: str) -> str:
        return re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) + first), name)

    return {
        global_name(name): (
            weight.detach().clone(),
            weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None,
        )
        for name, weight in model.named_parameters()
    }


if __name__ == "__main__":
    run(*sys.argv[1:])
