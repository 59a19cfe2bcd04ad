"""The entry point `megatron` in the group `stillhouse.engines`: the engine's capabilities, and how it is built.

This file imports Megatron-Core only when a method is called.
"""

import logging
import warnings
from typing import TYPE_CHECKING, Any

from stillhouse.config.engine_capabilities import EngineCapabilities
from stillhouse.engine.engine_kind import EngineKind

if TYPE_CHECKING:
    from stillhouse.engine.engine import Engine
    from stillhouse.parallel import DistributedStudent

_NOISY_LOGGERS = ("megatron.core.models.gpt.gpt_model", "megatron.core.distributed.distributed_data_parallel")
#: warnings that Megatron-Core prints on every process, and that do not matter for a run
_NOTICES = (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",  # this scope is Megatron-Core's own default
    "MimoModelConfig is experimental",
    "When using (async grad allreduce|sequence parallelism) it is recommended",  # docs/megatron.md says this
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # true for experts
    r"`torch\.distributed\.\w+` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",  # Megatron-Core's optimizer reads .grad of shards
)


class MegatronKind(EngineKind):
    capabilities = EngineCapabilities(
        "Megatron-Core",
        without=(
            *("student.adapter.dropout", "student.attention", "student.quantize", "student.mtp.train=heads"),
            *("student.train", "teacher.offload", "teacher.quantize", "teacher.attention", "train.optimizer"),
            *("train.compile", "objective.hidden", "parallel.offload", "parallel.gather_dtype"),
        ),
        schedules=("1f1b", "interleaved"),
        axes=("fsdp", "tensor", "context", "pipeline"),
        sequence=True,
        settings=True,
        recomputes=True,
        always_in_group=True,
    )

    def distribute(self, *models: Any, **options: Any) -> "DistributedStudent":
        quiet_megatron()
        from stillhouse.megatron.build import build_megatron_student

        return build_megatron_student(*models, **options)

    def engine(self, *models: Any, **options: Any) -> "Engine":
        from stillhouse.megatron.engine import MegatronEngine

        return MegatronEngine(*models, **options)


def quiet_megatron() -> None:
    """Disable notices of Megatron-Core. Call this function before the first import of Megatron-Core."""
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in _NOTICES:
        warnings.filterwarnings("ignore", message=message)
