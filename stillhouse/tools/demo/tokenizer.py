"""The demo's byte-level BPE tokenizer: trained on the teacher's text, shared by teacher and student."""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stillhouse.tools.demo.corpus import NamedText

VOCAB_SIZE = 3072
END = "<|endoftext|>"


def train_tokenizer(documents: Iterable[NamedText]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `VOCAB_SIZE` entries that can encode and exactly decode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: Iterable[NamedText]) -> torch.Tensor:
    """Return the documents as one stream of token ids, with `END` after each document."""
    ids = tokenizer([document.text for document in documents], add_special_tokens=False)["input_ids"]
    return torch.tensor([token for document in ids for token in [*document, tokenizer.eos_token_id]])
