"""Distillation on a dataset against TRL's GKDTrainer (`lmbda=0`): speed, memory, loss curve, held-out results.

    python -m pip install matplotlib --no-deps trl==1.16.0
    python -m benchmarks.vs_trl                          # about 15 minutes, on one thread

Both get the same models, the same documents in the same order and batches, one batch per step, the same optimizer,
and JSD with β = 0.5 over the whole vocabulary, divided by the number of predicted tokens. Neither recomputes
activations. GKDTrainer computes all logits: TRL's chunked divergence is only in its DistillationTrainer, which trains
on completions that it writes itself.

speed      Random models of two vocabularies. Runs take turns in one process; ratios are of neighbouring runs. The
           floor is the time of both models without heads, and of the products that the heads need. Seconds are those
           of the processor, on one thread, so that other processes do not count; the clock's are in the file, too.
memory     A new process for each: its peak, less what it has before it loads the models.
curves     The demo's teacher and text, a new student: the loss of each step, and the held-out text after the last.
rounding   The control of the curves: two runs of ours that sum in another order (other chunks of tokens).

A document fills a packed sequence, so that packing gives us no advantage here: GKDTrainer cannot pack.
Writes benchmarks/results/vs_trl-<date>.json and docs/results/vs_trl.png.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import MAP_BLOCKS, in_fresh_process, resident_bytes
from benchmarks.on_policy_speed import STUDENT, TEACHER, write_sizes
from benchmarks.peers import Products, Sizes, make_inputs
from benchmarks.record import result_file, write_result
from benchmarks.training_runs import LOSS, run_config, values_of
from stillhouse.config import RunConfig
from stillhouse.loops.held_out import held_out_metrics
from stillhouse.models import Decoder
from stillhouse.run.run import distill, prepare
from stillhouse.tools.demo.corpus import collect_split
from stillhouse.tools.demo.student import TEACHER as DEMO_TEACHER
from stillhouse.tools.demo.student import save_new_student

VOCABULARIES = 8192, 32768
#: tokens of a packed sequence, and sequences of a step
LENGTH, ROWS = 256, 8
#: steps at the beginning of a run that are not counted (they load and compile), and steps that are
WARM, COUNTED = 2, 3
HELD_OUT_PIECES = 60
CPU = torch.device("cpu")
PLOT = Path(__file__).parents[1] / "docs" / "results" / "vs_trl.png"


@dataclass(frozen=True)
class Task:
    """What both train on. folder: student, train.jsonl and held_out.jsonl, and the teacher unless it is elsewhere."""

    folder: Path
    teacher: Path
    steps: int
    learning_rate: float
    chunk_tokens: int | None = None

    def config(self, out: Path, student: Path | None = None) -> RunConfig:
        held_out = self.folder / "held_out.jsonl"
        settings = {
            "student.model": str(student or self.folder / "student"), "teacher.model": str(self.teacher),
            "teacher.dtype": "float32", "data.train": str(self.folder / "train.jsonl"), "data.max_tokens": LENGTH,
            "data.eval": str(held_out) if student else 0, "objective.loss": "jsd(0.5)", "train.steps": self.steps,
            "train.tokens_per_step": ROWS * LENGTH, "train.micro_batch_tokens": ROWS * LENGTH,
            "train.learning_rate": self.learning_rate, "train.schedule": "constant", "train.warmup": 0,
            "train.precision": "fp32", "objective.chunk_tokens": self.chunk_tokens, "checkpoint.every": 0,
            "device": "cpu", "out": str(out),
        }  # fmt: skip
        return run_config(settings)

    def batches(self) -> Iterator[list[dict[str, list[int]]]]:
        """Yield each step's documents in the order of our run, with labels as TRL has them."""
        session = prepare(self.config(self.folder / "unused"), announce=False)
        for step in range(self.steps):
            (batch,) = session.schedule.step_schedule.micro_batches(session.data.train, step)
            ids_BS, labels_BS = batch.inputs["input_ids"], batch.labels_T.view(ROWS, -1)
            lengths = (batch.document_T.view(ROWS, -1) == batch.document_T.view(ROWS, -1)[:, :1]).sum(1).tolist()
            assert all((labels_S[length:] < 0).all() for labels_S, length in zip(labels_BS, lengths, strict=True))
            yield [
                {"input_ids": ids_S[:length].tolist(), "labels": [-100, *labels_S[: length - 1].tolist()]}
                for ids_S, labels_S, length in zip(ids_BS, labels_BS, lengths, strict=True)
            ]


@dataclass(frozen=True)
class Run:
    """The loss of each step, in nats per predicted token; seconds from update to update, of processor and clock."""

    losses: list[float]
    processor: list[float]
    clock: list[float]

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.processor[WARM - 1 :])


@contextmanager
def timed_updates() -> Iterator[dict[str, list[float]]]:
    """Give the seconds from update to update of any optimizer of torch; they are there after the block."""
    ends: list[tuple[float, float]] = []
    seconds: dict[str, list[float]] = {}
    hook = register_optimizer_step_post_hook(lambda *_: ends.append((time.process_time(), time.monotonic())))
    try:
        yield seconds
    finally:
        hook.remove()
    seconds["processor"], seconds["clock"] = (np.diff(times).tolist() for times in zip(*ends, strict=True))


def ours(task: Task, out: Path) -> Run:
    with timed_updates() as seconds:
        distill(task.config(out))
    return Run(values_of(out, LOSS), **seconds)


def trl(task: Task, out: Path) -> Run:
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    arguments = GKDConfig(
        output_dir=str(out), lmbda=0.0, beta=0.5, per_device_train_batch_size=ROWS, gradient_accumulation_steps=1,
        max_steps=task.steps, train_sampling_strategy="sequential", learning_rate=task.learning_rate,
        lr_scheduler_type="constant", weight_decay=0.0, adam_beta2=0.95, max_grad_norm=1.0,
        activation_checkpointing=False, bf16=False, use_cpu=True, save_strategy="no",
        logging_steps=1, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        for folder in (task.folder / "student", task.teacher)
    )
    trainer = GKDTrainer(
        student,
        teacher,
        arguments,
        data_collator=DataCollatorForLanguageModeling(pad_token_id=0),
        train_dataset=Dataset.from_list([document for batch in task.batches() for document in batch]),
        processing_class=AutoTokenizer.from_pretrained(task.folder / "student", trust_remote_code=False),
    )
    with timed_updates() as seconds:
        trainer.train()
    trainer.save_model(str(out / "model"))
    return Run([line["loss"] for line in trainer.state.log_history if "loss" in line], **seconds)


SIDES: dict[str, Callable[[Task, Path], Run]] = {"ours": ours, "TRL": trl}


def random_task(folder: Path, vocabulary: int, steps: int) -> Task:
    """Random models, and documents of random words that fill a packed sequence each."""
    folder = write_sizes(folder, vocabulary)
    draws = np.random.default_rng(0).integers(1, vocabulary, (ROWS * steps, LENGTH - 1))
    write_texts(folder / "train.jsonl", (" ".join(f"w{word}" for word in row) for row in draws))
    return Task(folder, folder / "teacher", steps, 1e-4)


def demo_task(folder: Path, steps: int) -> Task:
    """The demo's models and text, in pieces of which no two fit into one packed sequence."""
    folder.mkdir()
    save_new_student(folder / "student", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TEACHER, trust_remote_code=False)
    for split, name in (("student", "train"), ("held_out", "held_out")):
        texts = list(pieces([document.text for document in collect_split(split)], tokenizer))
        write_texts(folder / f"{name}.jsonl", texts if name == "train" else texts[:HELD_OUT_PIECES])
    return Task(folder, DEMO_TEACHER, steps, 3e-3)


def pieces(texts: list[str], tokenizer: Any) -> Iterator[str]:
    """Cut texts at words into pieces of more than half a packed sequence's tokens; leave out the rest."""
    for text in texts:
        words = text.split(" ")
        start, stop = 0, 1
        while stop <= len(words):
            size = len(tokenizer(" ".join(words[start:stop])).input_ids)
            if LENGTH // 2 < size < LENGTH:
                yield " ".join(words[start:stop])
            if size > LENGTH // 2:
                start = stop
            stop += 1 if start == stop else (LENGTH - size) // 16 + 1


def write_texts(path: Path, texts: Any) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def speed(folder: Path, vocabulary: int, rounds: int) -> dict[str, Any]:
    task = random_task(folder / "speed", vocabulary, WARM + COUNTED)
    runs: dict[str, list[Run]] = {name: [] for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in (*SIDES, "layers", "products of the heads")}
    for number in range(rounds):
        for name, run in SIDES.items():
            runs[name].append(run(task, task.folder / f"{name}{number}"))
            seconds[name].append(runs[name][-1].step_seconds)
        for name, part in zip(("layers", "products of the heads"), floor_seconds(task, vocabulary), strict=True):
            seconds[name].append(part)
        print("round", number + 1, {name: round(times[-1], 2) for name, times in seconds.items()}, flush=True)
    floor = [sum(parts) for parts in zip(seconds["layers"], seconds["products of the heads"], strict=True)]
    return {
        "processor seconds of a step": seconds,
        "clock seconds of a step": {
            name: [statistics.median(run.clock[WARM - 1 :]) for run in by_round] for name, by_round in runs.items()
        },
        "tokens per second, median": {name: ROWS * LENGTH / statistics.median(seconds[name]) for name in SIDES},
        "TRL / ours": ratios(seconds["TRL"], seconds["ours"]),
        "TRL / floor": ratios(seconds["TRL"], floor),
        "ours / floor": ratios(seconds["ours"], floor),
        "flops of a token": flops(task, vocabulary),
        "largest relative difference of a step's loss": difference(runs["ours"][0], runs["TRL"][0]),
    }


def ratios(above: list[float], below: list[float]) -> dict[str, Any]:
    rounds = [one / other for one, other in zip(above, below, strict=True)]
    return {"median": statistics.median(rounds), "rounds": rounds}


def difference(one: Run, other: Run) -> float:
    assert len(one.losses) == len(other.losses)
    return max(abs(mine - theirs) / theirs for mine, theirs in zip(one.losses, other.losses, strict=True))


def floor_seconds(task: Task, vocabulary: int) -> list[float]:
    """Seconds of a step's layers, forward and backward, and of the products that the two heads need."""
    paths = (task.folder / "student", task.teacher)
    student, teacher = (Decoder.from_pretrained(path, dtype="float32") for path in paths)
    ids_BS = torch.randint(1, vocabulary, (ROWS, LENGTH))
    inputs = make_inputs(Sizes(ids_BS.numel(), STUDENT[0], TEACHER[0], vocabulary), CPU, torch.float32)
    products = Products(inputs, rows=1024, teacher=True)

    def layers() -> None:
        with torch.no_grad():
            teacher(ids_BS, head=False)
        hidden_BSD = student(ids_BS, head=False)
        hidden_BSD.backward(torch.ones_like(hidden_BSD))

    return [statistics.median([processor_seconds(part) for _ in range(4)][1:]) for part in (layers, products)]


def processor_seconds(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def flops(task: Task, vocabulary: int) -> dict[str, int]:
    """Operations of the matrix products of one token, without attention's scores."""
    layers = {
        name: sum(
            parameter.numel() for layer in Decoder.from_pretrained(path).layers() for parameter in layer.parameters()
        )
        for name, path in (("student", task.folder / "student"), ("teacher", task.teacher))
    }
    heads = Sizes(1, STUDENT[0], TEACHER[0], vocabulary).product_flops()
    return {"layers": 6 * layers["student"] + 2 * layers["teacher"], "heads": heads}


def memory(folder: Path, vocabulary: int) -> dict[str, Any]:
    task = random_task(folder / "memory", vocabulary, WARM)
    peaks = {
        name: in_fresh_process(peak_bytes, name, task, torch.get_num_threads(), environment=MAP_BLOCKS)
        for name in SIDES
    }
    student, teacher = (Decoder.from_pretrained(path) for path in (task.folder / "student", task.teacher))
    # weights, gradients and AdamW's two moments; the teacher has weights only
    state = sum(16 * parameter.numel() for parameter in student.parameters()) + sum(
        4 * parameter.numel() for parameter in teacher.parameters()
    )
    return {
        "bytes of the peak": peaks,
        "bytes of models, gradients and optimizer": state,
        "ours / TRL, in all": peaks["ours"] / peaks["TRL"],
        "ours / TRL, beside models, gradients and optimizer": (peaks["ours"] - state) / (peaks["TRL"] - state),
    }


def peak_bytes(side: str, task: Task, threads: int) -> int:
    """Train in this process, which is a new one; return its peak memory less what it had before, with all imports."""
    import trl.experimental.gkd
    import trl.trainer.sft_trainer  # noqa: F401

    torch.set_num_threads(threads)
    before = resident_bytes("VmRSS")
    SIDES[side](task, task.folder / side)
    return resident_bytes("VmHWM") - before


def curves(folder: Path, steps: int) -> dict[str, Any]:
    """Train both on the demo's text and evaluate both students in the same way."""
    task = demo_task(folder / "demo", steps)
    curves: dict[str, Any] = {}
    runs: list[Run] = []
    for name, run in SIDES.items():
        result = run(task, task.folder / name)
        curves[name] = {
            "losses": result.losses,
            "held out": held_out(task, task.folder / name),
            "seconds of a step": result.step_seconds,
        }
        runs.append(result)
    return curves | {"largest relative difference of a step's loss": difference(*runs)}


def rounding(folder: Path, steps: int) -> dict[str, Any]:
    task = demo_task(folder / "rounding", steps)
    tasks = {"chunks of 512 tokens": task, "chunks of 100 tokens": replace(task, chunk_tokens=100)}
    runs = {name: ours(task_of_run, task.folder / name) for name, task_of_run in tasks.items()}
    return {
        "losses": {name: run.losses for name, run in runs.items()},
        "held out": {name: held_out(task, task.folder / name) for name in runs},
        "largest relative difference of a step's loss": difference(*runs.values()),
    }


def held_out(task: Task, out: Path) -> dict[str, float]:
    session = prepare(task.config(task.folder / "unused", out / "model"), announce=False)
    documents = session.data.evaluation
    assert documents is not None
    return held_out_metrics(session.models, documents, session.loss.spec, session.schedule.held_out_tokens)


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8), width_ratios=[1.5, 1, 1])
    styles = {"ours": {"linewidth": 5, "alpha": 0.4}, "TRL": {"linewidth": 1.2, "color": "black"}}
    for name, style in styles.items():
        left.plot(result["curves"][name]["losses"], label=name, **style)
    left.set(title="the demo's text: loss", xlabel="step", ylabel="JSD(0.5), nats per token")
    left.legend()
    bars = {
        middle: ("tokens per second, one thread", lambda size: result["speed"][size]["tokens per second, median"], 1),
        right: ("peak memory, GB", lambda size: result["memory"][size]["bytes of the peak"], 1e9),
    }
    for axes, (title, values, unit) in bars.items():
        for column, name in enumerate(SIDES):
            places = [place + 0.38 * column for place in range(len(VOCABULARIES))]
            axes.bar(places, [values(str(size))[name] / unit for size in VOCABULARIES], 0.36, label=name)
        axes.set(title=title, xlabel="vocabulary")
        axes.set_xticks(
            [place + 0.19 for place in range(len(VOCABULARIES))], [f"{vocabulary:,}" for vocabulary in VOCABULARIES]
        )
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="of the curves")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--part", choices=["rounding"], help="only this; its result file is named after it")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {"theme": "vs_trl", "arguments": vars(arguments), "tokens of a step": ROWS * LENGTH}
    result |= {"student (width, layers)": STUDENT, "teacher (width, layers)": TEACHER}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        result["rounding"] = rounding(folder, arguments.steps)
        if not arguments.part:
            result["curves"] = curves(folder, arguments.steps)
            result["memory"] = {str(size): memory(folder, size) for size in VOCABULARIES}
            result["speed"] = {str(size): speed(folder, size, arguments.rounds) for size in VOCABULARIES}
            plot(result, PLOT)
    write_result(result_file("_".join(filter(None, ["vs_trl", arguments.part]))), result)


if __name__ == "__main__":
    main()
