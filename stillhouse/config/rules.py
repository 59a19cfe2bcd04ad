"""The rules about several keys of a configuration, as one table, and their check.

The class of a section defines the valid values of a single key. A rule defines a conflict between several keys.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product

from stillhouse.config.engine_rules import LAYER_RULES, engine_rules
from stillhouse.config.errors import ConfigError, listed
from stillhouse.config.evaluation_rules import EVALUATION_RULES
from stillhouse.config.other_tools import loss_hint
from stillhouse.config.reward_sum import has_part_of_object, reward_parts
from stillhouse.config.rule import FIELDS, NAMED, Rule, default, excludes, needs
from stillhouse.config.schema import yaml_value
from stillhouse.config.sections.data_section import is_source_name
from stillhouse.config.sections.eval_section import EvalPromptsConfig
from stillhouse.config.sections.rollout_section import RolloutConfig
from stillhouse.config.sections.run_section import RunConfig
from stillhouse.config.sections.teacher_section import TeacherConfig
from stillhouse.config.sections.train_section import OFFLOADED
from stillhouse.config.servers import GROUP, TOKEN_VARIABLE
from stillhouse.config.source_kinds import WEIGHT_KEYS, source_kinds
from stillhouse.display import enumerated, name_list
from stillhouse.objective.expression import expression_fields
from stillhouse.registry import load, load_all, registered


def check_rules(config: RunConfig) -> None:
    """Raise ConfigError with the first mistake of each key if the configuration breaks rules."""
    mistakes: dict[str | None, ConfigError] = {}
    losses = dict(config.objective.losses)
    if config.student.mtp is not None and config.student.mtp.objective is not None:
        losses["student.mtp.objective"] = config.student.mtp.objective
    rules = chain.from_iterable(rule.mistakes(config) for rule in all_rules())
    unused = _unused_tokens(config.rollouts, config.eval.prompts)
    shared = _shared_token(config.teacher_sections, config.rollout)
    for mistake in chain(_mistakes_of_losses(losses), rules, unused, shared):
        mistakes.setdefault(mistake.key, mistake)
    if mistakes:
        raise listed(list(mistakes.values()))


def _mistakes_of_losses(losses: Mapping[str, str]) -> Iterator[ConfigError]:
    """The errors of expressions of losses that cannot be read. losses: by their keys"""
    for key, loss in losses.items():
        try:
            expression_fields(loss, load_all("stillhouse.divergences"))
        except ValueError as error:
            yield ConfigError(key, f"{error}{loss_hint(str(error))}")


def _unused_tokens(rollouts: Sequence[RolloutConfig], prompts: EvalPromptsConfig | None) -> Iterator[ConfigError]:
    """The keys of tokens of reward servers that no reward names, such as a misspelled address."""
    sections: dict[str, list[RolloutConfig | EvalPromptsConfig]] = {"rollout": [*rollouts]}
    if prompts is not None:
        sections["eval.prompts"] = [prompts]
    for key, section in sections.items():
        servers = {part.server for source in section for part in reward_parts(source.reward) if part.is_server}
        unused = {address for source in section for address in source.reward_tokens or {}} - servers
        if unused:
            among = f"among {name_list(servers)}" if servers else "the address of a server in reward"
            yield ConfigError(f"{key}.reward_tokens", f"got {name_list(unused)}; expected {among}")


def _shared_token(teachers: Mapping[str, TeacherConfig], rollout: RolloutConfig | None) -> Iterator[ConfigError]:
    """The servers of several models, if all of them would get the token that is set in `TOKEN_VARIABLE`."""
    sections: dict[str, TeacherConfig | RolloutConfig] = {
        key: teacher for key, teacher in teachers.items() if teacher.urls
    }
    if rollout is not None and rollout.urls:
        sections["rollout"] = rollout
    unnamed = [key for key, section in sections.items() if section.token_variable is None]
    if len(sections) > 1 and unnamed and os.environ.get(TOKEN_VARIABLE):
        urls = enumerated([f"{key}.url" for key in sections], "and")
        yield ConfigError(
            f"{unnamed[0]}.token_variable",
            f"is null, and {urls} are servers of different models, which get one token only on purpose; expected the "
            f"name of the variable with its token, which may be {TOKEN_VARIABLE}",
        )


def all_rules() -> tuple[Rule, ...]:
    """The rules of the registered sources of signals, those of the core, and those of the registered engines."""
    return (*_source_rules(), *RULES, *engine_rules())


def _is_within(folder: str, parent: str) -> bool:
    parent = os.path.abspath(parent)
    return os.path.commonpath([parent, os.path.abspath(folder)]) == parent


def _source_rules() -> Iterator[Rule]:
    """The rules between the keys of a teacher's section that the registered kinds of sources have."""
    kinds = [kind for kind in source_kinds().values() if kind.key != "model"]
    complete: list[str] = []
    for key, kind in ((f"teacher.{kind.key}", kind) for kind in kinds if not kind.needs_model):
        if others := complete if "model" in kind.beside else ["teacher.model", *complete]:
            yield excludes(key, *others, expected="one source of signals, and null for the others")
        complete.append(key)
    for key, kind in ((f"teacher.{kind.key}", kind) for kind in kinds):
        if kind.needs_model:
            yield excludes(key, *complete, because="it needs teacher.model, a teacher in this job")
        if not kind.any_tokens:
            yield excludes(key, "rollout", because="it has no signals of completions that the run writes")
            yield excludes(f"{NAMED}prefix", key, because=f"the signals of {key} are of other tokens")
    for name, because in product(WEIGHT_KEYS, dict.fromkeys(kind.because for kind in kinds)):
        without = [kind.key for kind in kinds if kind.because == because and name not in kind.beside]
        if without:
            yield excludes(f"teacher.{name}", *(f"teacher.{key}" for key in without), because=because)
    for option in dict.fromkeys(option for kind in kinds for option in kind.options):
        section = "teacher." if f"teacher.{option}" in FIELDS else NAMED
        yield needs(section + option, *(f"teacher.{kind.key}" for kind in kinds if option in kind.options))
    yield from chain.from_iterable(kind.rules() for kind in kinds)


RULES: tuple[Rule, ...] = (
    # a teacher in this job
    excludes("teacher.quantize", "teacher.parallel"),
    excludes("teacher.offload", "teacher.quantize", "teacher.cross_tokenizer"),
    excludes(
        "teacher.parallel",
        "teacher.cross_tokenizer",
        because="every process that needs signals holds the whole teacher",
    ),
    *(
        Rule((f"teacher.parallel.{key}",), bool, f"parallel.{key} in its place", "it is of both models")
        for key in ("gather_dtype", "offload")
    ),
    excludes("teacher.tail", "teacher.cross_tokenizer=uld", because="it has no effect there"),
    *(
        Rule(
            (f"teacher.{key}", "student", "teacher"),
            lambda value, student, teacher: bool(value) and teacher is not None and teacher.is_base_of(student),
            yaml_value(default(f"teacher.{key}")),
            f"the teacher is the student without its adapter, {why}",
        )
        for key, why in (("cross_tokenizer", "and has its tokenizer"), ("offload", "and stays with it"))
    ),
    # several teachers
    excludes("teachers", "teacher", expected="null with teacher, or all teachers under teachers, each by a name"),
    Rule((f"{NAMED}cross_tokenizer",), lambda method: method == "uld", "gold or null", "uld is for a single teacher"),
    Rule(
        (f"{NAMED}prefix", f"{NAMED}student"),
        lambda prefix, student: prefix is None and student == "live",
        "a text",
        "without one, the student with its present weights is the student",
    ),
    excludes("teachers.sum", "teachers.route", because="every document has one teacher"),
    excludes(
        f"{NAMED}temperature",
        "teachers.sum=distributions",
        expected="null, and objective.temperature",
        because="the sum has one divergence",
    ),
    excludes(f"{NAMED}cross_tokenizer", "teachers.sum=distributions", because="distributions are exact"),
    excludes(f"{NAMED}signal", "teachers.sum=distributions", because="the sum needs the whole vocabulary"),
    # rollouts
    excludes(
        "rollout.engine=transformers",
        "rollout.url",
        expected=enumerated([*registered(GROUP)], "or"),
        because="transformers runs in this process",
    ),
    Rule(
        ("rollout.url", "rollout.engine"),
        lambda url, engine: url is None and engine != "transformers",
        "the address of the server",
    ),
    Rule(
        ("rollout.timeout", "rollout.url", "rollout.reward"),
        lambda timeout, url, reward: (
            timeout != default("rollout.timeout")
            and url is None
            and not any(part.is_server for part in reward_parts(reward))
        ),
        yaml_value(default("rollout.timeout")),
        "it has an effect only with rollout.url or a server in rollout.reward",
        has_no_effect=True,
    ),
    needs("rollout.weights", "rollout.url"),
    needs("rollout.token_variable", "rollout.url"),
    excludes("rollout.weights", "rollout.writer=teacher", because="only the student's weights change"),
    excludes(
        "rollout.tools",
        "rollout.environment",
        expected="one of them",
        because="each of them decides what follows a turn",
    ),
    needs("rollout.tool_tokens", "rollout.tools"),
    needs("rollout.reply", "rollout.environment"),
    Rule(
        ("rollout.reward", "rollout.environment", "rollout.tools"),
        lambda reward, environment, tools: has_part_of_object(reward) and environment is None and tools is None,
        "a class with a method reward in rollout.environment or rollout.tools",
        "environment stands for what this method gives",
    ),
    Rule(
        ("rollout.max_turns", "rollout.environment", "rollout.tools"),
        lambda turns, environment, tools: (
            turns != default("rollout.max_turns") and environment is None and tools is None
        ),
        yaml_value(default("rollout.max_turns")),
        "it has an effect only with rollout.environment or rollout.tools",
        has_no_effect=True,
    ),
    Rule(
        ("rollout.workers", "rollout.reward", "rollout.environment", "rollout.tools"),
        lambda workers, reward, environment, tools: (
            bool(workers)
            and environment is None
            and tools is None
            and all(part.is_server for part in reward_parts(reward))
        ),
        "0",
        "it has an effect only with a function in rollout.reward, with rollout.environment or rollout.tools",
        has_no_effect=True,
    ),
    *(
        excludes(
            f"rollout.{key}",
            "rollout.workers=0",
            expected=f"rollout.workers of at least 1, or no rollout.{key}",
            because="it limits calls in the processes of rollout.workers",
        )
        for key in ("worker_timeout", "worker_memory")
    ),
    needs("rollout.advantage", "rollout.reward"),
    needs("rollout.deviation", "rollout.reward"),
    excludes("rollout.deviation", "rollout.advantage=centered", because="only normalized divides by it"),
    excludes(
        "rollout.samples_per_prompt=1",
        "rollout.reward",
        expected="at least 2",
        because="an advantage is relative to the other completions of the prompt",
    ),
    Rule(
        ("rollout.max_new_tokens", "data.max_tokens"),
        lambda new_tokens, max_tokens: new_tokens > max_tokens - 2,
        "at most data.max_tokens - 2, or a larger data.max_tokens",
        "more leaves no room for a prompt of two tokens",
    ),
    excludes("rollout.discount", "parallel.context", because="context parallelism divides completions"),
    Rule(
        ("objective.loss", "parallel.context"),
        lambda loss, context: bool(re.search(r"\bratio\s*=\s*sequence\b", loss)) and (context or 1) > 1,
        "ratio=token, or parallel.context=1",
        "context parallelism divides completions",
    ),
    excludes("objective.tokens", "rollout", because="rollouts train on completions"),
    excludes("teacher.cross_tokenizer", "rollout"),
    # an objective for each origin
    Rule(
        ("objective.by_origin", "rollout"),
        lambda by_origin, rollout: by_origin is not None and rollout is None,
        "null, and its objective as objective.loss",
        "without rollout, all documents are the dataset's",
    ),
    excludes("objective.loss", "objective.by_origin", because="it has no effect beside it"),
    excludes("objective.by_origin", "teachers", because="metrics are named by origins or by teachers"),
    *(
        Rule(
            ("objective.by_origin.dataset", "rollout.share"),
            lambda loss, share, is_given=is_given: (
                share is not None and (loss is not None) == is_given and (share == 1) == is_given
            ),
            "an objective with rollout.share below 1, and null with rollout.share=1",
            "the other completions of a step are the dataset's",
            has_no_effect=is_given,
        )
        for is_given in (True, False)
    ),
    *(
        Rule(
            (f"objective.by_origin.{origin}", "rollout.writer"),
            lambda loss, writer, origin=origin: writer is not None and (loss is None) != (writer != origin),
            f"an objective with rollout.writer={origin}, and null otherwise",
            "rollout.writer alone generates completions",
        )
        for origin in ("student", "teacher")
    ),
    Rule(
        ("data.train", "rollout"),
        lambda sources, rollout: (
            isinstance(sources, list)
            and rollout is None
            and any(source.name is not None or source.rollout is not None for source in sources)
        ),
        "sources without name and rollout, or the section rollout",
        "they are of prompts",
    ),
    Rule(
        ("data.train", "rollout"),
        lambda sources, rollout: (
            isinstance(sources, list)
            and rollout is not None
            and (
                len({source.shown_name for source in sources}) < len(sources)
                or not all(is_source_name(source.shown_name) for source in sources)
            )
        ),
        "a different name for every source (letters, digits, _ and -, a letter first, not reward)",
        "metrics are named by sources, and a file's own name is not always enough",
    ),
    *EVALUATION_RULES,
    Rule(
        ("data.cache", "out"),
        lambda cache, out: cache not in (None, "auto") and _is_within(cache, out),
        "a folder outside of out",
        "out is empty when a run begins",
    ),
    # the student's first weights
    excludes("student.init", "student.adapter", because="an adapter needs its base's own weights"),
    excludes("student.init", "student.mtp", because="a run with MTP layers begins with the student of one without"),
    Rule(
        ("student.init.from", "teacher"),
        lambda source, teacher: source == "teacher" and (teacher is None or teacher.model is None),
        "random, or teacher.model, the teacher's files",
    ),
    excludes(
        "student.init.from=teacher",
        "teacher.cross_tokenizer",
        expected="random",
        because="the teacher's embedding is of other tokens",
    ),
    # the student's trained parts
    excludes("student.train", "student.adapter", because="only the adapter is trained"),
    Rule(
        ("student.quantize", "student.adapter"),
        lambda kind, adapter: kind is not None and adapter is None,
        "null, or student.adapter",
        "rounded weights cannot be trained",
    ),
    excludes("student.train", "student.mtp"),
    # steps and batches
    Rule(
        ("train.steps", "train.epochs"),
        lambda steps, epochs: steps is not None and epochs is not None,
        "one of the two, and null for the other",
    ),
    Rule(
        ("train.epochs", "train.steps"),
        lambda epochs, steps: epochs is None and steps is None,
        "a number, or train.steps",
    ),
    *(
        Rule(
            (key, "data.max_tokens"),
            lambda tokens, max_tokens: tokens is not None and tokens < max_tokens,
            "at least data.max_tokens, or a smaller data.max_tokens",
            "a packed sequence is never split",
        )
        for key in ("train.micro_batch_tokens", "train.tokens_per_step", "eval.micro_batch_tokens")
    ),
    Rule(
        ("train.optimizer", "parallel.offload"),
        lambda name, offload: bool(offload) and OFFLOADED not in load("stillhouse.optimizers", name).capabilities,
        "adamw",
    ),
    *LAYER_RULES,
    *chain.from_iterable(kind.rules() for kind in load_all("stillhouse.parts").values()),
)
