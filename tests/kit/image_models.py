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
from ruamel.yaml import YAML
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_PARTS = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ 'IMAGE' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)


def _template(user: str, assistant: str, end: str, image: str, first: str = "") -> str:
    """A chat template. user, assistant: how their turns begin; a `{role}` becomes the role of any other turn."""
    text = (
        "FIRST{% for message in messages %}{% if message.role == 'assistant' %}{{ ASSISTANT }}{% generation %}PARTS"
        "{{ 'END' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ USER }}PARTS{{ 'END\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ASSISTANT }}{% endif %}"
    )
    values = {"END": end, "USER": repr(user).replace("{role}", "' + message.role + '"), "ASSISTANT": repr(assistant)}
    values |= {"FIRST": f"{{{{ '{first}' }}}}" if first else "", "PARTS": _PARTS, "IMAGE": image.replace("\n", "\\n")}
    for name, value in values.items():
        text = text.replace(name, value)
    return text


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
    more_tokens: Sequence[str] = ()
    sizes: Sequence[str] = ("vocab_size",)


_FAMILIES = YAML(typ="safe").load(Path(__file__).with_name("image_families.yaml").read_text(encoding="utf-8"))
FAMILIES = {name: ImageFamily(**its | {"template": _template(*its["template"])}) for name, its in _FAMILIES.items()}


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
