"""Checks a whole configuration: the rules of the core and of registered add-ons, the losses, and servers' tokens."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product

from stillhouse.config.engine_capabilities import GROUP as ENGINES
from stillhouse.config.errors import ConfigError, listed
from stillhouse.config.evaluation_section import EvalPromptsConfig
from stillhouse.config.explain_errors import loss_hint
from stillhouse.config.reward_sum import reward_parts
from stillhouse.config.rollout_section import RolloutConfig
from stillhouse.config.rule import FIELDS, NAMED, Rule, excludes, needs
from stillhouse.config.rules import RULES
from stillhouse.config.run_section import RunConfig
from stillhouse.config.servers import TOKEN_VARIABLE
from stillhouse.config.signal_source_kind import WEIGHT_KEYS, source_kinds
from stillhouse.config.teacher_section import TeacherConfig
from stillhouse.display import enumerated, name_list
from stillhouse.objective.expression import expression_fields
from stillhouse.registry import load_all


def check_rules(config: RunConfig) -> None:
    """Raise ConfigError if the configuration has mistakes. The error lists the first mistake of each key."""
    mistakes: dict[str | None, ConfigError] = {}
    for key, loss in config.losses.items():
        try:
            expression_fields(loss, load_all("stillhouse.divergences"))
        except ValueError as error:
            mistakes[key] = ConfigError(key, f"{error}{loss_hint(str(error))}")
    rules = chain.from_iterable(rule.mistakes(config) for rule in all_rules())
    sections: dict[str, Sequence[RolloutConfig | EvalPromptsConfig]] = {"rollout": config.rollouts}
    sections["eval.prompts"] = [config.eval.prompts] if config.eval.prompts else []
    for mistake in chain(rules, _unused_tokens(sections), _shared_token(config.teacher_sections, config.rollout)):
        mistakes.setdefault(mistake.key, mistake)
    if mistakes:
        raise listed(list(mistakes.values()))


def all_rules() -> tuple[Rule, ...]:
    """Return the rules of the registered sources of signals, of `rules.py`, and of the registered engines."""
    return (*_source_rules(), *RULES, *_engine_rules())


def _unused_tokens(by_key: Mapping[str, Sequence[RolloutConfig | EvalPromptsConfig]]) -> Iterator[ConfigError]:
    """Yield an error if reward_tokens names a server that is in no reward, for example by a misspelled address."""
    for key, sections in by_key.items():
        servers = {part.server for section in sections for part in reward_parts(section.reward) if part.is_server}
        if unused := {address for section in sections for address in section.reward_tokens or {}} - servers:
            among = f"an address among {name_list(servers)}" if servers else "the address of a server in reward"
            yield ConfigError(f"{key}.reward_tokens", f"got {name_list(unused)}; expected {among}")


def _shared_token(teachers: Mapping[str, TeacherConfig], rollout: RolloutConfig | None) -> Iterator[ConfigError]:
    """Yield an error if the run has servers of several models, and one of them would get the default token."""
    sections: dict[str, TeacherConfig | RolloutConfig] = {**teachers}
    if rollout is not None:
        sections["rollout"] = rollout
    variables = {key: section.token_variable for key, section in sections.items() if section.urls}
    unnamed = [key for key, variable in variables.items() if variable is None]
    if len(variables) > 1 and unnamed and os.environ.get(TOKEN_VARIABLE):
        urls = enumerated([f"{key}.url" for key in variables], "and")
        yield ConfigError(
            f"{unnamed[0]}.token_variable",
            f"is null, and {urls} are servers of different models: set token_variable for each of them, so that no "
            f"server gets another server's token; expected an environment variable, such as {TOKEN_VARIABLE}",
        )


def _source_rules() -> Iterator[Rule]:
    kinds = {f"teacher.{kind.key}": kind for kind in source_kinds().values() if kind.key != "model"}
    complete: list[str] = []
    for key, kind in kinds.items():
        if not kind.needs_model:
            if others := complete if "model" in kind.beside else ["teacher.model", *complete]:
                yield excludes(key, *others, expected="one source of signals, and null for all other sources")
            complete.append(key)
    for key, kind in kinds.items():
        if kind.needs_model:
            yield excludes(key, *complete, because="it needs a teacher in this job (teacher.model)")
        if not kind.any_tokens:
            because = "this source has no signals for completions that the run generates"
            yield from (excludes(key, "rollout", because=because), excludes("eval.prompts", key, because=because))
            yield excludes(f"{NAMED}prefix", key, because=f"the signals of {key} are for documents without a prefix")
    for name, because in product(WEIGHT_KEYS, dict.fromkeys(kind.because for kind in kinds.values())):
        if without := [key for key, kind in kinds.items() if kind.because == because and name not in kind.beside]:
            yield excludes(f"teacher.{name}", *without, because=because)
    for option in dict.fromkeys(option for kind in kinds.values() for option in kind.options):
        section = "teacher." if f"teacher.{option}" in FIELDS else NAMED
        yield needs(section + option, *(key for key, kind in kinds.items() if option in kind.options))
    yield from chain.from_iterable(kind.rules() for kind in kinds.values())


def _engine_rules() -> Iterator[Rule]:
    engines = {name: kind.capabilities for name, kind in load_all(ENGINES).items()}
    for name, engine in engines.items():
        is_used = f"parallel.engine={name}"
        for key in engine.without:
            yield excludes(key, is_used, because=f"{engine.title} does not have it here")
        if engine.schedules is not None:
            yield Rule(
                ("parallel.schedule", "parallel.engine"),
                lambda schedule, used, name=name, engine=engine: used == name and schedule not in engine.schedules,
                enumerated(engine.schedules, "or"),
            )
        if engine.settings:
            yield Rule(
                (f"parallel.{name}", "parallel.engine"),
                lambda settings, used, name=name: settings is not None and used != name,
                f"null, or {is_used}",
            )
            yield excludes(f"teacher.parallel.{name}")
    with_sequence = [name for name, engine in engines.items() if engine.sequence]
    yield Rule(
        ("parallel.sequence", "parallel.engine"),
        lambda sequence, engine: sequence and engine not in with_sequence,
        f"false, or {enumerated([f'parallel.engine={name}' for name in with_sequence], 'or')}",
    )
