"""Images on `stillhouse serve`: the gradients and completions of the job, and what is refused by name."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import first_is_quick, slow
from kit.image_runs import SETTINGS, write_image_run
from kit.layout_runs import assert_same_weights
from kit.mutations import assert_survives
from kit.ranks import run_ranks
from kit.runs import refused_changes, run, save_model, session_of, write_run
from kit.serving import Server
from kit.stub_servers import stub_server
from kit.stub_vllm import Vllm
from kit.teacher_gradients import assert_close, gradients
from safetensors.torch import save

from stillhouse.config import ConfigError
from stillhouse.data import DataError
from stillhouse.data.media import MediaTensors
from stillhouse.data.render.tokenizers import load_tokenizer
from stillhouse.images import IMAGES
from stillhouse.images.decode import open_image, pixel_count
from stillhouse.images.processor import ImageProcessor
from stillhouse.serving import SAFETENSORS
from stillhouse.serving.image_support import ImageSupport, require_accepted
from stillhouse.serving.wire import KEY, document_tensors, encode_images
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

FAMILIES = ["qwen3_vl", "idefics3", "gemma3", "qwen3_5", "internvl", "llava_onevision", "gemma4"]
HIDDEN = SignalSpec("hidden", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_image_run(folder, "qwen3_vl")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(folder / "teacher", "--images") as started:
        yield started


SERVERS = [("qwen3_vl", 1), *(slow(family, 1) for family in FAMILIES[1:]), slow("internvl", 2)]


@pytest.mark.parametrize(("family", "processes"), SERVERS)
def test_a_server_gives_the_gradients_of_the_teacher_in_the_job(family: str, processes: int, tmp_path: Path) -> None:
    write_image_run(tmp_path, family)
    in_job = gradients(tmp_path, **SETTINGS)
    with Server(tmp_path / "teacher", "--images", processes=processes) as server:
        assert_close(gradients(tmp_path, **{"teacher.url": server.url}, **SETTINGS), in_job)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("hidden", "fsdp=2"), ("hidden", "pipeline=2"), ("chosen", "fsdp=2")])
def test_two_ranks_have_the_model_of_one_process(folder: Path, server: Server, kind: str, layout: str) -> None:
    served = {"teacher.url": server.url, "teacher.signal": kind, "teacher.top_k": 9, "train.steps": 3, "data.eval": 0}
    write_run(folder, cached=True, **SETTINGS, **served)
    out = folder / f"{kind} {layout}"
    run_ranks(2, "distill", folder / "run.yaml", f"out={out / 'two'}", f"parallel.{layout}")
    if kind == "hidden":  # the teacher in the job
        write_run(folder, **SETTINGS, **{"train.steps": 3, "data.eval": 0})
    run("distill", folder / "run.yaml", f"out={out / 'one'}")
    assert_same_weights(out / "two", out / "one", 1e-5)


@pytest.mark.slow
def test_a_server_is_compared_with_the_model_in_this_process(
    folder: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    served = {"teacher.url": server.url, "teacher.model": str(folder / "teacher")}
    session_of(folder, cached=True, **served, **SETTINGS).close()
    assert "6 documents on 1 server(s)" in (out := capsys.readouterr().out)
    assert float(out.partition("this process by at most ")[2].split()[0].rstrip(")")) < 1e-5
    served["teacher.model"] = str(folder / "student")
    with pytest.raises(ConfigError, match="and the model in this process give different signals"):
        session_of(folder, cached=True, **served, **SETTINGS)


# servers that are refused before the first step


def ignore_images() -> None:
    """The server's tower gets the same picture for every document, after the server has proven its model."""
    from stillhouse.signals import scorer

    tensors = scorer._RequestMedia.tensors

    def same(*arguments: Any) -> list[dict[str, torch.Tensor]]:
        return [
            {name: torch.zeros_like(value) if value.is_floating_point() else value for name, value in made.items()}
            for made in tensors(*arguments)
        ]

    scorer._RequestMedia.tensors = same  # type: ignore[method-assign]


def move_positions() -> None:
    """The server's model gives other rotary positions to images."""
    from stillhouse.serving.server import accepted_images

    positions = accepted_images.document_positions
    accepted_images.document_positions = lambda *arguments: positions(*arguments) + 1  # type: ignore[operator]


REFUSED: dict[str, tuple[Callable[[], None] | None, str]] = {
    "no images": (None, r"teacher\.url: data\.train has images, and .* accepts no images: .* serve --images"),
    "a tower that ignores images": (ignore_images, r"teacher\.url: .* ignores images: .* changed by 0"),
    "other positions": (move_positions, r"teacher: .* rotary positions of images are not those of the"),
}


@pytest.mark.parametrize("case", first_is_quick(REFUSED))
def test_a_server_that_does_not_read_the_images_is_refused(
    folder: Path, processor: ImageProcessor, case: str
) -> None:
    hook, message = REFUSED[case]
    options = [] if hook is None else ["--images"]
    with Server(folder / "teacher", *options, hook=hook) as server:
        with pytest.raises(ConfigError, match=message):
            session_of(folder, cached=True, **{"teacher.url": server.url}, **SETTINGS)
        if not options:
            expected = "a sequence has images, but this server was started without --images"
            assert refusal(server, body_of(documents_of(processor))) == expected


@pytest.mark.slow
def test_another_processor_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "teacher"
    shutil.copytree(folder / "teacher", other)
    settings = json.loads((other / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.4, 0.4, 0.4]
    (other / "processor_config.json").write_text(json.dumps(settings))
    with (
        Server(other, "--images") as server,
        pytest.raises(ConfigError, match=r"teacher\.url: data\.train has images, and .* another processor of images"),
    ):
        session_of(folder, cached=True, **{"teacher.url": server.url}, **SETTINGS)


def test_other_engines_are_refused_as_teachers(folder: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"teacher.signal": "top_k", "teacher.top_k": 7}
    message = r"teacher\.url: data\.train has images, and vLLM would read them with a processor of its own"
    text = save_model(tmp_path / "text", "qwen3")
    with stub_server(Vllm, text) as server, pytest.raises(ConfigError, match=message):
        session_of(folder, cached=True, **settings, **{"teacher.url": server.url})


def test_limits_that_a_server_tells_are_compared_before_the_first_step(
    folder: Path, server: Server, processor: ImageProcessor
) -> None:
    support = ImageSupport.model_validate(server.client.get("/v1/info").json()["images"])
    with closing(session_of(folder, **SETTINGS)) as session:
        documents = session.data.train.documents
    pictures = [open_image(image.read()) for image in documents.media_of(0)]
    pixels = sum(picture.width * picture.height for picture in pictures)
    assert sum(pixel_count(image) for image in documents.media_of(0)) == pixels
    exact = support.model_copy(update={"max_images": 2, "max_pixels": 10**6})
    require_accepted(server.url, exact, documents, processor, "data.train")
    for limit, unit in (("max_images", "images"), ("max_pixels", "pixels"), ("max_bytes", "bytes in the tensors")):
        told = support.model_copy(update={limit: 0})
        with pytest.raises(DataError, match=rf"\d {unit}.* of data\.train, but {server.url} accepts at most 0"):
            require_accepted(server.url, told, documents, processor, "data.train")


def test_a_model_without_a_processor_is_no_server_of_images(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "teacher"
    shutil.copytree(folder / "teacher", other)
    (other / "processor_config.json").unlink()
    assert "has no processor of images" in run("serve", other, "--images", "--port", 0, code=1).err


# requests


@pytest.fixture(scope="module")
def processor(folder: Path) -> ImageProcessor:
    processor = IMAGES.find_processor(str(folder / "teacher"), load_tokenizer(str(folder / "teacher")))
    assert processor is not None
    return processor


Parts = list[tuple[np.ndarray, MediaTensors | None]]


def documents_of(processor: ImageProcessor) -> Parts:
    """Documents with two, one and no images."""
    return [
        (ids, processor.read_files(images, ids) if images else None) for ids, images in processor.example_prompts()
    ]


def body_of(parts: Parts, *, change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None) -> bytes:
    """A request for hidden states. change: is applied to the tensors and to the JSON of the header."""
    documents = [DocumentRows(ids, range(len(ids))) for ids, _ in parts]
    sent, tensors = encode_images(parts)
    tensors = document_tensors(documents)[1] | {name: tensor.clone() for name, tensor in tensors.items()}
    header = {"signal": "hidden", "dtype": "float32"} | sent
    if change is not None:
        change(tensors, header)
    return save(tensors, {KEY: json.dumps(header)})


def refusal(server: Server, body: bytes) -> str:
    answer = server.client.post("/v1/score", content=body, headers={"content-type": SAFETENSORS})
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def with_images(parts: Parts, number: int, **changes: Any) -> Parts:
    """Other tensors or sizes of the images of one document, with their true hash."""
    changed = list(parts)
    ids, images = parts[number]
    assert images is not None
    tensors = {**images.tensors, **changes.pop("tensors", {})}
    changed[number] = ids, MediaTensors(tensors, changes.get("sizes", images.sizes))
    return changed


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Parts], Parts]:
    """Another tensor of the images of the first document."""

    def parts_with(parts: Parts) -> Parts:
        images = parts[0][1]
        assert images is not None
        return with_images(parts, 0, tensors={name: change(images.tensors[name].clone())})

    return parts_with


def without_placeholder(parts: Parts) -> Parts:
    ids, images = parts[1]
    place = int(np.flatnonzero(ids == np.bincount(ids).argmax())[0])
    return [parts[0], (np.delete(ids, place), images), parts[2]]


def with_text_between(parts: Parts) -> Parts:
    """A token of text among the placeholders of an image, and a placeholder fewer behind it."""
    ids, images = parts[1]
    places = np.flatnonzero(ids == np.bincount(ids).argmax())
    changed = ids.copy()
    changed[places[-1] + 1], changed[places[1]] = ids[places[0]], ids[0]
    return [parts[0], (changed, images), parts[2]]


@pytest.mark.parametrize(("change", "text"), refused_changes("images of a request"))
def test_images_that_do_not_fit(server: Server, processor: ImageProcessor, change: str, text: str) -> None:
    assert text in refusal(server, body_of(eval(change)(documents_of(processor))))


def swap_pixels(tensors: dict[str, Any], _: Mapping[str, Any]) -> None:
    """The pixels of an image arrive mirrored: all shapes are right."""
    tensors["image.1.pixel_values"] = tensors["image.1.pixel_values"].flip(0).contiguous()


@pytest.mark.parametrize(("change", "text"), refused_changes("body with images"))
def test_bodies_that_are_changed(server: Server, processor: ImageProcessor, change: str, text: str) -> None:
    assert text in refusal(server, body_of(documents_of(processor), change=eval(change)))


def test_damaged_bodies_are_answered_or_refused(server: Server, processor: ImageProcessor) -> None:
    bodies = [body_of(documents_of(processor)[start:]) for start in range(2)]
    assert "is not a safetensors body" in refusal(server, bodies[0][: len(bodies[0]) // 2])
    assert_survives(server, [("/v1/score", SAFETENSORS, body) for body in bodies], 60, seed=0)
    text = {"prompt": documents_of(processor)[1][0].tolist(), "max_tokens": 1}
    answer = server.client.post("/v1/completions", json=text)
    assert "is a placeholder of images, but the sequence has no images" in answer.json()["error"]["message"]
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.putrequest("POST", "/v1/score")
        connection.putheader("Content-Type", SAFETENSORS)
        connection.putheader("Content-Length", str(2**29))
        connection.endheaders()
        refused = connection.getresponse()
        assert refused.status == 413
        assert b"expected at most 335,544,320 bytes" in refused.read()
