"""What follows the turns of samples, for each source of prompts: replies of environments and of tools."""

from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, RolloutConfig
from stillhouse.config.sections.data_section import source_prefix
from stillhouse.data.media import MediaProcessor
from stillhouse.data.render.reply_format import ReplyFormat, generation_prompt, reply_format
from stillhouse.data.render.tool_format import ToolFormat, tool_format
from stillhouse.loops.completion_calls import CompletionCalls, warn
from stillhouse.loops.session import Session
from stillhouse.models import eos_ids
from stillhouse.rollout.turns import MessageReplies, TextReplies, ToolReplies, TurnReplies
from stillhouse.rollout.user_functions import tool_schemas


def turn_replies(
    rollouts: Sequence[RolloutConfig],
    calls: CompletionCalls,
    tokenizer: PreTrainedTokenizerBase,
    processor: MediaProcessor | None,
) -> list[TurnReplies | None]:
    """For each source of prompts, what follows the turns of its samples; None if they have one turn."""
    formats: dict[tuple[str, ...], ToolFormat] = {}
    placeholders = [] if processor is None else processor.placeholder_ids
    replies: list[TurnReplies | None] = []
    for rollout, of_source in zip(rollouts, calls.sources, strict=True):
        if of_source.tools is not None and (schemas := tool_schemas(rollout)) is not None:
            paths, have_state = tuple(rollout.tool_paths), of_source.tools.have_state
            formats[paths] = formats.get(paths) or tool_format(tokenizer, schemas, processor)
            replies.append(
                ToolReplies(of_source.tools, formats[paths], rollout.tool_tokens, have_state=have_state, warn=warn)
            )
        elif of_source.environment is not None and (role := rollout.reply_role) is not None:
            of_role = reply_format(tokenizer, role, processor)
            has_stops = bool(rollout.stop)
            replies.append(MessageReplies(of_source.environment, of_role, placeholders, has_stops=has_stops))
        elif of_source.environment is not None:
            prompt = generation_prompt(tokenizer, processor)
            replies.append(TextReplies(of_source.environment, tokenizer, placeholders, prompt=prompt, warn=warn))
        else:
            replies.append(None)
    return replies


def require_end_of_turns(session: Session) -> None:
    """Raise ConfigError on all ranks if the student cannot end a turn with a call of a tool, or before a reply."""
    for number, rollout in enumerate(session.rollouts):
        if rollout.writer == "student":
            require_end_of_turn(session, rollout, partial(source_prefix, session.prompt_sources, number))


def require_end_of_turn(
    session: Session, rollout: RolloutConfig, prefix: Callable[[str], str] = lambda key: ""
) -> None:
    """Raise ConfigError on all ranks if the student cannot end a turn. prefix: returns what precedes a key."""
    if rollout.stop:
        return
    if (schemas := tool_schemas(rollout)) is not None:
        key, what = "tools", "turns with calls"
        of_turns: ToolFormat | ReplyFormat = tool_format(session.tokenizer, schemas, session.media_processor)
    elif (role := rollout.reply_role) is not None:
        key, what = "reply", "turns"
        of_turns = reply_format(session.tokenizer, role, session.media_processor)
    else:
        return
    if of_turns.marker_id not in eos_ids(session.tokenizer, session.student):
        raise ConfigError(
            f"{prefix(key)}rollout.{key}",
            f"the chat template ends {what} with {of_turns.marker!r}, which is no end-of-sequence token of the "
            "student: expected it in eos_token_id of the student's generation_config.json, or in rollout.stop",
        )
