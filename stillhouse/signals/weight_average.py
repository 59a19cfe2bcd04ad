"""An exponential moving average of the student's trained weights, under any layout."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stillhouse.models.dtensors import local
from stillhouse.parallel import DistributedStudent


class WeightAverage:
    """The average of the trained weights on this process, at first the weights themselves.

    Frozen weights are their own average. The averages are float32 at least: in bfloat16, the step of an average is
    mostly lost by rounding. They are sharded as the weights are.
    """

    def __init__(self, student: DistributedStudent, decay: float):
        self._student, self.decay = student, decay
        #: by the names of `DistributedStudent.named_parameters`
        self.tensors: dict[str, Tensor] = {
            name: _wide(parameter.detach())
            for name, parameter in student.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights: decay × average + (1 − decay) × weights."""
        parameters = dict(self._student.named_parameters())
        for name, average in self.tensors.items():
            local(average).lerp_(local(parameters[name].detach()).to(average.dtype), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the student the averages as its weights, until the context ends.

        Meanwhile a copy of the student's trained weights is in memory.
        """
        parameters = {name: parameter for name, parameter in self._student.named_parameters() if name in self.tensors}
        kept = {name: local(parameter.detach()).clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                local(parameter.detach()).copy_(local(self.tensors[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    local(parameter.detach()).copy_(kept[name])


def _wide(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
