"""Renders conversations as text with a chat template, and finds the assistant's turns in them.

A chat template is untrusted code that comes with a model. Therefore `Conversations.answer` runs in a separate process
(`isolated_process.py`). Its arguments and results have JSON types. An error of the template is returned, not raised.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from operator import itemgetter
from textwrap import shorten
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from stillhouse.data.read.messages import Message, Tools, text_of, with_joined_parts, with_parts, with_text_appended
from stillhouse.data.record import require_length
from stillhouse.data.render.templates import ANCHOR, Span, Targets, token_at
from stillhouse.data.render.written_texts import Lost, is_refused, losses
from stillhouse.display import first_line
from stillhouse.libraries import reading

_REFUSED = "the chat template refuses the messages"
#: the date that templates get instead of today's date; it is the default of Llama's templates
DATE = datetime(2024, 7, 26)
_ASKS_FOR_THE_DATE = re.compile(r"""\bstrftime_now\(\s*(?P<quote>['"])(?P<form>[^'"\\]*)(?P=quote)\s*\)""")
#: the text, its target ranges, the token that ends the last turn, and the lost texts
_Answer = tuple[str, list[Span], str, list[Lost]]


@lru_cache(maxsize=8)
def undated(template: str) -> str:
    """Replace today's date in the template by `DATE`. With today's date, the documents would change every day: a run
    could not be resumed, and a signal cache would not contain its documents.
    """
    return _ASKS_FOR_THE_DATE.sub(lambda match: repr(DATE.strftime(match["form"])), template)


@dataclass(frozen=True)
class Turns:
    """Finds the assistant's turns in one conversation that a chat template rendered without marking them.

    text: a function that renders messages. If its second argument is true, the generation prompt follows.
    body: the whole conversation as text.
    special: the tokenizer's added tokens. ends: the added tokens that are end-of-sequence tokens of the model.

    With most templates, the text of the first n messages (and the generation prompt after them) is a prefix of the
    text of the whole conversation. The length of this prefix is then the position of an edge: the beginning or the
    end of a turn.

    Templates of reasoning models drop the thoughts of all turns except the last turn. For these templates, an anchor
    (a unique text) is appended to the content of message n. Then the first n messages and the whole conversation are
    rendered. In the first rendering, the text after the anchor must be a prefix of the text after the anchor in the
    second rendering. The renderings without the anchor must end with these two texts. So the conversation is never
    searched for an edge, and no text of a user can be mistaken for an edge.

    Some templates end a turn with nothing but the header of the next turn (GLM: `<|user|>`, `<|observation|>`). If
    this header begins with an end-of-sequence token of the model, the token belongs to the turn that it ends.

    Two deviations are supported in turns before the last message. First, the generation prompt may open the thoughts
    of a turn that has no thoughts in `body`. Second, the template may write a text after the end marker only in the
    last turn. Every other deviation raises ValueError.
    """

    text: Callable[[list[Message], bool], str]
    messages: list[Message]
    body: str
    special: tuple[str, ...]
    ends: tuple[str, ...] = ()

    def spans(self, first: int) -> list[Span]:
        """The characters that the assistant generates in the messages from `first` on, as one range per turn.

        A range includes the template's text between the generation prompt and the content (such as an empty thinking
        block). It also includes the end marker of the turn, but not the white space after the marker. A turn without
        a marker includes the end-of-sequence token with which the next turn begins.
        """
        spans: list[Span] = []
        for index, message in enumerate(self.messages):
            if message["role"] == "assistant" and index >= first:
                start = self.edge(index, prompt=True)
                stop = self.edge(index + 1, prompt=False)
                if not (spans[-1][1] if spans else 0) <= start <= stop:
                    raise self._error(index + 1, prompt=False)
                turn = self.body[start:stop].rstrip()
                if (end := token_at(self.body, self.ends, stop)) and not self._has_marker(turn, index + 1):
                    stop += len(end)
                elif turn.endswith(self.special):
                    stop = start + len(turn)
                spans.append((start, stop))
        return spans

    def edge(self, count: int, *, prompt: bool) -> int:
        """The position in the body where the first `count` messages (and the generation prompt) end."""
        if not count:
            raise ValueError(
                "the conversation begins with a turn of the assistant: a chat template writes no generation prompt "
                "without a message before it, so the tokens that the assistant generates cannot be identified; "
                "expected a turn of the user or system at the beginning; or lists of messages, with this turn in "
                "'prompt' and the turns to learn in 'completion'; or a chat template with {% generation %} blocks"
            )
        if count == len(self.messages) and not prompt:
            return len(self.body)
        beginning = self.text(self.messages[:count], prompt)
        if self.body.startswith(beginning):
            return len(beginning)
        anchored = self._anchored(count)
        try:
            shortened, complete = self._behind(anchored, prompt), self._behind(anchored + self.messages[count:])
        except ValueError as error:  # the template refuses a content here, and not the conversation
            raise self._error(count, prompt) from error
        if shortened is None or complete is None:
            raise self._error(count, prompt)
        if not text_of(self.messages[count - 1]).strip():
            # With an empty content, templates write no white space before a tool call, so white space is ignored.
            shortened, complete = shortened.lstrip(), complete.lstrip()
        if not complete or not beginning.endswith(shortened) or not self.body.endswith(complete):
            raise self._error(count, prompt)
        common = shortened  # the characters of `complete` that belong to the first messages
        if not complete.startswith(shortened):
            common = ""
            if count + prompt < len(self.messages) and prompt:
                # the text between the content of message number `count` and the content of the next message
                following, behind = self.messages[count], self.messages[count + 1 :]
                empty: str | list[Any] = [] if isinstance(following.get("content"), list) else ""
                turn = with_text_appended(following | {"content": empty}, ANCHOR)
                common = (self._behind([*anchored, turn, *behind]) or "").partition(ANCHOR)[0]
            elif count + prompt < len(self.messages) and not self.messages[count - 1].get("tool_calls"):
                # the added token directly after the content must end the turn in both renderings
                common = token_at(shortened, self.special)
            if not (common and shortened.startswith(common) and complete.startswith(common)):
                raise self._error(count, prompt)
        return len(self.body) - len(complete) + len(common)

    def closing_header(self) -> str:
        """The end-of-sequence token with which the template would begin a turn after the last message, which must be
        the assistant's. The result is "" if the assistant's turn has an end marker, or if the next turn would not
        begin with an end-of-sequence token.
        """
        if not self.ends or self._has_marker(self.body.rstrip(), len(self.messages)):
            return ""
        anchored, following = self._anchored(len(self.messages)), {"role": "user", "content": "a"}
        if calls := self.messages[-1].get("tool_calls"):
            call = calls[0] if isinstance(calls[0], dict) else {}
            function = call.get("function", call)
            name = (function.get("name") if isinstance(function, dict) else None) or "a"
            following = {"role": "tool", "content": "a", "name": name, "tool_call_id": call.get("id") or "000000000"}
        try:
            behind, longer = self._behind(anchored), self._behind([*anchored, following])
        except ValueError:
            return ""  # the template refuses a turn after the last message
        if behind is None or longer is None or not longer.startswith(behind):
            return ""
        return token_at(longer, self.ends, len(behind))

    def _has_marker(self, text: str, count: int) -> bool:
        """Whether the template ends the text of the first `count` messages with an end-of-sequence token. Such a
        token at the end of the last content is no marker.
        """
        if not text.endswith(self.ends) or not text_of(self.messages[count - 1]).rstrip().endswith(self.ends):
            return text.endswith(self.ends)
        return (self._behind(self._anchored(count)) or "").rstrip().endswith(self.ends)

    def _anchored(self, count: int) -> list[Message]:
        return [*self.messages[: count - 1], with_text_appended(self.messages[count - 1], ANCHOR)]

    def _behind(self, messages: list[Message], prompt: bool = False) -> str | None:
        """The text after the first anchor; None if the template has dropped the anchor."""
        _, anchor, behind = self.text(messages, prompt).partition(ANCHOR)
        return behind if anchor else None

    def _error(self, count: int, prompt: bool) -> ValueError:
        what = "the assistant's tokens cannot be identified: the chat template"
        is_last = count + prompt == len(self.messages)
        if prompt and is_last and self.body.startswith(before := self.text(self.messages[:count], False)):
            expected = self.text(self.messages[:count], True).removeprefix(before)
            written = self.body[len(before) : len(before) + len(expected) + 20]
            return ValueError(
                f"{what} ends a prompt with {expected[-80:]!r}, but begins message {count + 1} with "
                f"{written[:100]!r}: expected a message with thoughts ('reasoning_content') if the generation prompt "
                "opens them, and without thoughts if it closes them; or a template with another generation prompt "
                "(data.chat_template; for a template that reads enable_thinking, a copy whose first line is {%- set "
                "enable_thinking = false %}, or true); or a template with {% generation %} blocks"
            )
        only = "" if is_last else "set data.turns=last, which trains only on the last turn, or "
        return ValueError(
            f"{what} renders the first {count} messages{' and the generation prompt' if prompt else ''} by "
            "themselves differently from the same messages within the whole conversation (reasoning templates "
            f"rewrite earlier turns); {only}use a chat template with {{% generation %}} blocks"
        )


class Conversations:
    """Renders conversations with a tokenizer's chat template.

    targets: with "all", the characters of all roles are targets; with "none", the text ends with the generation
        prompt. "completion" and "last" differ only in the first message that can be a target.
    end_ids: the end-of-sequence ids of the model (see `Turns`).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, targets: Targets, end_ids: Collection[int] = ()):
        self.tokenizer, self.targets = tokenizer, targets
        added = tokenizer.get_added_vocab()
        self.special = tuple(added)
        self.ends = tuple(token for token, index in added.items() if index in end_ids)

    def answer(
        self, messages: list[Message], tools: Tools, first: int | None
    ) -> tuple[str, list[Span], str, list[Lost], str, bool]:
        """Return the text, its target ranges from message `first` on, the token that ends the assistant's last turn
        (see `Rendered.end`), the lost texts, the error ("" if there is none), and whether the template has a syntax
        error. The text of a syntax error is the end of a sentence ("has a syntax error …").

        first: None renders the messages without targets and without a generation prompt.
        """
        try:
            answer = self._in_a_form(messages, tools, first)
            require_length(len(answer[0]), "the text that the chat template renders")
        except ValueError as error:
            cause = error.__cause__
            if not isinstance(cause, TemplateSyntaxError):
                return "", [], "", [], str(error), False
            lines = (cause.source or "").splitlines()
            line = lines[cause.lineno - 1].strip() if 0 < cause.lineno <= len(lines) else ""
            shown = f" ({shorten(line, 80)!r})" if line else ""
            return "", [], "", [], f"has a syntax error in line {cause.lineno:,}{shown}: {first_line(cause)}", True
        return *answer, "", False

    def _in_a_form(self, messages: list[Message], tools: Tools, first: int | None) -> _Answer:
        """Render three forms of the conversation, until no content or call is lost: with unchanged contents, with all
        contents as strings (parts joined, "" for a call without content), with all contents as lists of parts.
        """
        strings = [with_joined_parts(message) for message in messages]
        parts = [with_parts(message) for message in strings]
        answers, parts_answer = [], None
        problems: list[tuple[bool, ValueError]] = []
        for form in (messages, *([strings] if strings != messages else []), *([parts] if parts != messages else [])):
            try:
                answer = self._with_losses(form, tools, first)
            except ValueError as error:
                # whether the code of the template fails for this form, and does not raise the error on purpose
                concerns_form = str(error).startswith(_REFUSED) and type(error.__cause__) is not TemplateError
                problems.append((concerns_form, error))
                continue
            if not any(map(is_refused, answer[-1])):
                return answer
            if form is parts:
                parts_answer = answer  # its lost texts are reported only if there is no answer for another form
            else:
                answers.append(answer)

        def has_object(answer: _Answer) -> bool:
            return any(loss.kind == "object" for loss in answer[-1])

        if answers:
            # a form of which the template writes all texts, but whose turns cannot be identified
            unclear = next((error for _, error in problems if not str(error).startswith(_REFUSED)), None)
            if unclear is not None:
                raise unclear
            return min(answers, key=lambda answer: (has_object(answer), len(answer[-1])))
        concerns_form, problem = min(problems, key=itemgetter(0))
        if parts_answer and concerns_form and not has_object(parts_answer):
            return parts_answer
        raise problem

    def _with_losses(self, messages: list[Message], tools: Tools, first: int | None) -> _Answer:
        prompt = self.targets == "none" and first is not None
        lost = partial(losses, partial(self._text, tools, prompt=prompt), messages, template=self._source(tools))
        try:
            body, spans = self._with_spans(messages, tools, first)
        except ValueError:
            # A turn can often not be identified because its text is lost. Then the lost text is reported.
            body = self._text(tools, messages)
            if any(map(is_refused, texts := lost(body=body))):
                return body, [], "", texts
            raise
        return body, spans, self._end(messages, tools, body, spans) if spans else "", lost(body=body)

    def _end(self, messages: list[Message], tools: Tools, body: str, spans: list[Span]) -> str:
        """The special token that ends the assistant's last turn when it is the last turn of a conversation. If other
        turns follow, some templates end this turn with a token at which generation does not stop (`<|end|>` of
        gpt-oss). The result is "" if the template refuses the messages up to this turn.
        """
        turn, count = body[slice(*spans[-1])], len(messages)
        while count and messages[count - 1]["role"] != "assistant":
            count -= 1
        if count < len(messages):
            try:
                turn = self._text(tools, messages[:count]) if count else ""
            except ValueError:
                return ""
        return max((token for token in self.special if turn.rstrip().endswith(token)), key=len, default="")

    def _text(self, tools: Tools, messages: list[Message], prompt: bool = False) -> str:
        source = self._source(tools)
        with reading(_REFUSED):
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, chat_template=source
            )

    def _source(self, tools: Tools) -> str:
        """The template with a fixed date. A tokenizer may have a separate template for conversations with tools."""
        with reading(_REFUSED):
            source = self.tokenizer.get_chat_template(tools=tools)
        return undated(source)

    def _with_spans(self, messages: list[Message], tools: Tools, first: int | None) -> tuple[str, list[Span]]:
        if first is None or self.targets == "none":
            return self._text(tools, messages, prompt=first is not None), []
        source = self._source(tools)
        turns = partial(Turns, partial(self._text, tools), messages, special=self.special, ends=self.ends)
        has_marks = "endgeneration" in source
        if self.targets != "all" and has_marks:
            # `apply_chat_template(return_assistant_tokens_mask=True)` cannot be used. It looks up single characters,
            # and stops if the tokenizer's offsets skip a leading space, so that later tokens would be no targets.
            with reading(_REFUSED):
                (body, *_), (spans, *_) = render_jinja_template(
                    conversations=[messages],
                    tools=tools,
                    chat_template=source,
                    return_assistant_tokens_mask=True,
                    **self.tokenizer.special_tokens_map,
                )
            start = turns(body=body).edge(first, prompt=False) if first else 0
            return body, [span for span in spans if span[0] >= start]
        body = self._text(tools, messages)
        header = turns(body=body).closing_header() if messages[-1]["role"] == "assistant" and not has_marks else ""
        spans = turns(body=body).spans(first) if self.targets != "all" else [(0, len(body))]
        if header:
            body += header
            spans[-1] = spans[-1][0], len(body)
        return body, spans
