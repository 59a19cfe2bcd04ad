"""Models that are built on the meta device and loaded stage by stage are bitwise equal to the saved model."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import loading_memory, slow
from kit.causal_families import build as build_causal
from kit.config_cases import assert_refused, refused_calls
from kit.families import SHAPE, build
from kit.shard_ranks import Rank, RankPool, shared_pool
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stillhouse.libraries import is_supported
from stillhouse.models import Decoder
from stillhouse.models.dtensors import local
from stillhouse.models.forward_modes import VARLEN
from stillhouse.parallel import Degrees, Mesh
from stillhouse.parallel.apply import context_parallel
from stillhouse.parallel.apply.tensor_parallel import apply_expert_parallel, dispatched_experts, tensor_plan
from stillhouse.parallel.backbone_cut import require_cuttable
from stillhouse.parallel.sharded_loading import empty_decoder, load_weights
from stillhouse.parallel.stages import keep_layers

IDS = torch.arange(3, 40)[None]
TWO_RANKS: Any = SimpleNamespace(size=lambda: 2)


FAMILIES = ("llama", "qwen3", "gemma3", "mistral", "phi3", "granite", "cohere", "gpt2", "qwen3_moe")
#: families whose buffers are set by the model around a module, or by a model within another one
WITH_BUFFERS = ("falcon_h1", "gemma3n_text", "gemma4_text", "glm4_moe_lite", "qwen3_5_text")


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *((family, tied) for family in FAMILIES for tied in (True, False)),
        *((family, None) for family in WITH_BUFFERS),
    ],
)
def test_a_filled_model_is_the_loaded_one(tmp_path: Path, family: str, tied: bool | None) -> None:
    model = build_causal(family, usual=True) if tied is None else build(family, tied=tied)
    model.save_pretrained(tmp_path)
    filled = empty_decoder(tmp_path)
    assert all(parameter.is_meta for parameter in filled.parameters())
    load_weights(filled, tmp_path, torch.device("cpu"))
    loaded = Decoder.from_pretrained(tmp_path, verify=False)
    filled.eval()
    assert filled.state_dict().keys() == loaded.state_dict().keys()
    assert filled.tied == loaded.tied == (loaded.tied if tied is None else tied)
    assert len(list(filled.parameters())) == len(list(loaded.parameters()))
    tensors = (*filled.named_parameters(), *filled.named_buffers())
    for (name, tensor), expected in zip(tensors, (*loaded.parameters(), *loaded.buffers()), strict=True):
        assert torch.equal(tensor, expected), name
    assert torch.equal(filled(IDS), loaded(IDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_buffer_without_a_rule_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    build("llama").save_pretrained(tmp_path)
    decoder = empty_decoder(tmp_path)
    mlp = decoder.backbone.layers[1].mlp  # type: ignore[index,union-attr]
    mlp.register_buffer("factor", torch.ones(3, dtype=dtype, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"no rule to initialise its buffer 'backbone\.layers\.1\.mlp\.factor'"):
        load_weights(decoder, tmp_path, torch.device("cpu"))


def test_the_generation_configuration_comes_along(tmp_path: Path) -> None:
    model = build("llama")
    model.generation_config.max_length = 77
    model.save_pretrained(tmp_path)
    assert empty_decoder(tmp_path).pretrained.generation_config.max_length == 77
    (tmp_path / "generation_config.json").unlink()
    assert empty_decoder(tmp_path).pretrained.generation_config.max_length != 77


@pytest.mark.parametrize(
    "model",
    [
        partial(build, "llama", tied=True),
        partial(build, "llama", tied=False),
        # the language model is a part of the backbone, with and without a vision tower beside it
        partial(build_causal, "llava_next"),
        *(slow(partial(build_causal, family)) for family in ("opt", "qwen2_vl", "minicpmv4_6")),
    ],
    ids=lambda model: f"{model.args[0]}{model.keywords or ''}",
)
def test_stages_follow_one_another(tmp_path: Path, model: Callable[[], PreTrainedModel]) -> None:
    model().save_pretrained(tmp_path)
    first, second = empty_decoder(tmp_path), empty_decoder(tmp_path)
    cut = require_cuttable(first.config)
    keep_layers(first, cut, range(1), first=True, last=False)
    keep_layers(second, cut, range(1, 2), first=False, last=True)
    for stage in (first, second):
        load_weights(stage, tmp_path, torch.device("cpu"))
        stage.eval()
    hidden = first(IDS)
    assert torch.equal(second(None, inputs_embeds=hidden), Decoder.from_pretrained(tmp_path)(IDS))


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    build_causal("mixtral").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.1\.mlp\.experts\.2\.w3\.weight'"):
        load_weights(empty_decoder(tmp_path), tmp_path, torch.device("cpu"))


def test_a_tensor_that_is_made_of_too_few_is_refused(tmp_path: Path) -> None:
    """One of three stored tensors that are concatenated has half of its rows."""
    build_causal("kimi_linear").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "conv" in name)
    tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"is made give the shape"):
        load_weights(empty_decoder(tmp_path), tmp_path, torch.device("cpu"))


_SMALL: dict[str, Any] = {**SHAPE, "vocab_size": 251, "moe_intermediate_size": 8, "head_dim": 8}
#: families whose number of experts has no common name, with that name and further options
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5_moe": ("moe_num_experts", {"moe_k": 2, "moe_layer_start_index": 0}),
    "qwen3_next": ("num_experts", {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 8}),
    "gemma4_text": ("num_experts", {"top_k_experts": 2, "enable_moe_block": True}),
}


def distribute_experts(_: Rank, case: tuple[str, int, Degrees]) -> list[int] | str:
    """A job of two ranks. Return how many experts of each layer this rank has, or the error."""
    family, count, degrees = case
    name, options = EXPERTS[family]
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **_SMALL, **options, **{name: count})
        decoder = Decoder(AutoModelForCausalLM.from_config(config), verify=False)
    mesh = Mesh(degrees, torch.device("cpu"))
    try:
        apply_expert_parallel(decoder, mesh.experts["expert"], mesh.weights["tensor"])
    except ValueError as error:
        return str(error)
    return [len(local(module.down_proj)) for module in dispatched_experts(decoder)]


@pytest.mark.skipif(not is_supported("expert parallelism"), reason="needs a later transformers")
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_counted_where_the_family_names_them(family: str) -> None:
    expert, tensor = Degrees(fsdp=2, expert=2), Degrees(tensor=2)
    cases = [(family, 4, expert), (family, 3, expert), (family, 3, tensor)]
    message = f"=2 does not divide the 3 experts of model type '{family}': expected a divisor of 3"
    expected = [[[2, 2], [2, 2]], 2 * [f"expert{message}"], 2 * [f"tensor{message}"]]
    assert shared_pool(2).run(distribute_experts, cases) == expected


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float, float]:
    return loading_memory.save_two(tmp_path_factory.mktemp("models"))


@pytest.mark.skipif(not loading_memory.SUPPORTED, reason="no /proc to read the peak from")
@pytest.mark.slow
@pytest.mark.parametrize("degrees", [Degrees(fsdp=2, tensor=2)], ids=str)
def test_a_process_holds_its_share_and_a_layer(large: tuple[Path, Path, float, float], degrees: Degrees) -> None:
    small, folder, whole, layer = large
    # new processes, because memory that a process has used before would hide growth
    with RankPool(degrees.processes) as pool:
        memories = pool.call(loading_memory.measure, (small, folder, degrees), limit=120)
    for rank, memory in enumerate(memories):
        print(f"{degrees}, rank {rank}: {memory}, of {whole:.0f} MiB in all")
        assert memory.share == pytest.approx(whole / degrees.processes, rel=0.01)
        assert memory.share <= memory.loading <= memory.share + layer + 16
        assert memory.loading <= 0.75 * whole
        # the training that follows the proof needs more: a step, with the two moments of AdamW
        assert memory.proof <= memory.step + 2 * memory.share


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is quantized: expected weights without quantization"):
        empty_decoder(tmp_path)


def plan(model: PreTrainedModel, degree: int = 2) -> dict[str, str]:
    return tensor_plan(Decoder(model, verify=False), degree)


def gemma3n(**options: Any) -> PreTrainedModel:
    return build_causal("gemma3n_text", **{"activation_sparsity_pattern": [0.0] * 4} | options)


def doge() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("doge", **_SMALL))


def test_sizes_of_each_layer() -> None:
    assert plan(gemma3n())["layers.*.mlp.down_proj"] == "rowwise"
    model = doge()
    model.config.base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise"}  # the attention is not sharded
    assert plan(model) == model.config.base_model_tp_plan


@pytest.mark.parametrize(("call", "message"), refused_calls("sharded models"))
def test_models_that_a_layout_does_not_fit(call: str, message: str) -> None:
    assert_refused(call, message, globals() | vars(context_parallel))


def test_a_model_with_variable_length_attention_can_be_cut() -> None:
    """On a GPU, the configuration of a packed model names this attention, which refuses the meta device."""
    config = build("qwen3").config
    config._attn_implementation = VARLEN
    require_cuttable(config)
    assert config._attn_implementation == VARLEN
