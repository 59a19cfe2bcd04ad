"""`stillhouse plan` as a command: dry runs in processes of their own, against closed formulas."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from stillhouse.config import ConfigError, load_config
from stillhouse.tools.plan.layout_plan import Machine, planned_job, run_job, run_jobs
from stillhouse.tools.plan.rank_counts import RankCounts

pytestmark = pytest.mark.slow

LAYERS, WIDTH, WIDE, HEADS, PAIRS, SIZE, VOCABULARY = 4, 64, 192, 4, 2, 16, 1024


def model(folder: Path, layers: int = LAYERS) -> str:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=PAIRS,
        head_dim=SIZE,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    return str(folder)


def elements(layers: int = LAYERS) -> tuple[int, int]:
    """Return the elements of a layer, and those of embedding, final norm and head."""
    attention = WIDTH * SIZE * (2 * HEADS + 2 * PAIRS) + 2 * SIZE
    return attention + 3 * WIDTH * WIDE + 2 * WIDTH, 2 * VOCABULARY * WIDTH + WIDTH


def job(folder: Path, ranks: int, *overrides: str, rank: int = 0) -> dict[str, Any]:
    settings = {
        "student": {"model": model(folder / "student"), "dtype": "float32"},
        "teacher": {"model": model(folder / "teacher"), "dtype": "bfloat16"},
        "data": {"train": "x", "max_tokens": 64},
        "train": {"tokens_per_step": 2048, "micro_batch_tokens": 256, "steps": 2},
        "out": str(folder / "out"),
    }
    config = load_config(None, overrides, settings=settings)
    return planned_job(config, Machine(ranks, 8, "h100"), 32) | {"rank": rank}


def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    layer, rest = elements()
    whole = LAYERS * layer + rest
    first = 3 * layer + VOCABULARY * WIDTH  # the last stage has the head, which costs more than a layer
    cases = {
        "one process": (job(tmp_path, 1), whole),
        "fsdp": (job(tmp_path, 4), whole / 4),
        "first stage": (job(tmp_path, 2, "parallel.pipeline=2"), first),
        "tensor": (job(tmp_path, 2, "parallel.tensor=2"), whole / 2),
    }
    for (name, (_, expected)), rank in zip(cases.items(), run_jobs([job for job, _ in cases.values()]), strict=True):
        # norms are not sharded by tensor parallelism
        close = pytest.approx(expected, rel=0.02 if name == "tensor" else 0.01)
        assert rank.peak["student weights"] / 4 == close, name
        assert rank.peak["teacher weights"] / 2 == close, name
        assert rank.peak["optimizer"] / 8 == close, name
        if name != "first stage":
            assert rank.peak["gradients"] / 4 == close, name
        if name == "fsdp":
            _check_fsdp(rank, layer, rest)


def _check_fsdp(rank: RankCounts, layer: int, rest: int) -> None:
    """Two gathers and one reduction of a student's layer, one gather of a teacher's, in each micro-batch."""
    gathered = 2 * LAYERS * layer * 4 + rest * 4 + (LAYERS * layer + rest) * 2
    gathers = 2 * LAYERS + 2 + LAYERS + 2
    keys = {key.split(" ")[1]: key for key in rank.sent}
    assert rank.micro_batches == 2
    assert rank.messages[keys["allgather_base"]] == 2 * gathers
    assert rank.sent[keys["allgather_base"]] == pytest.approx(2 * gathered, rel=0.01)
    assert rank.messages[keys["reduce_scatter_base"]] == 2 * (LAYERS + 2)
    assert rank.sent[keys["reduce_scatter_base"]] == pytest.approx(2 * 4 * (LAYERS * layer + rest), rel=0.01)


def test_a_layout_that_cannot_run_is_refused_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parallel: tensor 3 needs 3 processes") as error:
        run_job(job(tmp_path, 4, "parallel.tensor=3"))
    assert error.value.key == "parallel"
