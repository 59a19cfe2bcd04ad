"""Knowledge distillation in Megatron-Core, any tensor × pipeline × data parallel layout, without a patch.

    torchrun --nproc-per-node 4 examples/megatron_gkd.py examples/megatron_gkd.yaml

The teacher is a second GPTModel in the same stages: it goes forward through Megatron's own schedule, and its hidden
states stay on the last stage, where the student's output processor compares the two. Or it has spoken before, and a
file has its top-k. What is minimised is Stillhouse's objective section; the two models' weights are drawn here, so
put yours where `build` is called. It runs on GPUs: Megatron-Core asks for CUDA devices even where there are none
(tests/cuda_is_cpu.py answers it in this repository's tests).

`data` and `teacher.top_k` are safetensors files: input_ids [N, S + 1]; ids and log_probs [N, S, K], tail_log_prob
[N, S], of the same N rows. B rows of a micro-batch, S tokens, K entries.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from stillhouse.config.explain import explain
from stillhouse.config.objective import ObjectiveConfig
from stillhouse.config.section import PathText, Section
from stillhouse.config.yaml_text import read_yaml
from stillhouse.models.megatron import MegatronProcessor
from stillhouse.models.processors import DistillTargets, distillation, full_vocab
from stillhouse.objective import Signal, TopK
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
    micro_batches: int = Field(default=4, ge=1, description="Of each data rank in a step.")
    rows: int = Field(default=2, ge=1, description="Of a micro-batch.")
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
    signal: Signal | None = None


def main(path: str) -> None:
    config = read_config(path)
    spec, rows = recipe_of(config.objective), read_rows(config)
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
    train(config, spec, rows, wrap(student), teacher)
    dist.destroy_process_group()


def train(
    config: GkdConfig,
    spec: ObjectiveSpec,
    rows: dict[str, Tensor],
    student: DistributedDataParallel,
    teacher: GPTModel | None,
) -> None:
    made = OptimizerConfig(optimizer="adam", lr=config.train.learning_rate, clip_grad=1.0)
    optimizer = get_megatron_optimizer(made, [student])
    processor = distillation(spec, chunk_tokens=config.objective.chunk_tokens)
    hook = MegatronProcessor(student, processor, vocab_size=config.vocabulary)
    ear = None if teacher is None else MegatronProcessor(teacher, full_vocab, vocab_size=config.vocabulary)
    for step in range(config.train.steps):
        batches = micro_batches(config, rows, step)
        signals: Sequence[Signal | None] = [each.signal for each in batches]
        if teacher is not None and ear is not None and spec.needs_teacher:
            signals = listen(teacher, ear, batches) or signals
        contexts = [
            DistillTargets(each.labels_BS, signal=signal) for each, signal in zip(batches, signals, strict=True)
        ]
        student.zero_grad_buffer()
        optimizer.zero_grad()
        sums = schedule(student, hook, batches, contexts)
        optimizer.step()
        report(step, sums)


@torch.no_grad()
def listen(teacher: GPTModel, ear: MegatronProcessor, batches: Sequence[MicroBatch]) -> list[Signal]:
    """What the teacher says of each micro-batch, on the last stage: hidden states and head, never logits."""
    return schedule(teacher, ear, batches, [None] * len(batches), forward_only=True, collect_non_loss_data=True)


def schedule(
    model: torch.nn.Module,
    hook: MegatronProcessor,
    batches: Sequence[MicroBatch],
    contexts: Sequence[Any],
    **how: bool,
) -> list[Any]:
    """Megatron's own. Of each micro-batch, on the last stage, what `finish` keeps."""

    def forward_step(data: Iterator[tuple[MicroBatch, Any]], model: torch.nn.Module) -> tuple[Any, Any]:
        batch, context = next(data)
        positions_BS = torch.arange(batch.input_ids_BS.shape[1], device=batch.input_ids_BS.device)[None]
        # the local layers want a mask for what is no causal attention; there is none here
        options = {"output_processor": hook, "output_processor_context": context}
        return model(batch.input_ids_BS, positions_BS, None, **options), finish

    def finish(output: Any, non_loss_data: bool = False) -> Any:
        """Loss as a sum, its tokens, by whose sum over all ranks Megatron divides the gradient, and what to log."""
        if non_loss_data:
            return output
        counted = output.metrics["tokens"].int()
        return output.loss, counted, torch.stack([output.loss.detach(), counted.float()])

    (rows, tokens) = batches[0].input_ids_BS.shape
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(zip(batches, contexts, strict=True)),
        model=model,
        num_microbatches=len(batches),
        seq_length=tokens,
        micro_batch_size=rows,
        **{"forward_only": False} | how,
    )


def build(config: GkdConfig, shape: ModelSection, tokens: int, seed: int) -> GPTModel:
    """This rank's part, with weights drawn from `seed`."""
    layout = config.parallel
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    made = TransformerConfig(
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
        # losses are sums over tokens: divided once, by their number in the whole step
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    padded = -(-config.vocabulary // layout.tensor) * layout.tensor
    model = GPTModel(
        made,
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
    """This data rank's, in the order of the file, over and over."""
    train = config.train
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    first = (step * size + rank) * train.micro_batches * train.rows
    made = []
    for start in range(first, first + train.micro_batches * train.rows, train.rows):
        index_B = torch.arange(start, start + train.rows) % len(rows["input_ids"])
        ids_BS, *said = (rows[name][index_B].to(torch.cuda.current_device()) for name in rows)
        # each of [B, S, …] as [T, …]
        signal = TopK(*(each.flatten(0, 1) for each in said[:2]), tail_log_prob_T=said[2].flatten()) if said else None
        made.append(MicroBatch(ids_BS[:, :-1], ids_BS[:, 1:], signal))
    return made


def report(step: int, sums: list[Tensor]) -> None:
    """One line, of the last stage's first rank."""
    if not parallel_state.is_pipeline_last_stage():
        return
    whole = torch.stack(sums).sum(0)
    dist.all_reduce(whole, group=parallel_state.get_data_parallel_group())
    if parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0:
        print(f"step {step}: loss {whole[0] / whole[1]:.4f} over {int(whole[1])} tokens", flush=True)


def read_config(path: str) -> GkdConfig:
    try:
        given = read_yaml(Path(path).read_text(encoding="utf-8"), path) or {}
    except OSError as error:
        raise ConfigError(None, f"{path}: cannot read the configuration: {error.strerror}") from error
    try:
        config = GkdConfig.model_validate(given)
    except ValidationError as error:
        raise explain(error, given, GkdConfig) from error
    if (config.teacher.model is None) == (config.teacher.top_k is None):
        raise ConfigError("teacher", "expected model or top_k, one of them")
    for name, model in (("student", config.student), ("teacher.model", config.teacher.model)):
        if model is not None and (model.layers % config.parallel.pipeline or model.heads % config.parallel.tensor):
            raise ConfigError(
                name,
                f"{model.layers} layers over pipeline {config.parallel.pipeline}, {model.heads} heads over tensor "
                f"{config.parallel.tensor}: expected whole numbers of each",
            )
    return config


def recipe_of(objective: ObjectiveConfig) -> ObjectiveSpec:
    for key in ("tokens", "router_aux_loss"):
        if key in objective.model_fields_set:
            raise ConfigError(
                f"objective.{key}", "has no effect here: every token is a target, and no layer has experts"
            )
    try:
        return parse_objective(objective.loss, objective.temperature, objective.scale_by_temperature_squared)
    except ValueError as error:
        raise ConfigError("objective.loss", str(error)) from error


def read_rows(config: GkdConfig) -> dict[str, Tensor]:
    """input_ids, and ids, log_probs and tail_log_prob if the teacher is a file. Raises ConfigError."""
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
        said = read_tensors("teacher.top_k", config.teacher.top_k, ("ids", "log_probs", "tail_log_prob"))
        for name, each in said.items():
            if each.shape[:2] != (count, tokens - 1):
                raise ConfigError(
                    "teacher.top_k",
                    f"{name} of shape {tuple(each.shape)}: expected {count} rows of {tokens - 1} tokens, as data has",
                )
        rows |= said
    return rows


def read_tensors(key: str, path: str, names: Sequence[str]) -> dict[str, Tensor]:
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(key, f"cannot read {path}: {error}") from error
    if missing := [name for name in names if name not in found]:
        raise ConfigError(key, f"{path} has {', '.join(found)}: expected {', '.join(missing)} as well")
    return {name: found[name] for name in names}


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
