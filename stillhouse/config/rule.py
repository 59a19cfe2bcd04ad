"""A rule about several keys of a configuration: the conflict between them, and the text of the error."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from stillhouse.config.data_section import source_prefix
from stillhouse.config.errors import ConfigError
from stillhouse.config.rollout_section import PromptConfig
from stillhouse.config.run_section import RunConfig
from stillhouse.config.schema import ANY_NAME, value_fields, yaml_value
from stillhouse.config.section import Section
from stillhouse.config.teacher_section import TeachersConfig

#: in a rule, `teacher.` means all teachers, and this prefix means only the teachers under `teachers`
NAMED = f"teachers.{ANY_NAME}."
_TEACHER_PREFIX = re.compile(rf"\bteacher\.|{re.escape(NAMED)}")
_SOURCE_PREFIX = re.compile(r"data\.train\[\d+\]\.")
FIELDS = value_fields(RunConfig)


@dataclass(frozen=True)
class Rule:
    """One rule about several keys.

    keys: the key that the error names, then the keys that conflict with it.
    refuses: a function that returns whether the values of the keys break the rule. It gets None for an absent
        section.
    expected: the expected configuration, in words.
    because: the reason, or "".
    has_no_effect: whether the rule refuses a key because it has no effect. With several sources of prompts, a key of
        the section rollout is then refused only if it has no effect on any source.
    """

    keys: tuple[str, ...]
    refuses: Callable[..., bool]
    expected: str
    because: str = ""
    has_no_effect: bool = False

    def mistakes(self, config: RunConfig) -> Iterator[ConfigError]:
        """Yield the errors of a configuration that breaks this rule, up to one per teacher and source of prompts."""
        for rule in self._for_teachers(config.teacher_sections):
            by_source: list[tuple[str, ConfigError | None]] = []
            for source_rule, variant in rule._for_sources(config):
                keys = source_rule.keys
                values = [getattr(_owner(variant, key), key.rpartition(".")[2], None) for key in keys]
                is_broken = _owner(variant, keys[0]) is not None and self.refuses(*values)
                by_source.append(
                    (keys[0], ConfigError(keys[0], source_rule._problem(*values)) if is_broken else None)
                )
            if self.has_no_effect and not all(mistake for key, mistake in by_source if key == rule.keys[0]):
                by_source = [(key, mistake) for key, mistake in by_source if key != rule.keys[0]]
            yield from (mistake for _, mistake in by_source if mistake is not None)

    def _for_sources(self, config: RunConfig) -> list[tuple["Rule", RunConfig]]:
        """Return, for each source of prompts, the rule with the source's full keys, and the source's configuration.

        If no source can set a key of the rule, or the run has no rollouts, the result is this rule and `config`.
        """
        if not any(key.removeprefix("rollout.") in PromptConfig.model_fields for key in self.keys):
            return [(self, config)]
        variants = []
        for number, rollout in enumerate(config.rollouts):
            sources = config.data.weighted_sources
            keys = tuple(source_prefix(sources, number, key.removeprefix("rollout.")) + key for key in self.keys)
            variants.append((replace(self, keys=keys), config.model_copy(update={"rollout": rollout})))
        return variants or [(self, config)]

    def _for_teachers(self, sections: Iterable[str]) -> list["Rule"]:
        """Return a copy of the rule for each teacher, with the key of its section in place of `teacher.`."""
        if not any(_TEACHER_PREFIX.match(key) for key in self.keys):
            return [self]
        is_of_several = any(key.startswith(NAMED) for key in self.keys)
        names = [name for name in sections if not is_of_several or name != "teacher"]
        return [
            replace(
                self,
                keys=tuple(_TEACHER_PREFIX.sub(f"{name}.", key) for key in self.keys),
                expected=_TEACHER_PREFIX.sub(f"{name}.", self.expected),
                because=_TEACHER_PREFIX.sub(f"{name}.", self.because),
            )
            for name in names
        ]

    def _problem(self, value: Any, *others: Any) -> str:
        with_others = " and ".join(
            key if _is_section(other) else f"{key}={yaml_value(other)}"
            for key, other in zip(self.keys[1:], others, strict=True)
            if other is not None and key != "teacher"  # `expected` already names the teacher
        )
        got = " with ".join(filter(None, ["" if _is_section(value) else f"got {yaml_value(value)}", with_others]))
        expected = f"expected {self.expected}"
        because = f", because {self.because}" if self.because else ""
        if got.startswith("got "):
            return f"{got}: {expected}{because}"
        return f"{expected} with {got}{because}" if got else f"{expected}{because}"


def excludes(key: str, *others: str, expected: str = "", because: str = "") -> Rule:
    """Return the rule that `key` must not be set if one of the other keys is set.

    If there are no other keys, `key` must never be set. A key is set if its value is neither the default nor null.
    `key=value` is set if the key has this value.
    """
    keys, signs, texts = zip(*(text.partition("=") for text in (key, *others)), strict=True)

    def refuses(*values: Any) -> bool:
        first, *rest = (
            yaml_value(value) == text if sign else value not in (None, default(name))
            for name, sign, text, value in zip(keys, signs, texts, values, strict=True)
        )
        return first and (any(rest) or not rest)

    return Rule(keys, refuses, expected or yaml_value(default(keys[0])), because)


def needs(key: str, *others: str) -> Rule:
    """Return the rule that `key` must have its default if all other keys are null."""
    return Rule(
        (key, *others),
        lambda value, *values: value != default(key) and all(other is None for other in values),
        yaml_value(default(key)),
        f"it has an effect only with {' or '.join(others)}",
        has_no_effect=True,
    )


def default(key: str) -> Any:
    """The default of a key; None for a section."""
    return FIELDS[key].default if key in FIELDS else None


def _owner(configuration: Section, key: str) -> Any:
    """The section that has a key; None if the section is absent."""
    owner: Any = configuration
    for name in _SOURCE_PREFIX.sub("", key).split(".")[:-1]:
        owner = owner.named.get(name) if isinstance(owner, TeachersConfig) else getattr(owner, name, None)
    return owner


def _is_section(value: Any) -> bool:
    """Whether a value is a section or a list of sections; errors do not show such values."""
    return isinstance(value[0] if isinstance(value, list) and value else value, Section)
