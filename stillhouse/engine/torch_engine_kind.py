"""The entry `torch` of `stillhouse.engines`. This file imports torch only when a method is called."""

from typing import TYPE_CHECKING, Any

from stillhouse.config.engine_capabilities import EngineCapabilities
from stillhouse.engine.engine_kind import EngineKind

if TYPE_CHECKING:
    from stillhouse.engine.engine import Engine
    from stillhouse.parallel import DistributedStudent


class TorchKind(EngineKind):
    capabilities = EngineCapabilities("torch")

    def distribute(self, *models: Any, **options: Any) -> "DistributedStudent":
        from stillhouse.proofs.layouts import build_proven_runner

        return build_proven_runner(*models, **options)

    def engine(self, *models: Any, **options: Any) -> "Engine":
        from stillhouse.engine.torch_engine import TorchEngine

        return TorchEngine(*models, **options)
