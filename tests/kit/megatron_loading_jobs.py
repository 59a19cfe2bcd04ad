"""Jobs for ranks: a model's folder is read onto Megatron-Core's chunks under some layout, and proven."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from unittest.mock import patch

import torch
from kit import loading_memory
from kit.causal_families import of_config
from kit.loading_memory import MIB, growth, return_freed_memory
from kit.megatron_engine_jobs import build_chunks
from kit.megatron_weights_jobs import Case, laid_out, model_config
from kit.shard_ranks import Rank

from stillhouse.megatron import model, rows
from stillhouse.megatron.model_config import transformer_config
from stillhouse.megatron.proof import prove_chunks
from stillhouse.megatron.weights import gather, tensor_of
from stillhouse.models import Decoder, ProofError
from stillhouse.models.dtensors import local
from stillhouse.parallel import Mesh, ModelSource, empty_decoder, load_weights

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loading:
    """different: the tensors whose values are not those of the files. elements: of this rank's parameters.
    read: the elements that this rank has read from the files. proof: the error of the proof.
    """

    different: list[str]
    elements: int
    read: int
    proof: float


def load(_: Rank, job: tuple[Path, Case, str]) -> Loading:
    """A job: read a folder onto the chunks in some dtype, compare the weights, and prove the model."""
    folder, case, dtype = job
    read: list[int] = []

    def counted(decoder: Decoder) -> None:
        load_weights(decoder, folder, CPU)
        read.append(sum(local(parameter).numel() for parameter in decoder.parameters()))

    expected = Decoder.from_pretrained(folder, dtype=dtype, verify=False).state_dict()
    with laid_out(case):
        mesh, source = Mesh(case.degrees, CPU), ModelSource(partial(empty_decoder, folder, dtype=dtype), counted)
        chunks, _ = build_chunks(case, mesh, source)
        of_files = sum(read)
        shapes = {name: tensor.shape for name, tensor in expected.items()}
        loaded = gather(chunks.models, chunks.table, shapes, lambda tensor: tensor)
        elements = sum(
            prod(shape) for (_, name), shape in chunks.table.shapes.items() if not name.endswith(".expert_bias")
        )
        error = prove_chunks(chunks, source, mesh)
    different = [name for name, tensor in expected.items() if not torch.equal(loaded[name], tensor)]
    return Loading(different, elements, of_files, error)


def normalized(_: Rank, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """A job: return the same bfloat16 values after a norm of Megatron-Core's layers and of transformers."""
    config = model_config(case)
    expected = (
        Decoder(of_config(config).to(torch.bfloat16), verify=False).layers()[0].get_submodule("input_layernorm")
    )
    with laid_out(case), torch.no_grad():
        (chunk,) = model.build_chunks(config, transformer_config(config, dtype=torch.bfloat16))
        norm = chunk.decoder.layers[0].input_layernorm
        norm.weight.copy_(expected.weight)
        random = torch.Generator().manual_seed(0)
        values = torch.randn(64, 2, config.hidden_size, generator=random).bfloat16()
        return norm(values), expected(values)


def prove_damaged(rank: Rank, job: tuple[Path, Case, float]) -> str:
    """A job: multiply the first row of a weight on the last rank by a factor after loading, and return the proof's
    error.
    """
    folder, case, factor = job
    with laid_out(case):
        mesh, source = Mesh(case.degrees, CPU), loading_memory.source(folder)
        chunks, _ = build_chunks(case, mesh, source)
        if rank.number == case.processes - 1:
            name = next(name for _, name in chunks.table.shapes if name.endswith("linear_fc2.weight"))
            with torch.no_grad():
                tensor_of(chunks.models[0], name)[0] *= factor
        try:
            prove_chunks(chunks, source, mesh)
        except ProofError as error:
            return str(error)
    return ""


def prove_with_borders(_: Rank, job: tuple[Path, Case, Callable[[Sequence[int]], Sequence[int]]]) -> str:
    """A job: pack documents with wrong borders, and return the proof's error. The last entry changes the documents'
    lengths.
    """
    folder, case, change = job
    borders = rows.borders
    with laid_out(case), patch.object(rows, "borders", lambda documents, device: borders(change(documents), device)):
        mesh, source = Mesh(case.degrees, CPU), loading_memory.source(folder)
        chunks, _ = build_chunks(case, mesh, source)
        try:
            prove_chunks(chunks, source, mesh)
        except ProofError as error:
            return str(error)
    return ""


@dataclass(frozen=True)
class Memory:
    """In MiB: this rank's weights, and the largest growth of this process while it loads and while it proves."""

    share: float
    loading: float
    proof: float


def measure(_: Rank, job: tuple[Path, Path, Case]) -> Memory:
    """A job: measure the large model. First load and prove the small one, so that all libraries are in memory."""
    small, large, case = job
    return_freed_memory()
    with laid_out(case):
        mesh = Mesh(case.degrees, CPU)
        first = loading_memory.source(small)
        prove_chunks(build_chunks(case, mesh, first)[0], first, mesh)
        source = loading_memory.source(large)
        loading, (chunks, _) = growth(partial(build_chunks, case, mesh, source))
        share = sum(parameter.nbytes for model in chunks.models for parameter in model.parameters()) / MIB
        proof, _ = growth(partial(prove_chunks, chunks, source, mesh))
    return Memory(share, loading, proof)
