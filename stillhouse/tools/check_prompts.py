"""The rows of `stillhouse check` about prompts and completions, and about the user's functions for them.

If this job generates the completions, the step of the check calls rewards, environments and tools. If servers
generate them, `function_rows` calls each of these functions once, so that a failing function is found before the run.
In both cases, `function_rows` calls the functions of evaluations once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.config.section import text_list
from stillhouse.display import enumerated, escaped
from stillhouse.loops.greedy_evaluation import greedy_evaluation
from stillhouse.loops.prompt_evaluation import completed
from stillhouse.loops.rollout_records import equal_rewards, sample_record
from stillhouse.loops.rollouts import require_end_of_turns
from stillhouse.loops.session import Data, RolloutPlan, Session
from stillhouse.models import eos_ids
from stillhouse.output.folder import RunFolder
from stillhouse.parallel import Ranks
from stillhouse.rollout import Completion, Sample, Samples
from stillhouse.rollout.reward import mean_and_deviation
from stillhouse.rollout.rollout import errors_of_signals
from stillhouse.user_code.environment import environments
from stillhouse.user_code.functions import REWARD

#: the number of shown characters of a prompt (its end) and of a completion (its beginning)
_PROMPT, _COMPLETION = 200, 600
#: the text that rewards, environments and tools get instead of a server's completion
STAND_IN = "A completion of stillhouse check."


def prompt_rows(rollout: RolloutPlan, steps: int) -> Iterator[tuple[str, str]]:
    """Yield titles and texts of rows about the sources of prompts, and about completions from the dataset."""
    plan, sources = rollout.prompts, rollout.prompts.sources
    weights = sum(source.weight for source in sources)
    for settings, source, source_rollout in zip(rollout.sources, sources, rollout.configs, strict=False):
        share = source.weight / weights
        generated = steps * plan.prompts_per_step * share * source.share
        words = [
            f"{share:.1%} of the prompts",
            f"{generated:,.0f} with completions of the {rollout.config.writer}: "
            f"{generated / source.prompts:.2f} passes over {source.prompts:,}",
            f"temperature {source_rollout.temperature:g}",
        ]
        functions = {key: text_list(getattr(source_rollout, key)) for key in ("reward", *environments())}
        words += [f"{key} {enumerated(paths, 'and')}" for key, paths in functions.items() if paths]
        yield f"  {settings.shown_name} ", escaped(", ".join(words))
    dataset = sum(source.dataset for source in sources)
    if not dataset:
        return
    if len(sources) == 1 and plan.prompts_per_step * min(sources[0].share, 1 - sources[0].share) < 1 - 1e-6:
        yield (
            "warning",
            f"prompts of a step: {plan.prompts_per_step}; the completions of a prompt are all generated or all from "
            "the dataset, so some steps lack one of the two; raise rollout.prompts_per_step or train.tokens_per_step",
        )
    completions = sum(len(plan.from_dataset(step)) for step in range(steps))
    passes = f"from the dataset of {dataset:,} documents: {completions / dataset:.2f} passes over it"
    yield "dataset", f"{completions:,} of the completions are {passes}"


def sample_rows(data: Data, plan: RolloutPlan, samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    """Yield titles and texts of rows about the first completion of a step, and about the step's rewards."""
    if not samples:
        return
    record = sample_record(data, plan, 0, samples[0])
    facts = [data.train.documents.sources[samples[0].prompt], *record.facts]
    completion = in_brackets(data.tokenizer, samples[0].completion.ids_N, samples[0].is_generated_N)
    completion = completion if len(completion) <= _COMPLETION else f"{completion[:_COMPLETION]}…"
    prompt = record.prompt if len(record.prompt) <= _PROMPT else f"…{record.prompt[-_PROMPT:]}"
    yield ("completion", f"{', '.join(facts)}; the generated tokens are in ⟦ ⟧:\n{prompt}{completion}")
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not rewards:
        return
    mean, deviation = mean_and_deviation(rewards)
    values = f"from {min(rewards):.4g} to {max(rewards):.4g}, mean {mean:.4g}, standard deviation {deviation:.4g}"
    if share := equal_rewards(samples, plan.prompts)["equal_rewards"]:
        values += f"; {share:.0%} of the prompts have equal rewards, which are no signal for policy_gradient"
    yield "rewards", f"of {len(rewards):,} completions: {values}"


def function_rows(session: Session) -> Iterator[tuple[str, str]]:
    """Call the user's functions that the step of the check has not called. Yields titles and texts of rows.

    A collective of all processes. Raises the errors that a run would raise about these functions.
    """
    if session.rollout is not None and session.rollout.config.urls:
        require_end_of_turns(session.models, session.data, session.rollout)
        first_prompts = accumulate((source.prompts for source in session.rollout.prompts.sources), initial=0)
        for rollout, first in zip(session.rollout.configs, first_prompts, strict=False):
            if rollout.reward is not None or rollout.has_turns:
                models, data, seed = session.models, session.data, session.schedule.seed
                prompts = data.train.documents.select([first])
                engine = _StandIn(models.ranks, data.tokenizer, eos_ids(data.tokenizer, models.student))
                one_worker = rollout.model_copy(update={"workers": min(rollout.workers, 1)})
                with errors_of_signals():
                    [sample] = completed(models.ranks, data, seed, one_worker, None, prompts, engine, REWARD)
                words = "" if sample.reward is None else f" has the reward {sample.reward:.4g}"
                yield "functions", f"{STAND_IN!r} in place of a completion of {prompts.sources[0]}{words}"
    evaluation = session.schedule.eval_config
    prompts_of_one = None if evaluation.prompts is None else evaluation.prompts.model_copy(update={"count": 1})
    functions_alone: dict[str, object] = {"prompts": prompts_of_one, "tasks": [], "samples": 0}
    schedule = replace(session.schedule, eval_config=evaluation.model_copy(update=functions_alone))
    shortened = replace(session, schedule=schedule)
    with (
        TemporaryDirectory() as scratch,
        greedy_evaluation(shortened, RunFolder(Path(scratch)), kept=0) as greedy,
    ):
        if greedy is not None:
            metrics = greedy.evaluate(0, {})
            yield "evaluation", ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


class _StandIn:
    """Completes every prompt with `STAND_IN` and generates nothing, because the servers do not have the student's
    weights, and a copy of the student that generates in this job may need too much memory.
    """

    def __init__(self, ranks: Ranks, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]):
        self._ranks = ranks
        self._text, self._end = tokenizer(STAND_IN, add_special_tokens=False)["input_ids"], ends[:1]

    def complete(self, samples: Samples | None, *kinds: type[BaseException]) -> None:
        """See `JobEngine.complete`."""
        with self._ranks.shared(*kinds):
            while samples is not None and (requests := samples.next_requests()):
                for request in requests:
                    room = (request.max_new_tokens or len(self._text) + 1) - len(self._end)
                    ids_N = np.array([*self._text[:room], *self._end], dtype=np.int32)
                    zeros_N = np.zeros_like(ids_N)
                    completion = Completion(ids_N, zeros_N.astype(np.float32), zeros_N, "stop")
                    samples.inbox.put((request.number, completion))


def in_brackets(tokenizer: PreTrainedTokenizerBase, ids_N: np.ndarray, is_marked_N: np.ndarray) -> str:
    """Return the text of tokens, with the marked tokens in brackets."""
    text, tokens = "", zip(is_marked_N.tolist(), ids_N.tolist(), strict=True)
    for is_marked, stretch in groupby(tokens, key=itemgetter(0)):
        piece = tokenizer.decode([token for _, token in stretch])
        text += f"⟦{piece}⟧" if is_marked else piece
    return text
