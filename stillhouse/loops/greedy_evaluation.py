"""Evaluations for which the student completes prompts: eval.tasks, eval.samples, eval.prompts and eval.callbacks.

Functions whose names are in eval.callbacks get an `EvaluationContext` and return metrics:

    def accuracy(context: EvaluationContext) -> dict[str, float]:
        answers = context.generate(["2 + 2 ="])
        return {"sums": float(answers[0].strip() == "4")}
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, as_config_error
from stillhouse.config.evaluation_section import is_of_callback
from stillhouse.data import Documents
from stillhouse.data.media import MediaProcessor, media_end
from stillhouse.data.record import RecordError
from stillhouse.data.render.templates import Rendered, StringTemplate
from stillhouse.loops.held_out import in_shown_order
from stillhouse.loops.prompt_evaluation import PromptEvaluation, eval_sample
from stillhouse.loops.rollouts import in_job_engine
from stillhouse.loops.session import Data, Models, Schedule, Session
from stillhouse.models import eos_ids
from stillhouse.output.folder import RunFolder
from stillhouse.output.json_lines import LineFile
from stillhouse.output.records import CHARACTERS, EvalSample
from stillhouse.parallel import is_first, watchdog
from stillhouse.preemption import OverdueError
from stillhouse.rollout import Completion, GenerationRequest, Sampling
from stillhouse.rollout.engines import InJobEngine
from stillhouse.rollout.rollout import errors_of_signals
from stillhouse.rollout.user_functions import user_function
from stillhouse.tasks import TaskSpec, exact_match, problem
from stillhouse.user_code.functions import CALLBACKS, UserFunctionError, finite_number, shown

_NAME = re.compile(r"[\w.\-/]+")
#: if a document has no prompt, at most this many tokens of its beginning are used as the prompt
PROMPT_TOKENS = 32


@dataclass(frozen=True)
class GreedyEvaluation:
    """The evaluations of a run that need completions.

    engine: completes prompts greedily; if the run has several processes, it has a copy of the student's weights.
    file: the file of the shown completions. It is None if no completions are shown, and on all ranks except rank 0.
    prompts: the evaluation of eval.prompts, or None if the run has none.
    """

    models: Models
    data: Data
    schedule: Schedule
    folder: RunFolder
    engine: InJobEngine
    file: LineFile | None
    prompts: PromptEvaluation | None

    def evaluate(self, step: int, others: dict[str, float]) -> dict[str, float]:
        """Return the metrics of tasks and callbacks, the same on all ranks, and record completions of held-out
        prompts. A collective.

        others: the other metrics of this evaluation, whose names a callback must not use.

        Raises UserFunctionError on all ranks if a callback or a reward fails, the errors of `errors_of_signals`, and
        ConfigError if no callback gives the metric of checkpoint.best.
        """
        settings, checkpoint = self.schedule.eval_config, self.schedule.checkpoint_config
        generate, tokenizer = self.engine.generate, self.data.tokenizer
        watchdog.enter("the evaluation of tasks")
        self.engine.update_weights(step)
        metrics = evaluate_tasks(generate, tokenizer, settings.tasks, settings.task_count, self.schedule.seed)
        if settings.samples and self.data.evaluation is not None:
            self._show_completions(step)
        context = EvaluationContext(step, self.folder.path, tokenizer, self._complete_texts)
        with errors_of_signals():
            if self.prompts is not None:
                prompt_metrics, shown = self.prompts.evaluate(step)
                metrics |= prompt_metrics
                if self.file is not None:
                    self.file.append(shown)
            watchdog.enter("eval.callbacks", timed=False)  # callbacks can take any time
            with self.models.ranks.shared(UserFunctionError, ValueError, OverdueError) as shared:
                if is_first():
                    shared.value = dict[str, float]()
                    for path in settings.callbacks:
                        function = user_function(CALLBACKS, path)
                        names = {*others, *metrics, *shared.value}
                        shared.value |= checked_metrics(function, function(context), names)
            metrics |= shared.value
        if is_of_callback(checkpoint.best) and checkpoint.best not in metrics:
            raise ConfigError(
                "checkpoint.best",
                f"got {checkpoint.best}, but the evaluation of step {step} has only {', '.join(others | metrics)}",
            )
        return metrics

    def _complete_texts(self, texts: Sequence[str]) -> list[str]:
        """Complete texts on this rank only; the other ranks wait for the metrics of the callbacks."""
        tokenizer = self.data.tokenizer
        completions = self.engine.generator.generate(_text_requests(tokenizer, texts), self.engine.version)
        return [tokenizer.decode(completion.ids_N.tolist(), skip_special_tokens=True) for completion in completions]

    def _show_completions(self, step: int) -> None:
        """Complete the same held-out prompts at each evaluation, and append them to eval_samples.jsonl."""
        data, settings, sequences = self.data, self.schedule.eval_config, self.data.evaluation
        assert sequences is not None
        prompts = choose_prompts(sequences.documents, settings.samples, data.media_processor)
        requests: list[GenerationRequest] = []
        for number, prompt in enumerate(prompts):
            tokens = min(settings.task_tokens, sequences.max_tokens - len(prompt.prompt_N))
            media = sequences.documents.media_of(prompt.document)
            requests.append(GenerationRequest(number, prompt.prompt_N, number, tokens, media))
        completions = self.engine.generate(requests)
        if self.file is None:
            return
        shown: list[EvalSample] = []
        for request, prompt, completion in zip(requests, prompts, completions, strict=True):
            reference = data.tokenizer.decode(prompt.reference_N[: request.max_new_tokens].tolist())
            sample = eval_sample(step, data, sequences.documents, prompt.document, prompt.prompt_N, completion)
            shown.append(replace(sample, number=request.number, reference=reference[:CHARACTERS]))
        self.file.append(shown)


@contextmanager
def greedy_evaluation(session: Session, folder: RunFolder, kept: int) -> Iterator[GreedyEvaluation | None]:
    """Yield the evaluations that need completions, or None if the run has none. kept: the last step whose shown
    completions are kept. The completions of later steps are removed, because the run repeats these steps.
    """
    settings = session.schedule.eval_config
    if not (settings.tasks or settings.callbacks or settings.samples or settings.prompts):
        yield None
        return
    eos = eos_ids(session.data.tokenizer, session.models.student)
    engine = in_job_engine(session, Sampling(settings.task_tokens, temperature=0.0, eos_ids=eos))
    prompts, prompt_settings = None, settings.prompts
    if prompt_settings is not None:
        sampling = Sampling(prompt_settings.max_new_tokens, prompt_settings.temperature, eos_ids=eos)
        prompts = PromptEvaluation(session, prompt_settings, engine, sampling)
    writes = (settings.samples or prompt_settings is not None) and is_first()
    with closing(LineFile(folder.eval_samples, kept)) if writes else nullcontext() as file:
        yield GreedyEvaluation(session.models, session.data, session.schedule, folder, engine, file, prompts)


def evaluate_tasks(
    generate: Callable[[Sequence[GenerationRequest]], list[Completion]],
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    count: int,
    seed: int,
) -> dict[str, float]:
    """Return metrics of held-out problems; empty without tasks.

    For each task and for each length of its problems, a metric is the share of problems that are completed exactly.
    Another metric is the share of all completions that are cut at the limit.

    generate: completes prompts greedily, and returns the completions in the order of the prompts.
    tasks: texts for `TaskSpec.parse`; each name occurs once.
    count: the number of problems of each task. The lengths of the problems alternate.
    """
    specs = [TaskSpec.parse(text) for text in tasks]
    problems = [(spec.name, problem(spec, seed, number, held_out=True)) for spec in specs for number in range(count)]
    if not problems:
        return {}
    with as_config_error("eval.tasks", RecordError):
        requests = _text_requests(tokenizer, [item.prompt for _, item in problems])
    completions = generate(requests)
    matches: dict[str, list[float]] = {}
    for (name, item), completion in zip(problems, completions, strict=True):
        text = tokenizer.decode(completion.ids_N.tolist(), skip_special_tokens=True)
        matched = exact_match(item.prompt, text, item.record(name))
        for key in (f"eval/exact_match/{name}", f"eval/exact_match/{name}/length_{item.length}"):
            matches.setdefault(key, []).append(matched)
    truncated = sum(completion.finish == "length" for completion in completions) / len(completions)
    return {key: float(np.mean(values)) for key, values in matches.items()} | {"eval/tasks_truncated": truncated}


def _text_requests(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[GenerationRequest]:
    template = StringTemplate(tokenizer, ("prompt",), "none")
    prompts = template.encode([Rendered("", prompt=text) for text in texts])
    return [GenerationRequest(number, prompt.ids, seed=number) for number, prompt in enumerate(prompts)]


@dataclass(frozen=True)
class HeldOutPrompt:
    """The beginning of a held-out document, and its continuation. document: the document's number."""

    document: int
    prompt_N: np.ndarray
    reference_N: np.ndarray


def choose_prompts(documents: Documents, count: int, processor: MediaProcessor | None = None) -> list[HeldOutPrompt]:
    """Choose up to `count` prompts, the same prompts in every run on this data. Prompts of several sets alternate.

    A document is cut before its first target. A document without a prompt is cut after half of its tokens, but after
    at most `PROMPT_TOKENS` tokens. No document is cut before its last media. A document with nothing after the cut is
    omitted.

    processor: the processor of the media.
    """
    by_set: dict[int, list[int]] = {}
    for document in in_shown_order(documents, range(len(documents))):
        if len(documents.tokens(document)) > max(1, media_end(documents.tokens(document), processor)):
            set_number = 0 if documents.set_D is None else int(documents.set_D[document])
            by_set.setdefault(set_number, []).append(document)
    turns = sorted(
        (turn, set_number, document)
        for set_number, documents_of_set in by_set.items()
        for turn, document in enumerate(documents_of_set)
    )
    prompts: list[HeldOutPrompt] = []
    for _, _, document in turns[:count]:
        ids_N = documents.tokens(document)
        end, targets = media_end(ids_N, processor), np.flatnonzero(documents.targets(document))
        first = int(targets[0])
        cut = first if first > 1 else max(1, min(PROMPT_TOKENS, len(ids_N) // 2))
        if cut < end:
            cut = next((int(target) for target in targets if target >= end), end)
        prompts.append(HeldOutPrompt(document, ids_N[:cut].astype(np.int32), ids_N[cut:]))
    return prompts


@dataclass(frozen=True)
class EvaluationContext:
    """The argument of a callback.

    step: the number of optimizer steps so far.
    folder: the run's folder, in which a callback is allowed to write files.
    generate: completes texts greedily with the current student, up to eval.task_tokens tokens each, and returns the
        completions without special tokens in the order of the texts.
    """

    step: int
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    generate: Callable[[Sequence[str]], list[str]]


def checked_metrics(function: object, returned: Any, others: set[str]) -> dict[str, float]:
    """Return a callback's metrics under their keys, `eval/<name>`.

    others: the other metrics of this evaluation.

    Raises UserFunctionError unless the callback has returned a dict of new names and finite numbers.
    """
    if not isinstance(returned, Mapping):
        raise UserFunctionError(f"{function} gives {shown(returned)}: expected a dict of names and numbers")
    metrics: dict[str, float] = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserFunctionError(
                f"{function} gives the name {shown(name)}: expected letters, digits and any of _.-/"
            )
        number = None if isinstance(value, bool | np.bool_) else finite_number(value)
        if number is None:
            raise UserFunctionError(f"{function} gives {shown(value)} for {name!r}: expected a finite number")
        if f"eval/{name}" in others:
            raise UserFunctionError(
                f"{function} gives {name!r}, but this evaluation has an eval/{name} already: expected another name"
            )
        metrics[f"eval/{name}"] = number
    return metrics
