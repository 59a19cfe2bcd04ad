"""Held-out prompts that the student completes at each evaluation, for eval_samples.jsonl: how its text changes."""

import hashlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.config import EvalConfig
from stillhouse.data import Documents, PackedSequences
from stillhouse.generation import GenerationRequest
from stillhouse.generation.in_process import InProcessEngine
from stillhouse.output.folder import RunFolder
from stillhouse.output.json_lines import LineFile
from stillhouse.output.records import CHARACTERS, EvalSample
from stillhouse.parallel import is_first
from stillhouse.run.session import Session

PROMPT_TOKENS = 32  # at most, of a document that is no prompt and completion


@dataclass(frozen=True)
class HeldOutPrompt:
    """The beginning of a held-out document, and how it goes on there. source: its file and line."""

    source: str
    prompt_N: np.ndarray
    reference_N: np.ndarray


class EvalSamples:
    """Completes the same prompts at each evaluation.

    sequences: the held-out data
    engine: greedy, with the student's present weights
    file: None on all ranks except rank 0
    """

    def __init__(
        self,
        settings: EvalConfig,
        sequences: PackedSequences,
        tokenizer: PreTrainedTokenizerBase,
        engine: InProcessEngine,
        file: LineFile | None,
    ):
        self._tokenizer, self._engine, self._file = tokenizer, engine, file
        self._prompts = choose_prompts(sequences.documents, settings.samples)
        self._requests = []
        for number, prompt in enumerate(self._prompts):
            tokens = min(settings.task_tokens, sequences.max_tokens - len(prompt.prompt_N))
            self._requests.append(GenerationRequest(number, prompt.prompt_N, number, tokens))

    def write(self, step: int) -> None:
        """Complete the prompts and append the lines. A collective of all processes."""
        completions = [pending.result() for pending in self._engine.generate(self._requests)]
        if self._file is None:
            return
        decode = self._tokenizer.decode
        self._file.append(
            [
                EvalSample(
                    step=step,
                    number=request.number,
                    source=prompt.source,
                    prompt=decode(prompt.prompt_N.tolist())[-CHARACTERS:],
                    reference=decode(prompt.reference_N[: request.max_new_tokens].tolist())[:CHARACTERS],
                    completion=decode(completion.ids_N.tolist())[:CHARACTERS],
                    tokens=len(completion.ids_N),
                    finish=completion.finish,
                )
                for request, prompt, completion in zip(self._requests, self._prompts, completions, strict=True)
            ]
        )


@contextmanager
def eval_samples(
    session: Session, folder: RunFolder, engine: InProcessEngine | None, kept: int
) -> Iterator[EvalSamples | None]:
    """The samples of a run's evaluations; None if it asks for none.

    kept: the last step whose lines are kept; those of later steps are removed, because they are written again.
    """
    if not session.eval_config.samples:
        yield None
        return
    assert engine is not None
    assert session.evaluation is not None
    with closing(LineFile(folder.eval_samples, kept)) if is_first() else nullcontext() as file:
        yield EvalSamples(session.eval_config, session.evaluation, session.tokenizer, engine, file)


def choose_prompts(documents: Documents, count: int) -> list[HeldOutPrompt]:
    """Choose up to `count` prompts, the same ones in every run on this data. Several sets take turns.

    A document with a prompt is cut where its first target begins. Another one is cut after half of its tokens, at
    most `PROMPT_TOKENS`. One of a single token has no prompt.
    """
    ranked = sorted(range(len(documents)), key=lambda d: hashlib.sha256(documents.tokens(d).tobytes()).digest())
    by_set: dict[int, list[int]] = {}
    for document in ranked:
        if len(documents.tokens(document)) > 1:
            of_set = 0 if documents.set_D is None else int(documents.set_D[document])
            by_set.setdefault(of_set, []).append(document)
    turns = sorted(
        (turn, of_set, document) for of_set, of_one in by_set.items() for turn, document in enumerate(of_one)
    )
    return [_prompt(documents, document) for _, _, document in turns[:count]]


def _prompt(documents: Documents, document: int) -> HeldOutPrompt:
    ids_N = documents.tokens(document)
    first = int(np.flatnonzero(documents.targets(document))[0])
    cut = first if first > 1 else max(1, min(PROMPT_TOKENS, len(ids_N) // 2))
    return HeldOutPrompt(documents.sources[document], ids_N[:cut].astype(np.int32), ids_N[cut:])
