"""The losses that arise inside the student, beside the objective at its head.

A new one is a file here with the interface of `LossPart`; `run/setup.py` makes it from its configuration section.

student.mtp                 mtp.py       the objective of the depths of multi-token prediction, at the head
objective.hidden            hidden.py    between hidden states of layers of student and teacher
objective.router_aux_loss   router.py    load balancing of a mixture of experts, in the routers
"""

from stillhouse.engine.parts.hidden import HiddenStates
from stillhouse.engine.parts.loss_part import LossPart
from stillhouse.engine.parts.mtp import MtpLoss
from stillhouse.engine.parts.router import ROUTER_LOSS, RouterBalancing

__all__ = ["ROUTER_LOSS", "HiddenStates", "LossPart", "MtpLoss", "RouterBalancing"]
