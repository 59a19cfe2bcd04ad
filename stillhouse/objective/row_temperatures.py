"""Temperatures that differ from row to row, for tokens that were sampled at several temperatures.

T tokens, C rows of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stillhouse.objective.numerics import is_readable
from stillhouse.objective.signals import check_temperature
from stillhouse.objective.tile.tile import Tile


@dataclass(frozen=True, eq=False)
class RowTemperatures:
    """The temperature values[number_T[t]] of each row t.

    values: different temperatures. number_T: whole numbers of a floating-point type.

    Raises ValueError for a temperature that is not positive and, on a CPU, for numbers beyond `values`.
    """

    values: tuple[float, ...]
    number_T: Tensor

    def __post_init__(self) -> None:
        for value in self.values:
            check_temperature(value)
        number_T = self.number_T
        if not is_readable(number_T):
            return
        if not bool(((number_T >= 0) & (number_T < len(self.values)) & (number_T == number_T.round())).all()):
            raise ValueError(
                f"numbers of temperatures up to {float(number_T.max()):g}: expected whole numbers from 0 to "
                f"{len(self.values) - 1}"
            )


#: one temperature of all rows, or one for each row
Temperatures = float | RowTemperatures


def distinct_temperatures(temperatures: Temperatures) -> tuple[float, ...]:
    return temperatures.values if isinstance(temperatures, RowTemperatures) else (temperatures,)


def term_options(temperatures: Temperatures) -> dict[str, Any]:
    """Return the argument of a `SampledTerm` with these temperatures."""
    name = "row_temperatures" if isinstance(temperatures, RowTemperatures) else "temperature"
    return {name: temperatures}


def select_rows(by_temperature: Sequence[Tensor], number_T: Tensor | None) -> Tensor:
    """Return each row's entry of the tensor of its temperature, [T]. number_T: None if there is one temperature."""
    selected_T, *others = by_temperature
    for number, value_T in enumerate(others, start=1):
        assert number_T is not None
        selected_T = torch.where(number_T == number, value_T, selected_T)
    return selected_T


class OnTile:
    """A tile's numbers at the temperatures of its rows."""

    def __init__(self, tile: Tile, temperatures: Temperatures):
        self._tile, self._values, self._number_C = tile, distinct_temperatures(temperatures), None
        if isinstance(temperatures, RowTemperatures):
            self._number_C = tile.take(temperatures.number_T)

    def log_probs(self, labels_T: Tensor) -> Tensor:
        """Return log q of the labels, [C]."""
        log_probs = [self._tile.log_probs_at(labels_T, value)[:, 0] for value in self._values]
        return select_rows(log_probs, self._number_C)

    def divided(self, weights_C: Tensor) -> Tensor:
        """Return weights_C / τ."""
        return select_rows([weights_C / value for value in self._values], self._number_C)

    def add_probability(self, coefficient_C: Tensor) -> None:
        """Add coefficient_C · q to the gradient."""
        for number, value in enumerate(self._values):
            is_other_C = None if self._number_C is None else self._number_C != number
            value_coefficient_C = coefficient_C if is_other_C is None else coefficient_C.masked_fill(is_other_C, 0.0)
            self._tile.add_probability(value, value_coefficient_C)
