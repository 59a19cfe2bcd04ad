"""Jobs for ranks: a transformers model as GPTModels of megatron-core under some layout, against transformers itself.

B rows of one document each, S tokens per row, D width, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.causal_families import of_config, tiny_config
from kit.cuda_is_cpu import cuda_is_cpu
from kit.shard_ranks import Rank
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from stillhouse.engine.loss import StepLoss
from stillhouse.megatron.chunks import build_chunks
from stillhouse.megatron.families import FAMILIES
from stillhouse.megatron.model_config import transformer_config
from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.megatron.rows import context_positions
from stillhouse.megatron.weights import Place, WeightTable, copy_tensors, gather, require_full_coverage, weight_table
from stillhouse.models import Decoder
from stillhouse.models.processors import DistillTargets
from stillhouse.objective import ObjectiveOutput, OutputHead
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel import Degrees, temporary_groups

B, S, MICRO_BATCHES = 2, 12, 2
MOE, LATENT, GEMMA = "qwen3_moe", "deepseek_v3", "gemma3_text"


@dataclass(frozen=True)
class Case:
    """sizes: of the axes, by the names of `initialize_model_parallel` without `_model_parallel_size`.

    options: of the model's configuration. settings: further fields of `TransformerConfig`.
    """

    model_type: str
    tied: bool = False
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1  # model chunks per pipeline rank
    expert: int = 1
    data: int = 1
    replicas: int = 1  # of the optimizer's shards, among the data ranks
    context: int = 1
    sequence: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def name(self) -> str:
        degrees = {
            name: getattr(self, name)
            for name in ("tensor", "pipeline", "chunks", "context", "expert", "data", "replicas")
        }
        parts = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        flags = ["sequence"] * self.sequence + ["tied"] * self.tied + [*self.options, *self.settings]
        return "-".join([self.model_type, *parts, *flags])

    @property
    def degrees(self) -> Degrees:
        return Degrees(
            pipeline=self.pipeline,
            fsdp=self.data // self.replicas,
            replicate=self.replicas,
            context=self.context,
            tensor=self.tensor,
            expert=self.expert,
        )

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.chunks if self.chunks > 1 else None,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.degrees.experts if FAMILIES[self.model_type].experts else 1,
            "expert_tensor_parallel_size": 1,
        }


@dataclass
class Difference:
    """Differences from transformers: absolute for hidden states and logits, relative for each gradient.

    hidden, logits: None on ranks without the last stage. reloaded: whether weights that were loaded and gathered are
    the same to the bit.
    """

    hidden: float | None
    logits: float | None
    gradients: dict[str, float]
    reloaded: bool


def save(folder: Path, case: Case) -> Path:
    """Save a case's model; return the folder."""
    of_config(model_config(case)).save_pretrained(folder)
    return folder


def model_config(case: Case) -> PreTrainedConfig:
    """Return a tiny configuration with grouped heads, an odd vocabulary and, if the family has it, a wide head."""
    options: dict[str, Any] = {"num_hidden_layers": 4, "tie_word_embeddings": case.tied, "use_sliding_window": False}
    if case.model_type not in ("qwen2", "deepseek_v3"):
        options["head_dim"] = 12
    if case.model_type == "gemma2":
        options |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 7}
        options["sliding_window"] = 5
    if case.model_type == "gpt_oss":
        options["swiglu_limit"] = 0.2  # far within the range of the projections
    if case.model_type == "deepseek_v3":
        options |= {"qk_nope_head_dim": 12, "v_head_dim": 16, "n_group": 2}
    if case.model_type not in ("qwen2", "qwen3", "qwen3_moe"):
        options.pop("use_sliding_window")
    if case.model_type in ("qwen2", "qwen3"):
        options["layer_types"] = 4 * ["full_attention"]
    return tiny_config(case.model_type, **options | dict(case.options))


@contextmanager
def laid_out(case: Case) -> Iterator[None]:
    """Make Megatron's process groups over all ranks, and destroy them at the end."""
    with temporary_groups(), cuda_is_cpu():
        parallel_state.initialize_model_parallel(**case.sizes, num_distributed_optimizer_instances=case.replicas)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


class Compared:
    """A processor that records how far hidden states and logits are from the expected ones, then returns the loss."""

    def __init__(self, hidden: Mapping[int, Tensor], logits: Mapping[int, Tensor], softcap: float | None):
        self.expected, self.hidden, self.logits, self.softcap = (hidden, logits), 0.0, 0.0, softcap
        self._loss = StepLoss(parse_objective("cross_entropy"))

    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: tuple[int, DistillTargets], depth: int = 0
    ) -> ObjectiveOutput:
        number, targets = context
        positions_S = context_positions(S)
        hidden_BSD, logits_BSV = (expected[number][:, positions_S] for expected in self.expected)
        shard = slice(None) if head.shard is None else slice(head.shard.start, head.shard.stop)
        logits_BSV = logits_BSV[..., shard]
        made = (hidden_states @ head.weight_VD.T)[..., : logits_BSV.shape[-1]]
        made = made if head.softcap is None else head.softcap * torch.tanh(made / head.softcap)
        self.hidden = max(self.hidden, float((hidden_states - hidden_BSD).detach().abs().max()))
        self.logits = max(self.logits, float((made - logits_BSV).detach().abs().max()))
        return self._loss(hidden_states=hidden_states, head=head, context=targets)


def compare(rank: Rank, case: Case) -> Difference:
    """A job: load a transformers model, run one step with Megatron's schedule, and compare with transformers."""
    config = model_config(case)
    decoder = Decoder(of_config(config), verify=False)
    weights = {name: tensor.detach() for name, tensor in decoder.state_dict().items()}
    ids = [ids_of(number) for number in range(MICRO_BATCHES * case.data)]
    hidden, logits, gradients = reference(decoder, ids)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with laid_out(case):
        options = case.sizes | {"sequence_parallel": case.sequence, **case.settings}
        transformer = transformer_config(config, **options)
        chunks = build_chunks(config, transformer)
        table = weight_table(chunks, config, Place.current())
        require_full_coverage(table, shapes)
        copy_tensors(chunks, table, weights.items())
        loaded = gather(chunks, table, shapes, lambda tensor: tensor)
        processor = Compared(dict(enumerate(hidden)), dict(enumerate(logits)), decoder.head.rule.softcap)
        first = parallel_state.get_data_parallel_rank() * MICRO_BATCHES
        step(chunks, processor, ids[first : first + MICRO_BATCHES], first, config.vocab_size)
        made = gather(chunks, table, shapes, lambda tensor: getattr(tensor, "main_grad", None))
        is_last = any(chunk.post_process for chunk in chunks)
    scale = 1e-3 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    return Difference(
        processor.hidden if is_last else None,
        processor.logits if is_last else None,
        {name: apart(made[name], gradient, scale) for name, gradient in gradients.items()},
        loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights),
    )


def make_tables(rank: Rank, case: Case) -> tuple[list[WeightTable], dict[str, tuple[int, ...]]]:
    """A job: return the tables of all ranks, and the shapes of the full model's tensors."""
    config = model_config(case)
    state = Decoder(of_config(config), verify=False).state_dict()
    with laid_out(case):
        chunks = build_chunks(config, transformer_config(config, **case.sizes, sequence_parallel=case.sequence))
        tables: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tables, weight_table(chunks, config, Place.current()))
    return tables, {name: tuple(tensor.shape) for name, tensor in state.items()}


def ids_of(number: int) -> Tensor:
    """Return the tokens [B, S + 1] of a micro-batch."""
    return torch.randint(251, (B, S + 1), generator=torch.Generator().manual_seed(number))


def reference(decoder: Decoder, ids: list[Tensor]) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Return transformers' hidden states and logits of each micro-batch, and the gradient of the summed loss."""
    hidden, logits = [], []
    for ids_BS in ids:
        hidden.append(decoder(ids_BS[:, :-1], head=False))
        logits.append(decoder.head(hidden[-1], None, None))
        F.cross_entropy(logits[-1].flatten(0, 1), ids_BS[:, 1:].flatten(), reduction="sum").backward()
    gradients = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    return [one.detach() for one in hidden], [one.detach() for one in logits], gradients


def step(chunks: list[Any], processor: Compared, ids: list[Tensor], first: int, vocabulary: int) -> None:
    """Add the gradient of the summed loss to each parameter's `main_grad`, summed over ranks by Megatron."""
    config = chunks[0].config
    wrapped = [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    config.finalize_model_grads_func = lambda models, tokens, **options: finalize_model_grads(models, None, **options)
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    numbered = list(enumerate(ids, first))

    def forward_step(data: Iterator[tuple[int, Tensor]], model: Any) -> tuple[Any, Any]:
        number, ids_BS = next(data)
        positions_S = context_positions(S)
        hook = MegatronProcessor(model, processor, vocab_size=vocabulary, softcap=processor.softcap)
        context = number, DistillTargets(ids_BS[:, 1:][:, positions_S])
        inputs = {"output_processor": hook, "output_processor_context": context}
        return model(ids_BS[:, positions_S], positions_S.expand(B, -1), None, **inputs), loss_of

    def loss_of(output: ObjectiveOutput) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return output.loss.clone(), torch.tensor(1), {}

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(numbered) for _ in wrapped] if len(wrapped) > 1 else iter(numbered),
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(ids),
        seq_length=S,
        micro_batch_size=B,
        forward_only=False,
    )


def apart(actual: Tensor, expected: Tensor, least: Tensor) -> float:
    return float((actual - expected).norm() / torch.maximum(expected.norm(), least))
