from dataclasses import dataclass

from stillhouse.objective.divergence_parameters import Definition, Parameters


@dataclass(frozen=True)
class SquaredHellingerParameters(Parameters):
    definition = Definition("squared_hellinger", "½ (√p − √q)²", "½ (1 − √(p/q))")

    @classmethod
    def divergence(cls):
        from hellinger_maths import SquaredHellinger

        return SquaredHellinger
