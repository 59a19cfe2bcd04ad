"""The description of a decoder's adapter (see `adapter.py`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lora:
    """layers: the number of modules with a LoRA.
    trained, parameters: the numbers of trained parameters and of all parameters in the full model with its adapter.
    """

    r: int
    alpha: float
    layers: int
    trained: int
    parameters: int

    def __str__(self) -> str:
        return (
            f"LoRA r {self.r}, alpha {self.alpha:g} on {self.layers} modules, "
            f"{_short(self.trained)} of {_short(self.parameters)} parameters train"
        )


def _short(count: int) -> str:
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
