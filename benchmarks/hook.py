"""Log-probabilities of chosen tokens by an output processor, against logits, log-softmax and gather.

    python -m benchmarks.hook --threads 2
    python -m benchmarks.hook --device cuda --dtype bf16 --tokens 8192 --width 2048

Two models of one layer are measured, with a vocabulary of 152k: Qwen3 of Hugging Face and Megatron-Core's GPTModel.
The whole pass through model and head is measured: only forward, forward with backward, and a policy gradient, for
which a processor needs no second projection. The two paths take turns in one process. The result is the median of the
ratios of neighbouring passes. Memory is the peak of a separate process, without weights, inputs and gradients
(benchmarks/measure.py).

The floor is counted in products of [T, D] and [D, V]: one in forward and two in backward; log-probabilities need one
more in backward, because no tile of the forward is kept. The targets are 1.1 times the time and a sixth of the memory
of logits.
Writes benchmarks/results/hook-<date>.json, on a GPU hook-cuda-<date>.json.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.measure import MAP_BLOCKS, in_fresh_process, relative_distance, resident_extra, run_pass, take_turns
from benchmarks.record import result_file, write_result
from stillhouse.models import Decoder
from stillhouse.models.processors import PolicyTargets, Targets, policy_gradient, selected_log_probs
from stillhouse.tools.parity import worst

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: the targets, relative to the time and the memory of logits
AIMS = {"time": 1.1, "memory": 1 / 6}
CASES = ("log-probs, forward", "log-probs, forward and backward", "policy gradient, forward and backward")


@dataclass(frozen=True)
class Sizes:
    tokens: int
    width: int
    vocabulary: int


@dataclass
class Subject:
    """A model and a batch. call: ids and a processor with its context, or neither, for logits [B, S, V]."""

    model: nn.Module
    call: Callable[..., Any]
    tokens_BS: Tensor
    advantages_BS: Tensor
    old_BS: Tensor

    def clear_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    result = measure(arguments)
    for kind, figures in result["of"].items():
        for case, figure in figures.items():
            print(kind, case, json.dumps(figure), sep=": ")
    is_gpu = arguments.device != "cpu"
    write_result(result_file("hook-cuda" if is_gpu else "hook"), {"theme": "hook"} | result, arguments.device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, default=1024)
    add("--width", type=int, default=1024)
    add("--vocabulary", type=int, default=151_936)
    add("--kinds", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    add("--rounds", type=int, default=5)
    add("--skip", nargs="*", choices=["memory"], default=[])
    add("--dtype", choices=list(DTYPES), default="fp32")
    add("--device", default="cpu")
    add("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = Sizes(arguments.tokens, arguments.width, arguments.vocabulary)
    figures = {}
    for kind in arguments.kinds:
        subject = SUBJECTS[kind](sizes, torch.device(arguments.device), DTYPES[arguments.dtype])
        figures[kind] = {case: compare(kind, case, subject, sizes, arguments) for case in CASES}
        del subject
    return {"sizes": asdict(sizes), "dtype": arguments.dtype, "rounds": arguments.rounds, "aims": AIMS, "of": figures}


def compare(kind: str, case: str, subject: Subject, sizes: Sizes, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    tasks = {path: partial(run_pass, losses[case], subject) for path, losses in PATHS.items()}
    # run both paths once before timing, which compiles them and shows whether their results are equal
    (theirs, their_gradients), (ours, our_gradients) = ((tasks[path](), subject.gradients()) for path in PATHS)
    distances = [relative_distance(a, b) for a, b in zip(our_gradients, their_gradients, strict=True)]
    subject.clear_gradients()
    del their_gradients, our_gradients
    seconds = take_turns(tasks, arguments.rounds, device)
    ratios = [a / b for a, b in zip(seconds["processor"], seconds["logits"], strict=True)]
    memory = {}
    if "memory" not in arguments.skip:
        memory = {path: extra_bytes(kind, case, path, sizes, arguments) for path in PATHS}
    return {
        "time": statistics.median(ratios),
        "time_range": [min(ratios), max(ratios)],
        "memory": memory["processor"] / memory["logits"] if memory else None,
        "seconds": {path: statistics.median(second) for path, second in seconds.items()},
        "extra_bytes": memory,
        "loss_distance": float((ours - theirs).abs() / theirs.abs()),
        "gradient_distance": worst(enumerate([0.0, *distances]))[1],
    }


def extra_bytes(kind: str, case: str, path: str, sizes: Sizes, arguments: argparse.Namespace) -> int:
    if arguments.device == "cpu":
        options = (kind, case, path, sizes, arguments.dtype, arguments.threads)
        return in_fresh_process(_resident, *options, environment=MAP_BLOCKS)
    device = torch.device(arguments.device)
    subject = SUBJECTS[kind](sizes, device, DTYPES[arguments.dtype])
    run_pass(PATHS[path][case], subject)
    subject.clear_gradients()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_pass(PATHS[path][case], subject)
    torch.cuda.synchronize(device)
    held = sum(gradient.nbytes for gradient in subject.gradients())
    return torch.cuda.max_memory_allocated(device) - before - held


def _resident(kind: str, case: str, path: str, sizes: Sizes, dtype: str, threads: int) -> int:
    torch.set_num_threads(threads)
    subject = SUBJECTS[kind](sizes, torch.device("cpu"), DTYPES[dtype])
    loss = PATHS[path][case]
    run_pass(loss, subject)
    return resident_extra(loss, subject)


# the two paths


def by_logits(subject: Subject) -> Tensor:
    logits = subject.call()
    return torch.log_softmax(logits.float(), -1).gather(-1, subject.tokens_BS[..., None])[..., 0]


def by_processor(subject: Subject) -> Tensor:
    return subject.call(selected_log_probs(), Targets(subject.tokens_BS)).log_probs_BS


def forward_only(log_probs: Callable[[Subject], Tensor], subject: Subject) -> Tensor:
    with torch.no_grad():
        loss = log_probs(subject).sum()
    return loss.requires_grad_()  # a pass ends with a backward


def ratio_to_old(log_probs: Callable[[Subject], Tensor], subject: Subject) -> Tensor:
    """A loss that is not a sum over tokens: it takes the mean over a sequence before the exponential."""
    return (log_probs(subject) - subject.old_BS).mean(1).exp().sum()


def clipped_by_logits(subject: Subject) -> Tensor:
    ratio_BS = (by_logits(subject) - subject.old_BS).exp()
    gain_BS = torch.minimum(ratio_BS * subject.advantages_BS, ratio_BS.clamp(0.8, 1.2) * subject.advantages_BS)
    return -gain_BS.sum()


def clipped_by_processor(subject: Subject) -> Tensor:
    context = PolicyTargets(subject.tokens_BS, advantages_T=subject.advantages_BS, old_log_probs_T=subject.old_BS)
    return subject.call(policy_gradient(), context).loss


PATHS: dict[str, dict[str, Callable[[Subject], Tensor]]] = {
    path: dict(zip(CASES, (partial(forward_only, log_probs), partial(ratio_to_old, log_probs), clipped), strict=True))
    for path, log_probs, clipped in (
        ("logits", by_logits, clipped_by_logits),
        ("processor", by_processor, clipped_by_processor),
    )
}


# the two models


def hugging_face(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Subject:
    torch.manual_seed(0)
    heads = max(8, sizes.width // 128)
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.width,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=sizes.width // heads,
        tie_word_embeddings=False,
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    decoder = Decoder(model, verify=False)
    ids_BS = _ids(sizes, device)

    def call(processor: Any = None, context: Any = None) -> Any:
        return decoder(ids_BS, processor=processor, context=context)

    return _subject(decoder, call, sizes, device)


def megatron(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Subject:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from stillhouse.megatron.processor import MegatronProcessor

    if not dist.is_initialized():
        store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=sizes.width,
        num_attention_heads=8,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = _Attention
    model = GPTModel(
        config,
        layer,
        sizes.vocabulary,
        sizes.tokens,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    ).to(device)
    ids_BS = _ids(sizes, device)
    positions_BS = torch.arange(sizes.tokens, device=device)[None]

    def call(processor: Any = None, context: Any = None) -> Any:
        if processor is None:
            return model(ids_BS, positions_BS, None)
        options = {"output_processor": MegatronProcessor(model, processor), "output_processor_context": context}
        return model(ids_BS, positions_BS, None, **options)

    return _subject(model, call, sizes, device)


class _Attention(nn.Module):
    """Replaces Megatron's attention, which allocates memory on CUDA."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        heads: Iterator[Tensor] = (projected.permute(1, 2, 0, 3) for projected in (query, key, value))
        made = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return made.permute(2, 0, 1, 3).flatten(2)


def _ids(sizes: Sizes, device: torch.device) -> Tensor:
    return torch.randint(sizes.vocabulary, (1, sizes.tokens), device=device)


def _subject(model: nn.Module, call: Callable[..., Any], sizes: Sizes, device: torch.device) -> Subject:
    shape_BS = (1, sizes.tokens)
    tokens_BS = torch.randint(sizes.vocabulary, shape_BS, device=device)
    # close to the model's log-probabilities, so that ratios are not 0 and not all clipped
    old_BS = -torch.tensor(float(sizes.vocabulary)).log() + 0.3 * torch.randn(shape_BS)
    return Subject(model, call, tokens_BS, torch.randn(shape_BS, device=device), old_BS.to(device))


SUBJECTS = {"hugging face": hugging_face, "megatron": megatron}

if __name__ == "__main__":
    main()
