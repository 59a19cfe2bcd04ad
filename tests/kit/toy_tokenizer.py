"""Small real tokenizers for tests: byte-level BPE, trained in this process on a few lines of text.

`toy_tokenizer()` returns a tokenizer of about 400 entries with bos, eos and pad. Two of the chat templates render the
same text; one marks the assistant's part with `{% generation %}`, and the other, like most templates in use, does
not. The third is like those of reasoning models: it drops the thoughts of turns before the last question and writes
those of later turns, even if they are empty.
"""

from collections.abc import Sequence
from typing import Literal

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

_TURN = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN_TEMPLATE = "{% for message in messages %}" + _TURN + "{% endfor %}" + _PROMPT
GENERATION_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _PROMPT
)
REASONING_TEMPLATE = (
    "{% set last = namespace(question=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set is_answer = message.role == 'assistant' %}"
    "{% set parts = message.content.split('</think>') if is_answer else [message.content] %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if is_answer and loop.index0 > last.question %}"
    "{% set thoughts = message.reasoning_content or (parts[0] | replace('<think>', '') if parts[1:] else '') %}"
    "{{ '<think>\n' + thoughts | trim + '\n</think>\n' }}{% endif %}"
    "{{ parts[-1] }}{% if message.tool_calls %}{{ '\n\n' if parts[-1] else '' }}"
    "{{ '<tool>' + message.tool_calls[0].function.name + '</tool>' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + _PROMPT
)
TEMPLATES = {"plain": PLAIN_TEMPLATE, "generation": GENERATION_TEMPLATE, "reasoning": REASONING_TEMPLATE}
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
