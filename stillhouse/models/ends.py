"""The tokens that end a sequence, for everything that writes completions or says where a model ends them."""

from transformers import PreTrainedTokenizerBase

from stillhouse.models.decoder import Decoder


def eos_ids(tokenizer: PreTrainedTokenizerBase, decoder: Decoder) -> tuple[int, ...]:
    """The ends of sequence of the tokenizer and of the model's generation_config, in ascending order.

    Both count: the tokenizer's end is what training puts at the end of a text, and models that were trained on
    conversations name the end of a turn in their generation_config alone.
    """
    config = decoder.pretrained.generation_config
    named = None if config is None else config.eos_token_id
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list | tuple) else [named])}
    return tuple(sorted(int(each) for each in ends if each is not None))
