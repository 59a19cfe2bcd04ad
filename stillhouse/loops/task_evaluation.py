"""Exact match on held-out problems of tasks, completed greedily: a figure for each task, and for each length."""

from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.config.task_spec import TaskSpec
from stillhouse.data.problems import exact_match, problem
from stillhouse.data.render.templates import CompletionTemplate
from stillhouse.generation import Completion, GenerationRequest, Sampling
from stillhouse.generation.in_process import InProcessEngine
from stillhouse.models import eos_ids
from stillhouse.run.completion_engine import in_process_engine
from stillhouse.run.session import Session

EXACT_MATCH, TRUNCATED = "eval/exact_match", "eval/tasks_truncated"


def greedy_engine(session: Session) -> InProcessEngine | None:
    """An engine that completes prompts of evaluations greedily; None if there are none.

    In a job of several processes, each of them gets a copy of the student; its `update_weights` is then a collective.
    """
    settings = session.eval_config
    if not (settings.tasks or settings.callbacks or settings.samples):
        return None
    eos = eos_ids(session.tokenizer, session.student)
    return in_process_engine(session, Sampling(settings.task_tokens, temperature=0.0, eos_ids=eos))


def evaluate_tasks(
    generate: Callable[[Sequence[GenerationRequest]], list[Completion]],
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    count: int,
    seed: int,
) -> dict[str, float]:
    """The share of held-out problems that are completed exactly.

    generate: completes prompts greedily, in their order. tasks: as in `TaskSpec.parse`, each name once. count:
    problems of each task; their lengths take turns. seed: of the problems.

    `eval/exact_match/<task>` is over all problems of a task, `eval/exact_match/<task>/length_<n>` over those of one
    length, and `eval/tasks_truncated` is the share of all completions that were cut before they ended. Without tasks,
    the result is empty.
    """
    specs = [TaskSpec.parse(text) for text in tasks]
    asked = [(spec.name, problem(spec, seed, number, held_out=True)) for spec in specs for number in range(count)]
    if not asked:
        return {}
    # The same tokens as in training; which tokens of a completion are targets does not matter to its prompt.
    prompts = CompletionTemplate(tokenizer, "completion").encode_prompts([item.prompt for _, item in asked])
    requests = [
        GenerationRequest(number, np.asarray(ids, dtype=np.int32), seed=number) for number, ids in enumerate(prompts)
    ]
    completions = generate(requests)
    matches: dict[str, list[float]] = {}
    for (name, item), completion in zip(asked, completions, strict=True):
        text = tokenizer.decode(completion.ids_N.tolist(), skip_special_tokens=True)
        matched = exact_match(item.prompt, text, item.record(name))
        for key in (f"{EXACT_MATCH}/{name}", f"{EXACT_MATCH}/{name}/length_{item.length}"):
            matches.setdefault(key, []).append(matched)
    truncated = sum(completion.finish == "length" for completion in completions) / len(completions)
    return {key: float(np.mean(values)) for key, values in matches.items()} | {TRUNCATED: truncated}
