"""`stillhouse serve --generate --images` writes the completions of prompts with images, as the job would."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from kit import slow
from kit.image_runs import write_on_policy
from kit.mutations import assert_survives
from kit.on_policy_runs import assert_same_rollouts, assert_same_served, served
from kit.ranks import run_ranks
from kit.runs import run, write_run
from kit.serving import Server

from stillhouse.data.media import MediaTensors
from stillhouse.data.render.tokenizers import load_tokenizer
from stillhouse.images import IMAGES
from stillhouse.images.processor import ImageProcessor
from stillhouse.serving import SAFETENSORS
from stillhouse.serving.wire import encode_prompt

GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on prompts with images, whose completions were written in its own process."""
    folder = tmp_path_factory.mktemp("served")
    write_run(folder, **write_on_policy(folder, "qwen3_vl"))
    run("distill", folder / "run.yaml", f"out={folder / 'job'}")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(folder / "student", "--generate", "--images") as started:
        yield started


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_a_served_run_on_prompts_with_images_is_that_of_the_job(folder: Path, server: Server, processes: int) -> None:
    run_ranks(processes, *served(folder, f"on {processes}", server.url), f"parallel.fsdp={processes}")
    assert_same_served(folder / f"on {processes}", folder / "job")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "idefics3"])
def test_other_families_are_written_as_in_the_job(family: str, tmp_path: Path) -> None:
    write_run(tmp_path, **write_on_policy(tmp_path, family))
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'job'}")
    with Server(tmp_path / "student", "--generate", "--images") as server:
        run(*served(tmp_path, "served", server.url))
    assert_same_served(tmp_path / "served", tmp_path / "job")


@pytest.mark.slow
def test_a_served_teacher_writes_what_it_writes_in_the_job(tmp_path: Path) -> None:
    settings = {"objective.loss": "cross_entropy", "rollout.writer": "teacher"}
    write_run(tmp_path, **write_on_policy(tmp_path, "qwen3_vl", **settings))
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'job'}")
    with Server(tmp_path / "teacher", "--generate", "--images") as server:
        run(*served(tmp_path, "served", server.url), "teacher=null")
    same = ("rollout/completion_tokens",)
    assert_same_rollouts(tmp_path / "served", tmp_path / "job", same, "loss/cross_entropy_nats_per_token")


def ignore_images() -> None:
    """The tower gets the same picture for every prompt, after the server has proven its model."""
    from stillhouse.serving.server import generation

    tensors, decode = ImageProcessor.prompt_tensors, generation.decode_prompt

    def same(*arguments: Any) -> list[Any]:
        return [
            {name: torch.zeros_like(value) if value.is_floating_point() else value for name, value in made.items()}
            for made in tensors(*arguments)
        ]

    def after_start(content: bytes) -> Any:
        ImageProcessor.prompt_tensors = same  # type: ignore[method-assign]
        return decode(content)

    generation.decode_prompt = after_start


@pytest.mark.slow
def test_a_server_that_ignores_images_is_found_by_its_log_probs(folder: Path) -> None:
    with Server(folder / "student", "--generate", "--images", hook=ignore_images) as server:
        ended = run(*served(folder, "ignored", server.url), code=1)
    assert "its log-probabilities are those of other weights" in ended.err


@pytest.mark.slow
def test_a_server_that_cannot_read_the_prompts_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "student"
    shutil.copytree(folder / "student", other)
    settings = json.loads((other / "processor_config.json").read_text())
    settings["image_processor"]["image_std"] = [0.4, 0.4, 0.4]
    (other / "processor_config.json").write_text(json.dumps(settings))
    servers = {
        "accepts no images: start it with stillhouse serve --images": (folder / "student", "--generate"),
        "has another processor of images than student.model": (other, "--generate", "--images"),
    }
    for message, arguments in servers.items():
        with Server(*arguments) as server:
            ended = run(*served(folder, "refused", server.url), code=2)
        assert "rollout.url: data.train has images" in ended.err
        assert message in ended.err


@pytest.fixture(scope="module")
def prompt(folder: Path) -> tuple[np.ndarray, MediaTensors]:
    processor = IMAGES.find_processor(str(folder / "student"), load_tokenizer(str(folder / "student")))
    assert processor is not None
    ids, images = processor.example_prompts()[1]
    return ids, processor.read_files(images, ids)


def asked(server: Server, ids: np.ndarray, images: MediaTensors, **more: Any) -> httpx2.Response:
    body = {"token_ids": ids.tolist(), "sampling_params": {"max_tokens": 3, "temperature": 0.0, "logprobs": 0}} | more
    return server.client.post(GENERATE, content=encode_prompt(body, images), headers={"content-type": SAFETENSORS})


def test_damaged_prompts_with_images_are_refused(server: Server, prompt: tuple[np.ndarray, MediaTensors]) -> None:
    ids, images = prompt
    assert asked(server, ids, images).status_code == 200
    inverted = {name: -value if value.is_floating_point() else value for name, value in images.tensors.items()}
    other = asked(server, ids, MediaTensors(inverted, images.sizes)).json()["choices"][0]["logprobs"]["content"]
    first = asked(server, ids, images).json()["choices"][0]["logprobs"]["content"]
    assert first[0]["logprob"] != pytest.approx(other[0]["logprob"], abs=1e-4)
    nan = {name: value * torch.nan if value.is_floating_point() else value for name, value in images.tensors.items()}
    end = int(np.flatnonzero(ids == np.bincount(ids).argmax())[-1]) + 1
    refused = {
        "NaN or infinite": asked(server, ids, MediaTensors(nan, images.sizes)),
        "the prompt ends with an image": asked(server, ids[:end], images),
        "1 placeholder tokens for images with": asked(server, np.append(ids[:3], ids[end - 1 : end + 1]), images),
        "not supported": asked(server, ids, images, more=1),
    }
    for message, answer in refused.items():
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    text = server.client.post(GENERATE, json={"token_ids": ids.tolist(), "sampling_params": {"max_tokens": 1}})
    assert "is a placeholder of images, but the sequence has no images" in text.json()["error"]["message"]
    body = {"token_ids": ids.tolist(), "sampling_params": {"max_tokens": 2}}
    bodies = [(GENERATE, SAFETENSORS, encode_prompt(body, images))] * 2
    assert_survives(server, bodies, 40, seed=0)
