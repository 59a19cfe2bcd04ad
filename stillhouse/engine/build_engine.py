"""The engines that can train a student. To add one, add a file beside `torch_engine.py` and an entry in `ENGINES`."""

from collections.abc import Callable
from typing import NamedTuple

from stillhouse.engine.engine import Engine
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.parallel import DistributedStudent, build_runner


class EngineKind(NamedTuple):
    """distribute: builds this process's part of the student, and of a teacher in the student's stages.
    engine: creates the engine for this student, with the arguments of `TorchEngine`.
    """

    distribute: Callable[..., DistributedStudent]
    engine: Callable[..., Engine]


ENGINES = {"torch": EngineKind(build_runner, TorchEngine)}
