"""The page of models is what the proof at load finds, for every causal family of the installed transformers."""

import pytest
import transformers
from kit import slow
from kit.causal_families import CAUSAL, LEFT_OUT
from model_table import PAGE, row

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = {line.split("`")[1]: line for line in TEXT.splitlines() if line.startswith("| `")}
QUICK = ("qwen3", "gpt_oss", "qwen3_5", "deepseek_v4", "modernbert-decoder")


def test_every_family_has_a_row() -> None:
    assert {*ROWS} == {*CAUSAL, *LEFT_OUT}


@pytest.mark.skipif(f"transformers {transformers.__version__} " not in TEXT, reason="another version of transformers")
@pytest.mark.parametrize("family", [*QUICK, *(slow(family) for family in CAUSAL if family not in QUICK)])
def test_a_row_is_what_the_proof_finds(family: str) -> None:
    assert row(family) == ROWS[family]
