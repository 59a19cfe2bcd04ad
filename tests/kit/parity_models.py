"""The models of `parity_cases`: a small student of a family, and a teacher of another depth and width."""

from collections.abc import Callable
from typing import Any

import torch
from kit.causal_families import CAUSAL, of_config, tiny_config
from kit.families import FAMILIES, build
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from stillhouse.models import Decoder, HiddenPair, add_lora, balance_routers, match_hidden
from stillhouse.models.hidden_states import HiddenMatch
from stillhouse.objective import TopK

VOCABULARY = 251
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.2,
}
#: families with parameters between sharded matrices that their tensor-parallel plans do not name
PARTIAL: dict[str, dict[str, Any]] = {
    "apertus": {},  # the activation's alpha_p and alpha_n
    "glm4_moe": {  # q_norm and k_norm
        "use_qk_norm": True,
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def top_k(ids_BS: Tensor, entries: int) -> TopK:
    """A stored signal. Each token's ids depend on it alone, so that a context rank's part has the same ids."""
    ids_TK = (ids_BS.flatten()[:, None] + 31 * torch.arange(entries)) % VOCABULARY
    log_probs_K = torch.log_softmax(-torch.arange(entries).float(), 0) + torch.tensor(0.9).log()
    return TopK(ids_TK, log_probs_K.repeat(len(ids_TK), 1))


def with_hidden(build: Callable[[], Decoder], teacher: PreTrainedConfig, pairs: tuple[HiddenPair, ...]) -> Decoder:
    student = build()
    match_hidden(student, pairs, teacher.num_hidden_layers, teacher.hidden_size)
    student.layer_loss(HiddenMatch).initialize(seed=3)
    return student


def configurations(
    family: str, depth: int = 0, *, few_layers: bool = False
) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Return the student's and the teacher's configuration, which have different depths and widths.

    depth: number of the student's layers; 0: the family's default. few_layers: whether the defaults are 2 layers of a
    student (if the family is not one of `CAUSAL` only) and 3 of a teacher, too few for a pipeline
    """
    teacher_layers = 3 if few_layers else 6
    if family == "llama":
        layers = depth or (2 if few_layers else 5)
        small = LlamaConfig(**SHAPE, hidden_size=48, num_hidden_layers=layers, tie_word_embeddings=True)
        return small, LlamaConfig(**SHAPE, hidden_size=64, num_hidden_layers=teacher_layers)
    if family == "qwen3_moe":
        experts = SHAPE | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16}
        layers = 2 if few_layers else 4
        small = Qwen3MoeConfig(**experts, hidden_size=48, num_hidden_layers=layers, mlp_only_layers=[1])
        return small, Qwen3MoeConfig(**experts, hidden_size=64, num_hidden_layers=layers, norm_topk_prob=True)
    if family in PARTIAL:
        small = AutoConfig.for_model(family, **SHAPE, **PARTIAL[family], hidden_size=48, num_hidden_layers=2)
        return small, qwen3(64, min(teacher_layers, 4))
    if family in CAUSAL and family not in (*FAMILIES, "qwen3"):
        small = tiny_config(family)
        for dropout in {"resid_pdrop", "attn_pdrop", "embd_pdrop"} & vars(small).keys():
            setattr(small, dropout, 0.0)
        return small, qwen3(64, min(teacher_layers, 4))
    if family != "qwen3":
        other = [build(family).config, build(family).config]
        for config in other:
            # dropout draws other numbers on every layout, and no tensor-parallel plan has a norm over all heads
            config.resid_pdrop, config.use_qk_norm = 0.0, False
        return other[0], other[1]
    return qwen3(48, depth or (2 if few_layers else 4)), qwen3(64, teacher_layers)


def qwen3(width: int, layers: int) -> PreTrainedConfig:
    return Qwen3Config(**SHAPE, hidden_size=width, num_hidden_layers=layers, head_dim=16, tie_word_embeddings=False)


def build_student(config: PreTrainedConfig, mtp: str = "") -> Decoder:
    student = decoder(config, 0)
    if mtp:
        from stillhouse.models.mtp import add_mtp, freeze_main  # needs transformers 5.20

        add_mtp(student, 2, is_new=True)
        assert student.mtp is not None
        student.mtp.initialize(student.pretrained, 3)
        if mtp == "heads":
            freeze_main(student)
    elif config.model_type == "qwen3_moe":
        balance_routers(student)
    return student


def decoder(config: PreTrainedConfig, seed: int) -> Decoder:
    if config.model_type in {*FAMILIES, *PARTIAL, "gemma3_text"}:
        torch.manual_seed(seed)
        return Decoder(AutoModelForCausalLM.from_config(config), verify=False)
    return Decoder(of_config(config, seed=seed), verify=False)


def with_lora(config: PreTrainedConfig, dtype: torch.dtype) -> Decoder:
    """Add a LoRA of rank 5, which no tensor-parallel degree of the layouts divides."""
    student = build_student(config).to(dtype)
    # where a family has dense layers and experts of the same names, peft confuses the two
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if config.model_type == "qwen3_moe" else "all-linear"
    add_lora(student, r=5, alpha=10.0, targets=targets)
    return student
