"""A training session with random models and random data, for benchmarks; also the operations of one of its steps.

The models have the shape of Qwen3. They are made on the device itself. The teacher's weights have the dtype of the
matrix products, and the student's weights are float32. Each row of a micro-batch has several documents.

T tokens of a step, D student width, E teacher width, V vocabulary.
"""

import argparse
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stillhouse.checkpoint.resume import RunIdentity
from stillhouse.config import RunConfig, TrainConfig, load_config
from stillhouse.config.read_config import dotted_values
from stillhouse.data import DataReport, Documents, PackedSequences
from stillhouse.engine.schedule import make_step_schedule
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.loops.session import Data, Loss, Models, Schedule, Session
from stillhouse.models import Decoder
from stillhouse.models.varlen import Activations
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource, build_runner, use_deterministic_algorithms
from stillhouse.plan.devices import DEVICES
from stillhouse.plan.layout_plan import Machine, Plan, plan_layout, planned_job
from stillhouse.signals import InStageTeacher

#: dense bf16 operations per second in the data sheets, by a part of the device's name
PEAKS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12}
HEAD_DIM = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--student", type=int, nargs=2, default=[256, 4], metavar=("WIDTH", "LAYERS"))
    add("--teacher", type=int, nargs=2, default=[512, 7], metavar=("WIDTH", "LAYERS"))
    add("--vocabulary", type=int, default=32768)
    add("--max-tokens", type=int, default=512, help="of a packed row")
    add("--documents", type=int, default=3, help="of a row")
    add("--micro-batch-tokens", type=int, default=2048)
    add("--micro-batches", type=int, default=2, help="of a step")
    add("--loss", default="0.3*cross_entropy + 0.7*jsd(0.5)")
    add("--precision", choices=["fp32", "bf16"], default="fp32")
    add("--attention", help="its name in transformers; by default variable-length attention where it is possible")
    add("--compile", action="store_true", help="as train.compile")
    add("--residual-dtype", choices=["bfloat16"], help="as train.residual_dtype")
    add("--deterministic", action="store_true", help="as `deterministic: true`")
    add("--threads", type=int, default=2)
    add("--device", default="cpu")


def make_session(arguments: argparse.Namespace, folder: Path, steps: int) -> Session:
    """Return a session like that of `prepare`, but with random models and data instead of files."""
    config = make_config(arguments, folder, steps)
    if arguments.deterministic:
        use_deterministic_algorithms()
    sequences = steps * config.train.tokens_per_step // arguments.max_tokens
    packed = PackedSequences(random_documents(arguments, sequences), max_tokens=arguments.max_tokens, seed=0)
    half = torch.bfloat16 if config.train.precision == "bf16" else None
    student = random_model(arguments, *arguments.student, torch.float32).train()
    teacher = random_model(arguments, *arguments.teacher, half or torch.float32)
    spec, residual = parse_objective(config.objective.loss), torch.bfloat16 if arguments.residual_dtype else None
    layout = Layout(residual_dtype=residual, compile=arguments.compile, autocast=half)
    sources = (ModelSource(lambda: student, is_proven=True), ModelSource(lambda: teacher, is_proven=True))
    mesh = Mesh(Degrees(), torch.device(arguments.device), single_process=True)
    runner = build_runner(layout, mesh, *sources)
    train = TrainConfig(learning_rate=1e-5, betas=(0.9, 0.95), clip=1.0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")))
    engine = TorchEngine(runner, spec, train=train, autocast=half)
    source = ModelSource(lambda: student)
    steps = make_step_schedule(config.train, len(packed), arguments.max_tokens)
    return Session(
        Models(engine, InStageTeacher(), {}, source, config.student, config.teacher_sections),
        Data(tokenizer, packed, None, {}, []),
        Loss(spec, config.objective.loss),
        Schedule(steps, config.train, config.eval, config.checkpoint, config.seed),
        None,
        RunIdentity("", {}, {}),
        dotted_values(config),
    )


def request_plan(arguments: argparse.Namespace, folder: Path) -> "Future[Plan] | None":
    """Start the plan of the session's step in a process of its own, which takes about a minute on one core.

    A session with compiled layers, or on a device that plans do not know, has none.
    """
    name = next((name for name in DEVICES if name.upper() in device_name(arguments.device)), None)
    if name is None or arguments.compile:
        return None
    config = make_config(arguments, folder, 1)
    for section, (width, layers) in ((config.student, arguments.student), (config.teacher, arguments.teacher)):
        model_config(arguments, width, layers).save_pretrained(section.model)
    pool = ThreadPoolExecutor(1)
    job = planned_job(config, Machine(1, 1, name), arguments.max_tokens // arguments.documents)
    planned = pool.submit(plan_layout, job)
    pool.shutdown(wait=False)
    return planned


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""


def make_config(arguments: argparse.Namespace, folder: Path, steps: int) -> RunConfig:
    dtype = "bfloat16" if arguments.precision == "bf16" else "float32"
    tokens = {
        "micro_batch_tokens": arguments.micro_batch_tokens,
        "tokens_per_step": arguments.micro_batches * arguments.micro_batch_tokens,
    }
    settings = {
        "student": {"model": str(folder / "student"), "attention": arguments.attention},
        "teacher": {"model": str(folder / "teacher"), "attention": arguments.attention, "dtype": dtype},
        "data": {"train": "random", "eval": 0, "max_tokens": arguments.max_tokens},
        "objective": {"loss": arguments.loss},
        "train": tokens
        | {"steps": steps, "precision": arguments.precision, "residual_dtype": arguments.residual_dtype}
        | {"learning_rate": 1e-5},
        "checkpoint": {"every": 0},
        "out": str(folder),
    }
    return load_config(None, settings=settings)


def document_lengths(arguments: argparse.Namespace) -> list[int]:
    """Return the lengths of a row's documents: about 1 : 2 : 3 and so on; they fill the row."""
    count = arguments.documents
    weights = np.arange(1, count + 1)
    lengths = (arguments.max_tokens * weights // weights.sum()).tolist()
    return [*lengths[:-1], arguments.max_tokens - sum(lengths[:-1])]


def random_documents(arguments: argparse.Namespace, sequences: int) -> Documents:
    """Return the documents of this number of rows. All tokens but the first of a document are targets."""
    lengths = document_lengths(arguments) * sequences
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    targets_N = np.ones(starts[-1], dtype=bool)
    targets_N[starts[:-1]] = False
    tokens_N = np.random.default_rng(0).integers(arguments.vocabulary, size=starts[-1], dtype=np.int32)
    keys_D = np.arange(len(lengths), dtype=np.uint64)
    sources = [f"random:{number}" for number in range(len(lengths))]
    return Documents(tokens_N, targets_N, starts, keys_D, sources, DataReport("random"))


def random_model(arguments: argparse.Namespace, width: int, layers: int, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(layers)
    config, before = model_config(arguments, width, layers), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(arguments.device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    activations = None
    if arguments.attention is None:
        half = torch.bfloat16 if arguments.precision == "bf16" else None
        activations = Activations(torch.device(arguments.device), half)
    else:
        model.set_attn_implementation(arguments.attention)
    return Decoder(model.eval(), activations=activations, verify=False)


def model_config(arguments: argparse.Namespace, width: int, layers: int) -> Qwen3Config:
    """Return the configuration of a model with heads of 128 numbers, or of `HEAD_DIM` if it is narrow."""
    head_dim = 128 if width >= 1024 else HEAD_DIM
    key_values = max(1, min(8, width // head_dim))
    return Qwen3Config(
        vocab_size=arguments.vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        # Qwen3-0.6B has 16 heads of 128 numbers at width 1,024
        num_attention_heads=max(2 * key_values, width // head_dim),
        num_key_value_heads=key_values,
        head_dim=head_dim,
        max_position_embeddings=arguments.max_tokens,
        tie_word_embeddings=width < 4096,
    )


def flops(session: Session, arguments: argparse.Namespace) -> float:
    """Return the operations of a step: all matrix products of both models and the objective, attention included.

    A token attends to the tokens before it in its document. Recomputed activations do not count.
    """
    tokens = session.schedule.train_config.tokens_per_step
    lengths = np.array(document_lengths(arguments))
    seen = float((lengths.astype(np.float64) ** 2).sum() / 2 / lengths.sum())  # tokens that a token attends to
    total = 0.0
    for decoder, passes in ((session.models.student, 3), (session.models.teacher, 1)):
        assert decoder is not None
        config, matrices = decoder.pretrained.config, 0
        for name, weight in decoder.backbone.named_parameters():
            matrices += weight.numel() if weight.dim() == 2 and "embed" not in name else 0
        attention = 4 * seen * config.num_hidden_layers * config.num_attention_heads * config.head_dim
        # the logits of the student need as many passes as its layers: one product forward and two backward
        total += passes * tokens * (2 * matrices + attention + 2 * config.vocab_size * config.hidden_size)
    return total


def utilization(operations: float, seconds: float, device: torch.device) -> float | None:
    """Return the share of the peak of matrix products; None for a device without an entry in `PEAKS`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = [peak for part, peak in PEAKS.items() if part in name]
    return round(operations / seconds / max(peaks), 4) if peaks else None


def parameters(decoder: Decoder | None) -> int:
    assert decoder is not None
    return sum(parameter.numel() for parameter in decoder.parameters())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
