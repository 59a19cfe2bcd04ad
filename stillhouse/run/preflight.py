"""The checks of a run that need more than its configuration, ordered by their cost.

`read_data` calls `check_before_loading` first, and `build_session` calls `check_models` after the models are loaded.
So each error is reported as early as possible.
"""

import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distributions

import torch

from stillhouse.config import (
    ConfigError,
    EvalConfig,
    RolloutConfig,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
    as_config_error,
)
from stillhouse.data import check_vocabulary
from stillhouse.display import counted, name_list
from stillhouse.engine.optimizer import require_optimizer
from stillhouse.loops.session import Data
from stillhouse.models import Decoder, check_document_length, check_saving, warn_of_positions
from stillhouse.models.families import text_config
from stillhouse.models.forward_modes import noise_of
from stillhouse.models.pretrained import read_configuration
from stillhouse.models.quantized import FP8, float8_problem
from stillhouse.objective.policy_parameters import PolicySettings
from stillhouse.output.tracking import require_trackers
from stillhouse.parallel import Layout
from stillhouse.parallel.apply.tensor_parallel import require_divisor
from stillhouse.rollout import PromptPlan
from stillhouse.rollout.user_functions import loaded_functions
from stillhouse.run.setup import RunSetup, require_fsdp
from stillhouse.user_code.environment import environments

#: a run with fewer steps causes a warning, unless the configuration has train.steps
FEW_STEPS = 10
#: steps with fewer prompts cause a warning, unless the configuration has rollout.prompts_per_step
FEW_PROMPTS = 4
#: train.min_learning_rate is a share of the peak. A value up to this limit causes a warning, because the user may
#: have meant a learning rate, as in other tools
SMALL_FLOOR = 1e-4
#: attention implementation → the package with its kernels, which transformers cannot run on a CPU
FLASH_PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}


def check_before_loading(setup: RunSetup) -> None:
    """Check libraries and options. Raises ConfigError. A collective of all processes."""
    config = setup.config
    require_trackers(config.track)
    require_adapters(config.student)
    adapter = config.student.adapter
    if adapter is not None and adapter.dropout and setup.objective.spec.uses_ratios:
        raise ConfigError(
            "student.adapter.dropout",
            f"got {adapter.dropout:g}: expected 0.0, because the ratios of policy_gradient and rollout.correction "
            "would contain the noise of dropout, and completions are sampled without dropout",
        )
    # all ranks import the functions, although only rank 0 calls them
    loaded_functions(config.eval, config.rollouts, config.rollout, config.rollout_key)
    require_optimizer(config.train, setup.layout)
    device = setup.ranks.device
    require_attention(config.student, setup.teachers, device)
    require_models_fit(config.student, setup.teachers, setup.own_layouts, setup.layout, device)
    if config.parallel.engine == "torch":
        require_tensor_degrees(config.student, setup.teachers, setup.own_layouts, setup.layout)


def check_models(
    decoders: Mapping[str, Decoder], teachers: Mapping[str, TeacherConfig], data: Data, max_tokens: int
) -> list[str]:
    """Raise ValueError unless the models fit the data and the student can be saved. Returns warnings.

    decoders: the student, and the teachers in this job, by the keys of their sections.
    teachers: all teachers' sections.
    max_tokens: the maximum number of tokens of a document; rows of several documents in `data` can be longer.
    """
    # a teacher that is the student itself has no decoder of its own, so its prefix is checked with the student's
    read_by_student = [section for section, teacher in teachers.items() if teacher.signals_from == "student"]
    held_out = None if data.evaluation is None else data.evaluation.documents
    splits = [split for split in (data.train.documents, held_out, data.dataset) if split is not None]
    warnings = list[str]()
    for section, decoder in decoders.items():
        warnings += check_vocabulary(data.tokenizer, decoder.vocabulary_rows, section)
        with as_config_error("data.max_tokens"):
            check_document_length(decoder.pretrained, max_tokens, section)
        longest = max(int(documents.lengths_D.max()) for documents in splits)
        warnings += warn_of_positions(decoder.pretrained, longest, section)
        sections = read_by_student if section == "student" else [section]
        for documents in splits:
            documents.check_ids(decoder.vocabulary_rows, section, [key.partition(".")[2] for key in sections])
    check_saving(decoders["student"].pretrained)
    return warnings


def require_adapters(student: StudentConfig) -> None:
    """Raise ConfigError if the student has an adapter and peft is not installed."""
    if student.adapter is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("student.adapter", "peft is not installed; pip install 'stillhouse[lora]'")


def noise_warnings(removed: Collection[str]) -> Iterator[str]:
    """Yield a warning for the dropout and noise that were removed from the student. removed: their names."""
    if removed:
        yield (
            f"the student is trained without the dropout of its configuration ({name_list(removed)}): the ratios "
            "of policy_gradient and rollout.correction compare with probabilities from sampling, without dropout"
        )


def require_attention(student: StudentConfig, teachers: Mapping[str, TeacherConfig], device: torch.device) -> None:
    """Raise ConfigError if a model has flash attention, but the device or the installed packages do not support it.

    teachers: the teachers' sections, by their keys.
    """
    models: list[tuple[str, StudentConfig | TeacherConfig]] = [("student", student), *teachers.items()]
    for section, model in models:
        package = FLASH_PACKAGES.get(model.attention or "")
        if package is None:
            continue
        if device.type == "cpu":
            raise ConfigError(
                f"{section}.attention", f"got {model.attention} on a CPU: expected sdpa, eager or null, or a GPU"
            )
        if not any(distributions(name=package)) and not any(distributions(name="kernels")):
            raise ConfigError(
                f"{section}.attention",
                f"got {model.attention}, and {package} is not installed: expected sdpa, eager or null, or "
                "`pip install kernels`, with which transformers downloads the compiled kernels",
            )


def require_models_fit(
    student: StudentConfig,
    teachers: Mapping[str, TeacherConfig],
    own_layouts: Mapping[str, Layout],
    layout: Layout,
    device: torch.device,
) -> None:
    """Raise ConfigError if `quantize` or `offload` of a model is impossible under its layout or on the device.

    teachers: the teachers' sections, by their keys.
    own_layouts: the layouts of the teachers with the key `parallel`; all other teachers have the student's `layout`.
    """
    kinds = {"student": student.quantize, **{section: teacher.quantize for section, teacher in teachers.items()}}
    for section, kind in kinds.items():
        if kind is not None and layout.degrees.processes > 1:
            served = "" if section == "student" else ", or teacher.url with `stillhouse serve --quantize`"
            problem = f"got {kind} under {layout}, which shards plain weights: expected null{served}"
            raise ConfigError(f"{section}.quantize", problem)
        if kind == FP8 and (missing := float8_problem(device)):
            raise ConfigError(f"{section}.quantize", missing)
    for section, teacher in teachers.items():
        teacher_layout = own_layouts.get(section, layout)
        if teacher.offload and (teacher_layout.degrees.processes > 1 or device.type == "cpu"):
            require_fsdp(f"{section}.offload", teacher_layout, device)


def require_tensor_degrees(
    student: StudentConfig, teachers: Mapping[str, TeacherConfig], own_layouts: Mapping[str, Layout], layout: Layout
) -> None:
    """Raise ConfigError if a tensor degree does not divide the sizes in the configuration of a model in this job.

    teachers, own_layouts: see `require_models_fit`.
    """
    sharded = {section: teacher for section, teacher in teachers.items() if teacher.signals_from == "model"}
    for section, model in {"student": student, **sharded}.items():
        degree = own_layouts.get(section, layout).degrees.tensor
        if degree > 1:
            code = model.trust_remote_code
            with as_config_error(f"{section}.model"):
                config = text_config(read_configuration(str(model.model), model.revision, trust_remote_code=code))
            with as_config_error(f"{section}.parallel" if section in own_layouts else "parallel"):
                require_divisor(config, degree)


def prompt_warnings(
    train: TrainConfig, rollout: RolloutConfig, plan: PromptPlan, max_tokens: int, policies: Iterable[PolicySettings]
) -> Iterator[str]:
    """Yield warnings for steps with few prompts if `rollout.prompts_per_step` is not set, for `tokens_per_step`
    without effect, and for limits of a ratio that is always 1.

    policies: the policy settings of the terms of the loss.
    """
    if rollout.prompts_per_step is not None and train.tokens_per_step != TrainConfig().tokens_per_step:
        yield (
            f"train.tokens_per_step={train.tokens_per_step:,} has no effect, because rollout.prompts_per_step="
            f"{rollout.prompts_per_step} is the batch of a step"
        )
    is_fresh = rollout.schedule == "sync" or rollout.max_staleness == 0
    if is_fresh and any(policy.kind != "corrected" for policy in policies):
        yield (
            "the limits of policy_gradient do not act: the weights that generate the completions of a step are those "
            "that the step trains, so that the ratio differs from 1 only by rounding; leave clip_low, clip_high and "
            "dual_clip out, or let completions be older with rollout.schedule=one_step_off"
        )
    if rollout.prompts_per_step is None and plan.prompts_per_step < FEW_PROMPTS:
        yield (
            f"prompts of a step: {plan.prompts_per_step}, because train.tokens_per_step={train.tokens_per_step:,} "
            f"has room for no more, with {plan.numbers_per_group} completions of data.max_tokens={max_tokens:,} "
            "each; set rollout.prompts_per_step"
        )


def same_model_warnings(setup: RunSetup, model_hashes: Mapping[str, str], student: Decoder) -> Iterator[str]:
    """Yield a warning if student and teacher are the same model, and the loss is only their divergence."""
    teacher, section = setup.config.teacher, setup.config.student
    if teacher is None or model_hashes.get("teacher") != model_hashes["student"] or noise_of(student.pretrained):
        return
    is_changed = section.adapter is not None or section.quantize is not None or section.init is not None
    others = ("cross_entropy", "entropy", "policy_gradient")
    has_others = any(getattr(part, name) is not None for part in setup.objective.spec.parts for name in others)
    if not (is_changed or has_others or setup.objective.parts) and setup.objective.spec.needs_teacher:
        yield (
            f"teacher.model: {teacher.model} has the same files as student.model: the divergence between a model and "
            "itself is 0, and so is its gradient, so that nothing is learned; expected another model"
        )


def evaluation_warnings(evaluation: EvalConfig, rollouts: Sequence[RolloutConfig]) -> Iterator[str]:
    """Yield a warning if completions in training have several turns, and completions of evaluations have one.

    rollouts: the section rollout for each source of prompts.
    """
    evaluations = [name for name in ("samples", "tasks") if getattr(evaluation, name)]
    keys = [key for key in environments() if any(getattr(rollout, key) for rollout in rollouts)]
    if evaluations and keys:
        yield (
            f"{', '.join(f'eval.{name}' for name in evaluations)}: these completions have only one turn, "
            f"without rollout.{' and rollout.'.join(keys)}, unlike the completions of eval.prompts"
        )


def schedule_warnings(train: TrainConfig, steps: int, data: Data, *, on_policy: bool) -> Iterator[str]:
    """Yield warnings for a run of few steps, steps with documents of a single teacher, a warm-up that lasts the whole
    run, and a small `min_learning_rate`.

    data: the data, packed into the sequences on which the run trains.
    """
    tokens = len(data.train.documents.tokens_N)
    if train.steps is None and not on_policy and steps < FEW_STEPS:
        yield (
            f"the run has only {counted(steps, 'optimizer step')}, because train.tokens_per_step is "
            f"{train.tokens_per_step:,} and the data have {tokens:,} tokens; lower train.tokens_per_step, or raise "
            "train.epochs"
        )
    if data.train.together is not None and not on_policy and train.tokens_per_step < 2 * data.train.max_tokens:
        yield (
            "every step has documents of only one teacher, because it has only one sequence of up to "
            f"{data.train.max_tokens:,} tokens, and with teachers.route a sequence has documents of one teacher; "
            "lower train.micro_batch_tokens, or raise train.tokens_per_step"
        )
    if train.warmup >= max(steps, 2):
        yield (
            f"train.warmup={train.warmup:g} is not shorter than the run ({counted(steps, 'step')}), so that the "
            "learning rate only rises; a value below 1 is a share of all steps"
        )
    if 0 < train.min_learning_rate <= SMALL_FLOOR:
        yield (
            f"train.min_learning_rate={train.min_learning_rate:g} is a share of the peak, so that the learning rate "
            f"ends at {train.min_learning_rate * train.learning_rate:g}"
        )
