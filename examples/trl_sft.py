"""The objective inside TRL's SFTTrainer, which goes on to prepare and pack the data, as for fine-tuning.

    python examples/trl_sft.py --teacher Qwen/Qwen3-8B --student Qwen/Qwen3-0.6B --data a.jsonl --output_dir out

It needs `pip install trl`. All other options are those of TRL's SFTConfig, such as `--packing true`. A CPU needs
`--use_cpu true --bf16 false`. The data have the columns `text`, `prompt` and `completion`, or `messages`. The file is
not called trl.py, because `import trl` would then import it.

Tested with TRL 1.16, in one process and under torchrun (DDP).

B rows of S tokens, V vocabulary.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from datasets import load_dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, HfArgumentParser, PreTrainedModel
from trl import SFTConfig, SFTTrainer, is_conversational
from trl.models.utils import _ForwardRedirection

from stillhouse import (
    TEACHER,
    Decoder,
    DistillTargets,
    StepLoss,
    check_same_tokenizer,
    load_tokenizer,
    parse_objective,
)

USAGE = (
    "python examples/trl_sft.py --teacher MODEL --student MODEL --data JSONL --output_dir FOLDER [--packing true …]"
)


class DistillTrainer(SFTTrainer):
    """SFTTrainer with another loss; it still trains, wraps and saves the student's Hugging Face model."""

    def __init__(self, model: PreTrainedModel, *, teacher: Decoder, objective: str, **options: Any):
        self.student, self.teacher = Decoder(model), teacher
        self.objective = parse_objective(objective)
        super().__init__(model, **options)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        # through the forward of the wrapper, if there is one: DDP sums gradients only of what its forward has run
        unwrapped = self.accelerator.unwrap_model(model)
        loss = _ForwardRedirection()(model, unwrapped, self.distill, tokens=num_items_in_batch, **inputs)
        return (loss, None) if return_outputs else loss

    def distill(self, input_ids, labels, attention_mask=None, position_ids=None, tokens=None, **_: Any) -> Tensor:
        """Return the loss. input_ids, labels: [B, S]. tokens: those to predict in the step, on all processes."""
        next_BS = F.pad(labels[:, 1:], (0, 1), value=-100)  # row t predicts token t + 1
        scale = 1 if tokens is None else self.accelerator.num_processes  # DDP divides gradients by this number
        tokens = (next_BS >= 0).sum() if tokens is None else tokens
        loss = StepLoss(self.objective, normalizer=tokens.clamp(min=1))
        with self.accelerator.autocast():
            signal = self.teacher.signal(input_ids, position_ids, attention_mask)
            context = DistillTargets(next_BS, signals={TEACHER: signal})
            output = self.student(input_ids, position_ids, attention_mask, processor=loss, context=context)
        return output.loss * scale


@dataclass
class Options:
    teacher: str = field(metadata={"help": "Folder or hub id of the teacher."})
    student: str = field(metadata={"help": "Folder or hub id of the student, with the teacher's tokenizer."})
    data: str = field(metadata={"help": "JSON lines."})
    objective: str = field(default="0.3*cross_entropy + 0.7*jsd(0.5)", metadata={"help": "Terms, as in a run.yaml."})


def make_trainer(options: Options, arguments: SFTConfig, **more: Any) -> DistillTrainer:
    """Return the trainer; `more` are further arguments of SFTTrainer."""
    tokenizer = load_tokenizer(options.student)
    check_same_tokenizer(tokenizer, load_tokenizer(options.teacher))
    data = load_dataset("json", data_files=options.data, split="train")
    if is_conversational(data[0]) and tokenizer.chat_template is None and arguments.chat_template_path is None:
        raise ValueError(
            f"{options.data} has conversations, and the tokenizer of {options.student} has no chat template: "
            "expected one in its folder, a file with --chat_template_path FILE.jinja, or data with the column `text`"
        )
    return DistillTrainer(
        AutoModelForCausalLM.from_pretrained(options.student, dtype=torch.float32, trust_remote_code=False),
        teacher=Decoder.from_pretrained(options.teacher, dtype="auto", device=arguments.device).requires_grad_(False),
        objective=options.objective,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        **more,
    )


def main(command_line: Sequence[str] | None = None) -> None:
    parser = HfArgumentParser((Options, SFTConfig), usage=USAGE)  # type: ignore[arg-type]
    options, arguments = parser.parse_args_into_dataclasses(command_line)
    trainer = make_trainer(options, arguments)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1:])
