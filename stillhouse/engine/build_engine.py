"""The engines that can train a student. To add one, add a file beside `torch_engine.py` and an entry in `ENGINES`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from stillhouse.engine.engine import Engine
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.parallel import DistributedStudent
from stillhouse.proofs.layouts import build_proven_runner


class EngineKind(NamedTuple):
    """distribute: builds this process's part of the student, and of a teacher in the student's stages.
    engine: creates the engine for this student, with the arguments of `TorchEngine`.
    """

    distribute: Callable[..., DistributedStudent]
    engine: Callable[..., Engine]


def _megatron_student(*arguments: Any, **options: Any) -> DistributedStudent:
    from stillhouse.megatron.build import build_megatron_student  # needs Megatron-Core

    return build_megatron_student(*arguments, **options)


def _megatron_engine(*arguments: Any, **options: Any) -> Engine:
    from stillhouse.megatron.engine import MegatronEngine

    return MegatronEngine(*arguments, **options)


#: by `parallel.engine`
ENGINES = {
    "torch": EngineKind(build_proven_runner, TorchEngine),
    "megatron": EngineKind(_megatron_student, _megatron_engine),
}
