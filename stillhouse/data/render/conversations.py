"""Renders conversations as text with a chat template. A chat template is untrusted code that comes with a model.

Therefore `Conversations.answer` runs in a separate process (`isolated_process.py`). Its arguments and results have
JSON types. It returns an error of the template instead of raising it.
"""

import re
from collections.abc import Collection
from datetime import datetime
from functools import lru_cache, partial
from textwrap import shorten

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from stillhouse.data.read.messages import Message, Tools, with_joined_parts, with_parts
from stillhouse.data.record import require_length
from stillhouse.data.render.assistant_turns import Span, Turns
from stillhouse.data.render.templates import Targets
from stillhouse.data.render.written_texts import Lost, is_refused, losses
from stillhouse.display import first_line
from stillhouse.libraries import reading

_REFUSED = "the chat template refuses the messages"
#: the date that templates get instead of today's date: the default of Llama's templates
DATE = datetime(2024, 7, 26)
_ASKS_FOR_THE_DATE = re.compile(r"""\bstrftime_now\(\s*(?P<quote>['"])(?P<form>[^'"\\]*)(?P=quote)\s*\)""")


class Conversations:
    """Renders conversations with a tokenizer's chat template.

    targets: "all": all characters are targets, not only those of the assistant. "none": the text ends with the
        generation prompt.
    end_ids: the end-of-sequence ids of the model. One of them that begins the next turn ends a turn without marker.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, targets: Targets, end_ids: Collection[int] = ()):
        self.tokenizer, self.targets = tokenizer, targets
        added = tokenizer.get_added_vocab()
        self.special = tuple(added)
        self.ends = tuple(token for token, index in added.items() if index in end_ids)

    def answer(
        self, messages: list[Message], tools: Tools, first: int | None
    ) -> tuple[str, list[Span], str, list[Lost], str, bool]:
        """The text, its target ranges from message `first` on, the token that ends the assistant's last turn (see
        `Rendered.end`), the messages' texts that are not in it, the error ("" if there is none), and whether it is an
        error of the template's syntax. Such an error is written as what follows the words "a chat template that".

        first: None if the messages are the beginning of a longer conversation, without targets and generation prompt.
        """
        try:
            body, spans, end, lost = self._in_a_form(messages, tools, first)
            require_length(len(body), "the text that the chat template renders")
        except ValueError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                return "", [], "", [], _syntax_problem(error.__cause__), True
            return "", [], "", [], str(error), False
        return body, spans, end, lost, "", False

    def _in_a_form(
        self, messages: list[Message], tools: Tools, first: int | None
    ) -> tuple[str, list[Span], str, list[Lost]]:
        """The conversation in the first of these forms in which the template writes all texts: with its contents as
        they are, with all as strings (parts joined, "" for a call without content), with all as parts.
        """
        strings = [with_joined_parts(message) for message in messages]
        parts = [with_parts(message) for message in strings]
        answers, parts_answer, problems = [], None, []
        for form in (messages, *([strings] if strings != messages else []), *([parts] if parts != messages else [])):
            try:
                answer = self._with_losses(form, tools, first)
            except ValueError as error:
                problems.append(error)
                continue
            if not any(map(is_refused, answer[-1])):
                return answer
            if form is parts:
                parts_answer = answer  # the losses of another form are those of the record
            else:
                answers.append(answer)
        if answers:
            return min(
                answers, key=lambda answer: (any(loss.kind == "object" for loss in answer[-1]), len(answer[-1]))
            )
        problem = min(problems, key=_concerns_form)
        if parts_answer and _concerns_form(problem) and not any(loss.kind == "object" for loss in parts_answer[-1]):
            return parts_answer
        raise problem

    def _with_losses(
        self, messages: list[Message], tools: Tools, first: int | None
    ) -> tuple[str, list[Span], str, list[Lost]]:
        prompt = self.targets == "none" and first is not None
        lost = partial(losses, partial(self._text, tools, prompt=prompt), messages, template=self._source(tools))
        try:
            body, spans = self._with_spans(messages, tools, first)
        except ValueError:
            # A turn without its text often has no place that can be identified. Then the lost text is the cause.
            body = self._text(tools, messages)
            if any(map(is_refused, texts := lost(body=body))):
                return body, [], "", texts
            raise
        return body, spans, self._end(messages, tools, body, spans) if spans else "", lost(body=body)

    def _end(self, messages: list[Message], tools: Tools, body: str, spans: list[Span]) -> str:
        """The special token that ends the assistant's last turn, as if no message followed: in the middle of a
        conversation, some templates end a turn with a token that does not end what the model writes (gpt-oss's
        `<|end|>`). It is "" without such a turn, and if the template refuses the messages up to it.
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

    def _turns(self, messages: list[Message], tools: Tools, body: str) -> Turns:
        return Turns(partial(self._text, tools), messages, body, self.special, self.ends)

    def _with_spans(self, messages: list[Message], tools: Tools, first: int | None) -> tuple[str, list[Span]]:
        if first is None:
            return self._text(tools, messages), []
        if self.targets == "none":
            return self._text(tools, messages, prompt=True), []
        source = self._source(tools)
        if self.targets != "all" and "endgeneration" in source:
            return self._with_marked_spans(source, messages, tools, first)
        body = self._text(tools, messages)
        turns = self._turns(messages, tools, body)
        closes = messages[-1]["role"] == "assistant" and "endgeneration" not in source
        header = turns.closing_header() if closes else ""
        spans = turns.spans(first) if self.targets == "completion" else [(0, len(body))]
        if header:
            body += header
            spans[-1] = spans[-1][0], len(body)
        return body, spans

    def _with_marked_spans(
        self, source: str, messages: list[Message], tools: Tools, first: int
    ) -> tuple[str, list[Span]]:
        # `apply_chat_template(return_assistant_tokens_mask=True)` cannot be used. It looks up single characters, and
        # stops if the tokenizer's offsets skip a leading space, so that the rest of the text would have no targets.
        with reading(_REFUSED):
            bodies, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        if first == 0:
            return bodies[0], spans[0]
        turns = self._turns(messages, tools, bodies[0])
        start = turns.edge(first, prompt=False)
        return bodies[0], [(begin, end) for begin, end in spans[0] if begin >= start]


@lru_cache(maxsize=8)
def undated(template: str) -> str:
    """Replace today's date in the template by `DATE`. Otherwise the documents would change every day: a run could not
    be resumed, and a signal cache would not contain its documents.
    """
    return _ASKS_FOR_THE_DATE.sub(lambda match: repr(DATE.strftime(match["form"])), template)


def _concerns_form(problem: ValueError) -> bool:
    """Whether an error tells only that the template's code cannot use a form, and is not raised by it on purpose."""
    return str(problem).startswith(_REFUSED) and type(problem.__cause__) is not TemplateError


def _syntax_problem(error: TemplateSyntaxError) -> str:
    lines = (error.source or "").splitlines()
    line = lines[error.lineno - 1].strip() if 0 < error.lineno <= len(lines) else ""
    shown = f" ({shorten(line, 80)!r})" if line else ""
    return f"has a syntax error in line {error.lineno:,}{shown}: {first_line(error)}"
