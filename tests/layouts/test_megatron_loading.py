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
from kit.shard_ranks import RankPool, pool_of_meshes
from safetensors.torch import load_file, save_file

pytest.importorskip("megatron.core")

from kit.megatron_loading_jobs import Loading, load, measure, normalized, prove_damaged, prove_with_borders
from kit.megatron_runs import without_cuda
from kit.megatron_weights_jobs import Case, model_config
from kit.ranks import Ranks

from stillhouse.megatron.model_config import FAMILIES

MOE, LATENT, GEMMA = "qwen3_moe", "deepseek_v3", "gemma3_text"
LIMIT = 180.0
#: of the models that `write_run` saves
VOCABULARY = 400


def save(folder: Path, case: Case) -> Path:
    of_config(model_config(case)).save_pretrained(folder)
    return folder


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
    of_ranks: list[Loading] = pool_of_meshes(case.processes).call(
        load, (save(tmp_path, case), case, "float32"), limit=LIMIT
    )
    for loading in of_ranks:
        assert not loading.different
        assert loading.read == loading.elements
        assert loading.proof < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_weights_of_half_precision_are_proven(tmp_path: Path, model_type: str) -> None:
    case = Case(model_type, tensor=2, sequence=True, expert=2 if FAMILIES[model_type].gpt_oss else 1)
    of_ranks = pool_of_meshes(2).call(load, (save(tmp_path, case), case, "bfloat16"), limit=LIMIT)
    assert [loading.different for loading in of_ranks] == [[], []]
    assert all(0 < loading.proof < 0.05 for loading in of_ranks)


@pytest.mark.parametrize("model_type", ["gpt_oss", *map(slow, sorted(FAMILIES.keys() - {"gpt_oss"}))])
def test_norms_round_as_those_of_transformers(model_type: str) -> None:
    (made, expected) = pool_of_meshes(1).call(normalized, Case(model_type), limit=LIMIT)[0]
    assert made.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(made, expected)


@pytest.mark.parametrize("factor", [1.01, slow(float("nan"))])
@pytest.mark.parametrize("case", [Case("qwen3", tensor=2), slow(Case("llama", data=2))], ids=lambda case: case.name)
def test_a_wrong_weight_of_one_rank_fails_the_proof_on_all(tmp_path: Path, case: Case, factor: float) -> None:
    errors = pool_of_meshes(2).call(prove_damaged, (save(tmp_path, case), case, factor), limit=LIMIT)
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
    for error in pool_of_meshes(case.processes).call(
        prove_with_borders, (save(tmp_path, case), case, change), limit=LIMIT
    ):
        assert error.startswith("model: the logits of Megatron-Core differ from those of transformers by ")


def changed(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def nan_in_the_last_row(folder: Path) -> None:
    changed(
        folder, "model.layers.1.self_attn.q_proj.weight", lambda rows: torch.cat([rows[:-1], rows[-1:] * torch.nan])
    )


def another_shape(folder: Path) -> None:
    changed(folder, "model.layers.1.mlp.down_proj.weight", lambda weight: weight[:, 1:].clone())


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
            r"'model\.layers\.1\.mlp\.down_proj\.weight' has 48 rows of shape \[79\]: expected \[48, 80\] in all",
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
@pytest.mark.parametrize(
    "case",
    [Case("llama", tensor=2), Case("llama", pipeline=2, chunks=2)],
    ids=lambda c: c.name,
)
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
