"""What all sections share: they are strict, frozen, and refuse keys they do not know.

Strict means that text is not a number and true is not 1; a whole number is fine where a number is asked.
"""

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the configuration. Its fields' descriptions are the reference (`docs/config.md`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


def expand_home(path: str) -> str:
    """`~/runs` as the home folder's `runs`: inside YAML no shell has done it. Anything else stays as it is."""
    return os.path.expanduser(path) if path.startswith("~/") else path


Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]
Share = Annotated[float, Field(ge=0, lt=1)]
