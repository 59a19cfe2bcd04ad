"""The engine on Megatron-Core beside PyTorch's: seconds of a step, and the collectives and bytes of each rank.

    python -m benchmarks.megatron_engine                        on a CPU, two gloo processes
    python -m benchmarks.megatron_engine --device cuda          on one GPU, in one process
    python -m benchmarks.megatron_engine --documents            packed documents beside rows, on a CPU, in one process

A student and a teacher of Qwen3's architecture, in the same stages, make the same steps with both engines, which take
turns in the same processes. So a change of the machine's speed affects both. On a CPU, both engines run their layers
in float32 and Megatron-Core's are its local ones; `tests/kit/cuda_is_cpu.py` replaces the CUDA devices that it
requests. So the CPU shows that nothing is done twice, not the speed of Megatron-Core's kernels.

With --documents, a student alone learns from documents whose lengths are those of `benchmarks/rows.py`: packed, the
same micro-batches as rows (on-policy), and in rows of micro-batches of similar lengths (datasets).

Writes benchmarks/results/megatron-engine-<date>.json, megatron-engine-cuda-<date>.json or
megatron-documents-<date>.json.
"""

import argparse
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.measure import synchronize
from benchmarks.objective_scaling import on_ranks
from benchmarks.parallel_ranks import GIVEN_SECOND, NO_SENDING, SENT, byte_count, group_of
from benchmarks.record import result_file, write_result
from benchmarks.rows import MAX_TOKENS, VOCABULARY, conversations
from stillhouse.config import TrainConfig
from stillhouse.data import MicroBatch, PackedSequences, StepMicroBatches
from stillhouse.engine.engine import Engine
from stillhouse.models import Decoder
from stillhouse.models.document_packing import AUTO, PACKED, ROWS
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource, start_alone
from stillhouse.signals import InStageTeacher

LOSS = "0.3*cross_entropy + 0.7*forward_kl"
MICRO_BATCHES, LEARNING_RATE = 4, 1e-4
#: the collectives that benchmarks/parallel_ranks.py has not: the bytes that they send per byte of a rank's input
SENT_BYTES = SENT | {
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: (n - 1) / n,
    "allreduce_coalesced": SENT["allreduce"],
    "allgather_into_tensor_coalesced": SENT["allgather_base"],
    "reduce_scatter_tensor_coalesced": SENT["reduce_scatter_base"],
}
INPUT_SECOND = (*GIVEN_SECOND, "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")


@dataclass(frozen=True)
class Sizes:
    """rows, tokens: of a micro-batch, each row is a document."""

    student: dict[str, int]
    teacher: dict[str, int]
    vocabulary: int
    rows: int
    tokens: int


def sizes_of(student: Sequence[int], teacher: Sequence[int], vocabulary: int, rows: int, tokens: int) -> Sizes:
    """student, teacher: width and number of layers."""
    models = [
        {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "intermediate_size": 3 * width,
            "num_attention_heads": width // 64,
            "num_key_value_heads": width // 128,
        }
        for width, layers in (student, teacher)
    ]
    return Sizes(*models, vocabulary, rows, tokens)


CPU_SIZES = sizes_of((256, 8), (512, 8), 8192, 2, 128)
DOCUMENT_SIZES = sizes_of((256, 8), (256, 8), VOCABULARY, 1, MAX_TOKENS)
GPU_SIZES = sizes_of((1024, 28), (2048, 28), 151_936, 4, 2048)
CPU_LAYOUTS = {
    "fsdp 2": Layout(Degrees(fsdp=2)),
    "tensor 2": Layout(Degrees(tensor=2)),
    "tensor 2, sequence": Layout(Degrees(tensor=2), sequence=True),
    "pipeline 2": Layout(Degrees(pipeline=2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--turns", type=int, default=9, help="measured steps of each engine under each layout")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to test that it runs")
    parser.add_argument("--documents", action="store_true", help="compare packed documents with rows")
    options = parser.parse_args()
    if options.documents:
        compare_packings(1024 if options.small else 8192, options.turns)
        return
    is_cpu = options.device == "cpu"
    sizes = sizes_of((256, 2), (256, 2), 512, 2, 32) if options.small else CPU_SIZES if is_cpu else GPU_SIZES
    if is_cpu:
        layouts = {"fsdp 2": CPU_LAYOUTS["fsdp 2"]} if options.small else CPU_LAYOUTS
        by_rank = on_ranks(run_layouts, 2, (layouts, sizes, options.turns, "cpu"), 1, {"TORCH_COMPILE_DISABLE": "1"})
    else:
        start_alone(torch.device("cuda"))
        layouts = {"one GPU": Layout(autocast=torch.bfloat16)}
        by_rank = [run_layouts(layouts, sizes, options.turns, "cuda")]
    rows = [row(name, [of_rank[name] for of_rank in by_rank]) for name in layouts]
    for line in rows:
        print(shown(line), flush=True)
    path = result_file("megatron-engine" if is_cpu else "megatron-engine-cuda")
    content = {"theme": "megatron-engine", "loss": LOSS, "sizes": asdict(sizes), "turns": options.turns}
    write_result(path, content | {"layouts": rows}, options.device)


def compare_packings(tokens: int, turns: int) -> None:
    (seconds,) = on_ranks(run_packings, 1, (tokens, turns), 1, {"TORCH_COMPILE_DISABLE": "1"})
    # of steps one after another, because the machine's speed changes
    ratios = {name: statistics.median(map(truediv, seconds[PACKED], of_case)) for name, of_case in seconds.items()}
    for name, ratio in ratios.items():
        print(f"{name:24} {statistics.median(seconds[name]):.2f} s; packed / this {ratio:.2f}", flush=True)
    content = {"theme": "megatron-documents", "tokens": tokens, "sizes": asdict(DOCUMENT_SIZES)}
    write_result(
        result_file("megatron-documents"), content | {"packed_relative_to": ratios, "seconds": seconds}, "cpu"
    )


def row(name: str, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the slowest rank's median seconds, and the most bytes and collectives of a rank, of both engines."""
    engines = {
        engine: {
            "seconds": max(statistics.median(of_rank[engine]["seconds"]) for of_rank in of_ranks),
            "sent_bytes": max(sum(of_rank[engine]["sent"].values()) for of_rank in of_ranks),
            "collectives": max(sum(of_rank[engine]["calls"].values()) for of_rank in of_ranks),
            "calls": of_ranks[0][engine]["calls"],
        }
        for engine in ("torch", "megatron")
    }
    return {"layout": name, **engines, "ratio": engines["megatron"]["seconds"] / engines["torch"]["seconds"]}


def shown(line: dict[str, Any]) -> str:
    parts = [
        f"{engine} {line[engine]['seconds']:.3f} s, {line[engine]['sent_bytes'] / 2**20:.1f} MiB in "
        f"{line[engine]['collectives']} collectives"
        for engine in ("torch", "megatron")
    ]
    return f"{line['layout']:20} {'; '.join(parts)}; megatron / torch {line['ratio']:.2f}"


# on each rank


def run_layouts(layouts: dict[str, Layout], sizes: Sizes, turns: int, device: str) -> dict[str, Any]:
    with without_cuda() if device == "cpu" else nullcontext():
        return {name: run_layout(layout, sizes, turns, torch.device(device)) for name, layout in layouts.items()}


def without_cuda() -> AbstractContextManager[None]:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from kit.cuda_is_cpu import cuda_is_cpu

    return cuda_is_cpu()


def run_layout(layout: Layout, sizes: Sizes, turns: int, device: torch.device) -> dict[str, Any]:
    """Return each engine's seconds of the measured steps, and the traffic of one step."""
    mesh = Mesh(layout.degrees, device)
    engines = {name: make_engine(name, layout, mesh, sizes) for name in ("torch", "megatron")}
    micro_batches = [micro_batch(sizes, mesh, number) for number in range(MICRO_BATCHES * mesh.degrees.data)]
    results: dict[str, Any] = {name: {"seconds": []} for name in engines}
    for name, engine in engines.items():
        step(engine, micro_batches)  # Megatron-Core's ranks and torch's stages exchange shapes
        with Traffic() as traffic:
            step(engine, micro_batches)
        results[name] |= {"sent": dict(traffic.sent), "calls": dict(traffic.calls)}
    for turn in range(turns):
        for name in sorted(engines, reverse=bool(turn % 2)):
            synchronize(device)
            dist.barrier()
            started = time.perf_counter()
            step(engines[name], micro_batches)
            synchronize(device)
            results[name]["seconds"].append(time.perf_counter() - started)
    del engines
    gc.collect()
    return results


def run_packings(tokens: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds of steps on the same documents, by how they lie in the layers."""
    documents, capacity = conversations(tokens), {"max_tokens": MAX_TOKENS, "seed": 0}
    packed = PackedSequences(documents, **capacity)
    similar = PackedSequences(documents, **capacity, by_length=True)
    cases = {PACKED: (AUTO, packed), "rows": (ROWS, packed), "rows of similar lengths": (ROWS, similar)}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with without_cuda():
        mesh = Mesh(Degrees(), torch.device("cpu"))
        engines = {
            packing: make_engine("megatron", Layout(), mesh, DOCUMENT_SIZES, "cross_entropy", packing)
            for packing in (AUTO, ROWS)
        }
        for turn in range(turns + 1):
            for name, (packing, sequences) in cases.items():
                batches = sequences.micro_batches([*np.arange(len(sequences))[:, None]])
                started = time.perf_counter()
                step(engines[packing], StepMicroBatches([batch.to("cpu") for batch in batches]))
                if turn:  # the first one warms up
                    seconds[name].append(time.perf_counter() - started)
    return seconds


def make_engine(name: str, layout: Layout, mesh: Mesh, sizes: Sizes, loss: str = LOSS, packing: str = ROWS) -> Engine:
    from stillhouse.registry import load

    student, teacher = (
        ModelSource(partial(decoder, configuration, sizes, mesh.device, packing, dtype), name="model", is_proven=True)
        for configuration, dtype in (
            (sizes.student, torch.float32),
            (sizes.teacher, layout.autocast or torch.float32),
        )
    )
    kind = load("stillhouse.engines", name)()
    train = TrainConfig(learning_rate=LEARNING_RATE)
    distributed = kind.distribute(layout, mesh, student, teacher if loss == LOSS else None)
    return kind.engine(distributed, parse_objective(loss), train=train, autocast=layout.autocast)


def decoder(
    configuration: dict[str, int], sizes: Sizes, device: torch.device, packing: str, dtype: torch.dtype
) -> Decoder:
    config = Qwen3Config(**configuration, vocab_size=sizes.vocabulary, head_dim=64, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:
        return Decoder(AutoModelForCausalLM.from_config(config, dtype=dtype), packing=packing, verify=False)


def micro_batch(sizes: Sizes, mesh: Mesh, number: int) -> MicroBatch:
    random = torch.Generator().manual_seed(number)
    ids_BS = torch.randint(sizes.vocabulary, (sizes.rows, sizes.tokens), generator=random).to(mesh.device)
    count = ids_BS.numel()
    return MicroBatch(
        inputs={"input_ids": ids_BS, "position_ids": torch.arange(sizes.tokens).repeat(sizes.rows, 1).to(ids_BS)},
        labels_T=ids_BS.flatten().roll(-1),
        weights_T=torch.ones(count, device=mesh.device),
        valid_index=torch.arange(count, device=mesh.device),
        document_T=torch.arange(sizes.rows, device=mesh.device).repeat_interleave(sizes.tokens),
    )


def step(engine: Engine, micro_batches: Sequence[MicroBatch]) -> None:
    batches = StepMicroBatches(micro_batches)
    shards = engine.student.shard(batches)
    signals = [{}] * len(shards)
    if engine.needs_teacher:
        signals = InStageTeacher().request(shards).result()  # type: ignore[arg-type]
    engine.update(LEARNING_RATE, engine.forward_backward(shards, signals, batches.normalizer))


class Traffic(TorchDispatchMode):
    """Counts the collectives of this rank, and the bytes that it sends with them, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        if "c10d" in func.namespace and name not in (*NO_SENDING, "barrier"):
            tensors = args[1] if name in INPUT_SECOND else args[0]
            self.calls[name] += 1
            self.sent[name] += round(SENT_BYTES[name](group_of(args).size()) * byte_count(tensors))
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main()
