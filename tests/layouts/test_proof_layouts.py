"""Under every layout, a model that computes the wrong thing ends the run before its first step.

The leaking models are a Llama and a Qwen3 whose attention has no mask between documents, and real families of which
one process refuses the packed documents.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.causal_families import build as build_causal
from kit.ranks import Ranks, run_ranks
from kit.runs import metrics, save_model, write_run
from kit.toy_tokenizer import toy_tokenizer
from kit.varlen_reference import FLASH, register_flash
from transformers.models.llama.modeling_llama import LlamaAttention

LEAKS, SHIFTED = "lets documents that share a row see each other", "its logits differ"
#: settings of two processes, and the side that leaks
LAYOUTS = {
    "fsdp": ("student", ["parallel.fsdp=2"]),
    "bf16 gathered": ("teacher", ["parallel.fsdp=2", "parallel.gather_dtype=bfloat16", "train.precision=bf16"]),
    "tensor": ("teacher", ["parallel.tensor=2"]),
    "context": ("student", ["parallel.context=2"]),
    "pipeline": ("teacher", ["parallel.pipeline=2"]),
    "a teacher of one pipeline": ("teacher", ["teacher.parallel={fsdp: 1, pipeline: 2}"]),
    "a teacher of one fsdp": ("teacher", ["teacher.parallel={fsdp: 2}", "parallel={fsdp: 1, tensor: 2}"]),
}
SLOW = {"bf16 gathered", "a teacher of one fsdp"}


def wrong_models() -> None:
    """A hook: an attention to which transformers gives causal masks that know nothing of documents, and models whose
    logits are shifted by a number in their configuration.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM, Qwen3ForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("without_masks", sdpa_attention_forward)
    AttentionMaskInterface.register("without_masks", lambda *_, **__: None)
    for model in (LlamaForCausalLM, Qwen3ForCausalLM):
        model.forward = _shifted(model.forward)  # type: ignore[assignment]


def _shifted(forward: Callable[..., Any]) -> Callable[..., Any]:
    def shifted(self: Any, *args: Any, **options: Any) -> Any:
        outputs = forward(self, *args, **options)
        outputs.logits = outputs.logits + getattr(self.config, "logit_shift", 0.0)
        return outputs

    return shifted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose models are right."""
    folder = tmp_path_factory.mktemp("proof")
    write_run(folder)
    return folder


def assert_refused(
    folder: Path, key: str, words: str, *overrides: str, processes: int = 2, hook: Callable[[], None] = wrong_models
) -> str:
    """Run to the error, which all processes have. key: of the configuration. words: a part of the error."""
    arguments = ("distill", folder / "run.yaml", f"out={folder / 'out'}", "data.packing=packed", *overrides)
    ranks = Ranks(processes, *arguments, hook=hook)
    codes, err = ranks.wait(180), ranks.err
    assert all(codes), err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    others = [text for text in err.splitlines() if text.startswith("error on rank ")]
    assert [text.partition(": ")[2] for text in others] == [line.partition(": ")[2]] * (processes - 1)
    assert not list((folder / "out").glob("checkpoints/*"))
    assert line.startswith(f"error: {key}: ")
    assert words in line
    return line


@pytest.mark.parametrize("layout", [slow(layout) if layout in SLOW else layout for layout in LAYOUTS])
def test_a_leak_is_refused(folder: Path, layout: str) -> None:
    side, overrides = LAYOUTS[layout]
    assert_refused(folder, side, LEAKS, *overrides, f"{side}.attention=without_masks")


def shift_logits(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"logit_shift": 0.5}))


@pytest.mark.parametrize(
    ("side", "overrides"),
    [
        ("student", ["parallel.fsdp=2"]),
        ("teacher", ["parallel.pipeline=2"]),
        slow("student", ["parallel.tensor=2"]),
        slow("student", ["parallel.context=2"]),
        # only its head is in the student's stages
        ("teacher", ["parallel.fsdp=2", "teacher.parallel={fsdp: 1, pipeline: 2}"]),
    ],
)
def test_another_rule_of_logits_is_refused(tmp_path: Path, side: str, overrides: list[str]) -> None:
    write_run(tmp_path)
    shift_logits(tmp_path / side)
    assert_refused(tmp_path, side, SHIFTED, *overrides)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("words", [LEAKS, SHIFTED])
def test_one_of_several_teachers_is_refused(tmp_path: Path, processes: int, words: str) -> None:
    write_run(tmp_path)
    wrong = f"model: {tmp_path / 'teacher'}"
    if words == LEAKS:
        wrong += ", attention: without_masks"
    else:
        shift_logits(tmp_path / "teacher")
    several = f"teachers={{good: {{model: {tmp_path / 'student'}}}, wrong: {{{wrong}}}}}"
    assert_refused(tmp_path, "teachers.wrong", words, several, "teacher=null", processes=processes)


def save_family(folder: Path, family: str, **options: Any) -> None:
    tokenizer = toy_tokenizer()
    build_causal(family, usual=True, vocab_size=len(tokenizer), **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "axis", "side"),
    [
        ("qwen3_5_text", "fsdp", "student"),
        ("lfm2", "context", "student"),
        slow("qwen3_5_text", "context", "teacher"),
        slow("qwen3_5_text", "replicate", "student"),
        slow("jamba", "fsdp", "teacher"),
        # its attention selects tokens by scores over a whole sequence
        ("deepseek_v32", "context", "student"),
    ],
)
def test_real_families_are_refused(tmp_path: Path, family: str, axis: str, side: str) -> None:
    write_run(tmp_path)
    save_family(tmp_path / "wrong", family)
    key, words = ("parallel", "(index_topk)") if family == "deepseek_v32" else (side, LEAKS)
    assert_refused(tmp_path, key, words, f"parallel.{axis}=2", f"{side}.model={tmp_path / 'wrong'}")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_leak_is_refused_where_a_rank_has_two_stages(tmp_path: Path, schedule: str) -> None:
    write_run(tmp_path, **{"train.micro_batch_tokens": 32})
    save_family(tmp_path / "wrong", "qwen3_5_text", num_hidden_layers=4)
    models = [f"{side}.model={tmp_path / 'wrong'}" for side in ("student", "teacher")]
    assert_refused(tmp_path, "student", LEAKS, "parallel.pipeline=2", f"parallel.schedule={schedule}", *models)


def test_context_parallelism_refuses_rows(tmp_path: Path) -> None:
    write_run(tmp_path)
    save_family(tmp_path / "lfm2", "lfm2")
    model, context = f"student.model={tmp_path / 'lfm2'}", "parallel.context=2"
    assert_refused(tmp_path, "student", "or context=1", context, model, "data.packing=auto")
    assert_refused(tmp_path, "parallel", "expected context=1", context, model, "data.packing=rows")


@pytest.mark.parametrize("axis", ["fsdp", "pipeline"])
def test_a_weight_that_is_not_finite_is_named_by_all_ranks(tmp_path: Path, axis: str) -> None:
    """Only the second rank has it: the last rows of a matrix of the last layer."""

    def damage(model: Any) -> None:
        model.model.layers[-1].mlp.down_proj.weight[-1, -1] = float("nan")

    save_model(tmp_path / "student", "llama", change=damage)
    write_run(tmp_path)
    assert_refused(tmp_path, "student", "down_proj.weight' are NaN or infinite", f"parallel.{axis}=2")


def test_experts_are_proven_where_they_are(tmp_path: Path) -> None:
    save_model(tmp_path / "student", "qwen3_moe")
    write_run(tmp_path)
    assert_refused(tmp_path, "student", LEAKS, "parallel.expert=2", "student.attention=without_masks")


def with_gates() -> None:
    """A hook: a gate of each token, which no plan names, scales what an attention's sharded last matrix reads."""
    from torch import nn

    def init(self: Any, config: Any, layer_idx: int) -> None:
        original(self, config, layer_idx)
        self.gate = nn.Linear(config.hidden_size, 1)
        gates: list[Any] = []
        self.register_forward_pre_hook(
            lambda _, __, options: gates.append(self.gate(options["hidden_states"])), with_kwargs=True
        )
        self.o_proj.register_forward_pre_hook(lambda _, given: (given[0] * (1 + gates.pop()),))

    original = LlamaAttention.__init__
    LlamaAttention.__init__ = init  # type: ignore[method-assign]


@pytest.mark.parametrize(("side", "layout"), [("teacher", "parallel.fsdp=2"), slow("student", "parallel.context=2")])
def test_attention_that_separates_documents_in_one_row(tmp_path: Path, side: str, layout: str) -> None:
    """The same loss as with sdpa, for micro-batches of two rows."""
    losses = []
    for attention in ("sdpa", FLASH):
        folder = tmp_path / attention
        write_run(folder)
        arguments = (layout, f"{side}.attention={attention}", "train.steps=1")
        run_ranks(2, "distill", folder / "run.yaml", *arguments, hook=register_flash)
        losses.append(metrics(folder / "out")[1]["loss/total_nats_per_token"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def with_means() -> None:
    """A hook: an MLP divides its activations by their mean over all columns, of which a tensor rank has a part."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: Any, x: Any) -> Any:
        activations = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(activations / (0.1 + activations.abs().mean(-1, keepdim=True)))

    LlamaMLP.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("side", "overrides"),
    [
        ("student", ["parallel={fsdp: 1, tensor: 2}"]),
        slow("teacher", ["parallel={fsdp: 2}", "teacher.parallel={fsdp: 1, tensor: 2}"]),
        slow("teacher", ["parallel={fsdp: 1, tensor: 2, pipeline: 2}"]),
        slow("student", ["parallel={fsdp: 1, tensor: 2}", "train.precision=bf16"]),
    ],
    ids=str,
)
def test_a_layer_that_reads_all_columns_is_refused(tmp_path: Path, side: str, overrides: list[str]) -> None:
    """Its hidden states are equal on all ranks, and so are the gradients: only the whole layer shows the mistake."""
    write_run(tmp_path)
    save_model(tmp_path / ("teacher" if side == "student" else "student"), "qwen3", seed=5)  # not patched
    save_model(tmp_path / side, "llama", seed=6)
    processes, words = 4 if "pipeline" in overrides[0] else 2, "differ from those of the full layer"
    assert_refused(tmp_path, side, words, *overrides, processes=processes, hook=with_means)


def test_gradients_that_mix_parts_and_wholes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate gives the hidden states a part of their gradient, which reaches all parameters before it."""
    monkeypatch.setattr(LlamaAttention, "__init__", LlamaAttention.__init__)  # taken back after the test
    with_gates()
    save_model(tmp_path / "student", change=lambda model: None, seed=1)  # not a copy of a model without gates
    write_run(tmp_path, teacher=False)
    words = "between ranks: a matrix that the model's plan does not name is used between the sharded matrices"
    err = assert_refused(tmp_path, "student", words, "parallel.tensor=2", hook=with_gates)
    assert "the gradients of the hidden states behind 'backbone." in err
