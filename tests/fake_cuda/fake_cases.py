"""The cases of the suite on fake CUDA tensors: objectives in one process, and layouts with one objective."""

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig

from stillhouse.config import RunConfig, load_config

ROW, DOCUMENT = 256, 64
SIZES: dict[str, Any] = {
    **{"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": True},
}
LOSS = "0.3*cross_entropy + 0.7*jsd(0.5)"
#: replaced by the folders of the models
STUDENT, TEACHER_MODEL = "STUDENT", "TEACHER"
TEACHER = {"model": TEACHER_MODEL}
SERVED = {"url": "http://127.0.0.1:1", "top_k": 16}
ROLLOUT, POLICY = {"max_new_tokens": 16}, {"objective.loss": "policy_gradient(clip_low=0.2)"}
#: degrees of the layout whose product is the number of processes
_DEGREES = ("fsdp", "replicate", "tensor", "pipeline", "context")


@dataclass(frozen=True)
class Case:
    """One rank of a job, which runs three steps.

    settings: of the configuration, beyond those in `config`. layers: of student and teacher. is_moe: whether the
    student has experts.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    layers: int = 1
    is_moe: bool = False
    document_tokens: int = DOCUMENT

    @property
    def processes(self) -> int:
        return prod(self._degree(name) for name in _DEGREES)

    def _degree(self, name: str) -> int:
        return int(self.settings.get(f"parallel.{name}", 1))

    @property
    def micro_batches(self) -> int:
        """The number of the rank's micro-batches in the last step."""
        return 2 * self._degree("pipeline")

    @property
    def tokens_of_steps(self) -> list[int]:
        """The first step, a step with as few micro-batches as possible, and the counted step with twice as many."""
        ranks = self._degree("pipeline") * self._degree("fsdp") * self._degree("replicate")
        return [ROW * ranks * times for times in (1, 1, 2)]  # a micro-batch has one row

    def config(self, folder: Path) -> RunConfig:
        models = {name: str(folder / f"{name}{self.layers}{self.is_moe}") for name in ("student", "teacher")}
        for name, model in models.items():
            _config(name == "student" and self.is_moe, self.layers, name == "teacher").save_pretrained(model)
        settings = {
            "student": {"model": STUDENT},
            "teacher": TEACHER,
            "data": {"train": "none.jsonl", "eval": 0, "max_tokens": ROW},
            "objective.loss": LOSS,
            "train": {"steps": 3, "micro_batch_tokens": ROW, "tokens_per_step": ROW},
            "parallel.fsdp": 1,
            "device": "cuda",
            "out": str(folder / "out"),
        } | self.settings
        nested: dict[str, Any] = {}
        for key, value in settings.items():
            *sections, name = key.split(".")
            target = nested
            for section in sections:
                target = target.setdefault(section, {})
            if value is not None:
                target[name] = _with_models(value, models)
        return load_config(None, settings=nested)


def _with_models(value: Any, models: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _with_models(inner, models) for key, inner in value.items()}
    return models.get(str(value).lower(), value) if isinstance(value, str) else value


def _config(is_moe: bool, layers: int, is_wide: bool) -> Any:
    sizes = SIZES | {"num_hidden_layers": layers, "hidden_size": 96 if is_wide else 64}
    if not is_moe:
        return Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"])
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeConfig(**sizes, **experts, architectures=["Qwen3MoeForCausalLM"])


def _pipeline(schedule: str, rank: int, layers: int = 2) -> Case:
    return Case({"parallel.pipeline": 2, "parallel.schedule": schedule}, rank, layers)


#: how the signals come, and the losses that need them
OBJECTIVES: dict[str, Case] = {
    "forward_kl": Case({"objective.loss": "forward_kl"}),
    "jsd": Case({"objective.loss": "jsd(0.5)"}),
    "cross_entropy and jsd": Case(),
    "compiled": Case({"objective.kernels": "compiled"}),
    "top_k": Case({"teacher": SERVED | {"signal": "top_k"}}),
    "sampled": Case({"teacher": SERVED | {"signal": "sampled"}, "objective.loss": "forward_kl"}),
    "mixture": Case({"teacher": None, "teachers": {"one": TEACHER, "two": TEACHER}}),
    "on-policy": Case({"objective.loss": "reverse_kl", "rollout": ROLLOUT}),
    "policy gradient": Case(POLICY | {"teacher": None, "rollout": ROLLOUT | {"reward": "rewards:one"}}),
    "teacher_kl": Case({"objective.loss": "policy_gradient(teacher_kl=1)", "rollout": ROLLOUT}),
    "student's average": Case({"teacher": None, "teachers": {"one": TEACHER, "average": {"student": "ema"}}}),
    "hidden": Case({"objective.hidden": [{"student": 0, "teacher": 0}]}),
    "adapter": Case({"student.adapter": {"r": 8}, "teacher": {"model": STUDENT}}),
    "offloaded teacher": Case({"teacher.offload": True}),
    "experts": Case({"objective.router_aux_loss": 0.01}, is_moe=True),
    "multi-token prediction": Case({"student.mtp": {"depths": 1}}),
    "muon": Case({"train.optimizer": "muon"}),
    "recomputed": Case({"train.activation_checkpointing": True}),
}
LAYOUTS: dict[str, Case] = {
    "fsdp": Case({"parallel.fsdp": 2}),
    "tensor": Case({"parallel.tensor": 2}),
    "context": Case({"parallel.context": 2}),
    "expert": Case({"parallel.fsdp": 2, "parallel.expert": 2}, is_moe=True),
    "offload": Case({"parallel.fsdp": 2, "parallel.offload": True}),
    "fsdp, gathered in bfloat16": Case({"parallel.fsdp": 2, "parallel.gather_dtype": "bfloat16"}),
    "fsdp, adapter": Case({"parallel.fsdp": 2, "student.adapter": {"r": 8}, "teacher": {"model": STUDENT}}),
    "fsdp × tensor": Case({"parallel.fsdp": 2, "parallel.tensor": 2}),
    "fsdp × pipeline": Case({"parallel.fsdp": 2, "parallel.pipeline": 2}, rank=3, layers=2),
    "replicate × fsdp": Case({"parallel.fsdp": 2, "parallel.replicate": 2}),
    "1f1b, first rank": _pipeline("1f1b", 0),
    "1f1b, last rank": _pipeline("1f1b", 1),
    "gpipe": _pipeline("gpipe", 1),
    "interleaved": _pipeline("interleaved", 1, layers=4),
    "zero_bubble": _pipeline("zero_bubble", 1, layers=4),
    "zbv": _pipeline("zbv", 0, layers=4),
}
CASES = OBJECTIVES | LAYOUTS
#: the cases that wait once or more per micro-batch, and why
PER_MICRO_BATCH = {
    "expert": "transformers sends tokens to experts in messages whose sizes the host reads",
    "offload": "FSDP adds a micro-batch's gradient to that of the earlier ones in host memory",
}
