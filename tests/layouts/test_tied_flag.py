"""A configuration that says that the head is tied, beside files that say otherwise.

transformers ties head and embedding only if the files have one of them, or two with equal values. Every loader does
the same, and what is written has a configuration that agrees with its files.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.causal_families import build as build_causal
from kit.families import build
from kit.layout_runs import assert_same_weights, distill
from kit.loading_memory import LOADERS, export_under, loaded
from kit.megatron_runs import without_cuda
from kit.ranks import Ranks
from kit.runs import metrics, run, save_model, session_of, write_run
from kit.shard_ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stillhouse.models import Decoder
from stillhouse.models.pretrained import auto_class
from stillhouse.parallel import Degrees, empty_decoder, load_weights
from stillhouse.parallel.backbone_cut import require_cuttable
from stillhouse.parallel.stages import keep_layers
from stillhouse.plan import dry_run
from stillhouse.signals.teacher_folder import head_of

IDS = torch.arange(3, 40)[None]
KEY, HEAD, EMBEDDING = "tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight"


def set_flag(folder: Path, value: bool, part: str = "") -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config[part] if part else config)[KEY] = value
    path.write_text(json.dumps(config))
    return folder


def two_matrices(folder: Path, **options: Any) -> Path:
    """Write a run's model whose configuration says that its head is tied, which it is not."""
    save_model(folder, tied=False, **options)
    return set_flag(folder, True)


def change_head(folder: Path, change: Callable[[Tensor], Tensor]) -> None:
    """Store a head beside the embedding. change: makes it from the embedding."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[HEAD] = change(tensors[EMBEDDING].clone())
    save_file(tensors, path, metadata={"format": "pt"})


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    """Of transformers' own model, after its configuration has been obeyed as every reader obeys it."""
    config = AutoConfig.from_pretrained(folder)
    model = auto_class(config).from_pretrained(folder).eval()
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert all(getattr(part, KEY, False) == (head is embedding) for part in (config, config.get_text_config()))
    return model(IDS, use_cache=False).logits


@pytest.mark.parametrize(
    "model",
    [
        *(partial(build, family, tied=False) for family in ("llama", "gemma3", "gpt2")),
        partial(build_causal, "llava_next", tie_word_embeddings=False),  # a vision tower beside the language model
    ],
    ids=lambda model: model.args[0],
)
def test_two_matrices_are_used_and_saved(tmp_path: Path, model: Callable[[], PreTrainedModel]) -> None:
    original = model()
    original.save_pretrained(tmp_path)
    set_flag(tmp_path, True)
    expected = original.eval()(IDS, use_cache=False).logits
    for name, decoder in (("one", Decoder.from_pretrained(tmp_path)), ("other", loaded(tmp_path))):
        assert not decoder.tied
        assert torch.equal(decoder(IDS), expected)
        decoder.save_pretrained(tmp_path / name)
        assert torch.equal(logits(tmp_path / name), expected)
    assert torch.equal(head_of(tmp_path).output_weight, original.get_output_embeddings().weight)


def one_element(head: Tensor) -> Tensor:
    head[200, 3] *= 1 + 2**-12  # the last digit of bfloat16 is 2**-8
    return head


@pytest.mark.parametrize(
    ("change", "dtype", "tied"),
    [(torch.clone, "auto", True), (one_element, "auto", False), (one_element, "bfloat16", True)],
)
@LOADERS
def test_the_values_in_the_models_dtype_decide(
    tmp_path: Path, load: Callable[..., Decoder], change: Callable[[Tensor], Tensor], dtype: str, tied: bool
) -> None:
    build("llama", tied=True).save_pretrained(tmp_path)
    change_head(tmp_path, change)
    decoder = load(tmp_path, dtype=dtype)
    assert decoder.tied == tied == decoder.config.tie_word_embeddings
    decoder.save_pretrained(tmp_path / "saved")
    assert (HEAD in load_file(tmp_path / "saved" / "model.safetensors")) is not tied
    assert torch.equal(logits(tmp_path / "saved"), decoder.eval()(IDS))


def test_one_stored_matrix_is_both(tmp_path: Path) -> None:
    """Under a pipeline, the first stage has the embedding alone, and the last stage has the head alone."""
    for stored in (HEAD, EMBEDDING):
        build("llama", tied=True).save_pretrained(tmp_path / stored)
        path = tmp_path / stored / "model.safetensors"
        tensors = load_file(path)
        save_file(tensors | {stored: tensors.pop(EMBEDDING)}, path, metadata={"format": "pt"})
        expected, whole = Decoder.from_pretrained(tmp_path / stored), loaded(tmp_path / stored)
        assert whole.tied
        assert torch.equal(whole(IDS), expected(IDS))
        stages = []
        for first in (True, False):
            stage = empty_decoder(tmp_path / stored)
            cut, layers = require_cuttable(stage.config), range(1 - first, 2 - first)
            keep_layers(stage, cut, layers, first=first, last=not first)
            load_weights(stage, tmp_path / stored, torch.device("cpu"))
            stages.append(stage.eval())
        assert torch.equal(stages[1](None, inputs_embeds=stages[0](IDS)), expected(IDS))


@LOADERS
def test_a_head_that_is_in_no_file_is_refused(tmp_path: Path, load: Callable[..., Decoder]) -> None:
    build("llama", tied=True).save_pretrained(tmp_path)
    set_flag(tmp_path, False)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load(tmp_path)


@LOADERS
@pytest.mark.parametrize("tied", [True, False])
def test_the_flag_of_the_language_model_agrees_when_saved(
    tmp_path: Path, load: Callable[..., Decoder], tied: bool
) -> None:
    """transformers reads only the flag of the whole model. Engines read that of the language model."""
    build_causal("llava_next", tie_word_embeddings=tied).save_pretrained(tmp_path)
    set_flag(tmp_path, not tied, "text_config")
    decoder = load(tmp_path)
    assert decoder.tied == tied
    decoder.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(tmp_path / "saved"), decoder.eval()(IDS))


@LOADERS
def test_a_flag_that_also_shares_layers_is_refused_by_name(tmp_path: Path, load: Callable[..., Decoder]) -> None:
    build_causal("zamba2", tie_word_embeddings=True).save_pretrained(tmp_path)
    load(tmp_path)
    change_head(tmp_path, lambda head: head + 1)
    with pytest.raises(ValueError, match=r"'zamba2'\) has tie_word_embeddings true, but 'lm_head\.weight' differs"):
        load(tmp_path)


@pytest.mark.parametrize("degrees", [Degrees(fsdp=2), Degrees(tensor=2), Degrees(pipeline=2)], ids=str)
def test_exported_and_published_weights(tmp_path: Path, degrees: Degrees) -> None:
    model = two_matrices(tmp_path / "model")
    on_ranks(export_under, 2, (model, tmp_path / "made", degrees))
    for folder in (tmp_path / "made" / "export", tmp_path / "made" / "weights" / "version-00000007"):
        assert torch.equal(logits(folder), Decoder.from_pretrained(model)(IDS))


@pytest.mark.parametrize("source", ["teacher", "random"])
def test_initial_weights_decide_where_they_are_read(tmp_path: Path, source: str) -> None:
    """The student's own files have two matrices, which are not read."""
    two_matrices(tmp_path / "student")
    for different in (True, False):
        save_model(tmp_path / "teacher", tied=True, seed=2)
        if different:
            two_matrices(tmp_path / "teacher", seed=2)
        write_run(tmp_path)
        student = session_of(tmp_path, **{"student.init": {"from": source}}).models.student
        assert student.tied is not (source == "teacher" and different)
        if source == "teacher":
            assert torch.equal(student.eval()(IDS), Decoder.from_pretrained(tmp_path / "teacher")(IDS))


def test_a_plan_counts_two_matrices(tmp_path: Path) -> None:
    model = two_matrices(tmp_path / "student")
    dry_run._write_short_model(str(model), tmp_path / "few", 1)
    assert not empty_decoder(str(tmp_path / "few")).tied


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "megatron"])
def test_gradients_of_every_layout(tmp_path: Path, engine: str) -> None:
    """The teacher's head makes the targets, and the student's head and embedding have a gradient each."""
    hook = without_cuda if engine == "megatron" and pytest.importorskip("megatron.core") else None
    for name, seed in (("student", 1), ("teacher", 2)):
        two_matrices(tmp_path / name, seed=seed)
    write_run(tmp_path)
    ranks = Ranks(2, "parity", tmp_path / "run.yaml", f"parallel.engine={engine}", hook=hook)
    assert ranks.wait() == [0, 0], ranks.texts
    rows = [row for row in ranks[0].out.splitlines() if re.search(r"e[+-]\d\d  ", row)]
    assert {row.split()[-1] for row in rows} == {"same"}
    layouts = {row.partition("  ")[0] for row in rows}
    assert layouts >= {"fsdp 2", "tensor 2", "context 2", "pipeline 2, 1f1b"}


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["context", "pipeline"])
def test_a_run_and_its_export(tmp_path: Path, axis: str) -> None:
    for name, seed in (("student", 1), ("teacher", 2)):
        two_matrices(tmp_path / name, seed=seed)
    write_run(tmp_path, **{"train.steps": 2, "eval.every": 1})
    one, other = tmp_path / "one", tmp_path / "other"
    distill(tmp_path, "one", 1)
    distill(tmp_path, "other", 2, f"parallel.{axis}=2")
    assert_same_weights(other, one)
    for here, there in zip(metrics(other), metrics(one), strict=True):
        assert here.get("eval/forward_kl") == pytest.approx(there.get("eval/forward_kl"), rel=1e-5)
    run("export", other, "--out", tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(other / "model")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    torch.testing.assert_close(logits(tmp_path / "made"), logits(one / "model"), rtol=1e-3, atol=1e-3)
