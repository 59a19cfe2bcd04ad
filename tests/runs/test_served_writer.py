"""A teacher's own servers write the completions: the same as in the job, and no other weights or tokenizer."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kit.on_policy_runs import assert_same_rollouts, served, write_on_policy_run
from kit.ranks import run_ranks
from kit.runs import run
from kit.serving import Server
from kit.stub_servers import stub_server
from kit.stub_vllm import Vllm
from kit.writer_cases import engine_of, requests_of, results
from transformers import AutoTokenizer

from stillhouse.checkpoint.resume import WRITER, require_same_writer
from stillhouse.config.servers import ServerError
from stillhouse.output.folder import RunFolder
from stillhouse.rollout.records import Sampling
from stillhouse.run.run import distill
from stillhouse.serving.client.served_engine import ServedEngine
from stillhouse.serving.client.sglang import SglangApi
from stillhouse.serving.client.stillhouse import StillhouseApi
from stillhouse.serving.client.vllm import VllmApi

SETTINGS: dict[str, Any] = {"objective.loss": "cross_entropy", "rollout.writer": "teacher", "checkpoint.every": 2}
#: the figures that are equal, and the loss
SAME = ("rollout/completion_tokens",), "loss/cross_entropy_nats_per_token"
TEXT = "Two and 3 is 5."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in which the teacher has written in the trainer's process."""
    folder = tmp_path_factory.mktemp("writer")
    distill(write_on_policy_run(folder, **SETTINGS, out=str(folder / "in_process")))
    return folder


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Iterator[Server]:
    with Server(folder / "teacher", "--generate") as server:
        yield server


@pytest.fixture(scope="module")
def student(folder: Path) -> Iterator[Server]:
    with Server(folder / "student", "--generate") as server:
        yield server


def test_a_served_teacher_writes_what_it_writes_in_the_job(folder: Path, teacher: Server) -> None:
    run(*served(folder, "served", teacher.url, teacher="null"))
    assert_same_rollouts(folder / "served", folder / "in_process", *SAME)
    assert not (folder / "served" / "weights").exists()


@pytest.mark.slow
def test_two_processes_share_what_a_served_teacher_writes(folder: Path, teacher: Server) -> None:
    run_ranks(2, *served(folder, "ranks", teacher.url, teacher="null"), "parallel.fsdp=2")
    assert_same_rollouts(folder / "ranks", folder / "in_process", *SAME)


def teacher_engine(*servers: Any, api: Any = None) -> ServedEngine:
    return engine_of(*servers, sampling=Sampling(4), api=api or StillhouseApi(), vocabulary=400, keep_weights=True)


def test_servers_with_different_weights_are_refused(teacher: Server, student: Server) -> None:
    with pytest.raises(ValueError, match=f"{student.url} has other weights than {teacher.url}"):
        teacher_engine(teacher, student)


def test_a_run_goes_on_with_the_same_weights_alone(tmp_path: Path, teacher: Server, student: Server) -> None:
    first, other, run = teacher_engine(teacher), teacher_engine(student), RunFolder(tmp_path)
    require_same_writer(first, run)
    require_same_writer(teacher_engine(teacher), run)
    with pytest.raises(ValueError, match="the servers have other weights than when this run began"):
        require_same_writer(other, run)
    (tmp_path / WRITER).write_text((tmp_path / WRITER).read_text()[:-9])
    with pytest.raises(ValueError, match=f"{WRITER} is damaged"):
        require_same_writer(first, run)
    (tmp_path / WRITER).unlink()
    (run.checkpoints / "step-00000002").mkdir(parents=True)
    with pytest.raises(
        ValueError, match="is missing, so it cannot be checked whether the servers have the same weights"
    ):
        require_same_writer(first, run)


def test_another_tokenizer_is_refused(folder: Path, teacher: Server) -> None:
    engine, tokenizer = teacher_engine(teacher), AutoTokenizer.from_pretrained(folder / "student")
    with stub_server(Vllm, folder / "teacher") as server, closing(teacher_engine(server, api=VllmApi())) as of_vllm:
        engine.require_tokenizer(tokenizer, TEXT)
        of_vllm.require_tokenizer(tokenizer, TEXT)
        tokenizer.add_tokens(["five", "is 5"])
        with pytest.raises(ValueError, match="has another tokenizer than the student"):
            engine.require_tokenizer(tokenizer, TEXT)
        with pytest.raises(ValueError, match=r"has another tokenizer .*: it makes \d+ ids of a text that has \d+"):
            of_vllm.require_tokenizer(tokenizer, TEXT)
        server.model.change(tokenizes=False)
        with pytest.raises(ValueError, match="does not report the server's tokenizer: 404"):
            of_vllm.require_tokenizer(tokenizer, TEXT)
    with pytest.raises(ValueError, match="SGLang does not report its tokenizer"):
        SglangApi().tokenizer_difference(lambda path, body: pytest.fail(path), None, tokenizer, TEXT)


def test_weights_that_change_during_the_run_end_it(folder: Path) -> None:
    with stub_server(Vllm, folder / "teacher") as server, closing(teacher_engine(server, api=VllmApi())) as engine:
        versions = [completion.versions_N for completion in results(engine, requests_of(3))]
        assert {int(version) for versions_N in versions for version in versions_N} == {0}
        server.model.label = "other"
        with pytest.raises(ServerError, match="has other weights than when the run began"):
            results(engine, requests_of(3))
