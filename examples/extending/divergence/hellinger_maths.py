from dataclasses import dataclass

from hellinger import SquaredHellingerParameters

from stillhouse.objective import Divergence
from stillhouse.objective.numerics import difference


@dataclass(frozen=True)
class SquaredHellinger(SquaredHellingerParameters, Divergence):
    def balanced(self, pair):
        return 0.5 * difference_of_roots(pair).square()

    def balanced_slope(self, pair):
        return 0.5 * (0.5 * pair.log_q).exp() * difference_of_roots(pair)


def difference_of_roots(pair):
    return difference((0.5 * pair.log_p).exp(), (0.5 * pair.log_q).exp(), 0.5 * pair.ratio)
