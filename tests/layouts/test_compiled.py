"""Compiled layers train as plain ones, need few graphs, and are proven before a run."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit import slow
from kit.causal_families import build, of_config, tiny_config
from kit.layout_runs import distill, weights
from kit.on_policy_runs import assert_same_rollouts, write_on_policy_run
from kit.parity_cases import Case, Difference, compare
from kit.runs import metrics
from kit.shard_ranks import Rank, on_ranks
from kit.varlen_reference import no_refusal
from torch import Tensor
from torch._dynamo import register_backend
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from stillhouse.models import Activations, Decoder, ProofError, balance_routers, varlen
from stillhouse.parallel import Degrees, Layout, ModelSource, single_process_runner
from stillhouse.parallel.apply.compiled_layers import compile_layers
from stillhouse.proofs.layouts import prove_runner
from stillhouse.tools.parity import worst

GRADIENT, WEIGHT = 1e-5, 1e-4
LIMIT = 500.0


def layout(**degrees: int) -> Layout:
    return Layout(Degrees(**degrees), compile=True)


#: sizes of micro-batches: rows and tokens per row
SIZES = ((2, 17), (3, 20), (4, 21), (1, 30), (2, 40))
#: cases and backends; under a layout, the graphs matter and not the code that is made from them, which takes a minute
CASES = [
    (Case(layout(), "gemma3_text"), "inductor"),  # sliding windows
    (Case(layout(fsdp=2), "mixtral"), "aot_eager"),  # experts
    (Case(layout(fsdp=2), checkpointing=True, lora="teacher"), "aot_eager"),
    (Case(layout(pipeline=2), micro_batches=4), "aot_eager"),
    (Case(layout(context=2)), "aot_eager"),
]


@pytest.fixture(autouse=True)
def _no_compiled_code() -> None:
    torch.compiler.reset()
    counters.clear()


def compare_compiled(rank: Rank, job: tuple[Case, str]) -> Difference | None:
    """A job: `compare` with a backend of torch.compile."""
    case, backend = job
    with patch("stillhouse.parallel.apply.compile_layers", partial(compile_layers, backend=backend)):
        return compare(rank, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "backend"), CASES, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_compiled_layers_train_as_plain_ones(case: Case, backend: str) -> None:
    answers = on_ranks(compare_compiled, case.layout.degrees.processes, (case, backend), limit=LIMIT)
    for rank, difference in enumerate(answers):
        assert difference.loss <= 1e-6, rank
        assert difference.evaluation <= 1e-6, rank
        assert worst(difference.gradients.items())[1] <= GRADIENT, (rank, difference.gradients)
        assert worst(difference.weights.items())[1] <= WEIGHT, (rank, difference.weights)


def gradients(decoder: Decoder, rows: int, tokens: int) -> list[Tensor]:
    ids_BS = torch.randint(decoder.vocabulary_rows, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
    decoder.zero_grad()
    decoder(ids_BS, torch.arange(tokens).expand(rows, tokens) % 7).square().mean().backward()
    return [parameter.grad.clone() for parameter in decoder.parameters() if parameter.grad is not None]


def require_graphs(decoder: Decoder, graphs: int) -> None:
    """Compile the layers; require the gradients of plain ones for all sizes of micro-batches, and few graphs."""
    expected, names = [gradients(decoder, *size) for size in SIZES], list(decoder.state_dict())
    compile_layers(decoder, backend="aot_eager")
    for size, plain in zip(SIZES, expected, strict=True):
        for gradient, of_plain in zip(gradients(decoder, *size), plain, strict=True):
            assert (gradient - of_plain).norm() <= GRADIENT * of_plain.norm()
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert list(decoder.state_dict()) == names


@pytest.mark.parametrize("family", [slow("qwen3"), slow("gemma3_text")])
def test_micro_batches_of_five_sizes_need_two_graphs(family: str) -> None:
    """One for a single row, and one for all numbers of rows."""
    require_graphs(Decoder(build(family), verify=False).train(), 2)


def dense_attend(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, borders_M: Tensor, longest: int, **options: Any
) -> Tensor:
    """Variable-length attention by a mask, without reading values, so that it can be compiled."""
    tokens = len(query_THD)
    document_T = torch.bucketize(torch.arange(tokens), borders_M.long(), right=True)
    sees_TT = (document_T[:, None] == document_T) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if options["window"] is not None:
        sees_TT = sees_TT.triu(1 - options["window"])
    heads = [heads_TD.transpose(0, 1)[None] for heads_TD in (query_THD, key_TGD, value_TGD)]
    output = scaled_dot_product_attention(*heads, sees_TT, scale=options["scale"], enable_gqa=True)
    return output[0].transpose(0, 1)


@pytest.mark.slow
def test_variable_length_attention_needs_a_graph_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "attend", dense_attend)
    monkeypatch.setattr(varlen, "refusal", no_refusal)
    config = tiny_config("gemma3_text", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    activations = Activations(torch.device("cpu"))
    decoder = Decoder(of_config(config), activations=activations, verify=False).train()
    assert decoder.packing.attention.reads_lengths
    # for each of the two windows, one for a single row, and one for several rows, which are joined
    require_graphs(decoder, 4)


def test_a_copy_of_a_compiled_layer_runs_the_copy() -> None:
    decoder = Decoder(build("qwen3"), verify=False)
    compile_layers(decoder, backend="eager")
    layer: Any = copy.deepcopy(decoder.layers()[0])
    assert layer.forward.__self__ is layer


@register_backend
def adds_a_percent(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
    """A compiler whose code computes something else."""
    return lambda *inputs: [output * 1.01 for output in graph(*inputs)]


@register_backend
def is_broken(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize(
    ("backend", "error"),
    [
        slow("adds_a_percent", "model: the hidden states of the compiled layers differ by"),
        slow("is_broken", "model: torch.compile cannot compile Qwen3DecoderLayer .*: expected train.compile: false"),
    ],
)
def test_wrong_code_and_failures_are_proof_errors(backend: str, error: str) -> None:
    student = Decoder(build("qwen3"), verify=False)
    runner = single_process_runner(student, None)
    runner.layout = Layout(compile=True)
    prove = partial(prove_runner, runner, ModelSource(lambda: student), None, teacher_in_stages=False)
    prove()
    compile_layers(student, backend=backend)
    with pytest.raises(ProofError, match=error):
        prove()


def test_a_loss_inside_the_routers_is_refused() -> None:
    student = Decoder(build("qwen3_moe"), verify=False)
    balance_routers(student)
    with pytest.raises(ValueError, match=r"a loss in its routers.* expected train.compile: false"):
        compile_layers(student)


@pytest.mark.slow
def test_an_on_policy_run_generates_and_evaluates_with_compiled_layers(tmp_path: Path) -> None:
    settings = {"eval.every": 1, "checkpoint.every": 1, "train.steps": 2}
    write_on_policy_run(tmp_path, **settings)
    distill(tmp_path, "plain", 1)
    distill(tmp_path, "compiled", 1, "train.compile=true")
    assert list(weights(tmp_path / "compiled")) == list(weights(tmp_path / "plain"))
    outs = tmp_path / "compiled", tmp_path / "plain"
    assert_same_rollouts(*outs, ["rollout/share"], "loss/total_nats_per_token")
    key = "eval/forward_kl"
    compiled, plain = ([line[key] for line in metrics(out) if key in line] for out in outs)
    assert compiled == pytest.approx(plain, rel=1e-5)
