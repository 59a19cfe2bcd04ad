from stillhouse.engine.optimizer_kinds import SHARDED, OptimizerKind


class Signum(OptimizerKind):
    capabilities = (SHARDED,)

    @classmethod
    def make(cls, kinds, train):
        from signum_step import SignumStep

        return SignumStep(list(kinds), {"lr": train.learning_rate, "momentum": train.momentum})
