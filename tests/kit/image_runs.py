"""Runs whose data has images: conversations about pictures, and models that read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit.image_models import picture, write_image_model
from kit.runs import write_records
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from stillhouse.models.pretrained import auto_class

S = 12
IMAGE, START, END = 250, 248, 247  # special tokens
PLACE = slice(2, 6)  # the columns of the image's four tokens
TEXT: dict[str, Any] = {
    "vocab_size": 251,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24}
QWEN_TOWER: dict[str, Any] = TOWER | {
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 249,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def rope(**options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **options}}


def gemma3() -> PreTrainedConfig:
    tower = {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 2}
    return Gemma3Config(
        text_config=TEXT | {"sliding_window": 5, "query_pre_attn_scalar": 8},
        vision_config=tower,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )


def llava() -> PreTrainedConfig:
    tower = CLIPVisionConfig(**TOWER, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4)
    return LlavaConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=tower,
        image_token_id=IMAGE,
        image_seq_length=4,
        vision_feature_layer=-1,
    )


def qwen2_5_vl() -> PreTrainedConfig:
    tower = QWEN_TOWER | {"window_size": 8, "fullatt_block_indexes": [1]}
    text = TEXT | rope(mrope_section=[1, 1, 2])
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower, **QWEN_TOKENS)


def qwen3_vl() -> PreTrainedConfig:
    tower = QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = TEXT | rope(mrope_section=[2, 1, 1], mrope_interleaved=True)
    return Qwen3VLConfig(text_config=text, vision_config=tower, **QWEN_TOKENS)


MAKERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": gemma3,
    "llava": llava,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
}


def model_of(family: str) -> PreTrainedModel:
    config = MAKERS[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class(config).from_config(config)
        for parameter in model.parameters():
            if not parameter.any():  # biases, and Gemma's image projection
                parameter.data.normal_(std=0.2)
    return model.eval()


def with_image(family: str) -> dict[str, Tensor]:
    """Return a row of tokens with one image."""
    random = torch.Generator().manual_seed(3)
    ids_BS = torch.randint(3, 240, (1, S), generator=random)
    ids_BS[0, PLACE] = IMAGE
    if not family.startswith("qwen"):
        pixels = {"pixel_values": torch.randn(1, 3, 8, 8, generator=random)}
        kinds = {"token_type_ids": (ids_BS == IMAGE).long()} if family == "gemma3" else {}
        return {"input_ids": ids_BS, **pixels, **kinds}
    ids_BS[0, [PLACE.start - 1, PLACE.stop]] = torch.tensor([START, END])
    return {
        "input_ids": ids_BS,
        "pixel_values": torch.randn(16, 12, generator=random),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids_BS == IMAGE).long(),
    }


SETTINGS = {"data.max_tokens": 160, "train.tokens_per_step": 640, "train.micro_batch_tokens": 320}
RECORDS = 24


def turns_of(number: int) -> list[dict[str, Any]]:
    """A conversation with the picture `number`.png; without one if the number is a multiple of 3."""
    image = [{"type": "image", "image": f"{number}.png"}] if number % 3 else []
    question = [{"type": "text", "text": f"what is {number}?"}, *image]
    answer = [{"type": "text", "text": f"number {number}"}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_data(folder: Path) -> None:
    for number in range(RECORDS):
        picture(number, 8 + 4 * (number % 4), 8 + 4 * (number % 3)).save(folder / f"{number}.png")
    lines = [json.dumps({"messages": turns_of(number)}) for number in range(RECORDS)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "eval.jsonl").write_text("\n".join(lines[:4]))


def write_image_run(folder: Path, family: str) -> None:
    """Write a student, a teacher and data with images. The settings are `SETTINGS`."""
    for seed, name in enumerate(("student", "teacher")):
        write_image_model(family, folder / name, seed=seed)
    write_data(folder)


def write_on_policy(folder: Path, family: str, **settings: Any) -> dict[str, Any]:
    """Write models and prompts, every third one without an image; return the settings of a run."""
    write_image_model(family, folder / "student")
    write_image_model(family, folder / "teacher", seed=3)
    records = []
    for number in range(9):
        picture(number, 8 + 4 * (number % 4), 8 + 4 * (number % 3)).save(folder / f"{number}.png")
        image = [{"type": "image", "image": f"{number}.png"}] if number % 3 else []
        content = [*image, {"type": "text", "text": f"what is {number}?"}]
        answer = [{"role": "assistant", "content": [{"type": "text", "text": f"number {number}"}]}]
        records.append({"prompt": [{"role": "user", "content": content}], "completion": answer})
    write_records(folder / "train.jsonl", records)
    return {
        "data.max_tokens": 160,
        "data.eval": 0,
        "objective.loss": "reverse_kl",
        "train.tokens_per_step": 160,
        "train.micro_batch_tokens": 320,
        "train.steps": 2,
        "rollout.prompts_per_step": 6,
        "rollout.samples_per_prompt": 2,
        "rollout.max_new_tokens": 8,
        **settings,
    }
