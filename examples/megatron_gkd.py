"""Knowledge distillation in Megatron-Core, under any tensor × pipeline × data parallel layout, without a patch.

    torchrun --nproc-per-node 4 examples/megatron_gkd.py examples/megatron_gkd.yaml

The teacher is a second GPTModel in the same pipeline stages. Megatron's own schedule runs its forward, and its hidden
states stay on the last stage, where the student's output processor compares teacher and student. Instead of a teacher
model, a file can give the teacher's top-k log-probabilities. The section `objective` has Stillhouse's keys. The
weights of both models are random: load yours where `build` is called. It needs `pip install megatron-core` and
CUDA devices (tests/kit/cuda_is_cpu.py replaces them in this repository's tests).

`data` and `teacher.top_k` are safetensors files of the same N rows: input_ids [N, S + 1]; ids and log_probs
[N, S, K], tail_log_prob [N, S]. B rows of a micro-batch, S tokens, K entries.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stillhouse.config.errors import ConfigError
from stillhouse.config.explain_errors import explain
from stillhouse.config.section import PathText, Section
from stillhouse.config.sections.objective_section import ObjectiveConfig
from stillhouse.config.yaml_text import read_yaml
from stillhouse.engine.loss import StepLoss
from stillhouse.models.megatron import MegatronProcessor
from stillhouse.models.processor_targets import DistillTargets
from stillhouse.models.processors import full_vocab
from stillhouse.objective import TEACHER, Signal, Signals, TopK
from stillhouse.objective.spec import ObjectiveSpec, parse_objective

try:
    import transformer_engine  # noqa: F401
except ImportError:
    LAYER = get_gpt_layer_local_spec
else:
    LAYER = get_gpt_layer_with_transformer_engine_spec


class ModelSection(Section):
    layers: int = Field(ge=1)
    width: int = Field(ge=1)
    heads: int = Field(ge=1)


class TeacherSection(Section):
    model: ModelSection | None = None
    top_k: PathText | None = None


class LayoutSection(Section):
    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    sequence: bool = False


class TrainSection(Section):
    steps: int = Field(default=20, ge=1)
    micro_batches: int = Field(default=4, ge=1, description="Micro-batches of each data rank in a step.")
    rows: int = Field(default=2, ge=1, description="Rows of a micro-batch.")
    learning_rate: float = Field(default=1e-3, gt=0)


class GkdConfig(Section):
    student: ModelSection
    teacher: TeacherSection
    data: PathText
    vocabulary: int = Field(ge=2)
    objective: ObjectiveConfig = ObjectiveConfig()
    parallel: LayoutSection = LayoutSection()
    train: TrainSection = TrainSection()


@dataclass(frozen=True)
class MicroBatch:
    input_ids_BS: Tensor
    labels_BS: Tensor
    signals: Signals = field(default_factory=dict)


def main(path: str) -> DistributedDataParallel:
    """Train, and return this rank's part of the student."""
    config = read_config(path)
    spec, rows = read_objective(config.objective), read_rows(config)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    layout = config.parallel
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
    tokens = rows["input_ids"].shape[1] - 1
    student = build(config, config.student, tokens, seed=0)
    teacher = None if config.teacher.model is None else build(config, config.teacher.model, tokens, seed=1)
    if teacher is not None:
        teacher.eval().requires_grad_(False)
    student = wrap(student)
    train(config, spec, rows, student, teacher)
    dist.destroy_process_group()
    return student


def train(
    config: GkdConfig,
    spec: ObjectiveSpec,
    rows: dict[str, Tensor],
    student: DistributedDataParallel,
    teacher: GPTModel | None,
) -> None:
    settings = OptimizerConfig(optimizer="adam", lr=config.train.learning_rate, clip_grad=1.0)
    optimizer = get_megatron_optimizer(settings, [student])
    processor = StepLoss(spec, chunk_tokens=config.objective.chunk_tokens)
    hook = MegatronProcessor(student, processor, vocab_size=config.vocabulary)
    teacher_hook = None if teacher is None else MegatronProcessor(teacher, full_vocab, vocab_size=config.vocabulary)
    for step in range(config.train.steps):
        batches = micro_batches(config, rows, step)
        signals = [batch.signals for batch in batches]
        if teacher is not None and teacher_hook is not None and spec.needs_teacher:
            signals = [{TEACHER: signal} for signal in teacher_signals(teacher, teacher_hook, batches)] or signals
        contexts = [
            DistillTargets(batch.labels_BS, signals=named) for batch, named in zip(batches, signals, strict=True)
        ]
        student.zero_grad_buffer()
        optimizer.zero_grad()
        sums = schedule(student, hook, batches, contexts)
        _, gradient_norm, _ = optimizer.step()
        report(step, sums, gradient_norm)


@torch.no_grad()
def teacher_signals(teacher: GPTModel, hook: MegatronProcessor, batches: Sequence[MicroBatch]) -> list[Signal]:
    """Return one signal per micro-batch on the last stage: hidden states and head, never logits. Empty elsewhere."""
    return schedule(teacher, hook, batches, [None] * len(batches), forward_only=True, collect_non_loss_data=True)


def schedule(
    model: torch.nn.Module,
    hook: MegatronProcessor,
    batches: Sequence[MicroBatch],
    contexts: Sequence[Any],
    **options: bool,
) -> list[Any]:
    """Run Megatron's schedule. On the last stage, return the logged values of each micro-batch (see `finish`)."""

    def forward_step(data: Iterator[tuple[MicroBatch, Any]], model: torch.nn.Module) -> tuple[Any, Any]:
        batch, context = next(data)
        positions_BS = torch.arange(batch.input_ids_BS.shape[1], device=batch.input_ids_BS.device)[None]
        processor = {"output_processor": hook, "output_processor_context": context}
        # no attention mask is needed, because Megatron's causal attention creates its mask
        return model(batch.input_ids_BS, positions_BS, None, **processor), finish

    def finish(output: Any, non_loss_data: bool = False) -> Any:
        """Return the summed loss, its number of tokens, and the values to log.

        Megatron divides the gradient by the number of tokens of all micro-batches and data ranks.
        """
        if non_loss_data:
            return output
        tokens = output.metrics["tokens"].int()
        return output.loss, tokens, torch.stack([output.loss.detach(), tokens.float()])

    (rows, tokens) = batches[0].input_ids_BS.shape
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(zip(batches, contexts, strict=True)),
        model=model,
        num_microbatches=len(batches),
        seq_length=tokens,
        micro_batch_size=rows,
        **{"forward_only": False} | options,
    )


def build(config: GkdConfig, shape: ModelSection, tokens: int, seed: int) -> GPTModel:
    """Return this rank's part of a model with random weights."""
    layout = config.parallel
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    transformer = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.sequence,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
        init_method_std=0.2,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=torch.cuda.is_available(),
        pipeline_dtype=torch.float32,
        # losses are sums over tokens; Megatron divides them once, by the number of tokens in the whole step
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    padded = -(-config.vocabulary // layout.tensor) * layout.tensor
    model = GPTModel(
        transformer,
        LAYER(),
        padded,
        tokens,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    )
    return model.to(torch.cuda.current_device())


def wrap(model: GPTModel) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    wrapped.broadcast_params()
    return wrapped


def micro_batches(config: GkdConfig, rows: dict[str, Tensor], step: int) -> list[MicroBatch]:
    """Return this data rank's micro-batches of a step. Rows come in the file's order and start again at its end."""
    train = config.train
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    first = (step * size + rank) * train.micro_batches * train.rows
    batches = []
    for start in range(first, first + train.micro_batches * train.rows, train.rows):
        index_B = torch.arange(start, start + train.rows) % len(rows["input_ids"])
        batch = {name: tensor[index_B].to(torch.cuda.current_device()) for name, tensor in rows.items()}
        ids_BS = batch.pop("input_ids")
        signals = {TEACHER: top_k_signal(batch)} if batch else {}
        batches.append(MicroBatch(ids_BS[:, :-1], ids_BS[:, 1:], signals))
    return batches


def top_k_signal(batch: dict[str, Tensor]) -> TopK:
    """Return the file's top-k of a micro-batch. A signal has one dim for the T = B·S tokens."""
    ids_TK, log_probs_TK = batch["ids"].flatten(0, 1), batch["log_probs"].flatten(0, 1)
    return TopK(ids_TK, log_probs_TK, tail_log_prob_T=batch["tail_log_prob"].flatten())


def report(step: int, sums: list[Tensor], gradient_norm: float) -> None:
    """Print one line, on the first rank of the last stage. gradient_norm: over all ranks, before clipping."""
    if not parallel_state.is_pipeline_last_stage():
        return
    total = torch.stack(sums).sum(0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    if parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0:
        loss, tokens = float(total[0] / total[1]), int(total[1])
        print(f"step {step}: loss {loss:.6f} over {tokens} tokens, gradient norm {gradient_norm:.6f}", flush=True)


def read_config(path: str) -> GkdConfig:
    try:
        content = read_yaml(Path(path).read_text(encoding="utf-8"), path) or {}
    except OSError as error:
        raise ConfigError(None, f"{path}: cannot read the configuration: {error.strerror}") from error
    try:
        config = GkdConfig.model_validate(content)
    except ValidationError as error:
        raise explain(error, content, GkdConfig) from error
    if (config.teacher.model is None) == (config.teacher.top_k is None):
        raise ConfigError("teacher", "expected exactly one of model and top_k")
    for name, model in (("student", config.student), ("teacher.model", config.teacher.model)):
        if model is not None and (model.layers % config.parallel.pipeline or model.heads % config.parallel.tensor):
            raise ConfigError(
                name,
                f"{model.layers} layers over {config.parallel.pipeline} pipeline ranks, {model.heads} heads over "
                f"{config.parallel.tensor} tensor ranks: expected the same whole number on every rank",
            )
    return config


def read_objective(objective: ObjectiveConfig) -> ObjectiveSpec:
    for key in ("tokens", "router_aux_loss"):
        if key in objective.model_fields_set:
            raise ConfigError(
                f"objective.{key}", "has no effect here: every token is a target, and there are no experts"
            )
    try:
        return parse_objective(objective.loss, objective.temperature, objective.scale_by_temperature_squared)
    except ValueError as error:
        raise ConfigError("objective.loss", str(error)) from error


def read_rows(config: GkdConfig) -> dict[str, Tensor]:
    """Return input_ids, and also ids, log_probs and tail_log_prob if the teacher is a file. Raises ConfigError."""
    rows = read_tensors("data", config.data, ("input_ids",))
    ids = rows["input_ids"]
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64) or not ids.numel():
        raise ConfigError(
            "data",
            f"input_ids of shape {tuple(ids.shape)} and dtype {ids.dtype}: expected [N, S + 1] of int32 or int64",
        )
    (count, tokens), smallest, largest = ids.shape, int(ids.min()), int(ids.max())
    if smallest < 0:
        raise ConfigError("data", f"{config.data} has token {smallest}: expected 0 or more")
    if largest >= config.vocabulary:
        raise ConfigError(
            "data", f"{config.data} has token {largest}: expected less than vocabulary, {config.vocabulary}"
        )
    if config.teacher.top_k is not None:
        top_k = read_tensors("teacher.top_k", config.teacher.top_k, ("ids", "log_probs", "tail_log_prob"))
        for name, tensor in top_k.items():
            if tensor.shape[:2] != (count, tokens - 1):
                raise ConfigError(
                    "teacher.top_k",
                    f"{name} of shape {tuple(tensor.shape)}: expected {count} rows of {tokens - 1} tokens, "
                    "as in data",
                )
        rows |= top_k
    return rows


def read_tensors(key: str, path: str, names: Sequence[str]) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(key, f"cannot read {path}: {error}") from error
    if missing := [name for name in names if name not in tensors]:
        raise ConfigError(key, f"{path} has {', '.join(tensors)}, but not {', '.join(missing)}")
    return {name: tensors[name] for name in names}


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
