"""The objective inside Hugging Face's Trainer: only its model changes, to one whose forward returns the loss.

    python examples/hf_trainer.py --teacher Qwen/Qwen3-8B --student Qwen/Qwen3-0.6B --data a.jsonl --output_dir out

It needs `pip install accelerate`. All other options are those of transformers' TrainingArguments. The data have a
column `text`, columns `prompt` and `completion`, or conversations in `messages`, as for `stillhouse distill`: only
completions and the assistant's turns are learned. Documents of a batch follow one another in one row, without
padding.
Trainer passes the number of tokens to predict in the whole step, on all processes and in all accumulated batches, and
the loss is divided by it once. Tested in one process and under torchrun (DDP). For gradient checkpointing, call
`student.gradient_checkpointing_enable()`; the option fails.

B rows of S tokens, V vocabulary.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    DataCollatorWithFlattening,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from stillhouse import (
    TEACHER,
    Decoder,
    DistillTargets,
    LoadOptions,
    StepLoss,
    check_same_tokenizer,
    load_documents,
    load_tokenizer,
    parse_objective,
)

USAGE = (
    "python examples/hf_trainer.py --teacher MODEL --student MODEL --data JSONL --output_dir FOLDER [--max_steps …]"
)


class Distillation(nn.Module):
    """The student as Trainer trains it. The teacher is not a submodule: it is neither trained nor saved."""

    accepts_loss_kwargs = True  # Trainer passes num_items_in_batch, and does not divide the loss itself
    loss_type = "ForCausalLM"  # Trainer does not count the first label of a row, which no token predicts

    def __init__(self, student: Decoder, teacher: Decoder, objective: str):
        super().__init__()
        self.student, self.config = student, student.config
        self.__dict__["teacher"] = teacher
        self.objective = parse_objective(objective)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the loss. input_ids, labels: [B, S]; label t is token t, or −100 for a token without a loss."""
        next_BS = F.pad(labels[:, 1:], (0, 1), value=-100)  # row t predicts token t + 1
        tokens = (next_BS >= 0).sum() if num_items_in_batch is None else num_items_in_batch
        signal = self.teacher.signal(input_ids, position_ids, attention_mask)
        loss = StepLoss(self.objective, normalizer=tokens.clamp(min=1))
        context = DistillTargets(next_BS, signals={TEACHER: signal})
        output = self.student(input_ids, position_ids, attention_mask, processor=loss, context=context)
        return {"loss": output.loss}


@dataclass
class Options:
    teacher: str = field(metadata={"help": "Folder or hub id of the teacher."})
    student: str = field(metadata={"help": "Folder or hub id of the student, with the teacher's tokenizer."})
    data: str = field(metadata={"help": "JSON lines with the column text, prompt and completion, or messages."})
    objective: str = field(default="0.3*cross_entropy + 0.7*jsd(0.5)", metadata={"help": "Terms, as in a run.yaml."})
    max_tokens: int = field(default=2048, metadata={"help": "Longer texts are split, completions are cut."})
    chat_template: str | None = field(default=None, metadata={"help": "A Jinja file, instead of the student's own."})


def tokenizer_of(options: Options) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(options.student)
    if options.chat_template is not None:
        tokenizer.chat_template = Path(options.chat_template).read_text(encoding="utf-8")
    return tokenizer


def make_trainer(options: Options, arguments: TrainingArguments, **more: Any) -> Trainer:
    """Return the trainer; `more` are further arguments of Trainer."""
    tokenizer = tokenizer_of(options)
    check_same_tokenizer(tokenizer, load_tokenizer(options.teacher))
    student = Decoder.from_pretrained(options.student, dtype=torch.float32)
    teacher = Decoder.from_pretrained(options.teacher, dtype="auto", device=arguments.device).requires_grad_(False)

    documents = load_documents(options.data, tokenizer, LoadOptions(options.max_tokens))

    def columns(number: int) -> dict[str, Any]:
        ids_S, is_target_S = documents.tokens(number), documents.targets(number)
        return {"input_ids": ids_S.tolist(), "labels": np.where(is_target_S, ids_S, -100).tolist()}

    return Trainer(
        Distillation(student, teacher, options.objective),
        arguments,
        data_collator=DataCollatorWithFlattening(),
        train_dataset=Dataset.from_list([columns(number) for number in range(len(documents))]),
        **more,
    )


def main(command_line: Sequence[str] | None = None) -> None:
    parser = HfArgumentParser((Options, TrainingArguments), usage=USAGE)  # type: ignore[arg-type]
    options, arguments = parser.parse_args_into_dataclasses(command_line)
    trainer = make_trainer(options, arguments)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    # Trainer's own checkpoints have the names of `Distillation`; this is the student for transformers
    if trainer.is_world_process_zero():
        trainer.model.student.save_pretrained(arguments.output_dir)
        tokenizer_of(options).save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    main(sys.argv[1:])
