"""The losses that are added to the objective. They are computed inside the student's layers or at its MTP depths.

A loss is a subclass of `LossPart`, and an entry of the group `stillhouse.parts` (`engine/loss_part_kinds.py`).
"""

from stillhouse.engine.losses.hidden_states import HiddenStates
from stillhouse.engine.losses.loss_part import LossPart, LossSections, configured_objective
from stillhouse.engine.losses.mtp import MtpLoss
from stillhouse.engine.losses.router_balancing import ROUTER_LOSS, RouterBalancing

__all__ = [
    "ROUTER_LOSS",
    "HiddenStates",
    "LossPart",
    "LossSections",
    "MtpLoss",
    "RouterBalancing",
    "configured_objective",
]
