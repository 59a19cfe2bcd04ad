"""Cases of transformers models as GPTModels of megatron-core under some layout, and their process groups."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kit import NamedCase
from kit.causal_families import of_config, tiny_config
from kit.cuda_is_cpu import cuda_is_cpu
from kit.shard_ranks import Rank
from megatron.core import parallel_state
from transformers import PreTrainedConfig

from stillhouse.megatron.chunks import build_chunks
from stillhouse.megatron.families import FAMILIES
from stillhouse.megatron.model_config import transformer_config
from stillhouse.megatron.weights import Place, WeightTable, weight_table
from stillhouse.models import Decoder
from stillhouse.parallel import Degrees, temporary_groups

MOE, LATENT, GEMMA = "qwen3_moe", "deepseek_v3", "gemma3_text"
#: its frequencies depend on the number of tokens of pretraining, and it scales the products of queries and keys
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
#: every second layer has a window of 5 tokens; only messages.yaml names it
WINDOWS = {"use_sliding_window": True, "layer_types": 2 * ["full_attention", "sliding_attention"]}


@dataclass(frozen=True)
class Case(NamedCase):
    """sizes: of the axes, by the names of `initialize_model_parallel` without `_model_parallel_size`.

    options: of the model's configuration.
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

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

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


def make_tables(rank: Rank, case: Case) -> tuple[list[WeightTable], dict[str, tuple[int, ...]]]:
    """A job: return the tables of all ranks, and the shapes of the full model's tensors."""
    config = model_config(case)
    state = Decoder(of_config(config), verify=False).state_dict()
    with laid_out(case):
        chunks = build_chunks(config, transformer_config(config, **case.sizes, sequence_parallel=case.sequence))
        tables: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tables, weight_table(chunks, config, Place.current()))
    return tables, {name: tuple(tensor.shape) for name, tensor in state.items()}
