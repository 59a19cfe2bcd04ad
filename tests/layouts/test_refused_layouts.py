"""Layouts that a family does not support are refused when the models are built: the error names the cause.

`test_parity.py` trains the same families under the layouts that they support.
"""

from functools import partial

import pytest
import torch
from kit.causal_families import tiny_config
from kit.config_cases import assert_refused, refused_calls
from kit.parity_cases import ONE

from stillhouse.libraries import is_supported
from stillhouse.models import Decoder
from stillhouse.models.mtp import add_mtp
from stillhouse.models.pretrained import auto_class
from stillhouse.parallel import Degrees, Layout, ModelSource
from stillhouse.parallel.apply.tensor_parallel import tensor_plan
from stillhouse.proofs.layouts import build_proven_runner


def empty(model_type: str) -> Decoder:
    config = tiny_config(model_type)
    with torch.device("meta"):
        return Decoder(auto_class(config).from_config(config), verify=False)


def split(model_type: str, **degrees: int) -> None:
    if "tensor" in degrees:
        tensor_plan(empty(model_type), degrees["tensor"])
    else:
        source = ModelSource(partial(empty, model_type))
        build_proven_runner(Layout(Degrees(**degrees)), ONE, source, None)


@pytest.mark.parametrize(("call", "message"), refused_calls("layouts of families"))
def test_a_layout_that_a_family_does_not_support(call: str, message: str) -> None:
    if "expert" in call and not is_supported("expert parallelism"):
        pytest.skip("needs a later version of transformers")
    assert_refused(call, message, globals())
    if "pipeline" in call:
        assert_refused(call, "pipeline=1", globals())


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_several_mtp_depths_under_a_split_backward(schedule: str) -> None:
    """`stillhouse parity` tries schedules that the configuration does not have, so that no rule refuses them."""

    def student() -> Decoder:
        decoder = empty("llama")
        with torch.device("meta"):
            add_mtp(decoder, 2, is_new=True)
        return decoder

    layout = Layout(Degrees(pipeline=2), schedule)
    with pytest.raises(ValueError, match="torch cannot split the backward of the last stage"):
        build_proven_runner(layout, ONE, ModelSource(student), None)
