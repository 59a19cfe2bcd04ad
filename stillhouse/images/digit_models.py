"""Tiny Qwen3-VL models with random weights that can learn to read strips of digits (`digit_strips.py`).

A folder has the model, the tokenizer (characters), and Qwen3-VL's own processor. A picture of n digits becomes n
tokens. The chat template writes an image and its question as `<|vision_start|>…<|vision_end|>read the digits=`.
"""

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from stillhouse.images.digit_strips import SIDE

PATCH, MERGE = SIDE // 2, 2
#: width and layers of the language model, width and layers of the vision tower
TEACHER, STUDENT = (128, 4, 48, 2), (64, 2, 48, 2)
PAD, END = "<pad>", "</s>"
IMAGE_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2 * 64},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 1,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor"},
}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{{ '</s>' }}{% endgeneration %}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text + '=' }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    special = [PAD, END, *IMAGE_TOKENS.values()]
    characters = dict.fromkeys("0123456789=read the digits")
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate([*special, *characters])}, PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)
    made.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS.values())})
    return made


def new_model(width: int, layers: int, tower: int, depth: int, seed: int) -> Qwen3VLForConditionalGeneration:
    """A model with random weights. width, layers: of the language model; tower, depth: of the vision tower."""
    vocabulary = tokenizer()
    text = {
        "vocab_size": len(vocabulary),
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": vocabulary.eos_token_id,
        "pad_token_id": vocabulary.pad_token_id,
        "initializer_range": 0.04,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": depth,
        "hidden_size": tower,
        "intermediate_size": 3 * tower,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 1,
        "out_hidden_size": width,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.04,
    }
    ids = {name: vocabulary.convert_tokens_to_ids(token) for name, token in IMAGE_TOKENS.items()}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(config)


def save(model: Qwen3VLForConditionalGeneration, folder: Path) -> Path:
    """Write model, tokenizer and processor as a Hugging Face folder, and return the folder."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR, indent=1))
    return folder
