"""The base class of all sections: they are strict, frozen, and refuse unknown keys.

Strict means that text is not accepted for a number, nor true for 1. A whole number is accepted for a number.
"""

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the configuration. The reference (`docs/config.md`) is generated from the fields' descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


def expand_home(path: str) -> str:
    """Replace `~` in `~/runs` with the home folder, as no shell does this inside YAML. Other paths stay unchanged."""
    return os.path.expanduser(path) if path.startswith("~/") else path


Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]
Share = Annotated[float, Field(ge=0, lt=1)]
