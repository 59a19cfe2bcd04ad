"""An exponential moving average of the student's trained weights, under any layout."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stillhouse.models.dtensors import local
from stillhouse.parallel import DistributedStudent


class WeightAverage:
    """The averages of the trained weights on this process, initialised with the weights.

    The averages are at least float32, because rounding to bfloat16 would lose most of each update. They are sharded
    like the weights.
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
    def update(self, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Set the average to decay × average + (1 − decay) × weights.

        weights: by their names, for an optimizer whose weights are wider than the parameters. None: the parameters.
        """
        for name, weight in self._student.named_parameters() if weights is None else weights:
            if (average := self.tensors.get(name)) is not None:
                local(average).lerp_(local(weight.detach()).to(average.dtype), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averages as the student's weights until the context ends; a copy of the weights is in memory."""
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
