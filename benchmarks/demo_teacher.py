"""Trains the teacher that the demo ships, from scratch: `python -m benchmarks.demo_teacher --out DIR`.

This is an ordinary run without a teacher. Its best checkpoint is exported to DIR/teacher. An epoch contains the
teacher split's prose twice, and the source code of the same modules once. A fiftieth of the split is not trained on;
the loss on this fiftieth chooses the best checkpoint. The loss on the demo's held-out split is only reported, and the
student split is not read at all. The same command continues an interrupted run.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stillhouse.config import load_config
from stillhouse.run.run import distill
from stillhouse.tools.demo.corpus import NamedText, collect_split, module_sources, name_hash, split_of, write_jsonl
from stillhouse.tools.export_run import ExportSettings, export_run

END = "<|endoftext|>"
VOCAB_SIZE = 3072
ROW = 512  # tokens per sequence
ROWS = 8  # sequences per step
CHOOSING_SHARE = 0.02  # the share of the teacher split that is only used to choose the best checkpoint
PROSE_REPEATS = 2  # repetitions of the prose per epoch; the source code occurs once


def chooses(document: NamedText) -> bool:
    """Return whether a document is only used to choose the checkpoint; equal for a module's source and its prose."""
    return name_hash("choosing:" + document.name.removeprefix("source:")) < CHOOSING_SHARE


def collect_teacher_sources() -> list[NamedText]:
    """Return the source code of the modules in the teacher split, which is additional text to train the teacher."""
    sources = module_sources(Path(sysconfig.get_paths()["stdlib"]))
    sources = ((name, source) for name, source in sources if split_of(name) == "teacher")
    return [NamedText(f"source:{name}", source) for name, source in sources if source.strip()]


def write_inputs(out: Path, seed: int) -> None:
    """Write the documents, and a newly initialised model with a tokenizer that is trained on the training prose.

    The model has 4.5 million parameters, or 9 MB in bfloat16. The tokenizer is a byte-level BPE, which decodes any
    text exactly.
    """
    split = collect_split("teacher")
    prose = [document for document in split if not chooses(document)]
    sources = [source for source in collect_teacher_sources() if not chooses(source)]
    write_jsonl([*prose * PROSE_REPEATS, *sources], out / "train.jsonl")
    write_jsonl(filter(chooses, split), out / "choosing.jsonl")
    write_jsonl(collect_split("held_out"), out / "held_out.jsonl")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((document.text for document in prose), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(out / "initial")
    tokenizer.save_pretrained(out / "initial")


def train_teacher() -> None:
    """Read the command line, train the teacher and export it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; an existing run is resumed")
    parser.add_argument("--steps", type=int, default=10_000, help=f"steps of {ROWS * ROW} tokens")
    parser.add_argument("--every", type=int, default=250, help="steps between evaluations and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps
    out.mkdir(parents=True, exist_ok=True)
    write_inputs(out, arguments.seed)
    settings = {
        "student": {"model": str(out / "initial")},
        "data": {
            "train": str(out / "train.jsonl"),
            "eval": {name: str(out / f"{name}.jsonl") for name in ("choosing", "held_out")},
            "max_tokens": ROW,
        },
        "objective": {"loss": "cross_entropy"},
        "train": {
            "tokens_per_step": ROWS * ROW,
            "micro_batch_tokens": ROWS * ROW,
            "steps": steps,
            "learning_rate": 2e-3,
            "schedule": "wsd",
            "warmup": min(200, steps // 2),
            "weight_decay": 0.2,
            "precision": "bf16",
        },
        "eval": {"every": arguments.every},
        "checkpoint": {"every": arguments.every, "best": "eval/choosing/cross_entropy"},
        "out": str(out / "run"),
        "seed": arguments.seed,
    }
    run = distill(load_config(None, settings=settings))
    export_run(run, out / "teacher", "best", ExportSettings(dtype="bfloat16"))


if __name__ == "__main__":
    train_teacher()
