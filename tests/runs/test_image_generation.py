"""Completions of prompts with images: those of transformers' own `generate`, and on-policy runs on them.

S tokens of a prompt or document, N new tokens, V vocabulary.
"""

import base64
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from kit import first_is_quick
from kit.image_models import write_image_model
from kit.image_runs import write_on_policy
from kit.on_policy_runs import SAME, assert_same_rollouts, rollout_figures
from kit.ranks import run_ranks
from kit.runs import metrics, run, session_of, write_run
from PIL import Image
from transformers import AutoModelForImageTextToText, GenerationConfig, LogitsProcessor

from stillhouse.data import PackedMicroBatches
from stillhouse.data.media_files import MediaFile
from stillhouse.data.render.tokenizers import load_tokenizer
from stillhouse.images import IMAGES
from stillhouse.images.decode import open_image, thumbnail
from stillhouse.loops.rollouts import first_rollouts
from stillhouse.models import Decoder
from stillhouse.models.vision_language import read_token_inputs
from stillhouse.output.folder import RunFolder
from stillhouse.output.json_lines import validated
from stillhouse.output.records import HeldOutImage
from stillhouse.report.page import write_report
from stillhouse.rollout import GenerationRequest, Sampling
from stillhouse.rollout.generate import Generator, check_generation
from stillhouse.rollout.rollout import Rollout

CPU = torch.device("cpu")
FAMILIES = ["qwen3_vl", "gemma3", "idefics3", "llava_onevision", "internvl", "gemma4", "qwen3_5", "qwen3_vl_moe"]
NEW = 8


class Without(LogitsProcessor):
    """Never chooses these ids, as the project's sampler."""

    def __init__(self, ids: list[int]):
        self.ids = ids

    def __call__(self, input_ids_BS: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        return logits_BV.index_fill(1, torch.tensor(self.ids), -torch.inf)


def decoder_and_processor(family: str, folder: Path) -> tuple[Decoder, Any]:
    write_image_model(family, folder)
    decoder = Decoder.from_pretrained(folder, dtype="float32", multimodal=True)
    return decoder, IMAGES.find_processor(str(folder), load_tokenizer(str(folder)))


@pytest.mark.parametrize("family", first_is_quick(FAMILIES))
@torch.no_grad()
def test_a_batch_of_prompts_with_images_has_the_tokens_of_plain_generate_for_each_prompt_alone(
    family: str, tmp_path: Path
) -> None:
    decoder, processor = decoder_and_processor(family, tmp_path)
    check_generation(decoder, CPU, processor)
    generator = Generator(decoder, Sampling(NEW, temperature=0.0), CPU, processor=processor)
    examples = processor.example_prompts()
    requests = [GenerationRequest(at, ids, at, media=images) for at, (ids, images) in enumerate(examples)]
    completions, model = generator.generate(requests, version=0), decoder.pretrained
    for (ids, images), completion in zip(examples, completions, strict=True):
        types = {name: types_S[None] for name, types_S in processor.token_types(ids).items()}
        ids_1S = torch.from_numpy(ids.astype(np.int64))[None]
        with patch.object(model, "generation_config", GenerationConfig()):
            out_1S: Any = model.generate(
                ids_1S,
                attention_mask=torch.ones_like(ids_1S),
                generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0),
                logits_processor=[Without(generator.never)],
                **read_token_inputs(model, {name: torch.from_numpy(value) for name, value in types.items()}),
                **processor.read_files(images, ids).tensors,
            )
        assert completion.ids_N.tolist() == out_1S[0, len(ids) :].tolist()
    inverted = [replace(request, media=[as_inverted(image) for image in request.media]) for request in requests]
    changes = [
        float(np.abs(other.log_probs_N - one.log_probs_N).max()) > 1e-4
        for one, other in zip(completions, generator.generate(inverted, version=0), strict=True)
    ]
    assert changes == [True, True, False]  # the last prompt has no image
    sampling = Generator(decoder, Sampling(NEW, temperature=1.0), CPU, processor=processor)
    together = [completion.ids_N.tolist() for completion in sampling.generate(requests, version=0)]
    assert together == [sampling.generate([request], version=0)[0].ids_N.tolist() for request in requests]


def as_inverted(image: MediaFile) -> MediaFile:
    buffer = io.BytesIO()
    open_image(image.read()).point(lambda value: 255 - value).save(buffer, format="PNG")
    return MediaFile.of(buffer.getvalue())


def test_a_prompt_that_ends_with_an_image_is_refused(tmp_path: Path) -> None:
    decoder, processor = decoder_and_processor("qwen3_vl", tmp_path)
    images = processor.example_prompts()[1][1]
    ids = processor.expand(f"what is {processor.processor.image_token}", images, special=True).ids
    request = GenerationRequest(7, np.asarray(ids, dtype=np.int32), 0, media=images)
    with pytest.raises(ValueError, match="request 7: its prompt ends with an image: expected text behind it"):
        Generator(decoder, Sampling(2), CPU, processor=processor).generate([request], version=0)
    with pytest.raises(ValueError, match="prompts with images need the model's processor"):
        Generator(decoder, Sampling(2), CPU).generate([request], version=0)


@pytest.mark.parametrize("family", first_is_quick(["qwen3_vl", "gemma3"]))
def test_the_first_step_on_prompts_with_images_has_the_log_probs_and_the_loss_of_plain_transformers(
    family: str, tmp_path: Path
) -> None:
    session = session_of(tmp_path, **write_on_policy(tmp_path, family))
    _, step = first_rollouts(session, RunFolder(tmp_path / "out"))
    processor = session.data.media_processor
    assert processor is not None
    loss = session.models.step(step).sums["loss"]
    student, teacher = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        for name in ("student", "teacher")
    )
    packed = step.all_ranks
    assert isinstance(packed, PackedMicroBatches)
    documents, divergences, with_images = packed.sequences.documents, [], 0
    for number in range(len(documents)):
        ids, where = documents.tokens(number), documents.targets(number)
        types = {name: types_S[None] for name, types_S in processor.token_types(ids).items()}
        inputs = {
            "input_ids": torch.from_numpy(ids.astype(np.int64))[None],
            **read_token_inputs(student, {name: torch.from_numpy(value) for name, value in types.items()}),
            **processor.read(documents, number, documents.tokens(number)).tensors,
        }
        with_images += "pixel_values" in inputs
        with torch.no_grad():
            log_p_SV, log_q_SV = (
                model(**inputs, use_cache=False).logits[0].double().log_softmax(-1)[:-1]
                for model in (student, teacher)
            )
        of_labels_N = log_p_SV.gather(1, inputs["input_ids"][0, 1:, None])[where[1:], 0].numpy()
        np.testing.assert_allclose(
            documents.part(documents.per_token["old_log_probs"], number)[where], of_labels_N, atol=2e-5
        )
        divergences.append((log_p_SV.exp() * (log_p_SV - log_q_SV)).sum(-1)[where[1:]])
    session.close()
    assert 0 < with_images < len(documents)
    assert loss == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-4)


def test_a_run_on_prompts_with_images_shows_them_in_its_report(tmp_path: Path) -> None:
    settings = write_on_policy(tmp_path, "qwen3_vl")
    settings |= {
        "data.eval": str(tmp_path / "train.jsonl"),
        "eval.samples": 4,
        "eval.every": 1,
        "eval.task_tokens": 5,
    }
    settings["eval.prompts"] = {"data": str(tmp_path / "train.jsonl"), "count": 3, "max_new_tokens": 4}
    write_run(tmp_path, **settings)
    run("distill", tmp_path / "run.yaml")
    out = tmp_path / "out"
    for line in rollout_figures(out):
        assert line["rollout/log_ratio"] < 1e-5
    assert [line["step"] for line in metrics(out) if line.get("eval/prompts/reverse_kl", 0) > 0] == [0, 1, 2]
    samples = [json.loads(line) for line in (out / "eval_samples.jsonl").read_text().splitlines()]
    shown = [("data.eval", number) for number in range(4)] + [("eval.prompts", number) for number in range(3)]
    expected = [(step, *of_step) for step in range(3) for of_step in shown]
    assert [(sample["step"], sample["key"], sample["number"]) for sample in samples] == expected
    for sample in samples:
        number = int(sample["prompt"].partition("what is ")[2].partition("?")[0])
        assert [(image["width"], image["height"]) for image in sample["images"]] == [
            (8 + 4 * (number % 4), 8 + 4 * (number % 3)) for _ in range(number % 3 > 0)
        ]
        assert sample["prompt"].count("<|image_pad|>") == len(sample["images"]) == sample["image_count"]
        is_of_prompts = sample["key"] == "eval.prompts"
        assert is_of_prompts == (sample["reference"] is None)
        assert is_of_prompts or sample["reference"].startswith(f"number {number}"[:4])
    documents = json.loads((out / "tokens.json").read_text())["documents"]
    for document in documents:
        assert [token["text"] for token in document["tokens"]].count("<|image_pad|>") == len(document["images"])
        assert all(token["kl"] is not None for token in document["tokens"][1:])
    page = write_report(out).read_text()
    thumbnails = {image["thumbnail"] for shown in (*samples[-7:], *documents) for image in shown["images"]}
    assert len(thumbnails) >= 2
    assert set(re.findall(r'<img src="([^"]*)"', page)) == thumbnails
    assert "img-src data:" in page


def record_steps(folder: str) -> None:
    """A hook: each rank writes the samples of each step, and the documents that it trains with their images."""
    take, micro_batches = Rollout.take, Rollout.micro_batches
    lines: list[Any] = []

    def taking(rollout: Rollout, *of: Any) -> Any:
        samples = take(rollout, *of)
        lines.append([[sample.number, sample.prompt, sample.completion.ids_N.tolist()] for sample in samples])
        return samples

    def trained(rollout: Rollout, *of: Any) -> Any:
        for parts in micro_batches(rollout, *of):
            tokens = [
                (part.input_ids_BS.flatten()[part.document_T == document]).tolist()
                for part in parts
                for document in part.document_T[part.document_T >= 0].unique()
            ]
            lines.append([tokens, sum(len(part.media.get("image_grid_thw", ())) for part in parts)])
            (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(lines))
            yield parts

    Rollout.take, Rollout.micro_batches = taking, trained  # type: ignore[method-assign]


@pytest.mark.slow
def test_two_processes_train_on_the_images_and_completions_of_one(tmp_path: Path) -> None:
    write_run(tmp_path, **write_on_policy(tmp_path, "qwen3_vl"), **{"rollout.schedule": "one_step_off"})
    steps = []
    for count in (1, 2):
        out = tmp_path / str(count)
        out.mkdir()
        ranks = [f"out={out}/run", f"parallel.fsdp={count}"]
        run_ranks(count, "distill", tmp_path / "run.yaml", *ranks, hook=record_steps, hook_arguments=(str(out),))
        steps.append([json.loads((out / f"{rank}.json").read_text()) for rank in range(count)])
    (one,), two = steps
    assert len(one) == 4
    with_images = [sum(prompt % 3 > 0 for _, prompt, _ in samples) for samples in one[::2]]
    assert all(samples == of_one for of_rank in two for samples, of_one in zip(of_rank[::2], one[::2], strict=True))
    for number, (of_one, *of_ranks) in enumerate(zip(one[1::2], *(of_rank[1::2] for of_rank in two), strict=True)):
        assert sorted(of_one[0]) == sorted(tokens for documents, _ in of_ranks for tokens in documents)
        assert of_one[1] == sum(images for _, images in of_ranks) == with_images[number] > 0
    assert_same_rollouts(tmp_path / "2/run", tmp_path / "1/run", SAME, "loss/total_nats_per_token")


def test_thumbnails_are_small_and_encoded_anew(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((1000, 400), 90).save(buffer, format="JPEG", comment=b"<script>")
    made = thumbnail(MediaFile.of(buffer.getvalue()))
    encoded = base64.b64decode(made.thumbnail.partition("base64,")[2])
    assert (made.width, made.height) == (1000, 400)
    assert Image.open(io.BytesIO(encoded)).size == (160, 64)
    assert b"<script>" in buffer.getvalue()
    assert b"<script>" not in encoded


@pytest.mark.parametrize(
    "url", ["https://host/image.jpeg", "data:text/html;base64,AAAA", 'data:image/jpeg;base64,A"']
)
def test_a_report_refuses_images_that_are_no_thumbnails(url: str) -> None:
    with pytest.raises(ValueError, match="thumbnail"):
        validated(HeldOutImage, {"width": 1, "height": 1, "thumbnail": url}, "tokens.json")
