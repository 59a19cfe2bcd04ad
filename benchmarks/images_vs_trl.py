"""Distillation on documents with images against TRL's GOLDTrainer (`lmbda=0`): loss, speed, memory.

    python -m pip install --no-deps trl==1.16.0
    python -m benchmarks.images_vs_trl                   # about 5 minutes, on one thread

GOLDTrainer is TRL's only trainer that distills a vision-language model on a dataset: GKDTrainer's collator has no
images, DistillationTrainer trains on completions that it writes itself, and SFTTrainer has no teacher.

Both get the same Qwen3-VL models with random weights, the same pictures of four digits in
one batch per step, the same optimizer, and JSD with β = 0.5 over the whole vocabulary, divided by the number of
predicted tokens. A step has all documents, so that their order is of no importance. All documents have the same
length, so that neither has padding. All parts of the student are trained.

losses     The loss of each step, in nats per predicted token.
float64    The loss of the first step by plain transformers in float64, one document at a time.
speed      Runs take turns in one process; ratios are of neighbouring runs. Seconds are those of the processor, on one
           thread, so that other processes do not count; the clock's are in the file, too.
memory     A new process for each: its peak, less what it has before it loads the models.

Writes benchmarks/results/images_vs_trl-<date>.json; with `--part float64`, only that part, named after it.
"""

import argparse
import io
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pillow
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.digit_models import new_model, save
from benchmarks.digit_pictures import parquet_file, record
from benchmarks.measure import MAP_BLOCKS, in_fresh_process, resident_bytes
from benchmarks.record import result_file, write_result
from benchmarks.training_runs import LOSS, run_config, values_of
from benchmarks.vs_trl import COUNTED, WARM, Run, difference, ratios, timed_updates
from stillhouse.images.load_processor import load_processor
from stillhouse.run.run import distill

DIGITS = range(4, 5)
#: documents of a step, and tokens of each of them: the picture with its two borders, question and `=`, answer and end
DOCUMENTS, ANSWER = 64, 5
LENGTH = 4 + 2 + 16 + ANSWER
#: width and layers of the language model, width and layers of the vision tower
STUDENT, TEACHER = (128, 4, 48, 2), (256, 6, 48, 2)
VOCABULARIES = 512, 16384
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Task:
    """What both train on. folder: the models `student` and `teacher`, and train.parquet."""

    folder: Path
    steps: int

    @classmethod
    def write(cls, folder: Path, vocabulary: int, steps: int) -> "Task":
        folder.mkdir()
        for seed, (name, sizes) in enumerate({"student": STUDENT, "teacher": TEACHER}.items()):
            model = new_model(*sizes, seed)
            model.resize_token_embeddings(vocabulary, mean_resizing=False)
            save(model, folder / name)
        (folder / "train.parquet").write_bytes(parquet_file(0, DOCUMENTS, held_out=False, lengths=DIGITS))
        return cls(folder, steps)


def ours(task: Task, out: Path) -> Run:
    settings = {
        "student.model": str(task.folder / "student"), "student.train": ["language", "projector", "vision"],
        "teacher.model": str(task.folder / "teacher"), "teacher.dtype": "float32",
        "data.train": str(task.folder / "train.parquet"), "data.eval": 0, "data.max_tokens": LENGTH,
        "objective.loss": "jsd(0.5)", "train.steps": task.steps, "train.tokens_per_step": DOCUMENTS * LENGTH,
        "train.micro_batch_tokens": DOCUMENTS * LENGTH, "train.learning_rate": LEARNING_RATE,
        "train.schedule": "constant", "train.warmup": 0, "train.precision": "fp32", "checkpoint.every": 0,
        "device": "cpu", "out": str(out),
    }  # fmt: skip
    with timed_updates() as seconds:
        distill(run_config(settings))
    return Run(values_of(out, LOSS), **seconds)


def trl(task: Task, out: Path) -> Run:
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    arguments = GOLDConfig(
        output_dir=str(out), lmbda=0.0, beta=0.5, temperature=1.0, use_uld_loss=False, max_length=LENGTH,
        max_completion_length=8, per_device_train_batch_size=DOCUMENTS, gradient_accumulation_steps=1,
        max_steps=task.steps, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", weight_decay=0.0,
        adam_beta2=0.95, max_grad_norm=1.0, activation_checkpointing=False, bf16=False, use_cpu=True,
        save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    student, teacher = (
        Qwen3VLForConditionalGeneration.from_pretrained(task.folder / name, dtype=torch.float32)
        for name in ("student", "teacher")
    )
    trainer = GOLDTrainer(
        student,
        teacher,
        arguments,
        train_dataset=documents(),
        processing_class=load_processor(str(task.folder / "student")),
    )
    with timed_updates() as seconds:
        trainer.train()
    return Run([line["loss"] for line in trainer.state.log_history if "loss" in line], **seconds)


SIDES: dict[str, Callable[[Task, Path], Run]] = {"ours": ours, "TRL": trl}


def documents() -> Any:
    """The same documents in the columns that TRL reads."""
    from datasets import Dataset, Features, Image, List, Value

    message = {"role": Value("string"), "content": Value("string")}
    features = Features({"prompt": List(message), "completion": List(message), "images": List(Image())})
    rows = []
    for number in range(DOCUMENTS):
        row = record(0, number, held_out=False, lengths=DIGITS)
        texts = [turn["content"][-1]["text"] for turn in row["messages"]]
        turns = [[{"role": role, "content": text}] for role, text in zip(("user", "assistant"), texts, strict=True)]
        rows.append({"prompt": turns[0], "completion": turns[1], "images": row["images"]})
    return Dataset.from_list(rows, features=features)


def speed(folder: Path, vocabulary: int, rounds: int) -> dict[str, Any]:
    task = Task.write(folder / f"speed{vocabulary}", vocabulary, WARM + COUNTED)
    runs: dict[str, list[Run]] = {name: [] for name in SIDES}
    for number in range(rounds):
        for name, run in SIDES.items():
            runs[name].append(run(task, task.folder / f"{name}{number}"))
        print("round", number + 1, {name: round(of[-1].step_seconds, 3) for name, of in runs.items()}, flush=True)
    seconds = {name: [run.step_seconds for run in of] for name, of in runs.items()}
    return {
        "losses": {name: of[0].losses for name, of in runs.items()},
        "largest relative difference of a step's loss": difference(runs["ours"][0], runs["TRL"][0]),
        "processor seconds of a step": seconds,
        "clock seconds of a step": {
            name: [statistics.median(run.clock[WARM - 1 :]) for run in of] for name, of in runs.items()
        },
        "TRL / ours": ratios(seconds["TRL"], seconds["ours"]),
    }


@torch.no_grad()
def float64_loss(folder: Path, vocabulary: int) -> float:
    """JSD of the new models in nats per predicted token, on whole log-probabilities [5, V] of each document."""
    task = Task.write(folder / f"float64{vocabulary}", vocabulary, 1)
    processor = load_processor(str(task.folder / "student"))
    models = [
        Qwen3VLForConditionalGeneration.from_pretrained(task.folder / name, dtype=torch.float64)
        for name in ("student", "teacher")
    ]
    divergences = []
    for number in range(DOCUMENTS):
        row = record(0, number, held_out=False, lengths=DIGITS)
        text = processor.tokenizer.apply_chat_template(row["messages"], tokenize=False)
        picture = Pillow.open(io.BytesIO(row["images"][0]["bytes"]))
        inputs = processor(text=[text], images=[[picture]], return_tensors="pt", add_special_tokens=False)
        student, teacher = (model(**inputs).logits[0, -ANSWER - 1 : -1].log_softmax(-1) for model in models)
        mixture = torch.logaddexp(student, teacher) - math.log(2)
        divergences += [(side.exp() * (side - mixture)).sum(-1) / 2 for side in (student, teacher)]
    return float(torch.stack(divergences).sum()) / (DOCUMENTS * ANSWER)


def memory(folder: Path, vocabulary: int) -> dict[str, Any]:
    task = Task.write(folder / f"memory{vocabulary}", vocabulary, WARM)
    threads = torch.get_num_threads()
    peaks = {name: in_fresh_process(peak_bytes, name, task, threads, environment=MAP_BLOCKS) for name in SIDES}
    return {"bytes of the peak": peaks, "ours / TRL": peaks["ours"] / peaks["TRL"]}


def peak_bytes(side: str, task: Task, threads: int) -> int:
    """Train in this process, which is a new one; return its peak memory less what it had before, with all imports."""
    import trl.experimental.gold  # noqa: F401

    torch.set_num_threads(threads)
    before = resident_bytes("VmRSS")
    SIDES[side](task, task.folder / side)
    return resident_bytes("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=["float64"], help="only this; its result file is named after it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"theme": "images_vs_trl", "arguments": vars(arguments)}
    result |= {"documents of a step": DOCUMENTS, "tokens of a document": LENGTH}
    result |= {"student (width, layers, of the tower)": STUDENT, "teacher (width, layers, of the tower)": TEACHER}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        result["first loss in float64"] = {str(size): float64_loss(folder, size) for size in VOCABULARIES}
        if not arguments.part:
            result["speed"] = {str(size): speed(folder, size, arguments.rounds) for size in VOCABULARIES}
            result["memory"] = {str(size): memory(folder, size) for size in VOCABULARIES}
    write_result(result_file("_".join(filter(None, ["images_vs_trl", arguments.part]))), result)


if __name__ == "__main__":
    main()
