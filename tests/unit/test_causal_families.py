"""The tiny models of `kit.causal_families` are complete, finite and causal, and the page of models has their rows."""

import pytest
import torch
import transformers
from kit import slow
from kit.causal_families import CAUSAL, LEFT_OUT, SPECIAL, build
from model_table import PAGE, row
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

COMMON = 6  # the first tokens of both rows are the same
#: a few structures: attention, experts, a state space, a vision tower, and parameters that transformers leaves unset
QUICK = ("llama", "gpt_oss", "nemotron_h", "qwen3_5", "deepseek_v4", "llama4", "qwen2_5_vl")


def two_rows() -> Tensor:
    ids_BS = torch.randint(3, SPECIAL, (2, 13), generator=torch.Generator().manual_seed(0))
    ids_BS[1, :COMMON] = ids_BS[0, :COMMON]
    return ids_BS


def require_sound(model: PreTrainedModel) -> None:
    """Check that the weights are set, and that the logits are finite, causal, and depend on the tokens."""
    assert not model.training
    for name, weight in model.named_parameters():
        assert bool(weight.isfinite().all()), name
        assert bool(weight.any()), name
    with torch.no_grad():
        first_SV, second_SV = model(input_ids=two_rows(), use_cache=False).logits
    assert bool(first_SV.isfinite().all())
    torch.testing.assert_close(first_SV[:COMMON], second_SV[:COMMON], rtol=1e-5, atol=1e-5)
    assert all((first_SV - second_SV)[COMMON:].abs().amax(-1) > 1e-3 * first_SV.abs().max())


def test_every_causal_model_type_is_built_or_left_out() -> None:
    """A new version of transformers can have new model types: add them to one of the two lists."""
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= {*CAUSAL, *LEFT_OUT}
    assert not {*CAUSAL} & {*LEFT_OUT}
    assert {*LEFT_OUT} <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert all(LEFT_OUT.values())


@pytest.mark.parametrize("model_type", [*QUICK, *(slow(family) for family in CAUSAL if family not in QUICK)])
def test_all_families_are_sound(model_type: str) -> None:
    require_sound(build(model_type))


TEXT = PAGE.read_text(encoding="utf-8")
ROWS = {line.split("`")[1]: line for line in TEXT.splitlines() if line.startswith("| `")}
QUICK_ROWS = ("qwen3", "gpt_oss", "qwen3_5", "deepseek_v4", "modernbert-decoder")


def test_every_family_has_a_row() -> None:
    assert {*ROWS} == {*CAUSAL, *LEFT_OUT}


@pytest.mark.skipif(f"transformers {transformers.__version__} " not in TEXT, reason="another version of transformers")
@pytest.mark.parametrize("family", [*QUICK_ROWS, *(slow(family) for family in CAUSAL if family not in QUICK_ROWS)])
def test_a_row_is_what_the_proof_finds(family: str) -> None:
    assert row(family) == ROWS[family]
