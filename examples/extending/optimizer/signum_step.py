import torch

from stillhouse.engine.optimizer import KnownState


class SignumStep(KnownState):
    """A step of the size of the learning rate along the sign of the gradient's moving average."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state |= self.empty_state(weight)
                    state["average"].lerp_(weight.grad, 1 - group["momentum"])
                    weight.sub_(state["average"].sign(), alpha=group["lr"])

    def empty_state(self, parameter):
        return {"average": torch.zeros_like(parameter)}
