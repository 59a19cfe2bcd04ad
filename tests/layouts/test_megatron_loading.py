"""Megatron-Core's chunks are read from a Hugging Face folder: bit-equal, only this process's part, and proven.

A folder with wrong weights is refused by all ranks of a run, although only one of them reads the wrong part.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from kit import loading_memory, slow
from kit.causal_families import of_config
from kit.families import build
from kit.runs import write_run
from kit.shard_ranks import RankPool, message_of, on_ranks
from safetensors.torch import load_file, save_file

pytest.importorskip("megatron.core")

from dataclasses import dataclass
from functools import partial
from math import prod
from unittest.mock import patch

from kit.loading_memory import MIB, growth, return_freed_memory
from kit.megatron_engine_jobs import build_chunks
from kit.megatron_runs import without_cuda
from kit.megatron_weights_jobs import GEMMA, LATENT, MOE, Case, laid_out, model_config, save
from kit.ranks import Ranks
from kit.shard_ranks import Rank

from stillhouse.megatron import chunks as megatron_chunks
from stillhouse.megatron import rows
from stillhouse.megatron.build import prove_chunks
from stillhouse.megatron.families import FAMILIES
from stillhouse.megatron.model_config import transformer_config
from stillhouse.megatron.weights import gather, tensor_of
from stillhouse.models import Decoder
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
        chunks = build_chunks(case, mesh, source)
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
        (chunk,) = megatron_chunks.build_chunks(config, transformer_config(config, dtype=torch.bfloat16))
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
        chunks = build_chunks(case, mesh, source)
        if rank.number == case.processes - 1:
            name = next(name for _, name in chunks.table.shapes if name.endswith("linear_fc2.weight"))
            with torch.no_grad():
                tensor_of(chunks.models[0], name)[0] *= factor
        return message_of(prove_chunks, chunks, source, mesh)


def prove_with_borders(_: Rank, job: tuple[Path, Case, Callable[[Sequence[int]], Sequence[int]]]) -> str:
    """A job: pack documents with wrong borders, and return the proof's error. The last entry changes the documents'
    lengths.
    """
    folder, case, change = job
    borders = rows.borders
    with laid_out(case), patch.object(rows, "borders", lambda documents, device: borders(change(documents), device)):
        mesh, source = Mesh(case.degrees, CPU), loading_memory.source(folder)
        chunks = build_chunks(case, mesh, source)
        return message_of(prove_chunks, chunks, source, mesh)


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
        prove_chunks(build_chunks(case, mesh, first), first, mesh)
        source = loading_memory.source(large)
        loading, chunks = growth(partial(build_chunks, case, mesh, source))
        share = sum(parameter.nbytes for model in chunks.models for parameter in model.parameters()) / MIB
        proof, _ = growth(partial(prove_chunks, chunks, source, mesh))
    return Memory(share, loading, proof)


LIMIT = 180.0
#: of the models that `write_run` saves
VOCABULARY = 400


@pytest.mark.parametrize(
    "case",
    [
        Case(MOE, tensor=2, sequence=True),
        *map(
            slow,
            [
                Case("llama", tied=True, pipeline=2),
                Case("qwen2", data=2, tied=True),
                Case("qwen3", pipeline=2, chunks=2),
                Case("qwen3", tied=True, pipeline=2, chunks=2),
                Case("mistral", tensor=2, tied=True),
                Case(MOE, expert=2, data=2),
                Case(LATENT, tensor=2, sequence=True),
                Case(LATENT, pipeline=2, tied=True),
                Case(GEMMA, tensor=2, tied=True),
            ],
        ),
    ],
    ids=lambda case: case.name,
)
def test_each_process_reads_its_part_alone(tmp_path: Path, case: Case) -> None:
    of_ranks: list[Loading] = on_ranks(load, case.processes, (save(tmp_path, case), case, "float32"), limit=LIMIT)
    for loading in of_ranks:
        assert not loading.different
        assert loading.read == loading.elements
        assert loading.proof < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_weights_of_half_precision_are_proven(tmp_path: Path, model_type: str) -> None:
    case = Case(model_type, tensor=2, sequence=True, expert=2 if FAMILIES[model_type].gpt_oss else 1)
    of_ranks = on_ranks(load, 2, (save(tmp_path, case), case, "bfloat16"), limit=LIMIT)
    assert [loading.different for loading in of_ranks] == [[], []]
    assert all(0 < loading.proof < 0.05 for loading in of_ranks)


@pytest.mark.parametrize("model_type", ["gpt_oss", *map(slow, sorted(FAMILIES.keys() - {"gpt_oss"}))])
def test_norms_round_as_those_of_transformers(model_type: str) -> None:
    (made, expected) = on_ranks(normalized, 1, Case(model_type), limit=LIMIT)[0]
    assert made.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(made, expected)


@pytest.mark.parametrize("factor", [1.01, slow(float("nan"))])
@pytest.mark.parametrize("case", [Case("qwen3", tensor=2), slow(Case("llama", data=2))], ids=lambda case: case.name)
def test_a_wrong_weight_of_one_rank_fails_the_proof_on_all(tmp_path: Path, case: Case, factor: float) -> None:
    errors = on_ranks(prove_damaged, 2, (save(tmp_path, case), case, factor), limit=LIMIT)
    assert len(set(errors)) == 1
    assert errors[0].startswith("model: the logits of Megatron-Core differ from those of transformers by ")


def without_the_first(documents: Sequence[int]) -> Sequence[int]:
    """The first two documents see each other."""
    return [documents[0] + documents[1], *documents[2:]]


def a_token_late(documents: Sequence[int]) -> Sequence[int]:
    """The last token of the proof's third document is in the fourth one."""
    return [*documents[:2], documents[2] - 1, documents[3] + 1, *documents[4:]]


@pytest.mark.parametrize("change", [without_the_first, slow(a_token_late)])
@pytest.mark.parametrize(
    "case",
    [Case("llama", tensor=2), *map(slow, [Case(LATENT, data=2), Case(GEMMA, pipeline=2)])],
    ids=lambda case: case.name,
)
def test_wrong_borders_of_packed_documents_fail_the_proof(
    tmp_path: Path, case: Case, change: Callable[[Sequence[int]], Sequence[int]]
) -> None:
    for error in on_ranks(prove_with_borders, case.processes, (save(tmp_path, case), case, change), limit=LIMIT):
        assert error.startswith("model: the logits of Megatron-Core differ from those of transformers by ")


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = change(tensors[name])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


Q_PROJ, DOWN_PROJ = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
nan_in_the_last_row = changed(Q_PROJ, lambda rows: torch.cat([rows[:-1], rows[-1:] * torch.nan]))
another_shape = changed(DOWN_PROJ, lambda weight: weight[:, 1:].clone())


def lost_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    build("qwen3", seed=1, vocab_size=VOCABULARY).save_pretrained(folder, max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (folder / index["model.layers.1.mlp.up_proj.weight"]).unlink()


def another_model(folder: Path) -> None:
    """The weights of a mixture of experts beside the configuration of a dense model."""
    configuration = (folder / "config.json").read_text()
    build("qwen3_moe", vocab_size=VOCABULARY).save_pretrained(folder)
    (folder / "config.json").write_text(configuration)


@pytest.mark.parametrize(
    ("damage", "layout", "code", "message"),
    [
        (
            nan_in_the_last_row,  # tensor rank 1 has it
            "parallel.tensor=2",
            1,
            r"student: 48 of the \d+ values of 'backbone\.layers\.1\.self_attn\.q_proj\.weight' are NaN or infinite",
        ),
        slow(
            another_shape,
            "parallel.pipeline=2",
            2,
            r"'model\.layers\.1\.mlp\.down_proj\.weight' has 48 rows of shape \[79\]: expected \[48, 80\] in total",
        ),
        slow(lost_file, "parallel.pipeline=2", 2, r"/student/model-\S+\.safetensors is missing, but config\.json"),
        slow(another_model, "parallel.fsdp=2", 2, r"has no tensor 'model\.layers\.0\.mlp\.gate_proj\.weight'"),
    ],
)
def test_a_damaged_folder_is_refused_by_all_ranks(
    tmp_path: Path, damage: Callable[[Path], None], layout: str, code: int, message: str
) -> None:
    write_run(tmp_path, family="qwen3", **{"parallel.engine": "megatron"})
    damage(tmp_path / "student")
    ranks = Ranks(2, "distill", tmp_path / "run.yaml", layout, hook=without_cuda)
    assert ranks.wait(LIMIT) == [code, code], ranks.texts
    for command in ranks:
        assert re.search(rf"^error.*: .*{message}", command.err, re.MULTILINE), ranks.texts


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float, float]:
    return loading_memory.save_two(tmp_path_factory.mktemp("models"))


@pytest.mark.skipif(not loading_memory.SUPPORTED, reason="no /proc to read the peak from")
@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("llama", tensor=2), Case("llama", pipeline=2, chunks=2)], ids=lambda c: c.name)
def test_a_process_holds_its_share_and_a_tensor(large: tuple[Path, Path, float, float], case: Case) -> None:
    small, folder, whole, layer = large
    # new processes, because memory that a process has used before would hide growth
    with RankPool(case.processes) as pool:
        memories = pool.call(measure, (small, folder, case), limit=LIMIT)
    for rank, memory in enumerate(memories):
        print(f"{case.name}, rank {rank}: {memory}, of {whole:.0f} MiB in all")
        assert memory.share == pytest.approx(whole / case.processes, rel=0.01)
        assert memory.share <= memory.loading <= memory.share + layer + 16
        # only the first process runs transformers' model, whose parts are as large as a process's share
        assert memory.proof <= (memory.share + layer if rank == 0 else 0) + 16
