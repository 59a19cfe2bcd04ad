"""Megatron-Core's shards are published with the names, dtypes and bytes of the Hugging Face folder.

megatron-core is the real one, on a CPU. The control is the folder from which the student was loaded.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import loading_memory, slow
from kit.shard_ranks import RankPool, on_ranks
from kit.tensors import assert_same_bytes, tensors_in
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed: `make test` does")

from functools import partial

from kit.loading_memory import growth, read_manifest, source
from kit.megatron_engine_jobs import Job, build_chunks, decoder, megatron_engine
from kit.megatron_weights_jobs import GEMMA, LATENT, MOE, Case, laid_out, save
from kit.shard_ranks import Rank
from transformers import AutoModelForCausalLM

from stillhouse.megatron.student import MegatronStudent
from stillhouse.models import Decoder
from stillhouse.models.adapter import ALL_LINEAR, is_lora, save_lora
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel import Layout, Mesh
from stillhouse.rollout.engines import StudentCopy
from stillhouse.rollout.publish import BUCKET_BYTES, publish


def published_adapter(rank: Rank, job: tuple[Job, Path]) -> tuple[str, dict[str, Tensor]]:
    """Publish an adapter as version 7, after each of its matrices was doubled.

    Returns the version's path, and this rank's full copy of the student for generation.
    """
    trained, folder = job
    with laid_out(trained.case):
        student = megatron_engine(trained, parse_objective("cross_entropy")).student
        return _doubled(student, folder, 1, partial(decoder, trained, 0))


def _doubled(
    student: MegatronStudent, folder: Path, bucket_bytes: int, build: Callable[[], Decoder]
) -> tuple[str, dict[str, Tensor]]:
    with torch.no_grad():
        for _, parameter in student.named_parameters():
            parameter.mul_(1 + parameter.requires_grad)
    path = publish(student, folder, 7, bucket_bytes=bucket_bytes)
    copy = StudentCopy(student, build)
    return str(path), {name: tensor.clone() for name, tensor in copy.decoder.state_dict().items()}


#: a job: the layout, the student's folder, the folder of the versions, and the largest size of a file
PublishJob = tuple[Case, Path, Path, int]


def published(rank: Rank, job: PublishJob) -> tuple[str, dict[str, Tensor]]:
    """Publish the weights of a folder as version 7, after each of them was doubled.

    Returns the version's path, and this rank's full copy of the student for generation.
    """
    case, model, folder, bucket_bytes = job
    with laid_out(case):
        build = partial(Decoder.from_pretrained, model, verify=False)
        return _doubled(of_folder(case, model), folder, bucket_bytes, build)


def growth_of_publishing(rank: Rank, job: tuple[Case, Path, Path, Path, int]) -> float:
    """Return the growth of this rank's memory in MiB while it publishes the large model, after the small one."""
    case, small, large, folder, bucket_bytes = job
    with laid_out(case):
        publish(of_folder(case, small), folder, 0)
        student = of_folder(case, large)
        return growth(partial(publish, student, folder, 1, bucket_bytes=bucket_bytes))[0]


def publish_with_unequal_replicas(rank: Rank, job: PublishJob) -> None:
    """Publish after the tensor ranks' copies of a norm have become different."""
    case, model, folder, bucket_bytes = job
    with laid_out(case):
        student = of_folder(case, model)
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                if name.endswith("final_layernorm.weight"):
                    parameter.add_(rank.number)
        publish(student, folder, 7, bucket_bytes=bucket_bytes)


def of_folder(case: Case, model: Path) -> MegatronStudent:
    layout = Layout(case.degrees, "interleaved" if case.chunks > 1 else "1f1b")
    mesh = Mesh(case.degrees, torch.device("cpu"))
    return MegatronStudent(layout, mesh, build_chunks(case, mesh, source(model)), data_parallel={})


#: of three rows of the vocabulary each, the fourth tensor rank has only padding
FEW_TOKENS = {"vocab_size": 9, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": None}
QUICK = [Case("qwen3", tied=True, tensor=2)]
LONG = [
    Case("llama", pipeline=2, tied=True),
    Case("qwen2", tensor=2, sequence=True),
    Case("qwen3", tensor=2, pipeline=2, tied=True),
    Case("qwen3", tensor=4, options=FEW_TOKENS),
    Case("qwen3", pipeline=2, chunks=2, tied=True),
    Case(MOE, tensor=2, expert=2, data=2, sequence=True),
    Case(MOE, context=2, expert=2),
    Case(LATENT, expert=2, data=2),
    Case(LATENT, tensor=2, sequence=True),
    Case(GEMMA, tensor=2, tied=True),
    Case("gemma2", tensor=2, tied=True),
    Case("gpt_oss", tensor=2, expert=2, sequence=True),
    Case("gpt_oss", pipeline=2, expert=2, data=2),
]
# in the order of the numbers of processes, so that cases share them
LONG.sort(key=lambda case: case.processes)


@pytest.mark.parametrize("case", [*QUICK, *map(slow, LONG)], ids=lambda case: case.name)
def test_the_bytes_are_those_of_the_folder(tmp_path: Path, case: Case) -> None:
    """Each weight was doubled after loading, so that a version of the weights in files would be found.

    The full copies for generation on each rank have the same bytes. The quick case also has a single file.
    """
    model = save(tmp_path / "model", case)
    # the corrections of router scores are not parameters
    expected = {
        name: tensor if name.endswith("e_score_correction_bias") else 2 * tensor
        for name, tensor in tensors_in(model).items()
    }
    for bucket_bytes in (*[BUCKET_BYTES] * (case in QUICK), 20_000):
        folder = tmp_path / str(bucket_bytes)
        answer = on_ranks(published, case.processes, (case, model, folder, bucket_bytes), limit=180)
        path = Path(answer[0][0])
        assert_same_bytes(tensors_in(path), expected)
        assert read_manifest(path).tensors.keys() == expected.keys()
        read = Decoder(AutoModelForCausalLM.from_pretrained(path)).state_dict()
        for _, copy in answer:
            assert_same_bytes(copy, read)
    assert len([*path.glob("*.safetensors")]) > 2


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3", tensor=2, tied=True),
        slow(Case("llama", pipeline=2, chunks=2)),
        slow(Case("gpt_oss", tensor=2, expert=2, sequence=True)),
    ],
    ids=lambda case: case.name,
)
def test_an_adapter_is_published_in_the_format_of_peft(tmp_path: Path, case: Case) -> None:
    job = Job(case, adapter=ALL_LINEAR)
    answer = on_ranks(published_adapter, case.processes, (job, tmp_path / "weights"), limit=180)
    expected = decoder(job, 0)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.mul_(1 + is_lora(name))
    (tmp_path / "expected").mkdir()
    save_lora(
        expected, {name: m for name, m in expected.state_dict().items() if is_lora(name)}, tmp_path / "expected"
    )
    path = Path(answer[0][0])
    for file in (tmp_path / "expected").iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes(), file.name
    assert read_manifest(path).kind == "adapter"
    for _, copy in answer:
        assert_same_bytes(copy, expected.state_dict())


def test_replicas_that_differ_are_refused_and_nothing_is_published(tmp_path: Path) -> None:
    case = QUICK[0]
    job = (case, save(tmp_path / "model", case), tmp_path / "weights", BUCKET_BYTES)
    with pytest.raises(AssertionError, match=r"tensor 'backbone\.norm\.weight': the copies of its part"):
        on_ranks(publish_with_unequal_replicas, 2, job)
    assert not [path for path in (tmp_path / "weights").iterdir() if not path.name.endswith(".partial")]


@pytest.mark.skipif(not loading_memory.SUPPORTED, reason="no /proc to read the peak from")
@pytest.mark.slow
def test_a_rank_needs_the_memory_of_one_file_and_of_gathering_one_tensor(tmp_path: Path) -> None:
    loading_memory.save(tmp_path / "small", 64)
    model_mib, _ = loading_memory.save(tmp_path / "large", 1024)
    bucket, gathering = 32, 5 * 32  # the embedding has 32 MiB
    with RankPool(2) as pool:
        job = (Case("llama", tensor=2), tmp_path / "small", tmp_path / "large", tmp_path / "weights", bucket * 2**20)
        growths = pool.call(growth_of_publishing, job, limit=120)
    print(f"a model of {model_mib:.0f} MiB, files of {bucket} MiB: {growths} MiB")
    assert max(growths) <= bucket + gathering + 16 < model_mib
