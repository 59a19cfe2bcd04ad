"""The keys of every model; and the model that is trained: its first weights, its adapter, its layers for MTP."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, create_model

from stillhouse.config.section import PathText, Section, Share, Text


class ModelConfig(Section):
    """A causal language model in Hugging Face's format."""

    model: PathText | None
    revision: Text | None = None
    """Branch, tag or commit of the model on the hub; null: the default branch. No effect on a folder."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights. Use it only for sources that you trust. false: such code is refused
    without a question. true is not possible under torchrun. Weights are read only from safetensors files in any
    case."""
    attention: Text | None = None
    """Attention implementation, as transformers names it (sdpa, eager, flash_attention_2), or varlen: torch's
    variable-length attention for packed documents, which needs a GPU and activations of 16 bits. null: varlen where
    the device, the activations and the model allow it, else transformers' choice."""


class AdapterConfig(Section):
    """An adapter, which is trained while the student's own weights stay frozen. Needs `stillhouse[lora]`."""

    type: Literal["lora"] = "lora"
    """lora: (alpha / r) B A x is added to a layer's output W x; only A and B are trained."""
    r: int = Field(default=16, ge=1)
    """Rank: A has r rows, and B has r columns."""
    alpha: float = Field(default=32.0, gt=0)
    """LoRA scale: the adapter's output is multiplied by alpha / r."""
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """The layers that get an adapter. all-linear: every linear layer of the language model except the head; or a list
    of name endings, such as [q_proj, v_proj]. Head and embedding cannot have an adapter."""
    dropout: Share = 0.0
    """Dropout probability of the adapter's input during training."""


class MtpConfig(Section):
    """Layers behind the student's last one, each of which predicts one token further; they are trained and saved
    with the student. docs/mtp.md explains them.
    """

    depths: int = Field(default=1, ge=1)
    """Number of the layers: layer k predicts the k-th token after the next one."""
    objective: Text | None = None
    """The loss of every depth, in the grammar of objective.loss and at objective.temperature. null:
    objective.loss."""
    signal: Literal["teacher", "student"] = "teacher"
    """The target distribution of the depths. teacher: the teacher's distribution of the same token; student: the
    student's own, without gradients, which is what decides on the drafts in speculative decoding. No effect on
    cross_entropy."""
    scale: float = Field(default=0.3, gt=0)
    """Factor of the depths' loss: the step's loss is that of the student plus scale times the sum over the depths.
    With train=heads, AdamW cancels it, but train.clip does not."""
    train: Literal["all", "heads"] = "all"
    """all: the student and the layers are trained together; heads: the student is frozen, and only the layers are
    trained."""
    init: Literal["auto", "new"] = "auto"
    """auto: the layers of the student's checkpoint if its configuration has a number of them (num_mtp_layers), else
    new ones; new: newly initialised layers."""


# `from` is a keyword of Python, so it cannot be a field name in a class statement
_From = create_model(
    "_From",
    __base__=Section,
    **{
        "from": (
            Literal["teacher", "random"],
            Field(
                description="teacher: embedding, final norm, head and some layers of teacher.model. random:"
                " initialised by the seed, as the model's family does."
            ),
        )
    },
)  # type: ignore[call-overload]


def _checked_layers(layers: str | list[int] | None) -> str | list[int] | None:
    if isinstance(layers, list) and (len(set(layers)) < len(layers) or min(layers) < 0):
        raise ValueError(f"got {layers}, expected different numbers from 0 on")
    return layers


def _unlike(parts: list[str]) -> list[str]:
    if len(set(parts)) < len(parts):
        raise ValueError(f"got {parts}, expected different parts")
    return parts


class StudentInitConfig(_From):  # type: ignore[misc, valid-type]
    """Where the student's first weights are from. The folder student.model then needs no weights, only the rest."""

    layers: Annotated[
        Annotated[str, Field(pattern=r"^(every|first|last) [1-9][0-9]*$", examples=["every 2"])]
        | Annotated[list[int], Field(min_length=1)]
        | None,
        AfterValidator(_checked_layers),
    ] = None
    """The teacher's layers that the student gets, in this order: every k (0, k, 2k, …), first k, last k, or a list of
    different numbers from 0 on; as many as the student has. null: all. No effect with from random."""

    @property
    def source(self) -> str:
        """teacher or random."""
        return str(getattr(self, "from"))

    def chosen(self, count: int) -> list[int]:
        """The layers to copy from a teacher with `count` layers. Numbers are not checked and may be too large."""
        if isinstance(self.layers, list):
            return self.layers
        which, _, k = (self.layers or "every 1").partition(" ")
        ranges = {"every": range(0, count, int(k)), "first": range(int(k)), "last": range(count - int(k), count)}
        return list(ranges[which])


class StudentConfig(ModelConfig):
    """The model that is trained."""

    model: PathText = Field(examples=["Qwen/Qwen3-0.6B"])
    """Hugging Face id, or the path of a folder with config.json, safetensors and tokenizer."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """The dtype of the trained weights and of the optimizer's state; train.precision sets the dtype in which layers
    compute. bfloat16 halves the memory and loses small updates. With an adapter: the dtype of the frozen weights; the
    adapter is at least float32."""
    adapter: AdapterConfig | None = None
    """An adapter to train instead of the model's own weights. null: train the weights."""
    quantize: Literal["int8", "nf4"] | None = None
    """With an adapter (QLoRA, arXiv:2305.14314): the frozen weights of the linear layers in 8 bits (int8) or 4 bits
    (nf4), made while the model is loaded; embedding and head keep dtype. Needs `stillhouse[low-bit]` and a run of one
    process. The trained adapter fits the rounded weights. null: not quantized."""
    mtp: MtpConfig | None = None
    """Multi-token prediction: layers that draft tokens. null: the student has none."""
    train: Annotated[
        list[Literal["language", "projector", "vision"]], Field(min_length=1), AfterValidator(_unlike)
    ] = Field(default=["language"])
    """The parts of a vision-language model that are trained; the others are frozen and stay as they are. language:
    the language model with its embedding and head, or all of a model that reads no images; projector: what maps
    features of images to the language model; vision: the vision tower."""
    init: StudentInitConfig | None = None
    """The weights to begin with. null: those of the files of student.model."""
