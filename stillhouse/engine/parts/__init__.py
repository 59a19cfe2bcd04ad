"""The losses that arise inside the student, beside the objective at its head.

To add a loss, add a file here with the interface of `LossPart`, its name in `PARTS`, and its configuration section.

student.mtp                 mtp.py       the objective at the depths of multi-token prediction, in the head
objective.hidden            hidden.py    between hidden states of layers of student and teacher
objective.router_aux_loss   router.py    load balancing of a mixture of experts, in the routers
"""

from stillhouse.engine.parts.hidden import HiddenStates
from stillhouse.engine.parts.loss_part import LossPart, LossSections
from stillhouse.engine.parts.mtp import MtpLoss
from stillhouse.engine.parts.router import ROUTER_LOSS, RouterBalancing

#: all kinds, in the order of the objective's description in words
PARTS: tuple[type[LossPart], ...] = (MtpLoss, RouterBalancing, HiddenStates)

__all__ = ["PARTS", "ROUTER_LOSS", "HiddenStates", "LossPart", "LossSections", "MtpLoss", "RouterBalancing"]
