"""The bytes that the fused kernels of a compiled layer read and write, counted without a GPU.

    python -m benchmarks.fused_layers

Inductor compiles a layer of Qwen3-0.6B as the student (float32 weights under bf16 autocast, forward and backward) and
a layer of Qwen3-8B as the teacher (bf16 weights, forward) for a CPU. Matrix products and attention are not counted.
What is fused for a GPU can differ. The bytes are a constant (the weights that autocast rounds) and a part for each
token, so two numbers of tokens are compiled, and `TOKENS` is computed from them.

Writes benchmarks/results/fused-layers-<date>.json.
"""

import logging

import torch
from torch._inductor import compile_fx, metrics
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from benchmarks.record import result_file, write_result

#: width, width of the MLP, heads of queries, heads of keys, layers
STUDENT, TEACHER = (1024, 3072, 16, 8, 28), (4096, 12288, 32, 8, 36)
SIZES, TOKENS, HEAD_DIM = (256, 1024), 8192, 128


def main() -> None:
    # Inductor counts bytes only for its log
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)
    compile_fx.inductor_metrics_log.propagate = False
    torch._functorch.config.force_non_lazy_backward_lowering = True
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.fx_graph_cache = False
    layers = {}
    for name, shape, residual in (
        ("student, float32 between layers", STUDENT, torch.float32),
        ("student, bfloat16 between layers", STUDENT, torch.bfloat16),
        ("teacher", TEACHER, torch.bfloat16),
    ):
        few, many = (bytes_of(shape, residual, tokens, train=name != "teacher") for tokens in SIZES)
        per_token = (many - few) / (SIZES[1] - SIZES[0])
        of_layer = few + per_token * (TOKENS - SIZES[0])
        layers[name] = {"layers": shape[-1], "bytes_of_layer": round(of_layer), "bytes": round(shape[-1] * of_layer)}
        print(name, layers[name], flush=True)
    write_result(result_file("fused-layers"), {"theme": "fused layers", "tokens": TOKENS, "passes": layers})


def bytes_of(shape: tuple[int, ...], residual: torch.dtype, tokens: int, *, train: bool) -> int:
    """Compile a layer, and return the bytes of its fused kernels, each input and output once."""
    torch._dynamo.reset()
    metrics.reset()
    width, inner, heads, key_values, _ = shape
    config = Qwen3Config(
        vocab_size=2,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_values,
        head_dim=HEAD_DIM,
    )
    config._attn_implementation = "sdpa"
    weights = torch.float32 if train else torch.bfloat16
    layer = Qwen3DecoderLayer(config, 0).to(weights).requires_grad_(train)
    hidden_BSD = torch.randn(1, tokens, width, dtype=residual, requires_grad=train)
    position_ids_BS = torch.arange(tokens)[None]
    rotary = Qwen3RotaryEmbedding(config)(hidden_BSD, position_ids_BS)
    forward = torch.compile(type(layer).forward, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=train), torch.set_grad_enabled(train):
        forward(layer, hidden_BSD, position_ids=position_ids_BS, position_embeddings=rotary)
    fused = [node for node, _ in metrics.nodes_num_elem if not node.is_extern()]
    assert fused
    return sum(node.get_read_write_buffers_sizes() for node in fused)


if __name__ == "__main__":
    main()
