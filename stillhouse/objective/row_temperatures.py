"""Temperatures that differ from row to row, for tokens that were sampled at several temperatures.

T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stillhouse.objective.numerics import is_readable
from stillhouse.objective.signals import check_temperature


@dataclass(frozen=True, eq=False)
class RowTemperatures:
    """The temperature values[number_T[t]] of each row t.

    values: the distinct temperatures. number_T: each row's index in `values`, as a floating-point number.

    Raises ValueError for a temperature that is not positive and, if number_T is on a CPU, for an invalid index.
    """

    values: tuple[float, ...]
    number_T: Tensor

    def __post_init__(self) -> None:
        for value in self.values:
            check_temperature(value)
        number_T = self.number_T
        is_valid_T = (number_T >= 0) & (number_T < len(self.values)) & (number_T == number_T.round())
        if is_readable(number_T) and not bool(is_valid_T.all()):
            raise ValueError(
                f"number_T holds numbers up to {float(number_T.max()):g}: expected whole numbers from 0 to "
                f"{len(self.values) - 1}, the indices of the temperatures"
            )


#: one temperature for all rows, or one for each row
Temperatures = float | RowTemperatures


def distinct_temperatures(temperatures: Temperatures) -> tuple[float, ...]:
    return temperatures.values if isinstance(temperatures, RowTemperatures) else (temperatures,)


def term_options(temperatures: Temperatures) -> dict[str, Any]:
    """Return the keyword argument that sets the temperatures of a `SampledTerm`."""
    name = "row_temperatures" if isinstance(temperatures, RowTemperatures) else "temperature"
    return {name: temperatures}


def select_rows(by_temperature: Sequence[Tensor], number_T: Tensor | None) -> Tensor:
    """Return each row's value at its temperature, [T].

    by_temperature: the values of all rows at each temperature, [T] each.
    number_T: the index of each row's temperature, or None if there is only one temperature.
    """
    selected_T, *others = by_temperature
    for number, value_T in enumerate(others, start=1):
        assert number_T is not None
        selected_T = torch.where(number_T == number, value_T, selected_T)
    return selected_T
