from stillhouse.config.engine_capabilities import EngineCapabilities
from stillhouse.engine.torch_engine_kind import TorchKind


class Frugal(TorchKind):
    capabilities = EngineCapabilities("The frugal engine", without=("train.compile",), settings=True)

    def engine(self, *models, **options):
        from frugal_engine import FrugalEngine

        return FrugalEngine(*models, **options)
