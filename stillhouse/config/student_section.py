"""The keys of every model, and the section of the student: its first weights, its adapter and its MTP layers."""

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
    without a question. true is not possible under torchrun. Weights are always read only from safetensors files."""
    attention: Text | None = None
    """Attention implementation, as transformers names it (sdpa, eager, flash_attention_2), or varlen: torch's
    variable-length attention for packed documents, which needs a GPU and activations of 16 bits. null: varlen if
    the device, the activations and the model allow it, otherwise the implementation that transformers chooses."""


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
    """Layers after the student's last layer. Each of them predicts a token one position later than the layer before
    it. They are trained and saved with the student. docs/mtp.md explains them.
    """

    depths: int = Field(default=1, ge=1)
    """The number of layers. Layer k predicts the k-th token after the next token."""
    objective: Text | None = None
    """The loss of every layer, in the grammar of objective.loss and at objective.temperature. null:
    objective.loss."""
    signal: Literal["teacher", "student"] = "teacher"
    """The target distribution of the layers. teacher: the teacher's distribution of the same token. student: the
    student's own distribution, without gradients; in speculative decoding, it determines whether drafts are accepted.
    No effect on cross_entropy."""
    scale: float = Field(default=0.3, gt=0)
    """Coefficient of the layers' losses: the step's loss is the student's loss plus scale times their sum.
    With train=heads, AdamW cancels this factor, but train.clip does not."""
    train: Literal["all", "heads"] = "all"
    """all: the student and the layers are trained together; heads: only these layers are trained, and
    the student is frozen."""
    init: Literal["auto", "new"] = "auto"
    """auto: the layers in the files of student.model if config.json has their number (num_mtp_layers), otherwise new
    layers. new: newly initialised layers."""


# `from` is a keyword of Python, so it cannot be a field name in a class statement
_From = create_model(
    "_From",
    __base__=Section,
    **{
        "from": (
            Literal["teacher", "random"],
            Field(
                description="teacher: embedding, final norm, head and some layers of teacher.model. random:"
                " new random weights from the seed, initialised as in the model's family."
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
    """The source of the student's first weights. The folder student.model then needs all files except the weights."""

    layers: Annotated[
        Annotated[str, Field(pattern=r"^(every|first|last) [1-9][0-9]*$", examples=["every 2"])]
        | Annotated[list[int], Field(min_length=1)]
        | None,
        AfterValidator(_checked_layers),
    ] = None
    """The teacher's layers that are copied to the student, in this order: every k (0, k, 2k, …), first k, last k, or
    a list of different numbers from 0 on. Their number must be the student's number of layers. null: all layers. No
    effect with from random."""

    @property
    def source(self) -> str:
        """The value of the key `from`: "teacher" or "random"."""
        return str(getattr(self, "from"))

    def chosen(self, count: int) -> list[int]:
        """Return the numbers of the layers to copy from a teacher with `count` layers, unchecked."""
        if isinstance(self.layers, list):
            return self.layers
        which, _, k = (self.layers or "every 1").partition(" ")
        ranges = {"every": range(0, count, int(k)), "first": range(int(k)), "last": range(count - int(k), count)}
        return list(ranges[which])


class StudentConfig(ModelConfig):
    """The model that is trained."""

    model: PathText = Field(examples=["Qwen/Qwen3-0.6B"])
    """Hugging Face id, the path of a folder with config.json, safetensors and tokenizer, or a GGUF, which is
    dequantized once into such a folder and needs `stillhouse[gguf]`."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """The dtype of the trained weights and of the optimizer's state; train.precision sets the dtype in which layers
    compute. bfloat16 halves the memory but loses small updates. With an adapter, it is the dtype of the frozen
    weights, and the adapter is at least float32."""
    adapter: AdapterConfig | None = None
    """An adapter that is trained instead of the model's own weights. null: the weights are trained."""
    quantize: Literal["int8", "nf4"] | None = None
    """With an adapter (QLoRA, arXiv:2305.14314): the frozen weights of the linear layers in 8 bits (int8) or 4 bits
    (nf4), made while the model is loaded; embedding and head keep dtype. Needs `stillhouse[low-bit]` and a run of one
    process. The adapter is trained for the rounded weights. null: not quantized."""
    mtp: MtpConfig | None = None
    """Multi-token prediction: layers that draft tokens. null: the student has none."""
    train: Annotated[
        list[Literal["language", "projector", "vision"]], Field(min_length=1), AfterValidator(_unlike)
    ] = Field(default=["language"])
    """The parts of a vision-language model that are trained. All other parts are frozen. language: the language model
    with its embedding and head, or the whole model if it reads no images. projector: the layers that map features of
    images to the language model. vision: the vision tower."""
    init: StudentInitConfig | None = None
    """The first weights of the student. null: the weights in the files of student.model."""
