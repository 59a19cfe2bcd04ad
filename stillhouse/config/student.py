"""The model that is trained."""

from typing import Literal

from pydantic import Field

from stillhouse.config.adapter import AdapterConfig
from stillhouse.config.model import ModelConfig
from stillhouse.config.mtp import MtpConfig
from stillhouse.config.section import PathText
from stillhouse.config.student_init import StudentInitConfig


class StudentConfig(ModelConfig):
    """The model that is trained."""

    model: PathText = Field(
        description="Hugging Face id, or the path of a folder with config.json, safetensors and tokenizer.",
        examples=["Qwen/Qwen3-0.6B"],
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32",
        description="The dtype of the trained weights and of the optimizer's state; train.precision sets the dtype in"
        " which layers compute. bfloat16 halves the memory and loses small updates. With an adapter: the dtype of the"
        " frozen weights; the adapter is at least float32.",
    )
    adapter: AdapterConfig | None = Field(
        default=None, description="An adapter to train instead of the model's own weights. null: train the weights."
    )
    mtp: MtpConfig | None = Field(
        default=None, description="Multi-token prediction: layers that draft tokens. null: the student has none."
    )
    init: StudentInitConfig | None = Field(
        default=None, description="The weights to begin with. null: those of the files of student.model."
    )
