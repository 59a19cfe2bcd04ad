"""Small real tokenizers for tests: byte-level BPE, trained in this process on a few lines of text.

`toy_tokenizer()` returns a tokenizer of about 400 entries with bos, eos and pad. Two of the chat templates render the
same text; one marks the assistant's part with `{% generation %}`, and the other, like most templates in use, does
not. The third is like those of reasoning models: it drops the thoughts of turns before the last question and writes
those of later turns, even if they are empty.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ruamel.yaml import YAML
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The still is heated slowly, and what boils first leaves first: the heads, the heart, the tails.",
    "A student learns from a teacher by matching what the teacher would have said next, word by word.",
    "def kl(p, q):\n    return sum(a * (a.log() - b.log()) for a, b in zip(p, q, strict=True))",
    "What is the capital of France? The capital of France is Paris. Two and two is four.",
    "Numbers such as 1024, 2048 and 4096 occur in every configuration; so do brackets [], {} and ().",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATES = YAML(typ="safe").load(Path(__file__).with_name("chat_templates.yaml").read_text(encoding="utf-8"))
TEMPLATES: dict[str, str] = CHAT_TEMPLATES["toy"]
PLAIN_TEMPLATE, GENERATION_TEMPLATE, REASONING_TEMPLATE = TEMPLATES.values()
Chat = Literal["plain", "generation", "reasoning"]


def toy_backend(*, text: Sequence[str] = TEXT, vocabulary: int = 400) -> Tokenizer:
    """Train the `tokenizers` object: byte-level BPE over all 256 bytes; special tokens have the ids 0 to 5."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(text, trainer)
    return backend


def toy_tokenizer(
    *,
    chat: Chat | None = None,
    adds_bos: bool = True,
    adds_eos: bool = False,
    backend: Tokenizer | None = None,
    **roles: str,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with bos `<s>`, eos `</s>` and pad `<pad>`. `roles` replaces them: `pad_token="</s>"`."""
    backend = backend or toy_backend()
    single = ["<s>"] * adds_bos + ["$A"] + ["</s>"] * adds_eos
    if adds_bos or adds_eos:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(single), special_tokens=[(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"} | roles
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    if chat is not None:
        tokenizer.chat_template = TEMPLATES[chat]
    return tokenizer
