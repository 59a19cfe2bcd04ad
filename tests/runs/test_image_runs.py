"""Runs whose data has images: the first step's loss is that of plain transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import first_is_quick
from kit.image_models import FAMILIES, write_image_model
from kit.image_runs import SETTINGS, turns_of, write_data
from kit.runs import forward_backward, session_of, write_records, write_run
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from stillhouse.config import ConfigError
from stillhouse.images.load_processor import load_processor
from stillhouse.run.data import load_run_data
from stillhouse.run.run import distill
from stillhouse.tools.check import print_check


@pytest.mark.parametrize("family", first_is_quick(FAMILIES))
def test_the_first_step_has_the_loss_of_plain_transformers_in_float64(family: str, tmp_path: Path) -> None:
    folder = write_image_model(family, tmp_path / "student")
    write_data(tmp_path)
    session = session_of(tmp_path, teacher=False, **SETTINGS)
    micro_batches = session.schedule.step_schedule.micro_batches(session.data.train, 0)
    # a data rank with fewer micro-batches than others repeats the first one without targets
    loss = forward_backward(session, [*micro_batches, micro_batches[0].without_targets()]).sums["loss"]
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in session.models.student.parameters())
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")
    processor: Any = load_processor(str(folder))
    log_probs, documents = [], session.data.train.documents
    for micro_batch in micro_batches:
        for number in micro_batch.document_T[micro_batch.document_T >= 0].unique().tolist():
            images = [[Image.open(tmp_path / f"{number}.png")]] if number % 3 else None
            text = processor.tokenizer.apply_chat_template(turns_of(number), tokenize=False)
            inputs = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
            assert inputs["input_ids"][0].tolist() == documents.tokens(number).tolist()
            is_of_T = micro_batch.document_T == number
            labels_S, weights_S = micro_batch.labels_T[is_of_T], micro_batch.weights_T[is_of_T].bool()
            with torch.no_grad():
                log_probs_SV = model(**inputs, use_cache=False).logits[0].log_softmax(-1)
            log_probs.append(log_probs_SV[weights_S].gather(1, labels_S[weights_S, None]))
    session.close()
    assert loss == pytest.approx(-float(torch.cat(log_probs).mean()), rel=1e-5)


@pytest.mark.parametrize("parts", [["vision"], ["language", "projector"]])
def test_parts_that_read_images_are_not_trained_without_images(parts: list[str], tmp_path: Path) -> None:
    write_image_model("qwen3_vl", tmp_path / "student")
    write_data(tmp_path)  # the held-out documents have images
    write_records(tmp_path / "train.jsonl", [{"messages": turns_of(3 * number)} for number in range(8)])
    with pytest.raises(ConfigError, match=r"student\.train: got .*, and no document of data\.train has an image"):
        session_of(tmp_path, teacher=False, **SETTINGS, **{"student.train": parts})


def test_check_shows_images_and_the_trained_student_has_its_processor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_image_model("qwen3_vl", tmp_path / "student")
    write_data(tmp_path)
    settings = {"teacher": False, "train.steps": 2, **SETTINGS}
    config = write_run(tmp_path, **settings)
    print_check(config)
    shown = capsys.readouterr().out
    assert f"{tmp_path}/train.jsonl:2: images of 12 × 12 pixels, 9 placeholder tokens of " in shown
    assert shown.count("<|image_pad|>[× ") == 3
    distill(config)
    model = Path(config.out) / "model"
    name = "processor_config.json"
    assert (model / name).read_bytes() == (folder / name).read_bytes()
    assert type(load_processor(str(model))).__name__ == "Qwen3VLProcessor"
    before, after = (load_file(of_model / "model.safetensors") for of_model in (folder, model))
    changed = {name for name, weight in after.items() if not weight.equal(before[name])}
    assert changed == {name for name in after if ".visual." not in name}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rollout.engine": "vllm", "rollout.url": "http://127.0.0.1:1"}, "rollout.engine"),
        ({"parallel.context": 2}, "parallel.context"),
    ],
)
def test_what_cannot_read_images_is_refused_by_its_key(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    write_image_model("qwen3_vl", tmp_path / "student")
    write_image_model("qwen3_vl", tmp_path / "teacher", seed=1)
    write_data(tmp_path)
    rollout = {"rollout.prompts_per_step": 2, "rollout.max_new_tokens": 4}
    config = write_run(tmp_path, **SETTINGS, **rollout, **settings)
    with pytest.raises(ConfigError, match=rf"{key}: the data has images, "):
        load_run_data(config, {})
