"""Random Qwen3 models, the tokenizer of their words and prompts, for benchmarks of speed. V words, D width."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def write_models(folder: Path, sizes: Mapping[str, tuple[int, int]], vocabulary: int, end: float = 0.0) -> None:
    """Write models and their tokenizer.

    sizes: width and layers of the models, by the names of their folders.
    end: the probability of an end of sequence at each token; 0: that of a random model.
    """
    words = {"</s>": 0} | {f"w{number}": number for number in range(1, vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")
    for seed, (name, (width, layers)) in enumerate(sizes.items()):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=width // 32, num_key_value_heads=width // 64, head_dim=32, tie_word_embeddings=True,
            max_position_embeddings=512, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
        if end:
            set_end(model, end)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def write_prompts(path: Path, count: int, tokens: int, vocabulary: int) -> None:
    """Write random prompts of as many tokens."""
    draws = np.random.default_rng(0)
    texts = [" ".join(f"w{integer}" for integer in draws.integers(1, vocabulary, tokens)) for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


@torch.no_grad()
def set_end(model: Qwen3ForCausalLM, probability: float) -> None:
    """Make the end of sequence about as probable as this after every token of a random model.

    The first channel of the residual stream gets the same value for every token, and no layer writes to it. The
    head's row of the end of sequence reads this channel alone.
    """
    rows_VD = model.get_input_embeddings().weight
    vocabulary, ids_BS = len(rows_VD), torch.arange(1, 257).view(4, 64)
    rows_VD[:, 0] = 0.1
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    channel = float(model.model(ids_BS).last_hidden_state[..., 0].mean())
    odds = probability / (1 - probability)
    rows_VD[0] = 0.0
    rows_VD[0, 0] = rows_VD[1, 0] + np.log(odds * (vocabulary - 1)) / channel
