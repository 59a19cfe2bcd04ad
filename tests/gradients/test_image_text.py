"""Vision-language models as decoders: their class, and their results with and without images.

B rows, S tokens per row.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from kit.families import build
from kit.image_documents import joined_images
from kit.image_runs import IMAGE, S, gemma3, llava, model_of, qwen2_5_vl, qwen3_vl, with_image
from kit.parity_cases import ONE, mesh_of
from kit.shard_ranks import Rank, on_ranks
from kit.teacher_gradients import named_gradients

from stillhouse.images.proof import prove_images
from stillhouse.models import Decoder
from stillhouse.models.dtensors import gathered_tensor
from stillhouse.models.pretrained import auto_class
from stillhouse.models.processor_targets import Targets
from stillhouse.models.processors import cross_entropy
from stillhouse.parallel import Degrees, Layout, ModelSource
from stillhouse.parallel.gradients import reduce_partial_grads
from stillhouse.parallel.sharded_loading import empty_decoder, load_weights
from stillhouse.proofs.layouts import build_proven_runner
from stillhouse.tools.parity import relative_difference

EACH_DECODER = pytest.mark.parametrize("family", ["gemma3", "llava", "qwen3_vl"])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (llava, hf.AutoModelForImageTextToText),
        (qwen2_5_vl, hf.AutoModelForImageTextToText),
        (qwen3_vl, hf.AutoModelForImageTextToText),
        (gemma3, hf.AutoModelForCausalLM),  # transformers lists the image-text model in this class, too
        (lambda: build("llama").config, hf.AutoModelForCausalLM),
        (hf.T5Config, hf.AutoModelForCausalLM),  # this class refuses T5 with an error that names it
    ],
)
def test_the_class_follows_from_the_configuration(config: Callable[[], hf.PreTrainedConfig], expected: Any) -> None:
    assert auto_class(config()) is expected


@EACH_DECODER
def test_tokens_with_and_without_an_image(family: str, tmp_path: Path) -> None:
    """The decoder loads and verifies the model, and its logits equal those of transformers' model."""
    model_of(family).save_pretrained(tmp_path)
    decoder, inputs = Decoder.from_pretrained(tmp_path), with_image(family)
    model: Any = decoder.pretrained
    text = {"input_ids": inputs["input_ids"]}
    with torch.no_grad():
        for tensors in (text, inputs):
            torch.testing.assert_close(decoder(**tensors), model(**tensors, use_cache=False).logits)
        assert not torch.allclose(decoder(**inputs), decoder(**text), atol=1e-2)


@EACH_DECODER
def test_gradients_reach_the_image_and_recomputation_changes_nothing(family: str) -> None:
    gradients = []
    for recomputed in (False, True):
        decoder, inputs = Decoder(model_of(family), verify=False).train(), with_image(family)
        if recomputed:
            decoder.gradient_checkpointing_enable()
        targets = Targets(inputs["input_ids"].roll(-1, 1))
        decoder(**inputs, processor=cross_entropy(), context=targets).loss.backward()
        gradients.append(named_gradients(decoder))
    assert any("vis" in name and gradient.any() for name, gradient in gradients[0].items())
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize(("family", "packing"), [("llava", "packed"), ("qwen2_5_vl", "masked")])
def test_packed_documents_with_images_do_not_see_each_other(family: str, packing: str) -> None:
    decoder, inputs = Decoder(model_of(family)), with_image(family)
    types = {name: torch.zeros_like(value) for name, value in inputs.items() if name == "mm_token_type_ids"}
    prove_images(decoder, [inputs, {"input_ids": inputs["input_ids"] - 3, **types}], joined_images)
    assert decoder.packing.name == packing
    of_tokens = {name: inputs.pop(name) for name in ("input_ids", "mm_token_type_ids") if name in inputs}
    ids_S = of_tokens["input_ids"][0]
    axes_SA = decoder.axis_positions(ids_S, (ids_S == IMAGE).long(), inputs)
    if axes_SA is not None:
        of_tokens["axis_position_ids"] = axes_SA[None]
    positions = torch.arange(S)[None]
    with torch.no_grad():
        separate = decoder(**with_image(family))
        twice = {name: torch.cat([tensor, tensor], 1) for name, tensor in of_tokens.items()}
        images = {name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()}
        packed = decoder(**twice, position_ids=torch.cat([positions, positions], -1), images=images)
    for part in packed.split(S, 1):
        torch.testing.assert_close(part, separate, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_run_with_images_is_refused() -> None:
    decoder, inputs = Decoder(model_of("llava"), verify=False), with_image("llava")
    ids_BS, images, positions = inputs.pop("input_ids"), inputs, torch.arange(S)[None]
    with pytest.raises(
        ValueError, match=r"got pixel_values with position_ids: expected tensors of the tokens, \[1, 12\]"
    ):
        decoder(ids_BS, positions, **images)
    with pytest.raises(ValueError, match=r"student\.mtp: .* the data has images: expected mtp null"):
        decoder(ids_BS, positions, images=images, mtp_input_ids=ids_BS)
    text = Decoder(build("llama"), verify=False)
    with pytest.raises(ValueError, match=r"got pixel_values, and its backbone reads none of them: expected a vision"):
        text(ids_BS, positions, images=images)


def test_code_that_comes_with_such_a_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("llava").save_pretrained(tmp_path)
    marker = tmp_path / "has run"
    (tmp_path / "foreign.py").write_text(f"open({str(marker)!r}, 'w')\nclass Foreign: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForImageTextToText": "foreign.Foreign"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (Decoder.from_pretrained, empty_decoder):
        assert type(load(tmp_path).pretrained).__name__ == "LlavaForConditionalGeneration"
    assert not marker.exists()


# under a layout of several processes


def test_a_filled_model_is_the_loaded_one(tmp_path: Path) -> None:
    model_of("qwen3_vl").save_pretrained(tmp_path)
    filled, loaded = empty_decoder(tmp_path), Decoder.from_pretrained(tmp_path)
    load_weights(filled, tmp_path, torch.device("cpu"))
    inputs = with_image("qwen3_vl")
    with torch.no_grad():
        assert torch.equal(filled.eval()(**inputs), loaded(**inputs))


def gradients_with_an_image(rank: Rank, family: str) -> list[tuple[str, float]]:
    """A job: return each gradient's relative difference between tensor=2 and one process."""
    mesh, gradients = mesh_of(Degrees(tensor=2)), []
    for layout, of_layout in ((Layout(), ONE), (Layout(Degrees(tensor=2)), mesh)):
        source = ModelSource(lambda: Decoder(model_of(family), verify=False))
        runner = build_proven_runner(layout, of_layout, source, None)
        (decoder,), inputs = runner.decoders, with_image(family)
        decoder.train()
        targets = Targets(inputs["input_ids"].roll(-1, 1))
        with runner.gradients_summed():
            decoder(**inputs, processor=cross_entropy(), context=targets).loss.backward()
        reduce_partial_grads(weight for _, weight in runner.named_parameters())
        gradients.append({name: weight.grad for name, weight in runner.named_parameters() if weight.grad is not None})
    reference, sharded = gradients
    assert reference.keys() == sharded.keys()
    return [(name, relative_difference(gathered_tensor(sharded[name]), reference[name], 1e-3)) for name in reference]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_a_vision_tower_has_its_gradients_under_tensor_parallelism(family: str) -> None:
    for differences in on_ranks(gradients_with_an_image, 2, family):
        assert any("vis" in name for name, _ in differences)
        # a bias of the keys shifts all scores of a query alike, so its gradient is rounding alone
        bad = [item for item in differences if not item[1] < 1e-5 and not item[0].endswith(".k_proj.bias")]
        assert not bad


def test_layers_are_those_of_the_language_model() -> None:
    decoder = Decoder(model_of("gemma3"), verify=False)
    language = decoder.pretrained.get_decoder()
    assert decoder.layers() == list(language.layers)
