"""The losses beside the objective. They arise inside the student's layers or at its multi-token prediction depths.

To add a loss, add a file with a subclass of `LossPart`, add the class to `PARTS`, and add its configuration key.
"""

from stillhouse.engine.parts.hidden import HiddenStates
from stillhouse.engine.parts.loss_part import LossPart, LossSections
from stillhouse.engine.parts.mtp import MtpLoss
from stillhouse.engine.parts.router import ROUTER_LOSS, RouterBalancing

#: all losses, in their order in the printed description of the objective
PARTS: tuple[type[LossPart], ...] = (MtpLoss, RouterBalancing, HiddenStates)

__all__ = ["PARTS", "ROUTER_LOSS", "HiddenStates", "LossPart", "LossSections", "MtpLoss", "RouterBalancing"]
