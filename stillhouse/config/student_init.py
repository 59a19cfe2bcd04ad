"""The student's weights before the first step, if they are not those of its own files."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, create_model

from stillhouse.config.section import Section

_GRAMMAR = r"^(every|first|last) [1-9][0-9]*$"

# `from` cannot be the name of a field in a class statement
_From = create_model(
    "_From",
    __base__=Section,
    **{
        "from": (
            Literal["teacher", "random"],
            Field(
                description="teacher: embedding, final norm, head and some layers of teacher.model. random: drawn by"
                " the seed, as the model's family initialises itself."
            ),
        )
    },
)  # type: ignore[call-overload]


def _checked_layers(layers: str | list[int] | None) -> str | list[int] | None:
    if isinstance(layers, list) and (len(set(layers)) < len(layers) or min(layers) < 0):
        raise ValueError(f"got {layers}, expected different numbers from 0 on")
    return layers


class StudentInitConfig(_From):  # type: ignore[misc, valid-type]
    """Where the student's first weights are from. The folder student.model then needs no weights, only the rest."""

    layers: Annotated[
        Annotated[str, Field(pattern=_GRAMMAR, examples=["every 2"])]
        | Annotated[list[int], Field(min_length=1)]
        | None,
        AfterValidator(_checked_layers),
    ] = Field(
        default=None,
        description="The teacher's layers that the student gets, in this order: every k (0, k, 2k, …), first k, last"
        " k, or a list of different numbers from 0 on; as many as the student has. null: all. No effect with from"
        " random.",
    )

    @property
    def source(self) -> str:
        """teacher or random."""
        return str(getattr(self, "from"))

    def chosen(self, count: int) -> list[int]:
        """The numbers of the chosen ones of `count` layers; some may be missing there."""
        if self.layers is None:
            return list(range(count))
        if isinstance(self.layers, list):
            return self.layers
        found = re.fullmatch(_GRAMMAR, self.layers)
        assert found is not None
        k = int(self.layers.partition(" ")[2])
        return {
            "every": list(range(0, count, k)),
            "first": list(range(k)),
            "last": list(range(count - k, count)),
        }[found[1]]
