"""The runs that are measured: each has a name, models, data and the settings in which it differs from `SETTINGS`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.unchanged.inputs import REWARDS, Model, write_json, write_prompts, write_texts

#: under a layout, the order of sums is that of gloo's messages
LAYOUT_TOLERANCE = 1e-6
#: a server computes together what has arrived by then, and the sums of a larger batch are rounded differently
SERVED_TOLERANCE = 1e-5
STEPS = 5
MAX_TOKENS = 32
#: settings of every run, by dotted key
SETTINGS: dict[str, Any] = {
    "student.model": "student",
    "teacher.model": "teacher",
    "data.train": "train.jsonl",
    "data.eval": "eval.jsonl",
    "data.max_tokens": MAX_TOKENS,
    "objective.loss": "0.3*cross_entropy + 0.7*jsd(0.5)",
    "train.tokens_per_step": 4 * MAX_TOKENS,
    "train.micro_batch_tokens": 2 * MAX_TOKENS,
    "train.steps": STEPS,
    "train.learning_rate": 1e-3,
    "train.precision": "fp32",
    "device": "cpu",
    "out": "out",
}


@dataclass(frozen=True)
class Case:
    """A run of small models.

    models: the folders of the run's models. without: keys of SETTINGS that the run does not have. cache: options of
    `stillhouse cache`, whose cache is then the teacher; None: no cache. served: the teacher is a `stillhouse serve`.
    command: distill or parity. longest: words of a document. compiled: the vocabulary is large enough for
    torch.compile, so that compilations are counted and collectives are not.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    models: Mapping[str, Model] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    prompts: bool = False
    cache: tuple[str, ...] | None = None
    served: bool = False
    command: str = "distill"
    longest: int = 8
    compiled: bool = False

    def write(self, folder: Path) -> None:
        """Write the models, the data and run.yaml. JSON is YAML, too."""
        folder.mkdir(parents=True)
        for name, model in (MODELS | dict(self.models)).items():
            model.write(folder / name)
        for name, records, seed in (("train.jsonl", 40, 0), ("eval.jsonl", 8, 1)):
            if self.prompts:
                write_prompts(folder / name, records)
            else:
                write_texts(folder / name, records, seed, self.longest)
        (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
        write_json(folder / "run.yaml", sections(self.values()))

    @property
    def tolerance(self) -> float:
        """The largest relative difference of numbers between two recordings."""
        if self.served:
            return SERVED_TOLERANCE
        return LAYOUT_TOLERANCE if self.processes > 1 else 0.0

    def values(self) -> dict[str, Any]:
        values = SETTINGS | dict(self.settings)
        return {key: value for key, value in values.items() if key not in self.without}


def sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a configuration from values by dotted key."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        section = result
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return result


MODELS = {"student": Model("llama", seed=1), "teacher": Model("qwen3", seed=2)}
MOE = {"student": Model("qwen3_moe", seed=1)}
DEEP = {"student": Model("llama", seed=1, layers=4), "teacher": Model("qwen3", seed=2, layers=4)}
DEEP_MOE = DEEP | {"student": Model("qwen3_moe", seed=1, layers=4)}
MTP = {"student": Model("qwen3", seed=1)}
TWO_TEACHERS = {"math": Model("qwen3", seed=5), "code": Model("llama", seed=6)}
WIDE = {name: Model(model.family, model.seed, vocabulary=2560) for name, model in MODELS.items()}
WIDER = {name: Model(model.family, model.seed, vocabulary=5120) for name, model in MODELS.items()}
OTHER_TOKENIZER = {"teacher": Model("qwen3", seed=2, tokenizer="other")}


def medium_model(width: int, layers: int, seed: int) -> Model:
    shape = {
        "hidden_size": width,
        "intermediate_size": width * 8 // 3 // 32 * 32,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
    }
    return Model("llama", seed, layers, tied=True, vocabulary=32768, options=tuple(shape.items()))


MEDIUM = Case(
    {
        "data.max_tokens": 512,
        "data.eval": 0,
        "train.tokens_per_step": 1024,
        "train.micro_batch_tokens": 1024,
        "train.steps": 2,
        "train.learning_rate": 1e-5,
    },
    models={"student": medium_model(224, 4, 1), "teacher": medium_model(512, 7, 2)},
    longest=250,
    compiled=True,
)

NO_TEACHER = ("teacher.model",)
LORA = {"student.adapter": {"r": 4, "alpha": 8}, "train.learning_rate": 1e-2}
PAIRS = [
    {"student": 0, "teacher": 0, "loss": "mse", "scale": 0.3},
    {"student": 1, "teacher": 1, "loss": "cosine", "scale": 0.2},
]
BALANCE = {"objective.router_aux_loss": 0.01}
TEACHERS: dict[str, Any] = {
    "teachers.math": {"model": "math"},
    "teachers.code": {"model": "code", "weight": 2.0},
}
ROUTE = TEACHERS | {"teachers.route": "subject"}
GOLD = {"teacher.cross_tokenizer": "gold", "teacher.top_k": 16}
ROLLOUT = {
    "objective.loss": "reverse_kl",
    "rollout.max_new_tokens": 11,
    "rollout.samples_per_prompt": 2,
    "rollout.prompts_per_step": 4,
    "data.max_tokens": 37,
    "train.tokens_per_step": 37,
    "train.micro_batch_tokens": 74,
}
REWARD = {"objective.loss": "policy_gradient + 0.1*reverse_kl", "rollout.reward": "rewards:length"}


def pipeline(schedule: str = "1f1b", **settings: Any) -> dict[str, Any]:
    return {"parallel": {"pipeline": 2, "schedule": schedule}} | settings


ONE_PROCESS: dict[str, Case] = {
    "dense": Case(),
    "tied": Case(models={"student": Model("llama", seed=1, tied=True)}),
    "bf16": Case(
        {
            "train.precision": "bf16",
            "objective.temperature": 2.0,
            "objective.scale_by_temperature_squared": True,
            "objective.loss": "0.2*cross_entropy + 0.5*forward_kl + 0.3*reverse_kl + 0.1*skew_forward_kl(0.1)",
        }
    ),
    "compiled": Case({"objective.loss": "0.3*cross_entropy + 0.7*jsd(0.5)"}, models=WIDE, compiled=True),
    "medium": MEDIUM,
    "recomputed_muon": Case({"train.activation_checkpointing": True, "train.optimizer": "muon"}),
    "moe": Case(BALANCE, models=MOE),
    "lora": Case(LORA),
    "lora_base_is_teacher": Case(LORA | {"teacher.model": "student"}),
    "hidden": Case({"objective.hidden": PAIRS}),
    "mtp": Case({"student.mtp": {"depths": 2, "scale": 0.3}}, models=MTP),
    "mtp_signal_student": Case(
        {"student.mtp": {"depths": 1, "signal": "student", "objective": "forward_kl"}}, models=MTP
    ),
    "mtp_family": Case(
        {"student.mtp": {"depths": 1, "init": "new"}}, models={"student": Model("glm4_moe", seed=1)}
    ),
    "teachers_route": Case(ROUTE, models=TWO_TEACHERS, without=NO_TEACHER),
    "teachers_distributions": Case(
        TEACHERS | {"teachers.sum": "distributions"}, models=TWO_TEACHERS, without=NO_TEACHER
    ),
    "teachers_divergences": Case(
        TEACHERS | {"teachers.sum": "divergences"}, models=TWO_TEACHERS, without=NO_TEACHER
    ),
    "teacher_ema": Case({"teachers.slow": {"student": "ema", "ema_decay": 0.5}}, without=NO_TEACHER),
    "teacher_live": Case(
        {"teachers.self": {"student": "live", "prefix": "{answer} "}}, without=NO_TEACHER
    ),
    "cross_tokenizer_gold": Case(GOLD, models=OTHER_TOKENIZER),
    "cache_hidden": Case(cache=()),
    "cache_top_k": Case(cache=("--signal", "top_k", "--top-k", "8")),
    "cache_sampled": Case({"objective.loss": "forward_kl"}, cache=("--signal", "sampled")),
    "served_hidden": Case(served=True),
    "served_top_k": Case({"teacher.signal": "top_k", "teacher.top_k": 8}, served=True),
    "on_policy_sync": Case(ROLLOUT, prompts=True),
    "on_policy_one_step_off": Case(ROLLOUT | {"rollout.schedule": "one_step_off"}, prompts=True),
    "on_policy_reward": Case(ROLLOUT | REWARD, prompts=True),
}  # fmt: skip

LAYOUTS: dict[str, Case] = {
    "fsdp_2": Case({"parallel.fsdp": 2}, 2),
    "fsdp_2_bf16": Case({"parallel": {"fsdp": 2, "gather_dtype": "bfloat16"}, "train.precision": "bf16"}, 2),
    "fsdp_2_lora": Case(LORA | {"parallel.fsdp": 2}, 2),
    "fsdp_2_on_policy": Case(ROLLOUT | {"parallel.fsdp": 2}, 2, prompts=True),
    "fsdp_2_teacher_tensor_2": Case({"parallel.fsdp": 2, "teacher.parallel": {"tensor": 2}}, 2),
    "expert_2": Case(BALANCE | {"parallel": {"fsdp": 2, "expert": 2}}, 2, MOE),
    "tensor_2": Case({"parallel.tensor": 2}, 2),
    "tensor_2_compiled": Case({"parallel.tensor": 2}, 2, WIDER, compiled=True),
    "context_2": Case({"parallel.context": 2}, 2),
    "pipeline_2_1f1b": Case(pipeline(), 2, DEEP),
    "pipeline_2_gpipe": Case(pipeline("gpipe"), 2, DEEP),
    "pipeline_2_interleaved": Case(pipeline("interleaved"), 2, DEEP),
    "pipeline_2_zero_bubble": Case(pipeline("zero_bubble"), 2, DEEP),
    "pipeline_2_zbv": Case(pipeline("zbv"), 2, DEEP),
    "pipeline_2_route": Case(pipeline() | ROUTE, 2, DEEP | TWO_TEACHERS, without=NO_TEACHER),
    "pipeline_2_mtp": Case(pipeline() | {"student.mtp": {"depths": 2}}, 2, MTP),
    "pipeline_2_hidden": Case(pipeline() | {"objective.hidden": PAIRS[:1]}, 2),
    "pipeline_2_moe": Case(pipeline() | BALANCE, 2, DEEP_MOE),
    "fsdp_2_pipeline_2": Case({"parallel": {"fsdp": 2, "pipeline": 2}}, 4, DEEP),
    "tensor_2_fsdp_2": Case({"parallel": {"tensor": 2, "fsdp": 2}}, 4),
    "parity_2": Case(BALANCE, 2, DEEP_MOE, command="parity"),
    "parity_4": Case({}, 4, DEEP, command="parity"),
}

CASES = ONE_PROCESS | LAYOUTS
