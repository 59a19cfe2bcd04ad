"""`stillhouse chat`: a conversation with a model, and perhaps with a second one that gets the same questions."""

import sys
from collections.abc import Iterable, Iterator, Sequence

from transformers import PreTrainedTokenizerBase, TextStreamer

from stillhouse.data.record import RecordError
from stillhouse.data.render.record_forms import template_for
from stillhouse.display import escaped, print_escaped
from stillhouse.models.families import ModelFacts
from stillhouse.rollout import GenerationRequest
from stillhouse.rollout.generate import Generator

RESET, QUIT, HELP = "/reset", "/quit", "/help"
_COMMANDS = f"{RESET} begins a new conversation; {QUIT} or Ctrl-D ends the command"


class Speaker:
    """A model and its own copy of the conversation.

    name: the model's name in messages. system: the text of a system message, or None.

    Raises ValueError for a system message if the tokenizer has no chat template.
    """

    def __init__(
        self, name: str, generator: Generator, tokenizer: PreTrainedTokenizerBase, system: str | None, seed: int
    ):
        self.name, self._generator, self._tokenizer, self._seed = name, generator, tokenizer, seed
        self.is_chat = bool(tokenizer.chat_template)
        if system is not None and not self.is_chat:
            raise ValueError(
                f"--system: the tokenizer of {name} has no chat template: write the text into the prompt"
            )
        self._positions = ModelFacts(generator.decoder.config).max_positions or sys.maxsize
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        self._messages, self._text = list(self._system), ""

    def answer(self, question: str) -> None:
        """Print the model's answer while it is generated, and add question and answer to the conversation.

        Raises ValueError if the conversation exceeds the model's positions, or if the chat template refuses it.
        """
        messages, text = [*self._messages, {"role": "user", "content": question}], self._text + question
        fields = {"messages": messages} if self.is_chat else {"prompt": text}
        template = template_for(fields, self._tokenizer, "none")
        (encoded,) = template.encode([template.render(fields)])
        limit, room = self._generator.sampling.max_new_tokens, self._positions - len(encoded.ids)
        if room < 1:
            raise ValueError(
                f"{self.name} has {self._positions:,} positions, and the conversation with this question has "
                f"{len(encoded.ids):,} tokens: begin a new one with {RESET}, or ask a shorter question"
            )
        turn = self._seed + len(messages) + len(text)
        request = GenerationRequest(0, encoded.ids, turn, min(limit, room))
        self._generator.check([request])
        (completion,) = self._generator.batch([request], 0, streamer=_Printer(self._tokenizer, skip_prompt=True))
        if completion.finish == "length":
            what = "--max-new-tokens" if limit <= room else f"the end of the model's {self._positions:,} positions"
            print(f"[cut at {what}, after {len(completion.ids_N):,} tokens]", flush=True)
        reply = self._tokenizer.decode(completion.ids_N.tolist(), skip_special_tokens=True)
        self._messages, self._text = [*messages, {"role": "assistant", "content": reply}], f"{text}{reply}\n"


class _Printer(TextStreamer):
    """Prints a model's text without its control characters, which could move the terminal's cursor."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_prompt: bool):
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(escaped(text, lines=True), end="\n" if stream_end else "", flush=True)


def converse(speakers: Sequence[Speaker], *, is_terminal: bool) -> None:
    """Answer each line of stdin, until it ends or the line is /quit. /reset begins a new conversation.

    is_terminal: whether a person writes the lines; then a refused question does not end the conversation. Otherwise
        each question is printed before its answer.

    Raises ValueError for a refused question.
    """
    for speaker in speakers:
        if not speaker.is_chat:
            line = f"the tokenizer of {speaker.name} has no chat template: the model continues the text as it is"
            print_escaped(line, err=True)
    if is_terminal:
        print(_COMMANDS, flush=True)
    for question in _questions(is_terminal):
        if question == RESET:
            for speaker in speakers:
                speaker.reset()
            continue
        if question == HELP and is_terminal:
            print(_COMMANDS, flush=True)
            continue
        if not is_terminal:
            print_escaped(f"> {question}")
        for speaker in speakers:
            if len(speakers) > 1:
                print_escaped(f"[{speaker.name}]")
            try:
                speaker.answer(question)
            except (ValueError, RecordError) as error:
                if not is_terminal:
                    raise
                print_escaped(error, err=True)


def _questions(is_terminal: bool) -> Iterator[str]:
    lines: Iterable[str] = _typed_lines() if is_terminal else sys.stdin
    for line in lines:
        if (question := line.strip()) == QUIT:
            return
        if question:
            yield question


def _typed_lines() -> Iterator[str]:
    import readline  # noqa: F401 (its import gives `input` a history)

    while True:
        try:
            yield input("> ")
        except EOFError:
            print(flush=True)
            return
