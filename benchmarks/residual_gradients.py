"""Errors of a Qwen3's gradients under bfloat16 autocast, by the dtype of its hidden states between the layers.

python benchmarks/residual_gradients.py > benchmarks/results/residual-gradients-DATE.json

The reference is float64 with the same weights. The model is measured with its initial weights and after 60 steps on
sequences with small differences between tokens. `bfloat16 weights` is the usual way of other trainers.
"""

import copy
import json
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY, WIDTH, TOKENS, STEPS = 512, 128, 64, 60
#: numbers of layers, each with the standard deviation of the initial weights
MODELS = ((8, 0.06), (16, 0.05), (28, 0.04))


def main() -> None:
    results = []
    for layers, spread in MODELS:
        torch.manual_seed(1)
        model = build(layers, spread)
        generator = torch.Generator().manual_seed(3)
        results.append({"layers": layers, "steps": 0} | errors(model, sequences(4, generator)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            ids_BS = sequences(8, generator)
            optimizer.zero_grad()
            model(ids_BS, labels=ids_BS).loss.backward()
            optimizer.step()
        results.append({"layers": layers, "steps": STEPS} | errors(model, sequences(4, generator)))
    print(json.dumps({"torch": torch.__version__, "device": "cpu", "relative errors": results}, indent=1))


def build(layers: int, spread: float) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=spread,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def sequences(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 5, (rows, TOKENS), generator=generator).cumsum(1) % VOCABULARY


def errors(model: Qwen3ForCausalLM, ids_BS: Tensor) -> dict[str, float]:
    """Return the error of the whole gradient for each way of computing it, relative to the gradient's norm."""
    reference = gradients(copy.deepcopy(model).double(), ids_BS, bf16=False)
    of_ways = {
        "float32 between layers": gradients(model, ids_BS),
        "bfloat16 between layers": gradients(model, ids_BS, rounds=True),
        "bfloat16 weights": gradients(copy.deepcopy(model).bfloat16(), ids_BS),
    }
    return {way: round(error(values, reference), 5) for way, values in of_ways.items()}


def error(values: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    squares = sum(float((values[name] - gradient).square().sum()) for name, gradient in reference.items())
    return float((squares / sum(float(gradient.square().sum()) for gradient in reference.values())) ** 0.5)


def gradients(
    model: Qwen3ForCausalLM, ids_BS: Tensor, *, bf16: bool = True, rounds: bool = False
) -> dict[str, Tensor]:
    """Return the gradients of the cross-entropy in float64. rounds: round the embedding's output to bfloat16."""
    model.zero_grad()
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _, __, output: output.to(torch.bfloat16) if rounds else output
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
        hidden_BSD = model.model(ids_BS, use_cache=False).last_hidden_state
    hook.remove()
    weight_VD = model.lm_head.weight
    if bf16:  # operands in bfloat16 and logits in float32, as the objective has them on a GPU
        hidden_BSD, weight_VD = hidden_BSD.bfloat16().float(), weight_VD.bfloat16().float()
    logits_BSV = hidden_BSD @ weight_VD.T
    torch.nn.functional.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten()).backward()
    return {
        name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


if __name__ == "__main__":
    main()
