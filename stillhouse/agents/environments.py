"""rollout.environment and rollout.tools: the entries of the group `stillhouse.environments`.

Their interface is in `user_code/environment.py`. This module imports no torch at the top.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from stillhouse.agents.episodes import Episodes, Tools, UserObject, checked_reply
from stillhouse.display import first_line
from stillhouse.user_code.environment import Environment
from stillhouse.user_code.functions import ENVIRONMENT, TOOLS, UserFunction, load_function

if TYPE_CHECKING:
    from stillhouse.config.rollout_section import PromptConfig
    from stillhouse.config.rule import Rule


class TextEnvironment(Environment):
    """A function or a class of the user whose replies are texts."""

    key = ENVIRONMENT

    def __init__(self, rollout: "PromptConfig", full_key: Callable[[str], str]):
        self._rollout, self.path, self.format_key = rollout, rollout.environment or "", full_key("reply")
        self._full_key = full_key("environment")

    @cached_property
    def functions(self) -> list[UserFunction]:
        """The function or class of the user, imported at the first use, because loading data does not need it."""
        from stillhouse.config import as_config_error
        from stillhouse.config.section import function_hint

        with as_config_error(self._full_key):
            return [load_function(ENVIRONMENT, self.path, function_hint(self.path))]

    @classmethod
    def rules(cls) -> "Iterator[Rule]":
        from stillhouse.config.rule import needs

        yield needs("rollout.reply", ENVIRONMENT)

    @classmethod
    def answer(cls, path: str, *, is_limited: bool) -> Callable[..., Any]:
        environment = load_function(ENVIRONMENT, path)
        if inspect.isclass(environment.function):
            return Episodes(str(environment), partial(UserObject, environment))
        return partial(checked_reply, environment)

    def markers(self, tokenizer: Any, processor: Any) -> dict[int, str]:
        from stillhouse.agents.reply_format import ReplyFormat

        if (role := self._rollout.reply_role) is None:
            return {}
        form = ReplyFormat(tokenizer, role, processor)
        return {form.marker_id: form.marker}

    def replies(self, calls: Any, tokenizer: Any, processor: Any, warn: Callable[[str], None]) -> Any:
        from stillhouse.agents.replies import MessageReplies, TextReplies
        from stillhouse.agents.reply_format import ReplyFormat, generation_prompt
        from stillhouse.rollout.turns import EpisodeCalls

        placeholders = [] if processor is None else processor.placeholder_ids
        episodes = EpisodeCalls(calls, ENVIRONMENT, self.path, inspect.isclass(self.functions[0].function))
        if (role := self._rollout.reply_role) is not None:
            form, has_stops = ReplyFormat(tokenizer, role, processor), bool(self._rollout.stop)
            return MessageReplies(episodes, form, placeholders, has_stops=has_stops)
        prompt = generation_prompt(tokenizer, processor)
        return TextReplies(episodes, tokenizer, placeholders, prompt=prompt, warn=warn)


class ToolEnvironment(Environment):
    """Functions and classes of the user, which the student calls in the format of its chat template."""

    key, turns = TOOLS, "turns with calls"

    def __init__(self, rollout: "PromptConfig", full_key: Callable[[str], str]):
        from transformers.utils import chat_template_utils as schemas

        from stillhouse.config import ConfigError, as_config_error
        from stillhouse.config.section import function_hint

        errors = schemas.TypeHintParsingException, schemas.DocstringParsingException
        self.path, self.format_key = " ".join(rollout.tool_paths), full_key("tools")
        self._most_tokens = rollout.tool_tokens
        with as_config_error(self.format_key):
            self._tools = Tools(rollout.tool_paths, function_hint)
        self.schemas = []
        for name, described in self._tools.described.items():
            try:
                self.schemas.append(schemas.get_json_schema(described))
            except (*errors, ValueError, TypeError, AttributeError) as error:
                problem = f"{name} has no description that a model can read: {first_line(error)}"
                raise ConfigError(self.format_key, problem) from error

    @property
    def functions(self) -> list[UserFunction]:
        return [*self._tools.functions.values(), *self._tools.classes]

    @classmethod
    def rules(cls) -> "Iterator[Rule]":
        from stillhouse.config.rule import needs

        yield needs("rollout.tool_tokens", TOOLS)

    @classmethod
    def answer(cls, path: str, *, is_limited: bool) -> Callable[..., Any]:
        tools = Tools(path.split(), is_limited=is_limited)
        return Episodes(f"{TOOLS}: {path}", tools.start, have_state=tools.have_state)

    def markers(self, tokenizer: Any, processor: Any) -> dict[int, str]:
        from stillhouse.agents.tool_format import ToolFormat

        form = ToolFormat(tokenizer, self.schemas or [], processor)
        return {form.marker_id: form.marker}

    def replies(self, calls: Any, tokenizer: Any, processor: Any, warn: Callable[[str], None]) -> Any:
        from stillhouse.agents.replies import ToolReplies
        from stillhouse.agents.tool_format import ToolFormat
        from stillhouse.rollout.turns import EpisodeCalls

        episodes, form = EpisodeCalls(calls, TOOLS, self.path), ToolFormat(tokenizer, self.schemas or [], processor)
        return ToolReplies(episodes, form, self._most_tokens, have_state=self._tools.have_state, warn=warn)
