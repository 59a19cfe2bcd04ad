"""Tiny models of eight families that read images, as folders with the family's own processor, and small pictures.

The models come from the families' own configuration classes, the processors are the families' own, and the tokenizer
is the toy tokenizer with the special tokens of the family. A picture of 8 to 24 pixels a side becomes 4 to about 30
tokens; only Gemma 4 has no fewer than about 60. The chat templates write images and turns as the families' own
templates do, and mark what the assistant says.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kit.causal_families import of_config, tiny_config
from kit.toy_tokenizer import toy_tokenizer
from PIL import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_PARTS = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ 'IMAGE' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)


def _template(user: str, assistant: str, end: str, image: str, first: str = "") -> str:
    """A chat template. user, assistant: how their turns begin; a `{role}` becomes the role of any other turn."""
    start = repr(user).replace("{role}", "' + message.role + '")
    parts = _PARTS.replace("IMAGE", image.replace("\n", "\\n"))
    return (
        ("{{ '" + first + "' }}" if first else "")
        + "{% for message in messages %}{% if message.role == 'assistant' %}{{ "
        + repr(assistant)
        + " }}{% generation %}"
        + parts
        + "{{ '"
        + end
        + "' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ "
        + start
        + " }}"
        + parts
        + "{{ '"
        + end
        + "\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
        + repr(assistant)
        + " }}{% endif %}"
    )


def _chatml(image: str) -> str:
    return _template("<|im_start|>{role}\n", "<|im_start|>assistant\n", "<|im_end|>", image)


@dataclass(frozen=True)
class ImageFamily:
    """What a folder of the family contains beside the toy tokenizer.

    processor: the settings of its processor, with its `processor_class`.
    tokens: the name of an option of the configuration → the special token whose id it is.
    options: the options of the tiny configuration beyond kit.causal_families.
    roles: names of special tokens, as the processor reads them from its tokenizer.
    sizes: the options of the configuration that are the size of the vocabulary.
    """

    processor: Mapping[str, Any]
    tokens: Mapping[str, str]
    template: str
    options: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    more_tokens: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ("vocab_size",)


_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
_VISION = {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN: dict[str, Any] = {
    "processor": {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 64, "longest_edge": 256},
            "patch_size": 2,
            "merge_size": 2,
            "temporal_patch_size": 2,
        },
        "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor"},
    },
    "tokens": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    "template": _chatml("<|vision_start|><|image_pad|><|vision_end|>"),
}
_SQUARE = {"height": 8, "width": 8}
_GRID = [[8, 8], [8, 16], [16, 8]]

FAMILIES: dict[str, ImageFamily] = {
    "qwen3_vl": ImageFamily(
        **_QWEN,
        options={"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}, "vision_config": _VISION},
    ),
    "qwen3_vl_moe": ImageFamily(
        **_QWEN,
        options={"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}, "vision_config": _VISION},
    ),
    "qwen3_5": ImageFamily(
        **_QWEN,
        options={
            "head_dim": 16,
            "rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            "vision_config": _VISION,
        },
    ),
    "gemma3": ImageFamily(
        processor={
            "processor_class": "Gemma3Processor",
            "image_processor": {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE},
            "image_seq_length": 4,
        },
        tokens={
            "image_token_id": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        roles={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        template=_template(
            "<start_of_turn>{role}\n", "<start_of_turn>model\n", "<end_of_turn>", "<start_of_image>", "<s>"
        ),
        options={"mm_tokens_per_image": 4},
        more_tokens=("<start_of_turn>", "<end_of_turn>"),
    ),
    "gemma4": ImageFamily(
        processor={
            "processor_class": "Gemma4Processor",
            "image_processor": {
                "image_processor_type": "Gemma4ImageProcessor",
                "patch_size": 2,
                "pooling_kernel_size": 2,
                "max_soft_tokens": 70,
            },
            "video_processor": {"video_processor_type": "Gemma4VideoProcessor"},
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        },
        tokens={
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>",
            "boa_token_id": "<|audio>",
            "eoa_token_index": "<audio|>",
            "video_token_id": "<|video|>",
        },
        roles={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        template=_template("<|turn>{role}\n", "<|turn>model\n", "<turn|>", "\n\n<|image|>\n\n", "<s>"),
        options={"audio_config": None, "vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 160}},
        more_tokens=("<|turn>", "<turn|>"),
        sizes=("vocab_size", "vocab_size_per_layer_input"),
    ),
    "idefics3": ImageFamily(
        processor={
            "processor_class": "Idefics3Processor",
            "image_processor": {
                "image_processor_type": "Idefics3ImageProcessor",
                "size": {"longest_edge": 16},
                "max_image_size": {"longest_edge": 8},
            },
            "image_seq_len": 4,
        },
        tokens={"image_token_id": "<image>"},
        template=_template("{role}:", "assistant:", "<end_of_utterance>", "<image>"),
        more_tokens=(
            *("<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
            *(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)),
        ),
    ),
    "llava_onevision": ImageFamily(
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "image_processor": {
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "size": _SQUARE,
                "image_grid_pinpoints": _GRID,
            },
            "video_processor": {"video_processor_type": "LlavaOnevisionVideoProcessor"},
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
        },
        tokens={"image_token_id": "<image>", "video_token_index": "<video>"},
        template=_chatml("<image>\n"),
        options={"image_grid_pinpoints": _GRID, "vision_config": {"patch_size": 4}},
    ),
    "internvl": ImageFamily(
        processor={
            "processor_class": "InternVLProcessor",
            "image_processor": {
                "image_processor_type": "GotOcr2ImageProcessor",
                "size": _SQUARE,
                "crop_to_patches": True,
                "max_patches": 2,
            },
            "video_processor": {"video_processor_type": "InternVLVideoProcessor"},
            "image_seq_length": 4,
        },
        tokens={"image_token_id": "<IMG_CONTEXT>"},
        roles={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        template=_chatml("<IMG_CONTEXT>\n"),
        options={"image_seq_length": 4},
    ),
}


def write_image_model(
    family: str, folder: Path, seed: int = 0, *, tokenizer_of: Sequence[str] = (), **options: Any
) -> Path:
    """Write a model with tokenizer and processor as a Hugging Face folder, and return the folder.

    tokenizer_of: other families whose special tokens the tokenizer has, too.
    options: of the configuration or of its text configuration, beyond those of the family.
    """
    tokenizer = image_tokenizer(family, *tokenizer_of)
    write_processor(family, folder, tokenizer)
    image_model(family, tokenizer, seed, **options).save_pretrained(folder)
    return folder


def write_processor(family: str, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Write the tokenizer and the processor of a family, without a model."""
    parts = FAMILIES[family]
    (tokenizer or image_tokenizer(family)).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(parts.processor, indent=1))
    (folder / "chat_template.jinja").write_text(parts.template)


def image_tokenizer(family: str, *others: str) -> PreTrainedTokenizerFast:
    """The toy tokenizer with the special tokens of a family, and of others; in any order, they have the same ids."""
    first = FAMILIES[family].template.startswith("{{ '<s>")
    families = [FAMILIES[name] for name in sorted({family, *others})]
    tokens = [token for parts in families for token in parts.roles.values()]
    tokens += [token for parts in families for token in (*parts.tokens.values(), *parts.more_tokens)]
    tokenizer = toy_tokenizer(adds_bos=first)
    tokenizer.add_tokens(tokens, special_tokens=True)
    roles = dict(FAMILIES[family].roles)
    return toy_tokenizer(adds_bos=first, backend=tokenizer.backend_tokenizer, extra_special_tokens=roles)


def image_model(family: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A tiny model in eval mode with a vocabulary for the tokenizer."""
    parts = FAMILIES[family]
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in parts.tokens.items()}
    sizes = dict.fromkeys(parts.sizes, len(tokenizer) // 2 * 2 + 1)  # odd
    config = tiny_config(family, **{**sizes, **ids, **parts.options, **options})
    return of_config(config, seed=seed, whole=True)


def picture(seed: int, width: int = 12, height: int = 8) -> Image.Image:
    """A picture of random colours in blocks of 4 pixels, so that it is not the same after scaling."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, ((height + 3) // 4, (width + 3) // 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks.repeat(4, 0).repeat(4, 1)[:height, :width])
