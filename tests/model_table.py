"""Writes docs/models.md: what the proof at load finds for a tiny model of each causal family of transformers.

python tests/model_table.py
"""

import sys
import warnings
from pathlib import Path

import torch
import transformers
from kit.causal_families import CAUSAL, LEFT_OUT, build
from kit.varlen_reference import reference, separation_error
from transformers.utils import logging

from stillhouse.models import Activations, Decoder, add_lora, initialize_lora, prove_decoder
from stillhouse.models.adapter import is_lora
from stillhouse.models.document_packing import MASKED, PACKED, ROWS
from stillhouse.models.families import is_of_experts
from stillhouse.models.mtp import add_mtp
from stillhouse.parallel.apply.tensor_parallel import dispatched_experts, tensor_plan
from stillhouse.parallel.backbone_cut import is_cuttable
from stillhouse.rollout.generate import check_generation

PAGE = Path(__file__).parents[1] / "docs/models.md"
_WAYS = {PACKED: "packed", MASKED: "packed with masks", ROWS: "rows"}
_HEAD = """# Models

`make models` writes this page. It builds a tiny model of each causal family of transformers {version} from the
family's own configuration, and runs the proof that every model has to pass when it is loaded. Another configuration
of a family can give another result: a hybrid whose layers all have attention can be packed. `stillhouse check` shows
the result for your models.

- **documents**: how `data.packing: auto` keeps documents apart ([how](data.md#length-and-packing)). The table is
  without kernels. With them, layers with a state or a convolution are packed, too: flash-linear-attention and
  causal-conv1d for Qwen3.5 and Kimi-Linear, mamba-ssm and causal-conv1d for Nemotron-H and Bamba, causal-conv1d for
  LFM2.
- **varlen**: whether packed documents run with variable-length attention on a GPU. Its results for the tiny model, by
  a reference of torch's kernel, are those of one document at a time.
- **tensor**: whether transformers has a plan for the family that two processes can follow. **pipeline**: whether no
  layer reads more than the layer before it has computed, so that layers can be on different processes. **expert**:
  whether transformers' plan can distribute the experts; – if the family has none. A "no" is an error at the start of
  a run, which names the cause. `fsdp` and `replicate` need no plan. Context parallelism needs packed documents.
- **LoRA**: whether an adapter of all linear layers (`student.adapter`) trains; named are layers whose weights the
  family reads without calling them, or that only select tokens. For the others, name the layers in
  `student.adapter.targets`. **MTP**: whether new layers for multi-token prediction (`student.mtp`) can be added.
- **generation**: whether the engine in the job gives the log-probabilities of the forward pass. If it does not, a
  server has to write the completions of an on-policy run.

| family | documents | varlen | tensor | pipeline | expert | LoRA | MTP | generation |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def row(model_type: str) -> str:
    """Return a family's row of the table."""
    try:
        decoder = Decoder(build(model_type))
    except ValueError as error:
        reason = str(error).partition(": ")[2].partition(" by up to ")[0]
        return f"| `{model_type}` | refused: {reason} | | | | | | | |"
    try:
        check_generation(decoder, torch.device("cpu"))
        generation = "yes"
    except ValueError:
        generation = "by a server"
    columns = [
        _WAYS[decoder.packing.name],
        attention(model_type),
        *layouts(decoder),
        adapter(model_type),
        mtp(model_type),
        generation,
    ]
    return f"| `{model_type}` | {' | '.join(columns)} |"


def attention(model_type: str) -> str:
    """Return whether packed documents run with variable-length attention.

    Raises AssertionError if their hidden states are not those of one document at a time.
    """
    with reference():
        decoder = Decoder(build(model_type), activations=Activations(torch.device("cpu"), torch.float32))
        if not decoder.packing.attention.reads_lengths:
            return "no"
        error = separation_error(decoder)
    assert error < 1e-4, f"{model_type}: variable-length attention changes hidden states by {error:.2g}"
    return "yes"


def layouts(decoder: Decoder) -> list[str]:
    """Return the columns of the layouts that need more than FSDP does."""
    try:
        tensor_plan(decoder, 2)
        tensor = "yes"
    except ValueError:
        tensor = "no"
    has_experts = any(is_of_experts(name) for name, _ in decoder.named_modules())
    expert = "yes" if dispatched_experts(decoder) else "no"
    return [tensor, "yes" if is_cuttable(decoder.config) else "no", expert if has_experts else "–"]


def adapter(model_type: str) -> str:
    """Return whether all matrices of an adapter in the language model's layers have a gradient."""
    decoder = Decoder(build(model_type), verify=False)
    try:
        add_lora(decoder, r=2, alpha=4.0)
    except ValueError:
        return "no"
    initialize_lora(decoder, seed=1, fresh=False)
    decoder(torch.arange(3, 20)[None]).square().mean().backward()
    matrices = [named for layer in decoder.layers() for named in layer.named_parameters() if is_lora(named[0])]
    unused = {_last_word(name.partition(".lora_")[0]) for name, matrix in matrices if matrix.grad is None}
    return f"all but {', '.join(sorted(unused))}" if unused else "yes"


def _last_word(name: str) -> str:
    return next(part for part in reversed(name.split(".")) if not part.isdigit())


def mtp(model_type: str) -> str:
    decoder = Decoder(build(model_type), verify=False)
    try:
        add_mtp(decoder, 1, is_new=True)
        assert decoder.mtp is not None
        decoder.mtp.initialize(decoder.pretrained, seed=1)
        prove_decoder(decoder)
    except ValueError:
        return "no"
    return "yes"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for number, model_type in enumerate(CAUSAL, start=1):
        rows.append(row(model_type))
        print(f"{number}/{len(CAUSAL)} {rows[-1]}", file=sys.stderr)
    left_out = [f"| `{model_type}` | {reason} |" for model_type, reason in LEFT_OUT.items()]
    text = _HEAD.format(version=transformers.__version__) + "\n".join(rows)
    text += "\n\n## Not built\n\n| family | why |\n| --- | --- |\n" + "\n".join(left_out) + "\n"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
