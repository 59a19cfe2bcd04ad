"""Multi-token prediction: transformers drafts with the saved layers; the example of the page and the script run."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.families import build
from kit.mtp_cases import EACH_FAMILY, documents, labels_of, make, packed, positions
from kit.tensors import assert_equal_tensors
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from stillhouse.engine.loss import StepLoss
from stillhouse.models import Decoder, mtp, processors
from stillhouse.models.mtp import find_layers
from stillhouse.objective import TEACHER
from stillhouse.objective.spec import parse_objective
from stillhouse.tools.demo import corpus
from stillhouse.tools.demo.corpus import NamedText, split_of

ROOT = Path(__file__).parents[2]


@EACH_FAMILY
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_saved_layers_are_what_transformers_drafts_with(
    family: str, depths: int, sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft during generation, with its cache, equals the draft of one pass without a cache."""
    decoder = make(family, depths)
    decoder.save_pretrained(tmp_path)
    drafts, get_candidates = [], MTPCandidateGenerator.get_candidates

    def recorded(self: MTPCandidateGenerator, input_ids: Tensor, **options: Any) -> Any:
        candidates, logits = get_candidates(self, input_ids, **options)
        if logits is not None:
            drafts.append((input_ids.shape[1] - 2, candidates, logits))
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    find_layers(model)
    options = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": sampled, "top_k": 0}
    generated = model.generate(documents()[0][None], use_mtp=True, **options)
    if not sampled:
        assert torch.equal(generated, decoder.main.pretrained.generate(documents()[0][None], **options))
    assert len(drafts) >= 4
    for row, candidates, logits in drafts:
        with torch.no_grad():
            by_depth = decoder(candidates)[1:]
        expected = torch.stack([depth[:, row] for depth in by_depth], 1)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
        if not sampled:
            assert torch.equal(candidates[:, -depths:], expected.argmax(-1))


def test_at_a_released_size_plain_transformers_finds_the_layer(tmp_path: Path) -> None:
    narrow = {"hidden_size": 16, "num_hidden_layers": 46, "n_routed_experts": 2, "moe_intermediate_size": 8}
    decoder = make(depths=1, **narrow)
    decoder.save_pretrained(tmp_path)
    loaded = MtpModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert_equal_tensors(loaded.layers.state_dict(), decoder.layers.state_dict())


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "mtp.md").read_text()
    training, drafting = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    imported = vars(mtp) | vars(processors)
    imported |= {"parse_objective": parse_objective, "AutoModelForCausalLM": AutoModelForCausalLM}
    imported |= {"StepLoss": StepLoss, "TEACHER": TEACHER}
    names: dict[str, Any] = {"main": make().main, "teacher": Decoder(build("llama")), "tokens_of_the_step": 20}
    names |= {"ids": packed(documents()), "labels": packed([labels_of(ids_N) for ids_N in documents()])}
    exec(training, imported | names | {"position_ids": positions()})
    assert names["main"].backbone.embed_tokens.weight.grad is not None
    exec(drafting, imported | {"decoder": make(), "prompt": documents()[0][None]})


@pytest.mark.slow
def test_the_example_measures_both_drafters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [
        next(name for name in map(str, range(999)) if split_of(name) == split) for split in ("student", "held_out")
    ]
    text = "Return the next item from the iterator, or raise StopIteration. " * 20
    monkeypatch.setattr(corpus, "collect_documents", lambda: [NamedText(name, text) for name in names])
    main = runpy.run_path(str(ROOT / "examples" / "mtp.py"))["main"]
    table = main(steps=2, depths=2, prompts=1, new_tokens=8, seed=0)
    assert table.keys() == {(name, sampled) for name in ("cross-entropy", "distilled") for sampled in (False, True)}
    assert all(0 <= accepted <= 2 for accepted in table.values())
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].strip() for line in lines[-2:]] == ["cross-entropy", "distilled"]
