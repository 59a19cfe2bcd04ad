"""The overhead of the training loop: tokens per second of a run, compared with the sum of its parts.

    python -m benchmarks.training --threads 2

The run is a real one, `train()` on a session; its times are read from its log. The parts are called separately on the
same micro-batches: teacher forward, student forward, objective with its gradient, student backward, clipped update.
Both take turns in one process, so that a change of the machine's speed affects both. The medians are compared.
Models are random; data are random tokens in full sequences. Writes benchmarks/results/training-<date>.json.
"""

import argparse
import contextlib
import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.record import result_file, write_result
from benchmarks.training_runs import metrics
from stillhouse.checkpoint.identity import RunIdentity
from stillhouse.config import RunConfig, TrainConfig, load_config
from stillhouse.config.read_config import dotted_values
from stillhouse.data import DataReport, Documents, MicroBatch, PackedSequences
from stillhouse.engine.schedule import make_step_schedule
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.loops.off_policy import train
from stillhouse.models import Decoder
from stillhouse.objective import TEACHER, linear_objective
from stillhouse.objective.spec import parse_objective
from stillhouse.output.folder import RunFolder, init_run_dir
from stillhouse.parallel import ModelSource, single_process_runner
from stillhouse.run.session import Session
from stillhouse.signals import InStageTeacher

PARTS = ("teacher_forward", "student_forward", "objective", "student_backward", "optimizer")


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        session = make_session(arguments, Path(folder))
        result = measure(session, arguments)
    print(json.dumps(result, indent=1))
    write_result(result_file("training"), {"theme": "training"} | result, arguments.device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--student", type=int, nargs=2, default=[224, 4], metavar=("WIDTH", "LAYERS"))
    add("--teacher", type=int, nargs=2, default=[512, 7], metavar=("WIDTH", "LAYERS"))
    add("--vocabulary", type=int, default=32768)
    add("--max-tokens", type=int, default=512, help="of a packed sequence")
    add("--micro-batch-tokens", type=int, default=2048)
    add("--micro-batches", type=int, default=2, help="of a step")
    add("--steps", type=int, default=2, help="measured in each turn, after one that is not")
    add("--turns", type=int, default=5)
    add("--loss", default="0.3*cross_entropy + 0.7*jsd(0.5)")
    add("--precision", choices=["fp32", "bf16"], default="fp32")
    add("--threads", type=int, default=2)
    add("--device", default="cpu")
    return parser.parse_args()


def measure(session: Session, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let the run and the parts take turns. The first step of each turn is not counted."""
    tokens = session.train_config.tokens_per_step
    run_seconds: list[float] = []
    part_seconds: list[dict[str, float]] = []
    for turn in range(arguments.turns):
        run_seconds += steps_of_a_run(session, turn)
        part_seconds += itertools.islice(steps_by_hand(session), 1, arguments.steps + 1)
    parts = {part: statistics.median(seconds[part] for seconds in part_seconds) for part in PARTS}
    by_hand = statistics.median(sum(seconds.values()) for seconds in part_seconds)
    run = statistics.median(run_seconds)
    return {
        "ratio": round(by_hand / run, 4),
        "run_tokens_per_second": round(tokens / run, 1),
        "parts_tokens_per_second": round(tokens / by_hand, 1),
        "run_step_seconds": [round(second, 4) for second in run_seconds],
        "parts_step_seconds": [round(sum(second.values()), 4) for second in part_seconds],
        "median_part_seconds": {part: round(seconds, 4) for part, seconds in parts.items()},
        "sizes": vars(arguments)
        | {
            "student_parameters": parameters(session.student),
            "teacher_parameters": parameters(teacher_of(session)),
        },
    }


def steps_of_a_run(session: Session, turn: int) -> list[float]:
    """Return the seconds between consecutive lines of the run's log."""
    folder = RunFolder(Path(str(session.values["out"])) / str(turn))
    init_run_dir(folder, "")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train(session, folder)
    return [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(metrics(folder.path))]


def steps_by_hand(session: Session) -> Iterator[dict[str, float]]:
    """Time each part of the same steps separately, on micro-batches that have been built before."""
    for step in range(session.step_schedule.steps):
        micro_batches = session.shard(session.step_schedule.micro_batches(session.train, step))
        seconds = dict.fromkeys(PARTS, 0.0)
        for batch in micro_batches:
            micro_batch_by_hand(session, batch, micro_batches.of_all_ranks.normalizer, seconds)

        def update() -> None:
            session.engine.update(1e-5)

        timed(session, seconds, "optimizer", update)
        yield seconds


def micro_batch_by_hand(session: Session, batch: MicroBatch, normalizer: int, seconds: dict[str, float]) -> None:
    tokens = batch.input_ids_BS, batch.position_ids_BS
    signal = timed(session, seconds, "teacher_forward", lambda: teacher_of(session).signal(*tokens))

    def student_forward() -> torch.Tensor:
        with autocast(session):
            outputs = session.student.backbone(
                input_ids=batch.input_ids_BS, position_ids=batch.position_ids_BS, use_cache=False
            )
        return outputs.last_hidden_state

    hidden = timed(session, seconds, "student_forward", student_forward)
    leaf_TD = hidden.detach().flatten(0, 1).requires_grad_()

    def objective() -> None:
        terms = session.spec.terms(batch.labels_T, {TEACHER: signal})
        weights = {"weights_T": batch.weights_T, "valid_index": batch.valid_index}
        with autocast(session):
            output = linear_objective(leaf_TD, session.student.output_head(), terms, normalizer=normalizer, **weights)
        output.loss.backward()

    timed(session, seconds, "objective", objective)
    assert leaf_TD.grad is not None
    gradient = leaf_TD.grad.view_as(hidden)
    timed(session, seconds, "student_backward", lambda: hidden.backward(gradient))


def autocast(session: Session) -> torch.autocast:
    enabled = session.train_config.precision == "bf16"
    return torch.autocast(session.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def timed(session: Session, seconds: dict[str, float], part: str, work: Callable[[], Any]) -> Any:
    synchronize(session.device)
    started = time.perf_counter()
    result = work()
    synchronize(session.device)
    seconds[part] += time.perf_counter() - started
    return result


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_session(arguments: argparse.Namespace, folder: Path) -> Session:
    """Return a session like that of `prepare`, but with random models and data instead of files."""
    config = make_config(arguments, folder)
    sequences = (arguments.steps + 1) * config.train.tokens_per_step // arguments.max_tokens
    packed = PackedSequences(random_documents(arguments, sequences), max_tokens=arguments.max_tokens, seed=0)
    device = torch.device(arguments.device)
    student, teacher = (
        random_model(arguments, *shape, seed).to(device)
        for seed, shape in enumerate((arguments.student, arguments.teacher))
    )
    runner, spec = single_process_runner(student.train(), teacher), parse_objective(config.objective.loss)
    train = TrainConfig(learning_rate=1e-5, betas=(0.9, 0.95), clip=1.0)
    return Session(
        spec=spec,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))),
        train=packed,
        evaluation=None,
        step_schedule=make_step_schedule(config.train, len(packed), arguments.max_tokens),
        student_source=ModelSource(lambda: student),
        engine=TorchEngine(
            runner, spec, train=train, autocast=torch.bfloat16 if config.train.precision == "bf16" else None
        ),
        source=InStageTeacher(runner),
        stores={},
        identity=RunIdentity("", {}, {}),
        train_config=config.train,
        eval_config=config.eval,
        checkpoint_config=config.checkpoint,
        student_config=config.student,
        teacher_configs=config.teacher_sections,
        values=dotted_values(config),
    )


def make_config(arguments: argparse.Namespace, folder: Path) -> RunConfig:
    tokens = {
        "micro_batch_tokens": arguments.micro_batch_tokens,
        "tokens_per_step": arguments.micro_batches * arguments.micro_batch_tokens,
    }
    settings = {
        "student": {"model": "random"},
        "teacher": {"model": "random"},
        "data": {"train": "random", "eval": 0, "max_tokens": arguments.max_tokens},
        "objective": {"loss": arguments.loss},
        "train": tokens | {"steps": arguments.steps + 1, "precision": arguments.precision, "learning_rate": 1e-5},
        "checkpoint": {"every": 0},
        "out": str(folder),
    }
    return load_config(None, settings=settings)


def random_documents(arguments: argparse.Namespace, sequences: int) -> Documents:
    """Return one document of the largest length per sequence; all of its tokens are targets."""
    count = sequences * arguments.max_tokens
    starts = np.arange(0, count + 1, arguments.max_tokens, dtype=np.int64)
    targets_N = np.ones(count, dtype=bool)
    targets_N[starts[:-1]] = False
    tokens_N = np.random.default_rng(0).integers(arguments.vocabulary, size=count, dtype=np.int32)
    keys_D = np.arange(sequences, dtype=np.uint64)
    sources = [f"random:{number}" for number in range(sequences)]
    return Documents(tokens_N, targets_N, starts, keys_D, sources, DataReport("random"))


def random_model(arguments: argparse.Namespace, width: int, layers: int, seed: int) -> Decoder:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=arguments.max_tokens,
        tie_word_embeddings=True,
    )
    return Decoder(LlamaForCausalLM(config))


def teacher_of(session: Session) -> Decoder:
    assert session.teacher is not None
    return session.teacher


def parameters(decoder: Decoder) -> int:
    return sum(parameter.numel() for parameter in decoder.parameters())


if __name__ == "__main__":
    main()
